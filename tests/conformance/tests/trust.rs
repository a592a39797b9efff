//! The kernel's information about a peer of this host, before the peer gets our memory.

use std::collections::HashSet;
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::Duration;

use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use weft_conformance::bed::{Bed, End, Half, Memory, PATIENCE, Setup};
use weft_conformance::local::{Local, NOWHERE, Visit, hear, open_door, welcome};
use weft_conformance::raw::{Raw, start_frame};
use weft_conformance::twin::{DIAL, Pair, Twin, is_one};
use weft_verbs::stat::{DeviceStat, survey};
use weft_verbs::{LocalMode, SendWr};
use weft_wire::local::Message;
use weft_wire::mpa::FrameKind;

/// In the environment of [`dropped`] and [`usurper`]: the listener to visit.
const VISITS: &str = "WEFT_VISITS";
/// In the environment of [`usurper`]: the owner of the claimed TCP connection.
const CLAIMS: &str = "WEFT_CLAIMS";
/// Starts a program with no capability, as the same user.
const POWERLESS: &[&str] = &["setpriv", "--inh-caps=-all", "--bounding-set=-all"];
/// Starts a program as root of a separate user namespace: to the kernel it is the same user.
const CONTAINED: &[&str] = &["unshare", "--user", "--map-root-user"];

/// True if programs can be started in this way.
fn works(wrapper: &[&str]) -> bool {
    let (program, args) = wrapper.split_first().expect("a program");
    let done = Command::new(program).args(args).arg("true").status();
    let works = done.is_ok_and(|status| status.success());
    if !works {
        println!("skipped: {wrapper:?} does not work here");
    }
    works
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: only root can become somebody else");
    }
    root
}

fn bed() -> Bed {
    let mut setup = Setup::local(Memory::Both);
    setup.local = LocalMode::Auto;
    Bed::new(setup).expect("a bed")
}

/// A twin, and our end of a connection with it: dialled by us, or by the twin.
fn connected(wrapper: &[&str], we_dial: bool) -> (Twin, End, Bed) {
    let bed = bed();
    if we_dial {
        let twin = Twin::inside(wrapper, "twin", |_| ()).expect("a twin");
        let end = bed.end(&bed.a, &Half::default());
        let end = bed.dial(twin.addr, end, &bed.param()).expect("connect");
        return (twin, end, bed);
    }
    let listener = bed.listener(4);
    let twin = Twin::inside(wrapper, "twin", |twin| {
        twin.env(DIAL, listener.local_addr().to_string());
    });
    let twin = twin.expect("a twin");
    let end = bed.end(&bed.b, &Half::default());
    let request = listener.next_request(Some(PATIENCE)).expect("a request");
    let end = end.over(|qp| request.accept(qp, &bed.param()));
    (twin, end.expect("accept"), bed)
}

/// The memory files of this name that a process has open.
fn files(pid: u32, name: &str) -> HashSet<u64> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("procfs");
    fds.flatten()
        .map(|fd| fd.path())
        .filter(|fd| {
            fd.read_link()
                .is_ok_and(|to| to.to_string_lossy().contains(name))
        })
        .filter_map(|fd| Some(std::fs::metadata(fd).ok()?.ino()))
        .collect()
}

/// A process that the kernel would not let read our memory does not get our arena without remote rights, though we get its. Neither side accesses the other by
/// number.
/// reaches the other by number.
#[test]
fn private_memory_goes_to_those_who_may_trace_us() {
    if !is_root() || !works(POWERLESS) {
        return;
    }
    for (wrapper, traces) in [(&[][..], true), (POWERLESS, false)] {
        for we_dial in [true, false] {
            let (twin, end, _bed) = connected(wrapper, we_dial);
            let path = end.qp.path().expect("connected");
            assert_eq!(path.transport, "local", "{path:?}");
            let pid = twin.pid();
            let mut pair = Pair::of(twin, end);
            pair.echo(1);
            let (ours, theirs) = (
                files(std::process::id(), "weft-private"),
                files(pid, "weft-private"),
            );
            // The twin has one domain; each of us has the other's, or not.
            let shared = ours.intersection(&theirs).count();
            let what = format!("{wrapper:?}, we dial: {we_dial}");
            assert_eq!(shared, 1 + usize::from(traces), "{what}");
            let write = SendWr::write(2, pair.regions[1]).sge(pair.mr.sge(0, 20_000));
            pair.end.run(write);
            let one_sided = pair.end.qp.counters().one_sided;
            assert_eq!(one_sided, u64::from(traces), "{what}");
        }
    }
}

/// To the kernel, root of each of these is the same user.
#[test]
fn user_namespaces_are_kept_apart() {
    if !works(CONTAINED) {
        return;
    }
    for we_dial in [true, false] {
        let (twin, end, _bed) = connected(CONTAINED, we_dial);
        let path = end.qp.path().expect("connected");
        assert_eq!(path.transport, "tcp", "{path:?}");
        let reason = path.reason.expect("a reason");
        assert!(reason.contains("user namespace"), "{reason}");
        let mut pair = Pair::of(twin, end);
        let theirs = pair.twin.ask("path");
        assert!(theirs.contains("user namespace"), "{theirs}");
        pair.echo(2);
    }
    let mut one = Twin::inside(CONTAINED, "twin", |_| ()).expect("a twin");
    let mut other = Twin::inside(CONTAINED, "twin", |twin| {
        twin.env(DIAL, one.addr.to_string());
    })
    .expect("a twin");
    for twin in [&mut one, &mut other] {
        let _keys = twin.answer();
        let path = twin.ask("path");
        assert!(
            path.contains("\"tcp\"") && path.contains("user namespace"),
            "{path}"
        );
    }
}

