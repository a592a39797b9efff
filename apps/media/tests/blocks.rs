//! Movies that the server's memory has no room for: viewers at different places, jumps, evicted blocks, hostile viewers, changed files.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{noise, serve};
use weft_media::client::{Dial, OpenError, ViewError, Viewer};
use weft_media::server::Server;
use weft_media::shelf::Shelf;
use weft_media::wire::{
    self, ASK_LEN, Answer, Ask, Blocks, Content, Denial, Grant, NOTICE_LEN, Refusal, Request,
};
use weft_verbs::cm::{self, ConnParam, ConnectError};
use weft_verbs::{
    Access, Cq, Device, LocalMode, Mr, Pd, Qp, QpInit, RecvWr, RemoteAddr, SendWr, Wc, WcOpcode,
    WcStatus,
};

const PATIENCE: Duration = Duration::from_secs(30);
/// Half of this are 16 blocks of 64 KiB.
const MEMORY: u64 = 2 * weft_media::blocks::LEAST;
const LEN: usize = 9_000_001;
const MODES: [LocalMode; 2] = [LocalMode::Auto, LocalMode::Off];

struct Bed {
    dir: tempfile::TempDir,
    bytes: Vec<u8>,
    addr: SocketAddr,
    server: Arc<Server>,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bytes = noise(LEN);
        std::fs::write(dir.path().join("a.mp4"), &bytes).unwrap();
        let (addr, server) = serve(dir.path(), MEMORY);
        Self {
            dir,
            bytes,
            addr,
            server,
        }
    }

    fn open(&self, mode: LocalMode) -> Viewer {
        let device = Device::builder().local(mode).open().unwrap();
        open_with(&device, &Dial::new(self.addr, None))
    }

    fn check(&self, viewer: &mut Viewer, from: usize, len: usize) {
        let got = viewer.fetch(from as u64, len).unwrap();
        assert!(got == self.bytes[from..][..len], "{from} {len}");
    }

    fn path(&self) -> std::path::PathBuf {
        Path::new(self.dir.path()).join("a.mp4")
    }
}

fn open_with(device: &Device, dial: &Dial) -> Viewer {
    let viewer = Viewer::open(device, dial, &title()).unwrap();
    let content = viewer.grant().content;
    assert!(matches!(content, Content::Blocks(_)), "{content:?}");
    viewer
}

fn title() -> Request {
    Request::Title("a.mp4".into())
}

#[test]
fn a_movie_that_does_not_fit_comes_whole_and_from_anywhere() {
    let bed = Bed::new();
    for mode in MODES {
        let device = Device::builder().local(mode).open().unwrap();
        for (from, read, depth) in [
            (0, 128 << 10, 8),
            (12_345, 8192, 16),
            (4_093, 4 << 20, 2),
            (1, 65_000, 1),
        ] {
            let dial = Dial {
                read,
                depth,
                ..Dial::new(bed.addr, None)
            };
            let mut viewer = open_with(&device, &dial);
            bed.check(&mut viewer, from, LEN - from);
            // Jumps, back as well, and to the end.
            for at in [8_000_000, 5, LEN - 1, 65_535, 3_000_000, 65_536] {
                bed.check(&mut viewer, at, (LEN - at).min(100_000));
            }
            bed.check(&mut viewer, LEN, 0);
        }
    }
    assert!(bed.server.memory_used() <= MEMORY);
}

#[test]
fn a_viewer_that_pauses_finds_its_block_gone_and_asks_again() {
    let bed = Bed::new();
    for mode in MODES {
        // The others read so often that its leases end, and its slots are taken.
        for often in (0..10).map(|n| 1 << n) {
            let mut paused = bed.open(mode);
            let mut range = paused.range(0, LEN as u64);
            let piece = range.next().unwrap().unwrap();
            let mut got = Vec::new();
            range.append(&piece, &mut got).unwrap();
            let mut other = bed.open(mode);
            (0..often).for_each(|_| bed.check(&mut other, 0, LEN));
            while let Some(piece) = range.next().unwrap() {
                range.append(&piece, &mut got).unwrap();
            }
            assert!(got == bed.bytes, "{mode:?}");
            if paused.lost_blocks() > 0 {
                break;
            }
            assert!(often < 1 << 9, "its slots are never taken");
        }
    }
}

