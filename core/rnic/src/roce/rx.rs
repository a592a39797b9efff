//! The receive side: a packet is checked by the machine, then placed.

use std::sync::atomic::Ordering;

use weft_mem::{Access, MemError, Span};
use weft_proto::roce::{Atomic, Received, Rx, State};
use weft_wire::roce::{Header, NakCode, Service};

use super::port::Arrival;
use super::train::ECN;
use super::{Core, RoceInner};
use crate::lock::add_alone;
use crate::memory;
use crate::types::{Wc, WcOpcode, WcStatus, sg_len};

/// Why a request of the peer is refused, and what becomes of our receive.
struct Refused {
    code: NakCode,
    receive: WcStatus,
}

impl From<MemError> for Refused {
    /// Memory that the peer has named.
    fn from(error: MemError) -> Refused {
        let code = match error {
            MemError::Misaligned | MemError::CannotInvalidate => NakCode::InvalidRequest,
            _ => NakCode::RemoteAccess,
        };
        let receive = WcStatus::WrFlushErr;
        Refused { code, receive }
    }
}

impl RoceInner {
    /// A packet with a right ICRC for this queue pair. The transmit side runs later.
    pub(super) fn received(&self, arrival: &Arrival<'_>, header: &Header, payload: &[u8]) {
        let mut core = self.core.lock();
        if core.faulty.as_ref().is_some_and(|faulty| faulty.is_down()) {
            return;
        }
        let Some(way) = &core.way else {
            return;
        };
        if arrival.route.src.ip() != way.path.peer {
            self.counters.stray.fetch_add(1, Ordering::Relaxed);
            return;
        }
        add_alone(&self.counters.received, 1);
        let was_open = core.conn.state() == State::Open;
        let rx = core.conn.rx(arrival.now, header, payload.len() as u32);
        if let Some(code) = core.conn.refused_with().filter(|_| was_open) {
            let (num, len, open) = (self.num, payload.len(), core.conn.in_progress());
            tracing::warn!(num, ?code, ?header, len, ?open, from = %arrival.route.src, "a packet of the peer is no valid request");
        }
        // Who forges the peer's address does not know the number that is next, unless the connection is unreliable: it takes any.
        if !matches!(rx, Rx::Nothing) {
            if arrival.traffic_class & ECN == ECN {
                core.notices.marked(arrival.now);
            }
            if core.unheard != 0 && self.service == Service::Rc {
                core.heard = std::mem::take(&mut core.unheard);
            }
        }
        if let Err(Refused { code, receive }) = self.carry_out(&mut core, rx, payload) {
            core.conn.refuse(code);
            // An unreliable connection drops the message and goes on.
            if core.conn.state() != State::Open {
                core.spoiled = receive;
            }
        }
    }

    fn carry_out(&self, core: &mut Core, rx: Rx, payload: &[u8]) -> Result<(), Refused> {
        match rx {
            Rx::Nothing => {}
            Rx::PlaceWrite {
                rkey,
                va,
                len,
                takes_receive,
            } => {
                if takes_receive && !self.has_receive(core) {
                    core.conn.not_ready();
                    return Ok(());
                }
                if len > 0 {
                    self.may(Access::REMOTE_WRITE)?;
                    let table = &self.device().table;
                    let whose = (self.pd.id, self.num);
                    memory::write_remote(table, &core.keys, whose, (rkey, va, len), 0, payload)?;
                }
                self.placed(core)?;
            }
            Rx::PlaceRecv { first, offset, len } => {
                if first && !self.has_receive(core) {
                    core.conn.not_ready();
                    return Ok(());
                }
                let Some(wr) = &core.recv else {
                    return Ok(());
                };
                let room = sg_len(&wr.sges).unwrap_or(0);
                if offset.checked_add(len).is_none_or(|end| end > room) {
                    return Err(Refused {
                        code: NakCode::InvalidRequest,
                        receive: WcStatus::LocLenErr,
                    });
                }
                let pd = self.recv.pd(self.pd.id);
                memory::scatter(&core.keys, pd, &wr.sges, offset, payload).map_err(|_| {
                    Refused {
                        code: NakCode::RemoteOperation,
                        receive: WcStatus::LocProtErr,
                    }
                })?;
                self.placed(core)?;
            }
            Rx::PlaceRead { seq, offset, .. } => {
                self.place_answer(core, seq, offset, payload)?;
                core.conn.rx_placed();
            }
            Rx::AtomicResult { seq, original } => {
                self.place_answer(core, seq, 0, &original.to_ne_bytes())?;
                core.conn.rx_placed();
            }
            Rx::ReadRequested { rkey, va, len } => {
                if len > 0 {
                    // The memory is looked up again when the answer is sent.
                    self.remote_span(rkey, va, len, Access::REMOTE_READ)?;
                }
                core.conn.accept_read();
            }
            Rx::AtomicRequested { rkey, va, op } => {
                let span = self.remote_span(rkey, va, 8, Access::REMOTE_ATOMIC)?;
                let original = match op {
                    Atomic::FetchAdd { add } => span.fetch_add(add)?,
                    Atomic::CompareSwap { compare, swap } => span.compare_swap(compare, swap)?,
                };
                core.conn.atomic_done(original);
            }
        }
        Ok(())
    }

