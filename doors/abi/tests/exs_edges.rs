//! The edge cases of libexs: closes during operations, deleted queues, stopped peers, invalid lengths.
#![cfg(feature = "exs")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call is given pointers to its own locals"
)]

use std::ffi::c_int;
use std::io::Read as _;
use std::os::fd::{AsRawFd as _, IntoRawFd as _};
use std::time::Duration;

use crate::sockets::{
    NONE, PATIENCE, accepted, again, aside, asleep, connected, listening, next_event, pair, recv,
    recv_message, send, start_recv, start_send, stopped,
};
use libc::{MSG_WAITALL, POLLIN, SOCK_STREAM, pollfd, socklen_t, timeval};
use rustix::io::Errno;
use weft_abi::exs::{option, queue, socket, sync};

fn cpu() -> Duration {
    let mut t: libc::timespec = unsafe { std::mem::zeroed() };
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut t) };
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// A socket is closed while another thread polls it.
#[test]
fn a_poll_of_a_socket_that_gets_closed_does_not_spin() {
    let (a, b) = pair(SOCK_STREAM);
    let told = asleep(move || {
        let mut fds = [pollfd {
            fd: a,
            events: POLLIN,
            revents: 0,
        }];
        unsafe { sync::poll(fds.as_mut_ptr(), 1, -1) }
    });
    sync::close(a).unwrap();
    sync::close(b).unwrap();
    let before = cpu();
    let ended = told.recv_timeout(Duration::from_secs(2));
    let used = cpu().saturating_sub(before);
    assert!(
        ended.is_ok() || used < Duration::from_millis(500),
        "it goes on for ever and took {used:?} of 2 s"
    );
}

/// Waits until there is something to read.
fn readable(fd: c_int) {
    let mut fds = [pollfd {
        fd,
        events: POLLIN,
        revents: 0,
    }];
    assert_eq!(unsafe { sync::poll(fds.as_mut_ptr(), 1, 20_000) }, Ok(1));
}

/// A receive on a nonblocking socket returns only the bytes that are there.
#[test]
fn waitall_on_a_socket_that_does_not_wait() {
    let (a, b) = pair(SOCK_STREAM);
    assert_eq!(send(a, b"0123456789", 0), Ok(10));
    readable(b);
    unsafe { sync::fcntl(b, libc::F_SETFL, libc::O_NONBLOCK as usize) }.unwrap();
    let told = aside(move || recv(b, &mut [0; 100], MSG_WAITALL));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Ok(10)));
}

