//! The machine of a TCP connection whose two directions go over to rings and back to TCP: its states, and every decision about them, as functions of
//! values that the caller has read. It makes no system call and has no atomics. The preload library reads, asks and carries out; the model of
//! `tests/model.rs` does the same with a model of TCP and of the ring, in every order.
//!
//! - [`over`]: how a direction goes over to its ring.
//! - [`send`] and [`receive`]: where bytes go, and what a call does that finds no room or no bytes.
//! - [`back`]: how a connection goes back to TCP.
//! - [`ready`]: what a program is told, and by which descriptor it waits.

pub mod back;
pub mod over;
pub mod ready;
pub mod receive;
pub mod send;

/// What a socket is to its process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Phase {
    /// Not connected, as far as we know.
    #[default]
    Fresh = 0,
    /// Connected, over TCP; may look for its peer.
    Probing = 1,
    /// There is a channel.
    Linked = 2,
    /// TCP for good.
    Plain = 3,
}

impl Phase {
    /// Whether its sends and receives are counted.
    #[inline]
    #[must_use]
    pub fn is_followed(self) -> bool {
        matches!(self, Phase::Probing | Phase::Linked)
    }

    /// Whether it has no channel and may get one.
    #[must_use]
    pub fn may_meet(self) -> bool {
        matches!(self, Phase::Fresh | Phase::Probing)
    }
}

impl From<u32> for Phase {
    #[inline]
    fn from(number: u32) -> Phase {
        match number {
            0 => Phase::Fresh,
            1 => Phase::Probing,
            2 => Phase::Linked,
            _ => Phase::Plain,
        }
    }
}

impl From<Phase> for u32 {
    #[inline]
    fn from(phase: Phase) -> u32 {
        phase as u32
    }
}

/// How the bytes of a direction go, as one side sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Route {
    /// Over TCP.
    #[default]
    Tcp = 0,
    /// Through the ring.
    Ring = 1,
    /// Over TCP again, for good.
    After = 2,
    /// Incoming only: over TCP, and the peer on another host may switch at any time.
    Both = 3,
}

impl Route {
    /// Whether the direction may change so. The way from the ring to [`Route::Tcp`] undoes a switch of which the peer has not learned.
    #[must_use]
    pub fn may_become(self, to: Route) -> bool {
        match self {
            Route::Tcp => true,
            Route::Ring | Route::Both => to != Route::Both,
            Route::After => to == Route::After,
        }
    }

    /// Whether the side reads or writes the ring.
    #[inline]
    #[must_use]
    pub fn uses_ring(self) -> bool {
        matches!(self, Route::Ring | Route::Both)
    }

    /// The route as the ledger has it.
    #[must_use]
    pub fn told(self) -> Route {
        if self == Route::Both {
            Route::Tcp
        } else {
            self
        }
    }
}

impl From<u32> for Route {
    #[inline]
    fn from(number: u32) -> Route {
        match number {
            0 => Route::Tcp,
            1 => Route::Ring,
            2 => Route::After,
            _ => Route::Both,
        }
    }
}

impl From<Route> for u32 {
    #[inline]
    fn from(route: Route) -> u32 {
        route as u32
    }
}

/// Transport of the bytes behind the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Carrier {
    /// The peer is on this host.
    Here = 0,
    /// SDP with copies.
    Bsdp = 1,
}

impl Carrier {
    /// Of its number.
    pub fn of(number: u64) -> Carrier {
        match number {
            1 => Carrier::Bsdp,
            _ => Carrier::Here,
        }
    }
}

/// Processes that have the socket, after the end of one: by its last descriptor, its own end, or an exec that closes it. `None`: the count stays, and the
/// end shows as that of a process that was killed.
#[must_use]
pub fn without_one(holders: u32, by_exec: bool) -> Option<u32> {
    match holders {
        0 => None,
        1 if by_exec => None,
        holders => Some(holders - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_states() {
        for route in [Route::Tcp, Route::Ring, Route::After, Route::Both] {
            assert_eq!(Route::from(u32::from(route)), route);
            assert!(route.may_become(Route::After) && !Route::After.may_become(Route::Ring));
        }
        for phase in [Phase::Fresh, Phase::Probing, Phase::Linked, Phase::Plain] {
            assert_eq!(Phase::from(u32::from(phase)), phase);
        }
    }
}
