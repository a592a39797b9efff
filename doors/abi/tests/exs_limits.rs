//! Early ends of operations of libexs: time limits, signals, cancels, forks and the program's end.
#![cfg(feature = "exs")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call is given pointers to its own locals"
)]

#[path = "common/sockets.rs"]
mod sockets;

use std::ffi::{c_int, c_void};
use std::os::fd::IntoRawFd as _;
use std::os::unix::thread::JoinHandleExt as _;
use std::ptr::null_mut;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use libc::{
    AF_INET, MSG_DONTWAIT, SO_RCVTIMEO, SO_SNDTIMEO, SOCK_SEQPACKET, SOCK_STREAM, SOL_SOCKET,
    socklen_t, timeval,
};
use rustix::io::Errno;
use sockets::{
    NONE, PATIENCE, again, aside, asleep, next_event, pair, recv, recv_message, send, start_recv,
    start_send, stopped,
};
use weft_abi::exs::types::{
    AHandle, EXS_CAF_FILDES, EXS_EVT_RECV, EXS_EVT_RECVTIMEOUT, EXS_QHANDLE_INVALID,
};
use weft_abi::exs::{memory, option, queue, socket, sync};

fn limit(fd: c_int, name: c_int, millis: i64) {
    let time = timeval {
        tv_sec: 0,
        tv_usec: millis * 1000,
    };
    let value = (&raw const time).cast::<c_void>();
    unsafe {
        option::setsockopt(
            fd,
            SOL_SOCKET,
            name,
            value,
            size_of::<timeval>() as socklen_t,
        )
    }
    .unwrap();
}

/// `SO_RCVTIMEO`: "the same limits, for the blocking calls, which fail with EAGAIN".
#[test]
fn a_recvmsg_of_messages_whose_time_is_up_says_eagain() {
    let (a, b) = pair(SOCK_SEQPACKET);
    limit(b, SO_RCVTIMEO, 200);
    let told = aside(move || recv_message(b).map_err(Errno::raw_os_error));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Err(libc::EAGAIN)));
    sync::close(a).unwrap();
}

/// The same for a file of which no byte can be sent.
#[test]
fn a_sendfile_whose_time_is_up_says_eagain() {
    let (a, b) = pair(SOCK_STREAM);
    // The peer's buffer, and the bytes that may also be under way.
    let full = vec![1_u8; 1 << 16];
    let mut full_for = 0;
    while full_for < 20 {
        let sent = send(a, &full, MSG_DONTWAIT);
        full_for = if sent.is_ok() { 0 } else { full_for + 1 };
        if full_for > 0 {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    limit(a, SO_SNDTIMEO, 300);
    let told = aside(move || {
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        let mut off = 0;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let got = unsafe { sync::sendfile(a, fd, &raw mut off, 100_000) };
        got.map_err(Errno::raw_os_error)
    });
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Err(libc::EAGAIN)));
    sync::close(b).unwrap();
}

/// The bytes that a nonblocking send has accepted are in the stream: a time limit, which is for blocking calls, makes no hole in it.
#[test]
fn a_limit_of_blocking_sends_makes_no_hole_in_what_was_taken() {
    let (a, b) = pair(SOCK_STREAM);
    limit(a, SO_SNDTIMEO, 300);
    let mut next = 0_u32;
    let mut send_next = |len: usize| {
        let words: Vec<u8> = (next..next + len as u32 / 4)
            .flat_map(u32::to_le_bytes)
            .collect();
        let n = send(a, &words, MSG_DONTWAIT);
        if let Ok(n) = n {
            assert_eq!(n % 4, 0);
            next += n as u32 / 4;
        }
        n
    };
    // The peer's buffer, 1 MiB, and then two that wait: their time limits expire one after the other.
    let mut left = 17 << 16;
    let begun = Instant::now();
    while left > 0 {
        match send_next(left.min(1 << 16)) {
            Ok(n) => left -= n as usize,
            // Still on its way to the peer.
            Err(Errno::AGAIN) if begun.elapsed() < PATIENCE => std::thread::yield_now(),
            Err(errno) => panic!("{errno}, {left} left"),
        }
    }
    std::thread::sleep(Duration::from_millis(200));
    send_next(1 << 16).unwrap();
    // Between the two time limits.
    std::thread::sleep(Duration::from_millis(200));
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        let mut buf = vec![0_u8; 1 << 16];
        loop {
            match recv(b, &mut buf, 0) {
                Ok(n @ 1..) => all.extend_from_slice(&buf[..n as usize]),
                _ => break all,
            }
        }
    });
    std::thread::sleep(Duration::from_secs(1));
    sync::close(a).unwrap();
    let all = reader.join().unwrap();
    let wrong = all
        .chunks_exact(4)
        .zip(0_u32..)
        .find(|(word, at)| **word != at.to_le_bytes());
    assert_eq!(wrong.map(|w| w.1 * 4), None, "where the hole begins");
    assert_eq!(all.len(), next as usize * 4, "taken, and lost");
}

