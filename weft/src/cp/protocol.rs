//! The control messages of `weft cp`: a pure codec, no I/O.
//!
//! `docs/spec/cp.md` draws every message. All integers are big-endian; reserved fields are zero and a
//! decoder refuses anything else, so that a later version can give them a meaning. [`Message::decode`]
//! takes arbitrary bytes from a hostile peer: it never panics and allocates no more than it was given.

use std::time::Duration;

pub use super::path::{MAX_PATH, PathError, RelPath, printable};

mod attributes;
mod codec;
mod hello;
pub mod pack;

pub use attributes::{Attributes, MAX_ATTRIBUTES, Meta, Xattr};
use codec::{Reader, put_mtime};
pub use hello::{Hello, Status};

/// The protocol version that this program speaks.
pub const VERSION: u16 = 5;
/// The beginning of the private data of both MPA start-up frames.
pub const MAGIC: [u8; 8] = *b"weft-cp\0";
/// Length of a [`Hello`] in bytes.
pub const HELLO_LEN: usize = 48;
/// Length of the header of every message in bytes.
pub const HEADER_LEN: usize = 8;
/// The longest explanation that travels with an error, in bytes.
pub const MAX_TEXT: usize = 512;
/// The longest message in bytes: a LINK with the longest path and target. A FILE with the longest attributes is shorter.
pub const MAX_MESSAGE: usize = HEADER_LEN + 32 + 2 * MAX_PATH;
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
    /// The message is shorter than its kind demands.
    #[error("the message is cut short")]
    Short,
    /// The message is longer than its fields.
    #[error("bytes follow the message")]
    Trailing,
    /// The length in the header is not the length received, or above [`MAX_MESSAGE`].
    #[error("the length field is wrong")]
    Length,
    /// No such kind of message.
    #[error("unknown kind of message {0}")]
    Kind(u8),
    /// A reserved field or flag is not zero.
    #[error("a reserved field is not zero")]
    Reserved,
    /// The hello does not begin with [`MAGIC`].
    #[error("not a weft cp hello")]
    Magic,
    /// A field's value is out of its bounds.
    #[error("the value of `{0}` is out of bounds")]
    Value(&'static str),
    /// A path could lead out of the directory.
    #[error("unsafe path: {0}")]
    Path(PathError),
}

/// The result for an entry, or the reason why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Code {
    /// The entry has its final name.
    Written = 0,
    /// The entry was there already and was to be left alone.
    Kept = 1,
    /// No space, or over quota.
    NoSpace = 2,
    /// No permission.
    Permission = 3,
    /// A file without write permission is there; `--force` replaces it.
    ReadOnly = 4,
    /// A directory is in the way.
    IsDirectory = 5,
    /// Something that is not a directory is in the way, or a symbolic link is on the path.
    NotDirectory = 6,
    /// The name or path is not possible here.
    BadPath = 7,
    /// A checksum did not match.
    Corrupt = 8,
    /// Another transfer of the same file is under way.
    Busy = 9,
    /// Another error of the file system.
    Io = 10,
    /// The sender gave the entry up.
    Abandoned = 11,
    /// A symbolic link leads out of the receiver's directory, which it does not allow.
    LinkOut = 12,
    /// As [`Self::Written`], without some of the attributes.
    Partly = 13,
    /// The peer's proof of the key was wrong.
    KeyWrong = 64,
    /// The peer broke the protocol.
    Violation = 65,
    /// The peer is going away.
    Going = 66,
    /// The peer ran out of memory or descriptors for this connection.
    Resources = 67,
    /// As [`Status::Stranger`], found out later.
    Stranger = 68,
    /// As many senders are served as may be.
    Full = 69,
    /// The responder gives no files.
    NotServed = 70,
}

impl Code {
    const ALL: [Self; 21] = [
        Self::Written,
        Self::Kept,
        Self::NoSpace,
        Self::Permission,
        Self::ReadOnly,
        Self::IsDirectory,
        Self::NotDirectory,
        Self::BadPath,
        Self::Corrupt,
        Self::Busy,
        Self::Io,
        Self::Abandoned,
        Self::LinkOut,
        Self::Partly,
        Self::KeyWrong,
        Self::Violation,
        Self::Going,
        Self::Resources,
        Self::Stranger,
        Self::Full,
        Self::NotServed,
    ];

