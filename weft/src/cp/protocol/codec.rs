//! Messages of `weft cp` to bytes and back, by docs/spec/cp.md.

use super::{
    About, Code, DecodeError, EXTENTS, Extent, FETCH_NAMES, Fetch, FileFlags, FileSpec,
    HOLE_BLOCKS, MAX_MESSAGE, MAX_PATH, MAX_TEXT, Message, Meta, Mtime, PACK_FILES, PACK_LEN,
    RelPath, RingAdvert, SLOT_LEN, SLOTS, What, attributes, pack, printable,
};

impl Message {
    /// Appends the message to `out`, granting `credits` more receives to the peer.
    pub fn encode(&self, credits: u16, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([self.kind(), 0]);
        out.extend(credits.to_be_bytes());
        out.extend([0; 4]);
        match self {
            Self::Start {
                receives,
                fetches,
                proof,
            } => {
                out.extend(receives.to_be_bytes());
                out.extend(u16::from(*fetches).to_be_bytes());
                out.extend([0; 4]);
                out.extend(proof);
            }
            Self::Ready {
                receives,
                attributes,
                ring,
                proof,
            } => {
                out.extend(receives.to_be_bytes());
                put_ring(out, ring);
                out.extend(u16::from(*attributes).to_be_bytes());
                out.extend([0; 2]);
                out.extend(proof);
            }
            Self::Refuse { code, text } => {
                out.extend((*code as u16).to_be_bytes());
                out.extend([0; 2]);
                out.extend(clip(text));
            }
            Self::Credit => {}
            Self::Done { cpu_us } => out.extend(cpu_us.to_be_bytes()),
            Self::Fetch(fetch) => put_fetch(out, fetch),
            Self::Notice { about, text } => {
                out.extend((*about as u16).to_be_bytes());
                out.extend([0; 2]);
                out.extend(clip(text));
            }
            Self::Pack { .. } | Self::Packed { .. } | Self::Ask { .. } | Self::Held { .. } => {
                self.encode_many(out);
            }
            Self::Sparse { .. } | Self::Hole { .. } => self.encode_holes(out),
            _ => self.encode_file(out),
        }
        let len = (out.len() - start) as u32;
        out[start + 4..start + 8].copy_from_slice(&len.to_be_bytes());
    }

    /// Encodes the description of one file, directory or link.
    fn encode_file(&self, out: &mut Vec<u8>) {
        match self {
            Self::File { id, spec } => {
                out.extend(id.to_be_bytes());
                out.extend(spec.flags.code().to_be_bytes());
                put_meta(out, &spec.meta);
                out.extend([0; 2]);
                out.extend(spec.size.to_be_bytes());
                out.extend(spec.room.to_be_bytes());
                out.extend(spec.source);
                spec.meta.put_attributes(out);
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
                meta,
                path,
            } => {
                out.extend(id.to_be_bytes());
                out.extend(u16::from(*leave).to_be_bytes());
                put_meta(out, meta);
                out.extend([0; 2]);
                meta.put_attributes(out);
                out.extend(path.as_bytes());
            }
            Self::Link {
                id,
                flags,
                meta,
                target,
                path,
            } => {
                out.extend(id.to_be_bytes());
                out.extend(flags.code().to_be_bytes());
                put_meta(out, meta);
                out.extend((target.len() as u16).to_be_bytes());
                meta.put_attributes(out);
                out.extend(target);
                out.extend(path.as_bytes());
            }
            Self::HardLink {
                id,
                flags,
                existing,
                path,
            } => {
                out.extend(id.to_be_bytes());
                out.extend(flags.code().to_be_bytes());
                out.extend((existing.as_bytes().len() as u16).to_be_bytes());
                out.extend(existing.as_bytes());
                out.extend(path.as_bytes());
            }
            _ => unreachable!("encoded by another function"),
        }
    }

    /// Encodes the descriptions of many files at once.
    fn encode_many(&self, out: &mut Vec<u8>) {
        match self {
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
            Self::Ask { names } => pack::put_names(out, names),
            Self::Held { held } => pack::put_held(out, held),
            _ => unreachable!("encoded by another function"),
        }
    }

