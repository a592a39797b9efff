//! What a send does.

use super::Carrier;
use crate::meet::Why;

/// TCP takes so many bytes at once, whatever its buffer.
const AT_ONCE: usize = 2048;

/// Whether a send of `len` bytes over TCP, in a direction that was closed, rings first: it may wait for a receiver that still waits for the ring.
#[inline]
#[must_use]
pub fn rings_first(len: usize) -> bool {
    len > AT_ONCE
}

/// Whether a sender that closes its direction rings: the receiver looks at TCP when there is something, and our next send over TCP rings. What others send is not
/// seen. A ring without bytes may wake a program for nothing.
#[must_use]
pub fn rings_at_close(why: Why, carrier: Carrier) -> bool {
    let is_seen = matches!(
        why,
        Why::ShutRead | Why::SlowReader | Why::Epoll | Why::Peer | Why::Option | Why::Urgent
    );
    !is_seen || carrier != Carrier::Here
}

/// What a sender does first that has found no room, under the send lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoRoom {
    /// The rest goes over TCP, behind the bytes of the ring.
    GoBack,
    /// Looks at the ring for a moment.
    Spin,
    /// Asks for room, by the word and by its bell, and looks once more: [`asked`] says what follows if there is none.
    Ask,
}

/// See [`NoRoom`].
#[inline]
#[must_use]
pub fn on_full(is_closed: bool, has_spun: bool) -> NoRoom {
    match (is_closed, has_spun) {
        (true, _) => NoRoom::GoBack,
        (false, false) => NoRoom::Spin,
        (false, true) => NoRoom::Ask,
    }
}

/// What a sender does that has asked for room and found none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Asked {
    /// Returns what is sent, or `EAGAIN`.
    Return,
    /// The peer does not read: closes the direction. TCP has larger buffers.
    Close,
    /// Sleeps until its bell is writable; [`Asked::Close`] follows if the peer has read nothing meanwhile.
    Sleep,
}

/// See [`Asked`]. `is_stuck`: the peer has read nothing for a while, as a sender finds out that does not wait.
#[inline]
#[must_use]
pub fn asked(may_wait: bool, is_stuck: impl FnOnce() -> bool) -> Asked {
    match may_wait {
        true => Asked::Sleep,
        false if is_stuck() => Asked::Close,
        false => Asked::Return,
    }
}
