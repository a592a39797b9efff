//! Counts of an object's users, and the end of objects.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

use super::object::{Kind, turn};
use crate::call::status;

/// Counts the objects that need another one.
#[derive(Default)]
pub(crate) struct Users(Arc<AtomicU32>);

/// Marks an object as used, until this is dropped.
pub(crate) struct Held(Arc<AtomicU32>);

impl Users {
    pub(crate) fn hold(&self) -> Held {
        self.0.fetch_add(1, Ordering::AcqRel);
        Held(Arc::clone(&self.0))
    }

    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Ends an object that has no users.
pub(super) fn end<K: Kind>(handle: *mut K::Handle) -> c_int {
    status(|| {
        drop(turn::<K>(handle)?.retire());
        Ok(())
    })
}

/// Ends an object, or returns `EBUSY` while it has users.
pub(super) fn end_unused<K: Kind>(
    handle: *mut K::Handle,
    users: impl FnOnce(&K) -> &Users,
) -> c_int {
    status(|| {
        let object = turn::<K>(handle)?;
        if users(&object).any() {
            return Err(Errno::BUSY);
        }
        drop(object.retire());
        Ok(())
    })
}
