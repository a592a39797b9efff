//! The private data of requests and replies, and the messages of a live server (docs/spec/media.md).
//!
//! Requests and replies are encoded by postcard. What lies in the region of a live stream, and its notices, have integers in big-endian order at fixed
//! places. A decoder takes any bytes: lengths are checked before they are used, and the ranges that it returns are within the advertised region.

use serde::{Deserialize, Serialize};
use weft_verbs::RemoteAddr;

/// Begins every request and reply; its last byte is the version.
pub const MAGIC: [u8; 8] = *b"weftmed\x02";
/// Length of a [`Notice`] in bytes.
pub const NOTICE_LEN: usize = 24;
/// Length of a slot of a live index in bytes.
pub const SLOT_LEN: usize = 64;
/// Most slots of a live index.
pub const MAX_SLOTS: u32 = 1 << 16;
/// Messages of a viewer that may be unanswered.
pub const ASKS: u32 = 4;
/// Length of an [`Ask`] in bytes.
pub const ASK_LEN: usize = 16;
/// Length of the word of a slot of a movie in blocks, which has the generation of the block that is there.
pub const WORD_LEN: u64 = 8;
/// Shortest and longest block of a movie in bytes.
pub const BLOCK: std::ops::RangeInclusive<u32> = 64 << 10..=64 << 20;
/// Longest init segment of a live stream in bytes.
pub const MAX_INIT: u32 = 1 << 20;

/// Why private data or a message cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// It does not begin with [`MAGIC`].
    #[error("not the protocol of weft media")]
    Magic,
    /// Another version of the protocol.
    #[error("version {0} of the protocol, and this is version 2")]
    Version(u8),
    /// It ends too early, or is of no kind that there is.
    #[error("malformed")]
    Malformed,
    /// A field has a value that it cannot have.
    #[error("a wrong {0}")]
    Field(&'static str),
}

/// A viewer's request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// The list of titles.
    Catalogue,
    /// A movie or a live stream, by name.
    Title(String),
}

impl Request {
    /// Its private data, at most 413 bytes: it says that this viewer takes movies in blocks.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = encode(self);
        bytes.push(TAKES_BLOCKS);
        bytes
    }

    /// Reads private data.
    ///
    /// # Errors
    /// [`WireError`]; names are judged by [`crate::names::check`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        Self::decode_all(bytes).map(|(request, _)| request)
    }

    /// Reads private data, and whether the viewer takes movies in blocks.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_all(bytes: &[u8]) -> Result<(Self, bool), WireError> {
        let (request, rest) = decode(bytes)?;
        if let Self::Title(name) = &request {
            crate::names::check(name).map_err(|_| WireError::Field("name"))?;
        }
        Ok((request, rest.first() == Some(&TAKES_BLOCKS)))
    }
}

/// Follows the request of a viewer that takes movies in blocks. Others have zero bytes there, or nothing.
const TAKES_BLOCKS: u8 = 1;

fn encode(message: &impl Serialize) -> Vec<u8> {
    // It fails only where memory is short of room, which a vector is not.
    postcard::to_extend(message, MAGIC.to_vec()).unwrap_or_default()
}

/// The message, and what follows it: kernel peers append zero bytes.
fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<(T, &'a [u8]), WireError> {
    postcard::take_from_bytes(after_magic(bytes)?).map_err(|_| WireError::Malformed)
}

fn after_magic(bytes: &[u8]) -> Result<&[u8], WireError> {
    let (magic, rest) = bytes.split_at_checked(8).ok_or(WireError::Magic)?;
    match magic.split_at(7) {
        (name, &[version]) if name == &MAGIC[..7] && version == MAGIC[7] => Ok(rest),
        (name, &[version]) if name == &MAGIC[..7] => Err(WireError::Version(version)),
        _ => Err(WireError::Magic),
    }
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The request is not one of this version of the protocol, or malformed.
    Malformed,
    NoSuchTitle,
    /// The viewer's key is not authorised.
    UnknownPeer,
    /// The server's memory for movies is full with movies that are being watched.
    NoRoom,
    /// As many viewers as there may be.
    Full,
    /// The file cannot be read, or is being written.
    Unreadable,
    /// The live stream has not begun.
    NotYet,
}

impl Refusal {
    /// The reason in words, for the viewer's user.
    pub fn text(self) -> &'static str {
        match self {
            Self::Malformed => {
                "the server does not understand the request; use the same version of weft on both sides"
            }
            Self::NoSuchTitle => "the server has no such title",
            Self::UnknownPeer => "the server does not know this user or key",
            Self::NoRoom => {
                "the server has no memory left for this movie: all that it holds are being watched"
            }
            Self::Full => "the server has as many viewers as it may",
            Self::Unreadable => "the server cannot read the file, or somebody is writing it",
            Self::NotYet => "the live stream has not begun",
        }
    }

    /// The private data of a reply that refuses.
    pub fn encode(self) -> Vec<u8> {
        encode(&Err::<Grant, _>(self))
    }
}

