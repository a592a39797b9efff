//! The messages of the shared-memory handshake of two processes of one host: docs/spec/local.md. Each is one packet on a Unix socket,
//! together with descriptors; numbers are little-endian.
//!
//! ```
//! use weft_wire::local::{Message, MAX_LEN};
//!
//! let mut buf = Vec::new();
//! let message = Message::Decline("not today".into());
//! message.emit(&mut buf);
//! assert!(buf.len() <= MAX_LEN);
//! assert_eq!(Message::parse(&buf), Some(message));
//! ```

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The longest message, in bytes.
pub const MAX_LEN: usize = 256;
/// The longest reason of a [`Message::Decline`], in bytes; longer ones are cut.
pub const MAX_REASON: usize = MAX_LEN - HEADER;
/// The version that this module speaks. Another one is declined, and the connection stays on TCP.
pub const VERSION: u16 = 2;

const MAGIC: &[u8; 4] = b"weft";
const HEADER: usize = 8;
const PARTY: usize = 24;
const CELL: usize = 24;
const ADDR: usize = 18;
const HELLO: usize = CELL + 4 + ADDR;
const WELCOME: usize = CELL + SECRET;
const JOIN: usize = PARTY + SECRET;
const OFFER: usize = 8 + 8 + 2 * ADDR;
const SECRET: usize = 16;

/// Random bytes.
pub type Secret = [u8; SECRET];

/// Bytes of a side's memory for the other one to read. The first sixteen are the other side's challenge, the following sixteen a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChallengeCell {
    /// Their address in the address space of the sender.
    pub addr: u64,
    /// The expected contents of the other side's cell: a process that finds it there reads the right process.
    pub challenge: Secret,
}

/// One side's description of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SideInfo {
    /// The queue pair's number: windows in the other side's table name it.
    pub qp: u32,
    /// The descriptors include the arena of regions without remote rights.
    pub trusted: bool,
    /// The name of its protection domain among those of the host.
    pub domain: [u8; 16],
}

/// A message of the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Initiator: this is the connection that I have just made.
    Hello {
        /// Its cell.
        cell: ChallengeCell,
        /// The CRC-32C of its secret: a process that has read something else has not read its memory, and does not send it.
        seal: u32,
        /// Its own TCP address and port, by which the responder finds the connection.
        from: SocketAddr,
    },
    /// Responder: I have that connection; bring what you have, and say on it what you would say on TCP.
    Welcome {
        /// Its cell.
        cell: ChallengeCell,
        /// The initiator's secret, if it could be read.
        proof: Secret,
    },
    /// Initiator: what I bring.
    Join {
        /// Itself.
        party: SideInfo,
        /// The responder's secret, if it could be read.
        proof: Secret,
    },
    /// Responder, right before its MPA reply: the connection is on shared memory from here.
    Attach(SideInfo),
    /// The connection stays on TCP.
    Decline(String),
    /// Of a UDP port that sends to another one: let us share a segment for that.
    Offer {
        /// The sender's socket, as the kernel numbers sockets.
        own: u64,
        /// The receiver's.
        peer: u64,
        /// The address that the receiver sees as the source.
        from: SocketAddr,
        /// The receiver's address.
        to: SocketAddr,
    },
    /// The answer of the other port: here is the segment.
    Accept,
}

fn emit_addr(addr: SocketAddr, out: &mut Vec<u8>) {
    let ip = match addr.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    out.extend_from_slice(&ip.octets());
    out.extend_from_slice(&addr.port().to_le_bytes());
}

fn parse_addr(bytes: &[u8; ADDR]) -> Option<SocketAddr> {
    let (ip, port) = bytes.split_first_chunk()?;
    let ip = Ipv6Addr::from(*ip as [u8; 16]).to_canonical();
    let port = u16::from_le_bytes(*port.first_chunk()?);
    Some(SocketAddr::new(ip, port))
}

impl ChallengeCell {
    fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.addr.to_le_bytes());
        out.extend_from_slice(&self.challenge);
    }

    fn parse(bytes: &[u8; CELL]) -> Option<Self> {
        let (addr, challenge) = bytes.split_first_chunk()?;
        Some(ChallengeCell {
            addr: u64::from_le_bytes(*addr),
            challenge: *challenge.first_chunk()?,
        })
    }
}

