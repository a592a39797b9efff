//! Options, and enhanced connection establishment.

use std::ffi::{c_int, c_void};

use rustix::io::Errno;

use super::id::{Stage, core, get};
use super::types::{
    RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, RDMA_OPTION_ID_AFONLY, RDMA_OPTION_ID_REUSEADDR,
    RDMA_OPTION_ID_TOS, rdma_cm_id,
};
use crate::call::run;
use crate::verbs::types::ibv_ece;

/// `rdma_set_option(3)`. The type of service and the ACK time-out are accepted and have no effect: TCP has its own timers, and loopback and shared memory have
/// no service classes.
///
/// # Safety
/// As its manual page: `optlen` bytes at `optval`.
pub unsafe fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    optname: c_int,
    optval: *mut c_void,
    optlen: usize,
) -> c_int {
    run(|| {
        let core = core(id)?;
        if level as u32 != RDMA_OPTION_ID {
            // Paths of InfiniBand: routing is the operating system's here.
            return Err(Errno::NOSYS);
        }
        let (len, most) = match optname as u32 {
            RDMA_OPTION_ID_TOS => (1, u8::MAX),
            // Five bits (InfiniBand 9.7.6.1.3).
            RDMA_OPTION_ID_ACK_TIMEOUT => (1, 31),
            RDMA_OPTION_ID_REUSEADDR | RDMA_OPTION_ID_AFONLY => (size_of::<c_int>(), 0),
            _ => return Err(Errno::NOSYS),
        };
        if optval.is_null() || optlen != len {
            return Err(Errno::INVAL);
        }
        if len == 1 {
            // SAFETY: the caller's promise.
            let value = unsafe { optval.cast::<u8>().read() };
            if value > most {
                return Err(Errno::INVAL);
            }
            if optname as u32 == RDMA_OPTION_ID_ACK_TIMEOUT {
                core.setup().ack_timeout = Some(value);
            }
            return Ok(0);
        }
        // SAFETY: as above.
        let on = unsafe { optval.cast::<c_int>().read_unaligned() } != 0;
        let mut setup = core.setup();
        if !matches!(setup.stage, Stage::Idle) {
            return Err(Errno::INVAL);
        }
        if optname as u32 == RDMA_OPTION_ID_REUSEADDR {
            setup.reuse = on;
        } else {
            setup.only_v6 = on;
        }
        Ok(0)
    })
}

/// `rdma_set_local_ece(3)`: accepted, and not sent to the peer.
///
/// # Safety
/// As its manual page.
pub unsafe fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
    run(|| {
        let core = core(id)?;
        if !get!(core, qp).is_null() || ece.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let ece = unsafe { ece.read_unaligned() };
        if ece.vendor_id == 0 || ece.comp_mask != 0 {
            return Err(Errno::INVAL);
        }
        Ok(0)
    })
}

/// `rdma_get_remote_ece(3)`: the peer never sends any.
///
/// # Safety
/// As its manual page.
pub unsafe fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
    run(|| {
        let core = core(id)?;
        if !get!(core, qp).is_null() || ece.is_null() {
            return Err(Errno::INVAL);
        }
        let nothing = ibv_ece {
            vendor_id: 0,
            options: 0,
            comp_mask: 0,
        };
        // SAFETY: the caller's promise.
        unsafe { ece.write_unaligned(nothing) };
        Ok(0)
    })
}
