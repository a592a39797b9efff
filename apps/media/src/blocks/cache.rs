//! Which block of a movie is in which slot, and which viewers wait for one. It does no I/O and knows no clock.
//!
//! A viewer that gets a block has a lease of its slot for [`LEASE`], and of two slots at most: that of the block that it reads, and of the next,
//! which it asks for ahead. Its leases end when it asks for a block that it needs now.
//! A slot without a lease is given to another block, the least recently asked for first. A viewer that reads on after its lease is not harmed: it
//! finds another generation, and asks again.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::wire::{Denial, Place};

/// How long a slot keeps its block for a viewer, while others wait for a slot.
pub const LEASE: Duration = Duration::from_secs(2);
/// How long a viewer waits for a slot.
pub const WAIT: Duration = Duration::from_secs(10);
/// Leases of a viewer.
pub const LEASES: usize = 2;

/// A viewer's request for a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    pub viewer: u64,
    /// Which of the viewer's messages it was.
    pub message: u8,
    pub block: u64,
    /// It is not needed yet.
    pub ahead: bool,
}

/// What is to be done after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Answer(Asked, Result<Place, Denial>),
    /// Read a block from the file into a slot; [`Cache::filled`] ends it. No viewer has a lease of the slot.
    Fill {
        block: u64,
        place: Place,
    },
}

#[derive(Default)]
struct Slot {
    /// The block that is here, or comes.
    block: Option<u64>,
    /// 0 while it comes.
    generation: u64,
    /// Those that wait for it to come.
    asked: Vec<Asked>,
    /// The ends of the leases, by viewer.
    leases: HashMap<u64, Instant>,
    /// When it was last asked for, in a count of asks.
    used: u64,
}

impl Slot {
    fn is_leased(&self, now: Instant) -> bool {
        self.leases.values().any(|end| *end > now)
    }
}

/// The slots of a movie.
pub struct Cache {
    /// Blocks of the movie.
    blocks: u64,
    slots: Vec<Slot>,
    /// The slot of each block that is there or comes.
    at: HashMap<u64, u32>,
    /// The slots of a viewer's leases, the oldest first.
    viewers: HashMap<u64, VecDeque<u32>>,
    /// Those that wait for a slot, and until when.
    queue: VecDeque<(Asked, Instant)>,
    generation: u64,
    asks: u64,
    /// Why blocks that are not there are denied.
    closed: Option<Denial>,
}

impl Cache {
    pub fn new(blocks: u64, slots: u32) -> Self {
        Self {
            blocks,
            slots: (0..slots).map(|_| Slot::default()).collect(),
            at: HashMap::new(),
            viewers: HashMap::new(),
            queue: VecDeque::new(),
            generation: 0,
            asks: 0,
            closed: None,
        }
    }

    /// Whether a viewer waits for a slot: then [`Self::advance`] has to be called from time to time.
    pub fn is_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether the file has changed: no block is read any more.
    pub fn is_closed(&self) -> bool {
        self.closed.is_some()
    }

    /// A viewer asks for a block.
    pub fn ask(&mut self, now: Instant, asked: Asked) -> Vec<Action> {
        let mut actions = Vec::new();
        // First those that came first.
        self.advance_into(now, &mut actions);
        if asked.block >= self.blocks {
            actions.push(Action::Answer(asked, Err(Denial::Outside)));
        } else if !self.find(now, asked, &mut actions) {
            if let Some(why) = self.closed {
                actions.push(Action::Answer(asked, Err(why)));
            } else {
                // A viewer that waits has no lease that others wait for.
                let keeps = if asked.ahead { LEASES - 1 } else { 0 };
                self.end_oldest_leases(asked.viewer, keeps);
                if !self.queue.is_empty() || !self.place(now, asked, &mut actions) {
                    if asked.ahead {
                        actions.push(Action::Answer(asked, Err(Denial::Busy)));
                    } else {
                        self.end_wait(asked.viewer, &mut actions);
                        self.queue.push_back((asked, now + WAIT));
                        self.advance_into(now, &mut actions);
                    }
                }
            }
        }
        actions
    }

    /// Gives slots whose leases have ended to those that wait, and denies those that have waited for long enough.
    pub fn advance(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        self.advance_into(now, &mut actions);
        actions
    }

    fn advance_into(&mut self, now: Instant, actions: &mut Vec<Action>) {
        while let Some(&(asked, until)) = self.queue.front() {
            let denial = self.closed.or((until <= now).then_some(Denial::Busy));
            if self.find(now, asked, actions) {
            } else if let Some(why) = denial {
                actions.push(Action::Answer(asked, Err(why)));
            } else if !self.place(now, asked, actions) {
                return;
            }
            self.queue.pop_front();
        }
    }

