//! What a viewer of a movie in blocks knows: where blocks are, and which ones it has asked for.

use std::collections::VecDeque;

use weft_verbs::RemoteAddr;

use super::ViewError;
use crate::blocks::cache::LEASES;
use crate::wire::{Answer, Blocks, Denial, Place};

pub(super) struct Known {
    at: RemoteAddr,
    blocks: Blocks,
    /// As many as the server gives leases of, the oldest answer first.
    places: VecDeque<(u64, Place)>,
    /// Without an answer, and whether it was asked for ahead.
    asked: Vec<(u64, bool)>,
    denied: Option<(u64, Denial)>,
}

/// Where a part of a movie is.
pub(super) struct Target {
    pub(super) remote: RemoteAddr,
    /// Bytes up to the end of the block.
    pub(super) most: u64,
    /// The slot's word, and the generation that it has as long as the bytes are there.
    pub(super) word: RemoteAddr,
    pub(super) generation: u64,
}

impl Known {
    pub(super) fn new(at: RemoteAddr, blocks: Blocks) -> Self {
        Self {
            at,
            blocks,
            places: VecDeque::new(),
            asked: Vec::new(),
            denied: None,
        }
    }

    /// The block that a byte of the movie is in.
    pub(super) fn block_of(&self, offset: u64) -> u64 {
        offset / u64::from(self.blocks.block)
    }

    pub(super) fn layout(&self) -> &Blocks {
        &self.blocks
    }

    /// Where a byte of the movie is, if that is known.
    pub(super) fn find(&self, offset: u64) -> Option<Target> {
        let block = self.block_of(offset);
        let (_, place) = self.places.iter().find(|(known, _)| *known == block)?;
        let within = offset % u64::from(self.blocks.block);
        let remote = |at: u64| RemoteAddr {
            addr: self.at.addr + at,
            rkey: self.at.rkey,
        };
        Some(Target {
            remote: remote(self.blocks.slot_at(place.slot) + within),
            most: u64::from(self.blocks.block) - within,
            word: remote(Blocks::word_at(place.slot)),
            generation: place.generation,
        })
    }

    /// Whether the block has to be asked for: it is neither known nor asked for. From here on it is.
    pub(super) fn must_ask(&mut self, block: u64, ahead: bool) -> bool {
        let known = self.places.iter().any(|(known, _)| *known == block);
        let asked = self.asked.iter().any(|(asked, _)| *asked == block);
        let must = !known && !asked && self.asked.len() < LEASES;
        if must {
            self.asked.push((block, ahead));
        }
        must
    }

    /// The server has denied this block since it was asked for.
    pub(super) fn take_denial(&mut self, block: u64) -> Option<Denial> {
        let (_, why) = self.denied.take_if(|(denied, _)| *denied == block)?;
        Some(why)
    }

    pub(super) fn answered(&mut self, answer: &Answer) -> Result<(), ViewError> {
        let mut asked = self.asked.iter();
        let at = asked.position(|(block, _)| *block == answer.block);
        let at = at.ok_or(ViewError::Violation("an answer to no question"))?;
        let (_, ahead) = self.asked.swap_remove(at);
        match answer.place {
            Ok(place) => {
                if self.places.len() == LEASES {
                    self.places.pop_front();
                }
                self.places.push_back((answer.block, place));
            }
            // It is asked for again when it is needed.
            Err(_) if ahead => {}
            Err(why) => self.denied = Some((answer.block, why)),
        }
        Ok(())
    }

    /// The block is not where it was.
    pub(super) fn forget(&mut self, block: u64) {
        self.places.retain(|(known, _)| *known != block);
    }
}
