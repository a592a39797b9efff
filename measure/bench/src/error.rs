//! The errors of a benchmark.

use std::io;

/// Why a benchmark ended without a result.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The options do not fit together.
    #[error("{0}")]
    Usage(String),
    /// A file of results could not be written.
    #[error("cannot write {path}: {source}")]
    Output {
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The failed action.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// An operation of the stack under test failed.
    #[error("{what}: {why}")]
    Stack {
        /// The failed action.
        what: &'static str,
        /// The error of the stack.
        why: String,
    },
    /// The peer process failed and reported the reason.
    #[error("the peer process failed: {0}")]
    Peer(String),
    /// The peer process ended or spoke nonsense.
    #[error("the peer process is gone ({0})")]
    PeerGone(String),
    /// Both ends failed, one perhaps for the other's sake.
    #[error("{0}; and {1}")]
    Both(Box<BenchError>, Box<BenchError>),
    /// The peer could not be connected to.
    #[error("cannot connect to {0}: {1}")]
    Unreachable(std::net::SocketAddr, io::Error),
    /// The peer does not behave as it should.
    #[error("the peer does not fit: {0}")]
    Stranger(String),
    /// The received bytes differ from the sent ones.
    #[error(
        "the bytes that arrived differ from those that were sent, from byte {0} of the stream on"
    )]
    Contents(u64),
    /// An operation ended without giving its memory back.
    #[error("an operation ended without giving its memory back")]
    Lost,
    /// No progress for this many seconds.
    #[error("nothing moved for {0} seconds: {1}")]
    Stuck(u64, &'static str),
}

impl BenchError {
    pub fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

/// An error from the failed action and its reason.
pub fn failed(what: &'static str, why: impl std::fmt::Display) -> BenchError {
    let why = why.to_string();
    BenchError::Stack { what, why }
}

/// Converts an error of one of the stacks: `what` is the failed action.
pub fn stack<E: std::fmt::Display>(what: &'static str) -> impl FnOnce(E) -> BenchError {
    move |error| failed(what, error)
}

pub type Result<T> = std::result::Result<T, BenchError>;