    /// The block of a slot has come, or not.
    pub fn filled(&mut self, now: Instant, place: Place, how: Result<(), Denial>) -> Vec<Action> {
        let mut actions = Vec::new();
        let Some(slot) = self.slots.get_mut(place.slot as usize) else {
            return actions;
        };
        let waiting = std::mem::take(&mut slot.asked);
        match how {
            Ok(()) => slot.generation = place.generation,
            Err(why) => {
                if let Some(block) = slot.block.take() {
                    self.at.remove(&block);
                }
                if why == Denial::Changed {
                    self.closed = Some(why);
                }
            }
        }
        for asked in waiting {
            if how.is_ok() {
                self.lease(now, asked.viewer, place.slot);
            }
            actions.push(Action::Answer(asked, how.map(|()| place)));
        }
        self.advance_into(now, &mut actions);
        actions
    }

    /// A viewer has gone.
    pub fn leave(&mut self, now: Instant, viewer: u64) -> Vec<Action> {
        for slot in self.viewers.remove(&viewer).unwrap_or_default() {
            self.slots[slot as usize].leases.remove(&viewer);
        }
        self.queue.retain(|(asked, _)| asked.viewer != viewer);
        for slot in &mut self.slots {
            slot.asked.retain(|asked| asked.viewer != viewer);
        }
        self.advance(now)
    }

    /// Answers, now or when it has come, if the block has a slot.
    fn find(&mut self, now: Instant, asked: Asked, actions: &mut Vec<Action>) -> bool {
        let Some(&number) = self.at.get(&asked.block) else {
            return false;
        };
        self.asks += 1;
        let slot = &mut self.slots[number as usize];
        slot.used = self.asks;
        if slot.generation == 0 {
            slot.asked.push(asked);
            return true;
        }
        let place = Place {
            slot: number,
            generation: slot.generation,
        };
        self.lease(now, asked.viewer, number);
        actions.push(Action::Answer(asked, Ok(place)));
        true
    }

    /// Takes a slot for the block, if there is one.
    fn place(&mut self, now: Instant, asked: Asked, actions: &mut Vec<Action>) -> bool {
        let Some(number) = self.free_slot(now) else {
            return false;
        };
        self.asks += 1;
        self.generation += 1;
        let slot = &mut self.slots[number as usize];
        if let Some(old) = slot.block.replace(asked.block) {
            self.at.remove(&old);
        }
        for (viewer, _) in slot.leases.drain() {
            if let Some(leases) = self.viewers.get_mut(&viewer) {
                leases.retain(|slot| *slot != number);
            }
        }
        (slot.generation, slot.used) = (0, self.asks);
        slot.asked.push(asked);
        self.at.insert(asked.block, number);
        let place = Place {
            slot: number,
            generation: self.generation,
        };
        let block = asked.block;
        actions.push(Action::Fill { block, place });
        true
    }

    /// A slot that is empty, else the least recently used one that nobody has a lease of.
    fn free_slot(&self, now: Instant) -> Option<u32> {
        let free = self.slots.iter().zip(0..).filter(|(slot, _)| {
            slot.block.is_none() || slot.generation != 0 && !slot.is_leased(now)
        });
        let oldest = free.min_by_key(|(slot, _)| (slot.block.is_some(), slot.used));
        oldest.map(|(_, number)| number)
    }

    /// Gives a viewer a lease; its oldest one ends if it has too many. While others wait, a lease that runs is not made longer, and
    /// a further one of the slot ends with the others: two viewers that take turns would keep it for ever.
    fn lease(&mut self, now: Instant, viewer: u64, number: u32) {
        let slot = &mut self.slots[number as usize];
        let runs = slot.leases.get(&viewer).is_some_and(|end| *end > now);
        if self.queue.is_empty() {
            slot.leases.insert(viewer, now + LEASE);
        } else if !runs {
            let others = slot.leases.values().copied().filter(|end| *end > now);
            let end = others.max().unwrap_or(now + LEASE);
            slot.leases.insert(viewer, end);
        }
        let of = self.viewers.entry(viewer).or_default();
        of.retain(|slot| *slot != number);
        of.push_back(number);
        self.end_oldest_leases(viewer, LEASES);
    }

    /// A viewer waits for one slot: a newer request ends the older one, whose block it does not need any more.
    fn end_wait(&mut self, viewer: u64, actions: &mut Vec<Action>) {
        self.queue.retain(|(older, _)| {
            let stays = older.viewer != viewer;
            if !stays {
                actions.push(Action::Answer(*older, Err(Denial::Busy)));
            }
            stays
        });
    }

