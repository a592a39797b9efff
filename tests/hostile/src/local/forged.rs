//! Meetings with something wrong in them: messages, descriptors, order, times.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, memfd_create};

use crate::meeting::{DOMAIN, Meeting, RING};
use crate::network::startup::LIMIT;
use crate::network::{SLACK, is_cut};
use crate::peer::request;
use crate::report::Report;
use crate::rng::Rng;
use crate::shared::files::{
    ARENA, Files, SEALS, TABLE, memory, read_only, segment_head, table_head,
};
use crate::shared::unix_socket::{Cell, UnixSocket, VERSION, kind, message};
use crate::target::Target;

type Outcome = Result<(), String>;

/// What a visitor may take to say Hello.
const HELLO: Duration = Duration::from_millis(500);

/// All of them.
pub fn run(target: &Target, seed: u64, report: &mut Report) {
    let mut rng = Rng::new(seed);
    for (which, part) in [
        "segment",
        "liveness",
        "table",
        "arena rw",
        "arena ro",
        "private arena",
    ]
    .into_iter()
    .enumerate()
    {
        for (name, file) in forged(which) {
            let outcome = match file {
                Ok(file) => with_file(target, &mut rng, which, &file),
                // Nothing that this kernel has.
                Err(_) => continue,
            };
            report.case(format!("{name} for the {part}"), outcome);
        }
    }
    for (name, segment) in segments() {
        let outcome = segment
            .map_err(|e| e.to_string())
            .and_then(|file| with_file(target, &mut rng, 0, &file.into()));
        report.case(format!("a segment {name}"), outcome);
    }
    for count in [0, 1, 2, 4, 5, 7, 8, 16, 64, 253] {
        report.case(
            format!("a Join with {count} descriptors"),
            with_count(target, &mut rng, count),
        );
    }
    for (name, lie) in hellos() {
        report.case(name, after_hello(target, &mut rng, lie));
    }
    for (name, order) in orders() {
        report.case(name, order(target, &mut rng));
    }
    report.case("visitors that say nothing", silent(target));
}

/// Whatever the lie was, the victim answers by TCP within the limit.
fn answers(meeting: Meeting) -> Outcome {
    let mut peer = meeting.peer;
    let start = Instant::now();
    peer.start(&request(&meeting.target.hello()))
        .map_err(|e| format!("not answered: {e}"))?;
    if start.elapsed() > LIMIT + SLACK {
        return Err(format!("answered after {:?}", start.elapsed()));
    }
    Ok(())
}

/// A meeting up to its Welcome.
fn welcomed(target: &Target, rng: &mut Rng) -> Result<Meeting, String> {
    let text = |e: io::Error| format!("an honest meeting failed: {e}");
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let mut meeting = Meeting::begin(*target, rng).map_err(text)?;
        match meeting.hello().and_then(|()| meeting.welcome()) {
            Ok(()) => return Ok(meeting),
            // Too many visitors at a time.
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            Err(e) => return Err(text(e)),
        }
    }
}

/// A meeting whose descriptors are right but for this one.
fn with_file(target: &Target, rng: &mut Rng, which: usize, file: &OwnedFd) -> Outcome {
    let files = Files::new(RING, &DOMAIN).map_err(|e| e.to_string())?;
    let meeting = welcomed(target, rng)?;
    let mut fds = files.all();
    fds[which] = file.as_fd();
    meeting.join(&fds, true).map_err(|e| e.to_string())?;
    answers(meeting)
}

fn with_count(target: &Target, rng: &mut Rng, count: usize) -> Outcome {
    let files = Files::new(RING, &DOMAIN).map_err(|e| e.to_string())?;
    let meeting = welcomed(target, rng)?;
    let all = files.all();
    let fds: Vec<BorrowedFd<'_>> = (0..count).map(|n| all[n % all.len()]).collect();
    meeting.join(&fds, true).map_err(|e| e.to_string())?;
    answers(meeting)
}

