//! Multicast groups of the persona's datagram queue pairs: IP multicast (docs/spec/dgram.md).

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};

use rustix::io::Errno;
use weft_verbs::cm::ip_of;

use super::gid::gids;
use super::object::turn;
use super::qp::QpObj;
use super::types::{ibv_gid, ibv_qp};
use crate::call::status;

/// The upper half of a group's UDP port; the lower is the last byte of its GID.
const PORT: u16 = 0x5700;
/// What RoCE's first version puts in front of an IPv4 group, which its second has mapped into IPv6.
const ROCE_V1: [u8; 12] = [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

/// The group behind a GID, if it is one.
pub(crate) fn group_of(gid: [u8; 16]) -> Option<IpAddr> {
    if let Some(last) = gid.strip_prefix(&ROCE_V1)
        && let Ok(octets) = <[u8; 4]>::try_from(last)
    {
        let group = Ipv4Addr::from(octets);
        return group.is_multicast().then_some(group.into());
    }
    Some(ip_of(gid)).filter(IpAddr::is_multicast)
}

/// Where a group is heard.
pub(crate) fn port_of(group: IpAddr) -> u16 {
    let last = match group {
        IpAddr::V4(group) => group.octets()[3],
        IpAddr::V6(group) => group.octets()[15],
    };
    PORT | u16::from(last)
}

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

/// `qp` hears this group from now on: on this interface, or on all.
///
/// # Errors
/// `EINVAL` for what is no datagram queue pair or no group; as `bind(2)` and `setsockopt(2)`.
pub(crate) fn attach(qp: *mut ibv_qp, gid: [u8; 16], interface: Option<u32>) -> Result<(), Errno> {
    let qp = turn::<QpObj>(qp)?;
    let group = group_of(gid).ok_or(Errno::INVAL)?;
    let on = interface.map_or_else(|| interfaces(group), |interface| Ok(vec![interface]))?;
    let ud = qp.datagrams()?;
    let port = port_of(group);
    let IpAddr::V6(of_a_link) = group else {
        return ud.attach(SocketAddr::new(group, port), on);
    };
    // The scope, as RFC 4291 has it: of an interface or of a link.
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

/// `qp` hears this group no more.
///
/// # Errors
/// `EINVAL` when it did not.
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
    use weft_verbs::cm::gid_of;

    use super::*;

    #[test]
    fn groups_are_told_from_addresses() {
        let gid = |text: &str| gid_of(text.parse().unwrap());
        let group: IpAddr = "239.1.2.3".parse().unwrap();
        assert_eq!(group_of(gid("239.1.2.3")), Some(group));
        assert_eq!(group_of(gid("ff0e::ffff:239.1.2.3")), Some(group));
        assert_eq!(group_of(gid("ff0e::ffff:10.1.2.3")), None);
        let group6: IpAddr = "ff0e::1:239.1.2.3".parse().unwrap();
        assert_eq!(group_of(gid("ff0e::1:239.1.2.3")), Some(group6));
        for none in ["10.1.2.3", "::", "fe80::1", "255.255.255.255"] {
            assert_eq!(group_of(gid(none)), None, "{none}");
        }
        assert_eq!((port_of(group), port_of(group6)), (0x5703, 0x5703));
        assert_ne!(interfaces(group), Ok(vec![]));
    }
}
