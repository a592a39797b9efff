//! The end of a connection between a master and a worker.

use weft_session::Broken;
use weft_verbs::MemError;

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
