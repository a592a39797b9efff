//! Blocking calls end when a signal's handler runs in the thread that waits: those of rsockets, and of extended sockets.
#![cfg(all(feature = "verbs", feature = "exs"))]
#![allow(clippy::undocumented_unsafe_blocks)] // every call here is as its manual page says
#![allow(clippy::cast_possible_wrap)]

#[path = "common/sockets.rs"]
mod sockets;

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::os::unix::thread::JoinHandleExt as _;
use std::ptr::{null, null_mut};
use std::sync::Once;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use libc::{
    AF_INET, MSG_WAITALL, POLLIN, SA_RESTART, SIGUSR1, SIGUSR2, SOCK_STREAM, pollfd, sockaddr,
    sockaddr_in, socklen_t,
};
use sockets::{listening, pair};
use weft_abi::call::run;
use weft_abi::exs::types::{AHandle, Event, QHandle};
use weft_abi::exs::{queue, socket, sync};
use weft_abi::verbs::rsock::*;

const INTERRUPTED: Result<i64, c_int> = Err(libc::EINTR);
/// One handler without a flag, and one with the flag under which the system restarts its own calls.
const SIGNALS: [c_int; 2] = [SIGUSR1, SIGUSR2];

extern "C" fn handled(_: c_int) {}

fn handle() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (signal, flags) in [(SIGUSR1, 0), (SIGUSR2, SA_RESTART)] {
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = handled as *const () as usize;
                action.sa_flags = flags;
                assert_eq!(libc::sigaction(signal, &raw const action, null_mut()), 0);
            }
        }
    });
}

/// The result or `errno` of a call in whose thread a signal handler runs again and again until the call returns.
fn interrupted(signal: c_int, call: impl FnOnce() -> i64 + Send + 'static) -> Result<i64, c_int> {
    handle();
    let (back, result) = channel();
    let thread = std::thread::spawn(move || {
        let result = match call() {
            -1 => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
            result => Ok(result),
        };
        back.send(result).unwrap();
    });
    let begun = Instant::now();
    loop {
        match result.recv_timeout(Duration::from_millis(1)) {
            Ok(result) => {
                thread.join().unwrap();
                return result;
            }
            Err(RecvTimeoutError::Disconnected) => panic!("the call panicked"),
            Err(RecvTimeoutError::Timeout) => {}
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "it waits on");
        unsafe { libc::pthread_kill(thread.as_pthread_t(), signal) };
    }
}

const LEN: socklen_t = size_of::<sockaddr_in>() as socklen_t;

fn loopback() -> sockaddr_in {
    let mut addr: sockaddr_in = unsafe { std::mem::zeroed() };
    addr.sin_family = AF_INET as u16;
    addr.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
    addr
}

/// A TCP port that never answers: a connect to it waits.
fn nobody() -> (std::net::TcpListener, sockaddr_in) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let SocketAddr::V4(at) = listener.local_addr().unwrap() else {
        unreachable!()
    };
    let mut addr = loopback();
    addr.sin_port = at.port().to_be();
    (listener, addr)
}

fn rlistening() -> (c_int, sockaddr_in) {
    let mut addr = loopback();
    let at = (&raw mut addr).cast::<sockaddr>();
    let mut len = LEN;
    let listener = rsocket(AF_INET, SOCK_STREAM, 0);
    unsafe {
        assert_eq!(rbind(listener, at, LEN), 0);
        assert_eq!(rlisten(listener, 4), 0);
        assert_eq!(rgetsockname(listener, at, &raw mut len), 0);
    }
    (listener, addr)
}

fn rpair() -> [c_int; 2] {
    let (listener, addr) = rlistening();
    let client = rsocket(AF_INET, SOCK_STREAM, 0);
    unsafe {
        assert_eq!(rconnect(client, (&raw const addr).cast(), LEN), 0);
        let server = raccept(listener, null_mut(), null_mut());
        assert!(server >= 0);
        assert_eq!(rclose(listener), 0);
        [client, server]
    }
}

fn rreceive(socket: c_int, want: usize, flags: c_int) -> i64 {
    let mut bytes = vec![0u8; want];
    unsafe { rrecv(socket, bytes.as_mut_ptr().cast(), want, flags) as i64 }
}

#[test]
fn an_rsocket_that_waits_for_data() {
    let [client, server] = rpair();
    for signal in SIGNALS {
        assert_eq!(
            interrupted(signal, move || rreceive(server, 8, 0)),
            INTERRUPTED
        );
        // Earlier data is not lost with it.
        assert_eq!(unsafe { rsend(client, b"abc".as_ptr().cast(), 3, 0) }, 3);
        let all = interrupted(signal, move || rreceive(server, 8, MSG_WAITALL));
        assert_eq!(all, Ok(3));
    }
    assert_eq!(rclose(client), 0);
    assert_eq!(rclose(server), 0);
}

#[test]
fn an_rsocket_that_waits_for_room() {
    const MUCH: usize = 64 << 20;
    let [client, server] = rpair();
    // From the program's memory, which is the program's again when the call returns.
    let sent = interrupted(SIGUSR1, move || {
        let bytes = vec![7u8; MUCH];
        unsafe { rsend(client, bytes.as_ptr().cast(), MUCH, 0) as i64 }
    });
    let sent = usize::try_from(sent.unwrap()).unwrap();
    assert!(0 < sent && sent < MUCH, "{sent}");
    let again = interrupted(SIGUSR1, move || unsafe {
        rsend(client, [1u8; 100].as_ptr().cast(), 100, 0) as i64
    });
    assert_eq!(again, INTERRUPTED);
    assert_eq!(rreceive(server, sent, MSG_WAITALL), sent as i64);
    assert_eq!(rclose(client), 0);
    assert_eq!(rclose(server), 0);
}

