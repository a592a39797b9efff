//! Completion channels.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_sys::{EventFd, Interest, poll_fds};

use crate::lock::lock;
use crate::types::Error;

pub(crate) struct ChannelInner {
    events: Mutex<VecDeque<u32>>,
    fd: EventFd,
}

impl ChannelInner {
    pub(super) fn push(&self, cq_num: u32) {
        // One entry each time that the program arms a queue: it does so after taking the event, or lets them pile up.
        lock(&self.events).push_back(cq_num);
        self.fd.signal();
    }
}

/// A channel on which completion queues announce that they have something. Its descriptor is readable while events
/// wait and can sit in any `epoll`, edge-triggered too.
#[derive(Clone)]
pub struct CompChannel(pub(super) Arc<ChannelInner>);

impl CompChannel {
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(CompChannel(Arc::new(ChannelInner {
            events: Mutex::new(VecDeque::new()),
            fd: EventFd::new().map_err(Error::os("eventfd"))?,
        })))
    }

    /// The next event: the number ([`Cq::num`](super::Cq::num)) of the queue that made it. Blocks up to `timeout` (`None`: for ever).
    pub fn get_event(&self, timeout: Option<Duration>) -> Option<u32> {
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        loop {
            {
                let mut events = lock(&self.0.events);
                if let Some(num) = events.pop_front() {
                    if events.is_empty() {
                        self.0.fd.drain();
                    }
                    return Some(num);
                }
                self.0.fd.drain();
            }
            let left = match deadline {
                None => None,
                Some(end) => Some(end.checked_duration_since(Instant::now())?),
            };
            let _ = poll_fds(&[(self.0.fd.as_fd(), Interest::READ)], left);
        }
    }
}

impl AsFd for CompChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}
