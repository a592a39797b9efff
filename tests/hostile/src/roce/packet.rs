//! Packets: the base transport header (9.2), what follows it, and the invariant CRC (A17.3.3).

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover};

use super::PORT;

pub const SEND_FIRST: u8 = 0x00;
pub const SEND_MIDDLE: u8 = 0x01;
pub const SEND_LAST: u8 = 0x02;
pub const SEND_ONLY: u8 = 0x04;
pub const SEND_ONLY_IMM: u8 = 0x05;
pub const WRITE_FIRST: u8 = 0x06;
pub const WRITE_MIDDLE: u8 = 0x07;
pub const WRITE_LAST: u8 = 0x08;
pub const WRITE_ONLY: u8 = 0x0a;
pub const READ_REQUEST: u8 = 0x0c;
pub const READ_RESPONSE_ONLY: u8 = 0x10;
pub const ACK: u8 = 0x11;
pub const ATOMIC_ACK: u8 = 0x12;
pub const COMPARE_SWAP: u8 = 0x13;
pub const FETCH_ADD: u8 = 0x14;
pub const SEND_ONLY_INVALIDATE: u8 = 0x17;
pub const UD_SEND_ONLY: u8 = 0x64;
pub const CONGESTION: u8 = 0x81;

/// Numbers of packets and queue pairs have 24 bits.
pub const BITS: u32 = 0xff_ffff;

/// A packet without its CRC.
#[derive(Clone, Debug)]
pub struct Packet {
    pub opcode: u8,
    pub flags: u8,
    pub pkey: u16,
    pub qp: u32,
    pub psn: u32,
    /// It asks for an acknowledgement.
    pub ask: bool,
    /// Extension headers and payload, padding included.
    pub rest: Vec<u8>,
}

impl Packet {
    pub fn new(opcode: u8, qp: u32, psn: u32) -> Packet {
        Packet {
            opcode,
            flags: 0x40,
            pkey: 0xffff,
            qp,
            psn: psn & BITS,
            ask: true,
            rest: Vec::new(),
        }
    }

    /// With these bytes behind what there is, and padding.
    #[must_use]
    pub fn payload(mut self, bytes: &[u8]) -> Packet {
        self.rest.extend(bytes);
        let pad = bytes.len().wrapping_neg() & 3;
        self.rest.extend(&[0; 3][..pad]);
        self.flags = self.flags & !0x30 | (pad as u8) << 4;
        self
    }

    /// An RDMA extended header.
    #[must_use]
    pub fn reth(mut self, addr: u64, rkey: u32, len: u32) -> Packet {
        self.rest.extend(addr.to_be_bytes());
        self.rest.extend(rkey.to_be_bytes());
        self.rest.extend(len.to_be_bytes());
        self
    }

    /// An atomic's extended header.
    #[must_use]
    pub fn atomic(mut self, addr: u64, rkey: u32, swap_add: u64, compare: u64) -> Packet {
        self.rest.extend(addr.to_be_bytes());
        self.rest.extend(rkey.to_be_bytes());
        self.rest.extend(swap_add.to_be_bytes());
        self.rest.extend(compare.to_be_bytes());
        self
    }

    /// An acknowledgement's extended header.
    #[must_use]
    pub fn aeth(mut self, syndrome: u8, msn: u32) -> Packet {
        let word = u32::from(syndrome) << 24 | msn & BITS;
        self.rest.extend(word.to_be_bytes());
        self
    }

    pub fn emit(&self) -> Vec<u8> {
        let mut out = vec![self.opcode, self.flags];
        out.extend(self.pkey.to_be_bytes());
        out.extend((self.qp & BITS).to_be_bytes());
        out.extend((u32::from(self.ask) << 31 | self.psn & BITS).to_be_bytes());
        out.extend(&self.rest);
        out
    }

