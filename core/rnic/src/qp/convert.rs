//! Conversions between the types of verbs and those of the protocol machine.

use weft_mem::MemError;
use weft_proto::rdmap::{self, Fault};
use weft_wire::rdmap::{
    AtomicOp, OperationError, ProtectionError, TaggedError, TermError, UntaggedError,
};

use crate::types::{RemoteAddr, SendOp, SendWr, TerminateCode, WcStatus};

pub(super) fn zero_write() -> SendWr {
    SendWr::write(0, RemoteAddr { addr: 0, rkey: 0 })
}

pub(super) fn zero_read() -> SendWr {
    SendWr::read(0, RemoteAddr { addr: 0, rkey: 0 })
}

/// The longest ULPDU whose FPDU fits the path: 2 bytes of length and 4 of CRC around it, and no padding.
pub(super) fn max_ulpdu(wanted: u32, max_fpdu: Option<u32>) -> u32 {
    let path = max_fpdu.map_or(u32::MAX, |fpdu| (fpdu & !3).saturating_sub(6));
    wanted.min(path).min(u32::from(u16::MAX))
}

pub(crate) fn to_proto(wr: &SendWr) -> rdmap::SendWr {
    let atomic = |op, remote: RemoteAddr, add_or_swap, compare| rdmap::Op::Atomic {
        op,
        stag: remote.rkey,
        to: remote.addr,
        add_or_swap,
        // An add without carry boundaries, or a swap of all bits (RFC 7306 5.2).
        add_or_swap_mask: if op == AtomicOp::FetchAdd {
            0
        } else {
            u64::MAX
        },
        compare,
        compare_mask: u64::MAX,
    };
    let op = match wr.op {
        SendOp::Send => rdmap::Op::Send {
            solicited: wr.solicited,
            invalidate: None,
        },
        SendOp::SendInvalidate { rkey } => rdmap::Op::Send {
            solicited: wr.solicited,
            invalidate: Some(rkey),
        },
        SendOp::SendImm { imm } => rdmap::Op::SendImm {
            imm,
            solicited: wr.solicited,
        },
        SendOp::Write { remote } => rdmap::Op::Write {
            stag: remote.rkey,
            to: remote.addr,
        },
        SendOp::WriteImm { remote, imm } => rdmap::Op::WriteImm {
            stag: remote.rkey,
            to: remote.addr,
            imm,
            solicited: wr.solicited,
        },
        SendOp::Read { remote } => rdmap::Op::Read {
            src_stag: remote.rkey,
            src_to: remote.addr,
        },
        SendOp::FetchAdd { remote, add } => atomic(AtomicOp::FetchAdd, remote, add, 0),
        SendOp::CompareSwap {
            remote,
            compare,
            swap,
        } => atomic(AtomicOp::CompareSwap, remote, swap, compare),
        SendOp::Swap { remote, value } => atomic(AtomicOp::Swap, remote, value, 0),
        SendOp::LocalInvalidate { .. } | SendOp::BindMw { .. } => rdmap::Op::Local,
    };
    rdmap::SendWr {
        op,
        len: wr.len().unwrap_or(0),
        fence: wr.fence,
    }
}

/// The fault to report to the peer about memory of ours that it may not use.
pub(super) fn fault_of(error: MemError) -> Fault {
    match error {
        MemError::InvalidStag => Fault::InvalidStag,
        MemError::Bounds => Fault::Bounds,
        MemError::Misaligned => Fault::Misaligned,
        MemError::Access => Fault::AccessRights,
        MemError::Pd => Fault::StagNotAssociated,
        MemError::Wrap => Fault::ToWrap,
        MemError::CannotInvalidate => Fault::CannotInvalidate,
        _ => Fault::LocalCatastrophic,
    }
}

/// Layer, type and code of a Terminate as one number, laid out as on the wire.
pub(crate) fn term_code(error: TermError) -> u32 {
    let (layer, etype, code) = error.parts();
    u32::from(layer) << 12 | u32::from(etype) << 8 | u32::from(code)
}

pub(super) fn is_access_code(code: u32) -> bool {
    matches!(
        TerminateCode(code).error(),
        TermError::Protection(_) | TermError::Tagged(_)
    )
}

/// The status of a request that the peer's Terminate names.
pub(super) fn remote_status(op: &SendOp, error: TermError) -> WcStatus {
    match error {
        TermError::Protection(ProtectionError::CannotInvalidate)
        | TermError::Tagged(TaggedError::InvalidVersion)
        | TermError::Untagged(UntaggedError::TooLong)
        | TermError::Operation(OperationError::InvalidVersion | OperationError::UnexpectedOpcode) => {
            WcStatus::RemInvReqErr
        }
        TermError::Untagged(UntaggedError::NoBuffer) if op.is_two_sided() => {
            WcStatus::RnrRetryExcErr
        }
        // It is misaligned: RFC 7306 has no code for that.
        TermError::Operation(OperationError::Unspecified) if op.is_atomic() => {
            WcStatus::RemInvReqErr
        }
        TermError::Protection(_) | TermError::Tagged(_) => WcStatus::RemAccessErr,
        _ => WcStatus::RemOpErr,
    }
}
