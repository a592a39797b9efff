//! Two rings between two UDP ports of one host, one for each direction; a record is a datagram.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use weft_lock::ShortLock;
use weft_mem::{RecvList, SendList};
use weft_ring::{End, Front, Role, Segment};
use weft_wire::dgram::segment;

use crate::engine::Registration;
use crate::lock::add_alone;
use crate::types::ConnCounters;

/// Bytes of each ring.
pub(super) const RING_BYTES: u32 = 256 << 10;
/// The room that a sender requires: a train of datagrams with their headers, or one of the longest, and as much again for another queue
/// pair that has checked at the same time.
const ROOM: usize = 132 << 10;
/// How long a sender waits for a receiver that takes nothing. Then datagrams without room are dropped, until the receiver continues.
const PATIENCE: Duration = Duration::from_millis(20);

/// The sender's state for a full ring.
#[derive(Default)]
struct Tx {
    /// Since when, and where the receiver stood then.
    full: Option<(Instant, u64)>,
    /// The receiver has stood here for too long.
    stuck: Option<u64>,
}

/// The Unix socket between the two ports: it is closed with the peer's process.
pub(super) struct Wire {
    pub(super) fd: OwnedFd,
    pub(super) registration: Registration,
}

impl Wire {
    /// Closes the pipe when the engine has released it.
    pub(super) fn release(&self) {
        self.registration.release(self.fd.as_fd());
    }
}

/// One end of the rings. If the peer corrupts its memory, the pipe ends, and nothing else does.
pub(in crate::ud) struct Pipe {
    end: End,
    /// The peer's address, and ours as the peer sees it. The kernel has confirmed that the peer's socket has it.
    pub(in crate::ud) peer: SocketAddr,
    pub(in crate::ud) ours: SocketAddr,
    /// The peer's socket.
    pub(super) cookie: u64,
    open: AtomicBool,
    closed: AtomicBool,
    /// Nothing has come through it yet.
    fresh: AtomicBool,
    tx: ShortLock<Tx>,
    /// A sender waits for room.
    waited: AtomicBool,
    /// A knock could not be sent.
    pub(super) owes_knock: AtomicBool,
    pub(super) wire: Weak<Wire>,
    pub(super) since: Instant,
    sent: [AtomicU64; 2],
    received: [AtomicU64; 2],
    lost: AtomicU64,
    pub(super) knocks: AtomicU64,
}

/// The front of a ring.
pub(in crate::ud) enum Taken {
    Nothing,
    /// A datagram of so many bytes, which is in the buffer now.
    Datagram(usize),
    /// The peer has closed, or broken the protocol.
    Over,
}

/// To counts of which one thread at a time writes.
fn add(counts: &[AtomicU64; 2], datagrams: usize, bytes: usize) {
    for (count, n) in counts.iter().zip([datagrams, bytes]) {
        add_alone(count, n as u64);
    }
}

