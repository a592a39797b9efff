//! The short way on shared memory: requests that can be carried out whole while they are posted.
//!
//! When nothing is queued, outstanding or owed, a small Send is a frame in the ring, and one-sided work is a copy: both are
//! done on the spot, and their completions with them. Such a request never enters the send queue. Whatever does not fit
//! this takes the usual way, from where the short one stopped, with nothing half-done.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use weft_mem::{Access, Keys, SendList};
use weft_proto::rdmap::{Fault, MAX_HEADER};

use super::direct::Outcome;
use super::frame::Frame;
use super::tx::DIRECT_BYTES;
use super::{Core, QpInner, Stream};
use crate::transport::local::{LocalLink, REF_MAPPED};
use crate::types::{QpState, SendOp, SendWr, Wc, WcStatus};

/// Payloads up to this are gathered with their header: cheaper than keeping the region while the ring is written.
const GATHER_MAX: u32 = 512;

impl QpInner {
    /// Carry out as many of the requests as can be on the spot; says how many.
    pub(super) fn post_fast(self: &Arc<Self>, wrs: &[SendWr]) -> usize {
        let Some(connected) = self.connected.get() else {
            return 0;
        };
        let Some(local) = connected.link.local() else {
            return 0;
        };
        // Nothing posted before is waiting, so the order stays.
        if self.state() != QpState::Rts || self.sq_used.load(Ordering::SeqCst) > 0 {
            return 0;
        }
        let Some(core) = self.core.try_lock() else {
            return 0;
        };
        let done = self.hold(core, |core| self.carry_out(core, local, wrs));
        if self.pending.load(Ordering::SeqCst) {
            self.drive(true);
        }
        done
    }

    fn carry_out(self: &Arc<Self>, core: &mut Core, local: &LocalLink, wrs: &[SendWr]) -> usize {
        let Core {
            stream: Some(stream),
            tx,
            ledger,
            silent,
            keys,
            ..
        } = core
        else {
            return 0;
        };
        // Another thread may have posted since, or closed or ended the connection.
        if self.state() != QpState::Rts
            || self.is_paused()
            || !stream.is_idle()
            || !tx.is_empty()
            || self.sq_used.load(Ordering::SeqCst) > 0
        {
            return 0;
        }
        let mut wcs: SmallVec<[Wc; 16]> = SmallVec::new();
        let mut done = 0;
        for wr in wrs {
            let Ok(len) = self.check_post(wr) else {
                break;
            };
            let one_sided = |tx: &mut super::Tx| {
                // The lock is not held for long.
                if len == 0 || u64::from(len) > DIRECT_BYTES || !tx.may_overtake(local) {
                    return Outcome::NotDirect;
                }
                self.one_sided(wr, local, keys, &mut tx.window)
            };
            let carried = match wr.op {
                _ if wr.srq.is_some() && wr.op.is_two_sided() => false,
                SendOp::Send if (len as usize) < REF_MAPPED && !self.remote_completion => {
                    self.send_frame(stream, tx, keys, local, wr, len)
                }
                SendOp::WriteImm { imm, .. } if !self.remote_completion => {
                    // Room for the immediate data first: the write cannot be taken back.
                    local.has_room(MAX_HEADER + 8)
                        && matches!(one_sided(tx), Outcome::DataDone)
                        && {
                            ledger.one_sided += 1;
                            ledger.one_sided_bytes += u64::from(len);
                            immediate_frame(stream, tx, local, imm, wr.solicited, len)
                        }
                }
                SendOp::Write { .. }
                | SendOp::Read { .. }
                | SendOp::FetchAdd { .. }
                | SendOp::CompareSwap { .. }
                | SendOp::Swap { .. } => {
                    let carried = matches!(one_sided(tx), Outcome::Done);
                    if carried {
                        ledger.one_sided += 1;
                        ledger.one_sided_bytes += u64::from(len);
                    }
                    carried
                }
                _ => false,
            };
            if !carried {
                break;
            }
            match wr.op {
                SendOp::Send => {
                    ledger.tx_fpdus += 1;
                    ledger.tx_copied += u64::from(len);
                }
                SendOp::WriteImm { .. } => ledger.tx_fpdus += 1,
                _ => {}
            }
            done += 1;
            if wr.signaled || self.sq_sig_all {
                wcs.push(Wc {
                    wr_id: wr.id,
                    status: WcStatus::Success,
                    opcode: wr.op.opcode(),
                    byte_len: len,
                    qp_num: self.num,
                    places: 1 + std::mem::take(silent),
                    ..Wc::default()
                });
            } else {
                *silent += 1;
            }
        }
        local.flush();
        let wanted = !wcs.is_empty() && !self.orphan.load(Ordering::Relaxed);
        if wanted && !self.send_cq.push(&wcs, false) {
            self.fault(core, Fault::LocalCatastrophic);
        }
        done
    }

    fn send_frame(
        &self,
        stream: &mut Stream,
        tx: &mut super::Tx,
        keys: &Keys,
        local: &LocalLink,
        wr: &SendWr,
        len: u32,
    ) -> bool {
        if !local.has_room(MAX_HEADER + len as usize) {
            return false;
        }
        let small = tx.small();
        small.clear();
        let gather = len <= GATHER_MAX;
        let spans = match &wr.inline {
            Some(_) => SmallVec::new(),
            None if gather => {
                // The payload behind room for the header, which is known only once it is certain that there is one.
                small.resize(MAX_HEADER + 4, 0);
                for sge in wr.sges.iter().filter(|sge| sge.len > 0) {
                    match keys.local(self.pd.id, sge.lkey, sge.addr, sge.len, Access::empty()) {
                        Ok(span) => span.append_to(small),
                        Err(_) => return false,
                    }
                }
                SmallVec::new()
            }
            None => match self.spans_of(keys, wr, Access::empty()) {
                Some(spans) => spans,
                None => return false,
            },
        };
        let mut hdr = [0; MAX_HEADER];
        let n = stream.send_at_once(wr.solicited, &mut hdr);
        let mut frame = [0; MAX_HEADER + 4];
        frame[..4].copy_from_slice(&Frame::local_header(n + len as usize));
        frame[4..4 + n].copy_from_slice(&hdr[..n]);
        let mut list = SendList::new();
        let room = MAX_HEADER + 4;
        if let Some(data) = &wr.inline {
            list.push_bytes(&frame[..4 + n]);
            list.push_bytes(data);
        } else if gather {
            small[room - n - 4..room].copy_from_slice(&frame[..4 + n]);
            list.push_bytes(&small[room - n - 4..]);
        } else {
            list.push_bytes(&frame[..4 + n]);
            for span in &spans {
                list.push_key(span);
            }
        }
        let sent = local.push_frame(&list);
        drop(list);
        tx.sent_fast(sent);
        sent > 0
    }
}

fn immediate_frame(
    stream: &mut Stream,
    tx: &mut super::Tx,
    local: &LocalLink,
    imm: u64,
    solicited: bool,
    written: u32,
) -> bool {
    let mut hdr = [0; MAX_HEADER];
    let n = stream.immediate_at_once(imm, solicited, written, &mut hdr);
    let mut frame = [0; MAX_HEADER + 4];
    frame[..4].copy_from_slice(&Frame::local_header(n));
    frame[4..4 + n].copy_from_slice(&hdr[..n]);
    let mut list = SendList::new();
    list.push_bytes(&frame[..4 + n]);
    let sent = local.push_frame(&list);
    tx.sent_fast(sent);
    sent > 0
}
