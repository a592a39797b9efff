//! Masters and workers without manners: nobody else notices.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::common::{Bed, config, has_gcc, long_text, tls, until, worker};
use weft_cc::ipc::Answer;
use weft_cc::options::Language;
use weft_cc::wire::{
    End, Entry, Job, Node, Output, PROTOCOL, Pull, Region, Report, Request, Searched, Status, Tree,
    Verdict,
};
use weft_cc::worker::{Config, sandbox};
use weft_cc::{Endpoint, find_program};
use weft_verbs::cm::{self, ConnParam};
use weft_verbs::{Access, Cq, Device, Mr, Qp, QpInit, RecvWr, SendWr, Wc, WcStatus};

/// A peer without manners: messages as it likes.
struct Peer {
    qp: Qp,
    cq: Cq,
    mr: Mr,
}

impl Peer {
    fn objects(device: &Device) -> (Qp, Cq, Mr) {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(64, None).unwrap();
        let mr = pd
            .alloc_mr(
                1 << 20,
                Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE,
            )
            .unwrap();
        let qp = pd.create_qp(&QpInit::new(&cq, &cq)).unwrap();
        for i in 0..4 {
            qp.post_recv(&[RecvWr::new(i).sge(mr.sge(i as usize * 65_536, 65_536))])
                .unwrap();
        }
        (qp, cq, mr)
    }

    fn param(slots: u16) -> ConnParam {
        ConnParam {
            private_data: PROTOCOL.hello(Status::Ok, slots),
            tls: Some(tls()),
            ..ConnParam::default()
        }
    }

    fn connect(device: &Device, to: SocketAddr) -> Self {
        let (qp, cq, mr) = Self::objects(device);
        let param = Self::param(0);
        let qp = cm::connect_qp(to, qp, device, &param).unwrap().qp;
        Self { qp, cq, mr }
    }

    /// The beginning of its memory.
    fn region(&self, len: u64) -> Region {
        Region {
            rkey: self.mr.rkey(),
            addr: 0,
            len,
        }
    }

    fn send(&self, bytes: &[u8]) {
        let at = 512 << 10;
        self.mr.write(at, bytes).unwrap();
        self.qp
            .post_send_one(SendWr::send(99).sge(self.mr.sge(at, bytes.len())))
            .unwrap();
    }

    /// The next message; `None` at the end of the connection.
    fn message(&self) -> Option<Vec<u8>> {
        let mut wc = [Wc::default(); 1];
        let end = Instant::now() + Duration::from_mins(1);
        loop {
            assert!(Instant::now() < end, "nothing comes");
            if self.cq.wait(&mut wc, Some(Duration::from_secs(1))).unwrap() == 0 {
                continue;
            }
            if wc[0].status != WcStatus::Success {
                return None;
            }
            if wc[0].wr_id < 4 {
                let at = wc[0].wr_id as usize * 65_536;
                let bytes = self.mr.to_vec(at, wc[0].byte_len as usize).unwrap();
                self.qp
                    .post_recv(&[RecvWr::new(wc[0].wr_id).sge(self.mr.sge(at, 65_536))])
                    .unwrap();
                return Some(bytes);
            }
        }
    }
}

#[test]
fn too_many_connections_are_turned_away_and_memory_is_limited() {
    if !has_gcc() {
        return;
    }
    let (_worker, at) = worker(Config {
        max_connections: 1,
        ..config()
    });
    let (first, second) = (Bed::new(1 << 20), Bed::new(1 << 20));
    assert!(matches!(
        first.outcome(&[&at], b"int x;\n").0,
        Answer::Done { .. }
    ));
    // The first daemon keeps its connection.
    let why = second.here(&[&at], b"int x;\n");
    assert!(why.contains("turned the connection away"), "{why}");
    drop(first);
    let (_small, at) = worker(Config {
        memory: 32 << 20,
        ..config()
    });
    let third = Bed::new(1 << 20);
    let why = third.here(&[&at], &long_text());
    assert!(why.contains("failed on a worker"), "{why}");
}

fn gcc() -> [u8; 32] {
    let gcc = find_program("gcc").unwrap();
    let path = std::env::var("PATH").unwrap();
    weft_cc::digest::Digests::default()
        .of(&gcc, Language::C, &path)
        .unwrap()
}

fn job(peer: &Peer, digest: [u8; 32]) -> Job {
    Job {
        id: 1,
        cxx: false,
        source: peer.region(100),
        room: peer.region(100),
        digest,
        driver: "gcc".into(),
        locale: String::new(),
        cwd: "/".into(),
        name: "a.c".into(),
        args: vec!["-c".into()],
        beside: String::new(),
        pull: None,
        tree: None,
    }
}

