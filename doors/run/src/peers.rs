//! Which users' processes may be peers, and how many connections those of other users get.
//!
//! A process of our own user is a peer without a setting. One of another user is a peer only if both sides have named each other's user
//! (`weft run --with`). It gets a ring and nothing else: no memory is lent to it, none of its own is read, and its connections are [counted](Guests).

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use weft_sys::process;
use weft_sys::settings::{self, Users};
use weft_sys::unix::OVERFLOW_UID;

/// The environment variable with the numbers of the users, or `any`.
pub const ENV: &str = "WEFT_RUN_WITH";

/// The users that this process meets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peers(Users);

impl Default for Peers {
    fn default() -> Peers {
        Peers(Users::These(Vec::new()))
    }
}

/// A user that may be met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// Ours.
    Own,
    /// The number is ours, and the kernel does not show whether the user namespace is: the process is gone, has more rights than we have, or is not dumpable.
    /// It may see us as its own user, so its segment is as one of ours. It is lent no memory.
    Unseen,
    /// Another one that we have named, by its number in our user namespace.
    Other(u32),
}

impl User {
    /// Of two statements about one peer, the one that trusts it less.
    #[must_use]
    pub fn and(self, other: User) -> User {
        match (self, other) {
            (User::Own, user) | (User::Unseen, user @ User::Other(_)) => user,
            _ => self,
        }
    }
}

impl Peers {
    /// Our own user, and those of a value of [`ENV`]. `None` if that is not one.
    pub fn with(text: &str) -> Option<Peers> {
        settings::users(text).map(Peers)
    }

    /// As the environment says. A wrong value names nobody.
    #[must_use]
    pub fn of_environment() -> Peers {
        let value = settings::RUN_WITH.read().ok().flatten();
        value
            .and_then(|text| Peers::with(&text))
            .unwrap_or_default()
    }

    /// The number for every user that our namespace does not know is no user's.
    fn names(&self, uid: u32) -> bool {
        let is_named = match &self.0 {
            Users::Any => true,
            Users::These(users) => users.contains(&uid),
        };
        is_named && uid != OVERFLOW_UID
    }

    /// Whether a process of this user may be met.
    #[must_use]
    pub fn judge(&self, uid: u32) -> Option<User> {
        let is_own = uid == process::uid() && uid != OVERFLOW_UID;
        if is_own {
            Some(User::Own)
        } else {
            self.names(uid).then_some(User::Other(uid))
        }
    }

    /// The same of a process: one of our user in another user namespace is no more to us than one of another user.
    #[must_use]
    pub fn judge_process(&self, uid: u32, process: Option<BorrowedFd<'_>>) -> Option<User> {
        match self.judge(uid)? {
            User::Own => {
                let shown = process.map(process::is_in_our_user_namespace);
                match shown.and_then(Result::ok) {
                    Some(true) => Some(User::Own),
                    Some(false) => self.names(uid).then_some(User::Other(uid)),
                    None => Some(User::Unseen),
                }
            }
            other => Some(other),
        }
    }
}

/// Connections that this process has with one other user at a time, at most.
pub const MOST_OF_ONE: u32 = 256;
/// With all other users together.
pub const MOST: u32 = 1024;
/// Other users at a time.
pub const USERS: usize = 64;

/// The connections of each other user.
#[derive(Debug)]
pub struct Guests {
    all: AtomicU32,
    users: [Count; USERS],
}

#[derive(Debug)]
struct Count {
    /// The user; it stays until another one needs the place.
    uid: AtomicU32,
    connections: AtomicU32,
}

/// The connection of another user, counted until it is dropped.
#[derive(Debug)]
pub struct Guest {
    of: &'static Guests,
    /// The place of its user, below [`USERS`].
    pub place: usize,
    /// Its user.
    pub uid: u32,
}

impl Default for Guests {
    fn default() -> Guests {
        Guests::new()
    }
}

fn add(count: &AtomicU32, most: u32) -> bool {
    let more = |now| (now < most).then_some(now + 1);
    count.fetch_update(SeqCst, SeqCst, more).is_ok()
}

