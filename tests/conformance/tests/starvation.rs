//! Processes without free descriptors: new connections stay on TCP or fail with a reason, nothing hangs or leaks, and existing connections continue.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};
use weft_conformance::bed::{Bed, Half, Memory, Setup, take};
use weft_conformance::gauge::{descriptors, given_back};
use weft_conformance::twin::{Pair, Twin};
use weft_conformance::victim::Bystander;
use weft_conformance::waits::alone;
use weft_verbs::cm::{ConnParam, ConnectError, Connection, Listener, connect_qp};
use weft_verbs::{Cq, Device, LinkOptions, LocalMode, Qp, QpInit, RecvWr, SendWr, WcStatus};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// The time limit of connecting: more than the wait at a door.
const TIME: Duration = Duration::from_millis(700);
/// The same on a busy machine.
const LONG: Duration = Duration::from_secs(4);

fn param(tag: u8) -> ConnParam {
    ConnParam {
        private_data: vec![tag],
        options: LinkOptions {
            timeout: TIME,
            peer_to_peer: false,
            ..LinkOptions::default()
        },
        ..ConnParam::default()
    }
}

/// The limit that leaves a process `spare` free descriptors.
fn limit(process: &str, spare: usize) -> Rlimit {
    let dir = format!("/proc/{process}/fd");
    let names = std::fs::read_dir(&dir).expect("procfs").flatten();
    let mut taken: Vec<u64> = names
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    // The descriptor of the listing itself is closed by now. The limit is on numbers: free ones between them count, too.
    taken.retain(|fd| std::fs::symlink_metadata(format!("{dir}/{fd}")).is_ok());
    Rlimit {
        current: (0..).filter(|fd| !taken.contains(fd)).nth(spare),
        ..getrlimit(Resource::Nofile)
    }
}

/// Runs `f` with `spare` free descriptors.
fn with_spare<R>(spare: usize, f: impl FnOnce() -> R) -> R {
    let limits = getrlimit(Resource::Nofile);
    let low = limit("self", spare);
    setrlimit(Resource::Nofile, low).expect("lower limits are always allowed");
    let out = f();
    setrlimit(Resource::Nofile, limits).expect("what it was");
    out
}

/// The ends of a future connection: made before descriptors run out.
struct Ends([(Qp, Cq); 2]);

impl Ends {
    fn new(devices: [&Device; 2]) -> Ends {
        Ends(devices.map(|device| {
            let cq = device.create_cq(16, None).expect("a CQ");
            let pd = device.alloc_pd().expect("a PD");
            let qp = pd.create_qp(&QpInit::new(&cq, &cq)).expect("a QP");
            qp.post_recv(&[RecvWr::new(1)]).expect("post");
            (qp, cq)
        }))
    }

    /// Both sides of an attempt to connect.
    fn connect(self, device: &Device, listener: &Listener, tag: u8) -> Sides {
        let [(near, near_cq), (far, far_cq)] = self.0;
        let addr = listener.local_addr();
        let (near, far) = std::thread::scope(|scope| {
            let dial = scope.spawn(|| connect_qp(addr, near, device, &param(tag)));
            let mut request = None;
            while request.is_none() && !dial.is_finished() {
                request = listener
                    .next_request(Some(Duration::from_millis(5)))
                    // A late request may have been given up.
                    .filter(|request| request.private_data() == [tag]);
            }
            let accepted = match request {
                Some(request) => request.accept(far, &param(tag)),
                None => Err(ConnectError::Closed),
            };
            (dial.join().expect("no panic"), accepted)
        });
        Sides([(near, near_cq), (far, far_cq)])
    }
}

struct Sides([(Result<Connection, ConnectError>, Cq); 2]);

