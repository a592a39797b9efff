//! Steering: the kernel is told which socket of an address has which slot, so that packets come to the right process at once.
//!
//! The kernel numbers the sockets, and does not tell the numbers; they change when a process ends. So a process that has to pass packets on sends probes to
//! its own address: a probe names the number of the socket that it is to reach, and whoever gets it tells the sender. What is learned is an
//! advice: a packet that comes to the wrong process is passed on.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use weft_proto::dgram::Now;
use weft_sys::udp::{Choice, UdpSocket};

use super::{PortName, Siblings};

/// The first byte of a probe: no opcode of RoCE has it.
const DIRECT: u8 = 0xff;
/// Where a packet has the slot: the first byte of the destination's number.
const SLOT_BYTE: u32 = 5;
const PROBE_LEN: usize = 16;
/// The time between rounds of probes while packets go wrong; it doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What a port knows of the sockets that share its address.
#[derive(Default)]
pub(in crate::roce) struct Steering {
    epoch: u32,
    secret: u64,
    /// The number of each slot's socket: what the kernel was told, and what the probes under way have found.
    told: BTreeMap<u8, u8>,
    found: BTreeMap<u8, u8>,
    next: Now,
    pause: Duration,
    /// The kernel takes no rule.
    is_off: bool,
}

/// A probe that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::roce) struct Probe {
    slot: u8,
    index: u8,
    epoch: u32,
    secret: u64,
}

impl Probe {
    pub(in crate::roce) fn parse(packet: &[u8]) -> Option<Probe> {
        let packet: &[u8; PROBE_LEN] = packet.try_into().ok()?;
        let [direct, index, slot, _, a, b, c, d, secret @ ..] = *packet;
        (direct == DIRECT).then_some(Probe {
            slot,
            index,
            epoch: u32::from_be_bytes([a, b, c, d]),
            secret: u64::from_be_bytes(secret),
        })
    }

    fn emit(&self) -> [u8; PROBE_LEN] {
        let mut out = [0; PROBE_LEN];
        out[..3].copy_from_slice(&[DIRECT, self.index, self.slot]);
        out[4..8].copy_from_slice(&self.epoch.to_be_bytes());
        out[8..].copy_from_slice(&self.secret.to_be_bytes());
        out
    }
}

impl Steering {
    pub(in crate::roce) fn new(secret: u64) -> Steering {
        Steering {
            secret,
            pause: FIRST_PAUSE,
            ..Steering::default()
        }
    }

    /// The kernel is told nothing any more.
    pub(in crate::roce) fn stop(&mut self) {
        self.is_off = true;
    }

    /// Packets for another process have come here. Returns when this is to be told again.
    pub(in crate::roce) fn misdirected(
        &mut self,
        now: Now,
        siblings: &Siblings,
        socket: &UdpSocket,
        addr: SocketAddr,
    ) -> Now {
        if self.is_off || now < self.next {
            return self.next;
        }
        let calm = now.saturating_sub(self.next) > LONGEST_PAUSE;
        self.pause = if calm {
            FIRST_PAUSE
        } else {
            (self.pause * 2).min(LONGEST_PAUSE)
        };
        self.next = now + self.pause;
        self.epoch = self.epoch.wrapping_add(1);
        self.found.clear();
        self.tell(socket);
        // A number that no socket has reaches any of them, which answers for a smaller number as well.
        let most = u8::try_from(siblings.count()).unwrap_or(u8::MAX);
        for index in 0..=most {
            let probe = Probe {
                slot: siblings.slot(),
                index,
                epoch: self.epoch,
                secret: self.secret,
            };
            if self.is_off || socket.send(&probe.emit(), addr, None).is_err() {
                break;
            }
        }
        if self.is_off { Now::MAX } else { self.next }
    }

    /// A probe has come here.
    pub(in crate::roce) fn arrived(
        &mut self,
        probe: Probe,
        siblings: &Siblings,
        port: PortName,
        socket: &UdpSocket,
    ) {
        if probe.slot != siblings.slot() {
            siblings.tell_probed(probe.slot, port, probe.epoch, probe.index);
        } else if probe.secret == self.secret {
            self.learned(probe.slot, probe.epoch, probe.index, socket);
        }
    }

    /// The socket of this slot has this number.
    pub(in crate::roce) fn learned(&mut self, slot: u8, epoch: u32, index: u8, socket: &UdpSocket) {
        if self.is_off || epoch != self.epoch {
            return;
        }
        let best = self.found.entry(slot).or_insert(index);
        *best = index.min(*best);
        let best = *best;
        // Nobody else has this number any more.
        self.told
            .retain(|other, told| *other != slot && *told != best);
        self.told.insert(slot, best);
        self.tell(socket);
    }

    fn tell(&mut self, socket: &UdpSocket) {
        let members = self.told.iter();
        let members: Vec<_> = members
            .map(|(slot, index)| (*slot, u32::from(*index)))
            .collect();
        let choice = Choice {
            direct: DIRECT,
            byte: SLOT_BYTE,
            members: &members,
        };
        if let Err(error) = socket.choose_by(&choice) {
            tracing::debug!(%error, "the kernel does not choose among processes with RoCE: packets are passed on");
            self.is_off = true;
        }
    }
}
