//! The limits of connections between masters and workers.

use weft_session::{Broken, Shape};
use weft_verbs::MemError;

use crate::wire::MAX_MESSAGE;

/// RDMA Reads outstanding at once.
pub(crate) const DEPTH: u16 = 16;

/// Compilers run long.
pub(crate) const SHAPE: Shape = Shape {
    longest: MAX_MESSAGE,
    inline: 0,
    depth: DEPTH,
    is_quiet: true,
};

/// The reason why a connection is unusable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Gone(pub(crate) String);

impl From<Broken> for Gone {
    fn from(broken: Broken) -> Self {
        Self(broken.to_string())
    }
}

impl From<MemError> for Gone {
    fn from(e: MemError) -> Self {
        Self(e.to_string())
    }
}
