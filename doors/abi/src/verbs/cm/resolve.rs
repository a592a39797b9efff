//! Addresses and routes: the local address, its port, and whether there is a route. The operating system's routing answers at once, so the events come at once
//! too.

use std::ffi::{c_char, c_int};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use libc::{AF_INET, AF_INET6, sockaddr, sockaddr_in, sockaddr_in6};
use rustix::io::Errno;
use weft_verbs::cm::BindOptions;

use super::addrinfo::{Query, Trouble};
use super::device;
use super::id::{Core, Setup, Stage, core, get};
use super::news::News;
use super::port::Port;
use super::types::{
    RDMA_CM_EVENT_ADDR_ERROR, RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ROUTE_RESOLVED,
    rdma_addrinfo, rdma_cm_event_type, rdma_cm_id,
};
use crate::call::run;
use crate::verbs::os_errno;

const RDMA_CM_EVENT_ADDRINFO_RESOLVED: rdma_cm_event_type = 16;
const RDMA_CM_EVENT_ADDRINFO_ERROR: rdma_cm_event_type = 17;

/// The program's address: its family determines its length.
///
/// # Safety
/// Null, or an address as long as its family says.
pub(super) unsafe fn read(addr: *const sockaddr) -> Result<SocketAddr, Errno> {
    if addr.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: every address begins with its family.
    let family = unsafe { (&raw const (*addr).sa_family).read_unaligned() };
    let len = match i32::from(family) {
        AF_INET => size_of::<sockaddr_in>(),
        AF_INET6 => size_of::<sockaddr_in6>(),
        _ => return Err(Errno::INVAL),
    };
    // SAFETY: the caller's promise.
    let read = unsafe { crate::address::read(addr, len as u32) }?;
    match read {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0 => {
            Err(Errno::INVAL)
        }
        read => Ok(read),
    }
}

/// The local address from which packets to `dst` are sent; `src` may choose the address or the port.
fn route(src: Option<SocketAddr>, dst: SocketAddr) -> Result<SocketAddr, Errno> {
    let from = src.unwrap_or_else(|| any(dst));
    let mut free = from;
    free.set_port(0);
    let probe = UdpSocket::bind(free).map_err(|e| os_errno(&e))?;
    // The port does not matter, because nothing is sent. Some systems refuse port 0.
    let mut to = dst;
    to.set_port(to.port().max(1));
    probe.connect(to).map_err(|e| match os_errno(&e) {
        // The bound address has no route out of this host.
        Errno::INVAL => Errno::HOSTUNREACH,
        errno => errno,
    })?;
    let mut found = probe.local_addr().map_err(|e| os_errno(&e))?;
    found.set_port(from.port());
    Ok(found)
}

fn any(like: SocketAddr) -> SocketAddr {
    match like {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

/// The unspecified address as a destination means this host.
fn destination(dst: SocketAddr) -> SocketAddr {
    match dst.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => (Ipv4Addr::LOCALHOST, dst.port()).into(),
        IpAddr::V6(ip) if ip.is_unspecified() => (Ipv6Addr::LOCALHOST, dst.port()).into(),
        _ => dst,
    }
}

impl Setup {
    pub(super) fn bind_options(&self) -> BindOptions {
        BindOptions {
            v6_only: self.only_v6,
            share: self.reuse,
        }
    }
}

pub(super) fn bind(core: &Core, addr: SocketAddr) -> Result<(), Errno> {
    let bound = {
        let mut setup = core.setup();
        if !matches!(setup.stage, Stage::Idle) {
            return Err(Errno::INVAL);
        }
        let taken = Port::take(core.ps, addr, setup.bind_options());
        let port = taken.map_err(|errno| match errno {
            // The kernel's rdma_cm says so when the port is taken and the address is a wildcard.
            Errno::ADDRINUSE if addr.ip().is_unspecified() => Errno::ADDRNOTAVAIL,
            errno => errno,
        })?;
        let bound = port.local_addr();
        setup.port = Some(port);
        setup.stage = Stage::Bound;
        setup.src = Some(bound);
        bound
    };
    if bound.ip().is_unspecified() {
        core.show(bound, None);
    } else {
        core.at(&device::of(core.ps)?, bound, None);
    }
    Ok(())
}

/// Finds the local address for `dst` and reserves a port there unless one is reserved.
fn resolve(core: &Core, dst: SocketAddr) -> Result<SocketAddr, Errno> {
    let mut setup = core.setup();
    let mut src = route(setup.src, dst)?;
    if setup.port.is_none() {
        let port = Port::take(core.ps, src, setup.bind_options())?;
        src = port.local_addr();
        setup.port = Some(port);
    }
    setup.stage = Stage::Resolved;
    Ok(src)
}

/// `rdma_bind_addr(3)`.
///
/// # Safety
/// As its manual page: an address as long as its family says.
pub unsafe fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    run(|| {
        // SAFETY: the caller's promise.
        bind(&*core(id)?, unsafe { read(addr) }?).map(|()| 0)
    })
}

