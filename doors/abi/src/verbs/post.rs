//! The fast path: posting and polling.

use std::ffi::c_int;

use rustix::io::Errno;
use weft_verbs::{InlineData, RecvWr, RemoteAddr, SendOp, SendWr, Wc};

use super::ah;
use super::cq::Cq;
use super::mw::post_bind;
use super::null;
use super::object::{Visit, enter};
use super::qp::QpObj;
use super::refused;
use super::srq::Srq;
use super::types::*;
use super::work::{append, c_wc, elements, imm, set_flags, sges};
use crate::call::quick_status;

/// Posts the request that a C request describes.
///
/// # Safety
/// As for `ibv_post_send`.
#[inline]
unsafe fn post_one(qp: &QpObj, c: *const ibv_send_wr) -> Result<(), Errno> {
    // SAFETY: the caller's promise: a request of the program, whose opcode selects the union's member; here and below.
    let remote = unsafe {
        RemoteAddr {
            addr: (*c).wr.rdma.remote_addr,
            rkey: (*c).wr.rdma.rkey,
        }
    };
    // SAFETY: as above.
    let (id, flags, data) = unsafe { ((*c).wr_id, (*c).send_flags, (*c).imm_data) };
    // SAFETY: as above.
    let op = match unsafe { (*c).opcode } {
        IBV_WR_SEND => SendOp::Send,
        IBV_WR_SEND_WITH_IMM => SendOp::SendImm { imm: imm(data) },
        IBV_WR_SEND_WITH_INV => SendOp::SendInvalidate { rkey: data },
        IBV_WR_RDMA_WRITE => SendOp::Write { remote },
        IBV_WR_RDMA_WRITE_WITH_IMM => SendOp::WriteImm {
            remote,
            imm: imm(data),
        },
        IBV_WR_RDMA_READ if qp.is_reliable() => SendOp::Read { remote },
        // SAFETY: as above.
        IBV_WR_BIND_MW => return unsafe { post_bind(qp, c) },
        // SAFETY: as above.
        opcode => unsafe { rare(qp, c, opcode) }?,
    };
    // Built in the place that it is posted from: it is too large to move.
    let mut wr = SendWr::new(id, op);
    set_flags(&mut wr, flags);
    // SAFETY: as above.
    let (list, count) = unsafe { ((*c).sg_list, (*c).num_sge) };
    let count = elements(list, count, qp.max_send_sge())?;
    if flags & IBV_SEND_INLINE == 0 {
        // SAFETY: as above.
        let elements = unsafe { sges(list, count) };
        elements.for_each(|sge| wr.sges.push(sge));
        null::resolve(&mut wr.sges, !wr.op.is_sink());
    } else {
        let data = wr.inline.insert(InlineData::new());
        for n in 0..count {
            // SAFETY: as above.
            let sge = unsafe { *list.add(n) };
            // SAFETY: as above: inline data is the program's memory.
            unsafe { append(data, sge.addr, sge.length as usize, qp.max_inline()) }?;
        }
    }
    if qp.is_xrc_send() {
        // SAFETY: as above.
        wr.srq = Some(unsafe { (*c).qp_type.xrc.remote_srqn });
    }
    if qp.is_datagram() {
        // SAFETY: as above.
        let to = unsafe { (*c).wr.ud };
        // SAFETY: the program has just put it there.
        let to = unsafe { ah::dest(to.ah, to.remote_qpn, to.remote_qkey) }?;
        // SAFETY: as above.
        let more = unsafe { !(*c).next.is_null() };
        return qp.post_datagram(&wr, &to, more);
    }
    qp.post_one(&mut wr)
}

/// # Safety
/// As for [`post_one`].
#[cold]
unsafe fn rare(qp: &QpObj, c: *const ibv_send_wr, opcode: ibv_wr_opcode) -> Result<SendOp, Errno> {
    // SAFETY: the caller's promise.
    let c = unsafe { *c };
    // SAFETY: the opcode selects this member of the union; all members are plain numbers.
    let atomic = unsafe { c.wr.atomic };
    let remote = RemoteAddr {
        addr: atomic.remote_addr,
        rkey: atomic.rkey,
    };
    Ok(match opcode {
        IBV_WR_ATOMIC_CMP_AND_SWP if qp.is_reliable() => SendOp::CompareSwap {
            remote,
            compare: atomic.compare_add,
            swap: atomic.swap,
        },
        IBV_WR_ATOMIC_FETCH_AND_ADD if qp.is_reliable() => SendOp::FetchAdd {
            remote,
            add: atomic.compare_add,
        },
        IBV_WR_LOCAL_INV => SendOp::LocalInvalidate { rkey: c.imm_data },
        _ => return Err(Errno::INVAL),
    })
}

