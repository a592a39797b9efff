//! Completion channels.

use std::ffi::c_int;
use std::sync::Arc;

use rustix::io::Errno;

use super::context::{Context, Users};
use super::events::EventQueue;
use super::object::{Kind, PerFork, Pool, find, turn};
use super::types::*;
use crate::call::{pointer, status};

/// What an `ibv_comp_channel` stands for.
pub(crate) struct Channel {
    pub(crate) queue: Arc<EventQueue<()>>,
    /// Completion queues that use it.
    pub(crate) users: Users,
}

impl Kind for Channel {
    type C = ibv_comp_channel;
    type Handle = ibv_comp_channel;
    const MARK: u32 = 0xc0a7_c4a2;
    fn pool() -> &'static Pool<Self> {
        static POOL: PerFork<Pool<Channel>> = PerFork::new();
        POOL.get()
    }
}

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
    status(|| {
        let channel = turn::<Channel>(channel)?;
        if channel.users.any() {
            return Err(Errno::BUSY);
        }
        drop(channel.retire());
        Ok(())
    })
}