    /// What a datagram has, the CRC taken off and not looked at.
    pub fn parse(datagram: &[u8]) -> Option<Packet> {
        let packet = datagram.get(..datagram.len().checked_sub(4)?)?;
        let word = |at: usize| Some(u32::from_be_bytes(packet.get(at..at + 4)?.try_into().ok()?));
        let (qp, psn) = (word(4)?, word(8)?);
        let pad = usize::from(packet[1] >> 4 & 3);
        let rest = packet.get(12..packet.len().checked_sub(pad)?)?;
        Some(Packet {
            opcode: packet[0],
            flags: packet[1],
            pkey: u16::from_be_bytes([packet[2], packet[3]]),
            qp: qp & BITS,
            psn: psn & BITS,
            ask: psn >> 31 != 0,
            rest: rest.to_vec(),
        })
    }
}

/// CRC-32, bit by bit.
fn crc32(mut crc: u32, bytes: &[u8]) -> u32 {
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ ((crc & 1) * 0xedb8_8320);
        }
    }
    crc
}

/// The invariant CRC of a packet in an IPv4 datagram of identification 0 that must not be fragmented.
pub fn icrc(from: SocketAddrV4, to: SocketAddrV4, packet: &[u8]) -> [u8; 4] {
    let udp_len = 8 + packet.len() as u16 + 4;
    // In place of InfiniBand's local route header; what routers change is ones.
    let mut covered = vec![0xff; 8];
    covered.extend([0x45, 0xff]);
    covered.extend((20 + udp_len).to_be_bytes());
    covered.extend([0, 0, 0x40, 0, 0xff, 17, 0xff, 0xff]);
    covered.extend(from.ip().octets());
    covered.extend(to.ip().octets());
    covered.extend(from.port().to_be_bytes());
    covered.extend(to.port().to_be_bytes());
    covered.extend(udp_len.to_be_bytes());
    covered.extend([0xff, 0xff]);
    let at = covered.len();
    covered.extend(packet);
    if let Some(masked) = covered.get_mut(at + 4) {
        *masked = 0xff;
    }
    (!crc32(!0, &covered)).to_le_bytes()
}

/// A socket of this host, or of one whose address it has forged.
#[derive(Debug)]
pub struct Wire {
    socket: UdpSocket,
    from: SocketAddrV4,
    to: SocketAddrV4,
    /// Bytes to the victim and from it.
    pub sent: u64,
    pub received: u64,
}

impl Wire {
    /// With port 0, a host that has the address of another one.
    pub fn new(ip: Ipv4Addr, port: u16, to: Ipv4Addr) -> io::Result<Wire> {
        let socket = UdpSocket::bind((ip, port))?;
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO)?;
        let SocketAddr::V4(from) = socket.local_addr()? else {
            unreachable!("it was bound to an address of IPv4");
        };
        Ok(Wire {
            socket,
            from,
            to: SocketAddrV4::new(to, PORT),
            sent: 0,
            received: 0,
        })
    }

    pub fn ip(&self) -> Ipv4Addr {
        *self.from.ip()
    }

    pub fn send(&mut self, packet: &Packet) -> io::Result<()> {
        self.send_bytes(packet.emit())
    }

    /// With a right CRC, whatever the bytes are.
    pub fn send_bytes(&mut self, mut bytes: Vec<u8>) -> io::Result<()> {
        let crc = icrc(self.from, self.to, &bytes);
        bytes.extend(crc);
        self.send_raw(&bytes)
    }

    /// As it is.
    pub fn send_raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sent += self.socket.send_to(bytes, self.to)? as u64;
        Ok(())
    }

    /// The next datagram within this time.
    pub fn recv(&mut self, limit: Duration) -> io::Result<Option<Vec<u8>>> {
        let until = Instant::now() + limit;
        let mut bytes = vec![0; 65536];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = left.max(Duration::from_millis(1));
            self.socket.set_read_timeout(Some(left))?;
            match self.socket.recv_from(&mut bytes) {
                Ok((len, _)) => {
                    self.received += len as u64;
                    bytes.truncate(len);
                    return Ok(Some(bytes));
                }
                Err(_) if Instant::now() >= until => return Ok(None),
                Err(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value that every list of CRCs has.
    #[test]
    fn the_crc_is_crc_32() {
        assert_eq!(!crc32(!0, b"123456789"), 0xcbf4_3926);
    }
}
