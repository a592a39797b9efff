//! The invariant CRC at the end of a packet (annex A17.3.3): CRC-32 over the IP, UDP and transport headers and the payload, with
//! the fields that a router may change taken as ones.
//!
//! A receiver on a UDP socket does not learn the identification field of an IPv4 header, which the CRC covers. The CRC is linear, so
//! [`Icrc::is_valid`] accepts exactly the values that some identification explains: one in 65,536 of what a damaged packet has. IPv6 has
//! no such field.

use std::net::{IpAddr, SocketAddr};

use crc_fast::{CrcAlgorithm, Digest};

/// Bytes of the ICRC.
pub const ICRC_LEN: usize = 4;

const UDP_LEN: usize = 8;
/// Most bytes before the BTH: eight for a local route header, and the longer IP header.
const BEFORE: usize = 8 + IPV6_LEN + UDP_LEN;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const PROTOCOL_UDP: u8 = 17;
const DONT_FRAGMENT: [u8; 2] = [0x40, 0];
/// The byte of the BTH with FECN, BECN and reserved bits, which is taken as ones.
const BTH_MASKED: usize = 4;
/// The place of the identification in what is covered: eight bytes for a local route header, then the IPv4 header.
const IDENTIFICATION: usize = 8 + 4;
/// CRC-32's polynomial, reflected.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// The addresses and ports of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The sender.
    pub src: SocketAddr,
    /// The receiver.
    pub dst: SocketAddr,
}

/// An ICRC in the making.
pub struct Icrc {
    digest: Digest,
    /// What precedes the BTH, with room for the part of the BTH up to its masked byte.
    before: [u8; BEFORE + BTH_MASKED + 1],
    before_len: usize,
    /// Bytes after the IPv4 identification, with the ICRC; `None` for IPv6.
    behind: Option<usize>,
}

impl Icrc {
    /// Begins with everything before the BTH, of a packet of `len` bytes with its BTH and without the ICRC.
    ///
    /// The IPv4 header is one without options, with the identification given and with Don't Fragment, which is what the kernel sends from
    /// an unconnected socket that does path MTU discovery.
    pub fn new(route: &Route, identification: u16, len: usize) -> Self {
        let udp_len = ((UDP_LEN + len + ICRC_LEN) as u16).to_be_bytes();
        let mut before = [0xff; BEFORE + BTH_MASKED + 1];
        let ip = &mut before[8..];
        let (ip_len, behind) = match (route.src.ip().to_canonical(), route.dst.ip().to_canonical())
        {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let total = (IPV4_LEN + UDP_LEN + len + ICRC_LEN) as u16;
                ip[0] = 0x45;
                // 1: type of service; 8: time to live; 10, 11: checksum: they stay ones.
                ip[2..4].copy_from_slice(&total.to_be_bytes());
                ip[4..6].copy_from_slice(&identification.to_be_bytes());
                ip[6..8].copy_from_slice(&DONT_FRAGMENT);
                ip[9] = PROTOCOL_UDP;
                ip[12..16].copy_from_slice(&src.octets());
                ip[16..20].copy_from_slice(&dst.octets());
                let behind = 8 + IPV4_LEN + UDP_LEN + len + ICRC_LEN - IDENTIFICATION - 2;
                (IPV4_LEN, Some(behind))
            }
            (src, dst) => {
                let v6 = |ip: IpAddr| match ip {
                    IpAddr::V6(ip) => ip.octets(),
                    IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                };
                ip[0] = 0x6f;
                // Traffic class and flow label stay ones, 7 is the hop limit.
                ip[4..6].copy_from_slice(&udp_len);
                ip[6] = PROTOCOL_UDP;
                ip[8..24].copy_from_slice(&v6(src));
                ip[24..40].copy_from_slice(&v6(dst));
                (IPV6_LEN, None)
            }
        };
        let udp = &mut ip[ip_len..][..UDP_LEN];
        udp[..2].copy_from_slice(&route.src.port().to_be_bytes());
        udp[2..4].copy_from_slice(&route.dst.port().to_be_bytes());
        udp[4..6].copy_from_slice(&udp_len);
        Self {
            digest: Digest::new(CrcAlgorithm::Crc32IsoHdlc),
            before,
            before_len: 8 + ip_len + UDP_LEN,
            behind,
        }
    }

    /// Continues with the headers of the packet, from the BTH on, in one piece.
    pub fn headers(&mut self, headers: &[u8]) {
        // Short pieces take as long as long ones, so what is before the masked byte, and that byte, are one piece.
        let (first, rest) = headers.split_at(headers.len().min(BTH_MASKED));
        let len = self.before_len + first.len();
        self.before[self.before_len..len].copy_from_slice(first);
        let masked = usize::from(!rest.is_empty());
        self.digest.update(&self.before[..len + masked]);
        self.digest.update(&rest[masked..]);
    }

    /// Continues with payload or padding.
    pub fn update(&mut self, bytes: &[u8]) {
        self.digest.update(bytes);
    }

    /// The four bytes on the wire.
    pub fn finish(&self) -> [u8; ICRC_LEN] {
        (self.digest.finalize() as u32).to_le_bytes()
    }

    /// Whether a packet that ends with these bytes may be undamaged, whatever its identification; it takes less time where `self` was begun with that.
    pub fn is_valid(&self, received: [u8; ICRC_LEN]) -> bool {
        let difference = u32::from_le_bytes(received) ^ u32::from_le_bytes(self.finish());
        match self.behind {
            _ if difference == 0 => true,
            None => false,
            // An identification changes the CRC by its own remainder, times x^8 for each byte behind it: undo the latter. What is left is
            // a remainder of 16 bits, the lowest powers of x, which are the highest bits of a reflected CRC.
            Some(behind) => times(difference, inverse_power(behind)) << 16 == 0,
        }
    }
}

