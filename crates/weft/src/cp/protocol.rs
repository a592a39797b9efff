//! The control messages of `weft cp`: a pure codec, no I/O.
//!
//! `docs/spec/cp.md` draws every message. All integers are big-endian; reserved fields are zero and a
//! decoder refuses anything else, so that a later version can give them a meaning. [`Message::decode`]
//! takes arbitrary bytes from a hostile peer: it never panics and allocates no more than it was given.

use std::time::Duration;

pub use super::path::{PathError, RelPath, printable};

mod hello;
pub mod pack;

pub use hello::{Hello, Status};

/// The protocol version that this program speaks.
pub const VERSION: u16 = 3;
/// What the private data of both MPA start-up frames begins with.
pub const MAGIC: [u8; 8] = *b"weft-cp\0";
/// Length of a [`Hello`] in bytes.
pub const HELLO_LEN: usize = 48;
/// Length of the header of every message in bytes.
pub const HEADER_LEN: usize = 8;
/// The longest relative path in bytes (`PATH_MAX` less its NUL).
pub const MAX_PATH: usize = 4095;
/// The longest explanation that travels with an error, in bytes.
pub const MAX_TEXT: usize = 512;
/// The longest message in bytes: a LINK with the longest path and target.
pub const MAX_MESSAGE: usize = HEADER_LEN + 8 + 2 * MAX_PATH + 2;
/// Most entries (files, directories, links) and packs that may be without an answer.
pub const WINDOW: usize = 64;
/// Most files in a PACK.
pub const PACK_FILES: u16 = 128;
/// The longest PACK in bytes, where a slot has so many.
pub const PACK_LEN: u32 = 128 << 10;
/// Most names in an ASK.
pub const ASK_NAMES: usize = 512;
/// Most ASKs that may be without an answer.
pub const ASKS: usize = 4;
/// Bounds of the number of slots in a ring.
pub const SLOTS: std::ops::RangeInclusive<u16> = 1..=64;
/// Bounds of a slot's length in bytes.
pub const SLOT_LEN: std::ops::RangeInclusive<u32> = 4096..=16 << 20;
/// Length of a nonce, a key at least, and a proof in bytes.
pub const PROOF_LEN: usize = 32;
/// How long a side may say nothing before it sends a CREDIT message as a sign of life.
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

/// What became of an entry, or why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Code {
    /// The entry stands under its final name.
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
}

impl Code {
    const ALL: [Self; 19] = [
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
        Self::KeyWrong,
        Self::Violation,
        Self::Going,
        Self::Resources,
        Self::Stranger,
        Self::Full,
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
    /// The file fits one slot and the sender goes on without waiting for an OFFER.
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
    /// Permission bits, 0 to 0o777.
    pub mode: u32,
    /// Modification time of the source.
    pub mtime: Mtime,
    /// Length in bytes.
    pub size: u64,
    /// Identity of the source; the same source has the same in a later run.
    pub source: Digest,
    /// Where it goes.
    pub path: RelPath,
}

/// Where a receiver's ring is.
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

/// One control message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Initiator's first message: its receives and its proof (zero without a key).
    Start {
        /// Receives that the initiator has posted.
        receives: u16,
        /// HMAC-SHA256 as role 1.
        proof: [u8; PROOF_LEN],
    },
    /// Responder's answer: the ring and its own proof.
    Ready {
        /// Receives that the responder has posted.
        receives: u16,
        /// The ring.
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
    /// The sender goes on from this block: the offer's, or 0.
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
        /// Permission bits, 0 to 0o777.
        mode: u32,
        /// Modification time of the source.
        mtime: Mtime,
        /// Where it is.
        path: RelPath,
    },
    /// Make a symbolic link.
    Link {
        /// The entry.
        id: u32,
        /// Treatment of an existing entry; `no_wait` and `sync` are zero.
        flags: FileFlags,
        /// What the link says.
        target: Vec<u8>,
        /// Where it goes.
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
    /// Files of a PACK stand under their names.
    Packed {
        /// The first one's entry.
        id: u32,
        /// Number of files.
        count: u16,
    },
    /// Which of these are there?
    Ask {
        /// Names of files and links.
        paths: Vec<RelPath>,
    },
    /// The answer to an ASK.
    Held {
        /// For each name, in order, whether something other than a directory has it.
        held: Vec<bool>,
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
        }
    }

