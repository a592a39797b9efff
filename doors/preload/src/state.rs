//! States of the connection's machine that threads and processes share.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

use weft_run::connection::{Phase, Route};

/// A state as a number. Zeros are its first value.
#[repr(transparent)]
pub(crate) struct Shared<T>(AtomicU32, PhantomData<T>);

impl<T> Default for Shared<T> {
    fn default() -> Shared<T> {
        Shared(AtomicU32::new(0), PhantomData)
    }
}

impl<T: From<u32> + Into<u32> + Copy> Shared<T> {
    #[inline]
    pub(crate) fn load(&self, order: Ordering) -> T {
        self.0.load(order).into()
    }

    #[inline]
    pub(crate) fn store(&self, to: T, order: Ordering) {
        self.0.store(to.into(), order);
    }

    pub(crate) fn swap(&self, to: T, order: Ordering) -> T {
        self.0.swap(to.into(), order).into()
    }

    /// Changes one state to another one. `false`: it is not that one any more.
    pub(crate) fn change(&self, from: T, to: T, order: Ordering) -> bool {
        self.0
            .compare_exchange(from.into(), to.into(), order, Ordering::Relaxed)
            .is_ok()
    }
}

pub(crate) type SharedRoute = Shared<Route>;
pub(crate) type SharedPhase = Shared<Phase>;
