//! What a program is told of a connection's readiness, and which descriptor it waits for.

use super::Route;

/// The descriptors that a wait for one direction is made on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Watch {
    /// The TCP socket.
    pub tcp: bool,
    /// The bell.
    pub bell: bool,
}

impl Watch {
    const TCP: Watch = Watch {
        tcp: true,
        bell: false,
    };
    const BELL: Watch = Watch {
        tcp: false,
        bell: true,
    };
    const BOTH: Watch = Watch {
        tcp: true,
        bell: true,
    };
}

/// Where a wait for incoming bytes looks. `has_ended`: the bell has ended, and TCP alone knows the rest. `is_closed`: bytes that the peer sends over TCP are
/// behind those of the ring.
#[must_use]
pub fn input(into: Route, has_ended: bool, is_closed: bool) -> Watch {
    match into {
        Route::Ring if has_ended => Watch::TCP,
        Route::Ring if is_closed => Watch::BOTH,
        Route::Ring => Watch::BELL,
        Route::Both => Watch::BOTH,
        Route::Tcp | Route::After => Watch::TCP,
    }
}

/// Where a wait for room looks.
#[must_use]
pub fn output(out: Route, has_ended: bool) -> Watch {
    if out == Route::Ring && !has_ended {
        Watch::BELL
    } else {
        Watch::TCP
    }
}

/// Whether a thread that waits for the socket in the kernel keeps its direction from going over: it waits for TCP.
#[must_use]
pub fn keeps_tcp(into: Route) -> bool {
    !into.uses_ring()
}

/// What the rings show of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rings {
    /// The outgoing route.
    pub out: Route,
    /// The incoming route.
    pub into: Route,
    /// The peer has closed its socket, or shut it down for sending.
    pub has_finished: bool,
    /// Bytes to be read, and whether nothing comes behind them; `None`: the words are no honest peer's.
    pub ready: Option<(usize, bool)>,
}

/// Whether the rings alone tell what the program wants to know of the incoming (`wants.0`) and the outgoing direction.
#[inline]
#[must_use]
pub fn is_told_by_rings(rings: Rings, wants: (bool, bool)) -> bool {
    let is_open = matches!(rings.ready, Some((_, false)));
    rings.into == Route::Ring
        && !rings.has_finished
        && (!wants.0 || is_open)
        && (!wants.1 || rings.out == Route::Ring)
}

/// Whether an incoming direction leaves its ring for TCP before the program is told of it: the ring is closed and empty, so what its bell says has no meaning any
/// more.
#[must_use]
pub fn is_over(into: Route, ready: Option<(usize, bool)>) -> bool {
    into == Route::Ring && ready == Some((0, true))
}
