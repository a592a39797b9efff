//! Memory that a program opens to its peer at an offset, and writes into such memory of the peer.

use std::cell::Cell;
use std::collections::VecDeque;

use rustix::io::Errno;
use weft_sockets::error::errno;
use weft_sockets::lock::lock;
use weft_sockets::memory::{Source, total};
use weft_sockets::stream::Stream as _;
use weft_sockets::wait::Wait;
use weft_verbs::{Access, Mr, RawMemory};

use super::{Conn, Core, Sender};
use crate::machine::{Endpoint, Write};
use crate::wire::{Buffer, ENTRY_LEN, MAP_LEN, Message, key_and_len};

/// The program's mappings.
#[derive(Default)]
pub(super) struct Maps {
    list: Vec<Map>,
    /// Changed entries of the peer's table that were not sent to it: index, offset, place.
    updates: VecDeque<(u16, u64, Buffer)>,
}

struct Map {
    /// The address of the memory in the process, by which the program names it.
    addr: usize,
    region: Mr,
    /// Its entry in the peer's table; without one, the memory is not open to the peer.
    index: Option<u16>,
}

impl Conn {
    /// Opens memory to the peer at an offset (`None`: at its address), or, without `writable`, only registers it. The peer knows of it when
    /// it has received the next bytes that are sent after this call.
    ///
    /// `ENOTCONN`; `ENOMEM` if the peer's table is full.
    /// `ENOTCONN`; `ENOMEM` when the peer's table is full.
    pub(crate) fn map(
        &self,
        memory: &RawMemory,
        writable: bool,
        offset: Option<u64>,
    ) -> Result<u64, Errno> {
        let mut sender = lock(&self.sender);
        self.with(|core| Self::no_send(core))?;
        let addr = memory.as_ptr() as usize;
        let offset = offset.unwrap_or(addr as u64);
        let entries = self.with(|core| core.machine.as_ref().map_or(0, Endpoint::peer_maps));
        let maps = &mut sender.maps;
        let taken = |index: u16| maps.list.iter().any(|map| map.index == Some(index));
        let index = if writable {
            Some((0..entries).find(|i| !taken(*i)).ok_or(Errno::NOMEM)?)
        } else {
            None
        };
        let mut access = Access::LOCAL_WRITE;
        access.set(Access::REMOTE_WRITE, writable);
        let region = self.pd.reg_raw(memory, access).map_err(|e| errno(&e))?;
        if let Some(index) = index {
            let len = u32::try_from(region.len()).map_err(|_| Errno::INVAL)?;
            let place = Buffer {
                addr: region.addr(),
                key: region.rkey(),
                len,
            };
            maps.updates.push_back((index, offset, place));
        }
        maps.list.push(Map {
            addr,
            region,
            index,
        });
        // Entries that cannot be sent now are sent before the next bytes.
        let _ = self.send_maps(&mut sender, Wait::Not);
        Ok(offset)
    }

    /// Close memory to the peer again. One that is in it is waited for; it loses the connection after three seconds.
    ///
    /// # Errors
    /// `EINVAL` for memory that is not mapped.
    pub(crate) fn unmap(&self, addr: usize, len: usize) -> Result<(), Errno> {
        let mut sender = lock(&self.sender);
        let maps = &mut sender.maps;
        let place = maps
            .list
            .iter()
            .position(|map| map.addr == addr && map.region.len() == len)
            .ok_or(Errno::INVAL)?;
        let map = maps.list.swap_remove(place);
        if let Some(index) = map.index {
            maps.updates.retain(|(of, ..)| *of != index);
            maps.updates.push_back((index, 0, Buffer::default()));
            let _ = self.send_maps(&mut sender, Wait::Not);
        }
        drop(sender);
        // A peer that is in the memory is waited for: not under the lock.
        drop(map);
        Ok(())
    }

    /// Close all memory to the peer: it is the program's own again from the return on.
    pub(super) fn unmap_all(&self) {
        let maps = std::mem::take(&mut lock(&self.sender).maps);
        drop(maps);
    }

    /// Sends changed entries to the peer.
    pub(super) fn send_maps(&self, sender: &mut Sender, wait: Wait) -> Result<(), Errno> {
        while let Some(&(index, offset, place)) = sender.maps.updates.front() {
            let (order, _) = *self.peer.get().ok_or(Errno::NOTCONN)?;
            let bytes = order.map(offset, place);
            let message = |_| Some(Message::Map(u32::from(index)));
            let place = |core: &mut Core, _| Ok(core.machine.as_mut().and_then(|m| m.map(index)));
            self.stream(sender, &[Source::Bytes(&bytes)], wait, message, place)?;
            sender.maps.updates.pop_front();
        }
        Ok(())
    }

    /// Writes into memory that the peer has mapped at `offset`. Returns the bytes written, up to the end of the mapping. The peer's program
    /// is not notified.
    ///
    /// # Errors
    /// As for sends.
    pub(crate) fn write_at(
        &self,
        from: &[Source<'_>],
        offset: u64,
        wait: Wait,
    ) -> Result<usize, Errno> {
        const NOWHERE: Errno = Errno::NXIO;
        if total(from) == 0 {
            return Ok(0);
        }
        let mut sender = self.turn(wait)?;
        self.send_maps(&mut sender, wait)?;
        let at = Cell::new(offset);
        let place = |_: &mut Core, want: u32| {
            let write = self.mapped(at.get(), want).ok_or(NOWHERE)?;
            at.set(at.get() + u64::from(write.len));
            Ok(Some(write))
        };
        match self.stream(&mut sender, from, wait, |_| None, place) {
            Err(NOWHERE) => Ok(0),
            written => written,
        }
    }

    /// The place of up to `want` bytes at `offset`. The peer wrote this table, so its values are not trusted.
    fn mapped(&self, offset: u64, want: u32) -> Option<Write> {
        (0..usize::from(self.options.maps)).find_map(|i| {
            let at = 2 * ENTRY_LEN + i * MAP_LEN;
            let word = |k: usize| self.table.load_u64(at + 8 * k).ok();
            let (key, len) = key_and_len(word(2)?);
            let skip = offset.checked_sub(word(0)?)?;
            let left = u64::from(len).checked_sub(skip).filter(|left| *left > 0)?;
            Some(Write {
                addr: word(1)?.wrapping_add(skip),
                key,
                len: left.min(u64::from(want)) as u32,
            })
        })
    }
}
