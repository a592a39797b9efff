//! Conversion of work requests and completions between C's form and the native one.

use std::ffi::{c_int, c_uint};

use rustix::io::Errno;
use weft_verbs::{InlineData, RawMemory, SendWr, Sge, Wc, WcOpcode, WcStatus};

use super::faults;
use super::types::*;

/// As `<infiniband/weft_dgram.h>` has it.
const WEFT_WC_WRITE_RECORD: ibv_wc_opcode = 240;

/// Immediate data is 32 bits in C, in network order; it is the low half of the native value.
#[inline]
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

/// Appends program memory to inline data, which may have `max` bytes.
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
    // Not `resize`, which proceeds byte by byte.
    while data.len() < before + len {
        let some = ZEROS.len().min(before + len - data.len());
        data.extend_from_slice(&ZEROS[..some]);
    }
    memory
        .read(0, &mut data[before..])
        .map_err(|_| Errno::INVAL)
}

/// The number of elements of a request.
#[inline]
pub(crate) fn elements(list: *const ibv_sge, count: c_int, max: usize) -> Result<usize, Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    if count > max || (list.is_null() && count > 0) {
        return Err(Errno::INVAL);
    }
    Ok(count)
}

/// The program's elements without the empty ones: keys of empty elements are not checked.
///
/// # Safety
/// There are `count` elements at `list`, until the iterator is dropped.
#[inline]
pub(crate) unsafe fn sges(list: *const ibv_sge, count: usize) -> impl Iterator<Item = Sge> {
    let all = (0..count).map(move |n| {
        // SAFETY: the caller's promise.
        let sge = unsafe { list.add(n).read_unaligned() };
        Sge {
            addr: sge.addr,
            len: sge.length,
            lkey: sge.lkey,
        }
    });
    all.filter(|sge| sge.len > 0)
}

#[inline]
pub(crate) fn c_wc(wc: &Wc) -> ibv_wc {
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

/// Immediate data or the invalidated key, and the flags for it.
#[inline]
pub(crate) fn wc_extra(wc: &Wc) -> (u32, c_uint) {
    let grh = if wc.source.is_some() { IBV_WC_GRH } else { 0 };
    match (wc.imm, wc.invalidated) {
        (Some(imm), _) => ((imm as u32).to_be(), IBV_WC_WITH_IMM | grh),
        (None, Some(rkey)) => (rkey, IBV_WC_WITH_INV),
        (None, None) => (0, grh),
    }
}

/// The service level of a datagram. RoCE has none. Adapters report the kind of the routing header there, and UCX relies on that: bit 3 for `RoCEv2`, 1 for
/// IPv6, 2 for IPv4.
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
