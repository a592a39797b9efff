//! What the servers of the tree share: who may keep them busy before anything is proved.
#![forbid(unsafe_code)]

use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Strangers at the same time, in all and from one address.
const MOST: usize = 64;
const MOST_OF_ONE: usize = 8;

/// The peers that a server has let in without a proof of who they are. They take none of its places.
#[derive(Debug, Clone, Default)]
struct Strangers(Arc<Mutex<Vec<IpAddr>>>);

/// One of them. Dropping it makes room for another one.
#[derive(Debug)]
pub struct Stranger {
    all: Strangers,
    from: IpAddr,
}

/// The address that counts as one host: an IPv6 host has a whole network of 64 bits.
fn origin(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

impl Strangers {
    fn lock(&self) -> MutexGuard<'_, Vec<IpAddr>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets one in, unless there are too many, of its address or in all.
    fn enter(&self, from: IpAddr) -> Option<Stranger> {
        let from = origin(from);
        let mut all = self.lock();
        let alike = all.iter().filter(|other| **other == from).count();
        if all.len() >= MOST || alike >= MOST_OF_ONE {
            return None;
        }
        all.push(from);
        Some(Stranger {
            all: self.clone(),
            from,
        })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        if let Some(at) = all.iter().position(|other| *other == self.from) {
            all.swap_remove(at);
        }
    }
}

/// One of a limited number of places. Dropping it makes room for another one.
#[derive(Debug)]
pub struct Place(Arc<AtomicUsize>);

impl Place {
    /// Takes one of `most` places, of which `count` are taken.
    pub fn take(count: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let taken = count.fetch_add(1, Ordering::SeqCst);
        let place = Self(Arc::clone(count));
        (taken < most).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How a connection came in.
#[derive(Debug)]
pub enum Entry {
    /// Its peer has shown who it is.
    Known(Place),
    /// Only its transport can show that it is of our user.
    Stranger(Stranger),
}

/// The places of a server, and its strangers.
#[derive(Debug)]
pub struct Admission {
    taken: Arc<AtomicUsize>,
    most: usize,
    /// What is said when all places are taken.
    full: &'static str,
    strangers: Strangers,
}

impl Admission {
    /// Of a server with this many places, which says `full` when they are taken.
    pub fn new(most: usize, full: &'static str) -> Self {
        Self {
            taken: Arc::default(),
            most,
            full,
            strangers: Strangers::default(),
        }
    }

    fn place(&self) -> Result<Place, &'static str> {
        Place::take(&self.taken, self.most).ok_or(self.full)
    }

    /// A place for a peer that has shown who it is, or one among the strangers.
    ///
    /// # Errors
    /// What to tell the peer if there is none.
    pub fn admit(&self, is_known: bool, from: IpAddr) -> Result<Entry, &'static str> {
        if is_known {
            return self.place().map(Entry::Known);
        }
        let stranger = self.strangers.enter(from);
        stranger.map(Entry::Stranger).ok_or("too many strangers")
    }

    /// The place of a peer that is let in; a stranger has shown who it is by now.
    ///
    /// # Errors
    /// As [`Admission::admit`].
    pub fn seat(&self, entry: Entry) -> Result<Place, &'static str> {
        match entry {
            Entry::Known(place) => Ok(place),
            Entry::Stranger(_) => self.place(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_leaves_room_for_others() {
        let strangers = Strangers::default();
        let enter = |ip: &str| strangers.enter(ip.parse().unwrap());
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
        let strangers = Strangers::default();
        let enter = |n: usize| strangers.enter([192, 0, 2, n as u8].into());
        let all: Vec<_> = (0..MOST).map(|n| enter(n).unwrap()).collect();
        assert!(enter(200).is_none());
        drop(all);
        assert!(enter(200).is_some());
    }
}
