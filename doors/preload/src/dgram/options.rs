//! Options and `ioctl`s of UDP sockets.
//!
//! # Safety
//!
//! As `setsockopt(2)` and `ioctl(2)`.

use libc::{c_int, c_ulong, c_void, socklen_t};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::meet::Why;

use super::{Dgram, frames, of, parting, tx, unframed};
use crate::iov::is_bad;
use crate::kernel::{self, borrowed};
use crate::{signal, table};

/// The time limits with 64-bit times.
const SO_RCVTIMEO_NEW: c_int = 66;
const SO_SNDTIMEO_NEW: c_int = 67;
const SO_TIMESTAMP_NEW: c_int = 63;
const SO_TIMESTAMPNS_NEW: c_int = 64;

/// When the last datagram came: the lower half of the calls' numbers, which is the same for all widths of times.
const SIOCGSTAMP: c_ulong = 0x8906;
const SIOCGSTAMPNS: c_ulong = 0x8907;

/// Requests for signals that announce datagrams.
const FIOSETOWN: c_ulong = 0x8901;
const SIOCSPGRP: c_ulong = 0x8902;
pub(crate) const FIOASYNC: c_ulong = 0x5452;

/// Options that change nothing of what goes through a ring.
fn is_harmless(level: c_int, name: c_int) -> bool {
    match level {
        libc::SOL_SOCKET => {
            matches!(
                name,
                libc::SO_RCVBUF
                    | libc::SO_SNDBUF
                    | libc::SO_RCVBUFFORCE
                    | libc::SO_SNDBUFFORCE
                    | libc::SO_REUSEADDR
                    | libc::SO_REUSEPORT
                    | libc::SO_BROADCAST
                    | libc::SO_RCVTIMEO
                    | libc::SO_SNDTIMEO
                    | libc::SO_KEEPALIVE
                    | libc::SO_LINGER
                    | libc::SO_PRIORITY
                    | libc::SO_DEBUG
                    | libc::SO_RCVLOWAT
                    | libc::SO_BUSY_POLL
                    | libc::SO_NO_CHECK
                    | libc::SO_OOBINLINE
                    | SO_RCVTIMEO_NEW
                    | SO_SNDTIMEO_NEW
            )
        }
        libc::IPPROTO_IP => matches!(
            name,
            libc::IP_TOS
                | libc::IP_TTL
                | libc::IP_PKTINFO
                | libc::IP_MTU_DISCOVER
                | libc::IP_RECVERR
                | libc::IP_MULTICAST_TTL
                | libc::IP_MULTICAST_LOOP
                | libc::IP_MULTICAST_IF
                | libc::IP_MULTICAST_ALL
                | libc::IP_ADD_MEMBERSHIP
                | libc::IP_DROP_MEMBERSHIP
                | libc::IP_ADD_SOURCE_MEMBERSHIP
                | libc::IP_DROP_SOURCE_MEMBERSHIP
                | libc::IP_FREEBIND
        ),
        libc::IPPROTO_IPV6 => matches!(
            name,
            libc::IPV6_V6ONLY
                | libc::IPV6_RECVPKTINFO
                | libc::IPV6_UNICAST_HOPS
                | libc::IPV6_MTU_DISCOVER
                | libc::IPV6_RECVERR
                | libc::IPV6_TCLASS
                | libc::IPV6_MULTICAST_HOPS
                | libc::IPV6_MULTICAST_LOOP
                | libc::IPV6_MULTICAST_IF
                | libc::IPV6_ADD_MEMBERSHIP
                | libc::IPV6_DROP_MEMBERSHIP
        ),
        _ => false,
    }
}

/// Options under which a frame is to the program what its datagram is: those that rings know, and others that do not concern the bytes. `IP_RECVERR` shows the
/// program what it has sent.
fn is_fit_for_frames(level: c_int, name: c_int) -> bool {
    let shows_sent = matches!(
        (level, name),
        (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)
    );
    let others = match level {
        libc::SOL_SOCKET => matches!(
            name,
            libc::SO_TIMESTAMP
                | libc::SO_TIMESTAMPNS
                | SO_TIMESTAMP_NEW
                | SO_TIMESTAMPNS_NEW
                | libc::SO_BINDTODEVICE
                | libc::SO_MARK
                | libc::SO_RXQ_OVFL
                | libc::SO_DONTROUTE
                | libc::SO_INCOMING_CPU
                | libc::SO_PASSCRED
        ),
        libc::IPPROTO_IP => matches!(
            name,
            libc::IP_RECVTTL
                | libc::IP_RECVTOS
                | libc::IP_RECVORIGDSTADDR
                | libc::IP_TRANSPARENT
                | libc::IP_BIND_ADDRESS_NO_PORT
        ),
        libc::IPPROTO_IPV6 => matches!(
            name,
            libc::IPV6_RECVHOPLIMIT
                | libc::IPV6_RECVTCLASS
                | libc::IPV6_RECVORIGDSTADDR
                | libc::IPV6_TRANSPARENT
                | libc::IPV6_FREEBIND
        ),
        _ => false,
    };
    !shows_sent && (others || is_harmless(level, name))
}

fn number(value: *const c_void, len: socklen_t) -> c_int {
    match len {
        _ if value.is_null() => 0,
        // SAFETY: the kernel has just read as many bytes.
        4.. => unsafe { value.cast::<c_int>().read_unaligned() },
        // SAFETY: as above.
        1.. => c_int::from(unsafe { value.cast::<u8>().read() }),
        0 => 0,
    }
}