#[test]
fn headers_without_an_end_do_not_keep_a_slot() {
    if !has_gcc() || sandbox::level().files == sandbox::Files::Free {
        return;
    }
    let (worker, _at) = worker(Config {
        time_limit: Duration::from_secs(1),
        ..config()
    });
    let device = Device::open().unwrap();
    let peer = Peer::connect(&device, worker.local_addr());
    let job = Job {
        source: Region::default(),
        name: "d/a.c".into(),
        pull: Some(Pull::default()),
        ..job(&peer, gcc())
    };
    peer.send(&Request::Job(job).encode().unwrap());
    // The source includes itself, by a longer name each time.
    let contents = |path: &str| match path {
        "/" => (Node::Directory, &b"d\0"[..]),
        "/d" => (Node::Directory, &b"a.c\0"[..]),
        _ => (Node::File, &b"#include \"../d/a.c\"\n"[..]),
    };
    let end = loop {
        match Report::decode(&peer.message().unwrap()).unwrap() {
            Report::Need { id, paths } => {
                let mut all = Vec::new();
                let entry = |path: &String| {
                    let (node, bytes) = contents(path);
                    let at = all.len() as u64;
                    all.extend(bytes);
                    Entry {
                        node,
                        number: 1,
                        mtime: 1,
                        at,
                        len: bytes.len() as u64,
                        digest: *blake3::hash(bytes).as_bytes(),
                    }
                };
                let entries = paths.iter().map(entry).collect();
                // Behind the places of messages.
                let at = 768 << 10;
                peer.mr.write(at, &all).unwrap();
                let region = Region {
                    addr: at as u64,
                    ..peer.region(all.len() as u64)
                };
                let files = Request::Files {
                    id,
                    region,
                    entries,
                };
                peer.send(&files.encode().unwrap());
            }
            Report::End(end) => break end,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(end.verdict, Verdict::Limit, "{}", end.reason);
    assert!(end.reason.contains("took more than 1 s"), "{}", end.reason);
}

#[test]
fn hostile_masters_are_refused() {
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let (worker, at) = worker(config());
    let device = Device::open().unwrap();
    let connect = || Peer::connect(&device, worker.local_addr());
    let digest = [0; 32];
    let job = |peer: &Peer| job(peer, digest);
    // What may not be asked is refused, and the connection goes on.
    let peer = connect();
    for (change, verdict) in [
        (
            Box::new(|job: &mut Job| job.args.push("-fplugin=/tmp/x.so".into()))
                as Box<dyn Fn(&mut Job)>,
            Verdict::Refused,
        ),
        (
            Box::new(|job: &mut Job| job.args.push("@/etc/passwd".into())),
            Verdict::Refused,
        ),
        // gcc would read the text as its arguments.
        (
            Box::new(|job: &mut Job| job.name = "@a/../a/../f".into()),
            Verdict::Refused,
        ),
        (
            Box::new(|job: &mut Job| job.name = "a/../-f.c".into()),
            Verdict::Refused,
        ),
        (
            Box::new(|job: &mut Job| job.args.push("--param=@a.c".into())),
            Verdict::Refused,
        ),
        (
            Box::new(|job: &mut Job| job.beside = "@a.c".into()),
            Verdict::Refused,
        ),
        (
            Box::new(|job: &mut Job| job.beside = "a/@a.c".into()),
            Verdict::Refused,
        ),
        (
            Box::new(|job: &mut Job| job.locale = "../../x".into()),
            Verdict::Refused,
        ),
        (
            Box::new(|job: &mut Job| job.source.len = 1 << 40),
            Verdict::Limit,
        ),
        (
            Box::new(|job: &mut Job| job.driver = "/bin/sh".into()),
            Verdict::Environment,
        ),
        (Box::new(|_: &mut Job| {}), Verdict::Environment),
    ] {
        let mut job = job(&peer);
        change(&mut job);
        peer.send(&Request::Job(job).encode().unwrap());
        let Report::End(end) = Report::decode(&peer.message().unwrap()).unwrap() else {
            panic!()
        };
        assert_eq!(end.verdict, verdict, "{}", end.reason);
    }
    // Nonsense, room that nobody asked for, and a key that is nobody's end the connection.
    let room = Request::Room {
        id: 1,
        room: Region::default(),
    }
    .encode()
    .unwrap();
    for bytes in [vec![0xff; 40], vec![1], room] {
        let peer = connect();
        peer.send(&bytes);
        assert_eq!(peer.message(), None);
    }
    let peer = connect();
    let mut stale = Job {
        digest: gcc(),
        ..job(&peer)
    };
    stale.source.rkey ^= 0x5a5a_5a00;
    peer.send(&Request::Job(stale).encode().unwrap());
    assert_eq!(peer.message(), None);
    // Nobody else notices.
    assert!(matches!(
        bed.outcome(&[&at], b"int x;\n").0,
        Answer::Done { .. }
    ));
    until("no compiler is left", || worker.running() == 0);
}

#[test]
fn hostile_workers_cost_no_object() {
    if !has_gcc() {
        return;
    }
    let device = Device::open().unwrap();
    let listener =
        cm::Listener::bind(&device, "127.0.0.1:0".parse().unwrap(), 16, &Peer::param(1)).unwrap();
    let at = Endpoint {
        host: "127.0.0.1".into(),
        port: listener.local_addr().port(),
    };
    let end = |outputs: Vec<(Output, u64, u64)>| {
        move |id| {
            Report::End(End {
                outputs: outputs.clone(),
                ..End::new(id, Verdict::Done, "")
            })
            .encode()
        }
    };
    let answers: Vec<Box<dyn Fn(u32) -> Vec<u8> + Send>> = vec![
        Box::new(|_| vec![0x77; 50]),
        Box::new(end(vec![(Output::Object, 0, u64::MAX / 2)])),
        Box::new(end(vec![(Output::Object, u64::MAX - 5, 5)])),
        Box::new(end(vec![])),
        Box::new(end(vec![(Output::Object, 0, 0)])),
        Box::new(|id| Report::End(End::new(id + 1, Verdict::Done, "")).encode()),
    ];
    let count = answers.len();
    let hostile = std::thread::spawn(move || {
        for answer in answers {
            let request = listener.next_request(Some(Duration::from_mins(1))).unwrap();
            let (qp, cq, mr) = Peer::objects(&device);
            let conn = request.accept(qp, &Peer::param(1)).unwrap();
            let peer = Peer {
                qp: conn.qp,
                cq,
                mr,
            };
            let Ok(Request::Job(job)) = Request::decode(&peer.message().unwrap()) else {
                panic!()
            };
            peer.send(&answer(job.id));
            assert_eq!(peer.message(), None);
        }
    });
    for _ in 0..count {
        // A daemon of its own: a worker that failed gets no jobs for a while.
        let bed = Bed::new(1 << 20);
        let why = bed.here(&[&at], b"int x;\n");
        assert!(why.contains(&at.to_string()), "{why}");
        assert_eq!(bed.status().done, 0);
    }
    hostile.join().unwrap();
}

#[test]
fn a_worker_that_stays_busy_does_not_hold_a_build() {
    if !has_gcc() {
        return;
    }
    let device = Device::open().unwrap();
    let hello = || Peer::param(1);
    let listener =
        cm::Listener::bind(&device, "127.0.0.1:0".parse().unwrap(), 16, &hello()).unwrap();
    let at = Endpoint {
        host: "127.0.0.1".into(),
        port: listener.local_addr().port(),
    };
    let busy = std::thread::spawn(move || {
        let request = listener.next_request(Some(Duration::from_mins(1))).unwrap();
        let (qp, cq, mr) = Peer::objects(&device);
        let conn = request.accept(qp, &hello()).unwrap();
        let peer = Peer {
            qp: conn.qp,
            cq,
            mr,
        };
        let mut times = 0;
        while let Some(bytes) = peer.message() {
            let Ok(Request::Job(job)) = Request::decode(&bytes) else {
                panic!()
            };
            let end = End::new(job.id, Verdict::Busy, "later");
            peer.send(&Report::End(end).encode());
            times += 1;
        }
        times
    });
    let bed = Bed::patient(1 << 20, Duration::from_secs(1));
    let why = bed.here(&[&at], b"int x;\n");
    assert!(why.contains("in time") || why.contains("too long"), "{why}");
    drop(bed);
    assert!(busy.join().unwrap() > 0);
}

/// A master of clang, whose files are none, or lie elsewhere.
#[test]
fn hostile_trees_are_refused() {
    let Some(clang) = find_program("clang") else {
        return eprintln!("skipped: there is no clang (Debian's package clang)");
    };
    let path = std::env::var("PATH").unwrap();
    let digests = weft_cc::digest::Digests::default();
    let digest = digests.of(&clang, Language::C, &path).unwrap();
    let (worker, _at) = worker(config());
    let device = Device::open().unwrap();
    let peer = Peer::connect(&device, worker.local_addr());
    let entry = |kind: u8, path: &str, rest: &[u8]| {
        let len = (path.len() as u16).to_be_bytes();
        [&[kind][..], &len, path.as_bytes(), rest].concat()
    };
    let file = |path: &str, text: &str| {
        let len = (text.len() as u64).to_be_bytes();
        entry(0, path, &[&len[..], text.as_bytes()].concat())
    };
    let outside = tempfile::tempdir().unwrap();
    let victim = format!("{}/victim", outside.path().display());
    let up = format!("{}{victim}", "/..".repeat(40));
    let tree = || Tree {
        cpp: Vec::new(),
        searched: Vec::new(),
        system: true,
    };
    let option = |option: &str, value: &str| {
        let mut tree = tree();
        tree.cpp = vec![option.into(), value.into()];
        Some(tree)
    };
    let searched = |dir: &str| {
        let dir = dir.into();
        let searched = vec![Searched { c: true, dir }];
        Some(Tree { searched, ..tree() })
    };
    let ask = |text: &[u8], tree: Option<Tree>, change: &dyn Fn(&mut Job)| {
        // Behind the places of messages.
        let at = 768 << 10;
        peer.mr.write(at, text).unwrap();
        let mut job = Job {
            source: Region {
                addr: at as u64,
                ..peer.region(text.len() as u64)
            },
            room: Region {
                addr: 800 << 10,
                ..peer.region(100 << 10)
            },
            driver: "clang".into(),
            cwd: "/w".into(),
            tree,
            ..job(&peer, digest)
        };
        change(&mut job);
        peer.send(&Request::Job(job).encode().unwrap());
        match Report::decode(&peer.message().unwrap()).unwrap() {
            Report::End(end) => end,
            other => panic!("{other:?}"),
        }
    };
    let nothing = |_: &mut Job| ();
    let good = file("/w/a.c", "int x;\n");
    // The first one shows that the others are refused for what they are.
    let end = ask(&good, Some(tree()), &nothing);
    assert_eq!(end.verdict, Verdict::Done, "{}", end.reason);
    for bad in [
        file(&up, "x"),
        file("w/a.c", "x"),
        entry(1, "/w/a.c", &7_u32.to_be_bytes()),
        [&good[..], &good].concat(),
        [&good[..], b"rest"].concat(),
        entry(0, "/w/a.c", &u64::MAX.to_be_bytes()),
        entry(9, "/w", b""),
    ] {
        let end = ask(&bad, Some(tree()), &nothing);
        // That a file is there already is said by the system.
        let verdict = if bad == [&good[..], &good].concat() {
            Verdict::Trouble
        } else {
            Verdict::Refused
        };
        assert_eq!(end.verdict, verdict, "{}", end.reason);
    }
    for (tree, change) in [
        (None, &nothing as &dyn Fn(&mut Job)),
        (option("-fplugin=/tmp/x.so", "x"), &nothing),
        (option("-I", "@/etc/passwd"), &nothing),
        (option("-o", &victim), &nothing),
        (option("-D", ""), &nothing),
        (option("-I", "/.."), &nothing),
        (option("-include", "../../x"), &nothing),
        (searched("@opts"), &nothing),
        (searched("include"), &nothing),
        (searched("-load"), &nothing),
        (searched("/usr/../../include"), &nothing),
        (Some(tree()), &|job| job.name = "../../etc/passwd".into()),
        (Some(tree()), &|job| job.driver = "gcc".into()),
        (Some(tree()), &|job| job.cwd = "/w/../..".into()),
        (Some(tree()), &|job| job.pull = Some(Pull::default())),
        (Some(tree()), &|job| job.name = "-o/tmp/x".into()),
        (Some(tree()), &|job| job.args.push("-Xclang".into())),
        (Some(tree()), &|job| {
            job.args.push("-fprofile-use=/tmp/x".into());
        }),
    ] {
        let end = ask(&good, tree, change);
        assert_eq!(end.verdict, Verdict::Refused, "{}", end.reason);
    }
    // A source with a name of this machine, and one that is not among the files.
    for name in [&victim[..], "none.c"] {
        let end = ask(&good, Some(tree()), &|job| job.name = name.into());
        assert_eq!(end.verdict, Verdict::Failed, "{name}: {}", end.reason);
    }
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
}
