//! The control messages: a pure codec, no I/O. `docs/spec/fs.md` draws every message.
//!
//! The messages are encoded by postcard; fields that a kind of message does not use are zero. The decoders take arbitrary bytes of a hostile peer: they never
//! panic, and the values that they return are valid as documented here.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use weft_session::Protocol;
pub use weft_session::{Malformed, Status};
use weft_verbs::tls::PublicKey;

use crate::name::Name;

/// The longest message in bytes.
pub const MAX_MESSAGE: usize = 16 << 10;

/// The protocol; the value of a server's hello is 1 if it keeps buffers that no client has open.
pub const PROTOCOL: Protocol = Protocol {
    magic: *b"weft-fs\0",
    version: 3,
    longest: MAX_MESSAGE,
    inline: 256,
    depth: 32,
    is_quiet: false,
};

/// The requests of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Open `name` with `flags`; `size` is the length that a new buffer will get with its first write.
    Open,
    /// Close `handle`.
    Close,
    /// Attributes of `name`.
    Stat,
    /// Attributes and region of `handle`, of the newest generation.
    Refresh,
    /// Make `handle` at least `size` bytes long; a region that reaches so far.
    Grow,
    /// Give `handle` a new generation of exactly `size` bytes.
    Truncate,
    /// Everything written before this has been placed when the reply comes.
    Sync,
    /// Remove the buffer `name`.
    Unlink,
    /// Give `name` the name `other`, in place of a buffer that has it.
    Rename,
    /// Make the folder `name`.
    Mkdir,
    /// Remove the folder `name`, which is empty.
    Rmdir,
    /// Entries of the folder `name` whose names come after `other`'s last component in byte order.
    List,
    /// Quota (`size`) and its used part (`length`).
    Usage,
    /// Give the buffer `name`, or that of `handle` unless it is 0, or the one whose number `other` is ([`number_name`]), the rights `size`: nine bits as of `chmod(2)`, for its owner, for the keys of [`Op::Share`], and for others.
    Chmod,
    /// Let the key that `other` names ([`key_name`]) be one of those of the buffer `name`, or no more if `size` is 0.
    Share,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Flags(pub u16);

impl Flags {
    pub const READ: Self = Self(1);
    pub const WRITE: Self = Self(2);
    /// Make it if it is not there.
    pub const CREATE: Self = Self(4);
    /// Fail if it is there.
    pub const EXCLUSIVE: Self = Self(8);
    /// Begin with an empty generation.
    pub const TRUNCATE: Self = Self(16);
    /// Writes go to the end.
    pub const APPEND: Self = Self(32);
    /// A buffer that is made by this is its owner's alone: 600, not 666.
    pub const PRIVATE: Self = Self(64);

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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub op: Op,
    /// Only for `Open`.
    pub flags: Flags,
    /// Comes back in the reply.
    pub id: u32,
    /// Of an open buffer.
    pub handle: u32,
    /// In bytes.
    pub size: u64,
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

    pub fn encode(&self) -> Vec<u8> {
        encode(&RequestBytes {
            id: self.id,
            op: self.op,
            flags: self.flags,
            handle: self.handle,
            size: self.size,
            name: self.name.as_bytes(),
            other: self.other.as_bytes(),
        })
    }

    /// Reads a request. A name that can never be is no breach of the protocol: it is the inner error, for the reply.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<(u32, Result<Self, Errno>), Malformed> {
        let RequestBytes {
            id,
            op,
            flags,
            handle,
            size,
            name,
            other,
        } = decode(bytes)?;
        if flags.0 >= 128 {
            return Err(Malformed("flags"));
        }
        let named = Name::new(name).and_then(|name| Ok((name, Name::new(other)?)));
        let request = named.map(|(name, other)| Self {
            op,
            flags,
            id,
            handle,
            size,
            name,
            other,
        });
        Ok((id, request))
    }
}

/// A request as it travels: its names have not been checked.
#[derive(Serialize, Deserialize)]
struct RequestBytes<'a> {
    id: u32,
    op: Op,
    flags: Flags,
    handle: u32,
    size: u64,
    name: &'a [u8],
    other: &'a [u8],
}

fn encode(message: &impl Serialize) -> Vec<u8> {
    // It fails only where memory is short of room, which a vector is not.
    postcard::to_allocvec(message).unwrap_or_default()
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Malformed> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(Malformed("trailing bytes")),
        Err(_) => Err(Malformed("no message of this protocol")),
    }
}

/// An error number; 0 for none.
mod errno {
    use rustix::io::Errno;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(
        clippy::ref_option,
        clippy::trivially_copy_pass_by_ref,
        reason = "as serde calls it"
    )]
    pub(super) fn serialize<S: Serializer>(
        error: &Option<Errno>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let code = error.map_or(0, Errno::raw_os_error);
        (code as u16).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Errno>, D::Error> {
        match u16::deserialize(from)? {
            0 => Ok(None),
            code @ 1..4096 => Ok(Some(Errno::from_raw_os_error(i32::from(code)))),
            _ => Err(D::Error::custom("an error number")),
        }
    }
}