#[test]
fn an_rsocket_that_waits_for_a_connection() {
    let (listener, addr) = rlistening();
    for signal in SIGNALS {
        let accepted = interrupted(signal, move || unsafe {
            i64::from(raccept(listener, null_mut(), null_mut()))
        });
        assert_eq!(accepted, INTERRUPTED);
    }
    // It still listens.
    let client = rsocket(AF_INET, SOCK_STREAM, 0);
    unsafe {
        assert_eq!(rconnect(client, (&raw const addr).cast(), LEN), 0);
        let server = raccept(listener, null_mut(), null_mut());
        assert!(server >= 0);
        for socket in [client, server, listener] {
            assert_eq!(rclose(socket), 0);
        }
    }
    let (_nobody, addr) = nobody();
    let client = rsocket(AF_INET, SOCK_STREAM, 0);
    let connect = move || unsafe { i64::from(rconnect(client, (&raw const addr).cast(), LEN)) };
    assert_eq!(interrupted(SIGUSR1, connect), INTERRUPTED);
    // The connection is still being made.
    assert_eq!(interrupted(SIGUSR1, connect), Err(libc::EALREADY));
    assert_eq!(rclose(client), 0);
}

#[test]
fn rpoll_of_one_and_of_several() {
    let [client, server] = rpair();
    for signal in SIGNALS {
        for count in [1, 2] {
            let polled = interrupted(signal, move || {
                let entry = |fd| pollfd {
                    fd,
                    events: POLLIN,
                    revents: 0,
                };
                let mut fds = [entry(server), entry(client)];
                i64::from(unsafe { rpoll(fds.as_mut_ptr(), count, -1) })
            });
            assert_eq!(polled, INTERRUPTED);
        }
    }
    assert_eq!(rclose(client), 0);
    assert_eq!(rclose(server), 0);
}

fn ereceive(socket: c_int, want: usize, flags: c_int) -> i64 {
    let mut bytes = vec![0u8; want];
    run(|| unsafe { sync::recv_mh(socket, bytes.as_mut_ptr().cast(), want, flags, 0) }) as i64
}

fn dequeue(q: QHandle, count: c_int) -> i64 {
    let mut events: Vec<Event> = Vec::with_capacity(8);
    run(|| unsafe { queue::qdequeue(q, events.as_mut_ptr(), count, null()) }).into()
}

#[test]
fn an_extended_socket_that_waits() {
    let (client, server) = pair(SOCK_STREAM);
    for signal in SIGNALS {
        assert_eq!(
            interrupted(signal, move || ereceive(server, 8, 0)),
            INTERRUPTED
        );
        unsafe { sync::send_mh(client, b"abc".as_ptr().cast(), 3, 0, 0) }.unwrap();
        let all = interrupted(signal, move || ereceive(server, 8, MSG_WAITALL));
        assert_eq!(all, Ok(3));
        let (listener, _) = listening(SOCK_STREAM);
        let accepted = interrupted(signal, move || {
            i64::from(run(|| unsafe {
                sync::accept4(listener, null_mut(), null_mut(), 0)
            }))
        });
        assert_eq!(accepted, INTERRUPTED);
        sync::close(listener).unwrap();
    }
    let (_nobody, addr) = nobody();
    let other = sync::socket(AF_INET, SOCK_STREAM, 0).unwrap();
    let connect = move || {
        i64::from(run(|| unsafe {
            sync::connect(other, (&raw const addr).cast(), LEN)
        }))
    };
    assert_eq!(interrupted(SIGUSR1, connect), INTERRUPTED);
    assert_eq!(interrupted(SIGUSR1, connect), Err(libc::EALREADY));
    for socket in [other, client, server] {
        sync::close(socket).unwrap();
    }
}

#[test]
fn an_event_queue_that_is_waited_for() {
    let q = queue::qcreate(8).unwrap();
    for signal in SIGNALS {
        // The queue is empty at first, then has one connection, for which the call waits in another way.
        assert_eq!(interrupted(signal, move || dequeue(q, 1)), INTERRUPTED);
    }
    let (client, server) = pair(SOCK_STREAM);
    let mut bytes = [0u8; 8];
    let at: *mut c_void = bytes.as_mut_ptr().cast();
    let receive = || run(|| unsafe { socket::recv(server, at, 8, 0, q, AHandle(null_mut()), 0) });
    assert_eq!(receive(), 0);
    for signal in SIGNALS {
        assert_eq!(interrupted(signal, move || dequeue(q, 1)), INTERRUPTED);
    }
    unsafe { sync::send_mh(client, b"abc".as_ptr().cast(), 3, 0, 0) }.unwrap();
    // Two are requested, and one is there.
    assert_eq!(interrupted(SIGUSR1, move || dequeue(q, -2)), Ok(1));
    assert_eq!(&bytes[..3], b"abc");
    for socket in [client, server] {
        sync::close(socket).unwrap();
    }
    queue::qdelete(q).unwrap();
}
