//! The objects of an identifier: its queue pair with completion queues, and its shared receive queue.

use std::ffi::c_int;

use rustix::io::Errno;
use weft_verbs::cm::gid_of;

use super::device::{self, datagrams};
use super::id::{Core, core, get, set};
use super::types::{RDMA_UDP_QKEY, rdma_cm_id};
use crate::call::run;
use crate::verbs::channel::{ibv_create_comp_channel, ibv_destroy_comp_channel};
use crate::verbs::cq::{ibv_create_cq, ibv_destroy_cq};
use crate::verbs::create::create_qp_ex;
use crate::verbs::device::ibv_query_gid;
use crate::verbs::last_errno;
use crate::verbs::modify::{ibv_destroy_qp, ibv_modify_qp};
use crate::verbs::object::find;
use crate::verbs::params::read_param;
use crate::verbs::qp::QpObj;
use crate::verbs::roce;
use crate::verbs::srq::{create_srq_ex, ibv_destroy_srq};
#[allow(clippy::wildcard_imports)] // C's vocabulary
use crate::verbs::types::*;
use crate::verbs::wire;

/// The fields of an identifier's completion queue and its channel.
type Place = (*mut *mut ibv_cq, *mut *mut ibv_comp_channel);

/// The fields for sends and for receives.
fn places(core: &Core) -> [Place; 2] {
    let c = core.handle();
    // SAFETY: the memory of identifiers is never freed.
    unsafe {
        [
            (&raw mut (*c).send_cq, &raw mut (*c).send_cq_channel),
            (&raw mut (*c).recv_cq, &raw mut (*c).recv_cq_channel),
        ]
    }
}

/// The identifier's completion queue in this place. If there is none, makes one with `entries` entries and its own channel; for 0 entries it makes none.
fn own_cq(core: &Core, (cq, channel): Place, entries: u32) -> Result<*mut ibv_cq, Errno> {
    // SAFETY: a place of the identifier.
    let own = unsafe { cq.read() };
    if !own.is_null() || entries == 0 {
        return Ok(own);
    }
    let verbs = get!(core, verbs);
    let entries = c_int::try_from(entries).map_err(|_| Errno::INVAL)?;
    // SAFETY: as above, and the calls check their parameters.
    unsafe {
        let made = ibv_create_comp_channel(verbs);
        if made.is_null() {
            return Err(last_errno());
        }
        let own = ibv_create_cq(verbs, entries, core.handle().cast(), made, 0);
        if own.is_null() {
            let errno = last_errno();
            ibv_destroy_comp_channel(made);
            return Err(errno);
        }
        cq.write(own);
        channel.write(made);
        Ok(own)
    }
}

fn destroy_cqs(core: &Core) {
    for (cq, channel) in places(core) {
        // SAFETY: places of the identifier, and the calls check their parameters.
        unsafe {
            // A queue in use stays: messages for an XRC queue complete in it even without the queue pair.
            if !cq.read().is_null() && ibv_destroy_cq(cq.read()) == Errno::BUSY.raw_os_error() {
                continue;
            }
            if !channel.read().is_null() {
                ibv_destroy_comp_channel(channel.read());
            }
            cq.write(std::ptr::null_mut());
            channel.write(std::ptr::null_mut());
        }
    }
}

/// The completion queues that `attr` does not name.
fn create_cqs(core: &Core, attr: &mut ibv_qp_init_attr_ex) -> Result<(), Errno> {
    let [send, recv] = places(core);
    if attr.recv_cq.is_null() {
        attr.recv_cq = own_cq(core, recv, attr.cap.max_recv_wr)?;
    }
    if attr.send_cq.is_null() {
        attr.send_cq = own_cq(core, send, attr.cap.max_send_wr)?;
    }
    // A queue pair needs both: a queue without entries is replaced by the other one.
    if attr.recv_cq.is_null() {
        attr.recv_cq = attr.send_cq;
    }
    if attr.send_cq.is_null() {
        attr.send_cq = attr.recv_cq;
    }
    Ok(())
}

