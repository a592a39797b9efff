//! Movies in blocks: those that the memory has no room for. Slots of registered memory hold the blocks that viewers ask for (docs/adr/0093).
//!
//! A word in the region has the generation of the block in each slot. The server clears it before it overwrites the slot, and stores the new one
//! after the bytes, as with the fragments of a live stream. So a viewer that Reads the bytes and then the word knows whose bytes they are, and
//! the server takes a slot away without asking anybody.

pub mod cache;

use std::fs::File;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{Ordering, fence};

use weft_service::lock;
use weft_verbs::Mr;

use crate::stamp::Stamp;
use crate::wire::{Blocks, Denial, Place};
use cache::Cache;

/// The longest block of ours, in bytes: a seek waits for one.
const LONGEST: u64 = 4 << 20;
/// Slots of a movie at least: a block is shorter where the memory is small.
const FEWEST: u64 = 16;
/// The least memory that a movie in blocks is served from, in bytes.
pub const LEAST: u64 = PAGE + FEWEST * *crate::wire::BLOCK.start() as u64;
const PAGE: u64 = 4096;

/// The layout for a region of at most so many bytes, at least [`LEAST`].
pub fn layout(memory: u64) -> Blocks {
    let shortest = u64::from(*crate::wire::BLOCK.start());
    let mut block = LONGEST;
    while block > shortest && block * FEWEST + PAGE > memory {
        block /= 2;
    }
    // The words take 8 bytes of each slot, and whole pages.
    let most = u64::from(crate::wire::MAX_SLOTS);
    let slots = (memory.saturating_sub(PAGE) / (block + crate::wire::WORD_LEN)).min(most);
    let data_at = (slots * crate::wire::WORD_LEN).next_multiple_of(PAGE);
    Blocks {
        block: block as u32,
        slots: slots as u32,
        data_at,
    }
}

/// The file of a movie in blocks, and which of its blocks are where.
pub struct Film {
    file: File,
    stamp: Mutex<Stamp>,
    len: u64,
    blocks: Blocks,
    pub cache: Mutex<Cache>,
}

impl Film {
    pub fn new(file: File, stamp: Stamp, len: u64, blocks: Blocks) -> Self {
        let count = len.div_ceil(blocks.block.into());
        Self {
            file,
            stamp: Mutex::new(stamp),
            len,
            blocks,
            cache: Mutex::new(Cache::new(count, blocks.slots)),
        }
    }

    pub fn blocks(&self) -> Blocks {
        self.blocks
    }

    /// Reads a block into a slot of the movie's region.
    ///
    /// # Errors
    /// [`Denial::Changed`], [`Denial::Unreadable`].
    pub fn fill(&self, mr: &Mr, block: u64, place: Place) -> Result<(), Denial> {
        let unreadable = |e: &dyn std::fmt::Display| {
            tracing::warn!("cannot read block {block} of a movie: {e}");
            Denial::Unreadable
        };
        let word = Blocks::word_at(place.slot) as usize;
        mr.store_u64(word, 0).map_err(|e| unreadable(&e))?;
        // A viewer that sees a byte of the new block also sees that the old generation is cleared.
        fence(Ordering::SeqCst);
        let from = block * u64::from(self.blocks.block);
        let len = (self.len - from).min(self.blocks.block.into());
        let to = self.blocks.slot_at(place.slot);
        let whole = read(mr, &self.file, (from, len), to).map_err(|e| unreadable(&e))?;
        // Of two readers the later one sees the later state.
        let mut stamp = lock(&self.stamp);
        let now = Stamp::of(&self.file).map_err(|e| unreadable(&e))?;
        if !whole || !stamp.is_still(now) {
            return Err(Denial::Changed);
        }
        *stamp = now;
        drop(stamp);
        let generation = u64::from_ne_bytes(place.generation.to_be_bytes());
        mr.store_u64(word, generation).map_err(|e| unreadable(&e))
    }
}

/// Reads a part of a file, its offset and length, into a region at `to`; false if the file ends before.
pub fn read(mr: &Mr, file: &File, (from, len): (u64, u64), to: u64) -> io::Result<bool> {
    let mut done = 0;
    while done < len {
        let now = (len - done).min(LONGEST) as usize;
        match mr.read_from_file(file, Some(from + done), (to + done) as usize, now) {
            Ok(0) => return Ok(false),
            Ok(n) => done += n as u64,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn layouts_stay_within_their_memory(memory in LEAST..1_u64 << 44) {
            let blocks = layout(memory);
            prop_assert!(blocks.region_len() <= memory);
            prop_assert!(u64::from(blocks.slots) >= FEWEST);
            prop_assert!(crate::wire::BLOCK.contains(&blocks.block));
            prop_assert!(Blocks::word_at(blocks.slots) <= blocks.data_at);
        }
    }

    #[test]
    fn most_of_the_memory_is_slots() {
        for memory in [LEAST, 3 << 20, 100 << 20, 1 << 30, 12 << 30] {
            assert!(layout(memory).region_len() > memory / 2, "{memory}");
        }
        assert_eq!(layout(1 << 30).block, 4 << 20);
    }
}
