//! Objects that holders of locks have cached.
//!
//! ```text
//!   holder                                   thread that removes the object
//!   ------                                   ------------------------------
//!   Word::try_begin   (SeqCst)               remove it from the table
//!   Generation::now   (SeqCst)               Generation::end: count up (SeqCst)
//!   as when the object was looked up?        for each holder whose tags name it:
//!   use it                                       is it in a hold (SeqCst)? wait for the end of that
//!   Word::end         (Release)              the object can be reused
//! ```
//!
//! Either the holder sees the new number, and looks the object up again, or its hold began before the removing thread checks, which then
//! waits.

use crate::sync::{Arc, AtomicU32, AtomicU64, Mutex, Ordering, in_order};
use crate::word::Word;

/// Objects that a holder remembers at once.
pub const TAGS: usize = 4;
/// Holders that can be waited for. Further ones remember nothing, so that taking an object away stays cheap.
const MAX_HOLDERS: usize = 256;
/// Looks at a hold that is going on before the thread does something else.
const MOMENT: u32 = 256;

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
        // A thread that sees this store sees all earlier actions on the object in this place.
        self.tags[place].store(tag, Ordering::Release);
    }

    /// Whether this object is cached.
    pub fn remembers(&self, tag: u32) -> bool {
        self.tags.iter().any(|t| t.load(Ordering::Acquire) == tag)
    }
}

/// Counts removed objects, and knows the holders that may be using one.
pub struct Generation {
    /// On a cache line of its own: every operation reads it.
    now: Line,
    holders: Mutex<Vec<Arc<Holder>>>,
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
    /// Allows this holder to cache objects, as long as it is referenced elsewhere, too. False: there are too many.
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

    /// The present number. Objects that were looked up under another number have to be looked up again.
    #[inline]
    pub fn now(&self) -> u64 {
        self.now.0.load(Ordering::SeqCst)
    }

    /// An object was removed from the table: the holds in which it may be in use. It is its owner's again when all of them are over.
    #[must_use = "the object may be in use until the holds are over"]
    pub fn end(&self, tag: u32) -> Holds {
        self.now.0.fetch_add(1, Ordering::SeqCst);
        in_order();
        let Ok(holders) = self.holders.lock() else {
            return Holds::default();
        };
        let in_use = holders.iter().filter(|holder| holder.remembers(tag));
        let holds = in_use.filter_map(|holder| Some((Arc::clone(holder), holder.word.held()?)));
        let holds: Vec<_> = holds.collect();
        drop(holders);
        // A child of `fork` has none of its parent's threads.
        if !holds.is_empty() && self.process != std::process::id() {
            return Holds::default();
        }
        Holds(holds)
    }
}

/// Holds to wait for.
#[derive(Debug, Default)]
pub struct Holds(Vec<(Arc<Holder>, u64)>);

impl Holds {
    /// These too.
    pub fn add(&mut self, others: Holds) {
        self.0.extend(others.0);
    }

    /// Whether all of them are over. The actions of their holders are visible after that.
    pub fn are_over(&mut self) -> bool {
        self.0.retain(|(holder, hold)| !holder.word.is_past(*hold));
        self.0.is_empty()
    }

    /// As [`Holds::are_over`], after a moment in which short holds end.
    pub fn are_over_soon(&mut self) -> bool {
        for _ in 0..MOMENT {
            if self.are_over() {
                return true;
            }
            std::hint::spin_loop();
        }
        self.are_over()
    }

    /// Waits until all of them are over. To be called in none of them.
    pub fn wait(&mut self) {
        for (holder, hold) in self.0.drain(..) {
            holder.word.wait_past(hold);
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