/// The attributes of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Attr {
    /// A folder, or a buffer or file.
    pub dir: bool,
    /// Whether it can be written by somebody: a file of the served folder cannot.
    pub writable: bool,
    /// Length in bytes.
    pub size: u64,
    /// Time of the last change that the server has seen, in nanoseconds since 1970.
    pub mtime: u64,
    /// No other has this number, before or after a restart of the server either (files of a folder: the number that the file system gives them).
    pub ino: u64,
    /// Counts up with each truncation.
    pub generation: u32,
    /// Rights: nine bits as of `chmod(2)`.
    pub mode: u16,
    /// Those of this client: 4 to read, 2 to write. With another client they are others.
    pub rights: u16,
}

impl Attr {
    /// Whether this client may open it for that.
    pub fn allows(&self, flags: Flags) -> bool {
        let needs = [(Flags::READ, 4), (Flags::WRITE, 2)];
        let mut needs = needs.iter().filter(|(flag, _)| flags.has(*flag));
        needs.all(|(_, right)| self.rights & right != 0)
    }
}

/// The name that stands for a key in [`Op::Share`].
pub fn key_name(key: &PublicKey) -> Name {
    let hex = |byte: &u8| format!("{byte:02x}").into_bytes();
    Name::raw(key.as_der().iter().flat_map(hex).collect())
}

/// The name that stands for a buffer's number in [`Op::Chmod`].
pub fn number_name(ino: u64) -> Name {
    Name::raw(format!("{ino:016x}").into_bytes())
}

/// The reverse of [`number_name`].
pub(crate) fn buffer_number(name: &Name) -> Option<u64> {
    let text = std::str::from_utf8(name.as_bytes()).ok()?;
    let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    u64::from_str_radix(text, 16).ok().filter(|_| digits)
}

/// The reverse of [`key_name`].
pub(crate) fn named_key(name: &Name) -> Option<PublicKey> {
    let text = std::str::from_utf8(name.as_bytes()).ok()?;
    let digits = text.as_bytes().iter().all(u8::is_ascii_hexdigit);
    let pairs = (0..text.len()).step_by(2);
    let byte = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    let der: Option<Vec<u8>> = pairs.map(byte).collect();
    PublicKey::from_der(&der.filter(|_| digits)?).ok()
}

/// A range of the server's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Region {
    pub rkey: u32,
    /// Tagged offset of the first byte.
    pub addr: u64,
    /// Length in bytes; 0: there is none.
    pub len: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub name: Vec<u8>,
    pub attr: Attr,
}

/// Bytes that a reply without entries, and an entry without its name, have at most: integers of 64 bits take up to ten.
const REPLY_MOST: usize = 128;
const ENTRY_MOST: usize = 52;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// The request's.
    pub id: u32,
    /// Why not; `None`: done.
    #[serde(with = "errno")]
    pub error: Option<Errno>,
    /// The handle that was opened.
    pub handle: u32,
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
    pub fn encode(mut self) -> Vec<u8> {
        let mut len = REPLY_MOST;
        let fitting = self.entries.iter().take_while(|entry| {
            len += ENTRY_MOST + entry.name.len();
            len <= MAX_MESSAGE
        });
        self.entries.truncate(fitting.count());
        encode(&self)
    }

    /// Reads a reply.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let reply: Self = decode(bytes)?;
        let attrs = reply.entries.iter().map(|entry| &entry.attr);
        let fits = |attr: &Attr| i64::try_from(attr.size).is_ok();
        if !fits(&reply.attr) || !attrs.into_iter().all(fits) {
            return Err(Malformed("attributes"));
        }
        // An entry that is not one component could lead a reader elsewhere.
        let is_component = |entry: &Entry| {
            let name = &entry.name;
            !name.is_empty() && !name.contains(&b'/') && Name::new(name).is_ok()
        };
        if !reply.entries.iter().all(is_component) {
            return Err(Malformed("name of an entry"));
        }
        Ok(reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::MAX_COMPONENT;
    use proptest::prelude::*;

    fn sample() -> Reply {
        let attr = Attr {
            dir: false,
            writable: true,
            size: 5 << 30,
            mtime: 7,
            ino: 9,
            generation: 3,
            mode: 0o640,
            rights: 4,
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
        assert_eq!(Reply::decode(&reply.clone().encode()).unwrap(), reply);
        let most = Region {
            rkey: u32::MAX,
            addr: u64::MAX,
            len: u64::MAX,
        };
        let attr = Attr {
            size: u64::MAX,
            mtime: u64::MAX,
            ino: u64::MAX,
            generation: u32::MAX,
            ..Attr::default()
        };
        let longest = Reply {
            handle: u32::MAX,
            attr,
            region: most,
            word: most,
            ..Reply::failed(u32::MAX, Errno::from_raw_os_error(4095))
        };
        assert!(longest.encode().len() <= REPLY_MOST);
        assert!(encode(&attr).len() < ENTRY_MOST - 2);
        let failed = Reply::failed(3, Errno::NOSPC);
        assert_eq!(Reply::decode(&failed.clone().encode()).unwrap(), failed);
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
        let at = escaping.len() - b"a/b".len() - b"\x01y".len();
        escaping[at..at + 3].copy_from_slice(b"../");
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
        assert!(got * (ENTRY_MOST + MAX_COMPONENT) > MAX_MESSAGE / 2);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            crate::fuzzing::fs_wire(&bytes);
        }

        #[test]
        fn a_damaged_reply_is_refused_or_read_as_what_it_says(at in 0_usize..160, to in any::<u8>()) {
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