/// `rdma_resolve_addr(3)`. The answer is known at once, so the time limit has no effect.
///
/// # Safety
/// As its manual page: addresses as long as their families say, the source's may be null.
pub unsafe fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    src_addr: *mut sockaddr,
    dst_addr: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    run(|| {
        let core = core(id)?;
        // SAFETY: the caller's promise.
        let dst = destination(unsafe { read(dst_addr) }?);
        if !matches!(core.setup().stage, Stage::Idle | Stage::Bound) {
            return Err(Errno::INVAL);
        }
        if !src_addr.is_null() && matches!(core.setup().stage, Stage::Idle) {
            // SAFETY: as above.
            let src = unsafe { read(src_addr) }?;
            if src.is_ipv4() != dst.is_ipv4() {
                return Err(Errno::INVAL);
            }
            // A source with a port or an address is bound; an unspecified one has no effect.
            if src.port() != 0 || !src.ip().is_unspecified() {
                bind(&core, src)?;
            }
        }
        let src = core.setup().src;
        if src.is_some_and(|src| src.is_ipv4() != dst.is_ipv4()) {
            return Err(Errno::INVAL);
        }
        match resolve(&core, dst) {
            Ok(src) => {
                core.at(&device::of(core.ps)?, src, Some(dst));
                core.tell(News::new(RDMA_CM_EVENT_ADDR_RESOLVED));
            }
            Err(errno) => {
                core.tell(News::status(
                    RDMA_CM_EVENT_ADDR_ERROR,
                    -errno.raw_os_error(),
                ));
            }
        }
        core.complete()
    })
}

/// `rdma_resolve_route(3)`.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_resolve_route(id: *mut rdma_cm_id, _timeout_ms: c_int) -> c_int {
    run(|| {
        let core = core(id)?;
        {
            let mut setup = core.setup();
            if !matches!(setup.stage, Stage::Resolved) {
                return Err(Errno::INVAL);
            }
            setup.stage = Stage::Routed;
        }
        core.show_path(&device::of(core.ps)?);
        core.tell(News::new(RDMA_CM_EVENT_ROUTE_RESOLVED));
        core.complete()
    })
}

/// `rdma_resolve_addrinfo(3)`: a thread resolves the names, and the answer is an event of the identifier. There is no subnet administrator.
///
/// # Safety
/// As its manual page.
pub unsafe fn rdma_resolve_addrinfo(
    id: *mut rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> c_int {
    run(|| {
        let core = core(id)?;
        // SAFETY: the caller's promise.
        let query = match unsafe { Query::read(node, service, hints) } {
            Ok(query) => query,
            Err(Trouble::Os(errno)) => return Err(errno),
            Err(Trouble::Eai(_)) => return Err(Errno::INVAL),
        };
        if query.asks_the_subnet() {
            return Err(Errno::OPNOTSUPP);
        }
        let about = Arc::clone(&core);
        let ask = move || {
            let news = match query.answer() {
                Ok(answer) => {
                    about.setup().answer = Some(answer);
                    News::new(RDMA_CM_EVENT_ADDRINFO_RESOLVED)
                }
                Err(trouble) => {
                    let errno = match trouble {
                        Trouble::Os(errno) => errno,
                        Trouble::Eai(libc::EAI_MEMORY) => Errno::NOMEM,
                        Trouble::Eai(_) => Errno::NXIO,
                    };
                    News::status(RDMA_CM_EVENT_ADDRINFO_ERROR, -errno.raw_os_error())
                }
            };
            about.tell(news);
        };
        std::thread::Builder::new()
            .name("weft-names".into())
            .spawn(ask)
            .map_err(|_| Errno::AGAIN)?;
        core.complete()
    })
}

/// `rdma_query_addrinfo(3)`.
///
/// # Safety
/// As its manual page: a place for a pointer at `info`.
pub unsafe fn rdma_query_addrinfo(id: *mut rdma_cm_id, info: *mut *mut rdma_addrinfo) -> c_int {
    run(|| {
        let answer = core(id)?.setup().answer.ok_or(Errno::INVAL)?;
        if info.is_null() {
            return Err(Errno::INVAL);
        }
        let shown = answer.show()?;
        // SAFETY: the caller's promise.
        unsafe { info.write(shown) };
        Ok(0)
    })
}

/// The port of an address that C reads, in network order; 0 for another family.
fn port(family: libc::sa_family_t, v4: &sockaddr_in, v6: &sockaddr_in6) -> u16 {
    match i32::from(family) {
        AF_INET => v4.sin_port,
        AF_INET6 => v6.sin6_port,
        _ => 0,
    }
}

/// `rdma_get_src_port(3)`: in network order, 0 when there is none.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    let Ok(core) = core(id) else { return 0 };
    let src = get!(core, route.addr.src);
    // SAFETY: all members of the union are plain bytes.
    unsafe { port(src.src_addr.sa_family, &src.src_sin, &src.src_sin6) }
}

/// `rdma_get_dst_port(3)`: in network order, 0 when there is none.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    let Ok(core) = core(id) else { return 0 };
    let dst = get!(core, route.addr.dst);
    // SAFETY: all members of the union are plain bytes.
    unsafe { port(dst.dst_addr.sa_family, &dst.dst_sin, &dst.dst_sin6) }
}