/// Twice as many viewers as slots, each at a place of its own: no wrong byte, and all come to the end.
#[test]
fn more_viewers_than_slots_get_what_they_ask_for() {
    let bed = Bed::new();
    std::thread::scope(|scope| {
        for number in 0..32 {
            let bed = &bed;
            scope.spawn(move || {
                let mut viewer = bed.open(MODES[number % 2]);
                let from = number * (LEN / 32);
                for _ in 0..2 {
                    bed.check(&mut viewer, from, LEN / 32);
                }
            });
        }
    });
    assert!(bed.server.memory_used() <= MEMORY);
}

#[test]
fn a_file_that_is_truncated_is_denied_where_it_was_not_read_and_a_replaced_one_stays() {
    let bed = Bed::new();
    let mut viewer = bed.open(LocalMode::Off);
    bed.check(&mut viewer, 0, 1000);
    // Another file in its place: the open one is still there.
    let new = bed.dir.path().join("new");
    std::fs::write(&new, noise(LEN - 1)).unwrap();
    let old = File::options().write(true).open(bed.path()).unwrap();
    std::fs::rename(&new, bed.path()).unwrap();
    bed.check(&mut viewer, 0, LEN);
    // Truncated: what is there stays, the rest is denied.
    old.set_len(5_000_000).unwrap();
    let denied = viewer.fetch(2_000_000, 10);
    assert!(
        matches!(denied, Err(ViewError::Denied(Denial::Changed))),
        "{denied:?}"
    );
    bed.check(&mut viewer, LEN - 1000, 1000);
    // The next viewer gets the new file.
    let device = Device::open().unwrap();
    let mut next = Viewer::open(&device, &Dial::new(bed.addr, None), &title()).unwrap();
    assert_ne!(next.grant().version, viewer.grant().version);
    drop(viewer);
    let got = next.fetch(0, LEN - 1).unwrap();
    assert!(got == noise(LEN - 1));
}

/// A viewer made of work requests.
struct Hostile {
    qp: Qp,
    cq: Cq,
    inbox: Mr,
    grant: Grant,
    blocks: Blocks,
    _pd: Pd,
}

impl Hostile {
    fn new(bed: &Bed, receives: u64) -> Self {
        let device = Device::builder().local(LocalMode::Off).open().unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(4096, None).unwrap();
        let init = QpInit {
            max_send_wr: 1024,
            max_recv_wr: 1024,
            rnr: weft_verbs::Rnr::Wait,
            ..QpInit::new(&cq, &cq)
        };
        let qp = pd.create_qp(&init).unwrap();
        let inbox = pd.alloc_mr(4096, Access::LOCAL_WRITE).unwrap();
        for n in 0..receives {
            let sge = inbox.sge(n as usize % 64 * NOTICE_LEN, NOTICE_LEN);
            qp.post_recv(&[RecvWr::new(n).sge(sge)]).unwrap();
        }
        let mut param = ConnParam {
            private_data: title().encode(),
            ird: 16,
            ord: 16,
            ..ConnParam::default()
        };
        param.options.timeout = PATIENCE;
        let connection = cm::connect_qp(bed.addr, qp, &device, &param).unwrap();
        let grant = wire::decode_reply(&connection.private_data)
            .unwrap()
            .unwrap();
        let Content::Blocks(blocks) = grant.content else {
            panic!("{grant:?}");
        };
        Self {
            qp: connection.qp,
            cq,
            inbox,
            grant,
            blocks,
            _pd: pd,
        }
    }

    fn send(&self, bytes: &[u8]) {
        let send = SendWr::send(1).inline(bytes);
        self.qp.post_send_one(send).unwrap();
    }

    fn next(&self) -> Wc {
        let mut wcs = [Wc::default(); 1];
        assert_eq!(self.cq.wait(&mut wcs, Some(PATIENCE)).unwrap(), 1);
        wcs[0]
    }

    fn answer(&self) -> Answer {
        let wc = self.next();
        assert_eq!((wc.status, wc.opcode), (WcStatus::Success, WcOpcode::Recv));
        let at = wc.wr_id as usize % 64 * NOTICE_LEN;
        let bytes = self.inbox.to_vec(at, NOTICE_LEN).unwrap();
        Answer::decode(&bytes, &self.blocks).unwrap()
    }
}