/// The product of two remainders, reflected: bit 31 is x^0.
const fn times(mut a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 1 << 31;
    while bit != 0 {
        if b & bit != 0 {
            product ^= a;
        }
        a = a >> 1 ^ if a & 1 != 0 { POLYNOMIAL } else { 0 };
        bit >>= 1;
    }
    product
}

/// x^(-8 n); packets are shorter than 2^16 bytes.
fn inverse_power(n: usize) -> u32 {
    times(POWERS.0[n & 0xff], POWERS.1[n >> 8 & 0xff])
}

/// x^(-8 n) and x^(-8 * 256 n), for n from 0 to 255.
static POWERS: ([u32; 256], [u32; 256]) = {
    let low = powers(INVERSE_BYTE);
    let high = powers(times(low[255], INVERSE_BYTE));
    (low, high)
};

const fn powers(of: u32) -> [u32; 256] {
    let mut all = [1 << 31; 256];
    let mut n = 1;
    while n < 256 {
        all[n] = times(all[n - 1], of);
        n += 1;
    }
    all
}

/// x^(-8): x^(-1) eight times, and x^(-1) is what the polynomial leaves when its lowest term is taken away and x divided out.
const INVERSE_BYTE: u32 = {
    let mut power = 1u32 << 31;
    let mut i = 0;
    while i < 8 {
        // Division by x: a remainder with a term x^0 has the polynomial added, so that it divides.
        power = if power & 1 << 31 != 0 {
            (power ^ POLYNOMIAL) << 1 | 1
        } else {
            power << 1
        };
        i += 1;
    }
    power
};

#[cfg(test)]
mod tests {
    use super::{INVERSE_BYTE, Icrc, Route, inverse_power, times};

    /// x^8 is bit 31 - 8.
    #[test]
    fn the_inverse_of_a_byte_is_one() {
        assert_eq!(times(INVERSE_BYTE, 1 << 23), 1 << 31);
        assert_eq!(times(inverse_power(3), 1 << 7), 1 << 31);
        for n in [0, 1, 255, 256, 257, 4140, 65_534] {
            let next = inverse_power(n + 1);
            assert_eq!(next, times(inverse_power(n), INVERSE_BYTE), "{n}");
        }
    }

    fn route(src: &str, dst: &str) -> Route {
        Route {
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
        }
    }

    fn icrc(route: &Route, identification: u16, packet: &[u8]) -> Icrc {
        let mut icrc = Icrc::new(route, identification, packet.len());
        icrc.headers(&packet[..12]);
        icrc.update(&packet[12..]);
        icrc
    }

    #[test]
    fn any_identification_is_accepted_and_damage_is_not() {
        let route = route("192.0.2.1:49152", "192.0.2.2:4791");
        for len in [12, 16, 300, 1036, 4108] {
            let packet: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            let ours = icrc(&route, 0, &packet);
            for identification in [0, 1, 0x1234, 0xffff] {
                let theirs = icrc(&route, identification, &packet).finish();
                assert!(ours.is_valid(theirs));
                assert!(icrc(&route, 0x8001, &packet).is_valid(theirs));
            }
            let mut refused = 0;
            for bit in 0..len * 8 {
                // The masked byte does not count.
                if bit / 8 == 4 {
                    continue;
                }
                let mut bad = packet.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                let theirs = icrc(&route, 0x4321, &bad).finish();
                refused += usize::from(!ours.is_valid(theirs));
            }
            assert_eq!(refused, len * 8 - 8, "of single bits in {len} bytes");
        }
    }

    #[test]
    fn over_ipv6_all_bits_count() {
        let route = route("[2001:db8::1]:49152", "[2001:db8::2]:4791");
        let packet = [7; 64];
        let ours = icrc(&route, 0, &packet);
        assert!(ours.is_valid(ours.finish()));
        let value = u32::from_le_bytes(ours.finish());
        for bit in 0..32 {
            assert!(!ours.is_valid((value ^ 1 << bit).to_le_bytes()));
        }
    }

    #[test]
    fn marks_of_congestion_do_not_count() {
        let route = route("192.0.2.1:49152", "192.0.2.2:4791");
        let mut packet = [7; 64];
        let before = icrc(&route, 0, &packet).finish();
        packet[4] ^= 0xc0;
        assert_eq!(icrc(&route, 0, &packet).finish(), before);
    }
}