impl Pipe {
    pub(super) fn new(
        segment: Segment,
        role: Role,
        [ours, peer]: [SocketAddr; 2],
        cookie: u64,
        wire: Weak<Wire>,
    ) -> Pipe {
        Pipe {
            end: End::new(segment.into(), role),
            peer,
            ours,
            cookie,
            open: AtomicBool::new(true),
            closed: AtomicBool::new(false),
            fresh: AtomicBool::new(true),
            tx: ShortLock::new(Tx::default()),
            waited: AtomicBool::new(false),
            owes_knock: AtomicBool::new(false),
            wire,
            since: Instant::now(),
            sent: Default::default(),
            received: Default::default(),
            lost: AtomicU64::new(0),
            knocks: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(in crate::ud) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Stops sending through it.
    pub(super) fn send_no_more(&self) {
        self.open.store(false, Ordering::SeqCst);
    }

    /// Closes the pipe. Returns whether the peer needs a knock.
    pub(super) fn close(&self) -> bool {
        self.send_no_more();
        !self.closed.swap(true, Ordering::SeqCst) && self.end.abort()
    }

    /// Datagrams in shared memory so far.
    pub(super) fn counters(&self) -> ConnCounters {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ConnCounters {
            tx_fpdus: of(&self.sent[0]),
            tx_copied: of(&self.sent[1]),
            rx_fpdus: of(&self.received[0]),
            rx_copied: of(&self.received[1]),
            tx_syscalls: of(&self.knocks),
            ..ConnCounters::default()
        }
    }

    /// Datagrams sent, received, and dropped because the ring was full.
    pub(super) fn counts(&self) -> [u64; 3] {
        [&self.sent[0], &self.received[0], &self.lost].map(|count| count.load(Ordering::Relaxed))
    }

    // ---- sending

    /// Whether there is room for one more train, or it has to be dropped.
    ///
    /// # Errors
    /// When to try again, unless [`Pipe::has_room`] is true before.
    pub(in crate::ud) fn may_send(&self) -> Result<(), Instant> {
        let mut tx = self.tx.lock();
        // Nonsense ends the pipe when something is pushed.
        if self.end.fits(ROOM).unwrap_or(true) {
            return Ok(());
        }
        let Ok(taken) = self.end.consumed() else {
            return Ok(());
        };
        if tx.stuck == Some(taken) {
            return Ok(());
        }
        let now = Instant::now();
        let since = match tx.full {
            Some((since, before)) if before == taken => since,
            _ => now,
        };
        if now >= since + PATIENCE {
            (tx.full, tx.stuck) = (None, Some(taken));
            return Ok(());
        }
        tx.full = Some((since, taken));
        self.waited.store(true, Ordering::SeqCst);
        let half = self.end.pushed().saturating_sub(u64::from(RING_BYTES) / 2);
        if self.end.sleep_on_room(half) {
            return Err(since + PATIENCE);
        }
        Ok(())
    }

    /// Whether a sender waits for room, and there is some; reported once.
    #[inline]
    pub(in crate::ud) fn has_room(&self) -> bool {
        if !self.waited.load(Ordering::Relaxed) {
            return false;
        }
        let _tx = self.tx.lock();
        self.end.fits(ROOM).unwrap_or(true) && self.waited.swap(false, Ordering::SeqCst)
    }

    /// Appends consecutive datagrams, each of `each` bytes except the last; those without room are dropped. `None`: the pipe has ended, and nothing was sent.
    /// Otherwise whether the peer needs a knock.
    pub(in crate::ud) fn push(&self, bytes: &[u8], each: usize) -> Option<bool> {
        let mut list = SendList::with_capacity(1);
        list.push_bytes(bytes);
        let _tx = self.tx.lock();
        if !self.is_open() {
            return None;
        }
        let (mut at, mut count) = (0, 0);
        while at < bytes.len() {
            let n = each.min(bytes.len() - at);
            if !self.end.fits(n).ok()? {
                let rest = (bytes.len() - at).div_ceil(each);
                self.lost.fetch_add(rest as u64, Ordering::Relaxed);
                break;
            }
            if self.end.push(&list, at, n) != Ok(n) {
                return None;
            }
            at += n;
            count += 1;
        }
        add(&self.sent, count, at);
        Some(self.end.publish())
    }

    // ---- receiving: one thread at a time

    /// Moves the front datagram to the beginning of the buffer, and out of the ring: the buffer is private from then on.
    #[inline]
    pub(in crate::ud) fn take(&self, into: &mut [u8]) -> Taken {
        match self.end.front() {
            Ok(Front::Empty) if self.is_open() => Taken::Nothing,
            Ok(Front::Bytes(n)) if n <= segment::MAX_LEN.min(into.len()) => {
                let mut list = RecvList::new();
                list.push_buf(&mut into[..n]);
                if self.end.take(&mut list, 0, n) != Ok(n) {
                    return Taken::Over;
                }
                Taken::Datagram(n)
            }
            _ => Taken::Over,
        }
    }

    /// Whether its first datagram has arrived, so that the peer's earlier datagrams have to be taken from the kernel; reported once.
    #[inline]
    pub(in crate::ud) fn begins(&self) -> bool {
        self.fresh.load(Ordering::Relaxed)
            && !matches!(self.end.front(), Ok(Front::Empty))
            && self.fresh.swap(false, Ordering::Relaxed)
    }

    /// After some calls of [`Pipe::take`], or one that found nothing: releases the room of this many datagrams. Returns whether the peer needs a knock.
    #[inline]
    pub(in crate::ud) fn release(&self, datagrams: usize, bytes: usize) -> bool {
        if datagrams > 0 {
            add(&self.received, datagrams, bytes);
        }
        self.end.release(false)
    }

    /// From now on the peer knocks when it sends something. `false`: there is something already.
    pub(in crate::ud) fn sleep(&self) -> bool {
        self.end.sleep_on_data()
    }
}
