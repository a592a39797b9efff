//! What a receive does that finds its ring empty, and what the kernel's view of the TCP socket means meanwhile.

use super::Carrier;

/// What a receiver knows that has found its ring empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Empty {
    /// The direction is closed: the stream continues over TCP.
    pub is_closed: bool,
    /// The peer has ended, as its bell or the kernel says.
    pub has_ended: bool,
    /// The call may wait.
    pub may_wait: bool,
    /// It has spun on the empty ring.
    pub has_spun: bool,
    /// The bell is left as it is: a wait will ask for it first.
    pub is_left: bool,
}

/// What it does first, under the receive lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum First {
    /// The stream continues over TCP.
    GoOn,
    /// Returns `EAGAIN`.
    Return,
    /// Looks at the ring for a moment.
    Spin,
    /// Asks for the bell, and looks once more: [`asked`] says what follows if there is nothing.
    Ask,
}

/// See [`First`].
#[inline]
#[must_use]
pub fn on_empty(empty: Empty) -> First {
    match empty {
        Empty {
            is_closed: true, ..
        } => First::GoOn,
        // Bytes may have been published before the end: one more look.
        Empty {
            has_ended: true, ..
        } => First::Ask,
        Empty {
            may_wait: true,
            has_spun: false,
            ..
        } => First::Spin,
        Empty {
            may_wait: false,
            is_left: true,
            ..
        } => First::Return,
        _ => First::Ask,
    }
}

/// What the kernel says of the TCP socket while its bytes come through the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Nothing.
    Quiet,
    /// The peer has ended the connection, or its process has ended.
    End,
    /// There are bytes, which a call sent past this library.
    Stray,
}

/// What it means that the socket is readable. `is_closed` and `unread` are asked after that, in this order: a sender closes the direction before it sends over TCP.
#[must_use]
pub fn readable(
    is_end: bool,
    is_closed: impl FnOnce() -> bool,
    has_bytes: impl FnOnce() -> bool,
) -> Kernel {
    // While a FIN is being received, a poll can find it as a byte, before the kernel says what it is.
    if !is_end && !is_closed() && has_bytes() {
        Kernel::Stray
    } else {
        Kernel::End
    }
}

/// What a receiver does that has asked for the bell and found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Asked {
    /// The stream, or its end, continues over TCP.
    GoOn,
    /// Returns `EAGAIN`.
    Return,
    /// The peer has ended: the ring is looked at once more.
    Ended,
    /// Bytes are in TCP that the library has not seen: the connection ends.
    Reset,
    /// Sleeps until the bell rings.
    Sleep,
}

/// See [`Asked`]. The kernel is asked unless the peer has ended.
#[inline]
#[must_use]
pub fn asked(empty: Empty, kernel: impl FnOnce() -> Kernel) -> Asked {
    if empty.has_ended {
        return Asked::GoOn;
    }
    match (kernel(), empty.may_wait) {
        (Kernel::Stray, _) => Asked::Reset,
        // The bell says so, too, and wakes the receiver.
        (_, true) => Asked::Sleep,
        (Kernel::End, false) => Asked::Ended,
        (Kernel::Quiet, false) => Asked::Return,
    }
}

/// Whether a receive goes on after it has taken bytes: it asked for all, or these were the last bytes of a closed ring and those of TCP follow.
#[inline]
#[must_use]
pub fn goes_on(wants_all: bool, is_empty: bool, is_closed: bool, carrier: Carrier) -> bool {
    wants_all || is_empty && is_closed && carrier == Carrier::Here
}
