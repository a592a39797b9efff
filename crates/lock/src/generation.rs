//! Objects that the holders of locks have looked up before.
//!
//! ```text
//!   holder                                   who takes the object away
//!   ------                                   -------------------------
//!   Word::try_begin   (SeqCst)               remove it from the table
//!   Generation::now   (SeqCst)               Generation::end: count up (SeqCst)
//!   as when the object was looked up?        for each holder whose tags name it:
//!   use it                                       is it in a hold (SeqCst)? wait for the end of that
//!   Word::end         (Release)              the object is its owner's again
//! ```
//!
//! Either the holder sees the new number, and looks the object up again, or it has begun its hold before the other one looks, who
//! then waits.

use crate::sync::{Arc, AtomicU32, AtomicU64, Mutex, Ordering, in_order};
use crate::word::Word;

/// Objects that a holder remembers at once.
pub const TAGS: usize = 4;
/// Holders that can be waited for. Further ones remember nothing, so that taking an object away stays cheap.
const MAX_HOLDERS: usize = 256;

/// A lock's word, and the objects that its holders remember, by name. 0 is no name.
#[derive(Debug, Default)]
pub struct Holder {
    /// The lock.
    pub word: Word,
    tags: [AtomicU32; TAGS],
}

impl Holder {
    /// This object is remembered in this place, in the place of another one that is not in use in this hold. To be called in a hold, and
    /// while the object cannot be removed from the table.
    pub fn remember(&self, place: usize, tag: u32) {
        self.tags[place].store(tag, Ordering::Relaxed);
    }

    /// Whether this object is remembered.
    pub fn remembers(&self, tag: u32) -> bool {
        self.tags.iter().any(|t| t.load(Ordering::Relaxed) == tag)
    }
}

/// Counts the objects that were taken away, and knows who may be using one.
pub struct Generation {
    /// On a cache line of its own: every operation reads it.
    now: Line,
    holders: Mutex<Vec<Arc<Holder>>>,
    /// A child of `fork` has none of its parent's threads.
    process: u32,
}

#[repr(align(64))]
struct Line(AtomicU64);

impl Default for Generation {
    fn default() -> Self {
        Generation {
            now: Line(AtomicU64::new(1)),
            holders: Mutex::new(Vec::new()),
            process: std::process::id(),
        }
    }
}

impl Generation {
    /// This holder may remember objects from now on, as long as anybody else has it, too. False: there are too many.
    pub fn add(&self, holder: &Arc<Holder>) -> bool {
        let Ok(mut holders) = self.holders.lock() else {
            return false;
        };
        if holders.len() == MAX_HOLDERS {
            holders.retain(|holder| Arc::strong_count(holder) > 1);
        }
        let room = holders.len() < MAX_HOLDERS;
        if room {
            holders.push(Arc::clone(holder));
        }
        room
    }

    /// The number of now. What was looked up under another number is to be looked up again.
    #[inline]
    pub fn now(&self) -> u64 {
        self.now.0.load(Ordering::SeqCst)
    }

    /// An object was removed from the table: waits for the holds in which it may be in use. Not to be called in such a hold.
    pub fn end(&self, tag: u32) {
        self.now.0.fetch_add(1, Ordering::SeqCst);
        in_order();
        let Ok(holders) = self.holders.lock() else {
            return;
        };
        for holder in holders.iter().filter(|holder| holder.remembers(tag)) {
            if let Some(hold) = holder.word.held()
                && self.process == std::process::id()
            {
                holder.word.wait_past(hold);
            }
        }
    }
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation")
            .field("now", &self.now.0)
            .finish_non_exhaustive()
    }
}
