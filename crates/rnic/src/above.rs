//! Calls for layers that are built on verbs: sockets that drive their queues under locks of their own, and the C libraries, which have to
//! show states that only an RNIC has. A program on verbs needs none of them.

use std::time::Duration;

use crate::errors::CqOverrun;
use crate::types::{PostError, SendWr, Wc, WcStatus};

/// What an owner of a completion queue does who takes its completions under a lock of its own.
pub trait CqAbove {
    /// Take up to `out.len()` completions that are there already; drives nothing.
    ///
    /// # Errors
    /// [`CqOverrun`] as in [`Cq::poll`](crate::Cq::poll).
    fn take(&self, out: &mut [Wc]) -> Result<usize, CqOverrun>;

    /// Drive the members if nothing is there; says whether something is now. Takes nothing.
    fn look(&self) -> bool;

    /// Block until there is something to take, somebody calls [`CqAbove::interrupt`] after `epoch` was read with [`CqAbove::epoch`], or the
    /// time is up. Takes nothing: for owners who take under a lock of their own, and wait for what another thread may do for them.
    /// Without `spin` it sleeps at once. Also ends, and says so with true, when a signal's handler ran while it slept and there is
    /// nothing else.
    fn watch(&self, epoch: u32, spin: bool, timeout: Option<Duration>) -> bool;

    /// See [`CqAbove::watch`].
    fn epoch(&self) -> u32;

    /// End all waits of [`CqAbove::watch`] that began with an epoch of before.
    fn interrupt(&self);

    /// The owner goes to sleep somewhere else: the engine drives the members from now on, without a look around first.
    fn release(&self);

    /// Call this on the engine's thread, whenever the engine has left completions in the queue. It is how a layer above goes on
    /// while its program does something else; it must not block. Only once, before members exist.
    fn set_hook(&self, hook: impl Fn() + Send + Sync + 'static);

    /// Take out what the queue pair of this number has left here: nobody wants to hear of it any more.
    fn forget(&self, qp_num: u32);
}

/// What is done to a queue pair on behalf of a program that knows another kind.
pub trait QpAbove: Sized {
    /// Whether [`Qp::post_send`](crate::Qp::post_send) would take a request like this, given a connection and room for it.
    ///
    /// # Errors
    /// As there.
    fn check_send(&self, wr: &SendWr) -> Result<(), PostError>;

    /// Take sends from now on, before there is a connection: they are kept, and go out when it comes about. (Reads and atomics on a
    /// connection that then allows none fail.)
    fn allow_early_posts(&self);

    /// What the peer sends waits for its receive so often, as if the peer had said so ([`Qp::set_rnr_retry`](crate::Qp::set_rnr_retry)), also if the queue pair was made
    /// with [`Rnr::Terminate`](crate::Rnr::Terminate).
    fn wait_for_receives(&self, retry: u8);

    /// From now on nothing of the connection moves, as if the port were down, until this is called with `false`: what is posted waits, and so does what
    /// the peer does. Neither side is told.
    fn pause(&self, paused: bool);

    /// End the connection as if the wire were cut, for tests of what programs make of it: neither side is told why.
    fn cut(&self);

    /// End a connection, or the wait for one: the first send that is outstanding completes with `status`, everything else outstanding is
    /// flushed. A peer gets a Terminate. Nothing on a queue pair that has ended.
    fn fail(&self, status: WcStatus);

    /// The other end for a connection of this queue pair with itself: what arrives there takes the receives of this one, and
    /// completes as its own. It goes when its handle is dropped. `None` if there has been one.
    fn twin(&self) -> Option<Self>;
}
