//! How a connection goes back to TCP.
//!
//! Both directions are closed; the bytes in the rings are still read from them. But whoever gets the socket (by `SCM_RIGHTS`, an exec, the C library's streams)
//! reads TCP, and would miss the bytes that lie in the ring. So the receiver holds its sender back, takes the bytes out of the ring, and sends them on the
//! peer's own socket: they are in TCP, in order, before the sender continues there.

use super::{Carrier, Route};
use crate::meet::Why;

/// From now on calls that are not seen, or other programs, or processes that cannot share our locks, read the socket. A peer's host has to have sent all that is on the way before the call returns.
#[must_use]
pub fn is_out_of_sight(why: Why) -> bool {
    matches!(
        why,
        Why::Exec
            | Why::Passed
            | Why::Stdio
            | Why::Descriptors
            | Why::Sandbox
            | Why::IoUring
            | Why::Splice
            | Why::PidNamespace
    )
}

/// Whether the bytes of the ring go back to TCP. An option of the kernel's can depend on their number (`SO_RCVLOWAT`, `SO_PEEK_OFF`).
#[must_use]
pub fn gives_back(why: Why) -> bool {
    is_out_of_sight(why) || why == Why::Option
}

/// Whether calls that are not seen may send while the incoming direction stays as it is: the outgoing one is on its ring, and closed there. Else both go back,
/// because those bytes would be missing from a count.
#[must_use]
pub fn stays_incoming(out: Route, carrier: Carrier) -> bool {
    carrier == Carrier::Here && out != Route::Tcp
}

/// A step of the way back, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Closes the outgoing direction.
    CloseOut,
    /// Another host: asks it for the rest over TCP, and is done.
    AskHost,
    /// Holds the sender back; closes the incoming direction.
    Hold,
    /// Closes the incoming direction, under the receive lock, and looks what is in its ring.
    CloseIn,
    /// The ring is empty: reads TCP from here on.
    ReadTcp,
    /// Gives the bytes of the ring back to TCP.
    GiveBack,
    /// Wakes the threads that wait for the ring: they look at TCP.
    Wake,
    /// Lets the sender go on.
    Release,
}

/// What the steps depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Going {
    /// The reason.
    pub why: Why,
    /// Who carries the bytes of the rings.
    pub carrier: Carrier,
    /// The incoming route, now.
    pub into: Route,
    /// From [`Step::CloseIn`] on: the ring has no bytes.
    pub is_empty: bool,
}

impl Going {
    /// The step after `last`; first that after none.
    #[must_use]
    pub fn next(self, last: Option<Step>) -> Option<Step> {
        let is_held = gives_back(self.why);
        let end = is_held.then_some(Step::Release);
        let wake = if self.into == Route::Ring {
            end
        } else {
            Some(Step::Wake)
        };
        match last {
            None => Some(Step::CloseOut),
            Some(Step::CloseOut) if self.carrier != Carrier::Here => Some(Step::AskHost),
            Some(Step::CloseOut) if is_held => Some(Step::Hold),
            Some(Step::CloseOut | Step::Hold) => Some(Step::CloseIn),
            Some(Step::CloseIn) if self.into != Route::Ring => end,
            Some(Step::CloseIn) if self.is_empty => Some(Step::ReadTcp),
            Some(Step::CloseIn) if is_held => Some(Step::GiveBack),
            Some(Step::CloseIn | Step::ReadTcp | Step::GiveBack) => wake,
            Some(Step::Wake) => end,
            Some(Step::AskHost | Step::Release) => None,
        }
    }
}

/// A step of [`Step::GiveBack`], in this order. After a no the bytes stay in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Give {
    /// Is there a duplicate of the peer's socket?
    PeersSocket,
    /// Has every send over TCP that was under way ended? Such bytes come behind those of the ring.
    Quiet,
    /// Does nobody else give? From here on other receivers wait.
    Begin,
    /// Takes the bytes of the ring, then those of TCP, and puts all into TCP.
    Move,
}

impl Give {
    /// The first one.
    pub const FIRST: Give = Give::PeersSocket;

    /// The step after this one.
    #[must_use]
    pub fn next(self) -> Option<Give> {
        match self {
            Give::PeersSocket => Some(Give::Quiet),
            Give::Quiet => Some(Give::Begin),
            Give::Begin => Some(Give::Move),
            Give::Move => None,
        }
    }
}

/// The reason to note of a direction that leaves its ring for TCP, at the end of the stream or before it.
#[must_use]
pub fn reason(is_closed: bool, is_at_end: bool) -> Why {
    if is_closed && !is_at_end {
        Why::Peer
    } else {
        Why::None
    }
}
