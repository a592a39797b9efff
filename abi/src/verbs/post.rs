//! The fast path: posting and polling.

use std::ffi::{c_int, c_uint};

use rustix::io::Errno;
use weft_verbs::{
    InlineData, RawMemory, RecvWr, RemoteAddr, SendOp, SendWr, Sge, Wc, WcOpcode, WcStatus,
};

use super::cq::Cq;
use super::faults;
use super::mw::post_bind;
use super::null;
use super::object::{Visit, enter};
use super::qp::QpObj;
use super::refused;
use super::srq::Srq;
use super::types::*;
use super::ud;
use crate::call::quick_status;

/// As `<infiniband/weft_dgram.h>` has it.
const WEFT_WC_WRITE_RECORD: ibv_wc_opcode = 240;

/// Immediate data is 32 bits in C, in network order; it travels as the low half of ours.
pub(crate) fn imm(data: u32) -> u64 {
    u64::from(u32::from_be(data))
}

#[inline]
pub(crate) fn set_flags(wr: &mut SendWr, flags: c_uint) {
    wr.signaled = flags & IBV_SEND_SIGNALED != 0;
    wr.fence = flags & IBV_SEND_FENCE != 0;
    wr.solicited = flags & IBV_SEND_SOLICITED != 0;
}

const ZEROS: [u8; 1024] = [0; 1024];

/// Append program memory to inline data, which may have `max` bytes.
///
/// # Safety
/// The memory is readable.
pub(crate) unsafe fn append(
    data: &mut InlineData,
    addr: u64,
    len: usize,
    max: usize,
) -> Result<(), Errno> {
    let before = data.len();
    if len > max.saturating_sub(before) {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise; it is copied at once.
    let memory = unsafe { RawMemory::new(addr as *mut u8, len) }.ok_or(Errno::INVAL)?;
    // Not `resize`, which goes from byte to byte.
    while data.len() < before + len {
        let some = ZEROS.len().min(before + len - data.len());
        data.extend_from_slice(&ZEROS[..some]);
    }
    memory
        .read(0, &mut data[before..])
        .map_err(|_| Errno::INVAL)
}

/// How many elements a request has.
#[inline]
fn elements(list: *const ibv_sge, count: c_int, max: usize) -> Result<usize, Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    if count > max || (list.is_null() && count > 0) {
        return Err(Errno::INVAL);
    }
    Ok(count)
}

/// Post the request that a C request stands for.
///
/// # Safety
/// As for `ibv_post_send`.
#[inline]
unsafe fn post_one(qp: &QpObj, c: *const ibv_send_wr) -> Result<(), Errno> {
    // SAFETY: the caller's promise: a request of the program, with the union's member that its opcode says; here and below.
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
    // Built where it is posted from: it is too large to be moved about.
    let mut wr = SendWr::new(id, op);
    set_flags(&mut wr, flags);
    // SAFETY: as above.
    let (list, count) = unsafe { ((*c).sg_list, (*c).num_sge) };
    let count = elements(list, count, qp.max_send_sge())?;
    if flags & IBV_SEND_INLINE == 0 {
        for n in 0..count {
            // SAFETY: as above.
            let sge = unsafe { *list.add(n) };
            // The key of an empty element is not looked at.
            if sge.length > 0 {
                wr.sges.push(Sge {
                    addr: sge.addr,
                    len: sge.length,
                    lkey: sge.lkey,
                });
            }
        }
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
        let to = unsafe { ud::dest(to.ah, to.remote_qpn, to.remote_qkey) }?;
        return qp.post_datagram(&wr, &to);
    }
    qp.post_one(&mut wr)
}

/// # Safety
/// As for [`post_one`].
#[cold]
unsafe fn rare(qp: &QpObj, c: *const ibv_send_wr, opcode: ibv_wr_opcode) -> Result<SendOp, Errno> {
    // SAFETY: the caller's promise.
    let c = unsafe { *c };
    // SAFETY: the union's member that the opcode says; all of them are plain numbers.
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

/// Post a list of requests, up to the first that is refused, which `bad` gets. `post` posts one and says which is next.
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
        unsafe { post_one(qp, at) }?;
        // SAFETY: as above.
        Ok(unsafe { (*at).next })
    };
    // SAFETY: as above.
    unsafe { post_list(wr, bad_wr, to, post) }
}

