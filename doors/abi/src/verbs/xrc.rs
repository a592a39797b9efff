//! XRC domains. A domain belongs to this process: programs that name one by the same file share it within a process, and not with other processes.

use std::ffi::c_int;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::OFlags;
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use weft_verbs::XrcDomain;

use super::context::{Context, Ctx};
use super::native::native;
use super::object::{Inherited, Kind as _, PerFork, find, kind, lock};
use super::params::read_param;
use super::types::*;
use super::users::{Users, end_unused};
use super::wire;
use crate::call::pointer;

/// The object behind an `ibv_xrcd`.
pub(crate) struct Xrcd {
    pub(crate) ctx: Arc<Ctx>,
    shared: Arc<Shared>,
    /// Queues and queue pairs that were made with it.
    pub(crate) users: Users,
}

/// A domain, shared by all its handles.
struct Shared {
    native: XrcDomain,
    /// The file that names it: device and inode, and a descriptor that prevents the reuse of the inode.
    file: Option<((u64, u64), OwnedFd)>,
}

#[derive(Default)]
struct Named(Mutex<Vec<Weak<Shared>>>);

impl Inherited for Named {}

static NAMED: PerFork<Named> = PerFork::new();

kind!(Xrcd as ibv_xrcd, 0x08c0_d0a1);

impl Xrcd {
    pub(crate) fn native(&self) -> &XrcDomain {
        &self.shared.native
    }
}

/// The domain that the file behind `fd` names. As with the kernel: `EAGAIN` when there is none and `flags` do not create one, `EINVAL` when there is one and
/// `flags` demand a new one.
fn shared(fd: c_int, flags: OFlags) -> Result<Arc<Shared>, Errno> {
    let make = |file| {
        let native = native()?.create_xrc_domain().map_err(super::errno)?;
        Ok(Arc::new(Shared { native, file }))
    };
    if fd == -1 {
        return make(None);
    }
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the descriptor is used for this call only, which fails if it is invalid.
    let given = unsafe { BorrowedFd::borrow_raw(fd) };
    let stat = rustix::fs::fstat(given)?;
    let name = (stat.st_dev, stat.st_ino);
    let mut named = lock(&NAMED.get().0);
    named.retain(|one| one.strong_count() > 0);
    let there = named.iter().filter_map(Weak::upgrade);
    match there
        .into_iter()
        .find(|one| one.file.as_ref().is_some_and(|file| file.0 == name))
    {
        Some(_) if flags.contains(OFlags::EXCL) => Err(Errno::INVAL),
        Some(one) => Ok(one),
        None if !flags.contains(OFlags::CREATE) => Err(Errno::AGAIN),
        None => {
            let made = make(Some((name, fcntl_dupfd_cloexec(given, 0)?)))?;
            named.push(Arc::downgrade(&made));
            Ok(made)
        }
    }
}

pub(crate) unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    const NEEDED: u32 = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    pointer(|| {
        let context = find::<Context>(context)?;
        // SAFETY: the caller's promise.
        let attr = unsafe { read_param(attr) }?;
        if attr.comp_mask != NEEDED {
            return Err(Errno::INVAL);
        }
        if !context.ctx.is_persona() {
            return Err(Errno::OPNOTSUPP);
        }
        wire::needs_xrc()?;
        let flags = OFlags::from_bits_truncate(attr.oflags as u32);
        let body = Xrcd {
            ctx: Arc::clone(&context.ctx),
            shared: shared(attr.fd, flags)?,
            users: Users::default(),
        };
        let made = Xrcd::pool().make(body, |c, _| c.context = context.handle())?;
        Ok(made.handle())
    })
}

pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    end_unused::<Xrcd>(xrcd, |xrcd| &xrcd.users)
}
