//! The transmit side: packets of one size follow each other in a train, which the kernel gets in one system call.

use std::io;
use std::mem::take;
use std::sync::Arc;

use weft_mem::{Access, MemError};
use weft_proto::rdmap::Payload;
use weft_sys::udp::TRAIN;
use weft_wire::roce::{ICRC_LEN, Icrc, MAX_HEADER, Route};

use super::{Core, RoceInner, Slot, Way, peer_addr};
use crate::lock::add_alone;
use crate::qp::{Local, do_local};
use crate::types::{Sge, WcStatus, sub_list};

/// A train has no more bytes, IP and UDP headers included.
const TRAIN_BYTES: usize = 60_000;
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

    /// So many bytes are gone. A packet that did not belong to the train begins the next one.
    fn gone(&mut self, taken: usize) {
        self.bytes.drain(..taken);
        self.end -= taken;
        if self.end == 0 {
            (self.each, self.end) = (self.bytes.len(), self.bytes.len());
            self.closed = false;
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
            core.train.appended(start);
            add_alone(&self.counters.sent, 1);
        }
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
        let (socket, class) = (way.port.socket(), way.path.traffic_class);
        while train.end > 0 {
            let several = train.end > train.each;
            train.seal(&route, several);
            let mut sent = if several {
                let bytes = &train.bytes[..train.end];
                let cut = socket.send_cut(bytes, train.each, to, None, class);
                cut.map(|cut| if cut { train.end } else { 0 })
            } else {
                Ok(0)
            };
            if matches!(sent, Ok(0)) {
                if several {
                    train.seal(&route, false);
                }
                let bytes = &train.bytes[..train.end];
                sent = socket.send_each(bytes, train.each, to, None, class);
            }
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