/// The request that a C request stands for.
///
/// # Safety
/// As for `ibv_post_recv`.
#[inline]
unsafe fn recv_wr(c: *const ibv_recv_wr, max_sge: usize) -> Result<RecvWr, Errno> {
    // SAFETY: the caller's promise; here and below.
    let (id, list, count) = unsafe { ((*c).wr_id, (*c).sg_list, (*c).num_sge) };
    let mut wr = RecvWr::new(id);
    for n in 0..elements(list, count, max_sge)? {
        // SAFETY: as above.
        let sge = unsafe { *list.add(n) };
        if sge.length > 0 {
            wr.sges.push(Sge {
                addr: sge.addr,
                len: sge.length,
                lkey: sge.lkey,
            });
        }
    }
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
        // What was there before the overrun comes first.
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

#[inline]
fn c_wc(wc: &Wc) -> ibv_wc {
    let (data, flags) = wc_extra(wc);
    ibv_wc {
        wr_id: wc.wr_id,
        status: wc_status(wc),
        opcode: wc_opcode(wc),
        vendor_err: wc.vendor_err,
        byte_len: wc.byte_len,
        imm_data: data,
        qp_num: wc.qp_num,
        src_qp: wc_source(wc),
        wc_flags: flags,
        pkey_index: 0,
        slid: 0,
        sl: wc_sl(wc),
        dlid_path_bits: 0,
    }
}

/// Immediate data or the key that was invalidated, and the flags that say which.
#[inline]
pub(crate) fn wc_extra(wc: &Wc) -> (u32, c_uint) {
    let grh = if wc.source.is_some() { IBV_WC_GRH } else { 0 };
    match (wc.imm, wc.invalidated) {
        (Some(imm), _) => ((imm as u32).to_be(), IBV_WC_WITH_IMM | grh),
        (None, Some(rkey)) => (rkey, IBV_WC_WITH_INV),
        (None, None) => (0, grh),
    }
}

/// The service level of a datagram. With RoCE there is none, and adapters tell there what the routing header is, which UCX counts on: bit 3 for
/// `RoCEv2`, 1 for IPv6, 2 for IPv4.
#[inline]
pub(crate) fn wc_sl(wc: &Wc) -> u8 {
    match wc.source {
        None => 0,
        Some(source) if source.addr.is_ipv4() => 0xa,
        Some(_) => 0x9,
    }
}

/// The queue pair that a datagram came from.
#[inline]
pub(crate) fn wc_source(wc: &Wc) -> u32 {
    wc.source.map_or(0, |source| source.qp_num)
}

/// As C says it.
#[inline]
pub(crate) fn wc_opcode(wc: &Wc) -> ibv_wc_opcode {
    match wc.opcode {
        WcOpcode::Send => IBV_WC_SEND,
        WcOpcode::Write => IBV_WC_RDMA_WRITE,
        WcOpcode::Read => IBV_WC_RDMA_READ,
        WcOpcode::FetchAdd => IBV_WC_FETCH_ADD,
        // A swap is never posted from here.
        WcOpcode::CompareSwap | WcOpcode::Swap => IBV_WC_COMP_SWAP,
        WcOpcode::LocalInvalidate => IBV_WC_LOCAL_INV,
        WcOpcode::BindMw => IBV_WC_BIND_MW,
        WcOpcode::Recv => IBV_WC_RECV,
        WcOpcode::RecvWithImm => IBV_WC_RECV_RDMA_WITH_IMM,
        WcOpcode::WriteRecord => WEFT_WC_WRITE_RECORD,
    }
}

/// As C says it.
#[inline]
pub(crate) fn wc_status(wc: &Wc) -> ibv_wc_status {
    match wc.status {
        WcStatus::Success => IBV_WC_SUCCESS,
        failed => faults::reported(wc.qp_num, error_status(failed)),
    }
}

#[cold]
fn error_status(status: WcStatus) -> ibv_wc_status {
    match status {
        WcStatus::Success => IBV_WC_SUCCESS,
        WcStatus::LocLenErr => IBV_WC_LOC_LEN_ERR,
        WcStatus::LocQpOpErr => IBV_WC_LOC_QP_OP_ERR,
        WcStatus::LocProtErr => IBV_WC_LOC_PROT_ERR,
        WcStatus::WrFlushErr => IBV_WC_WR_FLUSH_ERR,
        WcStatus::MwBindErr => IBV_WC_MW_BIND_ERR,
        WcStatus::RemAccessErr => IBV_WC_REM_ACCESS_ERR,
        WcStatus::RemInvReqErr => IBV_WC_REM_INV_REQ_ERR,
        WcStatus::RemOpErr => IBV_WC_REM_OP_ERR,
        WcStatus::RetryExcErr => IBV_WC_RETRY_EXC_ERR,
        WcStatus::RnrRetryExcErr => IBV_WC_RNR_RETRY_EXC_ERR,
        WcStatus::RemAbortErr => IBV_WC_REM_ABORT_ERR,
        WcStatus::GeneralErr => IBV_WC_GENERAL_ERR,
    }
}