    fn from_u16(v: u16) -> Result<Self, DecodeError> {
        Self::ALL
            .into_iter()
            .find(|c| *c as u16 == v)
            .ok_or(DecodeError::Value("code"))
    }
}

/// Flags of a FILE or LINK message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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

impl FileFlags {
    fn code(self) -> u16 {
        u16::from(self.no_wait)
            | u16::from(self.no_clobber) << 1
            | u16::from(self.force) << 2
            | u16::from(self.sync) << 3
    }

    fn from_u16(v: u16) -> Self {
        Self {
            no_wait: v & 1 != 0,
            no_clobber: v & 2 != 0,
            force: v & 4 != 0,
            sync: v & 8 != 0,
        }
    }
}

/// A modification time: seconds since 1970 and nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mtime {
    /// Seconds since 1970-01-01 00:00 UTC.
    pub secs: i64,
    /// Nanoseconds, below 1,000,000,000.
    pub nanos: u32,
}

/// A file about to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins in the block.
    pub at: u32,
    /// Its length in bytes.
    pub len: u32,
}

/// A file's length and time: which version of it this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Length in bytes.
    pub size: u64,
    /// Modification time.
    pub mtime: Mtime,
}

/// A name in an ASK.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The name.
    pub path: RelPath,
    /// The sender's version, if the receiver is to compare its own with it.
    pub version: Option<Version>,
}

/// What the receiver has of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Held {
    /// Nothing.
    Nothing = 0,
    /// A file, a link or something else.
    Other = 1,
    /// A file of the version that the ASK has.
    Same = 2,
    /// A directory.
    Directory = 3,
}

impl Held {
    fn from_u8(v: u8) -> Result<Self, DecodeError> {
        let all = [Self::Nothing, Self::Other, Self::Same, Self::Directory];
        all.get(usize::from(v))
            .copied()
            .ok_or(DecodeError::Value("held"))
    }
}

/// The region of a receiver's ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct What {
    /// The content of directories.
    pub recursive: bool,
    /// Symbolic links below directories.
    pub links: bool,
    /// Owners, special mode bits, extended attributes and hard links.
    pub attributes: bool,
}

/// The subject of a notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum About {
    /// Something is left out.
    LeftOut = 0,
    /// Something cannot be sent.
    Error = 1,
    /// What would be done, in a dry run.
    Plan = 2,
}

impl About {
    fn from_u16(v: u16) -> Result<Self, DecodeError> {
        let all = [Self::LeftOut, Self::Error, Self::Plan];
        all.get(usize::from(v))
            .copied()
            .ok_or(DecodeError::Value("notice"))
    }
}

/// What an initiator fetches.
#[derive(Debug, Clone, PartialEq, Eq)]
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
        let bytes: usize = lengths.sum::<usize>() + 2 * self.paths.len();
        (1..=FETCH_NAMES).contains(&self.paths.len()) && HEADER_LEN + 40 + bytes <= MAX_MESSAGE
    }
}

/// One control message.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    fn kind(&self) -> u8 {
        match self {
            Self::Start { .. } => 1,
            Self::Ready { .. } => 2,
            Self::Refuse { .. } => 3,
            Self::File { .. } => 4,
            Self::Offer { .. } => 5,
            Self::From { .. } => 6,
            Self::Block { .. } => 7,
            Self::Free { .. } => 8,
            Self::End { .. } => 9,
            Self::Abandon { .. } => 10,
            Self::Result { .. } => 11,
            Self::Directory { .. } => 12,
            Self::Link { .. } => 13,
            Self::Credit => 14,
            Self::Done { .. } => 15,
            Self::Pack { .. } => 16,
            Self::Packed { .. } => 17,
            Self::Ask { .. } => 18,
            Self::Held { .. } => 19,
            Self::Sparse { .. } => 20,
            Self::Hole { .. } => 21,
            Self::HardLink { .. } => 22,
            Self::Fetch(_) => 23,
            Self::Notice { .. } => 24,
        }
    }

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

    /// The whole length of a message, from the first [`HEADER_LEN`] bytes of it.
    pub fn length(header: [u8; HEADER_LEN]) -> Result<usize, DecodeError> {
        let len = u32::from_be_bytes([header[4], header[5], header[6], header[7]]) as usize;
        if (HEADER_LEN..=MAX_MESSAGE).contains(&len) {
            Ok(len)
        } else {
            Err(DecodeError::Length)
        }
    }
}

#[cfg(test)]
mod tests;
