//! The transmit side: posted requests, and responses owed to the peer, become segments, and segments FPDUs of a flight.
//!
//! Headers, trailers and small payloads are written to a scratch buffer; larger payloads are sent from registered memory in the same system
//! call. With CRC or markers every payload is copied, so that exactly the bytes of the CRC are sent, even if the memory changes in between
//! (docs/adr/0003).

use std::sync::Arc;
use std::time::Duration;

use weft_mem::{Access, MemError, PdId, Table};
use weft_proto::rdmap::{Fault, MAX_HEADER, Payload};
use weft_wire::ddp::UNTAGGED_LEN;
use weft_wire::rdmap::{Opcode, TermError};

use super::convert::{fault_of, term_code};
use super::end::EndReason;
use super::flight::{Barrier, FLIGHT_PIECES, Overdue, Piece, Tx, note_transmitted};
use super::frame::Frame;
use super::{Core, QpInner, Slot};
use crate::engine::on_engine;
use crate::timer;
use crate::transport::Llp;
use crate::types::{ConnCounters, SendOp, WcStatus, sub_list};

/// Payloads up to this are copied: cheaper than another entry in the list.
const COPY_MAX: u32 = 2048;
/// A flight is not made longer once it has this many bytes.
const FLIGHT_BYTES: usize = 1 << 20;
/// The same with CRC: copied bytes should still be in the second-level cache when the kernel reads them.
const FLIGHT_BYTES_COPIED: usize = 256 * 1024;
/// Flights of one drive, so that one connection cannot keep the others waiting.
const FLIGHTS: u32 = 8;
/// Direct work of one drive by the engine, in bytes; the last request may go beyond.
pub(super) const DIRECT_BYTES: u64 = 4 << 20;
/// Between two looks whether a peer has left a window.
const LOOK: Duration = Duration::from_millis(1);

/// The result of a request that does not touch the wire.
pub(crate) enum Local {
    Done,
    Failed(WcStatus),
    /// A peer of this host is still in this window.
    Waits(u32),
}

