//! Completion channels.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_cverbs::ibv_comp_channel;

use crate::context::Context;
use crate::error::{Error, last};
use crate::life::{Handle, Kind};
use crate::watch::{readable, without_blocking};

/// A completion channel: a descriptor that is readable while events of its completion queues wait. Clones are the same one.
#[derive(Clone)]
pub struct Channel(Arc<ChannelInner>);

struct ChannelInner {
    channel: Handle<ibv_comp_channel>,
    /// Readable while the channel's descriptor is, and once the device is gone. A thread that slept on the descriptor itself would keep the device open.
    ready: OwnedFd,
    context: Context,
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.ready.as_fd()
    }
}

impl Context {
    /// A new completion channel.
    ///
    /// # Errors
    /// As `ibv_create_comp_channel`.
    pub fn create_channel(&self) -> Result<Channel, Error> {
        let calling = self.enter()?;
        let calls = &self.libraries().verbs;
        // SAFETY: an open context.
        let raw = unsafe { (calls.ibv_create_comp_channel)(self.raw()) };
        if raw.is_null() {
            return Err(self.failed("ibv_create_comp_channel", last()));
        }
        // SAFETY: the descriptor of a channel that lives as long as `calling`.
        let fd = unsafe { BorrowedFd::borrow_raw((*raw).fd) };
        // SAFETY: ours, once; every queue of it was destroyed before.
        let destroy = move |channel| unsafe { (calls.ibv_destroy_comp_channel)(channel) };
        let channel = Handle::new(self.life(), &calling, Kind::Channel, raw, destroy);
        let ready = without_blocking(fd).and_then(|()| self.life().readable_or_gone(fd));
        let ready = ready.map_err(|e| self.failed("epoll_ctl", e.raw_os_error()));
        drop(calling);
        Ok(Channel(Arc::new(ChannelInner {
            channel,
            ready: ready?,
            context: self.clone(),
        })))
    }
}

impl Channel {
    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    pub(crate) fn raw(&self) -> *mut ibv_comp_channel {
        self.0.channel.raw()
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
        let errno = self.0.channel.with(|channel| {
            // SAFETY: a channel that lives, and places for the answer. The queue lives until its event is acknowledged.
            unsafe {
                if (calls.ibv_get_cq_event)(channel, &raw mut cq, &raw mut program) != 0 {
                    return last();
                }
                (calls.ibv_ack_cq_events)(cq, 1);
            }
            0
        })?;
        match errno {
            // The queue's number, see `Context::create_cq`.
            0 => Ok(Some(program.addr() as u32)),
            libc::EAGAIN | libc::EINTR => Ok(None),
            errno => Err(self.context().failed("ibv_get_cq_event", errno)),
        }
    }
}
