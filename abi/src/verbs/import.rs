//! Importing: further handles of what another context of this process has made (`ibv_import_device(3)`).
//!
//! The kernel would share these objects between processes. Here they are memory of one process, so a context that comes from another process has no
//! objects to import.

use std::ffi::c_int;
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::fs::fstat;
use rustix::io::Errno;

use super::context::Context;
use super::device::devices;
use super::dm::{self, Dm};
use super::mr::{self, Mr};
use super::object::{Guard, Kind, find, turn};
use super::open::open;
use super::pd::{self, Pd};
use super::types::*;
use crate::call::{pointer, run};

/// `ibv_import_device`: the context takes over the descriptor.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_import_device(cmd_fd: c_int) -> *mut ibv_context {
    pointer(|| {
        if cmd_fd < 0 {
            return Err(Errno::BADF);
        }
        // SAFETY: it is used for the next call only, which says so if it is none.
        let stat = fstat(unsafe { BorrowedFd::borrow_raw(cmd_fd) })?;
        let file = (stat.st_dev, stat.st_ino);
        let which = {
            let mut contexts = Context::pool().all();
            let same = contexts.find(|context| context.ctx.file == file);
            same.ok_or(Errno::OPNOTSUPP)?.ctx.which
        };
        let device = devices()
            .find(|device| super::device::which(*device) == Ok(which))
            .ok_or(Errno::NODEV)?;
        // SAFETY: an open descriptor, which the caller gives away.
        open(device, unsafe { OwnedFd::from_raw_fd(cmd_fd) })
    })
}

/// `ibv_import_pd`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_import_pd(context: *mut ibv_context, pd_handle: u32) -> *mut ibv_pd {
    pointer(|| {
        let context = find::<Context>(context)?;
        let own: Guard<Pd> = Pd::pool()
            .all()
            .find(|pd| pd.num == pd_handle && pd.ctx.file == context.ctx.file)
            .ok_or(Errno::NOENT)?;
        pd::import(&own, &context)
    })
}

/// `ibv_unimport_pd`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_unimport_pd(pd: *mut ibv_pd) {
    run(|| {
        drop(turn::<Pd>(pd)?.retire());
        Ok(0)
    });
}

/// `ibv_import_mr`: what comes has the keys. Its memory is the program's, which knows where it is.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_import_mr(pd: *mut ibv_pd, mr_handle: u32) -> *mut ibv_mr {
    pointer(|| mr::import(&find::<Pd>(pd)?, mr_handle))
}

/// `ibv_unimport_mr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_unimport_mr(mr: *mut ibv_mr) {
    run(|| {
        let mr = turn::<Mr>(mr)?;
        if !mr.is_imported() {
            return Err(Errno::INVAL);
        }
        drop(mr.retire());
        Ok(0)
    });
}

/// `ibv_import_dm`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_import_dm(context: *mut ibv_context, dm_handle: u32) -> *mut ibv_dm {
    pointer(|| dm::import(&find::<Context>(context)?, dm_handle))
}

/// `ibv_unimport_dm`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_unimport_dm(dm: *mut ibv_dm) {
    run(|| {
        drop(turn::<Dm>(dm)?.retire());
        Ok(0)
    });
}
