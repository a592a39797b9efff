//! Which thread drives a queue pair: the polling thread, or the engine (see [`crate::engine`]).
//!
//! A polling owner takes the *lease*, and the engine stops watching the socket. Eight empty polls in a row, or one poll that received data,
//! take it. An owner that only polls for the completions of its own requests, and otherwise spins on its memory or sleeps on something
//! else, does not take it: the engine stays armed. If this rule is wrong, data waits for the engine's tick. Then the *engine hint* keeps
//! the engine armed for a while.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use weft_lock::Transport;
use weft_sys::Interest;

use super::QpInner;
use crate::cq::Poller;
use crate::engine::{Drive, Lease};

/// After this many empty polls in a row the polling thread takes the lease in any case. A thread that polls for the completion of its last
/// post, and then spins on its memory, polls less; the engine has to watch the socket for it.
const LEASE_AFTER: u32 = 8;
/// The same where the engine is needed.
const LEASE_LATE: u32 = 256;
/// After this many posts without a poll, further ones are deferred although no thread has the lease.
const IN_A_ROW: u32 = 4;
/// So many times the engine leaves a queue pair armed although its owner was driving it just then, after something has waited
/// for a tick because the owner did not come back.
const HINT_AFTER_TICK: u32 = 64;
/// The same after posts have waited for a tick: the tick may just have come in the middle of them.
const HINT_AFTER_POSTS: u32 = 8;

/// What the owner of a queue pair has done lately, from which the engine concludes whether it will come back. Hints: no order is needed.
#[derive(Default)]
pub(super) struct Owner {
    /// How much the engine is needed although a thread polls.
    engine_hint: AtomicU32,
    /// A thread of the program has received something while it drove.
    pub(super) app_received: AtomicBool,
    /// Counts the drives of the owner, and the value that the engine saw last.
    drive_seq: AtomicU32,
    seen_seq: AtomicU32,
}

impl QpInner {
    /// A poll that found completions: sends deferred requests.
    pub(crate) fn flush_deferred(self: &Arc<Self>) {
        if self.wake.take_deferred() {
            self.drive(false);
        }
    }

    /// A poll that found nothing, after `n` others: checks the socket. A thread that continues to poll, or that received the last data,
    /// takes the lease: the engine need not watch as well.
    pub(crate) fn drive_polled(
        self: &Arc<Self>,
        empty_polls: u32,
        poller: Option<&mut Poller<'_>>,
    ) {
        if self.life.is_dead() || self.peer.connected.get().is_none() {
            return;
        }
        let app_received = self.owner.app_received.load(Ordering::Relaxed);
        let mut hint = self.owner.engine_hint.load(Ordering::Relaxed);
        if app_received {
            self.owner.app_received.store(false, Ordering::Relaxed);
            hint /= 2;
            self.owner.engine_hint.store(hint, Ordering::Relaxed);
        }
        let spins = if hint == 0 {
            app_received || empty_polls >= LEASE_AFTER
        } else {
            empty_polls >= LEASE_LATE
        };
        // A thread that polls while sending is blocked polls until it is done. The engine would only send in its place, on another core.
        if spins || self.wake.seen().transport().blocked {
            let seq = self.owner.drive_seq.load(Ordering::Relaxed);
            self.owner
                .drive_seq
                .store(seq.wrapping_add(1), Ordering::Relaxed);
            self.take_lease();
        }
        self.wake.take_deferred();
        self.drive_for(true, poller);
    }

    /// Its owner has asked for an event, and drives while it waits for that.
    pub(crate) fn drive_awaited(self: &Arc<Self>) {
        if !self.life.is_dead() && self.peer.connected.get().is_some() {
            let seq = self.owner.drive_seq.load(Ordering::Relaxed);
            self.owner
                .drive_seq
                .store(seq.wrapping_add(1), Ordering::Relaxed);
            self.take_lease();
            self.drive(true);
        }
    }

    /// A poll by an owner that has requested an event: checks the socket, and leaves it to the engine.
    pub(crate) fn drive_unleased(self: &Arc<Self>) {
        if !self.life.is_dead() && self.peer.connected.get().is_some() {
            self.wake.take_deferred();
            self.drive(true);
            self.release_lease();
        }
    }

    pub(super) fn take_lease(self: &Arc<Self>) {
        if self.wake.disarm() {
            self.engine().lend(self);
        }
    }

    /// The owner sleeps elsewhere: the engine takes over at once.
    pub(crate) fn release_lease(self: &Arc<Self>) {
        // It has polled until now, but does not go on: see `lease_state`.
        let seq = self.owner.drive_seq.load(Ordering::SeqCst);
        self.owner.seen_seq.store(seq, Ordering::SeqCst);
        if !self.wake.seen().is_armed() {
            self.rearm_and_flush();
        }
    }

    /// The owner is about to sleep on what [`QpInner::wait_on`] says, unless this is false: there is nothing to wait for.
    pub(crate) fn begin_wait(self: &Arc<Self>) -> bool {
        if self.peer.connected.get().is_none() || self.life.is_dead() {
            return false;
        }
        let before = self.wake.fall_asleep();
        if before.has_deferred() {
            self.drive(false);
        }
        if before.is_armed() {
            self.engine().lend(self);
        }
        true
    }