impl Sides {
    /// The carrier of the connection, if there is one: then it works; otherwise an error has the reason.
    fn carried(&self) -> Option<&'static str> {
        let [(near, near_cq), (far, far_cq)] = &self.0;
        let (near, far) = match (near, far) {
            (Ok(near), Ok(far)) => (&near.qp, &far.qp),
            (Ok(_), Err(error)) => panic!("one-sided: {error}"),
            (Err(error), _) => {
                explains(&error.to_string());
                return None;
            }
        };
        let (ours, theirs) = (near.path(), far.path());
        let (ours, theirs) = (ours.expect("connected"), theirs.expect("connected"));
        println!("{ours:?}, {theirs:?}");
        assert_eq!(ours.transport, theirs.transport);
        if ours.transport == "tcp" {
            explains(ours.reason.as_deref().expect("a reason"));
        }
        for (qp, cq, peer) in [(near, near_cq, far_cq), (far, far_cq, near_cq)] {
            let send = SendWr::send(2).inline(&[]).signaled();
            qp.post_send_one(send).expect("post");
            assert_eq!(take(cq, 1)[0].status, WcStatus::Success);
            assert_eq!(take(peer, 1)[0].status, WcStatus::Success);
        }
        Some(ours.transport)
    }
}

/// Checks that the text names the missing resource. Only a peer that is too starved to answer at all cannot be recognized.
fn explains(reason: &str) {
    println!("{reason}");
    let known = [
        "too many open files",
        "in time",
        "does not answer",
        "offers no shared memory",
    ];
    let reason = reason.to_lowercase();
    assert!(known.iter().any(|known| reason.contains(known)), "{reason}");
}

#[test]
fn no_descriptors_left() {
    if !alone("starvation::no_descriptors_left") {
        return;
    }
    let open = || Device::builder().local(LocalMode::Auto).open();
    let (a, b) = (open().expect("a device"), open().expect("a device"));
    let bystander = Bystander::new(&a);
    bystander.ping();
    let mut seen = Vec::new();
    for spare in 0..100 {
        let before = descriptors();
        let ends = Ends::new([&a, &b]);
        let listener = Listener::bind(&b, ANY, 4, &param(0)).expect("a listener");
        let start = Instant::now();
        let sides = with_spare(spare, || {
            let sides = ends.connect(&a, &listener, 1);
            bystander.ping();
            sides
        });
        let took = start.elapsed();
        println!("{spare}: {took:?}");
        assert!(took < LONG, "{spare}: {took:?}");
        let carried = sides.carried();
        drop(sides);
        seen.push(carried);
        // The listener and its door are open again once there is room.
        let again = (2..7).find(|tag| {
            let sides = Ends::new([&a, &b]).connect(&a, &listener, *tag);
            sides.0.iter().all(|side| side.0.is_ok()) && sides.carried() == Some("local")
        });
        assert!(again.is_some(), "{spare}: no way back to shared memory");
        drop(listener);
        given_back(before);
        bystander.ping();
        if carried == Some("local") {
            break;
        }
    }
    println!("{seen:?}");
    assert_eq!(seen[0], None);
    assert!(seen.contains(&Some("tcp")), "{seen:?}");
    assert!(seen.contains(&Some("local")), "{seen:?}");
}

/// Only the responder is starved.
#[test]
fn no_descriptors_left_at_the_peer() {
    let mut setup = Setup::local(Memory::Both);
    setup.local = LocalMode::Auto;
    let bed = Bed::new(setup).expect("a bed");
    let mut seen = Vec::new();
    for spare in 0..100 {
        let twin = Twin::start("twin", |twin| {
            twin.env("WEFT_LOCAL", "auto");
        });
        let twin = twin.expect("a twin");
        let pid = Pid::from_raw(twin.pid().cast_signed());
        let low = limit(&twin.pid().to_string(), spare);
        prlimit(pid, Resource::Nofile, low).expect("our own child");
        let start = Instant::now();
        let end = bed.end(&bed.a, &Half::default());
        let dialled = end.over(|qp| connect_qp(twin.addr, qp, &bed.a, &param(0)));
        let took = start.elapsed();
        assert!(took < LONG, "{spare}: {took:?}");
        match dialled {
            Ok(end) => {
                let path = end.qp.path().expect("connected");
                println!("{spare}: {took:?}, {path:?}");
                if path.transport == "tcp" {
                    explains(path.reason.as_deref().expect("a reason"));
                }
                seen.push(Some(path.transport));
                Pair::of(twin, end).echo(3);
                if path.transport == "local" {
                    break;
                }
            }
            Err(error) => {
                println!("{spare}: {took:?}");
                explains(&error.to_string());
                seen.push(None);
            }
        }
    }
    println!("{seen:?}");
    assert!(seen.contains(&Some("tcp")), "{seen:?}");
    assert!(seen.contains(&Some("local")), "{seen:?}");
}
