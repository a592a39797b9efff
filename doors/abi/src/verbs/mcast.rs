//! The multicast groups of the persona's datagram queue pairs.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use rustix::io::Errno;

use super::gid::gids;
use super::group::{group_of, port_of};
use super::object::turn;
use super::qp::QpObj;
use super::types::{ibv_gid, ibv_qp};
use crate::call::status;

/// All interfaces with an address of the group's family.
fn interfaces(group: IpAddr) -> Result<Vec<u32>, Errno> {
    let mut found: Vec<u32> = Vec::new();
    for gid in gids()? {
        if !gid.is_empty() && gid.ip.is_ipv4() == group.is_ipv4() && !found.contains(&gid.ifindex) {
            found.push(gid.ifindex);
        }
    }
    Ok(found)
}

/// `qp` receives this group's messages from now on: on this interface, or on all.
///
/// # Errors
/// `EINVAL` when it is not a datagram queue pair or not a group; as `bind(2)` and `setsockopt(2)`.
pub(crate) fn attach(qp: *mut ibv_qp, gid: [u8; 16], interface: Option<u32>) -> Result<(), Errno> {
    let qp = turn::<QpObj>(qp)?;
    let group = group_of(gid).ok_or(Errno::INVAL)?;
    let on = interface.map_or_else(|| interfaces(group), |interface| Ok(vec![interface]))?;
    let ud = qp.datagrams()?;
    let port = port_of(group);
    let IpAddr::V6(of_a_link) = group else {
        return ud.attach(SocketAddr::new(group, port), on);
    };
    // The scope in RFC 4291's terms: interface-local or link-local.
    if !matches!(of_a_link.octets()[1] & 0x0f, 1 | 2) {
        return ud.attach(SocketAddr::new(group, port), on);
    }
    // The same group on another interface is another group.
    let mut attached = Err(Errno::NODEV);
    for interface in on {
        let at = SocketAddrV6::new(of_a_link, port, 0, interface);
        let now = ud.attach(at.into(), vec![interface]);
        attached = attached.or(now);
    }
    attached
}

/// `qp` receives this group's messages no more.
///
/// # Errors
/// `EINVAL` when it was not attached.
pub(crate) fn detach(qp: *mut ibv_qp, gid: [u8; 16]) -> Result<(), Errno> {
    let qp = turn::<QpObj>(qp)?;
    let group = group_of(gid).ok_or(Errno::INVAL)?;
    qp.datagrams()?.detach(group)
}

/// # Safety
/// Null, or a GID.
unsafe fn read(gid: *const ibv_gid) -> Result<[u8; 16], Errno> {
    if gid.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise, and any bytes are a GID.
    Ok(unsafe { gid.read_unaligned().raw })
}

/// `ibv_attach_mcast`. There is no subnet manager: this joins the group too.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: the caller's promise.
    status(|| attach(qp, unsafe { read(gid) }?, None))
}

/// `ibv_detach_mcast`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: the caller's promise.
    status(|| detach(qp, unsafe { read(gid) }?))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_host_has_interfaces_for_groups() {
        assert_ne!(interfaces(Ipv4Addr::new(239, 1, 2, 3).into()), Ok(vec![]));
    }
}