impl QpInner {
    /// Send until there is nothing to send or the transport takes no more. Says whether bytes moved.
    pub(super) fn pump_tx(self: &Arc<Self>, core: &mut Core, link: &Llp) -> bool {
        if core.tx.lends() {
            note_transmitted(core, link);
        }
        let idle = core.tx.pieces.is_empty()
            && core.tx.overdue.is_none()
            && core.stream.as_ref().is_none_or(|s| !s.has_work());
        if core.shut || idle {
            core.tx.blocked = false;
            return false;
        }
        if link.local().is_none() && core.tx.rests() {
            return false;
        }
        let before = core.tx.sent;
        let mut direct = false;
        // A thread of the program does its own work. The engine has other connections.
        core.tx.direct_left = if on_engine() { DIRECT_BYTES } else { u64::MAX };
        for flight in 0.. {
            if core.tx.pieces.is_empty() {
                direct |= self.build(core, link);
                if core.ended.is_some() {
                    return true;
                }
                if core.tx.pieces.is_empty() {
                    core.tx.blocked = core.tx.direct_stopped;
                    if core.tx.scratch.capacity() > 0 {
                        self.device
                            .pool()
                            .put_tx(std::mem::take(&mut core.tx.scratch));
                    }
                    break;
                }
            }
            if flight == FLIGHTS {
                // The others have waited long enough; being writable, the socket brings us back at once.
                core.tx.blocked = true;
                break;
            }
            let outcome = core.tx.send_once(self, link, &mut core.counters);
            note_transmitted(core, link);
            match outcome {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    tracing::debug!(qp = self.num, %error, "sending failed");
                    // Why the peer hung up may be waiting to be read.
                    core.send_failed = true;
                    self.pump_rx(core, link);
                    self.end(core, EndReason::Lost);
                    break;
                }
            }
        }
        direct || core.tx.sent != before
    }

    /// Builds the next flight, and carries out requests that need none: returns whether there was anything to do.
    fn build(self: &Arc<Self>, core: &mut Core, link: &Llp) -> bool {
        let mut hdr = [0; MAX_HEADER];
        if core.tx.pieces.is_empty() {
            core.tx.scratch.clear();
        }
        let copy_all = core.tx.crc || core.tx.markers.is_some();
        let limit = flight_limit(copy_all);
        let mut bytes = 0;
        let (mut failed, mut source_gone, mut direct) = (None, false, false);
        core.tx.direct_stopped = false;
        if self.waits_for_window(core) {
            return false;
        }
        loop {
            direct |= self.work_directly(core, link);
            if core.tx.direct_stopped {
                break;
            }
            let Core {
                stream: Some(stream),
                tx,
                counters,
                confirming,
                ..
            } = core
            else {
                return direct;
            };
            let Some(segment) = stream.next_tx(&mut hdr) else {
                break;
            };
            if segment.is_terminate() {
                tx.terminate = reason_in(&hdr);
            }
            if tx.scratch.capacity() == 0 {
                tx.scratch = self.device.pool().get_tx();
            }
            let start = tx.scratch.len();
            let ulpdu_len = segment.header_len + segment.payload.len() as usize;
            let payload = match segment.payload {
                Payload::Local { seq } => {
                    let Some(slot) = stream.request_mut(seq) else {
                        continue;
                    };
                    match do_local(&self.device.table, self.pd.id, self.num, &slot.wr.op) {
                        Local::Done => stream.transmitted(seq),
                        Local::Failed(status) => {
                            slot.fault = Some(status);
                            failed = Some(Fault::LocalCatastrophic);
                            break;
                        }
                        Local::Waits(stag) => {
                            tx.overdue = Some(Overdue { seq, stag });
                            self.wait_for_window();
                            break;
                        }
                    }
                    continue;
                }
                payload => payload,
            };
            tx.frame.emit(ulpdu_len, &mut tx.scratch);
            tx.scratch.extend_from_slice(&hdr[..segment.header_len]);
            let inline = matches!(payload, Payload::Wr { seq, .. }
                if stream.request(seq).is_some_and(|slot| slot.wr.inline.is_some()));
            let copy = copy_all || inline || payload.len() <= COPY_MAX;
            let put = match payload {
                // The answer will need its place: better to find out before the peer is asked.
                Payload::None => match segment.completes.and_then(|seq| stream.request_mut(seq)) {
                    Some(slot) if slot.wr.op.is_sink() => self.check_sink(slot),
                    _ => Ok(()),
                },
                Payload::Local { .. } => Ok(()),
                Payload::Wr { seq, offset, len } => match stream.request_mut(seq) {
                    Some(slot) => self.put_wr(tx, slot, start, offset, len, copy),
                    None => Err(Fault::LocalCatastrophic),
                },
                Payload::Source { stag, to, len } => {
                    let put = self.put_source(tx, start, (stag, to, len), copy);
                    if let Err(error) = put {
                        // The region went away while the response was on its way: nothing of this FPDU is sent.
                        tx.scratch.truncate(start);
                        stream.fail_source(fault_of(error));
                        source_gone = true;
                        continue;
                    }
                    Ok(())
                }
            };
            if let Err(fault) = put {
                tx.scratch.truncate(start);
                failed = Some(fault);
                break;
            }
            let in_place = !copy && !payload.is_empty();
            count_fpdu(counters, payload.len(), in_place);
            bytes += tx.finish_fpdu(start, ulpdu_len, in_place);
            if let Some(seq) = segment.completes {
                tx.marks.push_back((tx.built, seq));
            }
            // A question of our own touches nothing.
            let question = confirming.is_some()
                && (segment.completes.and_then(|seq| stream.request(seq)))
                    .is_some_and(|slot| slot.internal);
            if tx.frame == Frame::Local && touches_memory(segment.opcode) && !question {
                tx.barrier = Barrier::Built;
            }
            if bytes >= limit || tx.pieces.len() >= FLIGHT_PIECES {
                break;
            }
        }
        if let Some(fault) = failed {
            self.fault(core, fault);
        } else if source_gone {
            let code = core.tx.terminate;
            self.end(core, EndReason::Terminated(code));
        }
        direct
    }

    /// A fault in the peer's data (or in ours): sends a Terminate and ends the connection.
    pub(super) fn fault(self: &Arc<Self>, core: &mut Core, fault: Fault) {
        tracing::debug!(qp = self.num, %fault, "terminating the stream");
        if let Some(stream) = &mut core.stream {
            stream.fail(fault);
        }
        // The Terminate is added to the flight before the stream is flushed.
        if let Some(connected) = self.peer.connected.get() {
            self.build(core, &connected.link);
        }
        let code = core.tx.terminate;
        self.end(core, EndReason::Terminated(code));
    }

    /// Adds the data that a peer reads to the flight.
    fn put_source(
        &self,
        tx: &mut Tx,
        start: usize,
        (stag, to, len): (u32, u64, u32),
        copy: bool,
    ) -> Result<(), MemError> {
        let span = self.remote_span(stag, to, len, Access::REMOTE_READ)?;
        if copy {
            span.extend(0, span.len(), &mut tx.scratch);
        } else {
            tx.close_scratch(start);
            tx.pieces.push_back(Piece::Source { stag, to, len });
        }
        Ok(())
    }

    /// Put payload of a work request into the flight.
    fn put_wr(
        &self,
        tx: &mut Tx,
        slot: &mut Slot,
        start: usize,
        offset: u32,
        len: u32,
        copy: bool,
    ) -> Result<(), Fault> {
        if let Some(data) = &slot.wr.inline {
            let range = offset as usize..offset as usize + len as usize;
            tx.scratch
                .extend_from_slice(data.get(range).ok_or(Fault::LocalCatastrophic)?);
            return Ok(());
        }
        let pieces = tx.pieces.len();
        for sge in sub_list(&slot.wr.sges, offset, len) {
            let outcome = self.local_span(sge, Access::empty()).map(|span| {
                if copy {
                    span.extend(0, span.len(), &mut tx.scratch);
                }
            });
            if outcome.is_err() {
                tx.pieces.truncate(pieces);
                slot.fault = Some(WcStatus::LocProtErr);
                return Err(Fault::LocalCatastrophic);
            }
        }
        if !copy {
            tx.close_scratch(start);
            tx.pieces
                .extend(sub_list(&slot.wr.sges, offset, len).map(Piece::Local));
        }
        Ok(())
    }

    fn check_sink(&self, slot: &mut Slot) -> Result<(), Fault> {
        for sge in slot.wr.sges.iter().filter(|sge| sge.len > 0) {
            if self.local_span(*sge, Access::LOCAL_WRITE).is_err() {
                slot.fault = Some(WcStatus::LocProtErr);
                return Err(Fault::LocalCatastrophic);
            }
        }
        Ok(())
    }

    /// A window was invalidated while the peer used it: look again whether it still does.
    fn wait_for_window(self: &Arc<Self>) {
        let qp = Arc::downgrade(self);
        timer::after(self.engine(), LOOK, move || {
            let qp = qp.upgrade()?;
            qp.drive(false);
            let waits = qp.peek(|core| core.tx.overdue.is_some()).unwrap_or(true);
            waits.then_some(LOOK)
        });
    }

    /// Whether an invalidated window is still in use. If not, that request is complete.
    fn waits_for_window(&self, core: &mut Core) -> bool {
        let Some(Overdue { seq, stag }) = core.tx.overdue else {
            return false;
        };
        if self.device.table.is_overdue(self.pd.id, stag) {
            return true;
        }
        core.tx.overdue = None;
        if let Some(stream) = &mut core.stream {
            stream.transmitted(seq);
        }
        false
    }
}

