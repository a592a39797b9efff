//! A channel: a stream of bytes in shared memory that replaces a TCP socket's data path, and its bell.
//!
//! # Safety
//!
//! A [`Side`] is a page that the processes which share the socket after a `fork` share too.

use libc::{c_int, iovec};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weft_ring::source::{Fetch, SOURCES};
use weft_ring::stream::Stream;
use weft_ring::{Role, checked};
use weft_run::connection::{Carrier, Route};
use weft_run::lend::Policy;
use weft_run::peers::Guest;
use weft_sys::memfd::Mapping;

use crate::iov::copy_pieces;
use crate::lock::{self, SharedLock};
use crate::patience::Patience;
use crate::private::{Guards, Private};
use crate::state::SharedRoute;
use crate::{clock, guests, kernel};
use weft_sys::spin::Spun;

/// State of one side of a channel, shared by the processes that share the socket. One page.
#[repr(C)]
pub(crate) struct Side {
    pub(crate) rx_lock: SharedLock,
    pub(crate) tx_lock: SharedLock,
    /// The process, if any, that gives the unread bytes of the ring back to TCP: other receivers wait.
    pub(crate) giver: AtomicU32,
    /// Processes that have the socket.
    pub(crate) holders: AtomicU32,
    pub(crate) rx_state: SharedRoute,
    pub(crate) tx_state: SharedRoute,
    /// `O_NONBLOCK` of the open file description.
    pub(crate) nonblock: AtomicU32,
    /// Not 0: it is in an epoll set, and the bell is kept in step at the end of each call. [`EDGE`](crate::bell::EDGE): in an edge-triggered way.
    pub(crate) eager: AtomicU32,
    /// Bytes known to be in our bell and not read yet (under `rx_lock`). Below 0: bytes read that their sender, which is between the bell and the count, has not
    /// counted yet.
    pub(crate) owed: AtomicI64,
    /// The receiver has not looked for the last of them.
    pub(crate) fresh: AtomicU32,
    pub(crate) fill_seen: AtomicU64,
    /// 1: the peer's end of the bell is closed, and the TCP socket alone tells epoll sets what is there.
    pub(crate) ended: AtomicU32,
    /// 1: the peer was killed with our bytes unread, and the TCP socket is in the state of a reset.
    pub(crate) is_reset: AtomicU32,
    pub(crate) head: AtomicU64,
    pub(crate) tail: AtomicU64,
    /// 0, or one more than the peer's position when a send that must not wait found the ring full.
    pub(crate) full: AtomicU64,
    /// When it was found full first at that position, in milliseconds.
    pub(crate) full_since: AtomicU64,
    /// Sends over TCP in a row, and pauses made for the receiver to catch up.
    pub(crate) run: AtomicU32,
    pub(crate) pauses: AtomicU32,
    /// Sources offered to the peer, and sources fetched from it.
    pub(crate) offered: AtomicU64,
    pub(crate) sources: AtomicU64,
    /// Success of spinning on an empty ring before sleeping, and on a full one.
    pub(crate) spun: Spun,
    pub(crate) spun_full: Spun,
    /// The program wants to be told of the bytes that are left (`TCP_INQ`).
    pub(crate) inq: AtomicU32,
    /// When a receive that must not wait last asked the kernel whether the peer is there (under `rx_lock`), by the machine's clock.
    pub(crate) probed: AtomicU64,
    /// The time limits of the program's calls (`SO_RCVTIMEO`, `SO_SNDTIMEO`), in nanoseconds; 0: none.
    pub(crate) receive_limit: AtomicU64,
    pub(crate) send_limit: AtomicU64,
    /// For a peer of our own user: see [`Chan::patience`].
    patience: Patience,
    /// When a sender was found held back first, in milliseconds; 0: it is not.
    pub(crate) held_since: AtomicU64,
}

impl Side {
    /// Learns the time limits of the program's socket.
    pub(crate) fn note_limits(&self, fd: c_int) {
        for (name, limit) in [
            (libc::SO_RCVTIMEO, &self.receive_limit),
            (libc::SO_SNDTIMEO, &self.send_limit),
        ] {
            let ns = kernel::time_limit(fd, name).map_or(0, |given| {
                let seconds = given.tv_sec.cast_unsigned().saturating_mul(1_000_000_000);
                seconds.saturating_add(given.tv_usec.cast_unsigned() * 1000)
            });
            limit.store(ns, Relaxed);
        }
    }
}

/// How long a sender waits for a receiver that holds it back, in milliseconds.
const HELD_MS: u64 = 2000;
/// The same for a send that must not wait, in nanoseconds.
const HELD_MOMENT: u64 = 50_000_000;

/// As many bytes a TCP receiver takes that does not read (the kernel's default for `net.ipv4.tcp_rmem`).
const RECEIVE_BUFFER: u64 = 128 << 10;

