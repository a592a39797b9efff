//! The limits of connections between clients and servers.

use weft_session::Shape;

use crate::wire::MAX_MESSAGE;

/// RDMA Reads outstanding at once.
pub(crate) const DEPTH: u16 = 32;

pub(crate) const SHAPE: Shape = Shape {
    longest: MAX_MESSAGE,
    inline: 256,
    depth: DEPTH,
    is_quiet: false,
};
