//! Messages of `weft cp` to bytes and back, and what holds of a message that has been read: docs/spec/cp.md.

use serde::Deserialize;

use super::{
    ASK_NAMES, Attributes, DecodeError, EXTENTS, Extent, FETCH_NAMES, Fetch, FileSpec, HEADER_LEN,
    HOLE_BLOCKS, MAX_MESSAGE, MAX_PATH, Message, Meta, Mtime, PACK_FILES, PACK_LEN, RingAdvert,
    SLOT_LEN, SLOTS,
};

impl Message {
    /// Appends the message to `out`, granting `credits` more receives to the peer.
    pub fn encode(&self, credits: u16, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend(credits.to_be_bytes());
        out.extend([0; 6]);
        *out = postcard::to_extend(self, std::mem::take(out)).expect("a vector has room");
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
        let (header, body) = bytes.split_first_chunk().ok_or(DecodeError::Short)?;
        if Self::length(*header)? != bytes.len() {
            return Err(DecodeError::Length);
        }
        if header[2..4] != [0; 2] {
            return Err(DecodeError::Reserved);
        }
        let message: Self = whole(body)?;
        message.check()?;
        Ok((u16::from_be_bytes([header[0], header[1]]), message))
    }

    /// What the types do not say already.
    fn check(&self) -> Result<(), DecodeError> {
        match self {
            Self::Start { receives, .. } => check_receives(*receives),
            Self::Ready { receives, ring, .. } => check_receives(*receives).and(ring.check()),
            Self::File { spec, .. } => spec.check(),
            Self::Block { len, .. } => bounds("block length", (1..=*SLOT_LEN.end()).contains(len)),
            Self::Sparse { len, extents, .. } => check_extents(*len, extents),
            Self::Hole { blocks, .. } => {
                bounds("blocks of a hole", (1..=HOLE_BLOCKS).contains(blocks))
            }
            Self::Directory { meta, .. } => meta.check(),
            Self::Link {
                flags,
                meta,
                target,
                ..
            } => {
                let xattrs = meta.attributes.as_ref().map_or(0, |a| a.xattrs.len());
                bounds("flags", !flags.no_wait && !flags.sync)?;
                bounds("attributes of a link", xattrs == 0)?;
                bounds("link target", (1..=MAX_PATH).contains(&target.len()))?;
                bounds("link target", !target.contains(&0))?;
                meta.check()
            }
            Self::HardLink { flags, .. } => bounds("flags", !flags.no_wait && !flags.sync),
            Self::Pack { count, len, .. } => {
                bounds("files in a pack", (1..=PACK_FILES).contains(count))?;
                bounds("pack length", *len <= PACK_LEN)
            }
            Self::Packed { count, .. } => {
                bounds("files in a pack", (1..=PACK_FILES).contains(count))
            }
            Self::Ask { names } => {
                bounds("names", (1..=ASK_NAMES).contains(&names.len()))?;
                names
                    .iter()
                    .filter_map(|name| name.version)
                    .try_for_each(|version| {
                        check_size(version.size).and_then(|()| version.mtime.check())
                    })
            }
            Self::Held { held } => bounds("names", (1..=ASK_NAMES).contains(&held.len())),
            Self::Fetch(fetch) => fetch.check(),
            Self::Refuse { .. }
            | Self::Offer { .. }
            | Self::From { .. }
            | Self::Free { .. }
            | Self::End { .. }
            | Self::Abandon { .. }
            | Self::Result { .. }
            | Self::Notice { .. }
            | Self::Credit
            | Self::Done { .. } => Ok(()),
        }
    }
}

/// Reads a value that takes all the bytes.
fn whole<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, DecodeError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err(DecodeError::Trailing),
        Err(_) => Err(DecodeError::Malformed),
    }
}

fn bounds(what: &'static str, is_right: bool) -> Result<(), DecodeError> {
    if is_right {
        Ok(())
    } else {
        Err(DecodeError::Value(what))
    }
}

/// Fewer than 4 receives could not carry data, answers and credits at once.
fn check_receives(receives: u16) -> Result<(), DecodeError> {
    bounds("receives", (4..=4096).contains(&receives))
}

fn check_size(size: u64) -> Result<(), DecodeError> {
    bounds("size", i64::try_from(size).is_ok())
}

/// They are in order, with a hole between two.
fn check_extents(len: u32, extents: &[Extent]) -> Result<(), DecodeError> {
    bounds("block length", len <= *SLOT_LEN.end())?;
    bounds("extents", (1..=EXTENTS).contains(&extents.len()))?;
    let mut end = 0;
    for extent in extents {
        let next = extent.at.checked_add(extent.len);
        let next = next.filter(|&next| next <= len && extent.len > 0);
        let is_apart = extent.at > end || extent.at == 0 && end == 0;
        end = next
            .filter(|_| is_apart)
            .ok_or(DecodeError::Value("extents"))?;
    }
    Ok(())
}

impl FileSpec {
    /// Whether its values can be.
    pub(super) fn check(&self) -> Result<(), DecodeError> {
        check_size(self.size)?;
        bounds("room", self.room <= self.size)?;
        self.meta.check()
    }
}

impl Meta {
    fn check(&self) -> Result<(), DecodeError> {
        bounds("mode", self.mode <= 0o7777)?;
        self.mtime.check()?;
        self.attributes.iter().try_for_each(Attributes::check)
    }
}

impl Mtime {
    fn check(self) -> Result<(), DecodeError> {
        bounds("mtime", self.nanos < 1_000_000_000)
    }
}

impl RingAdvert {
    /// A ring, or one without slots, which is zero.
    fn check(self) -> Result<(), DecodeError> {
        if self == Self::default() {
            return Ok(());
        }
        bounds("slots", SLOTS.contains(&self.slots))?;
        bounds("slot length", SLOT_LEN.contains(&self.slot_len))?;
        let len = u64::from(self.slots) * u64::from(self.slot_len);
        bounds("address", self.addr.checked_add(len).is_some())
    }
}

impl Fetch {
    fn check(&self) -> Result<(), DecodeError> {
        bounds("flags", !self.flags.no_wait)?;
        bounds("names", (1..=FETCH_NAMES).contains(&self.paths.len()))?;
        bounds("slots", self.ring.slots > 0)?;
        self.ring.check()
    }
}

/// A text of at most [`super::MAX_TEXT`] bytes: cut at a character's border where it is written, and printable where it is read.
pub(super) mod text {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::cp::protocol::{MAX_TEXT, printable};

    pub(crate) fn serialize<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
        text[..text.floor_char_boundary(MAX_TEXT)].serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
        let bytes = <&[u8]>::deserialize(from)?;
        if bytes.len() > MAX_TEXT {
            return Err(D::Error::custom("a long text"));
        }
        Ok(printable(bytes))
    }
}
