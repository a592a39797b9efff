//! Completion channels.

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use weft_cverbs::ibv_comp_channel;

use crate::context::Context;
use crate::error::{Error, last};

/// Waits until something can be read, at most until `end` (`None`: for ever); false if nothing came.
pub(crate) fn readable(fd: BorrowedFd<'_>, end: Option<Instant>) -> Result<bool, Errno> {
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], left.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Calls on this descriptor do not block.
pub(crate) fn without_blocking(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

/// A completion channel: a descriptor that is readable while events of its completion queues wait. Clones are the same one.
#[derive(Clone)]
pub struct Channel(Arc<ChannelInner>);

struct ChannelInner {
    channel: *mut ibv_comp_channel,
    context: Context,
}

// SAFETY: as `Context`.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: ours, once; every queue of it has held it.
        unsafe { (self.context.libraries().verbs.ibv_destroy_comp_channel)(self.channel) };
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's descriptor, which is open as long as it.
        unsafe { BorrowedFd::borrow_raw((*self.0.channel).fd) }
    }
}

impl Context {
    /// A new completion channel.
    ///
    /// # Errors
    /// As `ibv_create_comp_channel`.
    pub fn create_channel(&self) -> Result<Channel, Error> {
        // SAFETY: an open context.
        let channel = unsafe { (self.libraries().verbs.ibv_create_comp_channel)(self.raw()) };
        if channel.is_null() {
            return Err(self.failed("ibv_create_comp_channel", last()));
        }
        let context = self.clone();
        let channel = Channel(Arc::new(ChannelInner { channel, context }));
        without_blocking(channel.as_fd()).map_err(|e| self.failed("fcntl", e.raw_os_error()))?;
        Ok(channel)
    }
}

impl Channel {
    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    pub(crate) fn raw(&self) -> *mut ibv_comp_channel {
        self.0.channel
    }

    /// The next event: the number ([`Cq::number`](crate::Cq::number)) of the queue that made it. It needs no acknowledgement. `None` if none came in this
    /// time (`None`: for ever).
    ///
    /// # Errors
    /// As `ibv_get_cq_event`.
    pub fn event(&self, patience: Option<Duration>) -> Result<Option<u32>, Error> {
        let end = patience.and_then(|time| Instant::now().checked_add(time));
        loop {
            if let Some(number) = self.try_event()? {
                return Ok(Some(number));
            }
            // If an event comes and none is found, another thread has taken it.
            let came = readable(self.as_fd(), end);
            if !came.map_err(|e| self.context().failed("poll", e.raw_os_error()))? {
                return Ok(None);
            }
        }
    }

    /// As [`Channel::event`], of one that is there already.
    pub(crate) fn try_event(&self) -> Result<Option<u32>, Error> {
        let calls = &self.context().libraries().verbs;
        let (mut cq, mut program) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a channel that lives, and places for the answer.
        let answer = unsafe { (calls.ibv_get_cq_event)(self.raw(), &raw mut cq, &raw mut program) };
        if answer == 0 {
            // SAFETY: the queue lives until its event is acknowledged.
            unsafe { (calls.ibv_ack_cq_events)(cq, 1) };
            // The queue's number, see `Context::create_cq`.
            return Ok(Some(program.addr() as u32));
        }
        match last() {
            libc::EAGAIN | libc::EINTR => Ok(None),
            errno => Err(self.context().failed("ibv_get_cq_event", errno)),
        }
    }
}
