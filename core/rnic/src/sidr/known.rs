//! The requests that a service remembers, in bounded memory.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, Hash, RandomState};
use std::net::{IpAddr, SocketAddr};

/// Answers that are kept for requests that come again.
const ANSWERS: usize = 1024;
/// Requests of one address that are heard within a second.
pub(crate) const PER_SECOND: u32 = 512;
/// The number of addresses that are distinguished for that, roughly.
const SOURCES: usize = 1024;

/// The requester, and its identifier of the request.
pub(crate) type Key = (SocketAddr, u64);

/// The outcome of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    New,
    /// It waits for its answer, or there is no room for it.
    Nothing,
    Answered(Vec<u8>),
}

/// The requests that were received, in bounded memory.
pub(crate) struct Known<K = Key> {
    backlog: usize,
    waiting: HashSet<K>,
    answers: HashMap<K, Vec<u8>>,
    /// The keys of `answers`, oldest first.
    order: VecDeque<K>,
}

impl<K: Copy + Eq + Hash> Known<K> {
    pub(crate) fn new(backlog: usize) -> Known<K> {
        Known {
            backlog,
            waiting: HashSet::new(),
            answers: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    pub(crate) fn hear(&mut self, key: K) -> Heard {
        if let Some(answer) = self.answers.get(&key) {
            return Heard::Answered(answer.clone());
        }
        if self.waiting.len() >= self.backlog || !self.waiting.insert(key) {
            return Heard::Nothing;
        }
        Heard::New
    }

    pub(crate) fn answer(&mut self, key: K, answer: Vec<u8>) {
        self.waiting.remove(&key);
        if self.order.len() >= ANSWERS
            && let Some(oldest) = self.order.pop_front()
        {
            self.answers.remove(&oldest);
        }
        self.order.push_back(key);
        self.answers.insert(key, answer);
    }
}

/// How often each address has sent a request in this second. Addresses may share an entry, which a sender cannot choose.
pub(crate) struct Sources {
    hash: RandomState,
    /// The second, and how often.
    places: Box<[(u64, u32); SOURCES]>,
}

impl Sources {
    pub(crate) fn new() -> Sources {
        Sources {
            hash: RandomState::new(),
            places: Box::new([(0, 0); SOURCES]),
        }
    }

    /// Whether one more request is accepted.
    pub(crate) fn admit(&mut self, from: IpAddr, second: u64) -> bool {
        let from = match from.to_canonical() {
            IpAddr::V4(ip) => u64::from(ip.to_bits()),
            // A host that has one IPv6 address has its whole network.
            IpAddr::V6(ip) => (ip.to_bits() >> 64) as u64,
        };
        let place = self.hash.hash_one(from) as usize % SOURCES;
        let (at, count) = &mut self.places[place];
        if *at != second {
            (*at, *count) = (second, 0);
        }
        *count += u32::from(*count < PER_SECOND + 1);
        *count <= PER_SECOND
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_counted_apart() {
        let mut sources = Sources::new();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let (one, mapped) = (ip("192.0.2.1"), ip("::ffff:192.0.2.1"));
        for _ in 0..PER_SECOND {
            assert!(sources.admit(one, 7));
        }
        assert!(!sources.admit(mapped, 7), "the same one");
        // Some may share its place.
        let others = (0..100).filter(|n| sources.admit(ip(&format!("192.0.2.{}", n + 100)), 7));
        assert!(others.count() > 50);
        assert!(sources.admit(one, 8));
        let [a, b] = ["2001:db8::1", "2001:db8::2"].map(ip);
        for _ in 0..PER_SECOND {
            assert!(sources.admit(a, 9));
        }
        assert!(!sources.admit(b, 9));
    }

    #[test]
    fn what_is_known_does_not_grow() {
        let mut known = Known::new(3);
        let addr: SocketAddr = "127.0.0.1:0".parse().unwrap();
        for transaction in 0..10_000 {
            known.hear((addr, transaction));
        }
        assert_eq!(known.waiting.len(), 3);
        for transaction in 0..10_000 {
            known.hear((addr, transaction));
            known.answer((addr, transaction), vec![0]);
        }
        assert!(known.waiting.is_empty());
        assert_eq!((known.answers.len(), known.order.len()), (ANSWERS, ANSWERS));
        assert_eq!(known.hear((addr, 9_999)), Heard::Answered(vec![0]));
        assert_eq!(known.hear((addr, 0)), Heard::New);
        assert_eq!(known.hear((addr, 0)), Heard::Nothing);
    }
}