/// The layout of a live region, in bytes from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    pub format: Format,
    /// Slots of the index, each of [`SLOT_LEN`] bytes, from the region's start on.
    pub slots: u32,
    /// The offset of the init segment.
    pub init_at: u64,
    /// Its length in bytes.
    pub init_len: u32,
    /// The offset of the data ring.
    pub data_at: u64,
    /// Its length in bytes.
    pub data_len: u64,
}

impl Layout {
    /// Whether it fits into a region of this length.
    fn check(&self, len: u64) -> Result<(), WireError> {
        let inside = |at: u64, n: u64| at.checked_add(n).is_some_and(|end| end <= len);
        if self.slots == 0
            || self.slots > MAX_SLOTS
            || self.init_len > MAX_INIT
            || !inside(0, u64::from(self.slots) * SLOT_LEN as u64)
            || !inside(self.init_at, self.init_len.into())
            || !inside(self.data_at, self.data_len)
            || self.data_len > u64::from(u32::MAX)
        {
            return Err(WireError::Field("layout"));
        }
        Ok(())
    }
}

/// The layout of a movie in blocks, in bytes from the region's start. At the start are the words of the slots, with the generation
/// of the block that is in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocks {
    /// Bytes of a block, and of a slot. The last block of a movie may be shorter.
    pub block: u32,
    /// Slots for blocks.
    pub slots: u32,
    /// The offset of the first slot.
    pub data_at: u64,
}

impl Blocks {
    /// Where a slot is.
    pub fn slot_at(&self, slot: u32) -> u64 {
        self.data_at + u64::from(slot) * u64::from(self.block)
    }

    /// Where the word of a slot is.
    pub fn word_at(slot: u32) -> u64 {
        u64::from(slot) * WORD_LEN
    }

    /// The length of the region.
    pub fn region_len(&self) -> u64 {
        self.slot_at(self.slots)
    }

    /// Whether the region fits into the address space behind this address.
    fn check(&self, addr: u64) -> Result<(), WireError> {
        let slots = u64::from(self.slots) * u64::from(self.block);
        let end = self.data_at.checked_add(slots);
        if !BLOCK.contains(&self.block)
            || self.slots == 0
            || self.slots > MAX_SLOTS
            || self.data_at < u64::from(self.slots) * WORD_LEN
            || end.and_then(|end| end.checked_add(addr)).is_none()
        {
            return Err(WireError::Field("layout"));
        }
        Ok(())
    }
}

/// The format of a live stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Format {
    /// Fragmented MP4 (ISO/IEC 14496-12 8.8).
    Mp4,
    /// MPEG-2 transport stream (ISO/IEC 13818-1).
    Ts,
}

/// The kind of a granted region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// A JSON text: [`crate::names::Title`]s.
    Catalogue,
    /// A whole file.
    Movie,
    /// An index and a ring of fragments.
    Live(Layout),
    /// Slots for the blocks of a file, which the viewer asks for by [`Ask`].
    Blocks(Blocks),
}

impl Content {
    /// Whether it is a file, which is read by its bytes.
    pub fn is_movie(&self) -> bool {
        matches!(self, Self::Movie | Self::Blocks(_))
    }
}

/// The buffer descriptor of a reply: what may be read, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub content: Content,
    /// Address and `STag` of its first byte.
    #[serde(with = "At")]
    pub at: RemoteAddr,
    /// Its length in bytes; for [`Content::Blocks`] that of the file.
    pub len: u64,
    /// Changes when the content does.
    pub version: [u8; 16],
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "RemoteAddr")]
struct At {
    addr: u64,
    rkey: u32,
}

impl Grant {
    /// The private data of a reply that grants.
    pub fn encode(&self) -> Vec<u8> {
        encode(&Ok::<_, Refusal>(self))
    }

    fn check(&self) -> Result<(), WireError> {
        let fits = || self.at.addr.checked_add(self.len).is_some();
        match &self.content {
            Content::Blocks(blocks) => blocks.check(self.at.addr),
            _ if !fits() => Err(WireError::Field("length")),
            Content::Live(layout) => layout.check(self.len),
            Content::Catalogue | Content::Movie => Ok(()),
        }
    }
}

