//! A TCP socket of the program, and its channel when it has one.
//!
//! # Safety
//!
//! A [`Conn`] is never freed but reused for another socket. Its [`Slow`] part is accessed under [`big`] only. A [`Chan`] lives as long as
//! a thread is inside ([`Conn::enter`]) or the connection is open.

use libc::{c_int, ssize_t};
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};

use weft_run::connection::Phase;
use weft_run::gate::Gate;
use weft_run::hosts::Beginning;
use weft_run::ledger::Word;
use weft_run::meet::{Dialled, Ends, Pending, Why, Wire};

use crate::chan::Chan;
use crate::hidden::Own;
use crate::ledger::Row;
use crate::meeting::Meeting;
use crate::private::{self, Guards, Held, Private};
use crate::state::SharedPhase;
use crate::table::{self, Socket};
use crate::work::Work;
use crate::{hidden, kernel, next};

/// Guards slow and rare operations: making and closing channels, registrations in epoll sets. Held over a fork.
static BIG: Private<()> = Private::new(Guards::Connections, ());

pub(crate) type Big = Held<()>;

pub(crate) fn big() -> Big {
    BIG.lock()
}

/// Returns true if this thread holds the lock of [`big`]: what it closes is the library's own.
pub(crate) fn holds_big() -> bool {
    private::holds(Guards::Connections)
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
    /// Events registered for the TCP socket and for the bell; `None`: not registered.
    pub(crate) tcp: Option<u32>,
    pub(crate) bell: Option<u32>,
    /// A duplicate of the bell, where the set has the bell itself already.
    pub(crate) own_bell: c_int,
    /// A duplicate of the socket, by which the set has it when the program has closed the descriptor.
    pub(crate) own_tcp: c_int,
    /// The program has closed the descriptor, and the socket is open by another one: the registration stays, and can be changed only when the number is the
    /// socket's again.
    pub(crate) is_orphan: bool,
    /// It is among those that stand for two descriptors.
    pub(crate) mixed: bool,
    /// It was to fire once, and has: nothing of it is in the set.
    pub(crate) fired: bool,
    /// The program has removed it, and the kernel still has it: see `ring_poll.rs`.
    pub(crate) is_gone: bool,
    /// The `data` that the kernel has.
    pub(crate) told: u64,
    /// The connection can be found by its `data`: see edges.rs.
    pub(crate) is_known: bool,
    /// The program has asked for room, and has not been told since: see edges.rs.
    pub(crate) room_due: bool,
    /// Its room is TCP's again: the kernel reports that, and it is no edge.
    pub(crate) room_moved: bool,
    /// The [`Conn::fulls`] at that report.
    pub(crate) fulls: u32,
}

impl Reg {
    /// The program's registration, not registered with the kernel yet.
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
            own_tcp: -1,
            is_orphan: false,
            mixed: false,
            fired: false,
            is_gone: false,
            told: data,
            is_known: false,
            room_due: false,
            room_moved: false,
            fulls: 0,
        }
    }

    /// The descriptor by which the set has the bell.
    pub(crate) fn bell_fd(&self, chan: &Chan) -> c_int {
        if self.own_bell >= 0 {
            self.own_bell
        } else {
            chan.bell()
        }
    }

    /// The descriptor by which the set has the TCP socket.
    pub(crate) fn tcp_fd(&self) -> c_int {
        if self.own_tcp >= 0 {
            self.own_tcp
        } else {
            self.fd
        }
    }

    /// Closes the descriptors that only the registration has.
    pub(crate) fn close_own(&mut self) {
        for own in [&mut self.own_bell, &mut self.own_tcp] {
            if *own >= 0 {
                hidden::close(*own);
                *own = -1;
            }
        }
    }
}

