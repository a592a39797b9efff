//! How a sender sends the content of files: small ones in packs, others in blocks.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use super::{FileError, Packing, SendError, Sending};
use crate::cp::attributes;
use crate::cp::digest::{BlockList, digest, zeros};
use crate::cp::link::{LinkError, Parcel, for_extents, read_slot, slot_digest};
use crate::cp::opener::Opener;
use crate::cp::protocol::{
    Digest, EXTENTS, Extent, FileFlags, FileSpec, HOLE_BLOCKS, Message, PACK_FILES, PACK_LEN,
    WINDOW, pack,
};
use crate::cp::source::Source;
use crate::cp::walk::{Entry, FileId, id_of, meta_of};

/// The longest file that is sent in a pack with others.
const SMALL: u64 = 32 << 10;

impl Sending<'_> {
    /// Adds a small file to the pack. One that cannot be read whole leaves no trace in it.
    fn pack(
        &mut self,
        entry: &Entry,
        source: &Source,
        spec: &FileSpec,
        is_whole: bool,
    ) -> Result<(), FileError> {
        let size = spec.size as u32;
        let Some(record) = pack::record(spec) else {
            return Err(FileError::Here("its name is too long".into()));
        };
        let len = record.len() as u32 + size;
        let room = self.ring.slot_len.min(PACK_LEN);
        if self
            .pack
            .as_ref()
            .is_some_and(|pack| pack.len + len > room || pack.count == PACK_FILES)
        {
            self.end_pack()?;
        }
        let mut pack = match self.pack.take() {
            Some(pack) => pack,
            None => Packing {
                slot: self.free_slot()?,
                first: self.next_id,
                count: 0,
                len: 0,
                content: 0,
            },
        };
        let at = pack.len;
        let read = self
            .link
            .slot_from_buf(pack.slot, at, &record)
            .map_err(|e| e.to_string())
            .and_then(|()| self.read(pack.slot, at + record.len() as u32, &source.file, 0, size))
            .and_then(|()| source.check_unchanged());
        if read.is_ok() {
            (pack.len, pack.content) = (at + len, pack.content + size);
            pack.count += 1;
        }
        self.pack = Some(pack);
        read.map_err(FileError::Here)?;
        let id = self.open(entry, true, false);
        if let Some(open) = self.open.get_mut(&id) {
            open.bytes = size.into();
            open.is_partial |= !is_whole;
        }
        Ok(())
    }

    /// Sends the pack, if there is one.
    pub(super) fn end_pack(&mut self) -> Result<(), SendError> {
        let Some(pack) = self.pack.take() else {
            return Ok(());
        };
        let Packing {
            slot,
            first,
            count,
            len,
            content,
        } = pack;
        if count == 0 {
            self.free.push(slot);
            return Ok(());
        }
        while self.window >= WINDOW {
            self.pump()?;
        }
        self.window += 1;
        let last = first.wrapping_add(u32::from(count) - 1);
        match self.open.get_mut(&last) {
            Some(open) => open.last = true,
            None => return Err(LinkError::Violation("a result for nothing".into()).into()),
        }
        let digest = slot_digest(self.link, slot, len)
            .map_err(|e| LinkError::Local(format!("cannot read a slot: {e}")))?;
        self.in_use[usize::from(slot)] = Some(content.into());
        self.queue(Parcel::Block {
            slot,
            len,
            message: Message::Pack {
                id: first,
                slot,
                count,
                len,
                digest,
            },
        })?;
        self.flush()
    }

    fn read(&self, slot: u16, at: u32, file: &File, offset: u64, len: u32) -> Result<(), String> {
        read_slot(self.link, slot, at, file.as_fd(), offset, len).map_err(|e| {
            if e.kind() == std::io::ErrorKind::UnexpectedEof {
                "became shorter while it was read; send it again".into()
            } else {
                e.to_string()
            }
        })
    }

    /// The description of a file, and whether it has all of the file's attributes that are to be sent.
    fn spec(&self, entry: &Entry, source: &Source, no_wait: bool) -> (FileSpec, bool) {
        let stat = &source.stat;
        let mut meta = self.sent_meta(&meta_of(stat));
        let mut is_whole = true;
        if self.gives_attributes {
            let (attributes, whole) = attributes::of(&source.file, stat);
            meta.attributes = Some(attributes);
            is_whole = whole;
        }
        let spec = FileSpec {
            flags: FileFlags {
                no_wait,
                ..self.options.flags
            },
            meta,
            size: source.size,
            room: source.room(),
            source: identity(id_of(stat)),
            path: entry.path.clone(),
        };
        (spec, is_whole)
    }

    pub(super) fn file(&mut self, entry: &Entry, opener: &mut Opener<'_>) -> Result<(), FileError> {
        let source = opener
            .open(entry)
            .and_then(|(file, stat)| Source::new(file, stat))
            .map_err(FileError::Here)?;
        let size = source.size;
        let block_len = u64::from(self.ring.slot_len);
        let room = block_len.min(PACK_LEN.into());
        let no_wait = size <= block_len;
        let (spec, is_whole) = self.spec(entry, &source, no_wait);
        if size <= SMALL && !source.is_sparse && pack::record_len(&spec) <= room {
            return self.pack(entry, &source, &spec, is_whole);
        }
        let id = self.begin(entry, true)?;
        if let Some(open) = self.open.get_mut(&id) {
            open.is_partial |= !is_whole;
        }
        self.post(Message::File { id, spec })?;
        let mut list = BlockList::default();
        let sent = self
            .blocks(id, &source, no_wait, &mut list)
            .and_then(|()| source.check_unchanged().map_err(FileError::Here));
        match sent {
            Ok(()) => self.post(Message::End {
                id,
                digest: list.complete(size),
            })?,
            Err(FileError::Here(why)) => {
                // The receiver's RESULT will say that we gave it up; we know better why.
                if let Some(open) = self.open.get_mut(&id) {
                    open.counted = false;
                }
                self.post(Message::Abandon { id })?;
                return Err(FileError::Here(why));
            }
            Err(FileError::There) => {
                self.post(Message::Abandon { id })?;
                return Err(FileError::There);
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    fn blocks(
        &mut self,
        id: u32,
        source: &Source,
        no_wait: bool,
        list: &mut BlockList,
    ) -> Result<(), FileError> {
        let block_len = u64::from(self.ring.slot_len);
        let (file, size) = (&source.file, source.size);
        let total = size.div_ceil(block_len);
        if !no_wait {
            let (blocks, theirs) = loop {
                match self.offer.take() {
                    Some((of, blocks, digest)) if of == id && blocks <= total => {
                        break (blocks, digest);
                    }
                    Some(_) => {
                        return Err(SendError::from(LinkError::Violation(
                            "an offer that was not asked for".into(),
                        ))
                        .into());
                    }
                    None if !self.open.contains_key(&id) => return Err(FileError::Declined),
                    None => self.pump()?,
                }
            };
            if blocks > 0 {
                self.read_prefix(file, blocks, size, list)?;
                if list.prefix() == theirs {
                    let held = size.min(blocks * block_len);
                    self.report.held += held;
                    self.progress.advance(held, true);
                } else {
                    *list = BlockList::default();
                }
            }
            self.post(Message::From {
                id,
                block: list.blocks(),
            })?;
        }
        while list.blocks() < total {
            let slot = self.free_slot()?;
            if !self.open.contains_key(&id) {
                self.free.push(slot);
                return Err(FileError::There);
            }
            self.block(id, source, slot, list)?;
        }
        Ok(())
    }

    /// Sends the next block, or the next hole.
    fn block(
        &mut self,
        id: u32,
        source: &Source,
        slot: u16,
        list: &mut BlockList,
    ) -> Result<(), FileError> {
        let (index, block_len) = (list.blocks(), u64::from(self.ring.slot_len));
        let at = index * block_len;
        let len = block_len.min(source.size - at) as u32;
        let extents = source.is_sparse.then(|| extents(source, at, len)).flatten();
        if extents.as_ref().is_some_and(Vec::is_empty) {
            return self.hole(id, source, slot, list);
        }
        let mut filled = 0;
        let whole = [Extent { at: 0, len }];
        for extent in extents.as_deref().unwrap_or(&whole) {
            let from = at + u64::from(extent.at);
            if let Err(why) = self.read(slot, filled, &source.file, from, extent.len) {
                self.free.push(slot);
                return Err(FileError::Here(why));
            }
            filled += extent.len;
        }
        let digest = match &extents {
            Some(extents) => for_extents(self.link, slot, len, extents, |_, _| Ok(())),
            None => slot_digest(self.link, slot, len),
        };
        let digest = digest.map_err(|e| FileError::Here(e.to_string()))?;
        list.push(&digest);
        self.in_use[usize::from(slot)] = Some(len.into());
        self.report.holes += u64::from(len - filled);
        if let Some(open) = self.open.get_mut(&id) {
            open.bytes += u64::from(filled);
        }
        let message = match extents {
            Some(extents) => Message::Sparse {
                id,
                slot,
                index,
                len,
                digest,
                extents,
            },
            None => Message::Block {
                id,
                slot,
                index,
                len,
                digest,
            },
        };
        let len = filled;
        self.queue(Parcel::Block { slot, len, message })?;
        Ok(())
    }

    /// Tells of the blocks up to the next byte that is no hole.
    fn hole(
        &mut self,
        id: u32,
        source: &Source,
        slot: u16,
        list: &mut BlockList,
    ) -> Result<(), FileError> {
        let (index, block_len) = (list.blocks(), u64::from(self.ring.slot_len));
        let at = index * block_len;
        let end = match source.data(at) {
            Some((data, _)) => data / block_len,
            None => source.size.div_ceil(block_len),
        };
        // Another process may have filled it since: the check for changes at the end says so.
        let blocks = end.saturating_sub(index).clamp(1, HOLE_BLOCKS.into()) as u32;
        let whole = zeros(self.ring.slot_len);
        for block in index..index + u64::from(blocks) {
            let len = block_len.min(source.size - block * block_len);
            if len == block_len {
                list.push(&whole);
            } else {
                list.push(&zeros(len as u32));
            }
        }
        let bytes = (u64::from(blocks) * block_len).min(source.size - at);
        self.in_use[usize::from(slot)] = Some(bytes);
        self.report.holes += bytes;
        self.post(Message::Hole {
            id,
            slot,
            index,
            blocks,
        })?;
        Ok(())
    }

    /// Adds the digests of the first `blocks` blocks of the file.
    fn read_prefix(
        &mut self,
        file: &File,
        blocks: u64,
        size: u64,
        list: &mut BlockList,
    ) -> Result<(), FileError> {
        let block_len = u64::from(self.ring.slot_len);
        let mut buf = vec![0; self.ring.slot_len as usize];
        while list.blocks() < blocks {
            self.drain()?;
            let at = list.blocks() * block_len;
            let len = block_len.min(size - at) as usize;
            file.read_exact_at(&mut buf[..len], at)
                .map_err(|e| FileError::Here(e.to_string()))?;
            list.push(&digest(&buf[..len]));
        }
        Ok(())
    }
}

/// The pieces of a block that are no holes; `None` for a block without holes, or with too many.
fn extents(source: &Source, at: u64, len: u32) -> Option<Vec<Extent>> {
    let end = at + u64::from(len);
    let (mut extents, mut from) = (Vec::<Extent>::new(), at);
    while let Some((begin, next)) = source.data(from)
        && begin < end
    {
        let next = next.min(end);
        let (place, len) = ((begin - at) as u32, (next - begin) as u32);
        match extents.last_mut() {
            // What was a hole a moment ago is none any more.
            Some(last) if last.at + last.len == place => last.len += len,
            _ => extents.push(Extent { at: place, len }),
        }
        if extents.len() > EXTENTS {
            return None;
        }
        from = next;
    }
    let is_whole = matches!(extents[..], [Extent { at: 0, len: all }] if all == len);
    (!is_whole).then_some(extents)
}

static MACHINE: LazyLock<Vec<u8>> =
    LazyLock::new(|| std::fs::read("/etc/machine-id").unwrap_or_default());

/// The identity of a source: this machine, the file system and the inode.
fn identity((dev, ino): FileId) -> Digest {
    let mut bytes = MACHINE.clone();
    bytes.extend(dev.to_be_bytes());
    bytes.extend(ino.to_be_bytes());
    digest(&bytes)
}
