//! Extended sockets (EXS): asynchronous, zero-copy streams and messages over verbs, with the semantics of sockets.
//!
//! A [`Socket`] can be used in four ways, which can be mixed:
//!
//! * [`futures`]: `Stream`, `Packets` and their listeners for any executor. An operation owns its memory and returns it on completion.
//! * [`Queue`]: an operation is started with a [`Sink`] ([`Queue::sink`]), and an [`Event`] in the queue reports its result. One queue serves many
//!   connections and has a descriptor for `epoll`.
//! * Blocking calls: [`Socket::connect_wait`], [`Socket::accept_wait`], [`Socket::send_wait`], [`Socket::recv_wait`].
//! * `tokio` streams (feature `tokio`): `AsyncRead` and `AsyncWrite`, with one copy on each side.
//!
//! Data goes from the sender's memory straight to the receiver's if a receive was posted first, and otherwise through a buffer (docs/spec/exs.md).
//! A [`Region`] is the fastest memory for both ends. Connections within a host use shared memory, all others use TCP. `WEFT_LOCAL=off|auto|require`
//! or the device of the [`Context`] changes this; [`Socket::path`] reports the path in use.
//!
//! ```
//! use weft_exs::{Context, Kind, Memory, RecvFlags, Region, Socket};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let context = Context::global()?;
//! let listener = Socket::new(&context, false, Kind::Stream)?;
//! listener.bind("127.0.0.1:0".parse()?)?;
//! listener.listen(1)?;
//! let near = Socket::new(&context, false, Kind::Stream)?;
//! near.connect_wait(listener.local_addr()?)?;
//! let far = listener.accept_wait(None)?;
//!
//! near.send_wait(Memory::from(b"hello".to_vec()))?;
//! let region = Region::alloc(&context, 5)?;
//! assert_eq!(far.recv_wait(&region.whole(), RecvFlags::WAITALL)?, 5);
//! let mut got = [0; 5];
//! region.read(0, &mut got)?;
//! assert_eq!(&got, b"hello");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

#[cfg(doctest)]
#[doc = include_str!("../../../docs/exs.md")]
struct Page;

mod bell;
mod context;
mod driver;
mod error;
mod event;
mod file;
pub mod futures;
mod late;
mod listener;
pub mod machine;
mod memory;
mod options;
mod plain;
mod poller;
mod queue;
mod registered;
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
pub use weft_verbs::any::Choice;