extern "C" fn handled(_: c_int) {}

/// The result of a call in whose thread a signal handler runs repeatedly, 100 ms apart.
fn interrupted(
    times: usize,
    call: impl FnOnce() -> Result<isize, Errno> + Send + 'static,
) -> Option<Result<isize, c_int>> {
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handled as *const () as usize;
        assert_eq!(
            libc::sigaction(libc::SIGUSR1, &raw const action, null_mut()),
            0
        );
    }
    let (tell, told) = channel();
    let thread = std::thread::spawn(move || {
        let _ = tell.send(call().map_err(Errno::raw_os_error));
    });
    let begun = Instant::now();
    let mut left = times;
    std::thread::sleep(Duration::from_millis(300));
    while begun.elapsed() < Duration::from_secs(12) {
        if left > 0 {
            left -= 1;
            unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) };
        }
        if let Ok(result) = told.recv_timeout(Duration::from_millis(100)) {
            return Some(result);
        }
    }
    None
}

fn signals_end_a_receive(times: usize, test: &str) {
    let (b, mut child) = stopped(SOCK_STREAM, test);
    let got = interrupted(times, move || recv(b, &mut vec![0; 1 << 16], 0));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(got, Some(Err(libc::EINTR)), "it waits on");
}

/// One signal ends a blocking receive after the peer's 3 s; so do many signals.
#[test]
fn many_signals_end_a_receive_from_a_stopped_peer() {
    signals_end_a_receive(1000, "many_signals_end");
}

/// The same for a message, with `recvmsg` and one signal.
#[test]
fn a_signal_ends_a_recvmsg_from_a_stopped_peer() {
    let (b, mut child) = stopped(SOCK_SEQPACKET, "a_signal_ends");
    let got = interrupted(1, move || recv_message(b));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(got, Some(Err(libc::EINTR)), "it waits on");
}

/// Data that a program sends by a system socket, and finishes with `end` and an exit, arrives.
fn arrives_by_tcp(test: &str, end: impl FnOnce(c_int, c_int)) {
    const LEN: usize = 32 << 20;
    if let Ok(port) = std::env::var("WEFT_LIMITS_PORT") {
        let near = std::net::TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
        let fd = near.into_raw_fd();
        let qh = queue::qcreate(8).unwrap();
        start_send(fd, vec![1_u8; LEN].leak(), qh);
        end(fd, qh);
        std::process::exit(0);
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut child = again(test, "WEFT_LIMITS_PORT", port);
    let mut child = child.arg("--exact").spawn().unwrap();
    let (mut far, _) = listener.accept().unwrap();
    // It ends before the data is read.
    std::thread::sleep(Duration::from_secs(1));
    let mut all = Vec::new();
    let end = std::io::Read::read_to_end(&mut far, &mut all).map_err(|e| e.kind());
    child.wait().unwrap();
    assert_eq!((end.is_ok(), all.len()), (true, LEN));
}

#[test]
fn what_was_sent_by_tcp_arrives_when_the_program_ends_after_a_close() {
    let test = "what_was_sent_by_tcp_arrives_when_the_program_ends_after_a_close";
    arrives_by_tcp(test, |fd, qh| {
        socket::close(fd, 0, qh, NONE).unwrap();
    });
}

#[test]
fn what_was_sent_by_tcp_arrives_when_the_program_ends_after_a_close_without_a_queue() {
    let test = "what_was_sent_by_tcp_arrives_when_the_program_ends_after_a_close_without_a_queue";
    arrives_by_tcp(test, |fd, _| {
        let none = EXS_QHANDLE_INVALID as c_int;
        socket::close(fd, 0, none, NONE).unwrap();
    });
}

#[test]
fn what_was_sent_by_tcp_arrives_when_the_program_ends_without_a_close() {
    let test = "what_was_sent_by_tcp_arrives_when_the_program_ends_without_a_close";
    arrives_by_tcp(test, |_, _| {});
}

/// The result of a forked child's close of its parent's socket, with a queue or without. The number is free afterwards.
fn child_closes(with_queue: bool) {
    let (a, b) = pair(SOCK_STREAM);
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let qh = if with_queue {
            queue::qcreate(8)
        } else {
            Ok(EXS_QHANDLE_INVALID as c_int)
        };
        let told = qh.and_then(|qh| socket::close(a, 0, qh, NONE));
        let told = told.map_or_else(Errno::raw_os_error, |_| 0);
        let open = unsafe { libc::fcntl(a, libc::F_GETFD) } >= 0;
        unsafe { libc::_exit(if open { 200 } else { told }) };
    }
    let mut status = 0;
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    let sent = send(a, b"on", 0);
    assert_eq!(sent, Ok(2), "the parent goes on");
    sync::close(a).unwrap();
    sync::close(b).unwrap();
    assert!(libc::WIFEXITED(status));
    assert_eq!(libc::WEXITSTATUS(status), libc::ENOTCONN, "200: it is open");
}