/// A channel.
pub(crate) struct Chan {
    pub(crate) stream: Arc<Stream>,
    pub(crate) role: Role,
    /// Our end of the bell, hidden.
    pub(crate) bell: AtomicI32,
    /// The process behind it: the peer, or the broker that reaches the peer's host.
    pub(crate) carrier: Carrier,
    /// This process, and the peer's, when they met; 0: unknown. Only they lend memory to each other.
    pub(crate) process: u32,
    pub(crate) peer_process: u32,
    /// The peer is of another user: no memory is lent either way, and its process is not looked at.
    pub(crate) guest: Option<Guest>,
    /// We have said that we lend; we have answered the peer.
    pub(crate) introduced: AtomicBool,
    pub(crate) answered: AtomicBool,
    pub(crate) lent: Lent,
    pub(crate) kept: Kept,
    /// Shared with the children of this process.
    side: Mapping,
}

impl Chan {
    pub(crate) fn new(stream: Stream, role: Role, bell: c_int, nonblock: bool) -> Option<Chan> {
        let side = Mapping::anonymous(4096, true).ok()?;
        let chan = Chan {
            stream: Arc::new(stream),
            role,
            bell: AtomicI32::new(bell),
            carrier: Carrier::Here,
            process: lock::own(),
            peer_process: 0,
            guest: None,
            introduced: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            lent: Lent::default(),
            kept: Kept::default(),
            side,
        };
        chan.side().holders.store(1, Relaxed);
        chan.side().nonblock.store(nonblock.into(), Relaxed);
        Some(chan)
    }

    #[inline]
    pub(crate) fn side(&self) -> &Side {
        // SAFETY: the mapping is of a page of zeros, which are a `Side`, and lives as long as `self`.
        unsafe { &*self.side.as_ptr().cast() }
    }

    /// For a peer that is between two steps.
    pub(crate) fn patience(&self) -> &Patience {
        match &self.guest {
            Some(guest) => guests::patience(guest),
            None => &self.side().patience,
        }
    }

    #[inline]
    pub(crate) fn bell(&self) -> c_int {
        self.bell.load(Relaxed)
    }

    /// The peer's role: the sender in the direction that comes to us.
    #[inline]
    pub(crate) fn peer(&self) -> Role {
        self.role.peer()
    }

    /// How bytes go out and come in.
    pub(crate) fn mode(&self) -> (Route, Route) {
        let side = self.side();
        (side.tx_state.load(SeqCst), side.rx_state.load(SeqCst))
    }

    /// What registrations in epoll sets depend on, as a number.
    pub(crate) fn follow_key(&self) -> u32 {
        let (tx, rx) = self.mode();
        let closed = u32::from(self.stream.is_closed(self.peer()));
        self.side().ended.load(SeqCst) << 17 | closed << 16 | (tx as u32) << 8 | rx as u32
    }

    pub(crate) fn is_on_ring(&self) -> bool {
        let (tx, rx) = self.mode();
        tx.uses_ring() || rx.uses_ring()
    }

    /// Waits a moment while the receiver of our closed direction holds us back. Returns whether it does not any more.
    #[inline]
    pub(crate) fn await_release(&self) -> bool {
        !self.stream.is_held(self.role) || self.wait_for_release()
    }

    #[cold]
    fn wait_for_release(&self) -> bool {
        let side = self.side();
        let is_over = || !self.stream.is_held(self.role);
        if !self.patience().wait(HELD_MOMENT, is_over) {
            let now = clock::now_ms();
            let first = side.held_since.compare_exchange(0, now, Relaxed, Relaxed);
            if now.saturating_sub(first.err().unwrap_or(now)) < HELD_MS {
                return false;
            }
            // It has ended in the middle, and reads nothing more.
            self.stream.release(self.role);
        }
        side.held_since.store(0, Relaxed);
        true
    }

    /// Reports whether a send would find room, in agreement with the bell: a ring that was full counts as full until half of it is free. `None`: ask the kernel.
    #[inline]
    pub(crate) fn is_writable(&self) -> Option<bool> {
        let (stream, side) = (&self.stream, self.side());
        if stream.is_closed(self.role) {
            return None;
        }
        let room = stream.room(self.role, side.tail.load(Relaxed)).ok()?;
        let was_full = side.full.load(Relaxed) != 0;
        Some(room >= if was_full { stream.capacity() / 2 } else { 1 })
    }

