//! The common part of links between neighbours: the ring, the two ends, and the reasons for a failure.

use std::net::SocketAddr;
use std::time::Duration;

use crate::wire::{Header, Hello, VERSION};
use crate::{ELEMENT, ELEMENTS, Error, MAX_NODES};

/// How often a waiting thread checks whether the turn has failed.
pub(crate) const LOOK: Duration = Duration::from_millis(50);
/// The settings of a ring, the same on all its nodes but for `me`.
#[derive(Debug, Clone)]
pub struct Ring {
    /// Identifies the query; random, so that no other process can take a place in it.
    pub id: [u8; 16],
    /// Which of the rings of one query.
    pub exchange: u32,
    /// Further data on which the nodes must agree: a digest of the plan, for example.
    pub agreement: u64,
    /// The listeners of the nodes, in the order of the ring.
    pub nodes: Vec<SocketAddr>,
    /// Our position.
    pub me: usize,
    /// Bytes of an element: a multiple of 8.
    pub element: usize,
    /// Elements of each node, at least 2.
    pub elements: usize,
    /// Elements come back to their origin, for measuring; else they end at its predecessor, when every node has had them once.
    pub home: bool,
    /// The time limit for the neighbours.
    pub patience: Duration,
}

impl Ring {
    /// Position `me` in a ring of these nodes, with elements as usual.
    pub fn new(id: [u8; 16], nodes: Vec<SocketAddr>, me: usize) -> Self {
        Self {
            id,
            exchange: 0,
            agreement: 0,
            nodes,
            me,
            element: ELEMENT,
            elements: ELEMENTS,
            home: false,
            patience: Duration::from_secs(30),
        }
    }

    /// Checks whether such a ring is possible.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is not.
    pub fn check(&self) -> Result<(), Error> {
        let invalid = |why: &str| Err(Error::Invalid(why.into()));
        if self.nodes.is_empty() || self.nodes.len() > MAX_NODES || self.me >= self.nodes.len() {
            return invalid("1 to 1,024 nodes, and we are one of them");
        }
        if !self.element.is_multiple_of(8) || !(64..=1 << 30).contains(&self.element) {
            return invalid("an element has 64 bytes to 1 GiB, and a multiple of 8");
        }
        if !(2..=4096).contains(&self.elements) {
            return invalid("a node has 2 to 4,096 elements");
        }
        Ok(())
    }

    pub(crate) fn next(&self) -> usize {
        (self.me + 1) % self.nodes.len()
    }

    pub(crate) fn previous(&self) -> usize {
        (self.me + self.nodes.len() - 1) % self.nodes.len()
    }

    /// Links that an element travels.
    pub(crate) fn limit(&self) -> u16 {
        let nodes = self.nodes.len();
        (if self.home && nodes > 1 {
            nodes
        } else {
            nodes - 1
        }) as u16
    }

    /// Our greeting to our successor; with `from`, the expected greeting of our predecessor.
    pub(crate) fn hello(&self, from: usize) -> Hello {
        Hello {
            version: VERSION,
            from: from as u16,
            nodes: self.nodes.len() as u16,
            home: self.home,
            exchange: self.exchange,
            element: self.element as u32,
            id: self.id,
            agreement: self.agreement,
            port: self.nodes[self.me].port(),
        }
    }

    pub(crate) fn failure(&self, failure: &Failure) -> Error {
        let node = failure.node.min(self.nodes.len() - 1);
        Error::Failed {
            node,
            name: self.nodes[node],
            why: failure.why.clone(),
        }
    }
}

/// The node to blame, and what happened there.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) node: usize,
    pub(crate) why: String,
}

/// Why a link does not go on.
pub(crate) enum Trouble {
    /// The neighbour has disconnected.
    Gone(String),
    /// The neighbour broke the protocol.
    Protocol(&'static str),
    /// The neighbour says that the turn has failed.
    Told(Failure),
    /// Our own process cannot.
    Local(String),
    /// The turn has failed elsewhere.
    Stopped,
}

/// The link to the successor.
pub(crate) trait Out: Send {
    /// Sends an element; returns when its memory is free again.
    fn send(
        &mut self,
        slot: &Slot,
        header: &Header,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), Trouble>;
    /// Checks for messages of the successor; true after its goodbye.
    fn poll(&mut self, wait: Duration) -> Result<bool, Trouble>;
    /// Reports to it that the turn has failed.
    fn tell(&mut self, failure: &Failure);
    /// Closes, after all messages were sent.
    fn close(&mut self);
}

/// The link from the predecessor.
pub(crate) trait In: Send {
    /// Whether the predecessor requests to send an element.
    fn request(&mut self, wait: Duration) -> Result<bool, Trouble>;
    /// There is a request, and no element is free: look out for failures.
    fn hold(&mut self) -> Result<(), Trouble>;
    /// Takes the element that was asked for.
    fn take(&mut self, slot: &mut Slot, stop: &dyn Fn() -> bool) -> Result<Header, Trouble>;
    /// Says goodbye: everything has come. True when the predecessor has closed too.
    fn goodbye(&mut self) -> Result<(), Trouble>;
    /// Waits for the predecessor to close.
    fn closed(&mut self, wait: Duration) -> bool;
    /// Reports to it that the turn has failed.
    fn tell(&mut self, failure: &Failure);
}

/// The memory of one element: a part of the registered region, or words of its own.
pub(crate) struct Slot {
    pub(crate) index: usize,
    pub(crate) plain: Box<[u64]>,
}