/// Files that cannot stand for this part.
pub fn forged(which: usize) -> Vec<(&'static str, io::Result<OwnedFd>)> {
    let len = match which {
        0 => 4096 + 2 * u64::from(RING),
        1 => 4096,
        2 => TABLE,
        _ => ARENA,
    };
    let begins = match which {
        0 => segment_head(1, RING),
        2 => table_head(&DOMAIN),
        _ => vec![1; 16],
    };
    let file = |len, seals| memory(&begins, len, seals).map(OwnedFd::from);
    let open = |path: &str, flags| Ok(rustix::fs::open(path, flags, Mode::empty())?);
    let truncated = |len| {
        let file = memory(&begins, len, SealFlags::empty())?;
        file.set_len(0)?;
        Ok(OwnedFd::from(file))
    };
    vec![
        ("a file without seals", file(len, SealFlags::empty())),
        ("a file that may shrink", file(len, SealFlags::GROW)),
        ("a file that was truncated", truncated(len)),
        ("an empty file", memory(&[], 0, SEALS).map(OwnedFd::from)),
        ("a file of one page", file(4096, SEALS)),
        ("a file that is a byte short", file(len - 1, SEALS)),
        ("a file of half the length", file(len / 2, SEALS)),
        ("a file that is a page too long", file(len + 4096, SEALS)),
        ("a file of 4 EiB", file(1 << 62, SEALS)),
        (
            "a file of zeros",
            memory(&[], len, SEALS).map(OwnedFd::from),
        ),
        (
            "a file of ones",
            memory(&[0xff; 4096], len, SEALS).map(OwnedFd::from),
        ),
        (
            "a file for reading",
            memory(&begins, len, SEALS)
                .and_then(|f| read_only(&f))
                .map(OwnedFd::from),
        ),
        ("a file on a disk", on_disk(&begins, len.min(1 << 24))),
        ("a file of huge pages", huge()),
        ("/dev/zero", open("/dev/zero", OFlags::RDWR)),
        ("/dev/null", open("/dev/null", OFlags::RDWR)),
        ("a folder", open("/tmp", OFlags::RDONLY)),
        ("a name", open("/dev/zero", OFlags::PATH)),
        ("our memory", open("/proc/self/mem", OFlags::RDWR)),
        ("a pipe", Ok(rustix::pipe::pipe().expect("descriptors").0)),
    ]
}

fn on_disk(begins: &[u8], len: u64) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::TMPFILE;
    let file = File::from(rustix::fs::open("/tmp", flags, Mode::RUSR | Mode::WUSR)?);
    file.set_len(len)?;
    std::os::unix::fs::FileExt::write_all_at(&file, begins, 0)?;
    Ok(file.into())
}

fn huge() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let file = File::from(memfd_create("huge", flags)?);
    file.set_len(2 << 20)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file.into())
}

/// Segments that are sealed as they should be, with heads that do not fit.
fn segments() -> Vec<(String, io::Result<File>)> {
    let mut all = Vec::new();
    for version in [0, 2, !0] {
        let file = memory(
            &segment_head(version, RING),
            4096 + 2 * u64::from(RING),
            SEALS,
        );
        all.push((format!("of version {version}"), file));
    }
    for ring in [
        0_u32,
        1,
        8,
        4096,
        8192,
        (64 << 10) + 8,
        3 << 14,
        32 << 20,
        1 << 31,
        !0,
    ] {
        let right = 4096 + 2 * u64::from(ring);
        for len in [right, 4096 + 2 * u64::from(RING), 4096 + u64::from(ring)] {
            let file = memory(&segment_head(1, ring), len, SEALS);
            all.push((format!("with rings of {ring} bytes, {len} long"), file));
        }
    }
    all
}

/// What is sent in place of a Hello.
type Packet = fn(&Meeting, &mut Rng) -> Vec<u8>;

