//! A TCP socket of the program, and its channel when it has one.
//!
//! # Safety
//!
//! A [`Conn`] is never freed: it is used again for another socket. Its [`Slow`] part is reached under [`big`] only. A [`Chan`] lives as long as
//! somebody is inside ([`Conn::enter`]) or the connection is open. A [`Side`] is a page that the processes which share the socket after a
//! `fork` share too.

use libc::c_int;
use std::cell::UnsafeCell;
use std::os::fd::OwnedFd;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weft_ring::Role;
use weft_ring::stream::Stream;
use weft_run::hosts::Beginning;
use weft_run::ledger::{AFTER, Carrier, RING, TCP};
use weft_run::meet::{Ends, Why};
use weft_sys::memfd::Mapping;

use crate::fetch::Kept;
use crate::lend::Lent;
use crate::lock::{self, SharedLock};
use crate::spin::Spun;
use crate::{hidden, ledger};

/// Not connected, as far as we know.
pub(crate) const FRESH: u32 = 0;
/// Connected, over TCP; may look for its peer.
pub(crate) const PROBING: u32 = 1;
/// There is a channel.
pub(crate) const LINKED: u32 = 2;
/// TCP for good.
pub(crate) const PLAIN: u32 = 3;

/// How bytes come in, beside [`TCP`], [`RING`] and [`AFTER`]: from TCP still, and the peer on another host may switch at any time.
pub(crate) const BOTH: u32 = 3;

/// Guards what is slow and rare: channels made and closed, registrations in epoll sets. Held over a fork.
static BIG: Mutex<()> = Mutex::new(());

pub(crate) fn big() -> MutexGuard<'static, ()> {
    BIG.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one side of a channel knows, shared by the processes that share the socket. One page.
#[repr(C)]
pub(crate) struct Side {
    pub(crate) rx_lock: SharedLock,
    pub(crate) tx_lock: SharedLock,
    /// Processes that have the socket.
    pub(crate) holders: AtomicU32,
    pub(crate) rx_state: AtomicU32,
    pub(crate) tx_state: AtomicU32,
    /// `O_NONBLOCK` of the open file description.
    pub(crate) nonblock: AtomicU32,
    /// It is in an epoll set: the bell is kept in step at the end of each call.
    pub(crate) eager: AtomicU32,
    /// We have asked for a bell (under `rx_lock`).
    pub(crate) armed: AtomicU32,
    /// Bytes in our bell that are known of, and to be taken (under `rx_lock`).
    pub(crate) owed: AtomicU64,
    /// The last of them has not been looked for.
    pub(crate) fresh: AtomicU32,
    pub(crate) fill_seen: AtomicU64,
    pub(crate) head: AtomicU64,
    pub(crate) tail: AtomicU64,
    /// 0, or one more than the peer's position when a send that must not wait found the ring full.
    pub(crate) full: AtomicU64,
    /// Sends over TCP in a row, and pauses made for the receiver to catch up.
    pub(crate) run: AtomicU32,
    pub(crate) pauses: AtomicU32,
    /// Sources that have been offered to the peer, and that have been taken from it.
    pub(crate) offered: AtomicU64,
    pub(crate) sources: AtomicU64,
    /// What looking at an empty ring before sleeping has brought, and at a full one.
    pub(crate) spun: Spun,
    pub(crate) spun_full: Spun,
    /// When a receive that must not wait last asked the kernel whether the peer is there (under `rx_lock`), by the machine's clock.
    pub(crate) probed: AtomicU64,
}

/// A channel.
pub(crate) struct Chan {
    pub(crate) stream: Arc<Stream>,
    pub(crate) role: Role,
    /// Our end of the bell, hidden.
    pub(crate) bell: AtomicI32,
    /// What is behind it: the peer, or the broker that reaches the peer's host.
    pub(crate) carrier: Carrier,
    /// This process, and the peer's, when they met; 0: unknown. Only they lend memory to each other.
    pub(crate) process: u32,
    pub(crate) peer_process: u32,
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

    #[inline]
    pub(crate) fn bell(&self) -> c_int {
        self.bell.load(Relaxed)
    }

    /// The peer's role: the sender in the direction that comes to us.
    #[inline]
    pub(crate) fn peer(&self) -> Role {
        self.role.peer()
    }
}

/// A registration in an epoll set.
#[derive(Clone, Debug)]
pub(crate) struct Reg {
    pub(crate) set: c_int,
    /// The set's number in the table, which ends confusion with a later set of the same descriptor.
    pub(crate) number: usize,
    pub(crate) fd: c_int,
    pub(crate) events: u32,
    pub(crate) data: u64,
    /// What is registered for the TCP socket and for the bell; `None`: nothing.
    pub(crate) tcp: Option<u32>,
    pub(crate) bell: Option<u32>,
    /// A duplicate of the bell, where the set has the bell itself already.
    pub(crate) own_bell: c_int,
    /// It is among those that stand for two descriptors.
    pub(crate) mixed: bool,
    /// It was to fire once, and has: nothing of it is in the set.
    pub(crate) fired: bool,
    /// The program has taken it out, and the kernel has it still: see late.rs.
    pub(crate) is_gone: bool,
    /// The `data` that the kernel has.
    pub(crate) told: u64,
}

