//! How long a call waits.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::bell::Bell;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    Not,
    Until(Instant),
    Forever,
}

impl Wait {
    pub(crate) fn up_to(limit: Option<Duration>) -> Wait {
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        end.map_or(Wait::Forever, Wait::Until)
    }

    pub(crate) fn waits(self) -> bool {
        self != Wait::Not
    }

    /// `None`: there is none.
    pub(crate) fn deadline(self) -> Option<Instant> {
        match self {
            Wait::Until(end) => Some(end),
            Wait::Not | Wait::Forever => None,
        }
    }

    /// Look until there is something, and sleep in between until the bell rings.
    ///
    /// # Errors
    /// `EAGAIN` when it does not wait, or not any more; `EINTR` when a signal's handler ran.
    pub(crate) fn until<T>(
        self,
        bell: &Bell,
        mut look: impl FnMut() -> Option<T>,
    ) -> Result<T, Errno> {
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

pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}
