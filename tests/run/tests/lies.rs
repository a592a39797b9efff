//! A peer that lies in the shared memory keeps no call waiting: a call that must not wait comes back, and one with a time limit keeps it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use rustix::net::SendFlags;
use weft_ring::Role;
use weft_ring::stream::{Stream, Wish};
use weft_run::meet::Ends;
use weft_run_tests::{PYTHON, have, library, python};
use weft_sys::process::end_with_us;

use crate::lend::{Liar, offer};
use crate::users::{USERS, by, can_be_others};

/// Calls that must not wait are shorter, on a machine that is busy with other tests.
const MOST_MS: u64 = 1000;
/// And all of them together.
const MOST_OF_ALL_MS: u64 = 3000;

/// The users of a victim: ours, and another one that meets us.
fn users() -> Vec<Option<u32>> {
    let other = can_be_others().then_some(Some(USERS[0]));
    [None].into_iter().chain(other).collect()
}

/// Starts a victim that runs this script as a user, and meets us. Returns what it says, and its port.
pub(crate) fn victim(script: &str, user: Option<u32>) -> (Child, BufReader<ChildStdout>, u16) {
    meeting_victim(script, user, "0")
}

/// The same, of one that meets these users.
pub(crate) fn meeting_victim(
    script: &str,
    user: Option<u32>,
    with: &str,
) -> (Child, BufReader<ChildStdout>, u16) {
    let line = match user {
        Some(uid) => by(uid, &python(script)),
        None => python(script),
    };
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().unwrap());
    command
        .args(words)
        .env("LD_PRELOAD", library())
        .env("WEFT_RUN_WITH", with)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut victim = end_with_us(&mut command).spawn().unwrap();
    let mut said = BufReader::new(victim.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    let port = line.trim().strip_prefix("port ").unwrap().parse().unwrap();
    (victim, said, port)
}

/// A victim does `what`, and the peer lies: once before, and again and again beside it. Returns how the victim's calls ended.
fn told(
    user: Option<u32>,
    what: u8,
    once: impl Fn(&Liar),
    again: impl Fn(&Stream, Role) + Sync,
) -> (String, u64, u64) {
    let (mut victim, mut said, port) = victim("waits.py", user);
    let mut line = String::new();
    let liar = Liar::meet(port);
    let theirs = liar.role.peer();
    Liar::until(|| liar.stream.switch(theirs, liar.count));
    liar.stream.put_slice(liar.role, 0, &[b'G', what]);
    liar.publish(0, 1);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(SeqCst) {
                again(&liar.stream, liar.role);
                std::thread::yield_now();
            }
        });
        liar.publish(1, 2);
        // It has come for the next bytes.
        Liar::until(|| liar.stream.progress(liar.role) >= 2);
        once(&liar);
        said.read_line(&mut line).unwrap();
        is_over.store(true, SeqCst);
    });
    assert!(victim.wait().unwrap().success());
    let mut words = line.split_whitespace();
    let end = words.next().unwrap().to_owned();
    let mut number = || words.next().unwrap().parse().unwrap();
    (end, number(), number())
}

/// The name of a lie, what the victim does, what the peer does once and again and again, and how the victim's calls end.
type Lie<'a> = (
    &'a str,
    u8,
    &'a dyn Fn(&Liar),
    &'a (dyn Fn(&Stream, Role) + Sync),
    &'a [&'a str],
);