    /// Part of the answer to this request of ours.
    fn place_answer(
        &self,
        core: &mut Core,
        seq: u64,
        offset: u32,
        bytes: &[u8],
    ) -> Result<(), Refused> {
        let Core { conn, keys, .. } = core;
        let Some(slot) = conn.request_mut(seq) else {
            return Ok(());
        };
        memory::scatter(keys, self.pd.id, &slot.wr.sges, offset, bytes).map_err(|_| {
            slot.fault = Some(WcStatus::LocProtErr);
            Refused {
                code: NakCode::RemoteOperation,
                receive: WcStatus::WrFlushErr,
            }
        })
    }

    /// The payload of a message's packet is in place. The receive is complete with the last one.
    fn placed(&self, core: &mut Core) -> Result<(), Refused> {
        let Some(received) = core.conn.rx_placed() else {
            return Ok(());
        };
        let Received {
            len,
            solicited,
            invalidate,
            immediate,
            write,
        } = received;
        if let Some(key) = invalidate {
            let table = &self.device().table;
            match table.invalidate(self.pd.id, self.num, key) {
                // A peer of this host is in it still, and is cut off by and by.
                Ok(()) | Err(MemError::InUse) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let Some(wr) = core.recv.take() else {
            return Ok(());
        };
        let opcode = if write {
            WcOpcode::RecvWithImm
        } else {
            WcOpcode::Recv
        };
        self.queues.note(WcOpcode::Recv, WcStatus::Success, len);
        let wc = Wc {
            wr_id: wr.id,
            status: WcStatus::Success,
            opcode,
            byte_len: len,
            qp_num: self.num,
            imm: immediate.map(u64::from),
            invalidated: invalidate,
            wqes_retired: 1,
            ..Wc::default()
        };
        if self.queues.recv.push(&[wc], solicited) {
            return Ok(());
        }
        // The program never learns of the message, so the peer is not told that it has arrived.
        core.overrun = true;
        Err(Refused {
            code: NakCode::RemoteOperation,
            receive: WcStatus::WrFlushErr,
        })
    }

    /// Takes a receive, unless the message has one.
    fn has_receive(&self, core: &mut Core) -> bool {
        if core.recv.is_none() {
            core.recv = self.recv.take();
        }
        core.recv.is_some()
    }

    fn may(&self, need: Access) -> Result<(), MemError> {
        let access = Access::from_bits_truncate(self.access.load(Ordering::Relaxed));
        if access.contains(need) {
            Ok(())
        } else {
            Err(MemError::Access)
        }
    }

    /// Memory that the peer names.
    pub(super) fn remote_span(
        &self,
        key: u32,
        to: u64,
        len: u32,
        need: Access,
    ) -> Result<Span, MemError> {
        self.may(need)?;
        let table = &self.device().table;
        table.remote(self.pd.id, self.num, key, to, len, need)
    }
}
