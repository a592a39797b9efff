//! Hostile processes of other users: what they hand over, how much they take, and the names that they take.

use std::fs::File;
use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::Child;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use weft_ring::Role;
use weft_ring::stream::Stream;
use weft_run::meet;
use weft_run::peers::MOST_OF_ONE;
use weft_run_tests::{free_port, python, say, switched, weft};
use weft_sys::memfd;
use weft_sys::unix::{self, Kind};

use crate::lend::{Liar, let_in, make_offer};
use crate::lies::{initiator, meeting_victim, responder, victim};
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

/// A TCP socket whose `close` waits for its peer, and that peer.
fn slow_to_close() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&near, Some(Duration::from_secs(30))).unwrap();
    near.set_nonblocking(true).unwrap();
    while near.write(&[0; 1 << 12]).is_ok() {}
    near.set_nonblocking(false).unwrap();
    (near.into(), far)
}

/// Does what as a user, in a thread of its own.
pub(crate) fn as_user<T: Send>(uid: u32, what: impl FnOnce() -> T + Send) -> T {
    let become_it = move || {
        let uid = Uid::from_raw(uid);
        // Of this thread alone.
        set_thread_res_uid(uid, uid, uid).unwrap();
        what()
    };
    std::thread::scope(|scope| scope.spawn(become_it).join().unwrap())
}

/// A thread of this user lets `send` make an offer to a victim of another user, whose TCP peer we are. The victim goes on over TCP without delay.
fn offer_by(dialler: u32, name: &str, send: impl Fn(&TcpStream, &OwnedFd) + Sync) {
    let mut victim = offered_by(dialler, name, send);
    victim.kill().unwrap();
    victim.wait().unwrap();
}

/// The same, where the victim is left to the caller.
pub(crate) fn offered_by(
    dialler: u32,
    name: &str,
    send: impl Fn(&TcpStream, &OwnedFd) + Sync,
) -> Child {
    const LONGEST: Duration = Duration::from_secs(5);
    let (victim, mut tcp, ends) = initiator(Some(USERS[0]), "any");
    tcp.set_read_timeout(Some(LONGEST)).unwrap();
    let offers = || {
        let (mut is_offered, mut dialled) = (false, None);
        for n in 0..60 {
            let begun = Instant::now();
            tcp.write_all(b"x").unwrap();
            let got = tcp.read_exact(&mut [0]);
            assert!(got.is_ok(), "{name}: echo {n}: {got:?}");
            let took = begun.elapsed();
            assert!(took < LONGEST, "{name}: echo {n}: {took:?}");
            if !is_offered && let Some(wire) = let_in(&ends, &mut dialled) {
                send(&tcp, &wire);
                is_offered = true;
            }
        }
        is_offered
    };
    let is_offered = as_user(dialler, offers);
    // Who is not the peer is not let in.
    assert_eq!(is_offered, dialler == 0, "{name}");
    victim
}

/// Whether a victim has taken this segment of its peer.
fn is_taken(name: &str, segment: OwnedFd) -> bool {
    offer_by(0, name, |tcp, wire| make_offer(tcp, wire, segment.as_fd()));
    // The word "TCP" of the victim's direction.
    let mut joined = [0; 8];
    let read = File::from(segment).read_at(&mut joined, 128 * (1 + 8 + 5));
    read.is_ok_and(|n| n == 8) && joined[0] & 1 != 0
}

#[test]
fn only_whole_sealed_files_of_memory_are_taken() {
    if !can_be_others() {
        return;
    }
    let (_stream, good) = Stream::create_filled(256 << 10).unwrap();
    assert!(is_taken("a good offer", good));
    for (name, segment) in bad_segments() {
        assert!(!is_taken(name, segment), "{name}");
    }
}

#[test]
fn descriptors_that_are_slow_to_close_delay_nothing() {
    if !can_be_others() {
        return;
    }
    let slow = Mutex::new(Vec::new());
    let new = || {
        let (near, far) = slow_to_close();
        slow.lock().unwrap().push(far);
        near
    };
    offer_by(0, "as the segment", |tcp, wire| {
        make_offer(tcp, wire, new().as_fd());
    });
    offer_by(0, "in place of an offer", |_, wire| {
        let (one, other) = (new(), new());
        unix::send_with_fds(wire, b"x", &[one.as_fd(), other.as_fd()]).unwrap();
    });
    offer_by(0, "behind an offer", |tcp, wire| {
        let (_stream, good) = Stream::create_filled(256 << 10).unwrap();
        let (near, far) = slow_to_close();
        make_offer(tcp, wire, good.as_fd());
        // The victim may have taken the offer, and lets nothing more in.
        match unix::send_with_fds(wire, b"x", &[near.as_fd()]) {
            Ok(()) => slow.lock().unwrap().push(far),
            Err(_) => drop(far),
        }
    });
}

#[test]
fn a_bell_brings_no_descriptors_whoever_has_dialled() {
    if !can_be_others() {
        return;
    }
    let mut roles = Vec::new();
    while !(roles.contains(&Role::Initiator) && roles.contains(&Role::Responder)) {
        let (mut victim, _said, port) = victim("waits.py", Some(USERS[0]));
        let liar = Liar::meet(port);
        if !unix::take_rights(&liar.bell, false) {
            say("skipped: before Linux 6.16 every socket takes descriptors");
            return;
        }
        let sent = unix::send_with_fds(&liar.bell, b"!", &[liar.tcp.as_fd()]);
        let error = sent.map_err(|e| e.raw_os_error());
        assert_eq!(error, Err(Some(rustix::io::Errno::PERM.raw_os_error())));
        roles.push(liar.role);
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
}

#[test]
fn a_third_user_that_both_sides_meet_gets_no_connection() {
    if !can_be_others() {
        return;
    }
    // The victim listens.
    offer_by(USERS[1], "dials", |_, _| panic!("let in"));
    // The victim dials.
    let (mut victim, mut tcp, ends) = responder(Some(USERS[0]), "any");
    let listener = as_user(USERS[1], || meet::listen(&ends).unwrap());
    let mut wires = Vec::new();
    for _ in 0..60 {
        tcp.write_all(b"x").unwrap();
        tcp.read_exact(&mut [0]).unwrap();
        while let Some(wire) = unix::accept(&listener).unwrap() {
            unix::take_rights(&wire, true);
            let _ = unix::send_with_fds(&wire, b"+", &[]);
            wires.push(wire);
        }
        for wire in &wires {
            let got = unix::recv(wire, &mut [0; 100], 2);
            assert!(!matches!(got, Ok(Some(_))), "{got:?}");
        }
    }
    assert!(!wires.is_empty(), "the victim has dialled");
    victim.kill().unwrap();
    victim.wait().unwrap();
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
        let (mut victim, mut said, port) = meeting_victim("victim.py", None, &USERS[0].to_string());
        let lie = || {
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
        as_user(liars, lie);
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
        let _listener = unix::listen_for_strangers(name, Kind::Stream, 1).unwrap();
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
            if let Ok(wire) = unix::connect_to_stranger(name, Kind::Stream) {
                if wires.len() == 1 {
                    let _ = unix::send_with_fds(&wire, b"weftrun1, or not", &[]);
                }
                let (slow, far) = slow_to_close();
                let sent = unix::send_with_fds(&wire, b"x", &[slow.as_fd()]);
                // Its close waits until the far end is closed, unless it is under way.
                wires.push((wire, far, sent.is_err().then_some(slow)));
            }
            std::thread::yield_now();
        }
    });
    for text in texts {
        assert_eq!(switched(&text), 1, "{text}");
    }
}
