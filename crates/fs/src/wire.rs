//! The control messages: a pure codec, no I/O. `docs/spec/fs.md` draws every message.
//!
//! All integers are big-endian; fields that a kind of message does not use are zero, and a decoder refuses anything else in reserved ones. The decoders take
//! arbitrary bytes of a hostile peer: they never panic, and allocate no more than they were given.

use rustix::io::Errno;
use weft_session::Protocol;
pub use weft_session::{Malformed, Status};

use crate::name::{MAX_COMPONENT, Name};

/// Length of a request's fixed part.
pub const REQUEST_LEN: usize = 24;
/// Length of a reply's fixed part.
pub const REPLY_LEN: usize = 80;
/// The longest message in bytes.
pub const MAX_MESSAGE: usize = 16 << 10;

/// The protocol; the value of a server's hello is 1 if it keeps buffers that no client has open.
pub const PROTOCOL: Protocol = Protocol {
    magic: *b"weft-fs\0",
    version: 1,
    longest: MAX_MESSAGE,
    inline: 256,
    depth: 32,
    is_quiet: false,
};

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    (u32::from(be16(bytes, at)) << 16) | u32::from(be16(bytes, at + 2))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    (u64::from(be32(bytes, at)) << 32) | u64::from(be32(bytes, at + 4))
}

/// The requests of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// Open `name` with `flags`; `size` is the length that a new buffer will get with its first write.
    Open = 1,
    /// Close `handle`.
    Close = 2,
    /// Attributes of `name`.
    Stat = 3,
    /// Attributes and region of `handle`, of the newest generation.
    Refresh = 4,
    /// Make `handle` at least `size` bytes long; a region that reaches so far.
    Grow = 5,
    /// Give `handle` a new generation of exactly `size` bytes.
    Truncate = 6,
    /// Everything written before this has been placed when the reply comes.
    Sync = 7,
    /// Remove the buffer `name`.
    Unlink = 8,
    /// Give `name` the name `other`, in place of a buffer that has it.
    Rename = 9,
    /// Make the folder `name`.
    Mkdir = 10,
    /// Remove the folder `name`, which is empty.
    Rmdir = 11,
    /// Entries of the folder `name` whose names come after `other`'s last component in byte order.
    List = 12,
    /// Quota (`size`) and its used part (`length`).
    Usage = 13,
}

impl Op {
    fn from_u8(v: u8) -> Option<Self> {
        Some(match v {
            1 => Self::Open,
            2 => Self::Close,
            3 => Self::Stat,
            4 => Self::Refresh,
            5 => Self::Grow,
            6 => Self::Truncate,
            7 => Self::Sync,
            8 => Self::Unlink,
            9 => Self::Rename,
            10 => Self::Mkdir,
            11 => Self::Rmdir,
            12 => Self::List,
            13 => Self::Usage,
            _ => return None,
        })
    }
}

/// The flags of open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(pub u16);

impl Flags {
    /// For reading.
    pub const READ: Self = Self(1);
    /// For writing.
    pub const WRITE: Self = Self(2);
    /// Make it if it is not there.
    pub const CREATE: Self = Self(4);
    /// Fail if it is there.
    pub const EXCLUSIVE: Self = Self(8);
    /// Begin with an empty generation.
    pub const TRUNCATE: Self = Self(16);
    /// Writes go to the end.
    pub const APPEND: Self = Self(32);

    /// Whether all of these are set.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These and those.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These without those.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What.
    pub op: Op,
    /// Only for `Open`.
    pub flags: Flags,
    /// Comes back in the reply.
    pub id: u32,
    /// Of an open buffer.
    pub handle: u32,
    /// In bytes.
    pub size: u64,
    /// Which.
    pub name: Name,
    /// The second name.
    pub other: Name,
}

impl Request {
    /// A request of this kind without anything else.
    pub fn new(op: Op) -> Self {
        Self {
            op,
            flags: Flags(0),
            id: 0,
            handle: 0,
            size: 0,
            name: Name::default(),
            other: Name::default(),
        }
    }

    /// About this name.
    pub fn named(op: Op, name: &Name) -> Self {
        Self {
            name: name.clone(),
            ..Self::new(op)
        }
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let (name, other) = (self.name.as_bytes(), self.other.as_bytes());
        let mut out = Vec::with_capacity(REQUEST_LEN + name.len() + other.len());
        out.extend([self.op as u8, 0]);
        out.extend(self.flags.0.to_be_bytes());
        out.extend(self.id.to_be_bytes());
        out.extend(self.handle.to_be_bytes());
        out.extend((name.len() as u16).to_be_bytes());
        out.extend((other.len() as u16).to_be_bytes());
        out.extend(self.size.to_be_bytes());
        out.extend(name);
        out.extend(other);
        out
    }

