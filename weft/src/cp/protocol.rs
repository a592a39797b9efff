//! The control messages of `weft cp`: a pure codec, no I/O.
//!
//! `docs/spec/cp.md` draws every message. A hello has a fixed form, which every version reads; the later messages are encoded by postcard.
//! [`Message::decode`] takes arbitrary bytes from a hostile peer: it never panics, and the values that it returns are valid as documented here.

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use super::path::{MAX_PATH, PathError, RelPath, printable};

mod attributes;
mod codec;
mod hello;
pub mod pack;

pub use attributes::{Attributes, MAX_ATTRIBUTES, Meta, Xattr};
pub use hello::{Hello, Status};

/// The protocol version that this program speaks.
pub const VERSION: u16 = 6;
/// The beginning of the private data of both MPA start-up frames.
pub const MAGIC: [u8; 8] = *b"weft-cp\0";
/// Length of a [`Hello`] in bytes.
pub const HELLO_LEN: usize = 48;
/// Length of the header of every message in bytes.
pub const HEADER_LEN: usize = 8;
/// The longest explanation that travels with an error, in bytes.
pub const MAX_TEXT: usize = 512;
/// The longest message in bytes: a LINK with the longest path and target. A FILE with the longest attributes is shorter.
pub const MAX_MESSAGE: usize = HEADER_LEN + 64 + 2 * MAX_PATH;
/// Most entries (files, directories, links) and packs that may be without an answer.
pub const WINDOW: usize = 64;
/// Most files in a PACK.
pub const PACK_FILES: u16 = 128;
/// The longest PACK in bytes, where a slot has so many.
pub const PACK_LEN: u32 = 128 << 10;
/// Most blocks in a HOLE.
pub const HOLE_BLOCKS: u32 = 65_536;
/// Most pieces in a SPARSE block.
pub const EXTENTS: usize = 256;
/// Most names in an ASK.
pub const ASK_NAMES: usize = 512;
/// Most names in a FETCH.
pub const FETCH_NAMES: usize = 512;
/// Most ASKs that may be without an answer.
pub const ASKS: usize = 4;
/// Bounds of the number of slots in a ring.
pub const SLOTS: std::ops::RangeInclusive<u16> = 1..=64;
/// Bounds of a slot's length in bytes.
pub const SLOT_LEN: std::ops::RangeInclusive<u32> = 4096..=16 << 20;
/// Length of a nonce, a key at least, and a proof in bytes.
pub const PROOF_LEN: usize = 32;
/// How long a side may be silent before it sends a CREDIT message to show that it is alive.
pub const KEEPALIVE: Duration = Duration::from_secs(5);

/// A 128-bit digest (XXH3-128, big-endian) of a block, of a list of blocks or of a source's identity.
pub type Digest = [u8; 16];

/// Why bytes are not a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The hello or the header is cut short.
    #[error("the message is cut short")]
    Short,
    /// The message is longer than its fields.
    #[error("bytes follow the message")]
    Trailing,
    /// No message of this protocol; also one with a path that could lead out of the directory.
    #[error("no message of this protocol")]
    Malformed,
    /// The length in the header is not the length received, or above [`MAX_MESSAGE`].
    #[error("the length field is wrong")]
    Length,
    /// A reserved field is not zero.
    #[error("a reserved field is not zero")]
    Reserved,
    /// The hello does not begin with [`MAGIC`].
    #[error("not a weft cp hello")]
    Magic,
    /// A field's value is out of its bounds.
    #[error("the value of `{0}` is out of bounds")]
    Value(&'static str),
}

/// The result for an entry, or the reason why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Code {
    /// The entry has its final name.
    Written,
    /// The entry was there already and was to be left alone.
    Kept,
    /// No space, or over quota.
    NoSpace,
    /// No permission.
    Permission,
    /// A file without write permission is there; `--force` replaces it.
    ReadOnly,
    /// A directory is in the way.
    IsDirectory,
    /// Something that is not a directory is in the way, or a symbolic link is on the path.
    NotDirectory,
    /// The name or path is not possible here.
    BadPath,
    /// A checksum did not match.
    Corrupt,
    /// Another transfer of the same file is under way.
    Busy,
    /// Another error of the file system.
    Io,
    /// The sender gave the entry up.
    Abandoned,
    /// A symbolic link leads out of the receiver's directory, which it does not allow.
    LinkOut,
    /// As [`Self::Written`], without some of the attributes.
    Partly,
    /// The peer's proof of the key was wrong.
    KeyWrong,
    /// The peer broke the protocol.
    Violation,
    /// The peer is going away.
    Going,
    /// The peer ran out of memory or descriptors for this connection.
    Resources,
    /// As [`Status::UnknownPeer`], found out later.
    UnknownPeer,
    /// As many senders are served as may be.
    Full,
    /// The responder gives no files.
    NotServed,
}

