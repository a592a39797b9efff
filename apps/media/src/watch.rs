//! A viewer of a live stream: it follows the index, and Reads the fragments that it has not seen.

use std::time::{Duration, Instant};

use crate::client::{ViewError, Viewer};
use crate::wire::{Content, Layout, SLOT_LEN, Slot};

/// The start position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// With the newest key frame.
    Newest,
    /// With the oldest key frame that is still there.
    Oldest,
    /// With the newest key frame that is so many microseconds before the newest fragment, else with the oldest.
    Behind(u64),
}

/// An event of a live stream.
#[derive(Debug)]
pub enum Event {
    Fragment {
        /// Its slot in the index.
        slot: Slot,
        bytes: Vec<u8>,
        /// The server's clock when it was complete, in microseconds since the epoch, if this is the announced fragment.
        told: Option<u64>,
    },
    /// The writer has overtaken this viewer: fragments from one sequence number to before another are lost; the next one begins
    /// with a key frame.
    Skipped {
        /// The first that is lost.
        from: u64,
        /// The first that is not.
        to: u64,
    },
    End,
}

/// A viewer of a live stream.
pub struct Watch {
    viewer: Viewer,
    layout: Layout,
    /// The next fragment; `None` before the first.
    next: Option<u64>,
    from: From,
    newest: u64,
    at: u64,
    ended: bool,
}

impl Watch {
    /// Watches a viewer's grant.
    ///
    /// # Errors
    /// [`ViewError::Violation`] if it is not a live stream.
    pub fn new(viewer: Viewer, from: From) -> Result<Self, ViewError> {
        let Content::Live(layout) = viewer.grant().content else {
            return Err(ViewError::Violation("this is no live stream"));
        };
        Ok(Self {
            viewer,
            layout,
            next: None,
            from,
            newest: 0,
            at: 0,
            ended: false,
        })
    }

    /// The layout of the stream's region.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn viewer(&self) -> &Viewer {
        &self.viewer
    }

    /// The init segment, which a decoder needs first.
    ///
    /// # Errors
    /// [`ViewError`].
    pub fn init(&mut self) -> Result<Vec<u8>, ViewError> {
        let Layout {
            init_at, init_len, ..
        } = self.layout;
        self.viewer.fetch(init_at, init_len as usize)
    }

    /// The next event; `None` if there is none for so long.
    ///
    /// # Errors
    /// [`ViewError`].
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Event>, ViewError> {
        let deadline = Instant::now() + timeout;
        let Some(next) = self.next else {
            let begin = self
                .first(0)?
                .ok_or(ViewError::Violation("an empty ring"))?;
            self.next = Some(begin);
            return self.next(timeout);
        };
        loop {
            if next < self.newest {
                return self.take(next).map(Some);
            }
            if self.ended {
                return Ok(Some(Event::End));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.viewer.notice(left)? {
                // The index may be newer than a notice that was on its way.
                Some(notice) if notice.newest < self.newest && notice.ended => {
                    return Err(ViewError::Violation("a stream that goes back"));
                }
                Some(notice) if notice.newest < self.newest => {}
                Some(notice) => {
                    (self.newest, self.at) = (notice.newest, notice.at);
                    self.ended = notice.ended;
                }
                None => return Ok(None),
            }
        }
    }

    fn slot(&mut self, sequence: u64) -> Result<Option<Slot>, ViewError> {
        let at = sequence % u64::from(self.layout.slots) * SLOT_LEN as u64;
        let bytes = self.viewer.fetch(at, SLOT_LEN)?;
        let bytes = bytes
            .first_chunk()
            .ok_or(ViewError::Violation("a short slot"))?;
        Ok(Slot::decode(bytes, &self.layout))
    }

    /// Reads the fragment of this number, if it is there before and after; else skips to one that is.
    fn take(&mut self, sequence: u64) -> Result<Event, ViewError> {
        let before = self.slot(sequence)?;
        if let Some(slot) = before.filter(|s| s.sequence() == sequence) {
            let from = self.layout.data_at + slot.offset;
            let bytes = self.viewer.fetch(from, slot.len as usize)?;
            if self.slot(sequence)? == before {
                self.next = Some(sequence + 1);
                return Ok(Event::Fragment {
                    slot,
                    bytes,
                    told: (sequence + 1 == self.newest && self.at > 0).then_some(self.at),
                });
            }
        }
        self.from = From::Newest;
        let to = self.first(sequence + 1)?;
        // A ring without a key frame: the next fragment that begins with one, or the one after all these.
        let to = to.unwrap_or(self.newest.max(sequence + 1));
        self.next = Some(to);
        Ok(Event::Skipped { from: sequence, to })
    }

    /// Searches the index for the fragment to begin with, at this number or later.
    fn first(&mut self, least: u64) -> Result<Option<u64>, ViewError> {
        let index = self.layout.slots as usize * SLOT_LEN;
        let bytes = self.viewer.fetch(0, index)?;
        let (slots, _) = bytes.as_chunks::<SLOT_LEN>();
        let there = slots.iter().enumerate().filter_map(|(i, bytes)| {
            let slot = Slot::decode(bytes, &self.layout)?;
            let right = slot.sequence() % u64::from(self.layout.slots) == i as u64;
            (right && slot.sequence() >= least).then_some(slot)
        });
        let there: Vec<Slot> = there.collect();
        let newest = there.iter().map(|s| s.generation).max();
        self.newest = self.newest.max(newest.unwrap_or(0));
        let keys: Vec<&Slot> = there.iter().filter(|s| s.key).collect();
        let of = |slot: &&Slot| slot.sequence();
        let found = match self.from {
            From::Newest => keys.iter().map(of).max(),
            From::Oldest => keys.iter().map(of).min(),
            From::Behind(micros) => {
                let last = there.iter().max_by_key(|s| s.generation);
                let before = last.map_or(0, |s| s.time.saturating_sub(micros));
                let early = keys.iter().filter(|s| s.time <= before);
                early.map(of).max().or_else(|| keys.iter().map(of).min())
            }
        };
        Ok(found.or_else(|| there.iter().map(Slot::sequence).max()))
    }
}
