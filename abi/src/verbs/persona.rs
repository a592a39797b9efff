//! What makes `weft_ib0` look like a RoCE device: GIDs that are the host's addresses, and queue pairs joined by number
//! (`weft_verbs::cm::Broker`, docs/spec/persona.md).

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

/// An address of this host, as a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) ip: IpAddr,
    /// The interface that has it.
    pub(crate) ifindex: u32,
}

impl Gid {
    pub(crate) fn raw(self) -> [u8; 16] {
        match self.ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        }
    }

    /// The scope that an address of the same link is dialled with; 0 where there is none.
    pub(crate) fn scope(self) -> u32 {
        if is_link_local(self.ip) {
            self.ifindex
        } else {
            0
        }
    }

    /// What others reach from afar comes first, and IPv4 before IPv6: programs take index 0 unless told.
    fn rank(self) -> u8 {
        match self.ip {
            ip if ip.is_loopback() => 3,
            IpAddr::V4(_) => 0,
            ip if is_link_local(ip) => 2,
            IpAddr::V6(_) => 1,
        }
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// The GID table: the addresses of the interfaces that are up, each once.
pub(crate) fn gids() -> Vec<Gid> {
    let mut list = std::ptr::null_mut();
    // SAFETY: a place for one pointer.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let mut gids: Vec<Gid> = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: a member of the list, which lives until it is freed below.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as u32 == 0 || entry.ifa_name.is_null() {
            continue;
        }
        // SAFETY: an address that the system wrote, or none.
        let Some(ip) = (unsafe { ip_of(entry.ifa_addr) }) else {
            continue;
        };
        // SAFETY: a name that the system wrote.
        let ifindex = unsafe { libc::if_nametoindex(entry.ifa_name) };
        if gids.iter().all(|gid| gid.ip != ip) {
            gids.push(Gid { ip, ifindex });
        }
    }
    // SAFETY: what `getifaddrs` gave, once.
    unsafe { libc::freeifaddrs(list) };
    gids.sort_by_key(|gid| gid.rank());
    gids
}

/// # Safety
/// Null, or an address as long as its family says.
unsafe fn ip_of(addr: *const libc::sockaddr) -> Option<IpAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: every address begins with its family.
    match i32::from(unsafe { (*addr).sa_family }) {
        libc::AF_INET => {
            // SAFETY: of this family.
            let addr = unsafe { addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(IpAddr::from(addr.sin_addr.s_addr.to_ne_bytes()))
        }
        libc::AF_INET6 => {
            // SAFETY: of this family.
            let addr = unsafe { addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(addr.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

/// How long a sender waits for a peer that does not answer: the local ACK time-out is 4.096 µs · 2^`timeout` (InfiniBand 9.7.6.1.3), and
/// there are `retries` more attempts. 0 stands for "for ever" there. Never less than three seconds: a process may be slow to start.
pub(crate) fn patience(timeout: u8, retries: u8) -> Duration {
    const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);
    match timeout & 31 {
        0 => FOR_EVER,
        timeout => {
            let one = Duration::from_nanos(4096 << timeout);
            (one * (u32::from(retries & 7) + 1)).max(Duration::from_secs(3))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_gids() {
        let gids = gids();
        let local = gids.iter().position(|gid| gid.ip.is_loopback());
        let local = local.expect("every host has a loopback address");
        assert!(gids[local].ifindex > 0);
        assert!(gids[local..].iter().all(|gid| gid.ip.is_loopback()));
        for gid in &gids {
            assert_eq!(Ipv6Addr::from(gid.raw()).to_canonical(), gid.ip);
            assert_eq!(gid.scope() != 0, is_link_local(gid.ip));
        }
    }

    #[test]
    fn patience_is_the_transport_timer_with_its_retries() {
        assert_eq!(patience(14, 7), Duration::from_secs(3));
        assert_eq!(patience(20, 6), Duration::from_nanos(4096 << 20) * 7);
        assert!(patience(0, 7) > Duration::from_secs(1_000_000));
    }
}
