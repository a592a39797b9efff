//! How long a call waits.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::bell::Bell;

/// How long a call may take.
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

    /// Whether it waits at all.
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

    /// Look until there is something, and sleep in between until the bell rings.
    ///
    /// # Errors
    /// `EAGAIN` when it does not wait, or not any more; `EINTR` when a signal's handler ran.
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
