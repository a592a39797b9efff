//! The receive side: a packet is a message, behind the routing header that it came with.

use std::net::IpAddr;
use std::sync::atomic::Ordering;

use weft_mem::{Keys, Table};
use weft_wire::dgram::Grh;
use weft_wire::roce::{DEFAULT_PKEY, Header};

use super::super::port::{Arrival, PortInner};
use super::{Inner, UD_GROUP};
use crate::lock::{add_alone, lock};
use crate::memory;
use crate::qp::RecvSource;
use crate::srq::Lack;
use crate::types::{QpState, UdSource, Wc, WcOpcode, WcStatus};

/// So many messages in a row from one port, and the others are the engine's again: each port that a thread polls costs it a system call in every poll.
pub(super) const IN_A_ROW: u32 = 4096;
/// The partition without the bit that tells full members.
const PARTITION: u16 = DEFAULT_PKEY & 0x7fff;

/// What its lock protects.
pub(super) struct Inbound {
    /// Completions are still wanted.
    pub(super) live: bool,
    /// Completions that go to the queue when all that is here has been taken, and whether one of them is solicited or an error.
    made: Vec<Wc>,
    urgent: bool,
    /// The port of the last message, by its address in memory.
    pub(super) last: usize,
    /// Messages from it in a row.
    row: u32,
    keys: Keys,
}

impl AsMut<Keys> for Inbound {
    fn as_mut(&mut self) -> &mut Keys {
        &mut self.keys
    }
}

impl Inbound {
    pub(super) fn new(table: &Table) -> Inbound {
        Inbound {
            live: true,
            made: Vec::new(),
            urgent: false,
            last: 0,
            row: 0,
            keys: Keys::new(table),
        }
    }
}

impl Inner {
    /// A packet with a right ICRC for this queue pair, or for a group that it is in.
    pub(super) fn received(&self, arrival: &Arrival<'_>, header: &Header, payload: &[u8]) {
        // A packet of a connection is for another queue pair, which had this number.
        let Some(deth) = header.deth else {
            return;
        };
        let mut inbound = self.inbound.lock();
        if !inbound.live || self.state() == QpState::Error || self.is_down() {
            return;
        }
        let right = u64::from(deth.qkey) == self.qkey.load(Ordering::Relaxed)
            && header.pkey & 0x7fff == PARTITION;
        if !right {
            self.counters.wrong_key.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if self.is_echo(arrival, header.dest_qp, deth.src_qp) {
            return;
        }
        let len = (Grh::LEN + payload.len()) as u32;
        let wr = match self.recv.take_fitting(len) {
            Ok(wr) => wr,
            Err(lack) => {
                let counter = match lack {
                    Lack::Empty => &self.counters.no_recv,
                    Lack::Unsuited => &self.counters.too_long,
                };
                counter.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
        let grh = Grh {
            source: arrival.route.src.ip(),
            dest: arrival.route.dst.ip(),
            traffic_class: arrival.traffic_class,
        };
        let mut front = [0; Grh::LEN];
        grh.emit(arrival.udp_len, &mut front);
        let pd = self.recv.pd(self.pd.id);
        let place = |at: u32, bytes: &[u8]| memory::scatter(&inbound.keys, pd, &wr.sges, at, bytes);
        let placed = place(0, &front).and_then(|()| place(Grh::LEN as u32, payload));
        let status = match placed {
            Ok(()) => WcStatus::Success,
            Err(_) => WcStatus::LocProtErr,
        };
        add_alone(&self.counters.received, 1);
        self.queues.note(WcOpcode::Recv, status, len);
        inbound.urgent |= header.solicited || status != WcStatus::Success;
        inbound.made.push(Wc {
            wr_id: wr.id,
            status,
            opcode: WcOpcode::Recv,
            byte_len: len,
            qp_num: self.num,
            imm: header.immediate.map(u64::from),
            source: Some(UdSource {
                addr: arrival.route.src,
                qp_num: deth.src_qp,
            }),
            wqes_retired: 1,
            ..Wc::default()
        });
        let at = std::ptr::from_ref::<PortInner>(arrival.port).addr();
        inbound.row = inbound.row.wrapping_add(1);
        if std::mem::replace(&mut inbound.last, at) != at {
            inbound.row = 0;
            drop(inbound);
            if !self.poll_port(arrival.port) {
                self.inbound.lock().last = 0;
            }
        } else if inbound.row.is_multiple_of(IN_A_ROW) {
            drop(inbound);
            self.leave_idle_ports(arrival.port);
            // A message at one of them may have come meanwhile. The next one makes its port polled again.
            self.inbound.lock().last = 0;
        }
    }

    /// All that was here has been taken.
    pub(super) fn complete_receives(&self) {
        let mut inbound = self.inbound.lock();
        let urgent = std::mem::take(&mut inbound.urgent);
        if inbound.live && !inbound.made.is_empty() {
            self.queues.recv.push(&inbound.made, urgent);
        }
        inbound.made.clear();
    }

    /// Whether a packet is the queue pair's own, received through a group, and the queue pair does not want those.
    fn is_echo(&self, arrival: &Arrival<'_>, dest_qp: u32, src_qp: u32) -> bool {
        let ours = |ip: IpAddr| {
            let ports = lock(&self.ports);
            ports.heard.iter().any(|port| port.local_addr().ip() == ip)
        };
        self.deaf_to_itself
            && dest_qp == UD_GROUP
            && src_qp == self.num
            && ours(arrival.route.src.ip())
    }

    /// Ends all waiting receives, after those that are complete.
    pub(super) fn flush_receives(&self) {
        self.complete_receives();
        let inbound = self.inbound.lock();
        let RecvSource::Own(queue) = &self.recv else {
            return;
        };
        for wr in queue.drain() {
            if !inbound.live {
                continue;
            }
            self.queues
                .receive_failed(self.num, wr.id, WcStatus::WrFlushErr);
        }
    }
}