/// Reads the private data of a reply.
///
/// # Errors
/// [`WireError`], also for a region that does not fit into the address space and for a layout that does not fit into its region.
pub fn decode_reply(bytes: &[u8]) -> Result<Result<Grant, Refusal>, WireError> {
    let (reply, _): (Result<Grant, Refusal>, _) = decode(bytes)?;
    if let Ok(grant) = &reply {
        grant.check()?;
    }
    Ok(reply)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |b| u32::from_be_bytes(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |b| u64::from_be_bytes(*b))
}

/// A slot of a live index: where a fragment is, and which. Slot `sequence % slots` holds it while it is there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Slot {
    /// The fragment's sequence number plus one; 0: none, or one that is being overwritten. Never used twice.
    pub generation: u64,
    /// Its offset in the data ring, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u32,
    /// Whether a decoder can begin with it.
    pub key: bool,
    /// Its decode time in microseconds of the stream.
    pub time: u64,
    /// Its duration in microseconds; 0: not known.
    pub duration: u32,
}

impl Slot {
    /// Its bytes without the generation, which comes first and is stored last.
    pub fn encode(&self) -> [u8; SLOT_LEN] {
        let mut out = [0; SLOT_LEN];
        out[..8].copy_from_slice(&self.generation.to_be_bytes());
        out[8..16].copy_from_slice(&self.offset.to_be_bytes());
        out[16..20].copy_from_slice(&self.len.to_be_bytes());
        out[20] = self.key.into();
        out[24..32].copy_from_slice(&self.time.to_be_bytes());
        out[32..36].copy_from_slice(&self.duration.to_be_bytes());
        out
    }

    /// Reads a slot. `None` when it is empty, or says what cannot be: a fragment outside the ring.
    pub fn decode(bytes: &[u8; SLOT_LEN], layout: &Layout) -> Option<Self> {
        let slot = Self {
            generation: u64_at(bytes, 0),
            offset: u64_at(bytes, 8),
            len: u32_at(bytes, 16),
            key: bytes[20] & 1 == 1,
            time: u64_at(bytes, 24),
            duration: u32_at(bytes, 32),
        };
        let end = slot.offset.checked_add(slot.len.into())?;
        (slot.generation != 0 && slot.len > 0 && end <= layout.data_len).then_some(slot)
    }

    /// The fragment's sequence number.
    pub fn sequence(&self) -> u64 {
        self.generation.saturating_sub(1)
    }
}

/// A live server's message to its viewers, by Send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notice {
    /// The newest fragment's generation.
    pub newest: u64,
    /// Whether the stream has ended with it.
    pub ended: bool,
    /// The server's clock when the fragment was complete, in microseconds since the epoch.
    pub at: u64,
}

impl Notice {
    pub fn encode(&self) -> [u8; NOTICE_LEN] {
        let mut out = [0; NOTICE_LEN];
        out[..8].copy_from_slice(&self.newest.to_be_bytes());
        out[8..16].copy_from_slice(&self.at.to_be_bytes());
        out[16] = self.ended.into();
        out
    }

    /// Reads a message.
    ///
    /// # Errors
    /// [`WireError::Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        if bytes.len() < NOTICE_LEN {
            return Err(WireError::Malformed);
        }
        Ok(Self {
            newest: u64_at(bytes, 0),
            at: u64_at(bytes, 8),
            ended: bytes[16] & 1 == 1,
        })
    }
}

/// A viewer's message that asks for a block of a movie, by Send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// The block's number: its place in the movie by the length of a block.
    pub block: u64,
    /// The viewer does not need it yet: it does not wait for a slot, and keeps its other leases.
    pub ahead: bool,
}

impl Ask {
    pub fn encode(self) -> [u8; ASK_LEN] {
        let mut out = [0; ASK_LEN];
        out[..8].copy_from_slice(&self.block.to_be_bytes());
        out[8] = self.ahead.into();
        out
    }

    /// Reads a message.
    ///
    /// # Errors
    /// [`WireError::Malformed`] for another length.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        if bytes.len() != ASK_LEN {
            return Err(WireError::Malformed);
        }
        Ok(Self {
            block: u64_at(bytes, 0),
            ahead: bytes[8] & 1 == 1,
        })
    }
}

/// Where a block is: its bytes are there as long as the word of the slot has this generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub slot: u32,
    /// Not 0, and never used twice.
    pub generation: u64,
}

/// Why a block is not granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Denial {
    /// The movie has no such block, or the message is malformed.
    Outside = 0,
    /// All slots are in use, for longer than a viewer waits; now, if it asked ahead.
    Busy = 1,
    /// The file has changed, and this block was not in memory.
    Changed = 2,
    /// The file cannot be read.
    Unreadable = 3,
}

