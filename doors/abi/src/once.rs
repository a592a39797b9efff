//! Values for statics that are made once, safely for forked children.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A value made at its first use, and then kept. No thread waits for another that makes it, because a forked child would wait for ever for a
/// thread that does not exist in it. If several threads make it at once, the first value is kept.
pub(crate) struct ForkOnce<T>(AtomicPtr<T>);

impl<T: Send + Sync + 'static> ForkOnce<T> {
    pub(crate) const fn new() -> Self {
        ForkOnce(AtomicPtr::new(null_mut()))
    }

    /// The value, if it has been made.
    #[inline]
    pub(crate) fn get(&'static self) -> Option<&'static T> {
        // SAFETY: only leaked values are stored.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// The value. The result of `make` is dropped if another thread was faster.
    #[inline]
    pub(crate) fn get_or_init(&'static self, make: impl FnOnce() -> T) -> &'static T {
        match self.get() {
            Some(value) => value,
            None => self.set(make()),
        }
    }

    #[cold]
    fn set(&'static self, value: T) -> &'static T {
        let made = Box::into_raw(Box::new(value));
        let swap = self
            .0
            .compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire);
        let stored = match swap {
            Ok(_) => made,
            Err(theirs) => {
                // SAFETY: ours was never shown to anybody.
                drop(unsafe { Box::from_raw(made) });
                theirs
            }
        };
        // SAFETY: only leaked values are stored.
        unsafe { &*stored }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    /// The state of a child that was forked while another thread of the parent was making the value.
    #[test]
    fn nobody_waits_for_another_one() {
        static MADE: ForkOnce<String> = ForkOnce::new();
        static TURNS: Barrier = Barrier::new(2);
        let slow = std::thread::spawn(|| {
            MADE.get_or_init(|| {
                TURNS.wait();
                TURNS.wait();
                "slow".to_owned()
            })
        });
        TURNS.wait();
        assert!(MADE.get().is_none());
        let mine = MADE.get_or_init(|| "quick".to_owned());
        TURNS.wait();
        assert_eq!(mine, "quick");
        assert!(std::ptr::eq(slow.join().unwrap(), mine));
        assert!(std::ptr::eq(MADE.get().unwrap(), mine));
    }
}