/// Packets in place of a Hello. What each is to say besides comes with it.
fn hellos() -> Vec<(String, Packet)> {
    fn body(meeting: &Meeting) -> Vec<u8> {
        let from = meeting.peer.tcp.local_addr().expect("connected");
        meeting.cell.hello(from)
    }
    fn with_address(meeting: &Meeting, addr: u64) -> Vec<u8> {
        let mut body = body(meeting);
        body[..8].copy_from_slice(&addr.to_le_bytes());
        message(VERSION, kind::HELLO, &body)
    }
    let lies: [(&str, Packet); 22] = [
        ("an empty packet", |_, _| Vec::new()),
        ("one byte", |_, _| vec![1]),
        ("half a head", |_, _| b"weft".to_vec()),
        ("a head alone", |_, _| message(VERSION, kind::HELLO, &[])),
        ("another magic number", |m, _| {
            let mut hello = message(VERSION, kind::HELLO, &body(m));
            hello[0] = b'W';
            hello
        }),
        ("version 0", |m, _| message(0, kind::HELLO, &body(m))),
        ("version 1", |m, _| message(1, kind::HELLO, &body(m))),
        ("version 65,535", |m, _| message(!0, kind::HELLO, &body(m))),
        ("a Welcome", |m, _| {
            message(VERSION, kind::WELCOME, &body(m))
        }),
        ("an Attach", |m, _| message(VERSION, kind::ATTACH, &body(m))),
        ("a Join", |m, _| message(VERSION, kind::JOIN, &body(m))),
        ("a Decline", |_, _| {
            message(VERSION, kind::DECLINE, b"no\x1b[31m")
        }),
        ("kind 0", |m, _| message(VERSION, 0, &body(m))),
        ("kind 65,535", |m, _| message(VERSION, !0, &body(m))),
        ("a byte less", |m, _| {
            let body = body(m);
            message(VERSION, kind::HELLO, &body[..body.len() - 1])
        }),
        ("257 bytes", |m, _| {
            let mut hello = message(VERSION, kind::HELLO, &body(m));
            hello.resize(257, 0);
            hello
        }),
        ("100,000 bytes", |_, rng| rng.bytes(100_000)),
        ("a cell at 0", |m, _| with_address(m, 0)),
        ("a cell in the kernel", |m, _| {
            with_address(m, 0xffff_8000_0000_0000)
        }),
        ("a cell at the end of all", |m, _| with_address(m, !0 - 8)),
        ("the CRC of another secret", |m, _| {
            let mut body = body(m);
            body[24] ^= 1;
            message(VERSION, kind::HELLO, &body)
        }),
        ("a connection that there is not", |m, _| {
            let mut body = body(m);
            body[28..46].copy_from_slice(&[0x5a; 18]);
            message(VERSION, kind::HELLO, &body)
        }),
    ];
    lies.into_iter()
        .map(|(name, lie)| (format!("{name} for a Hello"), lie))
        .collect()
}

fn after_hello(target: &Target, rng: &mut Rng, lie: Packet) -> Outcome {
    let text = |e: io::Error| e.to_string();
    let meeting = Meeting::begin(*target, rng).map_err(text)?;
    let packet = lie(&meeting, rng);
    let zero = File::open("/dev/zero").map_err(text)?;
    // With descriptors that nobody wants, too.
    let fds = vec![zero.as_fd(); packet.len() % 3 * 4];
    match meeting.socket.send(&packet, &fds) {
        Ok(()) => {}
        Err(e) if is_cut(&e) || e.kind() == ErrorKind::WouldBlock => {}
        // Longer than a packet can be.
        Err(_) if packet.len() > 4096 => {}
        Err(e) => return Err(e.to_string()),
    }
    // A Welcome, a Decline or the end, for whoever waits.
    let _ = meeting.socket.packet(HELLO + SLACK);
    answers(meeting)
}

type Order = fn(&Target, &mut Rng) -> Outcome;