    /// Bytes in the ring, and lent, that TCP would have kept in the sender's buffer: what the receiver's buffer has no room for.
    pub(crate) fn not_taken(&self) -> c_int {
        let (stream, side) = (&self.stream, self.side());
        let Ok(room) = stream.room(self.role, side.tail.load(Relaxed)) else {
            return 0;
        };
        let lent = match side.tx_state.load(SeqCst) {
            Route::Ring => (self.lent).bytes_under_way(stream.completed_sources(self.role)),
            _ => 0,
        };
        let all = (stream.capacity() - room) as u64 + lent;
        c_int::try_from(all.saturating_sub(RECEIVE_BUFFER)).unwrap_or(c_int::MAX)
    }

    /// Bytes of the stream that `ready` bytes of the ring stand for.
    fn bytes(&self, ready: usize) -> usize {
        let (stream, peer, side) = (&self.stream, self.peer(), self.side());
        let head = side.head.load(Relaxed);
        let mut number = side.sources.load(Relaxed);
        let mut bytes = ready as u64;
        while let Ok(Some(ahead)) = stream.next_source(peer, number, head) {
            if ahead >= ready as u64 {
                break;
            }
            bytes = bytes
                .saturating_add(stream.source_left(peer, number))
                .saturating_sub(1);
            number += 1;
        }
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// Bytes that can be read from the ring; `None` where the stream comes over TCP.
    pub(crate) fn ring_bytes(&self) -> Option<usize> {
        let side = self.side();
        if side.rx_state.load(SeqCst) != Route::Ring {
            return None;
        }
        let ready = self.stream.ready(self.peer(), side.head.load(Relaxed));
        Some(ready.map_or(0, |(n, _)| self.bytes(n)))
    }

    /// Returns true if bytes can be read from the ring.
    pub(crate) fn has_bytes(&self) -> bool {
        self.ring_bytes().is_some_and(|n| n > 0)
    }

    /// The last descriptor of the socket is closed, and no call uses it any more. With bytes unread its connection is reset; the kernel does not know of ours.
    pub(crate) fn leave(&self, fd: c_int) {
        if self.has_bytes() {
            let reset = libc::linger {
                l_onoff: 1,
                l_linger: 0,
            };
            kernel::set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &reset);
        }
        self.stream.leave(self.role);
    }
}

/// State that the channel keeps of the memory that it has lent. Only the process that has made the channel lends by it, so no forked child finds it half done.
#[derive(Default)]
pub(crate) struct Lent {
    policy: Mutex<Policy>,
    /// Lengths of the last sources, by their numbers.
    lens: [AtomicU64; SOURCES as usize],
    /// One more than the last number.
    end: AtomicU64,
}

impl Lent {
    pub(crate) fn policy(&self) -> MutexGuard<'_, Policy> {
        self.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn note(&self, number: u64, len: u64) {
        self.lens[(number % SOURCES) as usize].store(len, Relaxed);
        self.end.store(number + 1, Relaxed);
    }

    pub(crate) fn bytes_under_way(&self, completed: u64) -> u64 {
        let end = self.end.load(Relaxed);
        let first = completed.max(end.saturating_sub(SOURCES));
        (first..end)
            .map(|number| self.lens[(number % SOURCES) as usize].load(Relaxed))
            .sum()
    }
}

/// Held with the lock of a channel's kept sources.
pub(crate) static KEPT: Private<()> = Private::new(Guards::Kept, ());

/// Sources of the peer that were read before this process lost the right to: their numbers, and their last bytes.
#[derive(Default)]
pub(crate) struct Kept {
    any: AtomicBool,
    sources: Mutex<Vec<(u64, Vec<u8>)>>,
}

impl Kept {
    fn with<T>(&self, f: impl FnOnce(&mut Vec<(u64, Vec<u8>)>) -> T) -> T {
        let _held = KEPT.lock();
        f(&mut self.sources.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Copies the kept bytes of a source into the vector, as a read from the peer does. `None`: none are kept.
    pub(crate) unsafe fn get(
        &self,
        fetch: &Fetch,
        iov: &[iovec],
        skip: usize,
        n: usize,
    ) -> Option<usize> {
        if !self.any.load(Relaxed) {
            return None;
        }
        self.with(|sources| {
            sources.retain(|(number, _)| *number >= fetch.number);
            let (_, bytes) = sources.iter().find(|(number, _)| *number == fetch.number)?;
            let first = bytes.len().checked_sub(fetch.left as usize)?;
            let bytes = bytes[first..].get(..n)?;
            Some(copy_pieces(iov, skip, n, |to, len, done| {
                // SAFETY: the caller's buffers; these are pieces of `n` bytes in all, which are there.
                unsafe { checked::copy(to, bytes[done..].as_ptr(), len) }
            }))
        })
    }

    /// Keeps the remaining bytes of a source.
    pub(crate) fn add(&self, number: u64, bytes: Vec<u8>) {
        self.with(|sources| sources.push((number, bytes)));
        self.any.store(true, Relaxed);
    }
}