/// Flags of a FILE or LINK message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FileFlags {
    /// The file fits one slot and the sender continues without waiting for an OFFER.
    pub no_wait: bool,
    /// Leave a file alone that is there already.
    pub no_clobber: bool,
    /// Replace also a file without write permission.
    pub force: bool,
    /// Bring the file to the disk (fsync) before it gets its name.
    pub sync: bool,
}

/// A modification time: seconds since 1970 and nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Mtime {
    /// Seconds since 1970-01-01 00:00 UTC.
    pub secs: i64,
    /// Nanoseconds, below 1,000,000,000.
    pub nanos: u32,
}

/// A file about to be sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSpec {
    /// How to treat it.
    pub flags: FileFlags,
    /// Permission bits, time and more of the source.
    pub meta: Meta,
    /// Length in bytes.
    pub size: u64,
    /// Bytes that it takes on the disk: fewer where it has holes.
    pub room: u64,
    /// Identity of the source; the same source has the same in a later run.
    pub source: Digest,
    /// Its path at the receiver.
    pub path: RelPath,
}

/// A piece of a block that is no hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Where it begins in the block.
    pub at: u32,
    /// Its length in bytes.
    pub len: u32,
}

/// A file's length and time: which version of it this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Length in bytes.
    pub size: u64,
    /// Modification time.
    pub mtime: Mtime,
}

/// A name in an ASK.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// The name.
    pub path: RelPath,
    /// The sender's version, if the receiver is to compare its own with it.
    pub version: Option<Version>,
}

/// What the receiver has of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Held {
    /// Nothing.
    Nothing,
    /// A file, a link or something else.
    Other,
    /// A file of the version that the ASK has.
    Same,
    /// A directory.
    Directory,
}

/// The region of a receiver's ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RingAdvert {
    /// Number of slots.
    pub slots: u16,
    /// Length of each slot in bytes.
    pub slot_len: u32,
    /// The `STag` that the sender writes to (0 over plain TCP).
    pub rkey: u32,
    /// Tagged offset of slot 0; slot `n` begins at `addr + n * slot_len`.
    pub addr: u64,
}

/// What of the sources is sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct What {
    /// The content of directories.
    pub recursive: bool,
    /// Symbolic links below directories.
    pub links: bool,
    /// Owners, special mode bits, extended attributes and hard links.
    pub attributes: bool,
}

/// The subject of a notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum About {
    /// Something is left out.
    LeftOut,
    /// Something cannot be sent.
    Error,
    /// What would be done, in a dry run.
    Plan,
}

/// What an initiator fetches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    /// Treatment of files that the initiator has; `no_wait` is zero.
    pub flags: FileFlags,
    /// Leave a file alone that the initiator has in the same version.
    pub update: bool,
    /// Send nothing, and say what would be sent.
    pub dry_run: bool,
    /// What of the sources is sent.
    pub what: What,
    /// The initiator's ring.
    pub ring: RingAdvert,
    /// The most bytes of content a second, 0 for any number.
    pub limit_rate: u64,
    /// Names below the responder's directory; `None` is the content of the directory itself.
    pub paths: Vec<Option<RelPath>>,
}

impl Fetch {
    /// Whether it fits a message.
    pub fn fits(&self) -> bool {
        let lengths = self
            .paths
            .iter()
            .flatten()
            .map(|path| path.as_bytes().len());
        let bytes: usize = lengths.sum::<usize>() + 3 * self.paths.len();
        (1..=FETCH_NAMES).contains(&self.paths.len()) && HEADER_LEN + 48 + bytes <= MAX_MESSAGE
    }
}

