//! Address handles of the persona's datagram queue pairs.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use rustix::io::Errno;
use weft_verbs::cm::gid_of;
use weft_verbs::{Grh, UdDest};

use super::context::Context;
use super::gid::{Gid, gids};
use super::group::{group_of, port_of};
use super::limit::{Count, Counted};
use super::object::{Guard, Kind as _, PerFork, enter, find, kind};
use super::params::read_param;
use super::pd::Pd;
use super::persona;
use super::roce;
use super::types::*;
use super::users::{Held, end};
use super::wire;
use crate::call::{pointer, status, unsupported};

/// The maximum number of address handles of a process.
pub(crate) const MAX_AHS: u32 = 1 << 16;

static COUNT: PerFork<Count> = PerFork::new();

/// The object behind an `ibv_ah`.
pub(crate) struct Ah {
    ip: IpAddr,
    is_group: bool,
    /// The interface, for a link-local address.
    scope: u32,
    /// Our address that the receiver sees.
    from: IpAddr,
    traffic_class: u8,
    _held: Held,
    _counted: Counted,
}

kind!(Ah as ibv_ah, 0xadd7_e550);

impl Ah {
    /// The destination of the queue pair with this number at the address: the number contains its port (docs/spec/persona.md). A group has its own port.
    /// On RoCE there is one port.
    fn dest(&self, qp_num: u32, qkey: u32) -> UdDest {
        let port = if self.is_group {
            port_of(self.ip)
        } else if wire::has_roce() {
            roce::PORT
        } else {
            (qp_num >> 8) as u16
        };
        let addr = match self.ip {
            IpAddr::V4(ip) => SocketAddr::from((ip, port)),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, self.scope).into(),
        };
        UdDest {
            addr,
            qp_num,
            qkey,
            from: Some(self.from),
            traffic_class: self.traffic_class,
        }
    }
}

/// The destination that an address handle, a number and a key name.
///
/// # Safety
/// As for [`enter`].
pub(crate) unsafe fn dest(ah: *mut ibv_ah, qpn: u32, qkey: u32) -> Result<UdDest, Errno> {
    // SAFETY: the caller's promise.
    let ah = unsafe { enter::<Ah>(ah) }?;
    Ok(ah.dest(qpn & 0x00ff_ffff, qkey))
}

/// As [`persona::way`], and for groups.
fn way(grh: &ibv_global_route) -> Result<(Gid, IpAddr, u32, bool), Errno> {
    // SAFETY: any bytes are a GID.
    let Some(group) = group_of(unsafe { grh.dgid.raw }) else {
        let (own, ip, scope) = persona::way(grh)?;
        return Ok((own, ip, scope, false));
    };
    let own = gids()?.get(usize::from(grh.sgid_index)).copied();
    let fits = |gid: &Gid| !gid.is_empty() && gid.ip.is_ipv4() == group.is_ipv4();
    let own = own.filter(fits).ok_or(Errno::INVAL)?;
    Ok((own, group, own.ifindex, true))
}

fn create(pd: *mut ibv_pd, attr: &ibv_ah_attr) -> Result<Guard<Ah>, Errno> {
    let pd = find::<Pd>(pd)?;
    if !pd.ctx.is_persona() {
        return Err(Errno::OPNOTSUPP);
    }
    if attr.is_global == 0 || attr.port_num != 1 {
        return Err(Errno::INVAL);
    }
    let (own, ip, scope, is_group) = way(&attr.grh)?;
    if wire::has_roce() {
        // What is sent comes from there.
        roce::port(&pd.native.device(), own.ip, own.ifindex)?;
    }
    let body = Ah {
        ip,
        is_group,
        scope,
        from: own.ip,
        traffic_class: attr.grh.traffic_class,
        _held: pd.users.hold(),
        _counted: COUNT.take(MAX_AHS)?,
    };
    Ah::pool().make(body, |c, _| {
        c.context = pd.context();
        c.pd = pd.handle();
    })
}

/// `ibv_create_ah`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    pointer(|| {
        // SAFETY: the caller's promise.
        let attr = unsafe { read_param(attr) }?;
        Ok(create(pd, &attr)?.handle())
    })
}

/// The way back to the sender of a received message.
///
/// # Safety
/// As `ibv_init_ah_from_wc` says.
unsafe fn way_back(
    port_num: u8,
    wc: *const ibv_wc,
    grh: *const ibv_grh,
) -> Result<ibv_ah_attr, Errno> {
    if wc.is_null() || grh.is_null() || port_num != 1 {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise; a routing header is made of bytes.
    let (wc, raw) = unsafe { (*wc, grh.cast::<[u8; Grh::LEN]>().read_unaligned()) };
    if wc.wc_flags & IBV_WC_GRH == 0 {
        return Err(Errno::INVAL);
    }
    let grh = Grh::parse(&raw).ok_or(Errno::INVAL)?;
    let index = gids()?.iter().position(|gid| gid.ip == grh.dest);
    let index = index.and_then(|index| u8::try_from(index).ok());
    let mut attr = ibv_ah_attr::zeroed();
    attr.is_global = 1;
    attr.port_num = port_num;
    attr.grh.dgid = ibv_gid {
        raw: gid_of(grh.source),
    };
    attr.grh.sgid_index = index.ok_or(Errno::INVAL)?;
    attr.grh.hop_limit = 64;
    attr.grh.traffic_class = grh.traffic_class;
    Ok(attr)
}

/// `ibv_create_ah_from_wc`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port_num: u8,
) -> *mut ibv_ah {
    pointer(|| {
        // SAFETY: the caller's promise.
        let attr = unsafe { way_back(port_num, wc, grh) }?;
        Ok(create(pd, &attr)?.handle())
    })
}

/// `ibv_init_ah_from_wc`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port_num: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    ah_attr: *mut ibv_ah_attr,
) -> c_int {
    let done = status(|| {
        let context = find::<Context>(context)?;
        if !context.ctx.is_persona() {
            return Err(Errno::OPNOTSUPP);
        }
        if ah_attr.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        unsafe { ah_attr.write(way_back(port_num, wc, grh)?) };
        Ok(())
    });
    if done == 0 { 0 } else { -1 }
}

/// `ibv_destroy_ah`. Datagrams posted with it may still be on their way.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    end::<Ah>(ah)
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
    unsupported()
}
