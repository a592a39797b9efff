//! Peers of other users: the users that this process meets, their connections, and how long they may keep calls waiting.

use std::sync::OnceLock;

use weft_run::peers::{Guest, Guests, Peers, USERS};

use crate::patience::Patience;

static GUESTS: Guests = Guests::new();
/// One for all connections of a user: a user with many of them is waited for no longer.
static PATIENCE: [Patience; USERS] = [const { Patience::new() }; USERS];

/// Those that this process meets.
pub(crate) fn peers() -> &'static Peers {
    static PEERS: OnceLock<Peers> = OnceLock::new();
    PEERS.get_or_init(Peers::of_environment)
}

/// Counts a connection more of a user. `None`: it has too many. Under the lock of [`big`](crate::conn::big).
pub(crate) fn enter(uid: u32) -> Option<Guest> {
    GUESTS.enter(uid)
}

/// What the user may still keep calls waiting that must not wait.
pub(crate) fn patience(guest: &Guest) -> &'static Patience {
    &PATIENCE[guest.place]
}