/// A process from another user namespace neither takes the place of one that has sent Hello, nor prevents its Hello.
#[test]
fn a_place_is_not_taken_from_another_user_namespace() {
    if !works(CONTAINED) {
        return;
    }
    for first in [true, false] {
        let bed = bed();
        let listener = bed.listener(4);
        let mut raw = Raw::connect(listener.local_addr());
        let from = raw.stream.local_addr().expect("an address");
        let knock = |raw: &mut Raw| raw.local = Local::knock(&raw.stream);
        if first {
            knock(&mut raw);
        }
        let usurper = Twin::inside(CONTAINED, "trust::usurper", |twin| {
            twin.env(VISITS, listener.local_addr().to_string());
            twin.env(CLAIMS, from.to_string());
        });
        let mut usurper = usurper.expect("a process");
        println!("{}", usurper.answer());
        if !first {
            knock(&mut raw);
        }
        raw.send_start(&start_frame(FrameKind::Request, false, 4).emit());
        let request = listener.next_request(Some(PATIENCE)).expect("a request");
        let end = bed.end(&bed.b, &Half::default());
        let end = end.over(|qp| request.accept(qp, &bed.param()));
        let path = end.expect("accept").qp.path().expect("connected");
        assert_eq!(path.transport, "local", "{path:?}");
    }
}

#[test]
#[ignore = "a process in another user namespace"]
fn usurper() {
    if !is_one() {
        return;
    }
    let addr = |name| {
        let addr = std::env::var(name).expect("an address");
        addr.parse().expect("an address")
    };
    let listener = addr(VISITS);
    println!("@{listener}");
    let visit = Visit::claim(listener, addr(CLAIMS));
    println!("@{:?}", visit.hello());
    // Until the other one has finished.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// A daemon opens its socket as root, and is another user when a visitor comes: no descriptor is sent there.
#[test]
fn a_listener_that_is_root_no_more() {
    if !is_root() {
        return;
    }
    let mut daemon = Twin::start("trust::dropped", |_| ()).expect("a process");
    let bed = bed();
    let end = bed.end(&bed.a, &Half::default());
    // It speaks no MPA.
    let gone = bed.dial(daemon.addr, end, &bed.param());
    assert!(gone.is_err());
    assert_eq!(daemon.answer(), "0 descriptors");
}

/// The same in the other direction: root connects, and another user sends the messages.
#[test]
fn a_visitor_that_is_root_no_more() {
    if !is_root() {
        return;
    }
    let bed = bed();
    let listener = bed.listener(4);
    let addr = listener.local_addr();
    let mut visitor = Twin::start("trust::dropped", |twin| {
        twin.env(VISITS, addr.to_string());
    })
    .expect("a process");
    let answer = visitor.answer();
    assert!(
        answer.starts_with("declined") && answer.contains("user"),
        "{answer}"
    );
}

/// In a user namespace without a mapping all users have the same number, but they are not the same user.
#[test]
fn unknown_users_are_told_of_no_connections() {
    let unknown = &["unshare", "--user"];
    if !works(unknown) {
        return;
    }
    let told = |wrapper: &[&str]| {
        let twin = Twin::inside(wrapper, "twin", |_| ()).expect("a twin");
        let found = survey(Duration::from_secs(5)).expect("procfs");
        let ours = |process: &DeviceStat| process.pid == Some(twin.pid());
        (
            found.devices.iter().any(ours),
            found.silent.contains(&Some(twin.pid())),
        )
    };
    assert_eq!(told(&[]), (true, false), "(answered, silent)");
    assert_eq!(told(unknown), (false, true), "(answered, silent)");
}

#[test]
#[ignore = "a process that was root"]
fn dropped() {
    if !is_one() {
        return;
    }
    let drop_root = || {
        let nobody = Uid::from_raw(65_534);
        set_thread_res_uid(nobody, nobody, nobody).expect("root may");
    };
    if let Ok(addr) = std::env::var(VISITS) {
        println!("@{addr}");
        let raw = Raw::connect(addr.parse().expect("an address"));
        let visit = Local::visit(&raw.stream);
        drop_root();
        match visit.hello() {
            Some(Message::Decline(why)) => println!("@declined: {why}"),
            other => println!("@{other:?}"),
        }
        return;
    }
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a listener");
    let door = Local::door(&listener);
    drop_root();
    println!("@{}", listener.local_addr().expect("an address"));
    let (tcp, _) = listener.accept().expect("a connection");
    let wire = open_door(&door);
    let mut got = hear(&wire).map_or(0, |(_, fds)| fds.len());
    welcome(&wire, NOWHERE);
    got += hear(&wire).map_or(0, |(_, fds)| fds.len());
    drop(tcp);
    println!("@{got} descriptors");
}