impl Denial {
    /// The reason in words, for the viewer's user.
    pub fn text(self) -> &'static str {
        match self {
            Self::Outside => "the server says that the movie has no such block",
            Self::Busy => {
                "the server has no memory for this part of the movie: other viewers read other parts; try again later, or give it more by --memory"
            }
            Self::Changed => {
                "the file was changed on the server while it was being watched; the same command again gets the new one"
            }
            Self::Unreadable => "the server cannot read the file",
        }
    }

    fn of(byte: u8) -> Result<Self, WireError> {
        let all = [Self::Outside, Self::Busy, Self::Changed, Self::Unreadable];
        let found = all.into_iter().find(|denial| *denial as u8 == byte);
        found.ok_or(WireError::Malformed)
    }
}

/// The server's answer to an [`Ask`], by Send; as long as a [`Notice`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    pub block: u64,
    pub place: Result<Place, Denial>,
}

impl Answer {
    pub fn encode(&self) -> [u8; NOTICE_LEN] {
        let mut out = [0; NOTICE_LEN];
        out[8..16].copy_from_slice(&self.block.to_be_bytes());
        match self.place {
            Ok(place) => {
                out[..8].copy_from_slice(&place.generation.to_be_bytes());
                out[16..20].copy_from_slice(&place.slot.to_be_bytes());
            }
            Err(denial) => out[20] = denial as u8,
        }
        out
    }