/// One control message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Initiator's first message: its receives and its proof (zero without a key).
    Start {
        /// Receives that the initiator has posted.
        receives: u16,
        /// The initiator wants files, and does not send them.
        fetches: bool,
        /// HMAC-SHA256 as role 1.
        proof: [u8; PROOF_LEN],
    },
    /// Responder's answer: the ring and its own proof.
    Ready {
        /// Receives that the responder has posted.
        receives: u16,
        /// Whether it gives files their attributes.
        attributes: bool,
        /// The ring; no slots for an initiator that fetches.
        ring: RingAdvert,
        /// HMAC-SHA256 as role 2.
        proof: [u8; PROOF_LEN],
    },
    /// The connection ends here, and why.
    Refuse {
        /// Why.
        code: Code,
        /// One sentence for a human.
        #[serde(with = "codec::text")]
        text: String,
    },
    /// A file begins.
    File {
        /// The entry's number, counting up from 0 in one connection.
        id: u32,
        /// The file.
        spec: FileSpec,
    },
    /// The receiver holds this verified prefix of the file.
    Offer {
        /// The entry.
        id: u32,
        /// Whole blocks held.
        blocks: u64,
        /// Digest of the list of their digests.
        digest: Digest,
    },
    /// The sender continues from this block: the offer's, or 0.
    From {
        /// The entry.
        id: u32,
        /// The first block that will come.
        block: u64,
    },
    /// A slot has been filled with a block.
    Block {
        /// The entry.
        id: u32,
        /// The slot.
        slot: u16,
        /// The block's index in the file.
        index: u64,
        /// The block's length in bytes; only the last block of a file is shorter than a slot.
        len: u32,
        /// The block's digest.
        digest: Digest,
    },
    /// A slot has been filled with the pieces of a block that has holes, one behind the other.
    Sparse {
        /// The entry.
        id: u32,
        /// The slot.
        slot: u16,
        /// The block's index in the file.
        index: u64,
        /// The block's length in bytes, with its holes.
        len: u32,
        /// The digest of the block, with zeros in its holes.
        digest: Digest,
        /// The pieces in order, at least one, none of them next to another.
        extents: Vec<Extent>,
    },
    /// The next blocks are holes. Their slot stays empty.
    Hole {
        /// The entry.
        id: u32,
        /// A slot, which is freed as if it had been filled.
        slot: u16,
        /// The first block's index in the file.
        index: u64,
        /// Number of blocks.
        blocks: u32,
    },
    /// The slot may be filled again.
    Free {
        /// The slot.
        slot: u16,
    },
    /// The file is complete.
    End {
        /// The entry.
        id: u32,
        /// Digest of the list of all blocks' digests and the length.
        digest: Digest,
    },
    /// The sender cannot go on with this file.
    Abandon {
        /// The entry.
        id: u32,
    },
    /// What became of an entry.
    Result {
        /// The entry.
        id: u32,
        /// Outcome.
        code: Code,
        /// One sentence for a human, empty with [`Code::Written`].
        #[serde(with = "codec::text")]
        text: String,
    },
    /// Make a directory (`leave` false), or set its mode and time once its content is there (`leave` true).
    Directory {
        /// The entry.
        id: u32,
        /// Whether the content is complete.
        leave: bool,
        /// Permission bits, time and more of the source.
        meta: Meta,
        /// Where it is.
        path: RelPath,
    },
    /// Make a symbolic link.
    Link {
        /// The entry.
        id: u32,
        /// Treatment of an existing entry; `no_wait` and `sync` are zero.
        flags: FileFlags,
        /// Time and owner of the source; no extended attributes.
        meta: Meta,
        /// What the link says.
        target: Vec<u8>,
        /// Where it goes.
        path: RelPath,
    },
    /// Give a file that this sender has sent another name.
    HardLink {
        /// The entry.
        id: u32,
        /// Treatment of an existing entry; `no_wait` and `sync` are zero.
        flags: FileFlags,
        /// A name that it has.
        existing: RelPath,
        /// Its new name.
        path: RelPath,
    },
    /// A slot has been filled with small files, see [`pack`].
    Pack {
        /// The first file's entry; the others follow.
        id: u32,
        /// The slot.
        slot: u16,
        /// Number of files.
        count: u16,
        /// Bytes of the slot.
        len: u32,
        /// Their digest.
        digest: Digest,
    },
    /// The files of a PACK have their names.
    Packed {
        /// The first one's entry.
        id: u32,
        /// Number of files.
        count: u16,
    },
    /// Which of these are there?
    Ask {
        /// Names of entries.
        names: Vec<Asked>,
    },
    /// The answer to an ASK.
    Held {
        /// For each name, in order.
        held: Vec<Held>,
    },
    /// Which files the initiator wants. From here on the responder is the sender.
    Fetch(Fetch),
    /// The sender of a fetch tells the initiator's user something.
    Notice {
        /// What it is about.
        about: About,
        /// One sentence for a human.
        #[serde(with = "codec::text")]
        text: String,
    },
    /// Only credits, or a sign of life.
    Credit,
    /// Everything has been sent; the receiver answers with the same once everything is done.
    Done {
        /// CPU time that this side spent, in microseconds.
        cpu_us: u64,
    },
}

impl Message {
    /// The slot that comes with it, and the number of bytes in it.
    pub fn filled(&self) -> Option<(u16, u32)> {
        match self {
            Self::Block { slot, len, .. } | Self::Pack { slot, len, .. } => Some((*slot, *len)),
            Self::Sparse { slot, extents, .. } => {
                Some((*slot, extents.iter().map(|extent| extent.len).sum()))
            }
            Self::Hole { slot, .. } => Some((*slot, 0)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