impl SideInfo {
    fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.qp.to_le_bytes());
        out.extend_from_slice(&u32::from(self.trusted).to_le_bytes());
        out.extend_from_slice(&self.domain);
    }

    fn parse(bytes: &[u8; PARTY]) -> Option<Self> {
        let (qp, rest) = bytes.split_first_chunk()?;
        let (flags, domain) = rest.split_first_chunk()?;
        Some(SideInfo {
            qp: u32::from_le_bytes(*qp),
            // Unknown flags are for later versions to give a meaning that earlier ones may overlook.
            trusted: u32::from_le_bytes(*flags) & 1 == 1,
            domain: *domain.first_chunk()?,
        })
    }
}

impl Message {
    const fn kind(&self) -> u16 {
        match self {
            Message::Hello { .. } => 1,
            Message::Welcome { .. } => 2,
            Message::Attach(_) => 3,
            Message::Decline(_) => 4,
            Message::Join { .. } => 5,
            Message::Offer { .. } => 6,
            Message::Accept => 7,
        }
    }

    /// Append the message to `out`.
    pub fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&self.kind().to_le_bytes());
        match self {
            Message::Hello { cell, seal, from } => {
                cell.emit(out);
                out.extend_from_slice(&seal.to_le_bytes());
                emit_addr(*from, out);
            }
            Message::Welcome { cell, proof } => {
                cell.emit(out);
                out.extend_from_slice(proof);
            }
            Message::Join { party, proof } => {
                party.emit(out);
                out.extend_from_slice(proof);
            }
            Message::Attach(party) => party.emit(out),
            Message::Offer {
                own,
                peer,
                from,
                to,
            } => {
                out.extend_from_slice(&own.to_le_bytes());
                out.extend_from_slice(&peer.to_le_bytes());
                emit_addr(*from, out);
                emit_addr(*to, out);
            }
            Message::Accept => {}
            Message::Decline(reason) => {
                let end = reason.floor_char_boundary(MAX_REASON);
                out.extend_from_slice(&reason.as_bytes()[..end]);
            }
        }
    }

    /// Parse one packet; `None` when it is not a message of this version.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (version, rest) = rest.split_first_chunk()?;
        let (kind, body) = rest.split_first_chunk()?;
        if magic != MAGIC || u16::from_le_bytes(*version) != VERSION {
            return None;
        }
        match (u16::from_le_bytes(*kind), body.len()) {
            (1, HELLO) => {
                let (cell, rest) = body.split_first_chunk()?;
                let (seal, rest) = rest.split_first_chunk()?;
                Some(Message::Hello {
                    cell: ChallengeCell::parse(cell)?,
                    seal: u32::from_le_bytes(*seal),
                    from: parse_addr(rest.first_chunk()?)?,
                })
            }
            (2, WELCOME) => {
                let (cell, proof) = body.split_first_chunk()?;
                Some(Message::Welcome {
                    cell: ChallengeCell::parse(cell)?,
                    proof: *proof.first_chunk()?,
                })
            }
            (3, PARTY) => Some(Message::Attach(SideInfo::parse(body.first_chunk()?)?)),
            (4, n) if n <= MAX_REASON => {
                Some(Message::Decline(String::from_utf8_lossy(body).into_owned()))
            }
            (5, JOIN) => {
                let (party, proof) = body.split_first_chunk()?;
                Some(Message::Join {
                    party: SideInfo::parse(party)?,
                    proof: *proof.first_chunk()?,
                })
            }
            (6, OFFER) => {
                let (own, rest) = body.split_first_chunk()?;
                let (peer, rest) = rest.split_first_chunk()?;
                let (from, to) = rest.split_first_chunk()?;
                Some(Message::Offer {
                    own: u64::from_le_bytes(*own),
                    peer: u64::from_le_bytes(*peer),
                    from: parse_addr(from)?,
                    to: parse_addr(to.first_chunk()?)?,
                })
            }
            (7, 0) => Some(Message::Accept),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn party() -> SideInfo {
        SideInfo {
            qp: 0x0102_0304,
            trusted: true,
            domain: *b"ABCDEFGHIJKLMNOP",
        }
    }

    fn cell() -> ChallengeCell {
        ChallengeCell {
            addr: 0x7f00_1234_5678,
            challenge: *b"0123456789abcdef",
        }
    }

    fn offer() -> Message {
        Message::Offer {
            own: 0x0102,
            peer: 0x0304_0506_0708_090a,
            from: "127.0.0.1:513".parse().unwrap(),
            to: "[::1]:2".parse().unwrap(),
        }
    }

    const PROOF: Secret = *b"read it yourself";

    fn bytes(message: &Message) -> Vec<u8> {
        let mut out = Vec::new();
        message.emit(&mut out);
        out
    }

    #[test]
    fn messages_survive_the_round_trip() {
        let hello = |from: &str| Message::Hello {
            cell: cell(),
            seal: 0x0908_0706,
            from: from.parse().unwrap(),
        };
        for message in [
            hello("127.0.0.1:4711"),
            hello("[fe80::1]:1"),
            Message::Welcome {
                cell: cell(),
                proof: PROOF,
            },
            Message::Join {
                party: SideInfo {
                    trusted: false,
                    ..party()
                },
                proof: PROOF,
            },
            Message::Attach(party()),
            Message::Decline("no".into()),
            offer(),
            Message::Accept,
        ] {
            let bytes = bytes(&message);
            assert!(bytes.len() <= MAX_LEN);
            assert_eq!(Message::parse(&bytes), Some(message));
        }
    }

    #[test]
    fn the_layout_is_as_written_down() {
        let hello = bytes(&Message::Hello {
            cell: cell(),
            seal: 0x0908_0706,
            from: "127.0.0.1:513".parse().unwrap(),
        });
        let mut expected = b"weft\x02\x00\x01\x00\x78\x56\x34\x12\0\x7f\0\0".to_vec();
        expected.extend_from_slice(b"0123456789abcdef\x06\x07\x08\x09");
        expected.extend_from_slice(b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x7f\0\0\x01\x01\x02");
        assert_eq!(hello, expected);
        let welcome = bytes(&Message::Welcome {
            cell: cell(),
            proof: PROOF,
        });
        let mut expected = b"weft\x02\x00\x02\x00\x78\x56\x34\x12\0\x7f\0\0".to_vec();
        expected.extend_from_slice(b"0123456789abcdefread it yourself");
        assert_eq!(welcome, expected);
        let join = bytes(&Message::Join {
            party: party(),
            proof: PROOF,
        });
        let mut expected = b"weft\x02\x00\x05\x00\x04\x03\x02\x01\x01\0\0\0".to_vec();
        expected.extend_from_slice(b"ABCDEFGHIJKLMNOPread it yourself");
        assert_eq!(join, expected);
        let mut expected =
            b"weft\x02\x00\x06\x00\x02\x01\0\0\0\0\0\0\x0a\x09\x08\x07\x06\x05\x04\x03".to_vec();
        expected.extend_from_slice(b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x7f\0\0\x01\x01\x02");
        expected.extend_from_slice(b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\x02\0");
        assert_eq!(bytes(&offer()), expected);
    }

    #[test]
    fn anything_else_is_refused() {
        let good = bytes(&Message::Attach(party()));
        for cut in 0..good.len() {
            assert_eq!(Message::parse(&good[..cut]), None, "cut at {cut}");
        }
        let mut long = good.clone();
        long.push(0);
        assert_eq!(Message::parse(&long), None);
        for (at, value) in [(0, b'W'), (4, 1), (6, 9)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert_eq!(Message::parse(&bad), None, "byte {at}");
        }
        // A reason that is too long is cut, between characters.
        let long = bytes(&Message::Decline("ü".repeat(300)));
        assert!(long.len() <= MAX_LEN);
        assert!(
            matches!(Message::parse(&long), Some(Message::Decline(r)) if r.chars().all(|c| c == 'ü'))
        );
    }
}