    fn encode_holes(&self, out: &mut Vec<u8>) {
        match self {
            Self::Sparse {
                id,
                slot,
                index,
                len,
                digest,
                extents,
            } => {
                out.extend(id.to_be_bytes());
                out.extend(slot.to_be_bytes());
                out.extend((extents.len() as u16).to_be_bytes());
                out.extend(index.to_be_bytes());
                out.extend(len.to_be_bytes());
                out.extend([0; 4]);
                out.extend(digest);
                for extent in extents {
                    out.extend(extent.at.to_be_bytes());
                    out.extend(extent.len.to_be_bytes());
                }
            }
            Self::Hole {
                id,
                slot,
                index,
                blocks,
            } => {
                out.extend(id.to_be_bytes());
                out.extend(slot.to_be_bytes());
                out.extend([0; 2]);
                out.extend(index.to_be_bytes());
                out.extend(blocks.to_be_bytes());
                out.extend([0; 4]);
            }
            _ => unreachable!("encoded by another function"),
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
                let fetches = r.flags(1)? == 1;
                r.zero(4)?;
                Self::Start {
                    receives,
                    fetches,
                    proof: r.array()?,
                }
            }
            2 => {
                let receives = r.receives()?;
                let ring = r.ring()?;
                let attributes = r.flags(1)? == 1;
                r.zero(2)?;
                Self::Ready {
                    receives,
                    attributes,
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
            23 => Self::Fetch(r.fetch()?),
            24 => {
                let about = About::from_u16(r.u16()?)?;
                r.zero(2)?;
                let text = r.text()?;
                Self::Notice { about, text }
            }
            14 => Self::Credit,
            15 => Self::Done { cpu_us: r.u64()? },
            4..=13 | 22 => Self::decode_file(kind, &mut r)?,
            20 | 21 => Self::decode_holes(kind, &mut r)?,
            _ => Self::decode_many(kind, &mut r)?,
        };
        r.end()?;
        Ok((credits, message))
    }

    fn decode_file(kind: u8, r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match kind {
            4 => Self::File {
                id: r.u32()?,
                spec: r.spec()?,
            },
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
                let (mut meta, attributes) = r.meta()?;
                r.zero(2)?;
                meta.attributes = attributes::read(r, attributes)?;
                Self::Directory {
                    id,
                    leave,
                    meta,
                    path: r.path()?,
                }
            }
            13 => {
                let id = r.u32()?;
                let flags = FileFlags::from_u16(r.flags(0b0110)?);
                let (mut meta, attributes) = r.meta()?;
                let len = usize::from(r.u16()?);
                if len == 0 || len > MAX_PATH {
                    return Err(DecodeError::Value("link target"));
                }
                meta.attributes = attributes::read(r, attributes)?;
                let xattrs = meta.attributes.as_ref().map_or(0, |a| a.xattrs.len());
                if xattrs > 0 {
                    return Err(DecodeError::Value("attributes of a link"));
                }
                let target = r.bytes(len)?.to_vec();
                if target.contains(&0) {
                    return Err(DecodeError::Value("link target"));
                }
                Self::Link {
                    id,
                    flags,
                    meta,
                    target,
                    path: r.path()?,
                }
            }
            22 => {
                let id = r.u32()?;
                let flags = FileFlags::from_u16(r.flags(0b0110)?);
                let len = usize::from(r.u16()?);
                Self::HardLink {
                    id,
                    flags,
                    existing: RelPath::new(r.bytes(len)?).map_err(DecodeError::Path)?,
                    path: r.path()?,
                }
            }
            _ => return Err(DecodeError::Kind(kind)),
        })
    }

    fn decode_holes(kind: u8, r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let id = r.u32()?;
        let slot = r.u16()?;
        let extents = usize::from(r.u16()?);
        let index = r.u64()?;
        let len = r.u32()?;
        r.zero(4)?;
        if kind == 21 {
            if extents != 0 {
                return Err(DecodeError::Reserved);
            }
            if !(1..=HOLE_BLOCKS).contains(&len) {
                return Err(DecodeError::Value("blocks of a hole"));
            }
            return Ok(Self::Hole {
                id,
                slot,
                index,
                blocks: len,
            });
        }
        if len > *SLOT_LEN.end() {
            return Err(DecodeError::Value("block length"));
        }
        if !(1..=EXTENTS).contains(&extents) {
            return Err(DecodeError::Value("extents"));
        }
        let digest = r.array()?;
        let mut end = 0;
        let extent = |_| {
            let (at, piece) = (r.u32()?, r.u32()?);
            let next = at.checked_add(piece).filter(|&next| next <= len);
            // In order, with a hole between two.
            let fits = piece > 0 && (at > end || at == 0 && end == 0);
            match next.filter(|_| fits) {
                Some(next) => end = next,
                None => return Err(DecodeError::Value("extents")),
            }
            Ok(Extent { at, len: piece })
        };
        Ok(Self::Sparse {
            id,
            slot,
            index,
            len,
            digest,
            extents: (0..extents).map(extent).collect::<Result<_, _>>()?,
        })
    }

    fn decode_many(kind: u8, r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match kind {
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
                names: pack::names(r)?,
            },
            19 => Self::Held {
                held: pack::held(r)?,
            },
            _ => return Err(DecodeError::Kind(kind)),
        })
    }
}

