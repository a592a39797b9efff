//! The transmit side: packets of one size follow each other in a train, which the kernel gets in one system call.

use std::io;
use std::mem::take;
use std::sync::Arc;

use weft_mem::{Access, MemError};
use weft_proto::rdmap::Payload;
use weft_sys::udp::TRAIN;
use weft_wire::roce::{DEFAULT_PKEY, Header, ICRC_LEN, Icrc, MAX_HEADER, Route};

use super::fault::{Fate, RoceFault};
use super::{Core, RoceInner, Slot, Way, peer_addr};
use crate::lock::add_alone;
use crate::qp::{Local, do_local};
use crate::types::{Sge, WcStatus, sub_list};

/// A train has no more bytes, IP and UDP headers included.
const TRAIN_BYTES: usize = 65_000;
/// The bits of the traffic class that belong to ECN; all of them together are the mark of congestion (RFC 3168).
pub(super) const ECN: u8 = 3;
/// Trains of one call, so that one queue pair cannot keep the others waiting.
const TRAINS: u32 = 16;

/// Packets that are made and not sent.
#[derive(Default)]
pub(super) struct Train {
    bytes: Vec<u8>,
    /// Bytes of each; the last may be shorter.
    each: usize,
    /// Where a packet starts that is longer than those before it, or `bytes.len()`.
    end: usize,
    /// Nothing may follow.
    closed: bool,
    /// The fault of its only packet, and of the packet that begins the next one.
    fault: Option<RoceFault>,
    next_fault: Option<RoceFault>,
}

impl Train {
    fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// A packet was appended that starts here.
    fn appended(&mut self, start: usize) {
        let len = self.bytes.len() - start;
        if start == 0 {
            self.each = len;
        }
        self.end = self.bytes.len();
        if len > self.each {
            (self.end, self.closed) = (start, true);
        }
        self.closed |=
            len < self.each || self.end / self.each >= TRAIN || self.end + self.each > TRAIN_BYTES;
    }

    /// As [`Train::appended`], a packet that goes by itself.
    fn appended_alone(&mut self, start: usize, fault: RoceFault) {
        self.closed = true;
        if start == 0 {
            (self.each, self.end) = (self.bytes.len(), self.bytes.len());
            self.fault = Some(fault);
        } else {
            self.end = start;
            self.next_fault = Some(fault);
        }
    }

    /// So many bytes are gone. A packet that did not belong to the train begins the next one.
    fn gone(&mut self, taken: usize) {
        self.bytes.drain(..taken);
        self.end -= taken;
        if self.end == 0 {
            (self.each, self.end) = (self.bytes.len(), self.bytes.len());
            self.fault = self.next_fault.take();
            self.closed = self.fault.is_some();
        }
    }

    /// Writes the ICRC at the end of each packet. `cut`: the kernel numbers the packets of a train, else all have the identification 0.
    fn seal(&mut self, route: &Route, cut: bool) {
        for (at, packet) in self.bytes[..self.end].chunks_mut(self.each).enumerate() {
            let Some((packet, icrc)) = packet.split_last_chunk_mut::<ICRC_LEN>() else {
                continue;
            };
            let identification = if cut { at as u16 } else { 0 };
            let mut crc = Icrc::new(route, identification, packet.len());
            crc.headers(packet);
            *icrc = crc.finish();
        }
        if self.fault == Some(RoceFault::Corrupt)
            && let Some(last) = self.bytes[..self.end].last_mut()
        {
            *last ^= 1;
        }
    }
}

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
                let Some(Slot { wr, fault }) = conn.request_mut(seq) else {
                    return Ok(());
                };
                if let Some(data) = &wr.inline {
                    let part = offset as usize..offset as usize + len as usize;
                    train.bytes.extend_from_slice(&data[part]);
                    return Ok(());
                }
                let append = |sge: Sge| {
                    let span = keys.local(pd, sge.lkey, sge.addr, sge.len, Access::empty())?;
                    span.append_to(&mut train.bytes);
                    Ok(())
                };
                let appended = sub_list(&wr.sges, offset, len).try_for_each(append);
                if appended.is_err() {
                    *fault = Some(WcStatus::LocProtErr);
                    conn.fail_request(seq);
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
        let from = way.port.local_addr();
        let to = peer_addr(way.path.peer, way.path.scope);
        let route = Route { src: from, dst: to };
        let socket = way.port.socket();
        while train.end > 0 {
            let class = match train.fault {
                Some(RoceFault::Mark) => way.path.traffic_class | ECN,
                _ => way.path.traffic_class,
            };
            let several = train.end > train.each;
            train.seal(&route, several);
            let bytes = &train.bytes[..train.end];
            let sent = if several {
                match socket.send_cut(bytes, train.each, to, None, class) {
                    Ok(true) => Ok(train.end),
                    Ok(false) => {
                        train.seal(&route, false);
                        let bytes = &train.bytes[..train.end];
                        socket.send_each(bytes, train.each, to, None, class)
                    }
                    Err(error) => Err(error),
                }
            } else {
                let sent = socket.send_marked(bytes, to, None, class);
                sent.map(|()| train.end)
            };
            match sent {
                Ok(taken) => train.gone(taken),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Flushed::Full,
                Err(error) => {
                    // Lost, as packets may be: the machine sends them again, or gives up.
                    way.port.report(&error, to, train.each);
                    train.gone(train.end);
                }
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
