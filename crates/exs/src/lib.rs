//! Extended sockets (EXS): asynchronous, zero-copy streams and messages with the manners of sockets, over verbs.
#![forbid(unsafe_code)]

mod bell;
mod context;
mod driver;
mod error;
mod event;
mod file;
pub mod futures;
mod listener;
mod lock;
pub mod machine;
mod memory;
mod options;
mod plain;
mod queue;
mod socket;
#[cfg(feature = "tokio")]
pub mod tokio;

pub use context::Context;
pub use error::Error;
pub use event::{Event, EventKind, FilePiece, InPlace, Piece, Ready, RecvFlags, Sink};
pub use memory::{Memory, Region};
pub use options::{Design, Kind, Mode, Options};
pub use queue::{Queue, Wait};
pub use rustix::io::Errno;
pub use socket::Socket;
pub use weft_verbs::RawMemory;
