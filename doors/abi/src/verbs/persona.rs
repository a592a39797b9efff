//! The RoCE face of `weft_ib0`: GIDs that are the host's addresses, and queue pairs joined by number (`weft_verbs::cm::Broker`, docs/spec/persona.md).

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::io::Errno;
use weft_verbs::cm::{Broker, ConnParam, LinkOptions, QpName, ip_of};
use weft_verbs::{Device, Qp, UdPort};

use super::gid::{Gid, gids, is_link_local};
use super::object::{PerFork, lock};
use super::types::{ibv_gid, ibv_global_route, ibv_qp_attr};
use super::{os_errno, settings};

/// A queue pair's number. Dropping it frees the number and ends what [`rtr`] began.
pub(crate) use weft_verbs::cm::Number;

static BROKER: PerFork<Mutex<Option<Broker>>> = PerFork::new();

fn broker() -> Result<Broker, Errno> {
    lock(BROKER.get()).clone().ok_or(Errno::INVAL)
}

/// A number for a queue pair of `device`, the one device of this process.
///
/// # Errors
/// As `bind(2)` and `listen(2)`: the number contains a port.
pub(crate) fn reserve(device: &Device) -> Result<Number, Errno> {
    made(device).reserve().map_err(|error| os_errno(&error))
}

/// The same for a datagram queue pair, with the UDP port behind the number.
///
/// # Errors
/// As [`reserve`].
pub(crate) fn reserve_datagram(device: &Device) -> Result<(Number, UdPort), Errno> {
    made(device)
        .reserve_datagram()
        .map_err(|error| os_errno(&error))
}

fn made(device: &Device) -> Broker {
    lock(BROKER.get())
        .get_or_insert_with(|| Broker::new(device))
        .clone()
}

/// The local address of a route, its destination, and the interface where that matters.
///
/// # Errors
/// `EINVAL` for a GID index that does not exist, and for an impossible GID of the peer; as [`gids`].
pub(crate) fn way(grh: &ibv_global_route) -> Result<(Gid, IpAddr, u32), Errno> {
    let index = usize::from(grh.sgid_index);
    let own = gids()?.get(index).copied().filter(|gid| !gid.is_empty());
    let own = own.ok_or(Errno::INVAL)?;
    let ip = ip_of(octets(&grh.dgid));
    if ip.is_unspecified() || ip.is_multicast() {
        return Err(Errno::INVAL);
    }
    let scope = if is_link_local(ip) { own.ifindex } else { 0 };
    Ok((own, ip, scope))
}

/// RTR: joins `qp`, whose number is from [`reserve`], to the peer that `attr` names.
///
/// # Errors
/// `EINVAL` for a GID index that does not exist, and for an impossible GID or number of the peer.
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
        // The program sets our outstanding Reads later, at RTS; the peer reports how many it accepts.
        ord: u16::MAX,
        options: LinkOptions {
            // No program sees these addresses.
            keep_tcp: false,
            ..settings::link()
        },
        ..ConnParam::default()
    };
    broker()?
        .join(qp, ours, peer, scope, &depths)
        .map_err(|_| Errno::INVAL)
}

/// RTS: sets how long sends wait for the peer.
pub(crate) fn rts(num: u32, patience: Duration) {
    if let Ok(broker) = broker() {
        broker.set_patience(num, patience);
    }
}

/// The receiver-not-ready timer for a `min_rnr_timer` (InfiniBand 9.7.5.2.8).
pub(crate) fn rnr_timer(code: u8) -> Duration {
    const IN_10_US: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10) * IN_10_US[usize::from(code & 31)]
}

/// RESET and ERR: stops waiting for the peer.
pub(crate) fn reset(num: u32) {
    if let Ok(broker) = broker() {
        broker.leave(num);
    }
}

/// Another wire took this queue pair: requests for it are rejected until [`reset`].
pub(crate) fn refuse(num: u32) {
    if let Ok(broker) = broker() {
        broker.refuse(num);
    }
}

fn octets(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: each form of the union is sixteen bytes, and any bytes are a GID.
    unsafe { gid.raw }
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
    fn patience_is_the_transport_timer_with_its_retries() {
        assert_eq!(patience(14, 7), Duration::from_secs(3));
        assert_eq!(patience(20, 6), Duration::from_nanos(4096 << 20) * 7);
        assert!(patience(0, 7) > Duration::from_secs(1_000_000));
    }
}
