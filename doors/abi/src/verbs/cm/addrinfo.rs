//! Names to addresses: `rdma_getaddrinfo(3)`, and the part of its result that an identifier keeps.

use std::ffi::{CStr, CString, c_char, c_int};
use std::net::{IpAddr, SocketAddr};
use std::ptr::null;

use libc::{addrinfo, sockaddr, sockaddr_storage, socklen_t};
use rustix::io::Errno;
use weft_verbs::settings;

use super::device::datagrams;
use super::types::{RAI_NUMERICHOST, RAI_PASSIVE, RDMA_PS_TCP, RDMA_PS_UDP, rdma_addrinfo};
use crate::address;
use crate::call::run;
use crate::verbs::object::{Kind as _, kind};
use crate::verbs::types::{IBV_QPT_RC, IBV_QPT_UD, Zeroed};
use crate::verbs::users::end;

/// `RAI_SA` of rdma-core 57: ask the subnet administrator.
const RAI_SA: c_int = 16;

/// The result for C, with room for the addresses that it points to.
#[derive(Clone, Copy)]
#[repr(C)]
struct Found {
    info: rdma_addrinfo,
    src: sockaddr_storage,
    dst: sockaddr_storage,
}

// SAFETY: numbers and pointers, which may be NULL.
unsafe impl Zeroed for Found {}

struct Lookup;

kind!(Lookup as rdma_addrinfo => Found, 0x636d_6169);

/// An address in memory of the caller or of the system.
#[derive(Clone, Copy)]
struct Addr {
    storage: sockaddr_storage,
    len: socklen_t,
}

impl Addr {
    /// Without a port.
    fn of(ip: IpAddr) -> Addr {
        // SAFETY: all zeros is an address.
        let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
        let room = size_of_val(&storage) as socklen_t;
        // SAFETY: as much room as it says.
        let len =
            unsafe { address::write(SocketAddr::from((ip, 0)), (&raw mut storage).cast(), room) };
        Addr { storage, len }
    }

    /// # Safety
    /// `len` bytes at `addr`.
    unsafe fn copy(addr: *const sockaddr, len: socklen_t) -> Result<Option<Addr>, Errno> {
        if len == 0 || addr.is_null() {
            return Ok(None);
        }
        // SAFETY: all zeros is an address.
        let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
        if len as usize > size_of_val(&storage) {
            return Err(Errno::INVAL);
        }
        let to = (&raw mut storage).cast::<u8>();
        // SAFETY: the caller's promise, and there is room.
        unsafe { std::ptr::copy_nonoverlapping(addr.cast::<u8>(), to, len as usize) };
        Ok(Some(Addr { storage, len }))
    }
}

/// The requested kind of address.
#[derive(Clone, Copy)]
struct Wanted {
    flags: c_int,
    family: c_int,
    qp_type: c_int,
    port_space: c_int,
}

const RC: c_int = IBV_QPT_RC as c_int;
const UD: c_int = IBV_QPT_UD as c_int;

impl Wanted {
    /// Completes the fields that the hints leave open. `None` when the hints contradict each other.
    fn fill(self) -> Option<Wanted> {
        let datagrams = |ps: c_int| datagrams(ps as u32);
        let (qp_type, port_space) = match (self.qp_type, self.port_space) {
            (0, 0) => (RC, RDMA_PS_TCP as c_int),
            (0, ps) if datagrams(ps) => (UD, ps),
            (0, ps) => (RC, ps),
            (UD, 0) => (UD, RDMA_PS_UDP as c_int),
            (qp_type, 0) => (qp_type, RDMA_PS_TCP as c_int),
            (qp_type, ps) if (qp_type == UD) == datagrams(ps) => (qp_type, ps),
            _ => return None,
        };
        Some(Wanted {
            qp_type,
            port_space,
            ..self
        })
    }
}

/// The error of a failed look-up: an `EAI_` value, or -1 with `errno`.
pub(super) enum Trouble {
    Eai(c_int),
    Os(Errno),
}

/// A program's query, in memory of ours.
pub(super) struct Query {
    node: Option<CString>,
    service: Option<CString>,
    src: Option<Addr>,
    dst: Option<Addr>,
    wanted: Wanted,
}

impl Query {
    /// # Safety
    /// As for [`rdma_getaddrinfo`].
    pub(super) unsafe fn read(
        node: *const c_char,
        service: *const c_char,
        hints: *const rdma_addrinfo,
    ) -> Result<Query, Trouble> {
        if node.is_null() && service.is_null() && hints.is_null() {
            return Err(Trouble::Os(Errno::INVAL));
        }
        let mut wanted = Wanted {
            flags: 0,
            family: 0,
            qp_type: 0,
            port_space: 0,
        };
        let (mut src, mut dst) = (None, None);
        if !hints.is_null() {
            // SAFETY: the caller's promise.
            let hints = unsafe { hints.read() };
            wanted = Wanted {
                flags: hints.ai_flags,
                family: hints.ai_family,
                qp_type: hints.ai_qp_type,
                port_space: hints.ai_port_space,
            };
            // SAFETY: as above.
            unsafe {
                src = Addr::copy(hints.ai_src_addr, hints.ai_src_len).map_err(Trouble::Os)?;
                dst = Addr::copy(hints.ai_dst_addr, hints.ai_dst_len).map_err(Trouble::Os)?;
            }
        }
        let wanted = wanted.fill().ok_or(Trouble::Eai(libc::EAI_SOCKTYPE))?;
        let owned = |text: *const c_char| {
            // SAFETY: the caller's promise.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_owned())
        };
        Ok(Query {
            node: owned(node),
            service: owned(service),
            src,
            dst,
            wanted,
        })
    }

