//! What the servers of the tree share: who may keep them busy before anything is proved.
#![forbid(unsafe_code)]

use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Strangers at the same time, in all and from one address.
const MOST: usize = 64;
const MOST_OF_ONE: usize = 8;

/// The peers that a server has let in without a proof of who they are. They take none of its places.
#[derive(Debug, Clone, Default)]
pub struct Strangers(Arc<Mutex<Vec<IpAddr>>>);

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
    pub fn enter(&self, from: IpAddr) -> Option<Stranger> {
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
    fn there_are_only_so_many() {
        let strangers = Strangers::default();
        let enter = |n: usize| strangers.enter([192, 0, 2, n as u8].into());
        let all: Vec<_> = (0..MOST).map(|n| enter(n).unwrap()).collect();
        assert!(enter(200).is_none());
        drop(all);
        assert!(enter(200).is_some());
    }
}
