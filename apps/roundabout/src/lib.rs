//! Data Roundabout: relations that rotate through a ring of nodes (chapter 7 of "iWARP Applicability", P. W. Frey, 2010).
//!
//! Each [`Node`] has a number of equal, preregistered [`Element`]s. A receiver thread fills them from the predecessor, the caller (the query thread)
//! processes them, and a transmitter thread forwards them to the successor. Before each element the transmitter sends a request, which the receiver
//! confirms as soon as an element is free; the control data of an element travels in the same Send, from a buffer of its own
//! (`docs/spec/roundabout.md`). [`joins`] has the joins of the thesis as functions over columns.
//!
//! A [`RingListener`] listens for predecessors; [`RingListener::join`] forms a ring for one turn. A node that fails ends the turn of all others with an
//! [`Error::Failed`] that names it; the same listeners can form the next ring at once. Nothing here allocates on behalf of a peer: all memory
//! is sized by the ring's own settings.
#![forbid(unsafe_code)]

pub mod joins;
mod kept;
mod link;
mod node;
mod rdma;
mod ring_listener;
mod tcp;
pub mod wire;

pub use link::Ring;
pub use node::{Canceller, Element, Load, Next, Node, Own, Room, Waker, Watch};
pub use ring_listener::{Admit, RingListener, Security};

use std::net::SocketAddr;
use weft_service::lock;

/// The default length of an element: the thesis's critical size (figure 7.7).
pub const ELEMENT: usize = 4 << 20;
/// The default number of elements of a node.
pub const ELEMENTS: usize = 8;
/// The exchange number of requests without a turn: a visitor and the node that it asks ([`RingListener::visit`]).
pub const VISIT: u32 = u32::MAX;
/// Most bytes of an element that a visitor may ask for.
pub const VISIT_ELEMENT: usize = 16 << 20;
/// Nodes that a ring may have.
pub const MAX_NODES: usize = 1024;

/// Why a ring cannot be formed, or a turn failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The settings of the ring cannot be.
    #[error("the ring's settings cannot be: {0}")]
    Invalid(String),
    /// A neighbour could not be reached, or refused.
    #[error("cannot form the ring with node {node} ({name}): {why}")]
    Form {
        /// Its position.
        node: usize,
        /// Its address.
        name: SocketAddr,
        why: String,
    },
    /// A node has died or given up.
    #[error("node {node} ({name}) {why}")]
    Failed {
        /// Its position.
        node: usize,
        /// Its address.
        name: SocketAddr,
        why: String,
    },
    /// A missing resource of this process.
    #[error("{0}")]
    Local(String),
}
