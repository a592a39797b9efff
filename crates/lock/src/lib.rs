//! Locks for short holds.
//!
//! [`Brief`] is taken by one locked instruction and let go by a plain store, where [`std::sync::Mutex`] takes two. A thread that has
//! to wait spins, yields, and then sleeps for short times. So it suits holds that are a few microseconds long as a rule.
//!
//! [`Holder`] and [`Generation`] let the holder of such a lock use objects that it has looked up earlier, without counting references:
//! who takes an object away ends the generation, and waits for the holds that have begun before that.
//!
//! # Safety
//!
//! The one unsafe part is the value of a [`Brief`]: a [`BriefGuard`] exists only between the two stores to the lock's word, which make
//! one holder's accesses happen before the next one's.

mod brief;
mod generation;
mod word;

pub use brief::{Brief, BriefGuard};
pub use generation::{Generation, Holder, Holds, TAGS};
pub use word::Word;

/// What a [`Holder`] is shared by: loom's own under loom.
pub use sync::Arc;

#[cfg(not(loom))]
mod sync {
    pub use std::sync::Arc;
    pub(crate) use std::sync::Mutex;
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    /// What stands before this and after it is `SeqCst` itself.
    #[inline]
    pub(crate) fn in_order() {}
}

#[cfg(loom)]
mod sync {
    pub use loom::sync::Arc;
    pub(crate) use loom::sync::Mutex;
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    /// Loom takes `SeqCst` accesses as `AcqRel`, and fences as what they are.
    pub(crate) fn in_order() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}
