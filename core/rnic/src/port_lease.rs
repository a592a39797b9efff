//! Who receives from a UDP port: a thread that polls a completion queue behind it, or the engine, which watches the socket while the port is armed.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a thread that has stopped polling keeps the lease.
const LEASE: Duration = Duration::from_millis(1);

pub(crate) struct PortLease {
    /// The engine's epoll can fire.
    armed: AtomicBool,
    /// A timer looks after the lease.
    timed: AtomicBool,
    /// When that timer comes, in nanoseconds after `began`. The port's other timers are none of the lease.
    due: AtomicU64,
    began: Instant,
    polls: AtomicU32,
    /// Of those, the ones that the timer has seen.
    seen: AtomicU32,
    /// And those before the last completion was taken.
    taken: AtomicU32,
    /// The thread has posted without a poll after that: it looks for what comes elsewhere, in its memory.
    elsewhere: AtomicBool,
}

impl Default for PortLease {
    /// The engine has the port.
    fn default() -> PortLease {
        PortLease {
            armed: AtomicBool::new(true),
            timed: AtomicBool::new(false),
            due: AtomicU64::new(0),
            began: Instant::now(),
            polls: AtomicU32::new(0),
            seen: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            elsewhere: AtomicBool::new(false),
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

    /// The last completion that was due is taken. True: after the one before it the thread polled no more until it posted.
    pub(crate) fn taken(&self) -> bool {
        self.taken.store(self.polls(), Ordering::Relaxed);
        self.elsewhere.load(Ordering::Relaxed)
    }

    /// A request is posted.
    pub(crate) fn posted(&self) {
        let elsewhere = self.taken.load(Ordering::Relaxed) == self.polls();
        self.elsewhere.store(elsewhere, Ordering::Relaxed);
    }

    /// Whether a thread polls; the engine handles what that thread leaves.
    pub(crate) fn is_polled(&self) -> bool {
        self.timed.load(Ordering::Relaxed) && !self.armed.load(Ordering::Relaxed)
    }

    /// When a timer is to look after the lease; `None`: one does.
    pub(crate) fn watch(&self) -> Option<Instant> {
        if self.timed.swap(true, Ordering::SeqCst) {
            return None;
        }
        let at = Instant::now() + LEASE;
        // A time is stored only where its timer follows.
        let due = (at - self.began).as_nanos() as u64;
        self.due.store(due, Ordering::SeqCst);
        Some(at)
    }

    /// A timer of the port has come, and whether the engine has the port. `None`: it is not the timer that looks after the lease, which comes later. Without
    /// this difference each other timer would add one that looks after the lease, for ever.
    pub(crate) fn expired(&self) -> Option<bool> {
        let due = Duration::from_nanos(self.due.load(Ordering::SeqCst));
        if self.timed.load(Ordering::SeqCst) && self.began.elapsed() < due {
            return None;
        }
        self.timed.store(false, Ordering::SeqCst);
        Some(self.is_armed())
    }

    /// Whether no thread has polled since this was asked last.
    pub(crate) fn is_over(&self) -> bool {
        let polls = self.polls.load(Ordering::SeqCst);
        self.seen.swap(polls, Ordering::SeqCst) == polls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_polls_between_completions_and_posts_looks_nowhere_else() {
        let lease = PortLease::default();
        for (polls, elsewhere) in [(0, true), (1, false), (3, false), (0, true)] {
            lease.taken();
            (0..polls).for_each(|_| _ = lease.poll());
            lease.posted();
            // For the completion.
            lease.poll();
            assert_eq!(lease.taken(), elsewhere, "{polls} polls");
        }
    }

    #[test]
    fn other_timers_of_the_port_are_none_of_the_lease() {
        let lease = PortLease::default();
        assert!(lease.poll());
        let at = lease.watch().expect("a timer");
        assert_eq!(lease.watch(), None);
        if Instant::now() + LEASE / 2 < at {
            assert_eq!(lease.expired(), None);
            assert_eq!(lease.watch(), None, "the first timer is still to come");
        }
        std::thread::sleep(at.saturating_duration_since(Instant::now()) + LEASE / 10);
        assert_eq!(lease.expired(), Some(false));
        assert!(lease.watch().is_some());
    }
}
