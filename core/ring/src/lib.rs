//! Lock-free rings in shared memory: the path of bytes between two processes of one host.
//!
//! A [`Segment`] is a sealed memory file that both ends of a connection map: a control page and a ring
//! of bytes for each direction. An [`End`] is one side of it. It pushes records (bytes, or
//! references to bytes that stay where they are), makes them visible with one store, and takes the
//! peer's records off; a side that has nothing to do sets a flag and sleeps, and its peer is told to
//! wake it. The layout and the protocol of each word are in `docs/spec/local.md`.
//!
//! ```
//! use std::sync::Arc;
//! use weft_mem::{RecvList, SendList};
//! use weft_ring::{End, Front, Role, Segment};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (mine, fd) = Segment::create(1 << 16)?;
//! let theirs = Segment::open(fd)?; // in the other process
//! let (a, b) = (
//!     End::new(Arc::new(mine), Role::Initiator),
//!     End::new(Arc::new(theirs), Role::Responder),
//! );
//! let mut list = SendList::new();
//! list.push_bytes(b"hello");
//! assert_eq!(a.push(&list, 0, 5)?, 5);
//! assert_eq!(b.front()?, Front::Empty);
//! let wake = a.publish();
//! assert!(!wake, "the peer does not sleep");
//!
//! assert_eq!(b.front()?, Front::Bytes(5));
//! let mut got = [0; 5];
//! let mut list = RecvList::new();
//! list.push_buf(&mut got);
//! b.take(&mut list, 0, 5)?;
//! b.release(true);
//! assert_eq!(&got, b"hello");
//! assert_eq!(a.consumed()?, a.pushed());
//! # Ok(())
//! # }
//! ```
//!
//! # Safety
//!
//! The peer may write any byte of the segment at any time. So its bytes are reached only through
//! atomics and racing copies (`docs/adr/0001-racing-copies.md`), at offsets that are masked to the
//! mapping; what steers the code (positions, lengths, kinds) is loaded once, checked, and kept in private
//! memory. Unsafe code is in the modules of the memory, which under loom are replaced by safe models.
#![warn(missing_docs)]

#[cfg(all(not(loom), any(test, feature = "fuzzing")))]
pub mod fuzzing;

#[cfg_attr(loom, path = "model.rs")]
mod segment;

mod end;
#[cfg(not(loom))]
mod file;
#[cfg(not(loom))]
pub mod source;
pub mod stream;

pub use end::End;
pub use segment::Segment;
pub use weft_mem::checked;

/// Which end of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It created the segment.
    Initiator,
    /// It opened the segment.
    Responder,
}

impl Role {
    /// The other one.
    #[inline]
    #[must_use]
    pub fn peer(self) -> Role {
        match self {
            Role::Initiator => Role::Responder,
            Role::Responder => Role::Initiator,
        }
    }
}

/// Bytes that stay in the sender's memory, for the receiver to pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ref {
    /// Which of the sender's spaces.
    pub space: u32,
    /// The address. `addr + len` does not wrap.
    pub addr: u64,
    /// Bytes; not 0.
    pub len: u64,
}

/// The next data to receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Front {
    /// Nothing yet.
    Empty,
    /// So many bytes are left in the front record; not 0.
    Bytes(usize),
    /// The rest of the front reference.
    Ref(Ref),
    /// The peer has finished and everything was received.
    End,
    /// The peer has aborted and everything that it published before was received.
    Aborted,
}

/// The peer wrote something into the segment that no honest peer writes: the connection must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer broke the rules of the shared ring")]
pub struct Broken;

/// Why a peer's segment was refused.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It is no memory file with a sealed size (`InvalidData`), or cannot be mapped.
    #[error("the segment cannot be mapped: {0}")]
    Io(#[from] std::io::Error),
    /// Its length fits no ring size, or not the one it names.
    #[error("a segment of {0} bytes")]
    Size(u64),
    /// It is something else.
    #[error("not a segment")]
    Magic,
    /// Its layout has another version.
    #[error("version {0} of the segment's layout")]
    Version(u32),
    /// Its rings are no power of two in 16 KiB..=16 MiB.
    #[error("rings of {0} bytes")]
    Ring(u32),
}

/// A control word: 64 bits on a cache line of its own, written by one side (flags: cleared by the other).
#[derive(Clone, Copy)]
enum Word {
    /// Up to where this side has consumed the other's ring.
    Head,
    /// The state of this side's direction: [`end::OPEN`]...
    End,
    /// Not 0: this side sleeps until there is data; 2: or until something is written into its memory.
    WantData,
    /// Not 0: this side sleeps until its peer consumes.
    WantRoom,
    /// The `STag` of the peer's memory that this side touches now; 0: none.
    Mark,
    /// Not 0: the peer may touch this side's memory.
    Access,
    /// The capabilities of this side.
    Caps,
}