impl Reg {
    /// What the program registers, before anything of it is registered with the kernel.
    pub(crate) fn new(set: c_int, number: usize, fd: c_int, events: u32, data: u64) -> Reg {
        Reg {
            set,
            number,
            fd,
            events,
            data,
            tcp: None,
            bell: None,
            own_bell: -1,
            mixed: false,
            fired: false,
            is_gone: false,
            told: data,
        }
    }
}

/// Reached under [`big`] only.
#[derive(Default)]
pub(crate) struct Slow {
    pub(crate) ends: Option<Ends>,
    pub(crate) listener: Option<c_int>,
    pub(crate) pending: Option<OwnedFd>,
    /// The connection to the broker, hidden, until there is a channel.
    pub(crate) wire: Option<c_int>,
    /// The first bytes of what was sent and received.
    pub(crate) beginnings: Option<Box<(Beginning, Beginning)>>,
    pub(crate) regs: Vec<Reg>,
}

#[repr(align(64))]
pub(crate) struct Conn {
    pub(crate) phase: AtomicU32,
    /// Descriptors of this process that are it.
    pub(crate) refs: AtomicU32,
    /// Threads inside; a channel is freed when none is.
    users: AtomicU32,
    chan: AtomicPtr<Chan>,
    /// A channel that waits for its last user.
    old: AtomicPtr<Chan>,
    /// Sends and receives.
    pub(crate) ops: AtomicU64,
    pub(crate) tx_count: AtomicU64,
    pub(crate) rx_count: AtomicU64,
    /// Threads that are in a call of the kernel for the TCP socket.
    pub(crate) in_tx: AtomicU32,
    pub(crate) in_rx: AtomicU32,
    pub(crate) joined: AtomicBool,
    /// The broker has been asked for the peer's host, and has not answered yet.
    pub(crate) asked: AtomicBool,
    /// By `connect`, not by `accept`.
    pub(crate) dialled: AtomicBool,
    /// The directions' states that our registrations in epoll sets follow: sent << 8 | received. Another process that shares the socket
    /// may have changed them.
    pub(crate) followed: AtomicU32,
    /// The set whose `epoll_wait` may look at our ring, by its number (0: none), and our registration there: see late.rs.
    pub(crate) late_set: AtomicUsize,
    pub(crate) late_fd: AtomicI32,
    pub(crate) late_events: AtomicU32,
    pub(crate) late_data: AtomicU64,
    /// It does, and our bell is not asked for (under `rx_lock`).
    pub(crate) is_late: AtomicBool,
    /// The kernel does not have our registration as it is (under [`big`]).
    pub(crate) is_behind: AtomicBool,
    /// Closed: the last to leave frees it.
    dead: AtomicBool,
    pub(crate) why: AtomicU32,
    /// Threads that have waited because they wrote to memory under way, since the last send.
    pub(crate) faults: AtomicU32,
    /// Processes that have the socket, when it has no channel and a fork has seen it.
    pub(crate) shared: AtomicPtr<AtomicU32>,
    /// Its row in the ledger, and one more; 0: none.
    pub(crate) row: AtomicU32,
    slow: UnsafeCell<Slow>,
}

// SAFETY: `slow` is reached under the lock only, all else is atomic.
unsafe impl Sync for Conn {}

static FREE: Mutex<Vec<&'static Conn>> = Mutex::new(Vec::new());

/// All locks of the process, in order: what a fork holds.
pub(crate) type Locks = (
    MutexGuard<'static, ()>,
    MutexGuard<'static, Vec<&'static Conn>>,
);