/// Reached under [`big`] only.
#[derive(Default)]
pub(crate) struct Slow {
    pub(crate) ends: Option<Ends>,
    pub(crate) listener: Option<c_int>,
    pub(crate) pending: Pending<Own>,
    /// The wire to the responder, hidden, until there is a channel.
    pub(crate) dialled: Option<Dialled<c_int>>,
    /// The meeting through a folder, until there is a channel.
    pub(crate) meeting: Option<Meeting>,
    /// The kernel has told the peer's user.
    pub(crate) knows_user: bool,
    /// The connection to the broker, hidden, until there is a channel.
    pub(crate) wire: Option<c_int>,
    /// The first bytes sent and received.
    pub(crate) beginnings: Option<Box<(Beginning, Beginning)>>,
    pub(crate) regs: Vec<Reg>,
}

impl Slow {
    /// The hidden descriptors that are needed to find the peer, by their numbers.
    pub(crate) fn wires(&mut self) -> impl Iterator<Item = &mut c_int> {
        let by_folder = self.meeting.iter_mut().flat_map(Meeting::wires);
        let pending = self.pending.iter_mut().filter_map(Wire::descriptor);
        let dialled = self.dialled.as_mut().map(|dialled| &mut dialled.wire);
        let others = [self.listener.as_mut(), self.wire.as_mut(), dialled];
        let others = others.into_iter().flatten();
        others.chain(by_folder).chain(pending.map(|own| &mut own.0))
    }

    /// Whether the next step of a meeting is due.
    pub(crate) fn is_meeting(&self) -> bool {
        let by_folder = self.meeting.as_ref().is_some_and(Meeting::is_under_way);
        self.dialled.is_some() || !self.pending.is_empty() || by_folder
    }

    /// Closes the descriptors that are needed to find the peer. What other processes that have the socket need stays as it is.
    pub(crate) fn close_wires(&mut self, has_others: bool) {
        // These close theirs themselves.
        let pending = std::mem::take(&mut self.pending);
        let meeting = self.meeting.take();
        if has_others {
            pending.into_iter().for_each(Wire::leave);
            meeting.into_iter().for_each(Meeting::leave);
        } else {
            drop((pending, meeting));
        }
        self.wires().for_each(|fd| hidden::close(*fd));
        (self.listener, self.wire, self.dialled) = (None, None, None);
    }
}

#[repr(align(64))]
#[derive(Default)]
pub(crate) struct Conn {
    pub(crate) phase: SharedPhase,
    /// Descriptors of this process that are it.
    pub(crate) refs: AtomicU32,
    /// Threads inside; a channel is freed when none is.
    users: AtomicU32,
    chan: AtomicPtr<Chan>,
    /// A channel that waits for its last user.
    old: AtomicPtr<Chan>,
    /// Sends and receives.
    pub(crate) ops: AtomicU64,
    /// Sends over TCP.
    pub(crate) gate: Gate,
    pub(crate) rx_count: AtomicU64,
    /// Threads that are in a receiving or waiting call of the kernel for the TCP socket.
    pub(crate) in_rx: AtomicU32,
    /// The broker has been asked for the peer's host, and has not answered yet.
    pub(crate) asked: AtomicBool,
    /// The next step of a meeting is due.
    pub(crate) meets: AtomicBool,
    /// By `connect`, not by `accept`.
    pub(crate) dialled: AtomicBool,
    /// The [`Chan::follow_key`] that our registrations in epoll sets follow. Another process that shares the socket may have changed it.
    pub(crate) followed: AtomicU32,
    /// The set whose `epoll_wait` may look at our ring, by its number (0: none), and our registration there: see `ring_poll.rs`.
    pub(crate) late_set: AtomicUsize,
    pub(crate) late_fd: AtomicI32,
    pub(crate) late_events: AtomicU32,
    pub(crate) late_data: AtomicU64,
    /// It does, and our bell is not asked for (under `rx_lock`).
    pub(crate) is_late: AtomicBool,
    /// The kernel does not have our registration as it is (under [`big`]).
    pub(crate) is_behind: AtomicBool,
    /// A registration is for the edges of room, and how often a send has found none since: see edges.rs.
    pub(crate) has_edges: AtomicBool,
    pub(crate) fulls: AtomicU32,
    /// The socket and its bell, hidden, from its close until the last thread inside has left; 0: none.
    kept: AtomicI32,
    kept_bell: AtomicI32,
    /// The channel is left when the last thread inside has left.
    leaves: AtomicBool,
    /// Closed: the last to leave frees it.
    dead: AtomicBool,
    /// The process that has left it at its end.
    pub(crate) left: AtomicU32,
    pub(crate) why: AtomicU32,
    /// Threads that have waited because they wrote to memory under way, since the last send.
    pub(crate) faults: AtomicU32,
    /// Processes that have the socket, when it has no channel and a fork has seen it.
    pub(crate) shared: AtomicPtr<AtomicU32>,
    /// Its row in the ledger.
    pub(crate) row: Row,
    slow: UnsafeCell<Slow>,
}

