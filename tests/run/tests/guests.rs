//! Hostile processes of other users: what they hand over, how much they take, and the names that they take.

use std::fs::File;
use std::io::{BufRead, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use weft_ring::stream::Stream;
use weft_run::meet;
use weft_run::peers::MOST_OF_ONE;
use weft_run_tests::{free_port, python, switched, weft};
use weft_sys::{memfd, unix};

use crate::lend::{Liar, everybody};
use crate::lies::{initiator, meeting_victim, victim};
use crate::users::{USERS, by, can_be_others, with};

/// A file of memory as the segment of a peer is not.
fn bad_segments() -> Vec<(&'static str, OwnedFd)> {
    const LEN: u64 = 4096 + 2 * (256 << 10);
    // A good one but for one thing.
    let (_stream, good) = Stream::create_filled(256 << 10).unwrap();
    let header = {
        let mut bytes = [0; 16];
        File::from(good).read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    let can_grow = memfd::create_growing("bad").unwrap();
    memfd::grow(&can_grow, LEN).unwrap();
    memfd::fill(&can_grow, LEN).unwrap();
    File::from(can_grow.try_clone().unwrap())
        .write_all_at(&header, 0)
        .unwrap();
    let (pipe, _) = std::io::pipe().unwrap();
    let (_stream, holes) = Stream::create(256 << 10).unwrap();
    vec![
        ("a pipe", pipe.into()),
        ("zeros", File::open("/dev/zero").unwrap().into()),
        ("a file", File::open("/etc/passwd").unwrap().into()),
        ("a folder", File::open("/").unwrap().into()),
        ("a socket", TcpListener::bind("127.0.0.1:0").unwrap().into()),
        ("a file that can grow", can_grow),
        ("a huge file", memfd::create("bad", 1 << 44).unwrap()),
        ("an empty one", memfd::create("bad", 0).unwrap()),
        ("one without a header", memfd::create("bad", LEN).unwrap()),
        ("holes", holes),
    ]
}

/// What is no bell.
fn bad_bells() -> Vec<(&'static str, OwnedFd)> {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("bell")).unwrap();
    let (pipe, _) = std::io::pipe().unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let (dead, _) = UnixStream::pair().unwrap();
    vec![
        ("a pipe", pipe.into()),
        ("a TCP socket", tcp.into()),
        ("zeros", File::open("/dev/zero").unwrap().into()),
        ("one without a peer", dead.into()),
        ("a listener", listener.into()),
    ]
}

/// Offers these to a victim of another user, which goes on over TCP. Whether it has taken them.
fn is_taken(name: &str, segment: Option<OwnedFd>, bell: Option<OwnedFd>) -> bool {
    let (mut victim, mut tcp, ends) = initiator(Some(USERS[0]));
    let (_stream, good) = Stream::create_filled(256 << 10).unwrap();
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let (segment, bell) = (segment.unwrap_or(good), bell.unwrap_or(theirs.into()));
    let mut is_offered = false;
    for n in 0..60 {
        tcp.write_all(b"x").unwrap();
        let got = tcp.read_exact(&mut [0]);
        assert!(got.is_ok(), "{name}: echo {n}: {got:?}");
        if !is_offered && let Some((wire, _)) = meet::dial(&ends, &everybody()).unwrap() {
            let cookie = meet::peer(&tcp, &everybody()).unwrap().unwrap().cookie;
            meet::offer(&wire, &tcp, cookie, segment.as_fd(), bell.as_fd()).unwrap();
            is_offered = true;
        }
    }
    assert!(is_offered, "{name}");
    victim.kill().unwrap();
    victim.wait().unwrap();
    // The word "TCP" of the victim's direction.
    let mut joined = [0; 8];
    let read = File::from(segment).read_at(&mut joined, 128 * (1 + 8 + 5));
    read.is_ok_and(|n| n == 8) && joined[0] & 1 != 0
}

#[test]
fn only_whole_sealed_files_of_memory_and_bells_are_taken() {
    if !can_be_others() {
        return;
    }
    assert!(is_taken("a good offer", None, None));
    for (name, segment) in bad_segments() {
        assert!(!is_taken(name, Some(segment), None), "{name}");
    }
    for (name, bell) in bad_bells() {
        // A bell that has ended, or cannot ring, is as one whose owner ends: TCP goes on.
        is_taken(name, None, Some(bell));
    }
}

#[test]
fn memory_that_another_user_offers_is_not_read() {
    if !can_be_others() {
        return;
    }
    static PROOF: u64 = 0x1234_5678;
    let truth = vec![7_u8; 1000];
    for liars in [0, USERS[0]] {
        // Root could read the memory of everybody.
        let (mut victim, mut said, port) = meeting_victim("victim.py", None, USERS[0]);
        let lie = || {
            let uid = Uid::from_raw(liars);
            // Of this thread alone.
            set_thread_res_uid(uid, uid, uid).unwrap();
            let liar = Liar::meet(port);
            let proof = (&raw const PROOF).expose_provenance() as u64;
            liar.stream.prove(liar.role, proof, PROOF);
            // As if the victim had agreed.
            liar.stream.set_terms(liar.role, true);
            liar.stream.put_slice(liar.role, 0, b"G");
            liar.publish(0, 1);
            let at = truth.as_ptr().expose_provenance() as u64;
            liar.stream.offer_source(liar.role, 0, 1, at, 1000);
            liar.publish(1, 2);
            if liars == 0 {
                Liar::until(|| liar.stream.completed_sources(liar.role) == 1);
            } else {
                let mut line = String::new();
                said.read_line(&mut line).unwrap();
                assert_eq!(line.trim(), "ECONNRESET after 0");
            }
        };
        std::thread::scope(|scope| scope.spawn(lie).join().unwrap());
        if liars == 0 {
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            assert_eq!(line.trim(), "end after 1000");
        }
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
}

#[test]
fn many_connections_of_a_user_delay_calls_no_longer_than_one() {
    if !can_be_others() {
        return;
    }
    const MANY: usize = 16;
    let script = format!("waits_many.py {MANY}");
    let (mut victim, mut said, port) = victim(&script, Some(USERS[0]));
    let liars: Vec<_> = (0..MANY)
        .map(|_| {
            let liar = Liar::meet(port);
            liar.stream.put_slice(liar.role, 0, b"G");
            liar.publish(0, 1);
            Liar::until(|| liar.stream.progress(liar.role) == 1);
            liar
        })
        .collect();
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "ready");
    for liar in &liars {
        liar.stream.begin_fill(liar.role);
        (&liar.bell).write_all(b"!").unwrap();
    }
    victim.stdin.take().unwrap().write_all(b"go\n").unwrap();
    line.clear();
    said.read_line(&mut line).unwrap();
    assert!(victim.wait().unwrap().success());
    let total: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    // 100 ms at once, and a sixteenth of the time; each of them alone could take that.
    assert!(total < 600, "{total} ms of calls that must not wait");
}

#[test]
fn a_user_gets_so_many_connections_and_the_others_stay_on_tcp() {
    if !can_be_others() {
        return;
    }
    let port = free_port();
    let server = by(USERS[0], &format!("{} server {port}", python("echo.py")));
    let serving = with(0).start(&server).listens(port);
    let done = with(USERS[0])
        .limit(Duration::from_mins(1))
        .run(&format!("{} {port} 300", python("many.py")));
    done.good().says("all of 300 are answered");
    let served = serving.interrupt();
    for side in [&done, &served] {
        assert_eq!(switched(&side.text), MOST_OF_ONE, "{}", side.show());
    }
}

/// A name that two ends would meet by.
fn name_of(low: u16, high: u16) -> String {
    format!("weft-run/1/127.0.0.1:{low}/127.0.0.1:{high}")
}

/// Two programs of one user, whose client has a port of its own, while this process, which they do not meet, does something with the name of their connection.
fn beside(squat: impl FnOnce(unix::Name<'_>, &AtomicBool) + Send) -> [String; 2] {
    let (one, other) = (free_port(), free_port());
    let (low, high) = (one.min(other), one.max(other));
    let line = |side: &str| {
        by(
            USERS[0],
            &format!("{} {side} {low} {high}", python("named.py")),
        )
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let is_over = &is_over;
        scope.spawn(move || {
            let name = name_of(low, high);
            squat(unix::Name::Abstract(name.as_bytes()), is_over);
        });
        let serving = weft().start(&line("server")).listens(low);
        let done = weft().run(&line("client"));
        is_over.store(true, SeqCst);
        done.good().says("all bytes came back");
        let served = serving.end();
        served.good();
        [served.text, done.text]
    })
}

#[test]
fn a_name_that_another_user_has_taken_delays_nothing_and_is_told() {
    if !can_be_others() {
        return;
    }
    let texts = beside(|name, is_over| {
        let _listener = unix::listen(name, 1).unwrap();
        while !is_over.load(SeqCst) {
            std::thread::yield_now();
        }
    });
    for text in texts {
        assert_eq!(switched(&text), 0, "{text}");
        assert!(text.contains("another user has taken the name"), "{text}");
    }
}

#[test]
fn strangers_that_dial_the_name_do_not_keep_two_ends_apart() {
    if !can_be_others() {
        return;
    }
    let texts = beside(|name, is_over| {
        let mut wires = Vec::new();
        while wires.len() < 3 && !is_over.load(SeqCst) {
            if let Ok(wire) = unix::connect(name) {
                if wires.len() == 1 {
                    let _ = unix::send_with_fds(&wire, b"weftrun1, or not", &[]);
                }
                wires.push(wire);
            }
            std::thread::yield_now();
        }
    });
    for text in texts {
        assert_eq!(switched(&text), 1, "{text}");
    }
}
