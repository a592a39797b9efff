//! Calls for layers that are built on verbs: sockets that drive their queues under locks of their own, and the C libraries, which have to
//! show states that only an RNIC has. A program on verbs needs none of them.

use std::time::Duration;

use crate::errors::CqOverrun;
pub use crate::lock::{lock, try_lock};
pub use crate::names::listening_user;
use crate::types::{PostError, RecvWr, SendWr, Wc, WcStatus};

/// Calls for an owner that takes a completion queue's completions under a lock of its own.
pub trait CqExt {
    /// Take up to `out.len()` completions that are there already; drives nothing.
    ///
    /// # Errors
    /// [`CqOverrun`] as in [`Cq::poll`](crate::Cq::poll).
    fn take(&self, out: &mut [Wc]) -> Result<usize, CqOverrun>;

    /// Drive the members if nothing is there; says whether something is now. Takes nothing.
    fn look(&self) -> bool;

    /// A program that repeats such looks has found nothing: leave the processor to others for a moment, as [`Cq::poll`](crate::Cq::poll) does. It may
    /// sleep: no lock may be held.
    fn make_way(&self);

    /// Blocks until completions are available, another thread calls [`CqExt::interrupt`] after `epoch` was read with [`CqExt::epoch`],
    /// or the time is up. Takes no completions: for owners that take them under a lock of their own, and wait for work of other threads.
    /// Without `spin` it sleeps at once. It also returns true if a signal handler ran while it slept and nothing else happened.
    fn watch(&self, epoch: u32, spin: bool, timeout: Option<Duration>) -> bool;

    /// See [`CqExt::watch`].
    fn epoch(&self) -> u32;

    /// End all waits of [`CqExt::watch`] that began with an epoch of before.
    fn interrupt(&self);

    /// The owner sleeps elsewhere from now on: the engine drives the members, without a poll before.
    fn release(&self);

    /// Sets a function that the engine's thread calls whenever the engine has left completions in the queue. With it a layer above makes
    /// progress while its program does something else; it must not block. Only once, before members exist.
    fn set_hook(&self, hook: impl Fn() + Send + Sync + 'static);

    /// Removes the completions of the queue pair with this number.
    fn forget(&self, qp_num: u32);
}

/// Calls on a device for a layer that has timers and no thread.
pub trait DeviceExt {
    /// Calls `run` on the engine's thread after this time. It must not block.
    fn after(&self, time: Duration, run: impl FnOnce() + Send + 'static);
}

/// Calls on a queue pair for a program that expects another kind of device.
pub trait QpExt: Sized {
    /// Checks whether [`Qp::post_send`](crate::Qp::post_send) would accept this request, given a connection and room for it.
    ///
    /// # Errors
    /// As `post_send`.
    fn check_send(&self, wr: &SendWr) -> Result<(), PostError>;

    /// Take sends from now on, before there is a connection: they are kept, and go out when it comes about. (Reads and atomics on a
    /// connection that then allows none fail.)
    fn allow_early_posts(&self);

    /// Sets how often the peer's messages wait for a receive, as if the peer had set it ([`Qp::set_rnr_retry`](crate::Qp::set_rnr_retry)), also if the queue pair was
    /// made with [`Rnr::Terminate`](crate::Rnr::Terminate).
    fn wait_for_receives(&self, retry: u8);

    /// Stops the connection, as if the port were down, until this is called with `false`: requests of both sides wait. Neither side is notified.
    fn pause(&self, paused: bool);

    /// Ends the connection as if the wire were cut, to test how programs react: neither side learns the reason.
    fn cut(&self);

    /// End a connection, or the wait for one: the first send that is outstanding completes with `status`, everything else outstanding is
    /// flushed. A peer gets a Terminate. Nothing on a queue pair that has ended.
    fn fail(&self, status: WcStatus);

    /// Takes back the receives that are posted, in order, of a queue pair that has never had a connection: another one gets them. Those of a shared queue stay
    /// there.
    fn take_receives(&self) -> Vec<RecvWr>;

    /// The other end for a connection of this queue pair with itself: messages to it take the receives of this one, and complete as its
    /// own. It ends when its handle is dropped. `None` if there has been one.
    fn twin(&self) -> Option<Self>;
}
