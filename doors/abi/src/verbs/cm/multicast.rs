//! Multicast groups of identifiers for datagrams. No subnet manager is asked, so the events come at once; the queue pair is attached when the program fetches
//! the event.

use std::ffi::{c_int, c_void};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use libc::sockaddr;
use rustix::io::Errno;
use weft_verbs::cm::gid_of;

use super::device::{self, datagrams};
use super::id::{Core, core, get};
use super::news::{Join, Membership, News, Ud};
use super::resolve;
use super::types::{
    RDMA_CM_EVENT_MULTICAST_JOIN, RDMA_CM_JOIN_MC_ATTR_ADDRESS, RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
    RDMA_CM_JOIN_MC_ATTR_RESERVED, RDMA_MC_JOIN_FLAG_FULLMEMBER, RDMA_MC_JOIN_FLAG_RESERVED,
    RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER, RDMA_UDP_QKEY, rdma_cm_id, rdma_cm_join_mc_attr_ex,
};
use crate::call::run;
use crate::verbs::group::group_of;
use crate::verbs::mcast;
use crate::verbs::params::read_param;

/// Linux's family of InfiniBand's addresses, and the offset of the GID in its `sockaddr_ib`: after the family, the partition and the flow label.
const AF_IB: libc::sa_family_t = 27;
const SIB_ADDR: usize = 8;

/// The program's address of a group: of a family that [`resolve::read`] knows, or the GID itself.
///
/// # Safety
/// Null, or an address as long as its family says.
unsafe fn read(addr: *const sockaddr) -> Result<SocketAddr, Errno> {
    if addr.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: every address begins with its family.
    let family = unsafe { (&raw const (*addr).sa_family).read_unaligned() };
    if family != AF_IB {
        // SAFETY: the caller's promise.
        return unsafe { resolve::read(addr) };
    }
    // SAFETY: as above: a `sockaddr_ib`.
    let gid = unsafe { addr.byte_add(SIB_ADDR).cast::<[u8; 16]>().read_unaligned() };
    Ok((Ipv6Addr::from(gid), 0).into())
}

/// The group at an address.
fn group(addr: SocketAddr) -> Result<IpAddr, Errno> {
    group_of(gid_of(addr.ip())).ok_or(Errno::INVAL)
}

impl Core {
    fn join(self: &Arc<Self>, addr: SocketAddr, silent: bool, context: usize) -> Result<(), Errno> {
        if !datagrams(self.ps) {
            return Err(Errno::INVAL);
        }
        if !device::of(self.ps)?.persona {
            return Err(Errno::OPNOTSUPP);
        }
        let group = group(addr)?;
        let membership = Membership { group, silent };
        {
            let mut setup = self.setup();
            // Our address determines the interface.
            let from = setup.src.ok_or(Errno::INVAL)?.ip().to_canonical();
            if from.is_unspecified() || from.is_ipv4() != group.is_ipv4() {
                return Err(Errno::INVAL);
            }
            setup.groups.push(membership);
        }
        self.tell(News {
            qp_num: weft_verbs::UD_GROUP,
            ud: Some(Ud {
                dgid: membership.gid(),
                qkey: RDMA_UDP_QKEY,
            }),
            join: Some(Join {
                membership,
                context,
            }),
            ..News::new(RDMA_CM_EVENT_MULTICAST_JOIN)
        });
        Ok(())
    }

    fn leave(&self, addr: SocketAddr) -> Result<(), Errno> {
        let group = group(addr).map_err(|_| Errno::ADDRNOTAVAIL)?;
        let left = {
            let groups = &mut self.setup().groups;
            let at = groups.iter().position(|of| of.group == group);
            groups.remove(at.ok_or(Errno::ADDRNOTAVAIL)?)
        };
        let qp = get!(self, qp);
        if !left.silent && !self.hears(group) && !qp.is_null() {
            // Fails if the event was not fetched, because the queue pair is not attached then.
            let _ = mcast::detach(qp, left.gid());
        }
        Ok(())
    }
}

fn join(
    id: *mut rdma_cm_id,
    addr: Result<SocketAddr, Errno>,
    silent: bool,
    context: *mut c_void,
) -> Result<c_int, Errno> {
    let core = core(id)?;
    core.join(addr?, silent, context as usize)?;
    core.complete()
}

/// `rdma_join_multicast(3)`.
///
/// # Safety
/// As its manual page: an address as long as its family says.
pub unsafe fn rdma_join_multicast(
    id: *mut rdma_cm_id,
    addr: *mut sockaddr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    run(|| join(id, unsafe { read(addr) }, false, context))
}

/// `rdma_join_multicast_ex(3)`.
///
/// # Safety
/// As its manual page: attributes, with an address as long as its family says.
pub unsafe fn rdma_join_multicast_ex(
    id: *mut rdma_cm_id,
    mc_join_attr: *mut rdma_cm_join_mc_attr_ex,
    context: *mut c_void,
) -> c_int {
    run(|| {
        core(id)?;
        // SAFETY: the caller's promise.
        let attr = unsafe { read_param(mc_join_attr) }?;
        if attr.comp_mask >= RDMA_CM_JOIN_MC_ATTR_RESERVED {
            return Err(Errno::OPNOTSUPP);
        }
        if attr.comp_mask & RDMA_CM_JOIN_MC_ATTR_ADDRESS == 0 {
            return Err(Errno::INVAL);
        }
        let flags = if attr.comp_mask & RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS == 0 {
            RDMA_MC_JOIN_FLAG_FULLMEMBER
        } else {
            attr.join_flags
        };
        if flags >= RDMA_MC_JOIN_FLAG_RESERVED {
            return Err(Errno::OPNOTSUPP);
        }
        let silent = flags == RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER;
        // SAFETY: as above.
        join(id, unsafe { read(attr.addr) }, silent, context)
    })
}

/// `rdma_leave_multicast(3)`: `EADDRNOTAVAIL` for a group that it is not in.
///
/// # Safety
/// As its manual page: an address as long as its family says.
pub unsafe fn rdma_leave_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    run(|| {
        let core = core(id)?;
        // SAFETY: the caller's promise.
        core.leave(unsafe { read(addr) }?).map(|()| 0)
    })
}