/// A queue pair for an identifier, ready for receives to be posted.
pub(super) fn create(core: &Core, attr: &mut ibv_qp_init_attr_ex) -> Result<(), Errno> {
    let verbs = get!(core, verbs);
    if !get!(core, qp).is_null() || verbs.is_null() {
        return Err(Errno::INVAL);
    }
    if attr.comp_mask & IBV_QP_INIT_ATTR_PD == 0 || attr.pd.is_null() {
        attr.comp_mask |= IBV_QP_INIT_ATTR_PD;
        attr.pd = get!(core, pd);
    }
    if find::<crate::verbs::pd::Pd>(attr.pd)?.context() != verbs {
        return Err(Errno::INVAL);
    }
    let differs = |ours: *mut ibv_cq, theirs: *mut ibv_cq| {
        !ours.is_null() && !theirs.is_null() && ours != theirs
    };
    if differs(get!(core, recv_cq), attr.recv_cq) || differs(get!(core, send_cq), attr.send_cq) {
        return Err(Errno::INVAL);
    }
    if attr.srq.is_null() {
        attr.srq = get!(core, srq);
    }
    let given = attr.comp_mask & IBV_QP_INIT_ATTR_XRCD != 0 && !attr.xrcd.is_null();
    if attr.qp_type == IBV_QPT_XRC_RECV && !given {
        attr.comp_mask |= IBV_QP_INIT_ATTR_XRCD;
        attr.xrcd = device::xrcd(verbs)?;
    }
    let made = create_cqs(core, attr).and_then(|()| {
        // SAFETY: the call checks its parameters.
        let qp = unsafe { create_qp_ex(verbs, attr) };
        if qp.is_null() {
            return Err(last_errno());
        }
        prepare(qp, attr.qp_type).inspect_err(|_| {
            // SAFETY: as above.
            unsafe { ibv_destroy_qp(qp) };
        })?;
        Ok(qp)
    });
    let qp = made.inspect_err(|_| destroy_cqs(core))?;
    set!(core, pd = attr.pd);
    set!(core, qp = qp);
    Ok(())
}

fn modify(qp: *mut ibv_qp, attr: &mut ibv_qp_attr, mask: c_int) -> Result<(), Errno> {
    // SAFETY: the call checks its parameters.
    match unsafe { ibv_modify_qp(qp, attr, mask) } {
        0 => Ok(()),
        errno => Err(Errno::from_raw_os_error(errno)),
    }
}

/// Moves a queue pair to the last state that needs no peer.
fn prepare(qp: *mut ibv_qp, qp_type: ibv_qp_type) -> Result<(), Errno> {
    let moved = |state, attributes: fn(&mut ibv_qp_attr) -> c_int| {
        let mut attr = ibv_qp_attr::zeroed();
        attr.qp_state = state;
        let mask = attributes(&mut attr);
        modify(qp, &mut attr, mask)
    };
    if qp_type != IBV_QPT_UD {
        return moved(IBV_QPS_INIT, initial);
    }
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        moved(state, datagram)?;
    }
    Ok(())
}

/// Flushes all posted requests.
pub(super) fn flush(core: &Core) -> Result<(), Errno> {
    let qp = get!(core, qp);
    if qp.is_null() {
        return Ok(());
    }
    let mut attr = ibv_qp_attr::zeroed();
    attr.qp_state = IBV_QPS_ERR;
    modify(qp, &mut attr, IBV_QP_STATE as c_int)
}

/// The attributes of a datagram queue pair for the state in `attr`.
fn datagram(attr: &mut ibv_qp_attr) -> c_int {
    let mask = match attr.qp_state {
        IBV_QPS_INIT => {
            attr.port_num = 1;
            attr.qkey = RDMA_UDP_QKEY;
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY
        }
        IBV_QPS_RTS => IBV_QP_STATE | IBV_QP_SQ_PSN,
        _ => IBV_QP_STATE,
    };
    mask as c_int
}

fn initial(attr: &mut ibv_qp_attr) -> c_int {
    attr.port_num = 1;
    attr.qp_access_flags =
        IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) as c_int
}

/// The short attributes in the extended form.
pub(super) fn extended(attr: &ibv_qp_init_attr, pd: *mut ibv_pd) -> ibv_qp_init_attr_ex {
    ibv_qp_init_attr_ex {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
        comp_mask: IBV_QP_INIT_ATTR_PD,
        pd,
        ..ibv_qp_init_attr_ex::zeroed()
    }
}

/// As [`create`], with the short attributes.
pub(super) fn create_short(
    core: &Core,
    pd: *mut ibv_pd,
    attr: &mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    let mut long = extended(attr, pd);
    create(core, &mut long)?;
    attr.send_cq = long.send_cq;
    attr.recv_cq = long.recv_cq;
    attr.srq = long.srq;
    attr.cap = long.cap;
    Ok(())
}

pub(super) fn destroy(core: &Core) {
    let qp = get!(core, qp);
    if !qp.is_null() {
        core.detach_groups();
    }
    set!(core, qp = std::ptr::null_mut());
    if !qp.is_null() {
        // SAFETY: the call checks its parameters.
        unsafe { ibv_destroy_qp(qp) };
    }
    destroy_cqs(core);
}

