//! Each wrapper against the kernel.

#![allow(clippy::many_single_char_names)] // x and y are short-lived buffers

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use weft_sys::{Epoll, EventFd, Interest, limits, map, poll_fds, raw, tcp};

const LONG: Option<Duration> = Some(Duration::from_secs(10));
const NOW: Option<Duration> = Some(Duration::ZERO);

fn iov(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    }
}

/// Connects to a listener; both ends.
fn pair(listener: &OwnedFd, bind: Option<SocketAddr>) -> (OwnedFd, OwnedFd) {
    let to = tcp::local_addr(listener).unwrap();
    let near = tcp::connect_start(to, bind).unwrap();
    poll_fds(&[(near.as_fd(), Interest::WRITE)], LONG).unwrap();
    assert!(tcp::connect_result(&near).unwrap());
    poll_fds(&[(listener.as_fd(), Interest::READ)], LONG).unwrap();
    let (far, from) = tcp::accept(listener).unwrap().unwrap();
    assert_eq!(from, tcp::local_addr(&near).unwrap());
    assert_eq!(
        tcp::peer_addr(&near).unwrap(),
        tcp::local_addr(&far).unwrap()
    );
    (near, far)
}

#[test]
fn tcp_from_listen_to_close() {
    let listener = tcp::listen("127.0.0.1:0".parse().unwrap(), 8).unwrap();
    assert!(tcp::accept(&listener).unwrap().is_none());
    let (near, far) = pair(&listener, Some("127.0.0.2:0".parse().unwrap()));
    assert_eq!(tcp::peer_addr(&far).unwrap().ip().to_string(), "127.0.0.2");
    tcp::set_nodelay(&near, true).unwrap();
    assert!(tcp::mss(&near).unwrap() >= 536);

    let (mut a, mut b, mut empty) = (*b"hello ", *b"world", [0; 0]);
    // SAFETY: the arrays outlive the call.
    let sent = unsafe {
        raw::send_raw(
            near.as_fd(),
            &[iov(&mut a), iov(&mut empty), iov(&mut b)],
            false,
        )
    };
    assert_eq!(sent.unwrap(), 11);
    poll_fds(&[(far.as_fd(), Interest::READ)], LONG).unwrap();
    let (mut x, mut y) = ([0; 4], [0; 100]);
    // SAFETY: the arrays outlive the calls and are not looked at meanwhile.
    unsafe {
        let got = raw::recv_raw(far.as_fd(), &[iov(&mut x), iov(&mut y)]);
        assert_eq!(got.unwrap(), 11);
        assert_eq!((&x, &y[..7]), (b"hell", &b"o world"[..]));
        let e = raw::recv_raw(far.as_fd(), &[iov(&mut x)]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::WouldBlock);
        // One range, and MSG_MORE: what is held back goes out with the next.
        assert_eq!(
            raw::send_raw(near.as_fd(), &[iov(&mut a)], true).unwrap(),
            6
        );
        assert_eq!(
            raw::send_raw(near.as_fd(), &[iov(&mut b)], false).unwrap(),
            5
        );
    }
    tcp::shutdown_write(&near).unwrap();
    let mut far = TcpStream::from(far);
    far.set_nonblocking(false).unwrap();
    let mut rest = String::new();
    far.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "hello world");

    // The other direction still works, and an abortive close is an error at the peer.
    far.write_all(b"!").unwrap();
    poll_fds(&[(near.as_fd(), Interest::READ)], LONG).unwrap();
    tcp::set_linger0(&near).unwrap();
    drop(near);
    assert!(far.write_all(&[0; 1]).is_err() || far.write_all(&[0; 1]).is_err());
    let mut one = [0];
    let far = OwnedFd::from(far);
    // SAFETY: the array outlives the call.
    let e = unsafe { raw::send_raw(far.as_fd(), &[iov(&mut one)], false) }.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::BrokenPipe, "and no signal");
}

