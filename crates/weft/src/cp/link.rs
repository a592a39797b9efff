//! What sender and receiver need from a connection: ordered control messages and a ring of slots.
//!
//! Two implementations: [`super::rdma`] (one-sided writes) and [`super::tcp`] (the same pipeline over a
//! plain stream, to compare with).

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use weft_verbs::Path;

use super::digest::Stream;
use super::protocol::{Digest, Message, RingAdvert};

/// Why a connection can no longer be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LinkError {
    /// The connection ended; the text says how as far as known.
    #[error("the connection ended: {0}")]
    Gone(String),
    /// The peer sent something that is not the protocol.
    #[error("the peer broke the protocol: {0}")]
    Violation(String),
    /// A local resource is missing.
    #[error("{0}")]
    Local(String),
}

/// A connection between a sender and a receiver. One thread receives; any thread sends.
pub trait Link: Send + Sync {
    /// What carries it.
    fn path(&self) -> Path;

    /// Receives to tell the peer of, for START and READY.
    fn receives(&self) -> u16;

    /// Takes the peer's number of receives from its START or READY.
    fn set_peer_receives(&self, receives: u16);

    /// Makes the ring that the peer fills, and says where it is.
    fn create_ring(&self, slots: u16, slot_len: u32) -> Result<RingAdvert, LinkError>;

    /// Makes local slots, one for each of the peer's.
    fn use_ring(&self, ring: RingAdvert) -> Result<(), LinkError>;

    /// Sends a control message; blocks while the peer has no receive for it.
    fn send(&self, message: &Message) -> Result<(), LinkError>;

    /// Moves the first `len` bytes of local slot `slot` to the peer's slot of the same number, then sends
    /// `message`, which the peer receives after the bytes are in place.
    fn push(&self, slot: u16, len: u32, message: &Message) -> Result<(), LinkError>;

    /// Sends a sign of life if that needs no waiting.
    fn keepalive(&self) -> Result<(), LinkError>;

    /// The next message, or `None` after `timeout` without one.
    fn recv(&self, timeout: Duration) -> Result<Option<Message>, LinkError>;

    /// Reads from `file` at `offset` into slot `slot`: as many bytes as one system call gives.
    fn slot_from_file(
        &self,
        slot: u16,
        at: u32,
        file: BorrowedFd<'_>,
        offset: u64,
        len: u32,
    ) -> io::Result<usize>;

    /// Writes from slot `slot` to `file` at `offset`: as many bytes as one system call takes.
    fn slot_to_file(
        &self,
        slot: u16,
        at: u32,
        file: BorrowedFd<'_>,
        offset: u64,
        len: u32,
    ) -> io::Result<usize>;

    /// Adds `len` bytes of slot `slot` to a checksum.
    fn hash_slot(&self, slot: u16, len: u32, into: &mut Stream);

    /// Ends the connection; a thread that waits on it wakes with an error.
    fn close(&self);
}

/// The digest of the first `len` bytes of a slot.
pub fn slot_digest(link: &dyn Link, slot: u16, len: u32) -> Digest {
    let mut s = Stream::default();
    link.hash_slot(slot, len, &mut s);
    s.finish()
}

/// Fills a slot with exactly `len` bytes of a file.
pub fn read_slot(
    link: &dyn Link,
    slot: u16,
    file: BorrowedFd<'_>,
    offset: u64,
    len: u32,
) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        match link.slot_from_file(slot, done, file, offset + u64::from(done), len - done) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n as u32,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes exactly `len` bytes of a slot to a file.
pub fn write_slot(
    link: &dyn Link,
    slot: u16,
    file: BorrowedFd<'_>,
    offset: u64,
    len: u32,
) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        match link.slot_to_file(slot, done, file, offset + u64::from(done), len - done) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => done += n as u32,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