// SAFETY: `slow` is reached under the lock only, all else is atomic.
unsafe impl Sync for Conn {}

/// Connections whose last descriptor is gone.
pub(crate) struct Closed {
    free: Vec<&'static Conn>,
    /// Threads are inside, and go on with a duplicate.
    kept: Vec<&'static Conn>,
}

static CLOSED: Private<Closed> = Private::new(
    Guards::Closed,
    Closed {
        free: Vec::new(),
        kept: Vec::new(),
    },
);

/// What a fork holds.
pub(crate) type Locks = (Option<Held<Closed>>, Option<Big>);

pub(crate) fn before_fork() -> Locks {
    let big = BIG.lock_once();
    (CLOSED.lock_once(), big)
}

impl Conn {
    /// For a new socket.
    pub(crate) fn new(phase: Phase) -> &'static Conn {
        let used = CLOSED.lock().free.pop();
        let conn = used.unwrap_or_else(|| Box::leak(Box::default()));
        conn.refs.store(1, Relaxed);
        conn.phase.store(phase, SeqCst);
        conn
    }

    /// Returns true if the descriptor still is this connection.
    #[inline]
    pub(crate) fn is(&self, fd: c_int) -> bool {
        of(fd).is_some_and(|now| std::ptr::eq(now, self))
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
        // SAFETY: it is freed only when no thread is inside.
        unsafe { self.chan.load(SeqCst).as_ref() }
    }

    /// The same for a connection in the list of late ones, under that list's lock.
    #[inline]
    pub(crate) fn chan_of_late(&self) -> Option<&Chan> {
        // SAFETY: it leaves the list, under its lock, before its channel goes.
        unsafe { self.chan.load(SeqCst).as_ref() }
    }

    /// The same, under [`big`].
    pub(crate) fn chan_slow(&self, _big: &Big) -> Option<&Chan> {
        // SAFETY: it is removed under the lock only.
        unsafe { self.chan.load(SeqCst).as_ref() }
    }

    #[expect(clippy::mut_from_ref, reason = "the lock makes it exclusive")]
    pub(crate) fn slow<'a>(&self, _big: &'a Big) -> &'a mut Slow {
        // SAFETY: only under the lock, and each caller lets go of it before it asks again.
        unsafe { &mut *self.slow.get() }
    }

    /// Only one process has the socket: the channel counts the processes from now on.
    pub(crate) fn link(&self, chan: Chan, _big: &Big) {
        // SAFETY: a counter in a mapping that is never unmapped.
        if let Some(shared) = unsafe { self.shared.swap(null_mut(), SeqCst).as_ref() } {
            shared.store(0, SeqCst);
        }
        self.chan.store(Box::into_raw(Box::new(chan)), SeqCst);
        self.phase.store(Phase::Linked, SeqCst);
    }

    /// The number of processes that have the socket. `None`: it has never been shared.
    pub(crate) fn counter<'a>(&self, chan: Option<&'a Chan>) -> Option<&'a AtomicU32> {
        match chan {
            Some(chan) => Some(&chan.side().holders),
            // SAFETY: a counter in a mapping that is never unmapped.
            None => unsafe { self.shared.load(Acquire).as_ref() },
        }
    }

    /// Processes that have the socket.
    pub(crate) fn holders(&self, inside: &Inside) -> u32 {
        let counter = self.counter(self.chan(inside));
        counter.map_or(1, |count| count.load(SeqCst))
    }

    pub(crate) fn note(&self, why: Why) {
        self.why.store(why as u32, Relaxed);
        self.row.put(Word::Why, why as u64);
    }

    /// Writes to the ledger how many bytes have gone over TCP so far.
    pub(crate) fn tell_tcp(&self) {
        if !self.row.is_none() {
            self.row.put(Word::TxTcp, self.gate.count());
            self.row.put(Word::RxTcp, self.rx_count.load(Relaxed));
        }
    }

    /// A descriptor of the connection; -1 when there is none.
    pub(crate) fn descriptor(&self) -> c_int {
        let mut found = -1;
        table::each_socket(|fd, conn: &'static Conn| {
            if std::ptr::eq(conn, self) && found < 0 {
                found = fd;
            }
        });
        found
    }

    /// Ends the connection as a reset does: the peer wrote values that no honest peer writes, or bytes are lost. The next call is told of it.
    pub(crate) fn cut(&self, chan: &Chan, why: Why) {
        self.note(why);
        let fd = self.descriptor();
        if fd >= 0 {
            kernel::abort(fd);
            // Bytes behind the lost ones are not the continuation of what was received.
            kernel::discard(fd);
            // SAFETY: what a reset does to the socket.
            unsafe { next::shutdown(fd, libc::SHUT_RDWR) };
        }
        // SAFETY: our bell.
        unsafe { next::shutdown(chan.bell(), libc::SHUT_RDWR) };
    }

    /// The same in a call that is told of it. Returns the call's result.
    pub(crate) fn reset(&self, chan: &Chan, why: Why) -> ssize_t {
        self.cut(chan, why);
        // The error of the socket is taken.
        let _ = kernel::number(self.descriptor(), libc::SO_ERROR);
        crate::set_errno(libc::ECONNRESET);
        -1
    }

    /// TCP for good; only without a channel.
    pub(crate) fn plain(&self, why: Why) {
        self.phase.store(Phase::Plain, SeqCst);
        self.note(why);
    }

    /// The last descriptor of this process is gone, and it is counted out: makes it free for another socket. The descriptors are closed by the caller.
    pub(crate) fn recycle(&'static self, big: &Big) {
        self.tell_tcp();
        self.row.put(Word::Closed, 1);
        let mut slow = std::mem::take(self.slow(big));
        let others = self.counter(self.chan_slow(big));
        slow.close_wires(others.is_some_and(|n| n.load(SeqCst) > 0));
        for mut reg in slow.regs {
            reg.close_own();
        }
        let inside = self.enter();
        self.phase.store(Phase::Plain, SeqCst);
        let chan = self.chan.swap(null_mut(), SeqCst);
        self.old.store(chan, SeqCst);
        if self.kept.load(SeqCst) > 0 {
            CLOSED.lock().kept.push(self);
        }
        self.dead.store(true, SeqCst);
        drop(inside);
    }

    /// A descriptor is about to be closed: threads that wait for the socket go on with a duplicate, because its number may soon be another's.
    pub(crate) fn keep_for_users(&self, fd: c_int) {
        if self.refs.load(SeqCst) == 1
            && self.users.load(SeqCst) > 1
            && self.kept.load(SeqCst) == 0
            && let Some(kept) = hidden::duplicate(fd)
        {
            self.kept.store(kept, SeqCst);
        }
    }

    /// A descriptor that threads inside go on with gets another number. Returns whether it is one.
    pub(crate) fn kept_moves(&self, fd: c_int, to: c_int) -> bool {
        [&self.kept, &self.kept_bell]
            .into_iter()
            .any(|kept| kept.compare_exchange(fd, to, SeqCst, SeqCst).is_ok())
    }

    /// The last descriptor of the last process is gone. Returns true if the last thread inside leaves the channel: as in the kernel, a call that waits keeps the
    /// socket open.
    pub(crate) fn leaves_later(&self) -> bool {
        let is_used = self.kept.load(SeqCst) > 0;
        self.leaves.store(is_used, SeqCst);
        is_used
    }

    /// The last descriptor is gone: closes the bell, or leaves it to the last thread inside.
    pub(crate) fn leave_bell(&self, bell: c_int) {
        if self.kept.load(SeqCst) > 0 {
            self.kept_bell.store(bell, SeqCst);
        } else {
            hidden::close(bell);
        }
    }

    /// The descriptor by which a call reaches the socket after it has waited; -1: there is none any more.
    #[inline]
    pub(crate) fn socket(&self, fd: c_int) -> c_int {
        if self.is(fd) {
            return fd;
        }
        match self.kept.load(SeqCst) {
            0 => -1,
            kept => kept,
        }
    }

    #[inline]
    fn leave(&'static self) {
        if self.users.fetch_sub(1, SeqCst) == 1
            && self.dead.load(SeqCst)
            && self.dead.swap(false, SeqCst)
        {
            self.free();
        }
    }

    fn free(&'static self) {
        let old = self.old.swap(null_mut(), AcqRel);
        if !old.is_null() {
            // SAFETY: no thread is inside, and none can find it any more.
            let chan = unsafe { Box::from_raw(old) };
            if self.leaves.swap(false, AcqRel) {
                chan.leave(self.kept.load(SeqCst));
            }
        }
        self.close_kept();
        self.has_edges.store(false, Relaxed);
        self.fulls.store(0, Relaxed);
        for count in [&self.ops, &self.rx_count] {
            count.store(0, Relaxed);
        }
        for count in [
            &self.in_rx,
            &self.why,
            &self.left,
            &self.faults,
            &self.followed,
        ] {
            count.store(0, Relaxed);
        }
        self.row.forget();
        self.gate.reset();
        self.dialled.store(false, Relaxed);
        self.asked.store(false, Relaxed);
        self.meets.store(false, Relaxed);
        self.shared.store(null_mut(), Relaxed);
        let mut closed = CLOSED.lock();
        closed.kept.retain(|kept| !std::ptr::eq(*kept, self));
        closed.free.push(self);
    }

    fn close_kept(&self) {
        for kept in [&self.kept, &self.kept_bell] {
            let kept = kept.swap(0, AcqRel);
            if kept > 0 {
                hidden::close(kept);
            }
        }
    }
}