/// Posts a list of requests, up to the first refused one, which `bad` gets. `post` posts one and returns the next.
///
/// # Safety
/// `bad` is NULL, or there is room for a pointer.
#[inline]
unsafe fn post_list<T, W>(
    first: *mut W,
    bad: *mut *mut W,
    to: impl FnOnce() -> Result<T, Errno>,
    post: impl Fn(&T, *mut W) -> Result<*mut W, Errno>,
) -> c_int {
    let mut at = first;
    let result = quick_status(|| {
        let to = to()?;
        while !at.is_null() {
            at = post(&to, at)?;
        }
        Ok(())
    });
    if result != 0 && !bad.is_null() {
        // SAFETY: the caller's promise.
        unsafe { bad.write(at) };
    }
    result
}

/// `ibv_post_send`
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the program has just looked into it.
    let to = || unsafe { enter::<QpObj>(qp) };
    let post = |qp: &Visit<QpObj>, at: *mut ibv_send_wr| {
        // SAFETY: the caller's promise.
        if let Err(errno) = unsafe { post_one(qp, at) } {
            qp.no_more_datagrams();
            return Err(errno);
        }
        // SAFETY: as above.
        Ok(unsafe { (*at).next })
    };
    // SAFETY: as above.
    unsafe { post_list(wr, bad_wr, to, post) }
}

/// The receive that a C request describes.
///
/// # Safety
/// As for `ibv_post_recv`.
#[inline]
unsafe fn recv_wr(c: *const ibv_recv_wr, max_sge: usize) -> Result<RecvWr, Errno> {
    // SAFETY: the caller's promise; here and below.
    let (id, list, count) = unsafe { ((*c).wr_id, (*c).sg_list, (*c).num_sge) };
    let mut wr = RecvWr::new(id);
    let count = elements(list, count, max_sge)?;
    // SAFETY: as above.
    let elements = unsafe { sges(list, count) };
    elements.for_each(|sge| wr.sges.push(sge));
    null::resolve(&mut wr.sges, false);
    Ok(wr)
}

/// `ibv_post_recv`
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the program has just looked into it.
    let to = || unsafe { enter::<QpObj>(qp) };
    let post = |qp: &Visit<QpObj>, at: *mut ibv_recv_wr| {
        // SAFETY: the caller's promise.
        let wr = unsafe { recv_wr(at, qp.max_recv_sge()) }?;
        qp.post_receive(&wr)?;
        // SAFETY: as above.
        Ok(unsafe { (*at).next })
    };
    // SAFETY: as above.
    unsafe { post_list(wr, bad_wr, to, post) }
}

/// `ibv_post_srq_recv`
pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the program has just looked into it.
    let to = || unsafe { enter::<Srq>(srq) };
    let post = |srq: &Visit<Srq>, at: *mut ibv_recv_wr| {
        // SAFETY: the caller's promise.
        let wr = unsafe { recv_wr(at, srq.max_sge) }?;
        let posted = srq.native.post_recv(std::slice::from_ref(&wr));
        posted.map_err(refused)?;
        // SAFETY: as above.
        Ok(unsafe { (*at).next })
    };
    // SAFETY: as above.
    unsafe { post_list(wr, bad_wr, to, post) }
}

/// `ibv_poll_cq`
pub(crate) unsafe extern "C" fn poll_cq(
    cq: *mut ibv_cq,
    num_entries: c_int,
    wc: *mut ibv_wc,
) -> c_int {
    let mut taken = 0;
    let result = quick_status(|| {
        // SAFETY: the program has just looked into it.
        let cq = unsafe { enter::<Cq>(cq) }?;
        let wanted = usize::try_from(num_entries).map_err(|_| Errno::INVAL)?;
        if wc.is_null() && wanted > 0 {
            return Err(Errno::INVAL);
        }
        if wanted != 1 {
            // SAFETY: the caller's promise.
            taken = unsafe { poll_many(&cq, wanted, wc) }?;
            return Ok(());
        }
        let mut one = [Wc::default()];
        taken = cq.poll(&mut one)?;
        if taken == 1 {
            // SAFETY: the caller's promise: there is room for one.
            unsafe { wc.write(c_wc(&one[0])) };
        }
        Ok(())
    });
    if result == 0 { taken as c_int } else { -result }
}

/// # Safety
/// There is room for `wanted` at `wc`.
#[inline(never)]
unsafe fn poll_many(cq: &Cq, wanted: usize, wc: *mut ibv_wc) -> Result<usize, Errno> {
    const BATCH: usize = 16;
    let mut batch = [Wc::default(); BATCH];
    let mut taken = 0;
    while taken < wanted {
        let room = BATCH.min(wanted - taken);
        let got = cq.poll(&mut batch[..room]);
        // Completions from before the overrun come first.
        let got = if taken > 0 { got.unwrap_or(0) } else { got? };
        for one in &batch[..got] {
            // SAFETY: the caller's promise.
            unsafe { wc.add(taken).write(c_wc(one)) };
            taken += 1;
        }
        if got < room {
            break;
        }
    }
    Ok(taken)
}