/// Carries out a request of this domain and queue pair that does not touch the wire.
pub(crate) fn do_local(table: &Table, pd: PdId, qp: u32, op: &SendOp) -> Local {
    let done = match *op {
        SendOp::LocalInvalidate { rkey } => match table.invalidate(pd, qp, rkey) {
            Err(MemError::InUse) => return Local::Waits(rkey),
            done => done.map_err(|_| WcStatus::LocQpOpErr),
        },
        SendOp::BindMw {
            window,
            new_rkey,
            region,
            addr,
            len,
            access,
        } => {
            let old = table.window_stag(window);
            let key = new_rkey as u8;
            let bound = table.bind(pd, window, key, qp, region, addr, len, access);
            match (bound, old) {
                (Ok(_), _) => Ok(()),
                // A window of type 1, bound again.
                (Err(MemError::InUse), Some(old)) if table.is_overdue(pd, old) => {
                    return Local::Waits(old);
                }
                (Err(_), _) => Err(WcStatus::MwBindErr),
            }
        }
        _ => Ok(()),
    };
    done.map_or_else(Local::Failed, |()| Local::Done)
}

/// Whether one of our segments changes or reads the peer's memory other than its receives, or withdraws rights.
fn touches_memory(opcode: Option<Opcode>) -> bool {
    matches!(
        opcode,
        Some(
            Opcode::Write
                | Opcode::ReadRequest
                | Opcode::AtomicRequest
                | Opcode::SendInvalidate
                | Opcode::SendSeInvalidate
        )
    )
}

/// Bytes in one flight.
fn flight_limit(copied: bool) -> usize {
    if copied {
        FLIGHT_BYTES_COPIED
    } else {
        FLIGHT_BYTES
    }
}

fn count_fpdu(counters: &mut ConnCounters, payload: u32, in_place: bool) {
    if in_place {
        counters.tx_direct += u64::from(payload);
    } else {
        counters.tx_copied += u64::from(payload);
    }
    counters.tx_fpdus += 1;
}

/// The reason that a Terminate message gives.
fn reason_in(hdr: &[u8; MAX_HEADER]) -> u32 {
    hdr.get(UNTAGGED_LEN..UNTAGGED_LEN + 2).map_or(0, |b| {
        term_code(TermError::from_parts(b[0] >> 4, b[0] & 15, b[1]))
    })
}