/// The second lock, under the first.
pub(crate) fn with_free(big: MutexGuard<'static, ()>) -> Locks {
    (big, FREE.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Conn {
    /// For a new socket.
    pub(crate) fn new(phase: u32) -> &'static Conn {
        let used = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let conn = used.unwrap_or_else(|| {
            Box::leak(Box::new(Conn {
                phase: AtomicU32::new(FRESH),
                refs: AtomicU32::new(0),
                users: AtomicU32::new(0),
                chan: AtomicPtr::new(null_mut()),
                old: AtomicPtr::new(null_mut()),
                ops: AtomicU64::new(0),
                tx_count: AtomicU64::new(0),
                rx_count: AtomicU64::new(0),
                in_tx: AtomicU32::new(0),
                in_rx: AtomicU32::new(0),
                joined: AtomicBool::new(false),
                dialled: AtomicBool::new(false),
                asked: AtomicBool::new(false),
                followed: AtomicU32::new(0),
                late_set: AtomicUsize::new(0),
                late_fd: AtomicI32::new(-1),
                late_events: AtomicU32::new(0),
                late_data: AtomicU64::new(0),
                is_late: AtomicBool::new(false),
                is_behind: AtomicBool::new(false),
                dead: AtomicBool::new(false),
                why: AtomicU32::new(0),
                faults: AtomicU32::new(0),
                shared: AtomicPtr::new(null_mut()),
                row: AtomicU32::new(0),
                slow: UnsafeCell::new(Slow::default()),
            }))
        });
        conn.refs.store(1, Relaxed);
        conn.phase.store(phase, SeqCst);
        conn
    }

    /// Held while a thread uses the channel.
    #[inline]
    pub(crate) fn enter(&'static self) -> Inside {
        self.users.fetch_add(1, SeqCst);
        Inside(self)
    }

    /// The channel; used while [`Conn::enter`]'s guard lives.
    #[inline]
    pub(crate) fn chan(&self, _inside: &Inside) -> Option<&Chan> {
        // SAFETY: it is freed only when nobody is inside.
        unsafe { self.chan.load(SeqCst).as_ref() }
    }

    /// The same for a connection that stands in the list of late ones, under that list's lock.
    #[inline]
    pub(crate) fn chan_of_late(&self) -> Option<&Chan> {
        // SAFETY: it leaves the list, under its lock, before its channel goes.
        unsafe { self.chan.load(SeqCst).as_ref() }
    }

    /// The same, under [`big`].
    pub(crate) fn chan_slow(&self, _big: &MutexGuard<'_, ()>) -> Option<&Chan> {
        // SAFETY: it is taken away under the lock only.
        unsafe { self.chan.load(SeqCst).as_ref() }
    }

    #[expect(clippy::mut_from_ref, reason = "the lock makes it exclusive")]
    pub(crate) fn slow<'a>(&self, _big: &'a MutexGuard<'_, ()>) -> &'a mut Slow {
        // SAFETY: only under the lock, and each caller lets go of it before it asks again.
        unsafe { &mut *self.slow.get() }
    }

    pub(crate) fn link(&self, chan: Chan, _big: &MutexGuard<'_, ()>) {
        self.chan.store(Box::into_raw(Box::new(chan)), SeqCst);
        self.phase.store(LINKED, SeqCst);
    }

    /// Processes that have the socket.
    pub(crate) fn holders(&self, inside: &Inside) -> u32 {
        if let Some(chan) = self.chan(inside) {
            return chan.side().holders.load(SeqCst);
        }
        // SAFETY: a counter in a mapping that is never taken away.
        unsafe { self.shared.load(Acquire).as_ref() }.map_or(1, |count| count.load(SeqCst))
    }

    pub(crate) fn note(&self, why: Why) {
        self.why.store(why as u32, Relaxed);
        ledger::why(self, why);
    }

    /// TCP for good; only without a channel.
    pub(crate) fn plain(&self, why: Why) {
        self.phase.store(PLAIN, SeqCst);
        self.note(why);
    }

    /// The last descriptor of this process is gone: makes it free for another socket. The descriptors are closed by the caller.
    pub(crate) fn recycle(&'static self, big: &MutexGuard<'_, ()>) {
        ledger::closed(self);
        let slow = std::mem::take(self.slow(big));
        for fd in [slow.listener, slow.wire].into_iter().flatten() {
            hidden::close(fd);
        }
        for reg in &slow.regs {
            if reg.own_bell >= 0 {
                hidden::close(reg.own_bell);
            }
        }
        let inside = self.enter();
        self.phase.store(PLAIN, SeqCst);
        let chan = self.chan.swap(null_mut(), SeqCst);
        self.old.store(chan, SeqCst);
        self.dead.store(true, SeqCst);
        drop(inside);
    }

    fn free(&'static self) {
        let old = self.old.swap(null_mut(), AcqRel);
        if !old.is_null() {
            // SAFETY: nobody is inside, and nobody can find it any more.
            drop(unsafe { Box::from_raw(old) });
        }
        for count in [&self.ops, &self.tx_count, &self.rx_count] {
            count.store(0, Relaxed);
        }
        for count in [
            &self.in_rx,
            &self.in_tx,
            &self.why,
            &self.faults,
            &self.row,
            &self.followed,
        ] {
            count.store(0, Relaxed);
        }
        self.joined.store(false, Relaxed);
        self.dialled.store(false, Relaxed);
        self.asked.store(false, Relaxed);
        self.shared.store(null_mut(), Relaxed);
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(self);
    }

    /// How bytes go out and come in: [`TCP`], [`RING`] or [`AFTER`]; in also [`BOTH`].
    pub(crate) fn mode(chan: &Chan) -> (u32, u32) {
        let side = chan.side();
        (
            side.tx_state.load(SeqCst).clamp(TCP, AFTER),
            side.rx_state.load(SeqCst).clamp(TCP, BOTH),
        )
    }

    pub(crate) fn is_on_ring(chan: &Chan) -> bool {
        let (tx, rx) = Conn::mode(chan);
        tx == RING || matches!(rx, RING | BOTH)
    }
}

/// A thread that uses a connection.
pub(crate) struct Inside(&'static Conn);

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        let conn = self.0;
        if conn.users.fetch_sub(1, SeqCst) == 1
            && conn.dead.load(SeqCst)
            && conn.dead.swap(false, SeqCst)
        {
            conn.free();
        }
    }
}