fn all_come_back(lies: &[Lie<'_>]) {
    if !have(&[PYTHON]) {
        return;
    }
    for user in users() {
        for (name, what, once, again, ends) in lies {
            let (end, longest, total) = told(user, *what, once, again);
            assert!(ends.contains(&end.as_str()), "{user:?}, {name}: {end}");
            assert!(
                longest < MOST_MS,
                "{user:?}, {name}: a call of {longest} ms"
            );
            assert!(
                total < MOST_OF_ALL_MS,
                "{user:?}, {name}: calls of {total} ms"
            );
        }
    }
}

fn nothing(_: &Stream, _: Role) {}

fn an_uncounted_byte(liar: &Liar) {
    (&liar.bell).write_all(b"!").unwrap();
}

fn an_urgent_byte(liar: &Liar) {
    rustix::net::send(&liar.bell, b"!", SendFlags::OOB).unwrap();
}

#[test]
fn a_send_does_not_wait_for_a_bell_that_nobody_reads() {
    let asks: &(dyn Fn(&Stream, Role) + Sync) = &|stream, role| {
        stream.arm(role.peer(), 1 << 40, Wish::Once);
    };
    all_come_back(&[(
        "asks for each arrival",
        b'S',
        &|_| {},
        asks,
        &["ECONNRESET"],
    )]);
}

#[test]
fn bytes_in_the_bell_that_nobody_has_counted_end_the_connection() {
    all_come_back(&[
        (
            "a blocking receive",
            b'L',
            &an_uncounted_byte,
            &nothing,
            &["ECONNRESET"],
        ),
        ("epoll", b'E', &an_uncounted_byte, &nothing, &["ECONNRESET"]),
        (
            "a receive that must not wait",
            b'R',
            &an_uncounted_byte,
            &nothing,
            &["ECONNRESET"],
        ),
        ("urgent", b'L', &an_urgent_byte, &nothing, &["ECONNRESET"]),
        (
            "urgent, epoll",
            b'E',
            &an_urgent_byte,
            &nothing,
            &["ECONNRESET"],
        ),
    ]);
}

#[test]
fn a_receive_does_not_wait_for_a_source_that_is_moved_for_ever() {
    let moves: &dyn Fn(&Liar) = &|liar| {
        liar.stream.prove(liar.role, 4096, 77);
        liar.stream.offer_source(liar.role, 0, 2, 4096, 100);
        liar.stream.move_source(liar.role, 0);
        liar.publish(2, 3);
    };
    let ends = ["EAGAIN", "ECONNRESET"];
    all_come_back(&[
        ("must not wait", b'R', moves, &nothing, &ends),
        ("with a limit", b'L', moves, &nothing, &ends),
    ]);
}

#[test]
fn a_send_does_not_wait_for_a_receiver_that_holds_it_back_for_ever() {
    let holds: &(dyn Fn(&Stream, Role) + Sync) = &|stream, role| stream.hold(role.peer());
    all_come_back(&[("holds", b'S', &|_| {}, holds, &["EAGAIN"])]);
}

#[test]
fn a_fill_that_is_never_counted_does_not_keep_a_receive_waiting() {
    let begins: &dyn Fn(&Liar) = &|liar| {
        liar.stream.begin_fill(liar.role);
        (&liar.bell).write_all(b"!").unwrap();
    };
    all_come_back(&[
        ("must not wait", b'E', begins, &nothing, &["EAGAIN"]),
        ("with a limit", b'L', begins, &nothing, &["EAGAIN"]),
    ]);
}

#[test]
fn rings_that_are_counted_and_never_written_do_not_keep_receives_waiting() {
    let counts: &(dyn Fn(&Stream, Role) + Sync) = &|stream, role| {
        let (at, taken) = (stream.published(role), stream.progress(role));
        if at == taken && taken >= 2 && stream.take_wish(role) {
            let _ = stream.publish(role, at, at + 1);
        }
    };
    all_come_back(&[("counts", b'E', &|_| {}, counts, &["EAGAIN", "none"])]);
}

/// A connection to a victim on which this end offers the ring.
pub(crate) fn initiator(user: Option<u32>, with: &str) -> (Child, TcpStream, Ends) {
    let (victim, _, tcp, ends) = connected("waits.py", user, with, Role::Initiator);
    (victim, tcp, ends)
}

/// One on which the victim offers it.
pub(crate) fn responder(user: Option<u32>, with: &str) -> (Child, TcpStream, Ends) {
    let (victim, _, tcp, ends) = connected("waits.py", user, with, Role::Responder);
    (victim, tcp, ends)
}

/// A connection to a victim on which this end has a role.
pub(crate) fn connected(
    script: &str,
    user: Option<u32>,
    with: &str,
    role: Role,
) -> (Child, BufReader<ChildStdout>, TcpStream, Ends) {
    loop {
        let (mut victim, said, port) = meeting_victim(script, user, with);
        let tcp = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let ends = Ends::of(&tcp).unwrap();
        if ends.role() == role {
            return (victim, said, tcp, ends);
        }
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
}

#[test]
fn a_ring_of_another_size_than_ours_is_not_taken() {
    if !have(&[PYTHON]) {
        return;
    }
    for (bytes, is_taken) in [(1 << 18, true), (1 << 24, false)] {
        let (mut victim, mut tcp, ends) = initiator(None, "0");
        let (mut offered, mut dialled) = (None, None);
        for _ in 0..60 {
            tcp.write_all(b"x").unwrap();
            tcp.read_exact(&mut [0]).unwrap();
            offered = offered.or_else(|| offer(&tcp, &ends, bytes, &mut dialled));
        }
        let (stream, _bell) = offered.expect("the victim opens its listener");
        assert_eq!(stream.has_joined(Role::Responder), is_taken, "{bytes}");
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
}
