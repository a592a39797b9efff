//! What the servers of the tree and their clients share: who may keep a server busy before anything is proved, how text of peers is shown,
//! which files of keys are believed, how servers are named, how sizes are written, and where programs are.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod endpoint;
pub mod programs;
pub mod size;
pub mod text;
pub mod trust;

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Locks; a thread that panicked with the lock has left whole values behind.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Unproven peers at the same time, in all and from one address.
const MOST: usize = 64;
const MOST_OF_ONE: usize = 8;

/// How a stranger is shown out.
type Leave = Box<dyn FnOnce() + Send>;

/// The peers that a server has let in without a proof of who they are, the oldest first. They take none of its places.
#[derive(Clone, Default)]
struct UnprovenPeers(Arc<Mutex<Inside>>);

#[derive(Default)]
struct Inside {
    next: u64,
    all: Vec<Waiting>,
}

struct Waiting {
    number: u64,
    from: IpAddr,
    leave: Option<Leave>,
}

/// One of them. Dropping it makes room for another one.
#[derive(Debug)]
pub struct UnprovenPeer {
    all: UnprovenPeers,
    number: u64,
}

impl fmt::Debug for UnprovenPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnprovenPeers").finish_non_exhaustive()
    }
}

/// The address that counts as one host: an IPv6 host has a whole network of 64 bits.
fn origin(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

impl UnprovenPeers {
    /// Lets one in. If there are too many, of its address or in all, the oldest of them that can be shown out makes room for one that
    /// can be shown out itself; any other one is not let in.
    fn enter(&self, from: IpAddr, leave: Option<Leave>) -> Option<UnprovenPeer> {
        let from = origin(from);
        let mut inside = lock(&self.0);
        let all = &mut inside.all;
        let of_one = all.iter().filter(|other| other.from == from).count() >= MOST_OF_ONE;
        let gone = if of_one || all.len() >= MOST {
            leave.as_ref()?;
            let goes = |other: &Waiting| other.leave.is_some() && (!of_one || other.from == from);
            let oldest = all.iter().position(goes)?;
            all.remove(oldest).leave
        } else {
            None
        };
        let number = inside.next;
        inside.next += 1;
        inside.all.push(Waiting {
            number,
            from,
            leave,
        });
        drop(inside);
        if let Some(leave) = gone {
            leave();
        }
        Some(UnprovenPeer {
            all: self.clone(),
            number,
        })
    }
}

impl Drop for UnprovenPeer {
    fn drop(&mut self) {
        let mut inside = lock(&self.all.0);
        let mine = |other: &Waiting| other.number == self.number;
        let gone = inside
            .all
            .iter()
            .position(mine)
            .map(|at| inside.all.remove(at));
        // What is dropped with it may end a connection.
        drop(inside);
        drop(gone);
    }
}

/// One of a limited number of places. Dropping it makes room for another one.
#[derive(Debug)]
pub struct Permit(Arc<AtomicUsize>);

impl Permit {
    /// Takes one of `most` places, of which `count` are taken.
    pub fn take(count: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let taken = count.fetch_add(1, Ordering::SeqCst);
        let place = Self(Arc::clone(count));
        (taken < most).then_some(place)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How a connection came in.
#[derive(Debug)]
pub enum Entry {
    /// Its peer has shown who it is.
    Known(Permit),
    /// It has not yet.
    Unproven(UnprovenPeer),
}

/// The places of a server, and its strangers.
#[derive(Debug)]
pub struct Admission {
    taken: Arc<AtomicUsize>,
    most: usize,
    /// What is said when all places are taken.
    full: &'static str,
    strangers: UnprovenPeers,
}

impl Admission {
    /// Of a server with this many places, which says `full` when they are taken.
    pub fn new(most: usize, full: &'static str) -> Self {
        Self {
            taken: Arc::default(),
            most,
            full,
            strangers: UnprovenPeers::default(),
        }
    }

    fn place(&self) -> Result<Permit, &'static str> {
        Permit::take(&self.taken, self.most).ok_or(self.full)
    }

    /// A place for a peer that has shown who it is, or one among the strangers.
    ///
    /// # Errors
    /// What to tell the peer if there is none.
    pub fn admit(&self, is_known: bool, from: IpAddr) -> Result<Entry, &'static str> {
        if is_known {
            return self.place().map(Entry::Known);
        }
        self.stranger(from, None)
    }

    /// A place among the strangers for a peer that can still show who it is, for which the oldest one makes room. `leave` ends the
    /// peer's connection, when it is the oldest one itself.
    ///
    /// # Errors
    /// As [`Admission::admit`].
    pub fn admit_for_now(
        &self,
        from: IpAddr,
        leave: impl FnOnce() + Send + 'static,
    ) -> Result<Entry, &'static str> {
        self.stranger(from, Some(Box::new(leave)))
    }

    fn stranger(&self, from: IpAddr, leave: Option<Leave>) -> Result<Entry, &'static str> {
        let stranger = self.strangers.enter(from, leave);
        stranger.map(Entry::Unproven).ok_or("too many strangers")
    }

    /// The place of a peer that is let in; a stranger has shown who it is by now.
    ///
    /// # Errors
    /// As [`Admission::admit`].
    pub fn seat(&self, entry: Entry) -> Result<Permit, &'static str> {
        match entry {
            Entry::Known(place) => Ok(place),
            Entry::Unproven(_) => self.place(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_leaves_room_for_others() {
        let strangers = UnprovenPeers::default();
        let enter = |ip: &str| strangers.enter(ip.parse().unwrap(), None);
        let mut first: Vec<_> = (0..MOST_OF_ONE)
            .map(|_| enter("192.0.2.1").unwrap())
            .collect();
        assert!(enter("192.0.2.1").is_none() && enter("::ffff:192.0.2.1").is_none());
        assert!(enter("192.0.2.2").is_some());
        first.pop();
        assert!(enter("192.0.2.1").is_some());
        // A host has a whole network.
        let _network: Vec<_> = (0..MOST_OF_ONE)
            .map(|n| enter(&format!("2001:db8::{n}")).unwrap())
            .collect();
        assert!(enter("2001:db8::ff").is_none() && enter("2001:db8:0:1::1").is_some());
    }

    #[test]
    fn a_stranger_takes_a_place_when_it_is_let_in() {
        let admission = Admission::new(1, "full");
        let ip = [192, 0, 2, 1].into();
        let stranger = admission.admit(false, ip).unwrap();
        let known = admission.admit(true, ip).unwrap();
        assert_eq!(admission.admit(true, ip).unwrap_err(), "full");
        assert_eq!(admission.seat(stranger).unwrap_err(), "full");
        let place = admission.seat(known).unwrap();
        drop(place);
        assert!(admission.admit(true, ip).is_ok());
    }

    #[test]
    fn there_are_only_so_many() {
        let strangers = UnprovenPeers::default();
        let enter = |n: usize| strangers.enter([192, 0, 2, n as u8].into(), None);
        let all: Vec<_> = (0..MOST).map(|n| enter(n).unwrap()).collect();
        assert!(enter(200).is_none());
        drop(all);
        assert!(enter(200).is_some());
    }

    #[test]
    fn the_oldest_goes_first_of_its_address_then_of_all() {
        let admission = Admission::new(1, "full");
        let (tell, gone) = std::sync::mpsc::channel();
        let enter = |ip: String| {
            let (tell, from) = (tell.clone(), ip.clone());
            let leave = move || tell.send(from).unwrap();
            admission.admit_for_now(ip.parse().unwrap(), leave).unwrap()
        };
        let mut all = vec![enter("192.0.2.1".into())];
        all.extend((0..MOST_OF_ONE).map(|i| enter(format!("2001:db8::{i}"))));
        all.push(enter("2001:db8::99:1".into()));
        assert_eq!(gone.try_iter().collect::<Vec<_>>(), ["2001:db8::0"]);
        all.extend((0..MOST - MOST_OF_ONE - 1).map(|i| enter(format!("198.51.100.{i}"))));
        assert_eq!(gone.try_iter().count(), 0);
        all.push(enter("203.0.113.1".into()));
        assert_eq!(gone.try_iter().collect::<Vec<_>>(), ["192.0.2.1"]);
        // One with a place is no longer among them.
        let _permit = admission.seat(all.remove(2)).unwrap();
        all.push(enter("203.0.113.2".into()));
        assert_eq!(gone.try_iter().count(), 0);
    }
}