fn tcp() -> (std::net::TcpStream, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

fn one(qh: c_int) -> Option<(c_int, c_int)> {
    let event = next_event(qh, 3)?;
    Some((event.exs_evt_type, event.exs_evt_errno))
}

/// `exs_close` of a system socket with a receive outstanding.
#[test]
fn a_close_of_an_ordinary_socket_ends_its_receives() {
    let (near, mut far) = tcp();
    let fd = near.into_raw_fd();
    let qh = queue::qcreate(8).unwrap();
    let mut buf = [0_u8; 16];
    start_recv(fd, &mut buf, 0, qh, 0);
    socket::close(fd, 0, -1, NONE).unwrap();
    far.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    // The event holds the connection until it is dequeued.
    let ended = one(qh).is_some();
    let peer = far.read(&mut [0; 1]).map_err(|e| e.kind());
    assert_eq!(
        (ended, peer),
        (true, Ok(0)),
        "(the receive ended, the peer saw the end)"
    );
}

/// Time limits of a system socket, set before there is an operation.
#[test]
fn a_time_limit_of_an_ordinary_socket_is_not_forgotten() {
    let (near, far) = tcp();
    let fd = near.as_raw_fd();
    let qh = queue::qcreate(8).unwrap();
    let limit = timeval {
        tv_sec: 0,
        tv_usec: 100_000,
    };
    let name = weft_abi::exs::types::SO_ASYNC_RECV_TIMEOUT as c_int;
    let size = size_of::<timeval>() as socklen_t;
    let mut buf = [0_u8; 16];
    let at = (&raw const limit).cast();
    unsafe { option::setsockopt(fd, libc::SOL_SOCKET, name, at, size) }.unwrap();
    for _ in 0..2 {
        start_recv(fd, &mut buf, 0, qh, 0);
        let timed_out = weft_abi::exs::types::EXS_EVT_RECVTIMEOUT as c_int;
        assert_eq!(one(qh), Some((timed_out, libc::ETIMEDOUT)));
    }
    drop(far);
}

/// `exs_qdelete` with a send outstanding on a system socket.
#[test]
fn what_is_outstanding_goes_on_when_its_queue_is_deleted() {
    let (near, mut far) = tcp();
    let fd = near.as_raw_fd();
    let qh = queue::qcreate(8).unwrap();
    let buf = vec![1_u8; 32 << 20].leak();
    start_send(fd, buf, qh);
    queue::qdelete(qh).unwrap();
    let mut got = Vec::new();
    far.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let _ = far.read_to_end(&mut got);
    assert_eq!(got.len(), buf.len());
    drop(near);
}

/// A program that passes its close to a queue, and ends.
#[test]
fn what_was_sent_arrives_when_the_program_ends_after_a_close() {
    const LEN: usize = 16 << 20;
    if let Ok(port) = std::env::var("WEFT_EDGES_PORT") {
        let a = connected(SOCK_STREAM, port.parse().unwrap());
        let qh = queue::qcreate(8).unwrap();
        start_send(a, vec![1_u8; LEN].leak(), qh);
        let with = if std::env::var("WEFT_EDGES_QUEUE").is_ok() {
            qh
        } else {
            -1
        };
        socket::close(a, 0, with, NONE).unwrap();
        std::process::exit(0);
    }
    let arrived = |queue: bool| {
        let (listener, addr) = listening(SOCK_STREAM);
        let port = u16::from_be(addr.sin_port);
        let mut child = again("what_was_sent", "WEFT_EDGES_PORT", port);
        if queue {
            child.env("WEFT_EDGES_QUEUE", "1");
        }
        let mut child = child.spawn().unwrap();
        let b = accepted(listener);
        // It ends before the data is read.
        std::thread::sleep(Duration::from_secs(1));
        let mut buf = vec![0_u8; LEN];
        let mut all = 0;
        while all < LEN {
            match recv(b, &mut buf, 0) {
                Ok(n) if n > 0 => all += n as usize,
                end => {
                    println!("{end:?}");
                    break;
                }
            }
        }
        child.wait().unwrap();
        all
    };
    assert_eq!(
        (arrived(false), arrived(true)),
        (LEN, LEN),
        "(close without a queue, with one)"
    );
}

/// A nonblocking receive of a message that has not arrived, from a peer that has stopped.
#[test]
fn a_recvmsg_that_does_not_wait_does_not_wait_for_the_peer() {
    let (b, mut child) = stopped(libc::SOCK_SEQPACKET, "a_recvmsg");
    unsafe { sync::fcntl(b, libc::F_SETFL, libc::O_NONBLOCK as usize) }.unwrap();
    let told = aside(move || recv_message(b));
    let got = told.recv_timeout(PATIENCE);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(got, Ok(Err(Errno::AGAIN)));
}

/// Data received in place on a socket that is closed before the event is dequeued.
#[test]
fn data_left_in_place_is_there_when_its_event_is_dequeued() {
    let (a, b) = pair(SOCK_STREAM);
    let qh = queue::qcreate(8).unwrap();
    let mut buf = [0_u8; 100];
    let flag = weft_abi::exs::types::EXS_IN_PLACE as c_int;
    assert_eq!(send(a, b"0123456789", 0), Ok(10));
    readable(b);
    start_recv(b, &mut buf, flag, qh, 0);
    std::thread::sleep(Duration::from_millis(300));
    socket::close(b, 0, -1, NONE).unwrap();
    socket::close(a, 0, -1, NONE).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let event = next_event(qh, 3).unwrap();
    unsafe {
        let xfer = event.exs_evt_union.exs_evt_xfer;
        let mut got = [0_u8; 10];
        let local = libc::iovec {
            iov_base: got.as_mut_ptr().cast(),
            iov_len: 10,
        };
        let remote = libc::iovec {
            iov_base: xfer.exs_evt_buffer,
            iov_len: 10,
        };
        let read =
            libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0);
        println!(
            "errno {} flags {} length {}",
            event.exs_evt_errno, event.exs_evt_flags, xfer.exs_evt_length
        );
        assert_eq!((event.exs_evt_errno, xfer.exs_evt_length), (0, 10));
        assert_eq!(
            (read, &got),
            (10, b"0123456789"),
            "the event names memory that is gone"
        );
    }
}

/// A vector with an absurd length.
#[test]
fn an_absurd_length_does_not_end_the_program() {
    if std::env::var("WEFT_EDGES_ABSURD").is_ok() {
        let (a, b) = pair(SOCK_STREAM);
        assert_eq!(send(a, b"0123456789", 0), Ok(10));
        let mut buf = [0_u8; 100];
        let iov = libc::iovec {
            iov_base: buf.as_mut_ptr().cast(),
            iov_len: 1 << 46,
        };
        let _ = unsafe { sync::readv(b, &raw const iov, 1) };
        std::process::exit(0);
    }
    let end = again("an_absurd", "WEFT_EDGES_ABSURD", 1).status().unwrap();
    assert!(end.success(), "{end}");
}
