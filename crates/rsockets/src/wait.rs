//! How long a call waits.

use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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

    /// Sleep until somebody says that something has changed. Nothing when it does not wait, or not any more.
    pub(crate) fn sleep<'a, T>(
        self,
        changed: &Condvar,
        guard: MutexGuard<'a, T>,
    ) -> Option<MutexGuard<'a, T>> {
        match self {
            Wait::Not => None,
            Wait::Forever => Some(changed.wait(guard).unwrap_or_else(PoisonError::into_inner)),
            Wait::Until(end) => {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return None;
                }
                let woken = changed.wait_timeout(guard, left);
                Some(woken.unwrap_or_else(PoisonError::into_inner).0)
            }
        }
    }
}
