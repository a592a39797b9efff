//! The common head of all objects of libfabric, and the calls that are not implemented.

use std::ffi::{c_int, c_void};

use crate::abi::{Fid, Missing, Ops};

/// Fills the places of calls that are not implemented in a table.
pub(crate) unsafe extern "C" fn nosys() -> isize {
    -(libc::ENOSYS as isize)
}

pub(crate) const MISSING: Missing = nosys;

pub(crate) unsafe extern "C" fn no_bind(_: *mut Fid, _: *mut Fid, _: u64) -> c_int {
    -libc::ENOSYS
}

pub(crate) unsafe extern "C" fn no_control(_: *mut Fid, _: c_int, _: *mut c_void) -> c_int {
    -libc::ENOSYS
}

/// The `close` of most objects: drops the box.
///
/// # Safety
/// `T` is the type of the box that the pointer was made of, and begins with a [`Fid`].
pub(crate) unsafe extern "C" fn close<T>(fid: *mut Fid) -> c_int {
    // SAFETY: as said, and libfabric's user hands it over.
    drop(unsafe { Box::from_raw(fid.cast::<T>()) });
    0
}

pub(crate) const fn plain<T>() -> Ops {
    Ops {
        size: size_of::<Ops>(),
        close: close::<T>,
        bind: no_bind,
        control: no_control,
        missing: [MISSING; 3],
    }
}

pub(crate) fn fid(fclass: usize, context: *mut c_void, ops: &'static Ops) -> Fid {
    Fid {
        fclass,
        context,
        ops,
    }
}