/// Makes a queue pair from the program's attributes and stores the actual values in them.
///
/// # Safety
/// `attr` is NULL, or the program's attributes.
unsafe fn made_by<T: Copy>(
    id: *mut rdma_cm_id,
    attr: *mut T,
    make: impl FnOnce(&Core, &mut T) -> Result<(), Errno>,
) -> c_int {
    run(|| {
        let core = core(id)?;
        // SAFETY: the caller's promise.
        let mut copy = unsafe { read_param(attr) }?;
        make(&core, &mut copy)?;
        // SAFETY: as above.
        unsafe { attr.write(copy) };
        Ok(0)
    })
}

/// `rdma_create_qp(3)`.
///
/// # Safety
/// As its manual page.
pub unsafe fn rdma_create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    qp_init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { made_by(id, qp_init_attr, |core, attr| create_short(core, pd, attr)) }
}

/// `rdma_create_qp_ex(3)`.
///
/// # Safety
/// As its manual page.
pub unsafe fn rdma_create_qp_ex(
    id: *mut rdma_cm_id,
    qp_init_attr: *mut ibv_qp_init_attr_ex,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { made_by(id, qp_init_attr, create) }
}

/// `rdma_destroy_qp(3)`.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    run(|| {
        destroy(&*core(id)?);
        Ok(0)
    });
}

/// The domain and the completion queue that the attributes of an XRC queue do not name.
fn complete_srq(core: &Core, attr: &mut ibv_srq_init_attr_ex) -> Result<(), Errno> {
    if attr.comp_mask & IBV_SRQ_INIT_ATTR_XRCD == 0 || attr.xrcd.is_null() {
        attr.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD;
        attr.xrcd = device::xrcd(get!(core, verbs))?;
    }
    if attr.comp_mask & IBV_SRQ_INIT_ATTR_CQ == 0 || attr.cq.is_null() {
        let [_, recv] = places(core);
        attr.cq = own_cq(core, recv, attr.attr.max_wr)?;
        attr.comp_mask |= IBV_SRQ_INIT_ATTR_CQ;
    }
    Ok(())
}

fn create_srq(core: &Core, attr: &mut ibv_srq_init_attr_ex) -> Result<(), Errno> {
    let verbs = get!(core, verbs);
    if !get!(core, srq).is_null() || verbs.is_null() {
        return Err(Errno::INVAL);
    }
    if attr.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || attr.pd.is_null() {
        attr.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
        attr.pd = get!(core, pd);
    }
    let wants = attr.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0;
    if wants && attr.srq_type == IBV_SRQT_XRC {
        complete_srq(core, attr)?;
    }
    // SAFETY: the call checks its parameters.
    let srq = unsafe { create_srq_ex(verbs, attr) };
    if srq.is_null() {
        return Err(last_errno());
    }
    set!(core, pd = attr.pd);
    set!(core, srq = srq);
    Ok(())
}

/// `rdma_create_srq(3)`.
///
/// # Safety
/// As its manual page.
pub unsafe fn rdma_create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> c_int {
    let create = |core: &Core, short: &mut ibv_srq_init_attr| {
        let mut long = ibv_srq_init_attr_ex {
            srq_context: short.srq_context,
            attr: short.attr,
            comp_mask: IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
            srq_type: match get!(core, qp_type) {
                IBV_QPT_XRC_RECV => IBV_SRQT_XRC,
                _ => IBV_SRQT_BASIC,
            },
            pd,
            ..ibv_srq_init_attr_ex::zeroed()
        };
        create_srq(core, &mut long)?;
        short.attr = long.attr;
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { made_by(id, attr, create) }
}

/// `rdma_create_srq_ex(3)`.
///
/// # Safety
/// As its manual page.
pub unsafe fn rdma_create_srq_ex(id: *mut rdma_cm_id, attr: *mut ibv_srq_init_attr_ex) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { made_by(id, attr, create_srq) }
}

pub(super) fn destroy_srq(core: &Core) {
    let srq = get!(core, srq);
    set!(core, srq = std::ptr::null_mut());
    if !srq.is_null() {
        // SAFETY: the call checks its parameters.
        unsafe { ibv_destroy_srq(srq) };
        if get!(core, qp).is_null() {
            destroy_cqs(core);
        }
    }
}

/// `rdma_destroy_srq(3)`.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_destroy_srq(id: *mut rdma_cm_id) {
    run(|| {
        destroy_srq(&*core(id)?);
        Ok(0)
    });
}

/// The index of an identifier's own address in the device's GID table.
fn gid_index(verbs: *mut ibv_context, wanted: [u8; 16]) -> Result<u8, Errno> {
    for index in 0..=u8::MAX {
        let mut gid = ibv_gid::zeroed();
        // SAFETY: room for a GID; the call checks the rest.
        if unsafe { ibv_query_gid(verbs, 1, c_int::from(index), &raw mut gid) } != 0 {
            break;
        }
        // SAFETY: any bytes are a GID.
        if unsafe { gid.raw } == wanted {
            return Ok(index);
        }
    }
    Err(Errno::ADDRNOTAVAIL)
}