#[test]
fn a_refused_connection_says_so() {
    let listener = tcp::listen("127.0.0.1:0".parse().unwrap(), 1).unwrap();
    let to = tcp::local_addr(&listener).unwrap();
    let e = tcp::listen(to, 1).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::AddrInUse);
    drop(listener);
    // On loopback the answer may come at once or later.
    let e = match tcp::connect_start(to, None) {
        Ok(fd) => {
            poll_fds(&[(fd.as_fd(), Interest::WRITE)], LONG).unwrap();
            tcp::connect_result(&fd).unwrap_err()
        }
        Err(e) => e,
    };
    assert_eq!(e.kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn a_port_that_is_not_shared_is_taken_at_once() {
    let options = tcp::BindOptions {
        share: false,
        ..tcp::BindOptions::default()
    };
    let taken = tcp::bind("127.0.0.1:0".parse().unwrap(), options).unwrap();
    let addr = tcp::local_addr(&taken).unwrap();
    for options in [options, tcp::BindOptions::default()] {
        let e = tcp::bind(addr, options).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::AddrInUse);
    }
    // The listener closes first, so that its side of the connection fades.
    tcp::listen_bound(&taken, 1).unwrap();
    let (near, far) = pair(&taken, None);
    drop((far, taken));
    poll_fds(&[(near.as_fd(), Interest::READ)], LONG).unwrap();
    drop(near);
    tcp::bind(addr, options).unwrap();
}

#[test]
fn ipv6_alone_or_with_ipv4() {
    let Ok(only) = tcp::listen("[::1]:0".parse().unwrap(), 8) else {
        println!("skipped: this machine has no IPv6 loopback");
        return;
    };
    pair(&only, None);
    let options = tcp::BindOptions {
        v6_only: false,
        ..tcp::BindOptions::default()
    };
    let dual = tcp::bind("[::]:0".parse().unwrap(), options).unwrap();
    tcp::listen_bound(&dual, 8).unwrap();
    let port = tcp::local_addr(&dual).unwrap().port();
    let near = TcpStream::connect(("127.0.0.1", port)).unwrap();
    poll_fds(&[(dual.as_fd(), Interest::READ)], LONG).unwrap();
    let (_far, from) = tcp::accept(&dual).unwrap().unwrap();
    assert_eq!(from.ip().to_canonical(), near.local_addr().unwrap().ip());

    let only = tcp::listen("[::]:0".parse().unwrap(), 8).unwrap();
    let port = tcp::local_addr(&only).unwrap().port();
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
}

#[test]
fn epoll_reports_what_was_asked() {
    let epoll = Epoll::new().unwrap();
    let bell = EventFd::new().unwrap();
    let mut events = Vec::new();
    epoll.add(&bell, 42, Interest::READ).unwrap();
    let again = epoll.add(&bell, 1, Interest::READ).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    epoll.wait(&mut events, NOW).unwrap();
    assert!(events.is_empty());
    bell.signal();
    bell.signal();
    epoll.wait(&mut events, None).unwrap();
    assert_eq!(events.len(), 1);
    let e = events[0];
    assert_eq!(
        (e.token, e.readable, e.writable, e.hangup),
        (42, true, false, false)
    );
    assert!(bell.drain());
    assert!(!bell.drain(), "both signals were one");
    epoll.wait(&mut events, NOW).unwrap();
    assert!(events.is_empty());

    // One shot: silent after the first event, until armed again.
    epoll
        .modify(&bell, 43, Interest::READ | Interest::ONESHOT)
        .unwrap();
    bell.signal();
    for expected in [1, 0] {
        epoll.wait(&mut events, NOW).unwrap();
        assert_eq!(events.len(), expected);
    }
    epoll
        .modify(&bell, 44, Interest::READ | Interest::EDGE)
        .unwrap();
    for expected in [1, 0] {
        epoll.wait(&mut events, NOW).unwrap();
        assert_eq!(events.len(), expected, "a level is not an edge");
    }
    bell.signal();
    epoll.wait(&mut events, NOW).unwrap();
    assert_eq!(events[0].token, 44);
    epoll.delete(&bell).unwrap();
    epoll.wait(&mut events, NOW).unwrap();
    assert!(events.is_empty());
    assert_eq!(epoll.delete(&bell).unwrap_err().kind(), ErrorKind::NotFound);

    // Stopped sending, then gone.
    let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
    epoll
        .add(&near, 7, Interest::READ | Interest::WRITE)
        .unwrap();
    far.shutdown(std::net::Shutdown::Write).unwrap();
    epoll.wait(&mut events, LONG).unwrap();
    assert!(events[0].readable && events[0].writable && !events[0].hangup);
    drop(far);
    epoll.wait(&mut events, LONG).unwrap();
    assert!(events[0].hangup);
}