    /// Resolves the names to an address.
    fn look_up(&self) -> Result<Addr, Trouble> {
        // SAFETY: all zeros is a valid value without hints.
        let mut hints: addrinfo = unsafe { std::mem::zeroed() };
        if self.wanted.flags & RAI_PASSIVE != 0 {
            hints.ai_flags |= libc::AI_PASSIVE;
        }
        if self.wanted.flags & RAI_NUMERICHOST != 0 {
            hints.ai_flags |= libc::AI_NUMERICHOST;
        }
        hints.ai_family = self.wanted.family;
        hints.ai_socktype = if self.wanted.qp_type == UD {
            libc::SOCK_DGRAM
        } else {
            libc::SOCK_STREAM
        };
        let pointer = |text: &Option<CString>| text.as_ref().map_or(null(), |text| text.as_ptr());
        let (node, service) = (pointer(&self.node), pointer(&self.service));
        let mut list = std::ptr::null_mut();
        // SAFETY: strings or null, and a place for the list.
        let code = unsafe { libc::getaddrinfo(node, service, &raw const hints, &raw mut list) };
        if code != 0 {
            return Err(Trouble::Eai(code));
        }
        let mut found = Ok(None);
        let mut next = list;
        while !next.is_null() && matches!(found, Ok(None)) {
            // SAFETY: a member of the list.
            let info = unsafe { *next };
            next = info.ai_next;
            if matches!(info.ai_family, libc::AF_INET | libc::AF_INET6) {
                // SAFETY: the list says how long its addresses are.
                found = unsafe { Addr::copy(info.ai_addr, info.ai_addrlen) };
            }
        }
        // SAFETY: made by `getaddrinfo`, freed once.
        unsafe { libc::freeaddrinfo(list) };
        found
            .map_err(Trouble::Os)?
            .ok_or(Trouble::Eai(libc::EAI_FAMILY))
    }

    /// True for a passive query of `localhost` without a port. So libfabric asks for the address of a process that peers on other hosts are to reach, too; it
    /// takes the answer although it is the loopback interface's, because our devices have that as well.
    fn is_for_any_peer(&self) -> bool {
        self.wanted.flags & (RAI_PASSIVE | RAI_NUMERICHOST) == RAI_PASSIVE
            && self.service.is_none()
            && self.node.as_deref() == Some(c"localhost")
    }

    /// True if the query is for the subnet administrator.
    pub(super) fn asks_the_subnet(&self) -> bool {
        self.wanted.flags & RAI_SA != 0
    }

    pub(super) fn answer(self) -> Result<Answer, Trouble> {
        let (mut src, mut dst) = (self.src, self.dst);
        if self.node.is_some() || self.service.is_some() {
            let mut found = self.look_up()?;
            if self.is_for_any_peer() {
                let ip = settings::mpi_address().map_err(|wrong| {
                    eprintln!("weft: {wrong}");
                    Trouble::Os(Errno::INVAL)
                })?;
                let family = if ip.is_ipv4() {
                    libc::AF_INET
                } else {
                    libc::AF_INET6
                };
                if [0, family].contains(&self.wanted.family) {
                    found = Addr::of(ip);
                }
            }
            if self.wanted.flags & RAI_PASSIVE != 0 {
                src = Some(found);
            } else {
                dst = Some(found);
            }
        }
        Ok(Answer {
            src,
            dst,
            wanted: self.wanted,
        })
    }
}

#[derive(Clone, Copy)]
pub(super) struct Answer {
    src: Option<Addr>,
    dst: Option<Addr>,
    wanted: Wanted,
}

impl Answer {
    /// For the program, which frees it.
    pub(super) fn show(self) -> Result<*mut rdma_addrinfo, Errno> {
        let Answer { src, dst, wanted } = self;
        let family = [src, dst]
            .iter()
            .flatten()
            .map(|addr| c_int::from(addr.storage.ss_family))
            .next_back()
            .unwrap_or(wanted.family);
        let made = Lookup::pool().make(Lookup, |found, handle| {
            found.info.ai_flags = wanted.flags;
            found.info.ai_family = family;
            found.info.ai_qp_type = wanted.qp_type;
            found.info.ai_port_space = wanted.port_space;
            let whole = handle.cast::<Found>();
            if let Some(src) = src {
                found.src = src.storage;
                found.info.ai_src_len = src.len;
                // SAFETY: within the object, whose address this is.
                found.info.ai_src_addr = unsafe { &raw mut (*whole).src }.cast();
            }
            if let Some(dst) = dst {
                found.dst = dst.storage;
                found.info.ai_dst_len = dst.len;
                // SAFETY: as above.
                found.info.ai_dst_addr = unsafe { &raw mut (*whole).dst }.cast();
            }
        })?;
        Ok(made.handle())
    }
}

/// `rdma_getaddrinfo(3)`: 0, -1 with `errno`, or an `EAI_` value.
///
/// # Safety
/// As its manual page.
pub unsafe fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    res: *mut *mut rdma_addrinfo,
) -> c_int {
    run(|| {
        if res.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let query = unsafe { Query::read(node, service, hints) };
        match query.and_then(Query::answer) {
            Ok(answer) => {
                let shown = answer.show()?;
                // SAFETY: as above.
                unsafe { res.write(shown) };
                Ok(0)
            }
            Err(Trouble::Eai(code)) => Ok(code),
            Err(Trouble::Os(errno)) => Err(errno),
        }
    })
}

/// `rdma_freeaddrinfo(3)`.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_freeaddrinfo(res: *mut rdma_addrinfo) {
    end::<Lookup>(res);
}