    /// Reads a message.
    ///
    /// # Errors
    /// [`WireError::Malformed`], also for a slot that the layout does not have.
    pub fn decode(bytes: &[u8], blocks: &Blocks) -> Result<Self, WireError> {
        if bytes.len() < NOTICE_LEN {
            return Err(WireError::Malformed);
        }
        let place = Place {
            slot: u32_at(bytes, 16),
            generation: u64_at(bytes, 0),
        };
        let place = if place.generation == 0 {
            Err(Denial::of(bytes[20])?)
        } else if place.slot < blocks.slots {
            Ok(place)
        } else {
            return Err(WireError::Malformed);
        };
        Ok(Self {
            block: u64_at(bytes, 8),
            place,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const IN_BLOCKS: Blocks = Blocks {
        block: 1 << 20,
        slots: 8,
        data_at: 4096,
    };

    fn in_blocks(blocks: Blocks) -> Grant {
        Grant {
            content: Content::Blocks(blocks),
            len: 1 << 50,
            ..live()
        }
    }

    #[test]
    fn a_viewer_that_takes_blocks_says_so_behind_its_request() {
        let request = Request::Title("a.mp4".into());
        let bytes = request.encode();
        let (said, rest) = bytes.split_at(bytes.len() - 1);
        assert_eq!(rest, [TAKES_BLOCKS]);
        for (rest, takes) in [(&[1_u8][..], true), (&[], false), (&[0; 60], false)] {
            let bytes = [said, rest].concat();
            assert_eq!(Request::decode_all(&bytes), Ok((request.clone(), takes)));
        }
    }

    #[test]
    fn movies_in_blocks_fit_their_regions() {
        let good = in_blocks(IN_BLOCKS);
        assert_eq!(decode_reply(&good.encode()), Ok(Ok(good)));
        for bad in [
            Blocks {
                block: 0,
                ..IN_BLOCKS
            },
            Blocks {
                block: u32::MAX,
                ..IN_BLOCKS
            },
            Blocks {
                slots: 0,
                ..IN_BLOCKS
            },
            Blocks {
                slots: MAX_SLOTS + 1,
                data_at: 1 << 30,
                ..IN_BLOCKS
            },
            Blocks {
                data_at: 63,
                ..IN_BLOCKS
            },
            Blocks {
                data_at: u64::MAX - 100,
                ..IN_BLOCKS
            },
        ] {
            let reply = decode_reply(&in_blocks(bad).encode());
            assert_eq!(reply, Err(WireError::Field("layout")), "{bad:?}");
        }
        let place = Place {
            slot: 7,
            generation: 1 << 40,
        };
        for place in [Ok(place), Err(Denial::Outside), Err(Denial::Unreadable)] {
            let answer = Answer { block: 77, place };
            assert_eq!(Answer::decode(&answer.encode(), &IN_BLOCKS), Ok(answer));
        }
        let far = Answer {
            block: 0,
            place: Ok(Place { slot: 8, ..place }),
        };
        let decoded = Answer::decode(&far.encode(), &IN_BLOCKS);
        assert_eq!(decoded, Err(WireError::Malformed));
        let mut unknown = Answer {
            block: 0,
            place: Err(Denial::Busy),
        }
        .encode();
        unknown[20] = 9;
        assert_eq!(
            Answer::decode(&unknown, &IN_BLOCKS),
            Err(WireError::Malformed)
        );
        assert_eq!(
            Answer::decode(&unknown[..23], &IN_BLOCKS),
            Err(WireError::Malformed)
        );
        for ahead in [true, false] {
            let ask = Ask { block: 5, ahead };
            assert_eq!(Ask::decode(&ask.encode()), Ok(ask));
        }
        for len in [0, 8, 15, 17] {
            assert_eq!(Ask::decode(&[0; 20][..len]), Err(WireError::Malformed));
        }
    }

    fn live() -> Grant {
        Grant {
            content: Content::Live(Layout {
                format: Format::Ts,
                slots: 4,
                init_at: 256,
                init_len: 10,
                data_at: 4096,
                data_len: 8192,
            }),
            at: RemoteAddr { addr: 0, rkey: 77 },
            len: 12_288,
            version: [9; 16],
        }
    }

    #[test]
    fn requests_and_replies_come_back() {
        for request in [Request::Catalogue, Request::Title("a/b c.mp4".into())] {
            let mut bytes = request.encode();
            bytes.extend([0; 60]);
            assert_eq!(Request::decode(&bytes), Ok(request));
        }
        let grants = [
            live(),
            Grant {
                content: Content::Movie,
                ..live()
            },
        ];
        for grant in grants {
            assert_eq!(decode_reply(&grant.encode()), Ok(Ok(grant)));
        }
        let mut refusal = Refusal::NotYet.encode();
        assert_eq!(decode_reply(&refusal), Ok(Err(Refusal::NotYet)));
        // Of a later version, perhaps.
        *refusal.last_mut().unwrap() += 1;
        assert_eq!(decode_reply(&refusal), Err(WireError::Malformed));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let title = |name: &str| Request::decode(&Request::Title(name.into()).encode());
        for name in [
            "",
            "/etc/passwd",
            "../x",
            "a/../b",
            "a//b",
            ".hidden",
            "a/.b",
            "x\0y",
            "a\nb",
        ] {
            assert_eq!(title(name), Err(WireError::Field("name")), "{name:?}");
        }
        assert_eq!(
            title(&"x".repeat(crate::names::MAX_NAME + 1)),
            Err(WireError::Field("name"))
        );
        assert_eq!(Request::decode(b"GET / HTTP/1.1"), Err(WireError::Magic));
        let mut later = Request::Catalogue.encode();
        later[7] = 3;
        assert_eq!(Request::decode(&later), Err(WireError::Version(3)));
        let mut long = Request::Title("abc".into()).encode();
        long[9] = 200;
        assert_eq!(Request::decode(&long), Err(WireError::Malformed));

        let Content::Live(good) = live().content else {
            unreachable!()
        };
        let bad = [
            Layout { slots: 0, ..good },
            Layout {
                slots: MAX_SLOTS + 1,
                ..good
            },
            Layout { slots: 200, ..good },
            Layout {
                init_at: u64::MAX,
                ..good
            },
            Layout {
                init_len: MAX_INIT + 1,
                ..good
            },
            Layout {
                data_at: 8192,
                ..good
            },
            Layout {
                data_len: u64::MAX,
                ..good
            },
        ];
        for layout in bad {
            let grant = Grant {
                content: Content::Live(layout),
                ..live()
            };
            assert_eq!(
                decode_reply(&grant.encode()),
                Err(WireError::Field("layout"))
            );
        }
        let grant = Grant {
            at: RemoteAddr { addr: 2, rkey: 1 },
            len: u64::MAX,
            content: Content::Movie,
            ..live()
        };
        assert_eq!(
            decode_reply(&grant.encode()),
            Err(WireError::Field("length"))
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_safe(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0_usize..100) {
            let _ = Request::decode(&bytes);
            let mut reply = live().encode();
            for (at, byte) in reply.iter_mut().zip(&bytes).skip(8 + cut % 30) {
                *at ^= byte;
            }
            reply.truncate(100 - cut);
            if let Ok(Ok(Grant { content: Content::Live(layout), len, .. })) = decode_reply(&reply) {
                prop_assert!(layout.data_at + layout.data_len <= len);
                let mut slot = [0; SLOT_LEN];
                slot.iter_mut().zip(&bytes).for_each(|(to, from)| *to = *from);
                if let Some(slot) = Slot::decode(&slot, &layout) {
                    prop_assert!(slot.offset + u64::from(slot.len) <= layout.data_len);
                }
            }
        }
    }
}
