//! UDP sockets that others are to read as well: they take no frames any more, and frames that peers may have sent are kept from readers without the library.
//!
//! # Safety
//!
//! Only our own memory is written.

use libc::c_int;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::ud::{self, LEASE_MS, Note, Opened};

use super::buffer::Buffer;
use super::frames::{self, Process, are_taken, has_key, qkeys, with_process};
use super::{Dgram, now_ms};
use crate::private::Held;
use crate::table::each_socket;
use crate::{clock, kernel, next, set_errno, signal};

/// A socket that others are to read gets no frames any more when for this time none has come, if its peers' brokers are there. The broker's answer is
/// awaited as long.
const PARTING_MS: u64 = 50;
/// How many of these times, at most.
const PARTINGS: u32 = 40;
/// Datagrams that are dropped then, at most.
const DROPPED: usize = 64 << 10;
/// Frames come no longer than this after the last answer of a broker.
const DOUBT_MS: u64 = LEASE_MS + 2000;

impl Dgram {
    /// Peers may have sent frames, and may do so until their leases end.
    pub(super) fn doubt(&self) {
        self.doubtful.store(now_ms() + DOUBT_MS, SeqCst);
    }

    fn is_doubtful(&self) -> bool {
        self.doubtful.load(SeqCst) != 0
    }

    /// Nothing waits in it: if no frames come any more, there are none.
    #[inline]
    pub(super) fn is_empty(&self) {
        if self.doubtful.load(Relaxed) != 0 {
            self.end_doubt();
        }
    }

    #[cold]
    fn end_doubt(&self) {
        let until = self.doubtful.load(SeqCst);
        if now_ms() > until {
            let _ = self.doubtful.compare_exchange(until, 0, SeqCst, Relaxed);
        }
    }
}

/// Takes these sockets out, and asks the broker whether any host was told of them: frames may wait in those of which it says so, or nothing. Allocates nothing.
fn part(process: &mut Process, sockets: impl Fn(&mut dyn FnMut(&'static Dgram))) {
    let mut asked = 0_usize;
    sockets(&mut |d| {
        if process.leave(d, Note::Part) {
            d.parting.store(true, SeqCst);
            asked += 1;
        }
    });
    let until = clock::now_ms() + PARTING_MS;
    while asked > 0 {
        process.hear_left(|cookie, was_found| {
            sockets(&mut |d| {
                if d.cookie.load(Relaxed) == cookie && d.parting.swap(false, SeqCst) {
                    asked -= 1;
                    if was_found {
                        d.doubt();
                    }
                }
            });
        });
        let left = until.saturating_sub(clock::now_ms());
        let Some(wire) = process.session.as_ref().filter(|_| left > 0 && asked > 0) else {
            break;
        };
        kernel::poll_one(wire.0, libc::POLLIN, left as c_int);
    }
    if asked > 0 {
        sockets(&mut |d| {
            if d.parting.swap(false, SeqCst) {
                d.doubt();
            }
        });
    }
}

/// Others read these sockets from now on. In those to which peers may have sent frames all that waits is dropped.
pub(crate) fn hand_over(sockets: &[(c_int, &'static Dgram)]) {
    if !are_taken() {
        return;
    }
    with_process(|process| part(process, |f| sockets.iter().for_each(|(_, d)| f(d))));
    let errno = crate::errno();
    let doubtful: Vec<_> = sockets.iter().filter(|(_, d)| d.is_doubtful()).collect();
    let drop_all = || {
        let frames: usize = doubtful.iter().map(|(fd, _)| drop_waiting(*fd)).sum();
        frames > 0
    };
    if !doubtful.is_empty() {
        drop_all();
        for _ in 0..PARTINGS {
            rest();
            if !drop_all() {
                break;
            }
        }
    }
    for (_, d) in doubtful {
        d.doubtful.store(0, SeqCst);
    }
    set_errno(errno);
}

/// Sleeps for that time, whatever signals come.
fn rest() {
    let until = clock::now() + PARTING_MS * 1_000_000;
    loop {
        let left = until.saturating_sub(clock::now());
        if left == 0 {
            return;
        }
        kernel::nap(left.cast_signed());
    }
}

/// Drops what waits in a socket. Returns how many frames were among it.
fn drop_waiting(fd: c_int) -> usize {
    let _busy = signal::begin_once();
    let Some(mut buffer) = Buffer::take() else {
        return 0;
    };
    let room = buffer.bytes();
    let mut frames = 0;
    for _ in 0..DROPPED {
        // SAFETY: into our buffer.
        let n = unsafe { next::recv(fd, room.as_mut_ptr().cast(), room.len(), libc::MSG_DONTWAIT) };
        let Ok(n) = usize::try_from(n) else {
            // Other errors are of datagrams that were sent.
            if matches!(
                crate::errno(),
                libc::ECONNREFUSED | libc::EHOSTUNREACH | libc::ENETUNREACH
            ) {
                continue;
            }
            break;
        };
        let is_frame = has_key() && ud::open(&room[..n], &qkeys(), || None) != Opened::Plain;
        frames += usize::from(is_frame);
    }
    frames
}

/// Another process has all sockets too from now on, after a fork. `process` is held over it.
pub(super) fn shared(process: &mut Option<Held<Process>>) {
    if !are_taken() {
        return;
    }
    let errno = crate::errno();
    match process {
        Some(process) => part(process, |f| each_socket(|_, d: &'static Dgram| f(d))),
        None => each_socket(|_, d: &'static Dgram| {
            d.frameless.store(true, SeqCst);
            if d.told.load(SeqCst) != 0 {
                d.doubt();
            }
        }),
    }
    set_errno(errno);
}

/// Returns true if a socket may get frames.
pub(super) fn may_get_frames(d: &Dgram) -> bool {
    are_taken() && (d.told.load(SeqCst) != 0 || d.is_doubtful())
}

/// Datagrams that came to `other` may be for `d` from now on. Hosts that were told of `other` are told anew, so `d` gets no frames for long.
pub(super) fn beside(d: &'static Dgram, other: &'static Dgram) {
    with_process(|process| {
        d.doubt();
        other.doubt();
        let told = other.told.load(SeqCst);
        if told != 0 && told == frames::number() {
            let cookie = other.cookie.load(Relaxed);
            let _ = process.tell(Note::Gone(cookie)) && process.tell(Note::Takes(cookie));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    extern "C" fn ignored(_: c_int) {}

    #[test]
    fn signals_do_not_shorten_a_rest() {
        let handler = ignored as extern "C" fn(c_int);
        // SAFETY: a handler that does nothing.
        unsafe { libc::signal(libc::SIGURG, handler as libc::sighandler_t) };
        // SAFETY: this thread.
        let sleeper = unsafe { libc::pthread_self() };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(SeqCst) {
                    // SAFETY: the thread waits for this one.
                    unsafe { libc::pthread_kill(sleeper, libc::SIGURG) };
                    std::thread::yield_now();
                }
            });
            let start = std::time::Instant::now();
            rest();
            is_over.store(true, SeqCst);
            assert!(start.elapsed().as_millis() >= u128::from(PARTING_MS));
        });
    }
}
