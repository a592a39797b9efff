//! The transmit side: packets of one size follow each other in a train, which the kernel gets in one system call.

use std::mem::take;
use std::sync::Arc;

use weft_mem::{Access, MemError};
use weft_proto::rdmap::Payload;
use weft_wire::roce::{DEFAULT_PKEY, Header, ICRC_LEN, MAX_HEADER};

use super::fault::Fate;
use super::train::Course;
use super::{Core, RoceInner, Slot, Way, peer_addr};
use crate::lock::add_alone;
use crate::qp::{Local, do_local};
use crate::types::{InlineData, Sge, WcStatus, sub_list};

/// Trains of one call, so that one queue pair cannot keep the others waiting.
const TRAINS: u32 = 16;

/// The result of [`RoceInner::flush`].
enum Flushed {
    All,
    /// The socket has no room.
    Full,
}

impl RoceInner {
    /// Sends what may be sent now.
    pub(super) fn transmit(self: &Arc<Self>, core: &mut Core) {
        let Some(way) = core.way.clone() else {
            return;
        };
        for _ in 0..TRAINS {
            let more = self.fill(core, &way);
            if core.train.is_empty() {
                if core.conn.is_interrupted() {
                    self.wait(core, false);
                }
                return;
            }
            if matches!(self.flush(core, &way), Flushed::Full) {
                self.wait(core, true);
                return;
            }
            if !more && core.train.is_empty() {
                if core.conn.is_interrupted() {
                    self.wait(core, false);
                }
                return;
            }
        }
        self.wait(core, false);
    }

    /// Makes packets for a train. Says whether there may be more.
    fn fill(&self, core: &mut Core, way: &Way) -> bool {
        let now = way.port.now();
        while !core.train.closed {
            let start = core.train.bytes.len();
            if core.train.bytes.capacity() == 0 {
                core.train.bytes = self.device().pool().get_tx();
            }
            core.train
                .bytes
                .reserve(MAX_HEADER + way.path.mtu as usize + ICRC_LEN);
            if self.put_other(core, way) {
                continue;
            }
            let Some(tx) = core.conn.next_tx(now, &mut core.train.bytes) else {
                if core.train.is_empty() {
                    let spare = take(&mut core.train.bytes);
                    self.device().pool().put_tx(spare);
                }
                return false;
            };
            if self.put(core, tx.payload).is_err() {
                core.train.bytes.truncate(start);
                continue;
            }
            if matches!(tx.payload, Payload::Local { .. }) {
                continue;
            }
            let trailer = usize::from(tx.pad) + ICRC_LEN;
            let len = core.train.bytes.len() + trailer;
            core.train.bytes.resize(len, 0);
            add_alone(&self.counters.sent, 1);
            let Core { train, faulty, .. } = core;
            let fate = match faulty {
                None => Fate::Goes,
                Some(faulty) => faulty.judge(&train.bytes[start..]),
            };
            match fate {
                Fate::Goes => train.appended(start),
                Fate::Gone => train.bytes.truncate(start),
                Fate::Alone(fault) => train.appended_alone(start, fault),
            }
        }
        true
    }

    /// Appends a packet that the machine has not made: a notification of congestion, or one that was held back.
    fn put_other(&self, core: &mut Core, way: &Way) -> bool {
        let Core {
            train,
            faulty,
            notices,
            ..
        } = core;
        let start = train.bytes.len();
        if take(&mut notices.owed) {
            Header::emit_congestion(way.path.dest_qp, DEFAULT_PKEY, &mut train.bytes);
            train.bytes.extend_from_slice(&[0; ICRC_LEN]);
        } else if let Some(packet) = faulty.as_mut().and_then(|faulty| faulty.take_next()) {
            train.bytes.extend_from_slice(&packet);
        } else {
            return false;
        }
        add_alone(&self.counters.sent, 1);
        train.appended(start);
        true
    }

    /// Appends payload, or carries out local work. After an error the packet is dropped; the machine knows.
    fn put(&self, core: &mut Core, payload: Payload) -> Result<(), MemError> {
        let Core {
            conn, train, keys, ..
        } = core;
        let table = &self.device().table;
        let pd = self.pd.id;
        match payload {
            Payload::None => Ok(()),
            Payload::Local { seq } => {
                let done = conn
                    .request_mut(seq)
                    .map(|slot| (do_local(table, pd, self.num, &slot.wr.op), slot));
                match done {
                    Some((Local::Failed(status), slot)) => {
                        slot.fault = Some(status);
                        conn.fail_request(seq);
                    }
                    // A peer of this host may be in a window that another queue pair has given it: it is cut off by and by. Nobody uses it from now on.
                    _ => conn.local_done(seq),
                }
                Ok(())
            }
            Payload::Wr { seq, offset, len } => {
                let Some(Slot { wr, fault, keeps }) = conn.request_mut(seq) else {
                    return Ok(());
                };
                if let Some(data) = &wr.inline {
                    let part = offset as usize..offset as usize + len as usize;
                    train.bytes.extend_from_slice(&data[part]);
                    return Ok(());
                }
                let start = train.bytes.len();
                let append = |sge: Sge| {
                    let span = keys.local(pd, sge.lkey, sge.addr, sge.len, Access::empty())?;
                    span.append_to(&mut train.bytes);
                    Ok(())
                };
                let appended = sub_list(&wr.sges, offset, len).try_for_each(append);
                if appended.is_err() {
                    *fault = Some(WcStatus::LocProtErr);
                    conn.fail_request(seq);
                } else if *keeps && offset == 0 && wr.len() == Some(len) {
                    wr.inline = Some(InlineData::from_slice(&train.bytes[start..]));
                }
                appended
            }
            Payload::Source { stag, to, len } => {
                let span = self.remote_span(stag, to, len, Access::REMOTE_READ);
                match span {
                    Ok(span) => {
                        span.extend(0, span.len(), &mut train.bytes);
                        Ok(())
                    }
                    Err(error) => {
                        conn.source_gone();
                        Err(error)
                    }
                }
            }
        }
    }

    /// Gives the train to the kernel.
    fn flush(&self, core: &mut Core, way: &Way) -> Flushed {
        let Core { train, .. } = core;
        let course = Course {
            to: peer_addr(way.path.peer, way.path.scope),
            from: None,
            traffic_class: way.path.traffic_class,
        };
        while train.has_whole() {
            if train.push(&way.port, &course).is_err() {
                return Flushed::Full;
            }
            if train.bytes.is_empty() {
                let spare = take(&mut train.bytes);
                self.device().pool().put_tx(spare);
            }
            if !train.closed {
                // What did not belong to this train begins the next.
                break;
            }
        }
        Flushed::All
    }
}
