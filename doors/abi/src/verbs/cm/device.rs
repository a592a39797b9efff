//! The device that identifiers are bound to: the first of `WEFT_DEVICES`. For datagrams and InfiniBand's port space it is the first that supports them.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::Mutex;

use rustix::io::Errno;
use weft_verbs::Device;

use super::types::{RDMA_PS_IB, RDMA_PS_IPOIB, RDMA_PS_UDP, rdma_port_space};
use crate::call::pointer;
use crate::verbs::context::is_persona;
use crate::verbs::last_errno;
use crate::verbs::native::native;
use crate::verbs::object::{Inherited, PerFork, lock};
use crate::verbs::open::cm_contexts;
use crate::verbs::params::list;
use crate::verbs::pd::ibv_alloc_pd;
use crate::verbs::types::{
    IBV_XRCD_INIT_ATTR_FD, IBV_XRCD_INIT_ATTR_OFLAGS, ibv_context, ibv_pd, ibv_xrcd,
    ibv_xrcd_init_attr,
};
use crate::verbs::xrc::open_xrcd;

/// A device with an open context.
#[derive(Clone)]
pub(super) struct Nic {
    pub(super) context: *mut ibv_context,
    /// The protection domain for programs that name none.
    pub(super) pd: *mut ibv_pd,
    pub(super) native: Device,
    pub(super) persona: bool,
}

// SAFETY: addresses only; the objects behind them are reached through the pools.
unsafe impl Send for Nic {}
// SAFETY: as above.
unsafe impl Sync for Nic {}

impl Nic {
    /// Reads and atomics that a queue pair may have outstanding, in each direction.
    pub(super) fn max_rd_atomic(&self) -> u16 {
        self.native.attr().limits.max_rd_atomic
    }
}

/// Port spaces of unconnected queue pairs.
pub(super) fn datagrams(ps: rdma_port_space) -> bool {
    matches!(ps, RDMA_PS_UDP | RDMA_PS_IPOIB)
}

#[derive(Default)]
struct First([Mutex<Option<Nic>>; 2]);

impl Inherited for First {}

/// The device for a port space. Opened once and never closed, as with the real library.
pub(super) fn of(ps: rdma_port_space) -> Result<Nic, Errno> {
    static FIRST: PerFork<First> = PerFork::new();
    // iWARP has neither: such an identifier fails there at the same step as with an RNIC.
    let infiniband = datagrams(ps) || ps == RDMA_PS_IB;
    let mut first = lock(&FIRST.get().0[usize::from(infiniband)]);
    if let Some(nic) = &*first {
        return Ok(nic.clone());
    }
    let contexts = cm_contexts()?;
    let suited = |context: &&*mut ibv_context| !infiniband || is_persona(**context) == Ok(true);
    let found = contexts.iter().find(suited).or(contexts.first());
    let context = *found.ok_or(Errno::NODEV)?;
    // SAFETY: a context that is never closed.
    let pd = unsafe { ibv_alloc_pd(context) };
    if pd.is_null() {
        return Err(last_errno());
    }
    let nic = Nic {
        context,
        pd,
        native: native()?,
        persona: is_persona(context)?,
    };
    *first = Some(nic.clone());
    Ok(nic)
}

/// The XRC domain for programs that name none, on a device with XRC. Opened once and never closed, as with the real library.
pub(super) fn xrcd(context: *mut ibv_context) -> Result<*mut ibv_xrcd, Errno> {
    /// Addresses of contexts, and of their domains.
    static DOMAINS: PerFork<Mutex<HashMap<usize, usize>>> = PerFork::new();
    let mut domains = lock(DOMAINS.get());
    if let Some(domain) = domains.get(&(context as usize)) {
        return Ok(*domain as *mut ibv_xrcd);
    }
    let mut attr = ibv_xrcd_init_attr {
        comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
        fd: -1,
        oflags: libc::O_CREAT,
    };
    // SAFETY: the call checks its parameters.
    let domain = unsafe { open_xrcd(context, &raw mut attr) };
    if domain.is_null() {
        return Err(last_errno());
    }
    domains.insert(context as usize, domain as usize);
    Ok(domain)
}

/// `rdma_get_devices(3)`.
///
/// # Safety
/// As its manual page: a place for an `int`, or null.
pub unsafe fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context {
    pointer(|| {
        let contexts = cm_contexts()?;
        // SAFETY: the caller's promise.
        unsafe { list(&contexts, num_devices) }
    })
}

/// `rdma_free_devices(3)`.
///
/// # Safety
/// As its manual page: null, or a list of [`rdma_get_devices`] that was not freed yet.
pub unsafe fn rdma_free_devices(list: *mut *mut ibv_context) {
    // SAFETY: the caller's promise.
    unsafe { libc::free(list.cast()) };
}
