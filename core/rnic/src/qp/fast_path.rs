//! The fast path on shared memory: requests that are carried out completely in the posting call.
//!
//! If nothing is queued, outstanding or owed, a small Send is a frame in the ring, and a one-sided operation is a copy. Both are done at
//! once, together with their completions, and never enter the send queue. All other requests take the usual path from the point where the
//! fast path stopped, with nothing half-done.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use weft_mem::{Access, Keys, SendList};
use weft_proto::rdmap::{Fault, MAX_HEADER};

use super::direct::Outcome;
use super::flight::Tx;
use super::frame::{Frame, LOCAL_HEADER_LEN};
use super::tx::DIRECT_BYTES;
use super::{Core, QpInner, Stream};
use crate::comp_counters::CompCounters;
use crate::transport::local::{LocalLink, REF_MAPPED};
use crate::types::{QpState, SendOp, SendWr, Wc, WcStatus};

impl QpInner {
    /// Carry out as many of the requests as can be on the spot; says how many.
    pub(super) fn post_fast(self: &Arc<Self>, wrs: &[SendWr]) -> usize {
        let Some(connected) = self.peer.connected.get() else {
            return 0;
        };
        let Some(local) = connected.link.local() else {
            return 0;
        };
        // Nothing posted before is waiting, so the order stays.
        if self.state() != QpState::Rts || self.posting.sq_used.load(Ordering::SeqCst) > 0 {
            return 0;
        }
        // Threads that share the queue pair are in holds of some ten nanoseconds; the way over the inbox takes several times that.
        let Some(core) = self.core.try_lock_soon() else {
            return 0;
        };
        let done = self.hold(core, |core| self.carry_out(core, local, wrs));
        if self.wake.seen().is_left() {
            self.drive(true);
        }
        done
    }

    fn carry_out(self: &Arc<Self>, core: &mut Core, local: &LocalLink, wrs: &[SendWr]) -> usize {
        let Core {
            stream: Some(stream),
            tx,
            counters,
            silent,
            keys,
            ..
        } = core
        else {
            return 0;
        };
        // Another thread may have posted since, or closed or ended the connection.
        if !self.life.is_open()
            || !stream.is_idle()
            || !tx.is_empty()
            || self.posting.sq_used.load(Ordering::SeqCst) > 0
        {
            return 0;
        }
        let mut wcs: SmallVec<[Wc; 16]> = SmallVec::new();
        let mut done = 0;
        let mut marked = local.marked();
        for wr in wrs {
            let Ok(len) = self.check_post(wr) else {
                break;
            };
            if let SendOp::Write { remote } = wr.op
                && tx.may_overtake(local)
                && self.write_known(wr, remote, &mut marked, keys, &tx.stretch)
            {
                counters.one_sided += 1;
                counters.one_sided_bytes += u64::from(len);
                done += 1;
                self.note_done(wr, len, silent, &mut wcs);
                continue;
            }
            marked.leave();
            let one_sided = |tx: &mut Tx| {
                // The lock is not held for long.
                if len == 0 || u64::from(len) > DIRECT_BYTES || !tx.may_overtake(local) {
                    return Outcome::NotDirect;
                }
                self.one_sided(wr, local, keys, &mut tx.stretch)
            };
            let carried = match wr.op {
                _ if wr.srq.is_some() && wr.op.is_two_sided() => false,
                SendOp::Send if (len as usize) < REF_MAPPED && !self.limits.remote_completion => {
                    self.send_frame(stream, tx, keys, local, wr, len)
                }
                SendOp::WriteImm { imm, .. } if !self.limits.remote_completion => {
                    // Room for the immediate data first: the write cannot be taken back.
                    local.has_room(MAX_HEADER + 8)
                        && matches!(one_sided(tx), Outcome::DataDone)
                        && {
                            counters.one_sided += 1;
                            counters.one_sided_bytes += u64::from(len);
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
                        counters.one_sided += 1;
                        counters.one_sided_bytes += u64::from(len);
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
                    counters.tx_fpdus += 1;
                    counters.tx_copied += u64::from(len);
                }
                SendOp::WriteImm { .. } => counters.tx_fpdus += 1,
                _ => {}
            }
            done += 1;
            self.note_done(wr, len, silent, &mut wcs);
        }
        drop(marked);
        local.flush();
        local.written();
        let wanted = !wcs.is_empty() && !self.life.is_orphan();
        if wanted && !self.send_cq.push(&wcs, false) {
            self.fault(core, Fault::LocalCatastrophic);
        }
        done
    }

    #[inline]
    fn note_done(&self, wr: &SendWr, len: u32, silent: &mut u32, wcs: &mut SmallVec<[Wc; 16]>) {
        self.note(wr.op.opcode(), WcStatus::Success, len);
        if !wr.signaled && !self.limits.sq_sig_all {
            CompCounters::done_silently(self.comp_counters.as_ref(), wr.op.opcode(), silent);
            return;
        }
        wcs.push(Wc {
            wr_id: wr.id,
            status: WcStatus::Success,
            opcode: wr.op.opcode(),
            byte_len: len,
            qp_num: self.num,
            wqes_retired: 1 + std::mem::take(silent),
            ..Wc::default()
        });
    }

    fn send_frame(
        &self,
        stream: &mut Stream,
        tx: &mut Tx,
        keys: &Keys,
        local: &LocalLink,
        wr: &SendWr,
        len: u32,
    ) -> bool {
        if !local.has_room(MAX_HEADER + len as usize) {
            return false;
        }
        let known = match wr.sges.as_slice() {
            [sge] => keys.known(self.pd.id, sge.lkey, sge.addr, sge.len, Access::empty()),
            _ => None,
        };
        let spans = match &wr.inline {
            None if known.is_none() => match self.spans_of(keys, wr, Access::empty()) {
                Some(spans) => spans,
                None => return false,
            },
            _ => SmallVec::new(),
        };
        let mut frame = [0; _];
        let n = header_of(&mut frame, len as usize, |header| {
            stream.send_at_once(wr.solicited, header)
        });
        let mut list = SendList::new();
        list.push_bytes(&frame[..n]);
        if let Some(data) = &wr.inline {
            list.push_bytes(data);
        } else if let Some(span) = &known {
            list.push_key(span);
        } else {
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

/// Lets `write` make the header of a frame with `payload` bytes; how long it is with the frame's own.
fn header_of(
    frame: &mut [u8; LOCAL_HEADER_LEN + MAX_HEADER],
    payload: usize,
    write: impl FnOnce(&mut [u8; MAX_HEADER]) -> usize,
) -> usize {
    // Copy it into place at once, because reading in large pieces is slow directly after writing in small ones.
    let [_, _, _, _, header @ ..] = frame;
    let n = write(header);
    frame[..LOCAL_HEADER_LEN].copy_from_slice(&Frame::local_header(n + payload));
    LOCAL_HEADER_LEN + n
}

fn immediate_frame(
    stream: &mut Stream,
    tx: &mut Tx,
    local: &LocalLink,
    imm: u64,
    solicited: bool,
    written: u32,
) -> bool {
    let mut frame = [0; _];
    let n = header_of(&mut frame, 0, |header| {
        stream.immediate_at_once(imm, solicited, written, header)
    });
    let mut list = SendList::new();
    list.push_bytes(&frame[..n]);
    let sent = local.push_frame(&list);
    tx.sent_fast(sent);
    sent > 0
}
