//! Processes that fork.
//!
//! A child has the parent's descriptors and, on old kernels, not the pages of registered regions (`ibv_fork_init`). What it would destroy is the parent's. So in
//! a child every call fails, and dropping an object leaves it alone.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;

static IS_CHILD: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// From now on children of this process are known as such.
pub(crate) fn mark_children() {
    // SAFETY: a function that stays, and that only stores.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}

/// Whether this process was forked from one that had loaded the libraries.
#[inline]
pub(crate) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

pub(crate) fn error(device: &str) -> Error {
    Error::new(Some(device), "this process was forked from the one that uses the device")
        .with_errno(libc::EPERM)
        .remedy("after fork() only the parent may use an RNIC: start another program (exec), or fork before the first use")
}
