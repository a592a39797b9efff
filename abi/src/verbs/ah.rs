//! Address handles and multicast: they are for unreliable datagrams, which there are none of.

use std::ffi::c_int;

use rustix::io::Errno;

use super::types::*;
use crate::call::pointer;

const NONE: c_int = Errno::OPNOTSUPP.raw_os_error();

/// `ibv_create_ah`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_create_ah(_pd: *mut ibv_pd, _attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    pointer(|| Err(Errno::OPNOTSUPP))
}

/// `ibv_create_ah_from_wc`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_create_ah_from_wc(
    _pd: *mut ibv_pd,
    _wc: *mut ibv_wc,
    _grh: *mut ibv_grh,
    _port_num: u8,
) -> *mut ibv_ah {
    pointer(|| Err(Errno::OPNOTSUPP))
}

/// `ibv_init_ah_from_wc`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_init_ah_from_wc(
    _context: *mut ibv_context,
    _port_num: u8,
    _wc: *mut ibv_wc,
    _grh: *mut ibv_grh,
    _ah_attr: *mut ibv_ah_attr,
) -> c_int {
    NONE
}

/// `ibv_destroy_ah`: there are none.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_destroy_ah(_ah: *mut ibv_ah) -> c_int {
    Errno::INVAL.raw_os_error()
}

/// `ibv_resolve_eth_l2_from_gid`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_resolve_eth_l2_from_gid(
    _context: *mut ibv_context,
    _attr: *mut ibv_ah_attr,
    _eth_mac: *mut u8,
    _vid: *mut u16,
) -> c_int {
    NONE
}

/// `ibv_attach_mcast`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_attach_mcast(_qp: *mut ibv_qp, _gid: *const ibv_gid, _lid: u16) -> c_int {
    NONE
}

/// `ibv_detach_mcast`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_detach_mcast(_qp: *mut ibv_qp, _gid: *const ibv_gid, _lid: u16) -> c_int {
    NONE
}