    /// The descriptor to sleep on after [`QpInner::begin_wait`]; `None` in place of an interest: the owner should look again first.
    pub(crate) fn wait_on(&self) -> Option<(BorrowedFd<'_>, Option<Interest>)> {
        let connected = self.peer.connected.get()?;
        Some((connected.link.fd(), connected.link.watch(self.interest())))
    }

    /// See [`Member::doze`](crate::cq::Member::doze).
    pub(crate) fn doze(&self) {
        let connected = self.peer.connected.get();
        if let Some(local) = connected.and_then(|connected| connected.link.local()) {
            local.doze();
        }
    }

    pub(crate) fn end_wait(&self) {
        self.owner.drive_seq.fetch_add(1, Ordering::Relaxed);
        self.wake.wake_up();
        self.engine().keep_ticking();
    }

    pub(super) fn interest(&self) -> Interest {
        let mut interest = Interest::empty();
        if self.life.is_paused() {
            return interest;
        }
        let Transport {
            blocked,
            stopped,
            closed,
        } = self.wake.seen().transport();
        interest.set(Interest::WRITE, blocked);
        interest.set(Interest::READ, !stopped);
        interest.set(Interest::PEER_CLOSED, stopped && !closed);
        interest
    }

    /// Let the engine's epoll fire for this queue pair again.
    pub(crate) fn rearm(&self) {
        let Some(connected) = self.peer.connected.get() else {
            return;
        };
        if !self.life.is_dead() {
            self.wake.arm();
            loop {
                let interest = self.interest();
                match connected.link.watch(interest) {
                    Some(what) => connected.registration.arm(connected.link.fd(), what),
                    None => connected.registration.poke(),
                }
                // Another thread may have been blocked meanwhile, and have armed before us: the lock of the epoll set is between its call and this look.
                if self.interest() == interest {
                    break;
                }
            }
        }
    }

    /// For the engine's tick. `Idle` takes the queue pair off the lent list.
    pub(crate) fn lease_state(&self) -> Lease {
        let seq = self.owner.drive_seq.load(Ordering::SeqCst);
        let polled = self.owner.seen_seq.swap(seq, Ordering::SeqCst) != seq;
        let seen = self.wake.seen();
        if polled {
            Lease::Polled
        } else if seen.has_sleepers() && !seen.transport().blocked {
            // An owner that fell asleep before sending was blocked does not watch for room; then the engine does.
            Lease::Asleep
        } else {
            Lease::Idle
        }
    }

    /// Work was put off until the next poll.
    pub(crate) fn has_deferred(&self) -> bool {
        self.wake.seen().has_deferred()
    }

    /// No owner sleeps on the socket.
    pub(crate) fn is_awake(&self) -> bool {
        !self.wake.seen().has_sleepers()
    }

    /// Whether it has to be added to the engine's list of leased queue pairs.
    pub(crate) fn enter_leased(&self) -> bool {
        self.wake.enter_list()
    }

    /// The engine takes a lent queue pair back.
    pub(crate) fn take_back(self: &Arc<Self>) {
        self.wake.leave_list();
        if self.wake.seen().is_armed() {
            // Posts were put off, and no poll came.
            if self.has_deferred() {
                self.owner
                    .engine_hint
                    .fetch_max(HINT_AFTER_POSTS, Ordering::Relaxed);
                self.flush_deferred();
            }
        } else {
            match self.drive(true) {
                Drive::Busy => return self.engine().lend(self),
                // It waited for this tick.
                Drive::Moved => self
                    .owner
                    .engine_hint
                    .store(HINT_AFTER_TICK, Ordering::Relaxed),
                Drive::Still => {}
            }
            self.rearm_and_flush();
        }
    }

    /// Arms, and checks once more, because a poster may have relied on the driving thread.
    pub(crate) fn rearm_and_flush(self: &Arc<Self>) {
        self.rearm();
        self.flush_deferred();
    }

    /// No thread polls yet, but a program that posts so many requests in a row will poll for their completions. If not, the tick sends
    /// them.
    pub(super) fn posts_in_a_row(self: &Arc<Self>, before: u32) -> bool {
        let hint = self.owner.engine_hint.load(Ordering::Relaxed);
        // A program that has requested an event is about to sleep, not to poll.
        if self.send_cq.is_armed() || self.recv_cq.is_armed() {
            return false;
        }
        if before < IN_A_ROW || hint > 0 {
            if before == IN_A_ROW {
                self.owner
                    .engine_hint
                    .store(hint.saturating_sub(1), Ordering::Relaxed);
            }
            return false;
        }
        self.engine().lend(self);
        true
    }

    pub(super) fn has_engine_hint(&self) -> bool {
        self.owner.engine_hint.load(Ordering::Relaxed) > 0
    }

    /// The engine leaves; another thread was driving at its last check.
    pub(crate) fn leave_driven(self: &Arc<Self>) {
        let hint = self.owner.engine_hint.load(Ordering::Relaxed);
        if hint == 0 {
            self.engine().lend(self);
        } else {
            self.owner.engine_hint.store(hint - 1, Ordering::Relaxed);
            self.wake.want_arm();
            self.drive(true);
        }
    }

    pub(crate) fn drive_engine(self: &Arc<Self>) -> Drive {
        let drove = self.drive(true);
        if drove == Drive::Moved && self.has_engine_hint() {
            self.owner
                .engine_hint
                .store(HINT_AFTER_TICK, Ordering::Relaxed);
        }
        drove
    }
}
