//! The properties that a program has given a queue pair.

use crate::types::{PostReason, SendOp, SendWr};

/// See [`QpInit`](super::QpInit), which has the same names. They do not change.
pub(crate) struct Limits {
    pub(crate) max_send_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
    pub(crate) sq_sig_all: bool,
    pub(crate) remote_completion: bool,
    pub(crate) quiet_end: bool,
}

impl Limits {
    /// Checks a request by itself, and returns its length.
    pub(crate) fn check(&self, wr: &SendWr) -> Result<u32, PostReason> {
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
