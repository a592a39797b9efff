//! What makes `weft_ib0` look like a RoCE device: GIDs that are the host's addresses, and queue pairs joined by number
//! (`weft_verbs::cm::Broker`, docs/spec/persona.md).

use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::io::Errno;
use weft_verbs::cm::{Broker, ConnParam, QpName, gid_of, ip_of};
use weft_verbs::{Device, Qp, UdPort};

use super::object::{PerFork, lock};
use super::settings;
use super::types::{ibv_gid, ibv_global_route, ibv_qp_attr};

/// A queue pair's number; dropping it takes it back, and ends what [`rtr`] began.
pub(crate) use weft_verbs::cm::Number;

static BROKER: PerFork<Mutex<Option<Broker>>> = PerFork::new();

fn broker() -> Result<Broker, Errno> {
    lock(BROKER.get()).clone().ok_or(Errno::INVAL)
}

/// A number for a queue pair of `device`, the one device of this process.
///
/// # Errors
/// As `bind(2)` and `listen(2)`: the number is a port's.
pub(crate) fn reserve(device: &Device) -> Result<Number, Errno> {
    made(device).reserve().map_err(|error| errno(&error))
}

/// The same for a datagram queue pair, with the UDP port behind the number.
///
/// # Errors
/// As [`reserve`].
pub(crate) fn reserve_datagram(device: &Device) -> Result<(Number, UdPort), Errno> {
    made(device)
        .reserve_datagram()
        .map_err(|error| errno(&error))
}

fn made(device: &Device) -> Broker {
    lock(BROKER.get())
        .get_or_insert_with(|| Broker::new(device))
        .clone()
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The address of ours that a route begins at, the address that it leads to, and the interface where that matters.
///
/// # Errors
/// `EINVAL` for a GID index that is not there, and for a peer's GID that cannot be.
pub(crate) fn way(grh: &ibv_global_route) -> Result<(Gid, IpAddr, u32), Errno> {
    let index = usize::from(grh.sgid_index);
    let own = gids().get(index).copied().filter(|gid| !gid.is_empty());
    let own = own.ok_or(Errno::INVAL)?;
    let ip = ip_of(octets(&grh.dgid));
    if ip.is_unspecified() || ip.is_multicast() {
        return Err(Errno::INVAL);
    }
    let scope = if is_link_local(ip) { own.ifindex } else { 0 };
    Ok((own, ip, scope))
}

/// RTR: `qp`, whose number is from [`reserve`], is joined to the peer that `attr` names.
///
/// # Errors
/// `EINVAL` for a GID index that is not there, and for a peer's GID or number that cannot be.
pub(crate) fn rtr(qp: &Arc<Qp>, attr: &ibv_qp_attr) -> Result<(), Errno> {
    let (own, ip, scope) = way(&attr.ah_attr.grh)?;
    let ours = QpName {
        num: qp.num(),
        ip: own.ip,
    };
    let peer = QpName {
        num: attr.dest_qp_num,
        ip,
    };
    let depths = ConnParam {
        ird: u16::from(attr.max_dest_rd_atomic),
        // What we have outstanding is told later, at RTS; the peer's side says how many it takes.
        ord: u16::MAX,
        options: settings::link(),
        ..ConnParam::default()
    };
    broker()?
        .join(qp, ours, peer, scope, &depths)
        .map_err(|_| Errno::INVAL)
}

/// RTS: how long sends wait for the peer.
pub(crate) fn rts(num: u32, attr: &ibv_qp_attr) {
    if let Ok(broker) = broker() {
        broker.set_patience(num, patience(attr.timeout, attr.retry_cnt));
    }
}

/// RESET and ERR: the peer is not waited for any more.
pub(crate) fn reset(num: u32) {
    if let Ok(broker) = broker() {
        broker.leave(num);
    }
}

fn octets(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: each form of the union is sixteen bytes, and any bytes are a GID.
    unsafe { gid.raw }
}

/// An address of this host, as a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) ip: IpAddr,
    /// The interface that has it.
    pub(crate) ifindex: u32,
}

impl Gid {
    const EMPTY: Gid = Gid {
        ip: IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        ifindex: 0,
    };

    /// There is nothing at this index.
    pub(crate) fn is_empty(self) -> bool {
        self == Gid::EMPTY
    }

    pub(crate) fn raw(self) -> [u8; 16] {
        gid_of(self.ip)
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

/// The GID table of this process. An address keeps its index: new ones are added behind those that are known, and where one has gone, the entry is
/// empty ([`Gid::is_empty`]) until it comes back.
pub(crate) fn gids() -> Vec<Gid> {
    /// What was ever there, and whether it is now.
    static TABLE: PerFork<Mutex<Vec<(Gid, bool)>>> = PerFork::new();
    let mut table = lock(TABLE.get());
    update(&mut table, &addresses());
    let shown = |(gid, there): &(Gid, bool)| if *there { *gid } else { Gid::EMPTY };
    table.iter().map(shown).collect()
}

/// What an index can say.
const MAX_GIDS: usize = 256;

fn update(table: &mut Vec<(Gid, bool)>, now: &[Gid]) {
    for (gid, there) in table.iter_mut() {
        *there = now.contains(gid);
    }
    for gid in now {
        if table.iter().any(|(known, _)| known == gid) {
            continue;
        }
        if table.len() < MAX_GIDS {
            table.push((*gid, true));
        } else if let Some(free) = table.iter_mut().find(|(_, there)| !there) {
            *free = (*gid, true);
        }
    }
}

/// The addresses of the interfaces that are up, each once.
fn addresses() -> Vec<Gid> {
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
        let Some(ip) = (unsafe { address(entry.ifa_addr) }) else {
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
unsafe fn address(addr: *const libc::sockaddr) -> Option<IpAddr> {
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
    const FOR_EVER: Duration = Duration::from_hours(365 * 24);
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
            assert_eq!(weft_verbs::cm::ip_of(gid.raw()), gid.ip);
        }
    }

    #[test]
    fn addresses_keep_their_index() {
        let gid = |last: u8| Gid {
            ip: [192, 0, 2, last].into(),
            ifindex: 2,
        };
        let mut table = Vec::new();
        update(&mut table, &[gid(1), gid(2)]);
        update(&mut table, &[gid(0), gid(2)]);
        assert_eq!(table, [(gid(1), false), (gid(2), true), (gid(0), true)]);
        update(&mut table, &[gid(1), gid(2)]);
        assert_eq!(table, [(gid(1), true), (gid(2), true), (gid(0), false)]);
        let many: Vec<Gid> = (0..=255).map(gid).collect();
        update(&mut table, &many);
        assert_eq!(table.len(), MAX_GIDS);
        update(&mut table, &[Gid::EMPTY]);
        assert_eq!(table.len(), MAX_GIDS, "a place that was free");
    }

    #[test]
    fn patience_is_the_transport_timer_with_its_retries() {
        assert_eq!(patience(14, 7), Duration::from_secs(3));
        assert_eq!(patience(20, 6), Duration::from_nanos(4096 << 20) * 7);
        assert!(patience(0, 7) > Duration::from_secs(1_000_000));
    }
}
