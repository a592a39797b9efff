//! Imports: further handles of another context's objects (`ibv_import_device(3)`).
//!
//! The kernel would share these objects between processes. Here they are memory of one process: objects of another process' context are made again in this
//! process, from its table ([`super::export`]) and its files.

use std::ffi::c_int;
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::fs::fstat;
use rustix::io::Errno;

use super::context::Context;
use super::device::devices;
use super::dm::{self, Dm};
use super::foreign::Foreign;
use super::mr::{self, Mr};
use super::object::{Kind, find, turn};
use super::open::open;
use super::pd::{self, Pd};
use super::types::*;
use super::users::end;
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
        // SAFETY: the caller's descriptor. An invalid one makes the call fail, and it is used in this call only.
        let cmd = unsafe { BorrowedFd::borrow_raw(cmd_fd) };
        let stat = fstat(cmd)?;
        let file = (stat.st_dev, stat.st_ino);
        let same = {
            let mut contexts = Context::pool().all();
            let same =
                contexts.find(|context| context.ctx.file == file && context.ctx.foreign.is_none());
            same.map(|context| (context.ctx.which, context.ctx.export.clone()))
        };
        let (which, export, foreign) = if let Some((which, export)) = same {
            (which, export, None)
        } else {
            let (foreign, which) = Foreign::open(cmd)?;
            (which, None, Some(foreign))
        };
        let device = devices()
            .find(|device| super::device::which(*device) == Ok(which))
            .ok_or(Errno::NODEV)?;
        // SAFETY: an open descriptor, which the caller gives away.
        open(
            device,
            unsafe { OwnedFd::from_raw_fd(cmd_fd) },
            export,
            foreign,
        )
    })
}

/// `ibv_import_pd`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_import_pd(context: *mut ibv_context, pd_handle: u32) -> *mut ibv_pd {
    pointer(|| {
        let context = find::<Context>(context)?;
        let name = (context.ctx.file, pd_handle);
        match Pd::pool().all().find(|pd| pd.identity() == name) {
            Some(own) => pd::import(&own, &context),
            None => pd::import_foreign(&context, pd_handle),
        }
    })
}

/// `ibv_unimport_pd`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_unimport_pd(pd: *mut ibv_pd) {
    end::<Pd>(pd);
}

/// `ibv_import_mr`: the handle has the keys. The program knows where its memory is.
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
    end::<Dm>(dm);
}
