//! The interface of sender and receiver to a connection: ordered control messages and a ring of slots.
//!
//! Two implementations: [`super::rdma`] (one-sided writes) and [`super::tcp`] (the same pipeline over a
//! plain stream, to compare with).

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use weft_verbs::Path;

use super::digest::Stream;
use super::protocol::{Digest, Extent, Message, RingAdvert};

/// Bytes of a slot that are copied at a time.
const PIECE: u32 = 64 << 10;

/// The reason why a connection is unusable.
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

/// An outgoing control message, and the Write before it.
#[derive(Debug)]
pub enum Parcel {
    /// A message by itself.
    Message(Message),
    /// The first `len` bytes of a slot, and the message that the peer receives after they are in place.
    Block {
        /// The slot.
        slot: u16,
        /// Bytes.
        len: u32,
        /// The announcement.
        message: Message,
    },
}

/// A connection between a sender and a receiver. One thread receives; any thread sends.
pub trait Link: Send + Sync {
    /// Its transport.
    fn path(&self) -> Path;

    /// A value that is the same on both sides of this TLS connection, and on no other; zero without TLS.
    fn binding(&self) -> [u8; 32];

    /// Its cipher, if it is encrypted.
    fn cipher(&self) -> Option<&'static str>;

    /// The number of receives to announce to the peer, for START and READY.
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

    /// Moves a piece of local slot `slot` to the same place of the peer's slot.
    fn write(&self, slot: u16, at: u32, len: u32) -> Result<(), LinkError>;

    /// Sends all of these in order. The peer may be woken once for many.
    fn send_all(&self, parcels: &[Parcel]) -> Result<(), LinkError> {
        parcels.iter().try_for_each(|parcel| match parcel {
            Parcel::Message(message) => self.send(message),
            Parcel::Block { slot, len, message } => self.push(*slot, *len, message),
        })
    }

    /// Sends a sign of life if that needs no waiting.
    fn keepalive(&self) -> Result<(), LinkError>;

    /// The next message, or `None` after `timeout` without one.
    fn recv(&self, timeout: Duration) -> Result<Option<Message>, LinkError>;

    /// A message that has come with an earlier one.
    fn heard(&self) -> Option<Message> {
        None
    }

    /// Reads from `file` at `offset` into slot `slot`: as many bytes as one system call gives.
    fn slot_from_file(
        &self,
        slot: u16,
        at: u32,
        file: BorrowedFd<'_>,
        offset: u64,
        len: u32,
    ) -> io::Result<usize>;

    /// Puts bytes into slot `slot` from `at` on.
    fn slot_from_buf(&self, slot: u16, at: u32, bytes: &[u8]) -> io::Result<()>;

    /// Copies bytes of slot `slot` from `at` on. A peer can write to them meanwhile, so check the copy.
    fn slot_to_buf(&self, slot: u16, at: u32, into: &mut [u8]) -> io::Result<()>;

    /// Ends the connection; a thread that waits on it wakes with an error.
    fn close(&self);
}

/// Looks at `len` bytes of a slot, each copied once to memory of our own. The pieces stay in the cache.
fn for_slot(
    link: &dyn Link,
    slot: u16,
    from: u32,
    len: u32,
    mut look: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut buf = vec![0; len.min(PIECE) as usize];
    let mut done = 0;
    while done < len {
        let piece = &mut buf[..(len - done).min(PIECE) as usize];
        link.slot_to_buf(slot, from + done, piece)?;
        look(piece)?;
        done += piece.len() as u32;
    }
    Ok(())
}

/// The digest of the first `len` bytes of a slot.
pub fn slot_digest(link: &dyn Link, slot: u16, len: u32) -> io::Result<Digest> {
    let mut stream = Stream::default();
    for_slot(link, slot, 0, len, |piece| {
        stream.add(piece);
        Ok(())
    })?;
    Ok(stream.finish())
}

fn write_all(file: BorrowedFd<'_>, mut rest: &[u8], mut at: u64) -> io::Result<()> {
    while !rest.is_empty() {
        match rustix::io::pwrite(file, rest, at) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                rest = &rest[n..];
                at += n as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Writes the first `len` bytes of a slot to a file, and says what their digest is.
pub fn write_slot(
    link: &dyn Link,
    slot: u16,
    file: BorrowedFd<'_>,
    offset: u64,
    len: u32,
) -> io::Result<Digest> {
    let (mut stream, mut at) = (Stream::default(), offset);
    for_slot(link, slot, 0, len, |piece| {
        stream.add(piece);
        write_all(file, piece, at)?;
        at += piece.len() as u64;
        Ok(())
    })?;
    Ok(stream.finish())
}

/// The digest of a block of `len` bytes whose pieces are in a slot, with zeros in its holes. `write` gets each piece, and where it is
/// in the block.
pub fn for_extents(
    link: &dyn Link,
    slot: u16,
    len: u32,
    extents: &[Extent],
    mut write: impl FnMut(&[u8], u32) -> io::Result<()>,
) -> io::Result<Digest> {
    let mut stream = Stream::default();
    let (mut done, mut from) = (0, 0);
    for extent in extents {
        stream.add_zeros(extent.at - done);
        let mut at = extent.at;
        for_slot(link, slot, from, extent.len, |piece| {
            stream.add(piece);
            write(piece, at)?;
            at += piece.len() as u32;
            Ok(())
        })?;
        from += extent.len;
        done = extent.at + extent.len;
    }
    stream.add_zeros(len - done);
    Ok(stream.finish())
}

/// Writes the pieces of a block that are in a slot to a file, where the block begins at `offset`; says what the block's digest is.
pub fn write_extents(
    link: &dyn Link,
    slot: u16,
    file: BorrowedFd<'_>,
    offset: u64,
    len: u32,
    extents: &[Extent],
) -> io::Result<Digest> {
    for_extents(link, slot, len, extents, |piece, at| {
        write_all(file, piece, offset + u64::from(at))
    })
}

/// Reads exactly `len` bytes of a file into a slot, from `at` on.
pub fn read_slot(
    link: &dyn Link,
    slot: u16,
    at: u32,
    file: BorrowedFd<'_>,
    offset: u64,
    len: u32,
) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        match link.slot_from_file(slot, at + done, file, offset + u64::from(done), len - done) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n as u32,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