impl Work for Conn {
    fn abandoned(&'static self) {
        // As if the guard that stands in the abandoned frame were dropped.
        self.leave();
    }
}

/// A thread that uses a connection.
pub(crate) struct Inside(&'static Conn);

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        self.0.leave();
    }
}

// SAFETY: no other kind has the mark, and the type is aligned to more than four.
unsafe impl Socket for Conn {
    const MARK: usize = 0;
}

/// The connection behind a descriptor.
#[inline]
pub(crate) fn of(fd: c_int) -> Option<&'static Conn> {
    table::get(fd).as_socket()
}

/// The same, with the right to use its channel.
#[inline]
pub(crate) fn enter(fd: c_int) -> Option<(&'static Conn, Inside)> {
    let conn = of(fd)?;
    let inside = conn.enter();
    // It may have been closed, and stand for another socket by now.
    conn.is(fd).then_some((conn, inside))
}

/// In the child of a fork: the threads inside are the parent's, and so is what they go on with.
pub(crate) fn threads_are_gone() {
    each(|_, conn| {
        conn.users.store(0, SeqCst);
        conn.close_kept();
    });
    let kept = std::mem::take(&mut CLOSED.lock().kept);
    for conn in kept {
        conn.users.store(0, SeqCst);
        conn.leaves.store(false, SeqCst);
        if conn.dead.swap(false, SeqCst) {
            conn.free();
        }
    }
}

/// Calls `f` once for each connection of the table.
pub(crate) fn each(mut f: impl FnMut(c_int, &'static Conn)) {
    table::each_socket(|fd, conn: &'static Conn| {
        let has_several = conn.refs.load(SeqCst) > 1;
        if !(has_several && (0..fd).any(|lower| conn.is(lower))) {
            f(fd, conn);
        }
    });
}