    /// Ends leases of a viewer, the oldest first, until it has so many.
    fn end_oldest_leases(&mut self, viewer: u64, most: usize) {
        let Some(of) = self.viewers.get_mut(&viewer) else {
            return;
        };
        let surplus = of.len().saturating_sub(most);
        for slot in of.drain(..surplus) {
            self.slots[slot as usize].leases.remove(&viewer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn asked(viewer: u64, block: u64) -> Asked {
        Asked {
            viewer,
            message: 0,
            block,
            ahead: false,
        }
    }

    fn ahead(viewer: u64, block: u64) -> Asked {
        Asked {
            ahead: true,
            ..asked(viewer, block)
        }
    }

    /// The place of the only action, a fill.
    fn fill(actions: &[Action]) -> Place {
        match actions {
            [Action::Fill { place, .. }] => *place,
            other => panic!("{other:?}"),
        }
    }

    /// A cache of two slots with blocks 0 and 1, which viewer 1 has leases of.
    fn full(now: Instant) -> (Cache, [Place; 2]) {
        let mut cache = Cache::new(100, 2);
        let places = [asked(1, 0), ahead(1, 1)].map(|asked| {
            let place = fill(&cache.ask(now, asked));
            let answers = cache.filled(now, place, Ok(()));
            assert_eq!(answers, [Action::Answer(asked, Ok(place))]);
            place
        });
        (cache, places)
    }

    #[test]
    fn a_block_is_read_once_for_all_that_wait_for_it() {
        let now = Instant::now();
        let mut cache = Cache::new(10, 2);
        let place = fill(&cache.ask(now, asked(1, 9)));
        assert_eq!(cache.ask(now, asked(2, 9)), []);
        let both = [1, 2].map(|viewer| Action::Answer(asked(viewer, 9), Ok(place)));
        assert_eq!(cache.filled(now, place, Ok(())), both);
        let later = Action::Answer(asked(3, 9), Ok(place));
        assert_eq!(cache.ask(now, asked(3, 9)), [later]);
        let outside = Action::Answer(asked(3, 10), Err(Denial::Outside));
        assert_eq!(cache.ask(now, asked(3, 10)), [outside]);
    }

    #[test]
    fn a_request_waits_for_a_lease_to_end_also_if_the_holder_asks_again_and_again() {
        let start = Instant::now();
        let (mut cache, places) = full(start);
        assert_eq!(cache.ask(start, asked(2, 7)), []);
        let mut now = start;
        while now < start + LEASE {
            assert_eq!(cache.advance(now), []);
            let again = Action::Answer(asked(1, 0), Ok(places[0]));
            assert_eq!(cache.ask(now, asked(1, 0)), [again]);
            now += LEASE / 10;
        }
        // The holder asks once more, but the other one was first. The slot of block 1 is the least recently used.
        let actions = cache.ask(now, asked(1, 0));
        assert!(
            matches!(actions[0], Action::Fill { block: 7, place } if place.slot == places[1].slot)
        );
        assert!(!cache.is_waiting());
    }

    #[test]
    fn viewers_that_take_turns_do_not_keep_a_slot_from_one_that_waits() {
        let start = Instant::now();
        let (mut cache, places) = full(start);
        assert_eq!(cache.ask(start, asked(2, 7)), []);
        let mut now = start;
        // New viewers take leases of the same blocks all the time.
        for viewer in 10.. {
            now += LEASE / 4;
            let actions = cache.advance(now);
            if !actions.is_empty() {
                assert_eq!(fill(&actions).slot, places[0].slot);
                break;
            }
            for block in [0, 1] {
                let again = Action::Answer(asked(viewer, block), Ok(places[block as usize]));
                assert_eq!(cache.ask(now, asked(viewer, block)), [again]);
            }
        }
        assert_eq!(now, start + LEASE);
    }

    #[test]
    fn a_viewer_waits_for_one_slot() {
        let now = Instant::now();
        let (mut cache, _) = full(now);
        assert_eq!(cache.ask(now, asked(2, 7)), []);
        let older = Action::Answer(asked(2, 7), Err(Denial::Busy));
        assert_eq!(cache.ask(now, asked(2, 8)), [older]);
        fill(&cache.leave(now, 1));
        assert!(!cache.is_waiting());
    }

    #[test]
    fn who_waits_for_too_long_is_denied() {
        let start = Instant::now();
        let mut cache = Cache::new(10, 1);
        // A disk that does not answer.
        fill(&cache.ask(start, asked(1, 0)));
        assert_eq!(cache.ask(start, asked(2, 7)), []);
        assert_eq!(cache.advance(start + WAIT / 2), []);
        let denied = Action::Answer(asked(2, 7), Err(Denial::Busy));
        assert_eq!(cache.advance(start + WAIT), [denied]);
    }

    #[test]
    fn a_viewer_has_two_leases_and_none_when_it_waits_or_has_gone() {
        let now = Instant::now();
        let busy = |asked| [Action::Answer(asked, Err(Denial::Busy))];
        // Its third block takes the slot of the first; another viewer's takes none.
        let (mut cache, places) = full(now);
        assert_eq!(cache.ask(now, ahead(2, 5)), busy(ahead(2, 5)));
        assert_eq!(fill(&cache.ask(now, ahead(1, 2))).slot, places[0].slot);
        assert_eq!(cache.ask(now, ahead(2, 5)), busy(ahead(2, 5)));
        // One that it needs now ends both leases.
        let (mut cache, places) = full(now);
        assert_eq!(fill(&cache.ask(now, asked(1, 3))).slot, places[0].slot);
        assert_eq!(fill(&cache.ask(now, ahead(2, 5))).slot, places[1].slot);
        // So two viewers that wait do not wait for each other.
        let (mut cache, _) = full(now);
        assert_eq!(cache.ask(now, asked(2, 7)), []);
        let first = cache.ask(now, asked(1, 9));
        let blocks = first.iter().map(|action| match action {
            Action::Fill { block, .. } => *block,
            Action::Answer(..) => panic!("{action:?}"),
        });
        assert_eq!(blocks.collect::<Vec<_>>(), [7, 9]);
        let (mut cache, _) = full(now);
        assert_eq!(cache.ask(now, asked(2, 5)), []);
        fill(&cache.leave(now, 1));
    }

    #[test]
    fn what_cannot_be_read_is_denied_to_all_that_wait_and_a_changed_file_for_ever() {
        let now = Instant::now();
        let (mut cache, places) = full(now);
        cache.leave(now, 1);
        let place = fill(&cache.ask(now, asked(1, 50)));
        assert_eq!(cache.ask(now, asked(2, 50)), []);
        let denied = |viewer, block, why| Action::Answer(asked(viewer, block), Err(why));
        let why = Denial::Unreadable;
        let both = [denied(1, 50, why), denied(2, 50, why)];
        assert_eq!(cache.filled(now, place, Err(why)), both);
        let place = fill(&cache.ask(now, asked(1, 50)));
        assert!(place.generation > places[1].generation);
        let why = Denial::Changed;
        let denials = cache.filled(now, place, Err(why));
        assert_eq!(denials, [denied(1, 50, why)]);
        assert_eq!(cache.ask(now, asked(1, 51)), [denied(1, 51, why)]);
        let there = Action::Answer(asked(2, 1), Ok(places[1]));
        assert_eq!(cache.ask(now, asked(2, 1)), [there]);
    }

    proptest! {
        /// Each ask has one answer; a slot that is filled has no lease; places are what the file was read into.
        #[test]
        fn every_ask_is_answered_once(steps in proptest::collection::vec((0_u8..6, 0_u64..5, 0_u64..12), 0..300)) {
            let mut now = Instant::now();
            let mut cache = Cache::new(10, 3);
            let (mut fills, mut open) = (VecDeque::<(u64, Place)>::new(), Vec::<Asked>::new());
            let mut there: HashMap<u32, (u64, u64)> = HashMap::new();
            let settle = 400;
            for step in 0..steps.len() + settle {
                let (what, viewer, block) = steps.get(step).copied().unwrap_or((1, 0, 0));
                let actions = match what {
                    1 if !fills.is_empty() => {
                        let (block, place) = fills.pop_front().unwrap();
                        there.insert(place.slot, (block, place.generation));
                        cache.filled(now, place, Ok(()))
                    }
                    0 | 1 => {
                        now += LEASE / 4;
                        cache.advance(now)
                    }
                    2 => {
                        open.retain(|asked| asked.viewer != viewer);
                        cache.leave(now, viewer)
                    }
                    _ => {
                        let asked = Asked { viewer, message: step as u8, block, ahead: what == 3 };
                        open.push(asked);
                        cache.ask(now, asked)
                    }
                };
                for action in actions {
                    match action {
                        Action::Answer(asked, how) => {
                            let at = open.iter().position(|open| *open == asked);
                            prop_assert!(at.is_some(), "{asked:?}");
                            open.remove(at.unwrap_or(0));
                            match how {
                                Ok(place) => prop_assert_eq!(there.get(&place.slot), Some(&(asked.block, place.generation))),
                                Err(why) => prop_assert_eq!(why == Denial::Outside, asked.block >= 10),
                            }
                        }
                        Action::Fill { block, place } => {
                            there.remove(&place.slot);
                            fills.push_back((block, place));
                        }
                    }
                }
                prop_assert!(cache.viewers.values().all(|of| of.len() <= LEASES));
            }
            prop_assert_eq!(open, []);
        }
    }
}