/// The address vector from an identifier's address to this one.
pub(super) fn way(core: &Core, dgid: [u8; 16]) -> Result<ibv_ah_attr, Errno> {
    let src = core.setup().src.ok_or(Errno::INVAL)?;
    let mut attr = ibv_ah_attr::zeroed();
    attr.is_global = 1;
    attr.port_num = 1;
    attr.grh.dgid = ibv_gid { raw: dgid };
    attr.grh.sgid_index = gid_index(get!(core, verbs), gid_of(src.ip()))?;
    attr.grh.hop_limit = 64;
    Ok(attr)
}

/// The ACK time-out of connections whose program has set none, as InfiniBand encodes it.
pub(super) const ACK_TIMEOUT: u8 = 18;

/// The attributes that a program passes to `ibv_modify_qp` for the state that it asks for.
fn attributes(core: &Core, attr: &mut ibv_qp_attr) -> Result<c_int, Errno> {
    let verbs = get!(core, verbs);
    if verbs.is_null() {
        return Err(Errno::INVAL);
    }
    let state = attr.qp_state;
    if datagrams(core.ps) {
        return match state {
            IBV_QPS_INIT | IBV_QPS_RTR | IBV_QPS_RTS => Ok(datagram(attr)),
            _ => Err(Errno::INVAL),
        };
    }
    if state == IBV_QPS_INIT {
        return Ok(initial(attr));
    }
    if !device::of(core.ps)?.persona {
        // The connection manager moves the queue pairs of an RNIC itself.
        return match state {
            IBV_QPS_RTR => {
                attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
                Ok((IBV_QP_STATE | IBV_QP_ACCESS_FLAGS) as c_int)
            }
            IBV_QPS_RTS => Ok(0),
            _ => Err(Errno::INVAL),
        };
    }
    let (remote, depths, terms) = {
        let setup = core.setup();
        (setup.remote.ok_or(Errno::INVAL)?, setup.depths, setup.terms)
    };
    match state {
        IBV_QPS_RTR => {
            attr.ah_attr = way(core, remote.gid)?;
            attr.path_mtu = if wire::has_roce() {
                roce::longest_mtu(&attr.ah_attr.grh)?
            } else {
                IBV_MTU_4096
            };
            if let Some(terms) = &terms {
                attr.path_mtu = attr.path_mtu.min(roce::code(terms.mtu));
                attr.rq_psn = terms.rq_psn;
                attr.min_rnr_timer = terms.rnr_timer;
            }
            attr.dest_qp_num = remote.qp_num;
            attr.max_dest_rd_atomic = u8::try_from(depths.0).unwrap_or(u8::MAX);
            Ok((IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER) as c_int)
        }
        IBV_QPS_RTS => {
            let timeout = terms.map_or(ACK_TIMEOUT, |terms| terms.timeout);
            attr.timeout = core.setup().ack_timeout.unwrap_or(timeout);
            attr.retry_cnt = terms.map_or(7, |terms| terms.retry_count);
            attr.rnr_retry = terms.map_or(7, |terms| terms.rnr_retry);
            attr.sq_psn = terms.map_or(0, |terms| terms.sq_psn);
            attr.max_rd_atomic = u8::try_from(depths.1).unwrap_or(u8::MAX);
            Ok((IBV_QP_STATE
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC) as c_int)
        }
        _ => Err(Errno::INVAL),
    }
}

/// Joins the identifier's queue pair to the peer's by number, as programs do that move theirs themselves. Returns its number.
pub(super) fn join(core: &Core) -> Result<u32, Errno> {
    let qp = get!(core, qp);
    for state in [IBV_QPS_RTR, IBV_QPS_RTS] {
        let mut attr = ibv_qp_attr::zeroed();
        attr.qp_state = state;
        let mask = attributes(core, &mut attr)?;
        modify(qp, &mut attr, mask)?;
    }
    Ok(find::<QpObj>(qp)?.num())
}

/// `rdma_init_qp_attr(3)`.
///
/// # Safety
/// As its manual page.
pub unsafe fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    qp_attr: *mut ibv_qp_attr,
    qp_attr_mask: *mut c_int,
) -> c_int {
    run(|| {
        let core = core(id)?;
        if qp_attr.is_null() || qp_attr_mask.is_null() {
            return Err(Errno::INVAL);
        }
        // Only the state in the program's attributes is read.
        let mut attr = ibv_qp_attr::zeroed();
        // SAFETY: the caller's promise.
        attr.qp_state = unsafe { (&raw const (*qp_attr).qp_state).read() };
        let mask = attributes(&core, &mut attr)?;
        // SAFETY: as above.
        unsafe {
            qp_attr.write(attr);
            qp_attr_mask.write(mask);
        }
        Ok(0)
    })
}