    /// Appends the message to `out`, granting `credits` more receives to the peer.
    pub fn encode(&self, credits: u16, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([self.kind(), 0]);
        out.extend(credits.to_be_bytes());
        out.extend([0; 4]);
        match self {
            Self::Start { receives, proof } => {
                out.extend(receives.to_be_bytes());
                out.extend([0; 6]);
                out.extend(proof);
            }
            Self::Ready {
                receives,
                ring,
                proof,
            } => {
                out.extend(receives.to_be_bytes());
                out.extend(ring.slots.to_be_bytes());
                out.extend(ring.slot_len.to_be_bytes());
                out.extend(ring.addr.to_be_bytes());
                out.extend(ring.rkey.to_be_bytes());
                out.extend([0; 4]);
                out.extend(proof);
            }
            Self::Refuse { code, text } => {
                out.extend((*code as u16).to_be_bytes());
                out.extend([0; 2]);
                out.extend(clip(text));
            }
            Self::File { id, spec } => {
                out.extend(id.to_be_bytes());
                out.extend(spec.flags.code().to_be_bytes());
                out.extend((spec.mode as u16).to_be_bytes());
                put_mtime(out, spec.mtime);
                out.extend([0; 4]);
                out.extend(spec.size.to_be_bytes());
                out.extend(spec.source);
                out.extend(spec.path.as_bytes());
            }
            Self::Offer { id, blocks, digest } => {
                out.extend(id.to_be_bytes());
                out.extend([0; 4]);
                out.extend(blocks.to_be_bytes());
                out.extend(digest);
            }
            Self::From { id, block } => {
                out.extend(id.to_be_bytes());
                out.extend([0; 4]);
                out.extend(block.to_be_bytes());
            }
            Self::Block {
                id,
                slot,
                index,
                len,
                digest,
            } => {
                out.extend(id.to_be_bytes());
                out.extend(slot.to_be_bytes());
                out.extend([0; 2]);
                out.extend(index.to_be_bytes());
                out.extend(len.to_be_bytes());
                out.extend([0; 4]);
                out.extend(digest);
            }
            Self::Free { slot } => {
                out.extend(slot.to_be_bytes());
                out.extend([0; 2]);
            }
            Self::End { id, digest } => {
                out.extend(id.to_be_bytes());
                out.extend([0; 4]);
                out.extend(digest);
            }
            Self::Abandon { id } => out.extend(id.to_be_bytes()),
            Self::Result { id, code, text } => {
                out.extend(id.to_be_bytes());
                out.extend((*code as u16).to_be_bytes());
                out.extend([0; 2]);
                out.extend(clip(text));
            }
            Self::Directory {
                id,
                leave,
                mode,
                mtime,
                path,
            } => {
                out.extend(id.to_be_bytes());
                out.extend(u16::from(*leave).to_be_bytes());
                out.extend((*mode as u16).to_be_bytes());
                put_mtime(out, *mtime);
                out.extend([0; 4]);
                out.extend(path.as_bytes());
            }
            Self::Link {
                id,
                flags,
                target,
                path,
            } => {
                out.extend(id.to_be_bytes());
                out.extend(flags.code().to_be_bytes());
                out.extend((target.len() as u16).to_be_bytes());
                out.extend(target);
                out.extend(path.as_bytes());
            }
            Self::Pack {
                id,
                slot,
                count,
                len,
                digest,
            } => {
                out.extend(id.to_be_bytes());
                out.extend(slot.to_be_bytes());
                out.extend(count.to_be_bytes());
                out.extend(len.to_be_bytes());
                out.extend([0; 4]);
                out.extend(digest);
            }
            Self::Packed { id, count } => {
                out.extend(id.to_be_bytes());
                out.extend(count.to_be_bytes());
                out.extend([0; 2]);
            }
            Self::Ask { paths } => pack::put_names(out, paths),
            Self::Held { held } => pack::put_held(out, held),
            Self::Credit => {}
            Self::Done { cpu_us } => out.extend(cpu_us.to_be_bytes()),
        }
        let len = (out.len() - start) as u32;
        out[start + 4..start + 8].copy_from_slice(&len.to_be_bytes());
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

    /// Reads one message: the credits that it grants, and itself.
    pub fn decode(bytes: &[u8]) -> Result<(u16, Self), DecodeError> {
        let mut r = Reader(bytes);
        let kind = r.u8()?;
        r.zero(1)?;
        let credits = r.u16()?;
        if r.u32()? as usize != bytes.len() || bytes.len() > MAX_MESSAGE {
            return Err(DecodeError::Length);
        }
        let message = match kind {
            1 => {
                let receives = r.receives()?;
                r.zero(6)?;
                Self::Start {
                    receives,
                    proof: r.array()?,
                }
            }
            2 => {
                let receives = r.receives()?;
                let slots = r.u16()?;
                let slot_len = r.u32()?;
                let addr = r.u64()?;
                let rkey = r.u32()?;
                r.zero(4)?;
                if !SLOTS.contains(&slots) {
                    return Err(DecodeError::Value("slots"));
                }
                if !SLOT_LEN.contains(&slot_len) {
                    return Err(DecodeError::Value("slot length"));
                }
                if addr
                    .checked_add(u64::from(slots) * u64::from(slot_len))
                    .is_none()
                {
                    return Err(DecodeError::Value("address"));
                }
                let ring = RingAdvert {
                    slots,
                    slot_len,
                    rkey,
                    addr,
                };
                Self::Ready {
                    receives,
                    ring,
                    proof: r.array()?,
                }
            }
            3 => {
                let code = Code::from_u16(r.u16()?)?;
                r.zero(2)?;
                Self::Refuse {
                    code,
                    text: r.text()?,
                }
            }
            4 => {
                let id = r.u32()?;
                let flags = FileFlags::from_u16(r.flags(0b1111)?);
                let mode = r.mode()?;
                let mtime = r.mtime()?;
                r.zero(4)?;
                let size = r.u64()?;
                if i64::try_from(size).is_err() {
                    return Err(DecodeError::Value("size"));
                }
                let source = r.array()?;
                let path = r.path()?;
                Self::File {
                    id,
                    spec: FileSpec {
                        flags,
                        mode,
                        mtime,
                        size,
                        source,
                        path,
                    },
                }
            }
            5 => {
                let id = r.u32()?;
                r.zero(4)?;
                Self::Offer {
                    id,
                    blocks: r.u64()?,
                    digest: r.array()?,
                }
            }
            6 => {
                let id = r.u32()?;
                r.zero(4)?;
                Self::From {
                    id,
                    block: r.u64()?,
                }
            }
            7 => {
                let id = r.u32()?;
                let slot = r.u16()?;
                r.zero(2)?;
                let index = r.u64()?;
                let len = r.u32()?;
                r.zero(4)?;
                if len == 0 || len > *SLOT_LEN.end() {
                    return Err(DecodeError::Value("block length"));
                }
                Self::Block {
                    id,
                    slot,
                    index,
                    len,
                    digest: r.array()?,
                }
            }
            8 => {
                let slot = r.u16()?;
                r.zero(2)?;
                Self::Free { slot }
            }
            9 => {
                let id = r.u32()?;
                r.zero(4)?;
                Self::End {
                    id,
                    digest: r.array()?,
                }
            }
            10 => Self::Abandon { id: r.u32()? },
            11 => {
                let id = r.u32()?;
                let code = Code::from_u16(r.u16()?)?;
                r.zero(2)?;
                Self::Result {
                    id,
                    code,
                    text: r.text()?,
                }
            }
            12 => {
                let id = r.u32()?;
                let leave = r.flags(1)? == 1;
                let mode = r.mode()?;
                let mtime = r.mtime()?;
                r.zero(4)?;
                Self::Directory {
                    id,
                    leave,
                    mode,
                    mtime,
                    path: r.path()?,
                }
            }
            13 => {
                let id = r.u32()?;
                let flags = FileFlags::from_u16(r.flags(0b0110)?);
                let len = usize::from(r.u16()?);
                if len == 0 || len > MAX_PATH {
                    return Err(DecodeError::Value("link target"));
                }
                let target = r.bytes(len)?.to_vec();
                if target.contains(&0) {
                    return Err(DecodeError::Value("link target"));
                }
                Self::Link {
                    id,
                    flags,
                    target,
                    path: r.path()?,
                }
            }
            14 => Self::Credit,
            15 => Self::Done { cpu_us: r.u64()? },
            16 => {
                let id = r.u32()?;
                let slot = r.u16()?;
                let count = r.pack_files()?;
                let len = r.u32()?;
                r.zero(4)?;
                if len > PACK_LEN {
                    return Err(DecodeError::Value("pack length"));
                }
                Self::Pack {
                    id,
                    slot,
                    count,
                    len,
                    digest: r.array()?,
                }
            }
            17 => {
                let id = r.u32()?;
                let count = r.pack_files()?;
                r.zero(2)?;
                Self::Packed { id, count }
            }
            18 => Self::Ask {
                paths: pack::names(&mut r)?,
            },
            19 => Self::Held {
                held: pack::held(&mut r)?,
            },
            _ => return Err(DecodeError::Kind(kind)),
        };
        r.end()?;
        Ok((credits, message))
    }
}

/// A text cut to [`MAX_TEXT`] bytes at a character's border.
fn clip(text: &str) -> &[u8] {
    &text.as_bytes()[..text.floor_char_boundary(MAX_TEXT)]
}

fn put_mtime(out: &mut Vec<u8>, t: Mtime) {
    out.extend(t.secs.to_be_bytes());
    out.extend(t.nanos.to_be_bytes());
}

/// What is left of a message.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, n: usize) -> Result<&'a [u8], DecodeError> {
        let (head, tail) = self.0.split_at_checked(n).ok_or(DecodeError::Short)?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (head, tail) = self.0.split_first_chunk().ok_or(DecodeError::Short)?;
        self.0 = tail;
        Ok(*head)
    }

    fn u8(&mut self) -> Result<u8, DecodeError> {
        self.array().map(u8::from_be_bytes)
    }

    fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_be_bytes)
    }

    fn zero(&mut self, n: usize) -> Result<(), DecodeError> {
        if self.bytes(n)?.iter().all(|&b| b == 0) {
            Ok(())
        } else {
            Err(DecodeError::Reserved)
        }
    }

    fn flags(&mut self, known: u16) -> Result<u16, DecodeError> {
        let v = self.u16()?;
        if v & !known == 0 {
            Ok(v)
        } else {
            Err(DecodeError::Reserved)
        }
    }

    fn mode(&mut self) -> Result<u32, DecodeError> {
        let mode = self.u16()?;
        if mode <= 0o777 {
            Ok(u32::from(mode))
        } else {
            Err(DecodeError::Value("mode"))
        }
    }

    /// Fewer than 4 receives could not carry data, answers and credits at once.
    fn receives(&mut self) -> Result<u16, DecodeError> {
        let n = self.u16()?;
        if (4..=4096).contains(&n) {
            Ok(n)
        } else {
            Err(DecodeError::Value("receives"))
        }
    }

    fn pack_files(&mut self) -> Result<u16, DecodeError> {
        let n = self.u16()?;
        if (1..=PACK_FILES).contains(&n) {
            Ok(n)
        } else {
            Err(DecodeError::Value("files in a pack"))
        }
    }

    fn mtime(&mut self) -> Result<Mtime, DecodeError> {
        let secs = i64::from_be_bytes(self.array()?);
        let nanos = self.u32()?;
        if nanos < 1_000_000_000 {
            Ok(Mtime { secs, nanos })
        } else {
            Err(DecodeError::Value("mtime"))
        }
    }

    fn text(&mut self) -> Result<String, DecodeError> {
        let rest = std::mem::take(&mut self.0);
        if rest.len() > MAX_TEXT {
            Err(DecodeError::Value("text"))
        } else {
            Ok(printable(rest))
        }
    }

    fn path(&mut self) -> Result<RelPath, DecodeError> {
        RelPath::new(std::mem::take(&mut self.0)).map_err(DecodeError::Path)
    }

    fn end(&self) -> Result<(), DecodeError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(DecodeError::Trailing)
        }
    }
}

#[cfg(test)]
mod tests;