/// Follows an option that the kernel has accepted.
pub(crate) fn set(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) {
    let Some(d) = of(fd) else { return };
    if (level, name) == (libc::SOL_SOCKET, libc::SO_PEEK_OFF) {
        // It counts what a call looks at: the program's buffer, not one of ours.
        parting::hand_over(&[(fd, d)]);
        d.own_calls.store(true, SeqCst);
    }
    if !is_fit_for_frames(level, name) {
        return d.plain(Why::Option);
    }
    if !is_harmless(level, name) {
        return d.without_rings(Why::Option);
    }
    let v6 = d.v6.load(Relaxed);
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO | SO_RCVTIMEO_NEW) => {
            if value.is_null() || (len as usize) < size_of::<libc::timeval>() {
                return;
            }
            // SAFETY: the kernel has just read it.
            let time = unsafe { value.cast::<libc::timeval>().read_unaligned() };
            let ms = time
                .tv_sec
                .saturating_mul(1000)
                .saturating_add(time.tv_usec.saturating_add(999) / 1000);
            d.patience.store(ms.max(0), SeqCst);
        }
        (libc::IPPROTO_IP, libc::IP_PKTINFO) | (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO) => {
            // An IPv6 socket reports the destination of IPv4 datagrams in two ways, on request.
            if v6 != (level == libc::IPPROTO_IPV6) || d.inbound.load(SeqCst) {
                return d.without_rings(Why::Option);
            }
            d.pktinfo.store(number(value, len) != 0, SeqCst);
        }
        (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER)
        | (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER)
            if !matches!(
                number(value, len),
                libc::IP_PMTUDISC_DONT | libc::IP_PMTUDISC_WANT
            ) =>
        {
            // The program looks for the longest packet itself.
            frames::leave(d);
        }
        _ => {}
    }
}

/// Tells an error that a look has taken from the kernel, where it has none to tell.
pub(crate) fn tell_error(fd: c_int, value: *mut c_void, len: *const socklen_t) {
    let Some(d) = of(fd).filter(|d| d.failed.load(Relaxed) != 0) else {
        return;
    };
    let value: *mut c_int = value.cast();
    // SAFETY: the kernel has just written both.
    if unsafe { len.read_unaligned() as usize >= size_of::<c_int>() && value.read_unaligned() == 0 }
    {
        // SAFETY: as above.
        unsafe { value.write_unaligned(d.failed.swap(0, SeqCst)) };
    }
}

/// # Safety
/// As `ioctl(2)`: `call` is the program's own.
pub(crate) unsafe fn ioctl(
    fd: c_int,
    d: &'static Dgram,
    op: c_ulong,
    arg: c_ulong,
    call: impl Fn() -> c_int,
) -> c_int {
    let out: *mut c_int = std::ptr::with_exposed_provenance_mut(arg as usize);
    let is_frame = op == libc::FIONREAD && frames::looks_at(d) && !is_bad(out);
    if op == libc::FIONREAD && d.inbound.load(SeqCst) && !out.is_null() && !signal::is_inside(d) {
        let next = if d.is(fd) { d.rx().next_len(fd) } else { None };
        if let Some(len) = next {
            // SAFETY: the caller's promise.
            unsafe { out.write_unaligned(len as c_int) };
            return 0;
        }
    }
    let rc = call();
    if rc == 0
        && is_frame
        && let Some(len) = unframed::next_len(fd, d)
    {
        // SAFETY: the kernel has just written it.
        unsafe { out.write_unaligned(len as c_int) };
    }
    if rc == 0 && op == libc::FIONBIO && !out.is_null() {
        // SAFETY: the kernel has just read it.
        d.nonblock
            .store(unsafe { out.read_unaligned() } != 0, SeqCst);
    } else if rc == 0 && matches!(op & 0xffff, SIOCGSTAMP | SIOCGSTAMPNS) {
        // From now on the kernel notes when datagrams come.
        d.without_rings(Why::Option);
    } else if rc == 0 && matches!(op, FIOSETOWN | SIOCSPGRP | FIOASYNC) {
        d.without_rings(Why::Option);
    }
    rc
}

/// The socket was connected, or is no more.
pub(crate) fn connected(fd: c_int) {
    let Some(d) = of(fd) else { return };
    tx::readdressed(d);
    frames::readdressed(d);
    // From now on datagrams from others are refused; the kernel keeps those that it has, and so do the rings.
    d.rx().close_all();
    bound(fd);
}

/// The socket was bound, or connected: datagrams to its port that came to another socket of this process may be for this one. Their senders look anew.
pub(crate) fn bound(fd: c_int) {
    let Some(d) = of(fd) else { return };
    let mut port = None;
    let own = weft_sys::tcp::local_addr(borrowed(fd)).map(|own| own.ip().to_canonical());
    let peer = weft_sys::tcp::peer_addr(borrowed(fd)).ok();
    let peer = peer.map(|peer| SocketAddr::new(peer.ip().to_canonical(), peer.port()));
    let takes = |from: SocketAddr, to: IpAddr| {
        (own.as_ref()).is_ok_and(|own| own.is_unspecified() || *own == to)
            && peer.is_none_or(|peer| peer == from)
    };
    table::each_socket(|number, other: &'static Dgram| {
        if std::ptr::eq(d, other) || signal::is_inside(other) {
            return;
        }
        let (has_rings, is_framed) = (other.inbound.load(SeqCst), parting::may_get_frames(other));
        if !has_rings && !is_framed {
            return;
        }
        let port = *port.get_or_insert_with(|| kernel::local_port(fd));
        if port.is_none() || kernel::local_port(number) != port {
            return;
        }
        if has_rings {
            other.rx().close_those(takes);
        }
        if is_framed {
            parting::beside(d, other);
        }
    });
}