/// Messages in another order, or none.
fn orders() -> Vec<(&'static str, Order)> {
    fn files() -> Result<Files, String> {
        Files::new(RING, &DOMAIN).map_err(|e| e.to_string())
    }
    fn begin(target: &Target, rng: &mut Rng) -> Result<Meeting, String> {
        Meeting::begin(*target, rng).map_err(|e| e.to_string())
    }
    vec![
        ("a Join and no Hello", |target, rng| {
            let meeting = begin(target, rng)?;
            let _ = meeting.join(&files()?.all(), true);
            answers(meeting)
        }),
        ("a Hello and no Join", |target, rng| {
            answers(welcomed(target, rng)?)
        }),
        ("a socket that is left at once", |target, rng| {
            let mut meeting = begin(target, rng)?;
            meeting.socket = UnixSocket::knock(target.addr).map_err(|e| e.to_string())?;
            answers(meeting)
        }),
        ("a socket that is left after the Welcome", |target, rng| {
            let mut meeting = welcomed(target, rng)?;
            meeting.socket = UnixSocket::knock(target.addr).map_err(|e| e.to_string())?;
            answers(meeting)
        }),
        ("a hundred Hellos", |target, rng| {
            let meeting = begin(target, rng)?;
            for _ in 0..100 {
                let _ = meeting.hello();
            }
            answers(meeting)
        }),
        ("a Join twice", |target, rng| {
            let meeting = welcomed(target, rng)?;
            let files = files()?;
            for _ in 0..2 {
                let _ = meeting.join(&files.all(), true);
            }
            answers(meeting)
        }),
        ("fifty Joins", |target, rng| {
            let meeting = welcomed(target, rng)?;
            let files = files()?;
            for _ in 0..50 {
                let _ = meeting.join(&files.all(), true);
            }
            answers(meeting)
        }),
        ("a Join with a wrong proof", |target, rng| {
            let mut meeting = welcomed(target, rng)?;
            meeting.proof = [0x77; 16];
            let _ = meeting.join(&files()?.all(), true);
            answers(meeting)
        }),
        ("a Join without a proof", |target, rng| {
            let mut meeting = welcomed(target, rng)?;
            meeting.proof = [0; 16];
            let _ = meeting.join(&files()?.all(), true);
            answers(meeting)
        }),
        ("a Join, and the socket is left", |target, rng| {
            let mut meeting = welcomed(target, rng)?;
            let _ = meeting.join(&files()?.all(), true);
            meeting.socket = UnixSocket::knock(target.addr).map_err(|e| e.to_string())?;
            answers(meeting)
        }),
        ("a cell that does not show the challenge", |target, rng| {
            let meeting = welcomed(target, rng)?;
            meeting.cell.show(&[0; 16]);
            let _ = meeting.join(&files()?.all(), true);
            answers(meeting)
        }),
        ("the request before the Join", |target, rng| {
            let mut meeting = welcomed(target, rng)?;
            let request = request(&target.hello());
            let _ = meeting.peer.raw(&request.bytes());
            let _ = meeting.join(&files()?.all(), true);
            match meeting.peer.startup_frame() {
                Err(e) if !is_cut(&e) => Err(e.to_string()),
                _ => Ok(()),
            }
        }),
        (
            "files that shrink when they have been sent",
            |target, rng| {
                let mut parts = files()?;
                let text = |e: io::Error| e.to_string();
                let table =
                    memory(&table_head(&DOMAIN), TABLE, SealFlags::empty()).map_err(text)?;
                parts.table = read_only(&table).map_err(text)?.into();
                let meeting = welcomed(target, rng)?;
                let _ = meeting.join(&parts.all(), true);
                table.set_len(0).map_err(text)?;
                answers(meeting)
            },
        ),
        ("somebody else's connection", |target, rng| {
            let other = begin(target, rng)?;
            let meeting = begin(target, rng)?;
            let from = other.peer.tcp.local_addr().map_err(|e| e.to_string())?;
            let body = meeting.cell.hello(from);
            let _ = meeting
                .socket
                .send(&message(VERSION, kind::HELLO, &body), &[]);
            let _ = meeting.socket.packet(HELLO);
            let _ = meeting.join(&files()?.all(), true);
            answers(meeting)?;
            answers(other)
        }),
        ("a cell of another process", |target, rng| {
            // Its address means nothing there, or something that it is not.
            let meeting = begin(target, rng)?;
            let cell = Cell::new(rng);
            let mut body = cell.hello(meeting.peer.tcp.local_addr().map_err(|e| e.to_string())?);
            body[..8].copy_from_slice(&0x0040_0000_u64.to_le_bytes());
            let _ = meeting
                .socket
                .send(&message(VERSION, kind::HELLO, &body), &[]);
            let _ = meeting.socket.packet(HELLO);
            answers(meeting)
        }),
    ]
}

/// Visitors without a word: each is shown out in time, and another gets in.
fn silent(target: &Target) -> Outcome {
    let text = |e: io::Error| format!("cannot knock: {e}");
    let mut visitors = Vec::new();
    for _ in 0..100 {
        visitors.push((
            UnixSocket::knock(target.addr).map_err(text)?,
            Instant::now(),
        ));
    }
    for (socket, since) in visitors {
        loop {
            let left = (HELLO + SLACK).saturating_sub(since.elapsed());
            match socket.packet(left) {
                Ok(None) => break,
                Ok(Some(_)) => {}
                Err(e) if is_cut(&e) => break,
                Err(_) => return Err(format!("still there after {:?}", since.elapsed())),
            }
        }
    }
    Ok(())
}