    /// Reads a request. A name that can never be is no breach of the protocol: it is the inner error, for the reply.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<(u32, Result<Self, Errno>), Malformed> {
        if bytes.len() < REQUEST_LEN {
            return Err(Malformed("short request"));
        }
        let op = Op::from_u8(bytes[0]).ok_or(Malformed("kind of request"))?;
        let flags = Flags(be16(bytes, 2));
        if bytes[1] != 0 || flags.0 >= 64 {
            return Err(Malformed("reserved"));
        }
        let id = be32(bytes, 4);
        let names = &bytes[REQUEST_LEN..];
        let (first, second) = (be16(bytes, 12) as usize, be16(bytes, 14) as usize);
        if first + second != names.len() {
            return Err(Malformed("length"));
        }
        let (name, other) = names.split_at(first);
        let named = Name::new(name).and_then(|name| Ok((name, Name::new(other)?)));
        Ok((
            id,
            named.map(|(name, other)| Self {
                op,
                flags,
                id,
                handle: be32(bytes, 8),
                size: be64(bytes, 16),
                name,
                other,
            }),
        ))
    }
}

/// The attributes of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attr {
    /// A folder, or a buffer or file.
    pub dir: bool,
    /// Whether it can be written.
    pub writable: bool,
    /// Length in bytes.
    pub size: u64,
    /// Time of the last change that the server has seen, in nanoseconds since 1970.
    pub mtime: u64,
    /// No other has this number, before or after a restart of the server either (files of a folder: the number that the file system gives them).
    pub ino: u64,
    /// Counts up with each truncation.
    pub generation: u32,
}

/// A range of the server's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Region {
    /// Its `STag`.
    pub rkey: u32,
    /// Tagged offset of the first byte.
    pub addr: u64,
    /// Length in bytes; 0: there is none.
    pub len: u64,
}

/// One entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name in the folder.
    pub name: Vec<u8>,
    /// Its attributes.
    pub attr: Attr,
}

/// Length of an entry without its name.
const ENTRY_LEN: usize = 32;

/// One reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The request's.
    pub id: u32,
    /// Why not; `None`: done.
    pub error: Option<Errno>,
    /// The handle that was opened.
    pub handle: u32,
    /// Its attributes.
    pub attr: Attr,
    /// The region of its bytes.
    pub region: Region,
    /// The region of the appenders' eight-byte counter.
    pub word: Region,
    /// Of a folder; there may be more.
    pub entries: Vec<Entry>,
}

impl Reply {
    /// Done.
    pub fn ok(id: u32) -> Self {
        Self {
            id,
            error: None,
            handle: 0,
            attr: Attr::default(),
            region: Region::default(),
            word: Region::default(),
            entries: Vec::new(),
        }
    }

    /// Not done.
    pub fn failed(id: u32, error: Errno) -> Self {
        Self {
            error: Some(error),
            ..Self::ok(id)
        }
    }

    /// Its bytes. Entries that do not fit a message are left out.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(REPLY_LEN);
        out.extend([0x80, 0]);
        let error = self.error.map_or(0, Errno::raw_os_error);
        out.extend((error as u16).to_be_bytes());
        out.extend(self.id.to_be_bytes());
        out.extend(self.handle.to_be_bytes());
        out.extend(bits(&self.attr).to_be_bytes());
        out.extend([0; 2]);
        out.extend(self.attr.size.to_be_bytes());
        out.extend(self.attr.mtime.to_be_bytes());
        out.extend(self.attr.ino.to_be_bytes());
        out.extend(self.attr.generation.to_be_bytes());
        out.extend(self.region.rkey.to_be_bytes());
        out.extend(self.region.addr.to_be_bytes());
        out.extend(self.region.len.to_be_bytes());
        out.extend(self.word.rkey.to_be_bytes());
        out.extend((self.word.len as u32).to_be_bytes());
        out.extend(self.word.addr.to_be_bytes());
        let mut count: u16 = 0;
        for entry in &self.entries {
            if out.len() + ENTRY_LEN + entry.name.len() > MAX_MESSAGE {
                break;
            }
            out.extend(bits(&entry.attr).to_be_bytes());
            out.extend((entry.name.len() as u16).to_be_bytes());
            out.extend(entry.attr.generation.to_be_bytes());
            out.extend(entry.attr.size.to_be_bytes());
            out.extend(entry.attr.mtime.to_be_bytes());
            out.extend(entry.attr.ino.to_be_bytes());
            out.extend(&entry.name);
            count += 1;
        }
        out[14..16].copy_from_slice(&count.to_be_bytes());
        out
    }

    /// Reads a reply.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() < REPLY_LEN {
            return Err(Malformed("short reply"));
        }
        if bytes[0] != 0x80 || bytes[1] != 0 {
            return Err(Malformed("kind of reply"));
        }
        let error = match be16(bytes, 2) {
            0 => None,
            code @ 1..4096 => Some(Errno::from_raw_os_error(i32::from(code))),
            _ => return Err(Malformed("status")),
        };
        let attr = Attr {
            generation: be32(bytes, 40),
            ..attr_of(be16(bytes, 12), bytes, 16)?
        };
        let mut entries = Vec::new();
        let mut rest = &bytes[REPLY_LEN..];
        for _ in 0..be16(bytes, 14) {
            if rest.len() < ENTRY_LEN {
                return Err(Malformed("short entry"));
            }
            let (fixed, after) = rest.split_at(ENTRY_LEN);
            let len = be16(fixed, 2) as usize;
            if len == 0 || len > MAX_COMPONENT || len > after.len() {
                return Err(Malformed("length of an entry"));
            }
            let (name, after) = after.split_at(len);
            // An entry that is not one component could lead a reader elsewhere.
            if name.contains(&b'/') || Name::new(name).is_err() {
                return Err(Malformed("name of an entry"));
            }
            entries.push(Entry {
                name: name.into(),
                attr: Attr {
                    generation: be32(fixed, 4),
                    ..attr_of(be16(fixed, 0), fixed, 8)?
                },
            });
            rest = after;
        }
        if !rest.is_empty() {
            return Err(Malformed("trailing bytes"));
        }
        Ok(Self {
            id: be32(bytes, 4),
            error,
            handle: be32(bytes, 8),
            attr,
            region: Region {
                rkey: be32(bytes, 44),
                addr: be64(bytes, 48),
                len: be64(bytes, 56),
            },
            word: Region {
                rkey: be32(bytes, 64),
                addr: be64(bytes, 72),
                len: be32(bytes, 68).into(),
            },
            entries,
        })
    }
}

