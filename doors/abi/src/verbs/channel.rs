//! Completion channels.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use weft_verbs::{Cq, EventWait};

use super::context::Context;
use super::events::EventQueue;
use super::object::{Kind as _, find, kind, lock};
use super::types::*;
use super::users::{Users, end_unused};
use crate::call::{pointer, wait_and_fetch};

/// The object behind an `ibv_comp_channel`.
pub(crate) struct Channel {
    pub(crate) queue: Arc<EventQueue<()>>,
    pub(crate) awaited: Arc<Awaited>,
    /// Completion queues that use it.
    pub(crate) users: Users,
}

/// The queues that notify a channel, for threads that wait for an event: they drive the connections themselves for a moment.
#[derive(Default)]
pub(crate) struct Awaited {
    cqs: Mutex<Arc<Vec<Cq>>>,
    wait: EventWait,
}

impl Awaited {
    /// A queue that notifies this channel.
    pub(crate) fn add(&self, cq: &Cq) {
        Arc::make_mut(&mut lock(&self.cqs)).push(cq.clone());
    }

    /// The queue does not notify this channel any more.
    pub(crate) fn remove(&self, cq: &Cq) {
        Arc::make_mut(&mut lock(&self.cqs)).retain(|other| !other.same(cq));
    }
}

impl Channel {
    /// A thread is about to wait for an event.
    pub(crate) fn drive(&self) {
        if self.queue.is_empty() && !self.queue.is_nonblocking() {
            let cqs = Arc::clone(&lock(&self.awaited.cqs));
            self.awaited.wait.try_for(&cqs, || !self.queue.is_empty());
        }
    }
}

kind!(Channel as ibv_comp_channel, 0xc0a7_c4a2);

/// `ibv_create_comp_channel`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    pointer(|| {
        let context = find::<Context>(context)?;
        let queue = EventQueue::new()?;
        let fd = queue.fd();
        let body = Channel {
            queue,
            awaited: Arc::default(),
            users: Users::default(),
        };
        let made = Channel::pool().make(body, |c, _| {
            c.context = context.handle();
            c.fd = fd;
        })?;
        Ok(made.handle())
    })
}

/// `ibv_destroy_comp_channel`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    end_unused::<Channel>(channel, |channel| &channel.users)
}

/// `ibv_get_cq_event`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let fetch = || {
        let queue = Arc::clone(&find::<Channel>(channel)?.queue);
        let Some((subject, ())) = queue.fetch() else {
            return Ok(false);
        };
        let handle = subject.handle as *mut ibv_cq;
        // SAFETY: the caller's promise. The queue cannot end before this event is acknowledged.
        unsafe {
            cq.write(handle);
            cq_context.write((*handle).cq_context);
        }
        Ok(true)
    };
    let count_of = || {
        let channel = find::<Channel>(channel)?;
        if cq.is_null() || cq_context.is_null() {
            return Err(Errno::INVAL);
        }
        channel.drive();
        Ok(channel.queue.fd())
    };
    // SAFETY: an event queue's descriptor.
    unsafe { wait_and_fetch(count_of, fetch) }
}
