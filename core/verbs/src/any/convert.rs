//! The plain types of the API, and those of `weft-nic`.

use std::io;

use smallvec::SmallVec;
use weft_cverbs as c;
use weft_nic::{Named, Op, Remote};

use crate::cm::ConnectError;
use crate::{
    Access, EndReason, Error, PostError, PostReason, RemoteAddr, SendOp, Sge, Wc, WcOpcode,
    WcStatus,
};

/// The error with its remedy.
pub(super) fn text(error: &weft_nic::Error) -> String {
    match error.hint() {
        Some(hint) => format!("{error}: {hint}"),
        None => error.to_string(),
    }
}

pub(super) fn error(error: &weft_nic::Error) -> Error {
    Error::Os {
        what: "RNIC",
        source: io::Error::other(text(error)),
    }
}

pub(super) fn connect_error(error: &weft_nic::Error) -> ConnectError {
    if let Some(private_data) = error.rejected() {
        let private_data = private_data.to_vec();
        return ConnectError::Rejected { private_data };
    }
    match error.errno().map(io::Error::from_raw_os_error) {
        Some(error) if error.kind() == io::ErrorKind::ConnectionRefused => ConnectError::Refused,
        Some(error) if error.kind() == io::ErrorKind::TimedOut => ConnectError::TimedOut,
        _ => ConnectError::Io(io::Error::other(text(error))),
    }
}

pub(super) fn post_reason(error: &weft_nic::Error) -> PostReason {
    match error.errno().map(io::Error::from_raw_os_error) {
        Some(error) if error.kind() == io::ErrorKind::OutOfMemory => PostReason::Full,
        _ => PostReason::Device(error.errno().unwrap_or_default()),
    }
}

/// Posts one request after the other.
pub(super) fn each<T>(
    wrs: &[T],
    post: impl Fn(&T) -> Result<(), PostReason>,
) -> Result<(), PostError> {
    wrs.iter()
        .enumerate()
        .try_for_each(|(index, wr)| post(wr).map_err(|reason| PostError { index, reason }))
}

pub(super) fn end(end: weft_nic::End) -> EndReason {
    match end {
        weft_nic::End::Disconnected => EndReason::Disconnected,
        weft_nic::End::DeviceRemoved => EndReason::DeviceRemoved,
        weft_nic::End::Lost
        | weft_nic::End::Failed
        | weft_nic::End::BadRequest
        | weft_nic::End::BadAccess => EndReason::Lost,
    }
}

/// The rights have the same numbers on both sides.
pub(super) fn access(access: Access) -> weft_nic::Access {
    weft_nic::Access::from_bits_truncate(access.bits())
}

fn remote(at: RemoteAddr) -> Remote {
    Remote {
        addr: at.addr,
        rkey: at.rkey,
    }
}

/// Immediate data of an RNIC have four bytes.
fn imm(imm: u64) -> Result<u32, PostReason> {
    u32::try_from(imm).map_err(|_| PostReason::Unsupported)
}

pub(super) fn op(op: SendOp) -> Result<Op<'static>, PostReason> {
    Ok(match op {
        SendOp::Send => Op::Send(None),
        SendOp::SendImm { imm: data } => Op::Send(Some(imm(data)?)),
        SendOp::Write { remote: at } => Op::Write(remote(at), None),
        SendOp::WriteImm {
            remote: at,
            imm: data,
        } => Op::Write(remote(at), Some(imm(data)?)),
        SendOp::Read { remote: at } => Op::Read(remote(at)),
        SendOp::FetchAdd { remote: at, add } => Op::FetchAdd {
            at: remote(at),
            add,
        },
        SendOp::CompareSwap {
            remote: at,
            compare,
            swap,
        } => Op::CompareSwap {
            at: remote(at),
            compare,
            swap,
        },
        SendOp::SendInvalidate { .. }
        | SendOp::Swap { .. }
        | SendOp::LocalInvalidate { .. }
        | SendOp::BindMw { .. } => return Err(PostReason::Unsupported),
    })
}

/// Checks what drivers answer with one error number. Returns how many bytes the list has.
pub(super) fn check_list(sges: &[Sge], max: u32) -> Result<u32, PostReason> {
    let asked = sges.len() as u32;
    if asked > max {
        return Err(PostReason::TooManySges { asked, max });
    }
    let mut lens = sges.iter().map(|sge| sge.len);
    lens.try_fold(0, u32::checked_add).ok_or(PostReason::Length)
}

/// A list without its empty elements: some adapters take a length of 0 for 2^31, and the kernel's siw reads past the list (ADR 6). One is left
/// if all are empty, because siw refuses a receive without elements.
pub(super) fn named(sges: &[Sge]) -> SmallVec<[Named; 4]> {
    let named = |sge: &Sge| Named::new(sge.addr, sge.len, sge.lkey);
    let filled = sges.iter().filter(|sge| sge.len > 0).map(named);
    let mut list: SmallVec<[Named; 4]> = filled.collect();
    if list.is_empty() {
        list.extend(sges.first().map(named));
    }
    list
}

pub(super) fn wc(wc: &weft_nic::Wc) -> Wc {
    let opcode = match wc.opcode {
        c::IBV_WC_RDMA_WRITE => WcOpcode::Write,
        c::IBV_WC_RDMA_READ => WcOpcode::Read,
        c::IBV_WC_COMP_SWAP => WcOpcode::CompareSwap,
        c::IBV_WC_FETCH_ADD => WcOpcode::FetchAdd,
        c::IBV_WC_RECV => WcOpcode::Recv,
        c::IBV_WC_RECV_RDMA_WITH_IMM => WcOpcode::RecvWithImm,
        _ => WcOpcode::Send,
    };
    Wc {
        wr_id: wc.id,
        status: status(wc.status()),
        opcode,
        byte_len: wc.len,
        qp_num: wc.qp,
        imm: wc.imm.map(u64::from),
        vendor_err: wc.vendor_error,
        ..Wc::default()
    }
}

fn status(status: u32) -> WcStatus {
    match status {
        c::IBV_WC_SUCCESS => WcStatus::Success,
        c::IBV_WC_LOC_LEN_ERR => WcStatus::LocLenErr,
        c::IBV_WC_LOC_QP_OP_ERR => WcStatus::LocQpOpErr,
        c::IBV_WC_LOC_PROT_ERR | c::IBV_WC_LOC_ACCESS_ERR => WcStatus::LocProtErr,
        c::IBV_WC_WR_FLUSH_ERR => WcStatus::WrFlushErr,
        c::IBV_WC_MW_BIND_ERR => WcStatus::MwBindErr,
        c::IBV_WC_REM_ACCESS_ERR => WcStatus::RemAccessErr,
        c::IBV_WC_REM_INV_REQ_ERR => WcStatus::RemInvReqErr,
        c::IBV_WC_REM_OP_ERR => WcStatus::RemOpErr,
        c::IBV_WC_RETRY_EXC_ERR | c::IBV_WC_RESP_TIMEOUT_ERR => WcStatus::RetryExcErr,
        c::IBV_WC_RNR_RETRY_EXC_ERR => WcStatus::RnrRetryExcErr,
        c::IBV_WC_REM_ABORT_ERR => WcStatus::RemAbortErr,
        _ => WcStatus::GeneralErr,
    }
}