fn bits(attr: &Attr) -> u16 {
    u16::from(attr.dir) | u16::from(attr.writable) << 1
}

fn attr_of(bits: u16, bytes: &[u8], at: usize) -> Result<Attr, Malformed> {
    let size = be64(bytes, at);
    if bits > 3 || size > i64::MAX as u64 {
        return Err(Malformed("attributes"));
    }
    Ok(Attr {
        dir: bits & 1 != 0,
        writable: bits & 2 != 0,
        size,
        mtime: be64(bytes, at + 8),
        ino: be64(bytes, at + 16),
        generation: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Reply {
        let attr = Attr {
            dir: false,
            writable: true,
            size: 5 << 30,
            mtime: 7,
            ino: 9,
            generation: 3,
        };
        Reply {
            handle: 4,
            attr,
            region: Region {
                rkey: 0xdead_beef,
                addr: 1 << 40,
                len: 5 << 30,
            },
            word: Region {
                rkey: 8,
                addr: 16,
                len: 8,
            },
            entries: vec![
                Entry {
                    name: b"a".to_vec(),
                    attr,
                },
                Entry {
                    name: b"dir".to_vec(),
                    attr: Attr { dir: true, ..attr },
                },
            ],
            ..Reply::ok(77)
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let reply = sample();
        assert_eq!(Reply::decode(&reply.encode()).unwrap(), reply);
        let failed = Reply::failed(3, Errno::NOSPC);
        assert_eq!(Reply::decode(&failed.encode()).unwrap(), failed);
        let request = Request {
            flags: Flags::READ.with(Flags::CREATE),
            id: 5,
            size: 9,
            other: Name::new(b"y").unwrap(),
            ..Request::named(Op::Rename, &Name::new(b"a/b").unwrap())
        };
        assert_eq!(
            Request::decode(&request.encode()).unwrap(),
            (5, Ok(request.clone()))
        );
        let mut escaping = request.encode();
        escaping[REQUEST_LEN..REQUEST_LEN + 3].copy_from_slice(b"../");
        assert_eq!(Request::decode(&escaping).unwrap(), (5, Err(Errno::INVAL)));
    }

    #[test]
    fn a_long_folder_stays_within_a_message() {
        let entry = Entry {
            name: vec![b'x'; MAX_COMPONENT],
            attr: Attr::default(),
        };
        let reply = Reply {
            entries: vec![entry; 1000],
            ..Reply::ok(1)
        };
        let bytes = reply.encode();
        assert!(bytes.len() <= MAX_MESSAGE);
        let got = Reply::decode(&bytes).unwrap().entries.len();
        assert_eq!(got, (MAX_MESSAGE - REPLY_LEN) / (ENTRY_LEN + MAX_COMPONENT));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            crate::fuzzing::fs_wire(&bytes);
        }

        #[test]
        fn a_damaged_reply_is_refused_or_read_as_what_it_says(at in 0..REPLY_LEN + 60, to in any::<u8>()) {
            let mut bytes = sample().encode();
            if at < bytes.len() {
                bytes[at] = to;
            }
            if let Ok(reply) = Reply::decode(&bytes) {
                for entry in reply.entries {
                    prop_assert!(Name::new(&entry.name).is_ok());
                }
            }
        }
    }
}
