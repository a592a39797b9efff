//! The interface through which a completion queue sees the objects whose completions it holds.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use weft_sys::Interest;

use super::{Glance, Poller};

/// A connection. A thread that polls the queue, or waits on it, drives its members.
pub(crate) trait Member: Send + Sync {
    /// The state that a poll sees without a lock.
    fn glance(&self) -> &Arc<Glance>;
    /// A poll found nothing, after `empty_polls` in a row before it: look at the connection.
    fn drive_polled(self: Arc<Self>, empty_polls: u32, poller: Option<&mut Poller<'_>>);
    /// Drive it for a thread that waits for the queue's event.
    fn drive_awaited(self: Arc<Self>);
    /// Drive it for a thread that has asked for the queue's event and may sleep: the engine watches the connection.
    fn drive_unleased(self: Arc<Self>);
    /// Sends deferred requests.
    fn flush_deferred(self: Arc<Self>);
    /// The owner sleeps elsewhere: the engine takes over at once.
    fn release_lease(self: Arc<Self>);
    /// The owner is about to sleep on what [`Member::wait_on`] says, and calls [`Member::end_wait`] afterwards, unless this is
    /// false: there is nothing to wait for.
    fn begin_wait(self: Arc<Self>) -> bool;
    /// The descriptor to sleep on; `None` in place of an interest: the owner should look again first.
    fn wait_on(&self) -> Option<(BorrowedFd<'_>, Option<Interest>)>;
    /// The owner polls between short sleeps, and may look for the peer's Writes in its memory: they end the sleep that begins now.
    fn doze(&self) {}
    /// The owner is awake.
    fn end_wait(&self);
}

/// A socket that many queue pairs share.
pub(crate) trait Port: Send + Sync {
    /// Sends waiting requests and receives, unless another thread is doing so.
    fn drive(&self);
    /// A poll found nothing: the poller receives from now on.
    fn drive_leased(&self);
    /// Sends deferred requests.
    fn flush_deferred(&self);
    /// The polling thread sleeps elsewhere: the engine receives from now on.
    fn release_lease(&self);
    /// The polling thread may poll no more: the engine receives from now on, unless a completion is still to come.
    fn hand_back(&self) {}
    /// The polling thread is about to sleep: on this descriptor, and then it calls [`Port::end_wait`]; or elsewhere.
    fn begin_wait(&self) -> Option<(BorrowedFd<'_>, Interest)> {
        self.release_lease();
        None
    }
    /// The thread is awake.
    fn end_wait(&self) {}
}
