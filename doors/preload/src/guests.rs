//! Peers of other users: the users that this process meets, their connections, and how long they may keep calls waiting.

use std::sync::OnceLock;

use weft_run::ledger::Word;
use weft_run::meet::Why;
use weft_run::peers::{Guest, Guests, Peers, USERS, User};

use crate::ledger::Row;
use crate::patience::Patience;

static GUESTS: Guests = Guests::new();
/// One for all connections of a user: a user with many of them is waited for no longer.
static PATIENCE: [Patience; USERS] = [const { Patience::new() }; USERS];

/// Those that this process meets.
pub(crate) fn peers() -> &'static Peers {
    static PEERS: OnceLock<Peers> = OnceLock::new();
    PEERS.get_or_init(Peers::of_environment)
}

/// Counts a peer of another user, and names it in the ledger. Under the lock of [`big`](crate::conn::big).
pub(crate) fn count_in(row: &Row, user: User) -> Result<Option<Guest>, Why> {
    match user {
        User::Own | User::Unseen => Ok(None),
        User::Other(uid) => {
            row.put(Word::PeerUser, 1 + u64::from(uid));
            GUESTS.enter(uid).map(Some).ok_or(Why::TooMany)
        }
    }
}

/// What the user may still keep calls waiting that must not wait.
pub(crate) fn patience(guest: &Guest) -> &'static Patience {
    &PATIENCE[guest.place]
}