impl Guests {
    /// Nobody yet.
    #[must_use]
    pub const fn new() -> Guests {
        Guests {
            all: AtomicU32::new(0),
            users: [const {
                Count {
                    uid: AtomicU32::new(0),
                    connections: AtomicU32::new(0),
                }
            }; USERS],
        }
    }

    /// Counts a connection more of this user. `None` if there are too many. One thread at a time calls this.
    pub fn enter(&'static self, uid: u32) -> Option<Guest> {
        let used = |count: &Count| count.connections.load(SeqCst) > 0;
        let its = |count: &Count| used(count) && count.uid.load(SeqCst) == uid;
        let known = self.users.iter().position(its);
        let place = known.or_else(|| self.users.iter().position(|count| !used(count)))?;
        let count = &self.users[place];
        if !add(&count.connections, MOST_OF_ONE) {
            return None;
        }
        if !add(&self.all, MOST) {
            count.connections.fetch_sub(1, SeqCst);
            return None;
        }
        count.uid.store(uid, SeqCst);
        Some(Guest {
            of: self,
            place,
            uid,
        })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.of.users[self.place].connections.fetch_sub(1, SeqCst);
        self.of.all.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn only_named_users_are_met_besides_our_own() {
        let own = process::uid();
        let (one, other) = (own + 7, own + 8);
        let named = Peers::with(&format!("{one},{}", own + 9)).unwrap();
        for (peers, meets) in [
            (Peers::default(), [true, false, false]),
            (named, [true, true, false]),
            (Peers::with("any").unwrap(), [true, true, true]),
        ] {
            let met = [own, one, other].map(|uid| peers.judge(uid).is_some());
            assert_eq!(met, meets, "{peers:?}");
            assert_eq!(peers.judge(own), Some(User::Own));
        }
        for wrong in ["", "x", "1,", "1 2", "-1", "4294967296", "any,1"] {
            assert_eq!(Peers::with(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn users_that_the_namespace_does_not_know_are_not_met() {
        for users in ["any", "65534"] {
            let peers = Peers::with(users).unwrap();
            assert_eq!(peers.judge(OVERFLOW_UID), None, "{users}");
        }
    }

    #[test]
    fn a_process_of_our_number_whose_namespace_is_not_known_is_met() {
        let (own, peers) = (process::uid(), Peers::default());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let gone = process::pidfd_open(child.id()).unwrap();
        child.wait().unwrap();
        let ours = process::pidfd_open(std::process::id()).unwrap();
        for (process, is) in [
            (Some(ours.as_fd()), User::Own),
            (Some(gone.as_fd()), User::Unseen),
            (None, User::Unseen),
        ] {
            assert_eq!(peers.judge_process(own, process), Some(is), "{process:?}");
        }
    }

    #[test]
    fn of_two_statements_the_one_that_trusts_less_counts() {
        let order = [User::Own, User::Unseen, User::Other(7)];
        for (i, one) in order.into_iter().enumerate() {
            for (j, other) in order.into_iter().enumerate() {
                assert_eq!(one.and(other), order[i.max(j)]);
            }
        }
    }

    #[test]
    fn a_user_gets_so_many_connections_and_all_of_them_so_many() {
        static GUESTS: Guests = Guests::new();
        let take = |uid| {
            let guests = std::iter::from_fn(|| GUESTS.enter(uid));
            guests.collect::<Vec<_>>()
        };
        let first = take(1000);
        assert_eq!(first.len(), MOST_OF_ONE as usize);
        let rest: Vec<_> = (1001..1010).map(take).collect();
        let all = first.len() + rest.iter().map(Vec::len).sum::<usize>();
        assert_eq!(all, MOST as usize);
        drop(first);
        assert_eq!(take(1009).len(), MOST_OF_ONE as usize);
        drop(rest);
        let users: Vec<_> = (0..100).filter_map(|uid| GUESTS.enter(uid)).collect();
        assert_eq!(users.len(), USERS);
    }
}
