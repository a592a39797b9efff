//! Locks for short holds.
//!
//! [`ShortLock`] is taken by one locked instruction and released by a plain store; [`std::sync::Mutex`] takes two locked instructions. A thread
//! that has to wait spins, yields, and then sleeps for short times. So it suits holds of a few microseconds.
//!
//! [`Holder`] and [`Generation`] let the holder of such a lock use cached objects without counting references: a thread that removes an
//! object ends the generation, and waits for the holds that have begun before that.
//!
//! [`Wake`] is for locks that are only tried: a thread leaves its work to the holder, and threads agree which of them watches, sleeps or drives.
//!
//! # Safety
//!
//! The one unsafe part is the value of a [`ShortLock`]: a [`BriefGuard`] exists only between the two stores to the lock's word, which make
//! one holder's accesses happen before the next one's.
#![warn(missing_docs)]

mod generation;
mod short_lock;
mod wake;
mod word;

pub use generation::{Generation, Holder, Holds, TAGS};
pub use short_lock::{BriefGuard, ShortLock};
pub use wake::{Seen, Transport, Wake};
pub use word::Word;

/// The `Arc` of a [`Holder`]: loom's under loom.
pub use sync::Arc;

#[cfg(not(loom))]
mod sync {
    pub use std::sync::Arc;
    pub(crate) use std::sync::Mutex;
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

    /// The accesses before and after it are `SeqCst` themselves.
    #[inline]
    pub(crate) fn in_order() {}
}

#[cfg(loom)]
mod sync {
    pub use loom::sync::Arc;
    pub(crate) use loom::sync::Mutex;
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

    /// Loom treats `SeqCst` accesses as `AcqRel`, but models fences exactly.
    pub(crate) fn in_order() {
        fence(Ordering::SeqCst);
    }
}
