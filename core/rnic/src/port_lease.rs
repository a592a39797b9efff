//! Who receives from a UDP port: a thread that polls a completion queue behind it, or the engine, which watches the socket while the port is armed.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a thread that has stopped polling keeps the lease.
const LEASE: Duration = Duration::from_millis(1);

pub(crate) struct PortLease {
    /// The engine's epoll can fire.
    armed: AtomicBool,
    /// A timer looks after the lease.
    timed: AtomicBool,
    polls: AtomicU32,
    /// Of those, the ones that the timer has seen.
    seen: AtomicU32,
}

impl Default for PortLease {
    /// The engine has the port.
    fn default() -> PortLease {
        PortLease {
            armed: AtomicBool::new(true),
            timed: AtomicBool::new(false),
            polls: AtomicU32::new(0),
            seen: AtomicU32::new(0),
        }
    }
}

impl PortLease {
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::SeqCst)
    }

    /// The engine has it from now on: its caller arms the registration.
    pub(crate) fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }

    /// Nobody has it. False: it was not the engine's.
    pub(crate) fn disarm(&self) -> bool {
        self.armed.swap(false, Ordering::SeqCst)
    }

    /// A thread polls, and has the port. True: the lease has just begun, and is to be watched.
    pub(crate) fn poll(&self) -> bool {
        // Polls that are counted once are no harm.
        let polls = self.polls().wrapping_add(1);
        self.polls.store(polls, Ordering::Relaxed);
        self.armed.load(Ordering::Relaxed) && self.disarm()
    }

    /// Changes with each poll that finds nothing.
    pub(crate) fn polls(&self) -> u32 {
        self.polls.load(Ordering::Relaxed)
    }

    /// Whether a thread polls; the engine handles what that thread leaves.
    pub(crate) fn is_polled(&self) -> bool {
        self.timed.load(Ordering::Relaxed) && !self.armed.load(Ordering::Relaxed)
    }

    /// When a timer is to look after the lease; `None`: one does.
    pub(crate) fn watch(&self) -> Option<Instant> {
        (!self.timed.swap(true, Ordering::SeqCst)).then(|| Instant::now() + LEASE)
    }

    /// The timer has come. True: the engine has the port.
    pub(crate) fn expired(&self) -> bool {
        self.timed.store(false, Ordering::SeqCst);
        self.is_armed()
    }

    /// Whether no thread has polled since this was asked last.
    pub(crate) fn is_over(&self) -> bool {
        let polls = self.polls.load(Ordering::SeqCst);
        self.seen.swap(polls, Ordering::SeqCst) == polls
    }
}