/// A text cut to [`MAX_TEXT`] bytes at a character's border.
fn clip(text: &str) -> &[u8] {
    &text.as_bytes()[..text.floor_char_boundary(MAX_TEXT)]
}

fn put_ring(out: &mut Vec<u8>, ring: &RingAdvert) {
    out.extend(ring.slots.to_be_bytes());
    out.extend(ring.slot_len.to_be_bytes());
    out.extend(ring.addr.to_be_bytes());
    out.extend(ring.rkey.to_be_bytes());
}

fn put_fetch(out: &mut Vec<u8>, fetch: &Fetch) {
    let What {
        recursive,
        links,
        attributes,
    } = fetch.what;
    let bits = [fetch.update, recursive, links, attributes, fetch.dry_run];
    let bits = bits
        .iter()
        .rev()
        .fold(0, |all, &bit| all << 1 | u16::from(bit));
    out.extend(fetch.flags.code().to_be_bytes());
    out.extend(bits.to_be_bytes());
    out.extend((fetch.paths.len() as u16).to_be_bytes());
    put_ring(out, &fetch.ring);
    out.extend(fetch.limit_rate.to_be_bytes());
    for path in &fetch.paths {
        let path = path.as_ref().map_or(&[][..], RelPath::as_bytes);
        out.extend((path.len() as u16).to_be_bytes());
        out.extend(path);
    }
}

/// Puts a file's meta-data without its attributes, of which the length alone.
fn put_meta(out: &mut Vec<u8>, meta: &Meta) {
    out.extend((meta.mode as u16).to_be_bytes());
    put_mtime(out, meta.mtime);
    out.extend(meta.attributes_len().to_be_bytes());
}

pub(super) fn put_mtime(out: &mut Vec<u8>, t: Mtime) {
    out.extend(t.secs.to_be_bytes());
    out.extend(t.nanos.to_be_bytes());
}