#[test]
fn a_close_of_a_parents_socket_with_a_queue_says_enotconn() {
    child_closes(true);
}

#[test]
fn a_close_of_a_parents_socket_without_a_queue_says_enotconn() {
    child_closes(false);
}

/// One signal is enough too.
#[test]
fn one_signal_ends_a_receive_from_a_stopped_peer() {
    signals_end_a_receive(1, "one_signal_ends");
}

/// `shutdown(SHUT_RD)` ends a `recvmsg` that waits for a message.
#[test]
fn a_shutdown_ends_a_recvmsg_of_messages() {
    let (a, b) = pair(SOCK_SEQPACKET);
    let told = asleep(move || recv_message(b));
    sync::shutdown(b, libc::SHUT_RD).unwrap();
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Ok(0)));
    sync::close(a).unwrap();
    sync::close(b).unwrap();
}

/// A connection whose time limit expires ends all outstanding operations; only those with their own limit report that limit.
#[test]
fn what_had_no_limit_of_time_does_not_say_that_it_ran_into_one() {
    let (b, mut child) = stopped(SOCK_STREAM, "what_had_no_limit");
    let qh = queue::qcreate(8).unwrap();
    let buf = vec![0_u8; 1 << 17].leak();
    let recv = |at: &mut [u8], ah: usize| {
        let ah = AHandle(std::ptr::without_provenance_mut(ah));
        unsafe { socket::recv(b, at.as_mut_ptr().cast(), at.len(), 0, qh, ah, 0) }.unwrap();
    };
    let (first, second) = buf.split_at_mut(1 << 16);
    recv(first, 1);
    limit(b, SO_RCVTIMEO, 200);
    recv(second, 2);
    let mut all = [(); 2].map(|()| next_event(qh, 10).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    all.sort_by_key(|event| event.exs_evt_ahandle.0.addr());
    let told: Vec<_> = all
        .iter()
        .map(|event| (i64::from(event.exs_evt_type), event.exs_evt_errno))
        .collect();
    let expected = [EXS_EVT_RECV, EXS_EVT_RECVTIMEOUT].map(|kind| (kind, libc::ETIMEDOUT));
    assert_eq!(told, expected);
}

/// Outstanding operations continue when their queue is deleted, and can still be cancelled: their memory is the program's again.
#[test]
fn operations_of_a_deleted_queue_can_be_cancelled() {
    let (a, b) = pair(SOCK_STREAM);
    let buf = vec![0_u8; 1 << 16].leak();
    let mh = unsafe { memory::mregister(buf.as_mut_ptr().cast(), buf.len(), 0) }.unwrap();
    let qh = queue::qcreate(8).unwrap();
    start_recv(b, buf, 0, qh, mh);
    queue::qdelete(qh).unwrap();
    // Another queue is deleted as well: its cleanup must not come too early for the first one.
    queue::qdelete(queue::qcreate(8).unwrap()).unwrap();
    assert_eq!(memory::mderegister(mh), Err(Errno::BUSY));
    assert_eq!(socket::cancel(b, EXS_CAF_FILDES as c_int, NONE), Ok(1));
    let end = Instant::now() + PATIENCE;
    while memory::mderegister(mh).is_err() {
        assert!(Instant::now() < end, "it is still in use");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(socket::cancel(b, EXS_CAF_FILDES as c_int, NONE), Ok(0));
    sync::close(a).unwrap();
    sync::close(b).unwrap();
}

/// Data that a closed socket still sends is no operation of the next socket with its number.
#[test]
fn a_cancel_does_not_reach_what_had_the_number_before() {
    const LEN: usize = 8 << 20;
    let (a, b) = pair(SOCK_STREAM);
    let buf = vec![1_u8; LEN].leak();
    let qh = queue::qcreate(8).unwrap();
    start_send(a, buf, qh);
    socket::close(a, 0, qh, NONE).unwrap();
    // Other tests take descriptors at the same time, perhaps this one.
    let mut next = Vec::new();
    while !next.contains(&a) && next.len() < 100 {
        next.push(socket::socket(AF_INET, SOCK_STREAM, 0).unwrap());
    }
    if next.last() == Some(&a) {
        assert_eq!(socket::cancel(a, EXS_CAF_FILDES as c_int, NONE), Ok(0));
    }
    let mut all = vec![0_u8; LEN];
    let got = recv(b, &mut all, libc::MSG_WAITALL);
    assert_eq!(got, Ok(LEN.cast_signed()));
    for fd in next.into_iter().chain([b]) {
        sync::close(fd).unwrap();
    }
}