#[test]
fn hostile_viewers_keep_nobody_from_watching() {
    let bed = Bed::new();
    let count = (LEN as u64).div_ceil(64 << 10);
    // They ask for all blocks over and over, and take answers or not.
    let hostile: Vec<_> = [0, 0, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024]
        .map(|receives| Hostile::new(&bed, receives))
        .into();
    for (number, viewer) in hostile.iter().enumerate() {
        for n in 0..1000 {
            viewer.send(
                &Ask {
                    block: (n + number as u64 * 7) % count,
                    ahead: n % 3 == 0,
                }
                .encode(),
            );
        }
    }
    for mode in MODES {
        bed.check(&mut bed.open(mode), 0, LEN / 20);
    }
    for viewer in &hostile[2..] {
        for _ in 0..100 {
            let place = viewer.answer().place;
            assert!(matches!(place, Ok(_) | Err(Denial::Busy)), "{place:?}");
        }
    }
    assert!(bed.server.memory_used() <= MEMORY);
}

#[test]
fn what_no_viewer_sends_is_answered_or_ends_that_connection() {
    let bed = Bed::new();
    let viewer = Hostile::new(&bed, 8);
    let count = (LEN as u64).div_ceil(64 << 10);
    for block in [count, u64::MAX, 1 << 63] {
        viewer.send(
            &Ask {
                block,
                ahead: false,
            }
            .encode(),
        );
        let denied = Err(Denial::Outside);
        assert_eq!(
            viewer.answer(),
            Answer {
                block,
                place: denied
            }
        );
    }
    viewer.send(b"short");
    assert_eq!(viewer.answer().place, Err(Denial::Outside));
    viewer.send(
        &Ask {
            block: count - 1,
            ahead: false,
        }
        .encode(),
    );
    assert!(viewer.answer().place.is_ok());
    // More than a message: a Terminate.
    viewer.send(&[0; ASK_LEN + 1]);
    assert_ne!(viewer.next().status, WcStatus::Success);

    // Past the region, and a Write into it.
    let words = bed.server.memory_used();
    for outside in [true, false] {
        let viewer = Hostile::new(&bed, 1);
        let at = if outside { words } else { 0 };
        let remote = RemoteAddr {
            addr: viewer.grant.at.addr + at,
            rkey: viewer.grant.at.rkey,
        };
        let sge = viewer.inbox.sge(0, 8);
        let request = if outside {
            SendWr::read(9, remote).sge(sge)
        } else {
            SendWr::write(9, remote).sge(sge)
        };
        viewer.qp.post_send_one(request.signaled()).unwrap();
        while viewer.next().status == WcStatus::Success {}
    }
    bed.check(&mut bed.open(LocalMode::Auto), 0, LEN);
}

#[test]
fn a_viewer_that_takes_no_blocks_is_refused() {
    let bed = Bed::new();
    let device = Device::open().unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(16, None).unwrap();
    let qp = pd.create_qp(&QpInit::new(&cq, &cq)).unwrap();
    let mut request = title().encode();
    // As kernel peers, and viewers of before.
    *request.last_mut().unwrap() = 0;
    let param = ConnParam {
        private_data: request,
        ird: 16,
        ord: 16,
        ..ConnParam::default()
    };
    match cm::connect_qp(bed.addr, qp, &device, &param) {
        Err(ConnectError::Rejected { private_data }) => {
            let reply = wire::decode_reply(&private_data);
            assert_eq!(reply, Ok(Err(Refusal::NoRoom)));
        }
        other => panic!("{:?}", other.err()),
    }
    // With less memory than blocks need, nobody is let in.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.mp4"), noise(3_000_000)).unwrap();
    let shelf = Shelf::new(
        &device,
        File::open(dir.path()).unwrap().into(),
        MEMORY - 10_000,
    );
    assert_eq!(shelf.load("a.mp4").err(), Some(Refusal::NoRoom));
    let unknown = Viewer::open(
        &device,
        &Dial::new(bed.addr, None),
        &Request::Title("b.mp4".into()),
    );
    assert!(matches!(
        unknown,
        Err(OpenError::Refused(Refusal::NoSuchTitle))
    ));
}