/// The rest of a message.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn bytes(&mut self, n: usize) -> Result<&'a [u8], DecodeError> {
        let (head, tail) = self.0.split_at_checked(n).ok_or(DecodeError::Short)?;
        self.0 = tail;
        Ok(head)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (head, tail) = self.0.split_first_chunk().ok_or(DecodeError::Short)?;
        self.0 = tail;
        Ok(*head)
    }

    pub(super) fn u8(&mut self) -> Result<u8, DecodeError> {
        self.array().map(u8::from_be_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_be_bytes)
    }

    pub(super) fn zero(&mut self, n: usize) -> Result<(), DecodeError> {
        if self.bytes(n)?.iter().all(|&b| b == 0) {
            Ok(())
        } else {
            Err(DecodeError::Reserved)
        }
    }

    pub(super) fn flags(&mut self, known: u16) -> Result<u16, DecodeError> {
        let v = self.u16()?;
        if v & !known == 0 {
            Ok(v)
        } else {
            Err(DecodeError::Reserved)
        }
    }

    pub(super) fn mode(&mut self) -> Result<u32, DecodeError> {
        let mode = self.u16()?;
        if mode <= 0o7777 {
            Ok(u32::from(mode))
        } else {
            Err(DecodeError::Value("mode"))
        }
    }

    /// What a FILE says of its file.
    fn spec(&mut self) -> Result<FileSpec, DecodeError> {
        let flags = FileFlags::from_u16(self.flags(0b1111)?);
        let (mut meta, attributes) = self.meta()?;
        self.zero(2)?;
        let size = self.size()?;
        let room = self.u64()?;
        if room > size {
            return Err(DecodeError::Value("room"));
        }
        let source = self.array()?;
        meta.attributes = attributes::read(self, attributes)?;
        Ok(FileSpec {
            flags,
            meta,
            size,
            room,
            source,
            path: self.path()?,
        })
    }

    /// Fewer than 4 receives could not carry data, answers and credits at once.
    pub(super) fn size(&mut self) -> Result<u64, DecodeError> {
        let size = self.u64()?;
        if i64::try_from(size).is_err() {
            return Err(DecodeError::Value("size"));
        }
        Ok(size)
    }

    pub(super) fn receives(&mut self) -> Result<u16, DecodeError> {
        let n = self.u16()?;
        if (4..=4096).contains(&n) {
            Ok(n)
        } else {
            Err(DecodeError::Value("receives"))
        }
    }

    pub(super) fn pack_files(&mut self) -> Result<u16, DecodeError> {
        let n = self.u16()?;
        if (1..=PACK_FILES).contains(&n) {
            Ok(n)
        } else {
            Err(DecodeError::Value("files in a pack"))
        }
    }

    pub(super) fn mtime(&mut self) -> Result<Mtime, DecodeError> {
        let secs = i64::from_be_bytes(self.array()?);
        let nanos = self.u32()?;
        if nanos < 1_000_000_000 {
            Ok(Mtime { secs, nanos })
        } else {
            Err(DecodeError::Value("mtime"))
        }
    }

    /// A ring, or one without slots, which is zero.
    fn ring(&mut self) -> Result<RingAdvert, DecodeError> {
        let slots = self.u16()?;
        let slot_len = self.u32()?;
        let addr = self.u64()?;
        let rkey = self.u32()?;
        let ring = RingAdvert {
            slots,
            slot_len,
            rkey,
            addr,
        };
        if ring == RingAdvert::default() {
            return Ok(ring);
        }
        if !SLOTS.contains(&slots) {
            return Err(DecodeError::Value("slots"));
        }
        if !SLOT_LEN.contains(&slot_len) {
            return Err(DecodeError::Value("slot length"));
        }
        let len = u64::from(slots) * u64::from(slot_len);
        if addr.checked_add(len).is_none() {
            return Err(DecodeError::Value("address"));
        }
        Ok(ring)
    }

    fn fetch(&mut self) -> Result<Fetch, DecodeError> {
        let flags = FileFlags::from_u16(self.flags(0b1110)?);
        let bits = self.flags(0b1_1111)?;
        let count = usize::from(self.u16()?);
        if !(1..=FETCH_NAMES).contains(&count) {
            return Err(DecodeError::Value("names"));
        }
        let ring = self.ring()?;
        if ring.slots == 0 {
            return Err(DecodeError::Value("slots"));
        }
        let limit_rate = self.u64()?;
        let path = |_| {
            let len = usize::from(self.u16()?);
            let path = self.bytes(len)?;
            (len > 0)
                .then(|| RelPath::new(path).map_err(DecodeError::Path))
                .transpose()
        };
        let paths = (0..count).map(path).collect::<Result<_, _>>()?;
        Ok(Fetch {
            flags,
            update: bits & 1 != 0,
            dry_run: bits & 16 != 0,
            what: What {
                recursive: bits & 2 != 0,
                links: bits & 4 != 0,
                attributes: bits & 8 != 0,
            },
            ring,
            limit_rate,
            paths,
        })
    }

    /// The counterpart of [`put_meta`].
    fn meta(&mut self) -> Result<(Meta, u16), DecodeError> {
        let (mode, mtime) = (self.mode()?, self.mtime()?);
        let meta = Meta {
            mode,
            mtime,
            attributes: None,
        };
        Ok((meta, self.u16()?))
    }

    pub(super) fn text(&mut self) -> Result<String, DecodeError> {
        let rest = std::mem::take(&mut self.0);
        if rest.len() > MAX_TEXT {
            Err(DecodeError::Value("text"))
        } else {
            Ok(printable(rest))
        }
    }

    pub(super) fn path(&mut self) -> Result<RelPath, DecodeError> {
        RelPath::new(std::mem::take(&mut self.0)).map_err(DecodeError::Path)
    }

    pub(super) fn end(&self) -> Result<(), DecodeError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(DecodeError::Trailing)
        }
    }
}
