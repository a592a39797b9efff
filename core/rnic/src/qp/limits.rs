//! The properties that a program has given a queue pair.

use crate::types::{PostReason, SendOp, SendWr};

/// See [`QpInit`](super::QpInit), which has the same names. They do not change.
pub(super) struct Limits {
    pub(super) max_send_wr: u32,
    pub(super) max_sge: u32,
    pub(super) max_inline: u32,
    pub(super) sq_sig_all: bool,
    pub(super) remote_completion: bool,
    pub(super) quiet_end: bool,
}

impl Limits {
    /// Checks a request by itself, and returns its length.
    pub(super) fn check(&self, wr: &SendWr) -> Result<u32, PostReason> {
        if wr.sges.len() > self.max_sge as usize {
            return Err(PostReason::TooManySges {
                asked: wr.sges.len() as u32,
                max: self.max_sge,
            });
        }
        let len = wr.len().ok_or(PostReason::Length)?;
        if wr.inline.is_some() {
            let fits = matches!(
                wr.op,
                SendOp::Send
                    | SendOp::SendInvalidate { .. }
                    | SendOp::SendImm { .. }
                    | SendOp::Write { .. }
                    | SendOp::WriteImm { .. }
            ) && wr.sges.is_empty();
            if !fits {
                return Err(PostReason::Inline);
            }
            if len > self.max_inline {
                return Err(PostReason::InlineTooLong {
                    asked: len,
                    max: self.max_inline,
                });
            }
        }
        if wr.op.is_atomic() && len != 8 {
            return Err(PostReason::Length);
        }
        Ok(len)
    }
}
