//! A child that is forked while another thread of its parent is within the libraries continues alone: it waits for nothing that only that thread could do.
#![cfg(all(feature = "verbs", feature = "exs"))]
#![allow(clippy::undocumented_unsafe_blocks)] // every call here is as its manual page says

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use libc::{AF_INET, SOCK_STREAM, sockaddr, sockaddr_in, socklen_t};
use weft_abi::exs::init;
use weft_abi::exs::types::EXS_VERSION1;
use weft_abi::verbs::rsock::*;

/// Seconds after which a child counts as hanging.
const PATIENCE: u32 = 30;

/// Runs this in a child, under a time limit.
fn fork(body: impl FnOnce() -> bool) -> libc::pid_t {
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        unsafe { libc::alarm(PATIENCE) };
        let good = body();
        unsafe { libc::_exit(c_int::from(!good)) };
    }
    pid
}

/// True if it has ended well.
fn ended(pid: libc::pid_t) -> bool {
    let mut status = 0;
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    waited == pid && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

/// Forks repeatedly while other threads run `busy` again and again, in a fresh process. Returns true if all children could run `body`.
fn amid(busy: fn() -> bool, threads: usize, body: fn() -> bool, forks: usize) -> bool {
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    static ENOUGH: AtomicBool = AtomicBool::new(false);
    let process = fork(|| {
        unsafe { libc::alarm(4 * PATIENCE) };
        let work = move || {
            STARTED.fetch_add(1, Ordering::SeqCst);
            let mut good = true;
            while good && !ENOUGH.load(Ordering::SeqCst) {
                good = busy();
            }
        };
        let threads: Vec<_> = (0..threads).map(|_| std::thread::spawn(work)).collect();
        while STARTED.load(Ordering::SeqCst) < threads.len() {
            std::hint::spin_loop();
        }
        let children: Vec<_> = (0..forks).map(|_| fork(body)).collect();
        let hanging = children.into_iter().filter(|pid| !ended(*pid)).count();
        ENOUGH.store(true, Ordering::SeqCst);
        threads.into_iter().all(|thread| thread.join().is_ok()) && hanging == 0
    });
    ended(process)
}

fn begin() -> bool {
    init(EXS_VERSION1 as _).is_ok()
}

#[test]
fn extended_sockets_begin_in_a_child_of_a_beginner() {
    for trial in 0..10 {
        assert!(amid(begin, 1, begin, 8), "trial {trial}");
    }
}

/// Makes a connection, and closes it.
fn rsockets() -> bool {
    const LEN: socklen_t = size_of::<sockaddr_in>() as socklen_t;
    let mut addr: sockaddr_in = unsafe { std::mem::zeroed() };
    addr.sin_family = AF_INET as u16;
    addr.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
    let at = (&raw mut addr).cast::<sockaddr>();
    let mut len = LEN;
    let [listener, client] = [(); 2].map(|()| rsocket(AF_INET, SOCK_STREAM, 0));
    let mut good = listener >= 0 && client >= 0;
    unsafe {
        good = good && rbind(listener, at, LEN) == 0 && rlisten(listener, 4) == 0;
        good =
            good && rgetsockname(listener, at, &raw mut len) == 0 && rconnect(client, at, LEN) == 0;
        let server = raccept(listener, null_mut(), null_mut());
        good && [server, client, listener].map(rclose) == [0; 3]
    }
}

#[test]
fn rsockets_are_closed_in_a_child_of_one_who_closes_some() {
    assert!(amid(rsockets, 4, rsockets, 300));
}