#[test]
fn waits_are_as_long_as_asked() {
    let epoll = Epoll::new().unwrap();
    let bell = EventFd::new().unwrap();
    let mut events = Vec::new();
    for wait in [Duration::from_micros(2_300), Duration::from_millis(2)] {
        let start = Instant::now();
        epoll.wait(&mut events, Some(wait)).unwrap();
        assert!(start.elapsed() >= wait);
        let start = Instant::now();
        let ready = poll_fds(&[(bell.as_fd(), Interest::READ)], Some(wait)).unwrap();
        assert!(ready == 0 && start.elapsed() >= wait);
    }
    // So short that a millisecond would show, and never none at all.
    let start = Instant::now();
    for _ in 0..100 {
        epoll
            .wait(&mut events, Some(Duration::from_nanos(1)))
            .unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn poll_answers_by_position() {
    let bells: Vec<_> = (0..64).map(|_| EventFd::new().unwrap()).collect();
    bells[3].signal();
    bells[63].signal();
    let mut list: Vec<_> = bells.iter().map(|b| (b.as_fd(), Interest::READ)).collect();
    assert_eq!(poll_fds(&list, None).unwrap(), 1 << 3 | 1 << 63);
    list.push(list[0]);
    let e = poll_fds(&list, NOW).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidInput);
}

#[test]
fn files_at_offsets() {
    let path = std::env::temp_dir().join(format!("weft-sys-{}", std::process::id()));
    let file = std::fs::File::options()
        .create_new(true)
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    let far = (1_u64 << 33) + 1;
    let (mut a, mut b) = (*b"abc", *b"de");
    // SAFETY: the arrays outlive the calls.
    unsafe {
        let n = raw::pwritev_raw(file.as_fd(), &[iov(&mut a), iov(&mut b)], far).unwrap();
        assert_eq!(n, 5);
        let (mut x, mut y) = ([0; 2], [0; 9]);
        let n = raw::preadv_raw(file.as_fd(), &[iov(&mut x), iov(&mut y)], far).unwrap();
        assert_eq!((n, &x, &y[..3]), (5, b"ab", &b"cde"[..]));
        assert_eq!(
            raw::write_raw(file.as_fd(), a.as_ptr(), 3, None).unwrap(),
            3
        );
        assert_eq!(
            raw::write_raw(file.as_fd(), b.as_ptr(), 2, Some(1)).unwrap(),
            2
        );
        assert_eq!(
            raw::read_raw(file.as_fd(), y.as_mut_ptr(), 3, Some(0)).unwrap(),
            3
        );
        assert_eq!(&y[..3], b"ade");
        assert_eq!(
            raw::read_raw(file.as_fd(), y.as_mut_ptr(), 1, None).unwrap(),
            1
        );
        assert_eq!(
            y[0], 0,
            "a hole, after the three bytes written at the position"
        );
        let end = raw::read_raw(file.as_fd(), y.as_mut_ptr(), 1, Some(far + 5));
        assert_eq!(end.unwrap(), 0);
    }
}

#[test]
fn maps_come_zeroed_and_go() {
    assert!(map::map_anonymous(0).is_err());
    let len = 10_000;
    let p = map::map_anonymous(len).unwrap();
    // SAFETY: our own mapping.
    unsafe {
        assert_eq!(p.add(len - 1).read(), 0);
        p.write(1);
        if limits::memlock() >= len as u64 + 8192 {
            map::lock(p, len).unwrap();
            map::unlock(p, len).unwrap();
        }
        map::unmap(p, len).unwrap();
    }
}

#[test]
fn what_the_machine_allows() {
    let (soft, hard) = limits::nofile();
    assert!(0 < soft && soft <= hard);
    assert_eq!(limits::raise_nofile(), hard);
    assert_eq!(limits::nofile(), (hard, hard));
    assert!(weft_sys::cpu_count() >= 1);
    weft_sys::thread::sched_yield();
    let before = weft_sys::rusage_thread();
    let start = Instant::now();
    while weft_sys::rusage_thread().0 + weft_sys::rusage_thread().1 < before.0 + before.1 + 0.02 {
        assert!(start.elapsed() < Duration::from_secs(30));
    }
    let (user, system) = weft_sys::rusage_self();
    assert!(user + system >= 0.02);
}
