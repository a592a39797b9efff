//! A descriptor that is readable while events wait.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use weft_sys::{EventFd, Interest, poll_fds};

/// An event that can sit in any `epoll`, and be waited for.
pub struct Signal(EventFd);

impl Signal {
    /// A new one, not raised.
    ///
    /// # Errors
    /// Without a free descriptor.
    pub fn new() -> io::Result<Self> {
        EventFd::new().map(Signal)
    }
    /// Make it readable.
    pub fn raise(&self) {
        self.0.signal();
    }
    /// Make it unreadable.
    pub fn clear(&self) {
        self.0.drain();
    }
    /// Wait until it is raised, or for so long.
    pub fn wait(&self, timeout: Option<Duration>) {
        // An interrupted or failed wait is an early return: callers look again.
        let _ = poll_fds(&[(self.0.as_fd(), Interest::READ)], timeout);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
