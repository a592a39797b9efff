//! How long a call waits.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::bell::Bell;

/// The time limit of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// It does not wait.
    Not,
    /// Until then.
    Until(Instant),
    /// Without a limit.
    Forever,
}

impl Wait {
    /// From now on for so long; `None`: without a limit.
    pub fn up_to(limit: Option<Duration>) -> Wait {
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        end.map_or(Wait::Forever, Wait::Until)
    }

    /// Whether the call waits at all.
    pub fn waits(self) -> bool {
        self != Wait::Not
    }

    /// When it ends; `None`: never, or it does not wait.
    pub fn deadline(self) -> Option<Instant> {
        match self {
            Wait::Until(end) => Some(end),
            Wait::Not | Wait::Forever => None,
        }
    }

    /// Polls `look` until it returns something, and sleeps until the bell rings in between.
    ///
    /// # Errors
    /// `EAGAIN` if the call does not wait, or its time is up; `EINTR` if a signal handler ran.
    pub fn until<T>(self, bell: &Bell, mut look: impl FnMut() -> Option<T>) -> Result<T, Errno> {
        if self == Wait::Not {
            return look().ok_or(Errno::AGAIN);
        }
        let mut heard = bell.arm();
        let found = loop {
            if let Some(found) = look() {
                break Ok(found);
            }
            if let Err(errno) = self.sleep(bell) {
                break Err(errno);
            }
            bell.hear(&mut heard);
        };
        bell.disarm(heard);
        found
    }

    fn sleep(self, bell: &Bell) -> Result<(), Errno> {
        let left = self
            .deadline()
            .map(|end| end.saturating_duration_since(Instant::now()));
        let limit = left.map(timespec);
        let mut fds = [PollFd::new(bell, PollFlags::IN)];
        match rustix::event::poll(&mut fds, limit.as_ref())? {
            0 => Err(Errno::AGAIN),
            _ => Ok(()),
        }
    }
}

/// The time as the kernel takes it; times that it cannot express become the longest that it can.
pub fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

/// A limit of time in nanoseconds; 0: none.
#[derive(Debug, Default)]
pub struct Limit(AtomicU64);

impl Limit {
    /// `None`: none.
    pub fn set(&self, limit: Option<Duration>) {
        let nanos = limit.map_or(0, |limit| limit.as_nanos().max(1));
        let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
        self.0.store(nanos, Ordering::Relaxed);
    }

    /// As it was set.
    pub fn get(&self) -> Option<Duration> {
        let nanos = self.0.load(Ordering::Relaxed);
        (nanos > 0).then(|| Duration::from_nanos(nanos))
    }
}

/// How the calls on a socket wait, as set by its program; by default without a limit.
#[derive(Debug, Default)]
pub struct Waits {
    /// They return `EAGAIN` rather than wait.
    pub nonblocking: AtomicBool,
    /// Of sends.
    pub send: Limit,
    /// Of receives.
    pub recv: Limit,
}

impl Waits {
    fn of(&self, dont_wait: bool, limit: &Limit) -> Wait {
        if dont_wait || self.nonblocking.load(Ordering::Relaxed) {
            Wait::Not
        } else {
            Wait::up_to(limit.get())
        }
    }

    /// How long a send waits; `dont_wait` is the flag of the call.
    pub fn send_wait(&self, dont_wait: bool) -> Wait {
        self.of(dont_wait, &self.send)
    }

    /// The same of a receive.
    pub fn recv_wait(&self, dont_wait: bool) -> Wait {
        self.of(dont_wait, &self.recv)
    }
}
