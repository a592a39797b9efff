//! Visits of the shell at workers: a ring of two for each.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use weft_roundabout::{Error, Node, Ring, RingListener, Security, VISIT};

use crate::talk::ELEMENT;

/// A failure of a query.
#[derive(Debug)]
pub enum Trouble {
    /// A worker could not be reached, or went away.
    Peer(String),
    /// The query failed.
    Query(String),
}

/// A random name for a ring.
///
/// # Errors
/// If the kernel has no random numbers.
pub fn random() -> Result<[u8; 16], Trouble> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|e| Trouble::Query(e.to_string()))?;
    Ok(id)
}

/// Checks that no worker is named twice: it would get two parts, and give rows twice.
///
/// # Errors
/// If one is.
pub fn distinct(workers: &[SocketAddr]) -> Result<(), Trouble> {
    let mut seen = BTreeSet::new();
    match workers.iter().find(|worker| !seen.insert(**worker)) {
        Some(worker) => Err(Trouble::Query(format!(
            "worker {worker} is named twice (-w)"
        ))),
        None => Ok(()),
    }
}

/// Where workers connect back to us: an address of each family that they have.
pub fn listeners(workers: &[SocketAddr]) -> Result<Vec<Arc<RingListener>>, Error> {
    let beyond = workers
        .iter()
        .any(|addr| !addr.ip().to_canonical().is_loopback());
    type OfFamily = fn(&SocketAddr) -> bool;
    let families: [(OfFamily, IpAddr, IpAddr); 2] = [
        (
            SocketAddr::is_ipv4,
            Ipv4Addr::UNSPECIFIED.into(),
            Ipv4Addr::LOCALHOST.into(),
        ),
        (
            SocketAddr::is_ipv6,
            Ipv6Addr::UNSPECIFIED.into(),
            Ipv6Addr::LOCALHOST.into(),
        ),
    ];
    families
        .into_iter()
        .filter(|(is, ..)| workers.iter().any(is))
        .map(|(_, any, own)| {
            let ip = if beyond { any } else { own };
            RingListener::open(SocketAddr::new(ip, 0), Security::Environment, None).map(Arc::new)
        })
        .collect()
}

/// The listener for a worker: that of its family.
pub fn door_for(listeners: &[Arc<RingListener>], worker: SocketAddr) -> Option<&Arc<RingListener>> {
    listeners
        .iter()
        .find(|listener| listener.local_addr().is_ipv4() == worker.is_ipv4())
}

/// A point that all visits of a command reach together, each saying whether it may go on.
pub struct Meeting {
    barrier: Barrier,
    all: AtomicBool,
}

impl Meeting {
    /// For this many visits.
    pub fn new(visits: usize) -> Self {
        Self {
            barrier: Barrier::new(visits),
            all: AtomicBool::new(true),
        }
    }

    /// Waits for the others; returns whether all may go on. Each visit calls it once.
    pub fn meet(&self, goes_on: bool) -> bool {
        self.all.fetch_and(goes_on, Ordering::SeqCst);
        self.barrier.wait();
        self.all.load(Ordering::SeqCst)
    }
}

/// A worker, and how it is visited.
pub struct Visited<'a> {
    /// Its position among the workers of the command.
    pub me: usize,
    /// Its address.
    pub worker: SocketAddr,
    /// Where it connects back to.
    pub listener: &'a RingListener,
    /// The time within which it must answer a connection.
    pub patience: Duration,
}

impl Visited<'_> {
    /// Begins a visit.
    ///
    /// # Errors
    /// If the worker cannot be reached.
    pub fn visit(&self) -> Result<Node, Trouble> {
        let nodes = vec![self.listener.local_addr(), self.worker];
        let ring = Ring {
            exchange: VISIT,
            element: ELEMENT,
            elements: 4,
            patience: self.patience,
            ..Ring::new(random()?, nodes, 0)
        };
        self.listener.join(&ring).map_err(|e| self.gone(e))
    }

    /// The worker's failure, under its name in this command.
    pub fn gone(&self, error: Error) -> Trouble {
        let (me, worker) = (self.me, self.worker);
        Trouble::Peer(match error {
            Error::Failed { why, .. } | Error::Form { why, .. } => {
                format!("node {me} ({worker}) {why}")
            }
            other => other.to_string(),
        })
    }

    /// A worker that does not keep to the protocol.
    pub fn foreign(&self, why: &dyn Display) -> Trouble {
        let (me, worker) = (self.me, self.worker);
        Trouble::Peer(format!("node {me} ({worker}) does not make sense: {why}"))
    }
}
