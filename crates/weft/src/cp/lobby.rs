//! Who may keep a listener busy: connections that have not proved anything yet wait in a lobby of limited size, and senders that
//! have take one of the places.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::link::Link;

/// Connections that may wait at the same time, in all and from one address.
const MOST: usize = 64;
const MOST_OF_ONE: usize = 8;

/// The lobby and the places of a listener.
pub struct Lobby {
    state: Mutex<State>,
    places: usize,
}

#[derive(Default)]
struct State {
    /// Oldest first.
    waiting: VecDeque<Waiting>,
    served: usize,
    next: u64,
}

struct Waiting {
    id: u64,
    from: IpAddr,
    link: Weak<dyn Link>,
}

/// A connection that waits, or a sender that has a place. Dropping it gives that up.
pub struct Visit {
    lobby: Arc<Lobby>,
    id: u64,
    placed: bool,
}

/// The address that counts as one host: an IPv6 host has a whole network of 64 bits.
fn origin(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

impl Lobby {
    /// With so many places.
    pub fn new(places: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            places,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new connection waits. Where there are too many, of its address or in all, the oldest is closed.
    pub fn enter(self: &Arc<Self>, from: IpAddr, link: &Arc<dyn Link>) -> Visit {
        let from = origin(from);
        let mut state = self.state();
        let alike = state.waiting.iter().filter(|w| w.from == from).count();
        let oldest = if alike >= MOST_OF_ONE {
            state.waiting.iter().position(|w| w.from == from)
        } else {
            (state.waiting.len() >= MOST).then_some(0)
        };
        let gone = oldest.and_then(|at| state.waiting.remove(at));
        let id = state.next;
        state.next += 1;
        state.waiting.push_back(Waiting {
            id,
            from,
            link: Arc::downgrade(link),
        });
        drop(state);
        if let Some(gone) = gone {
            tracing::info!("a connection from {} made room for a newer one", gone.from);
            if let Some(link) = gone.link.upgrade() {
                link.close();
            }
        }
        Visit {
            lobby: Arc::clone(self),
            id,
            placed: false,
        }
    }
}

impl Visit {
    /// The sender is authenticated: it takes a place, if there is one.
    pub fn take_place(&mut self) -> bool {
        let mut state = self.lobby.state();
        state.waiting.retain(|w| w.id != self.id);
        if !self.placed && state.served < self.lobby.places {
            state.served += 1;
            self.placed = true;
        }
        self.placed
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut state = self.lobby.state();
        if self.placed {
            state.served -= 1;
        } else {
            state.waiting.retain(|w| w.id != self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cp::tcp::TcpLink;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    #[test]
    fn the_oldest_goes_first_of_its_address_then_of_all() {
        let door = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = || {
            let near = TcpStream::connect(door.local_addr().unwrap()).unwrap();
            let link = TcpLink::new(near, Duration::from_secs(10)).unwrap();
            let far = door.accept().unwrap().0;
            far.set_nonblocking(true).unwrap();
            (Arc::new(link) as Arc<dyn Link>, far)
        };
        let closed = |far: &TcpStream| far.peek(&mut [0]).is_ok_and(|n| n == 0);
        let lobby = Lobby::new(1);
        let mut all = Vec::new();
        let mut enter = |from: String| {
            let (link, far) = link();
            let visit = lobby.enter(from.parse().unwrap(), &link);
            all.push((link, far, visit));
            all.iter()
                .map(|(_, far, _)| closed(far))
                .collect::<Vec<_>>()
        };
        enter("192.0.2.1".into());
        for i in 0..MOST_OF_ONE {
            enter(format!("2001:db8::{i}"));
        }
        let gone = enter("2001:db8::99:1".into());
        assert_eq!(
            gone.iter().position(|&gone| gone),
            Some(1),
            "of its network"
        );
        for i in 0..MOST - MOST_OF_ONE - 1 {
            enter(format!("198.51.100.{i}"));
        }
        let gone = enter("203.0.113.1".into());
        let gone: Vec<_> = (0..gone.len()).filter(|&i| gone[i]).collect();
        assert_eq!(gone, [0, 1], "then the oldest of all");

        // A connection with a place is neither counted nor closed; there is one.
        let (mut one, mut other) = (all.remove(2).2, all.pop().unwrap().2);
        assert!(one.take_place() && one.take_place() && !other.take_place());
        drop(one);
        assert!(other.take_place());
    }
}
