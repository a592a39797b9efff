//! The messages by which two processes of one host meet: docs/spec/local.md. Each is one packet on a Unix socket, with
//! descriptors beside it; numbers are little-endian.
//!
//! ```
//! use weft_wire::local::{Message, MAX_LEN};
//!
//! let mut buf = Vec::new();
//! Message::Welcome.emit(&mut buf);
//! assert!(buf.len() <= MAX_LEN);
//! assert_eq!(Message::parse(&buf), Some(Message::Welcome));
//! ```

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The longest message, in bytes.
pub const MAX_LEN: usize = 256;
/// The longest reason of a [`Message::Decline`], in bytes; longer ones are cut.
pub const MAX_REASON: usize = MAX_LEN - HEADER;
/// The version that this module speaks. Another one is declined, and the connection stays on TCP.
pub const VERSION: u16 = 1;

const MAGIC: &[u8; 4] = b"weft";
const HEADER: usize = 8;
const PARTY: usize = 48;
const ADDR: usize = 18;

/// What one side says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Party {
    /// The queue pair's number: windows in the other side's table name it.
    pub qp: u32,
    /// The descriptors include the arena of regions without remote rights.
    pub trusted: bool,
    /// Where in its address space the cookie is.
    pub cookie_addr: u64,
    /// Sixteen random bytes: whoever reads them there reads the right process.
    pub cookie: [u8; 16],
    /// The name of its protection domain among those of the host.
    pub domain: [u8; 16],
}

/// A message of the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Initiator: this is the connection that I have just made, and what I bring.
    Hello {
        /// Itself.
        party: Party,
        /// Its own TCP address and port, by which the responder finds the connection.
        from: SocketAddr,
    },
    /// Responder: I have that connection; say on it what you would say on TCP.
    Welcome,
    /// Responder, right before its MPA reply: the connection is on shared memory from here.
    Attach(Party),
    /// Responder: the connection stays on TCP.
    Decline(String),
}

impl Party {
    fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.qp.to_le_bytes());
        out.extend_from_slice(&u32::from(self.trusted).to_le_bytes());
        out.extend_from_slice(&self.cookie_addr.to_le_bytes());
        out.extend_from_slice(&self.cookie);
        out.extend_from_slice(&self.domain);
    }

    fn parse(bytes: &[u8; PARTY]) -> Option<Self> {
        let (qp, rest) = bytes.split_first_chunk()?;
        let (flags, rest) = rest.split_first_chunk()?;
        let (cookie_addr, rest) = rest.split_first_chunk()?;
        let (cookie, rest) = rest.split_first_chunk()?;
        Some(Party {
            qp: u32::from_le_bytes(*qp),
            // Unknown flags are for later versions to give a meaning that earlier ones may overlook.
            trusted: u32::from_le_bytes(*flags) & 1 == 1,
            cookie_addr: u64::from_le_bytes(*cookie_addr),
            cookie: *cookie,
            domain: *rest.first_chunk()?,
        })
    }
}

impl Message {
    const fn kind(&self) -> u16 {
        match self {
            Message::Hello { .. } => 1,
            Message::Welcome => 2,
            Message::Attach(_) => 3,
            Message::Decline(_) => 4,
        }
    }

    /// Append the message to `out`.
    pub fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&self.kind().to_le_bytes());
        match self {
            Message::Hello { party, from } => {
                party.emit(out);
                let ip = match from.ip() {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                };
                out.extend_from_slice(&ip.octets());
                out.extend_from_slice(&from.port().to_le_bytes());
            }
            Message::Welcome => {}
            Message::Attach(party) => party.emit(out),
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
            (1, n) if n == PARTY + ADDR => {
                let (party, addr) = body.split_first_chunk()?;
                let (ip, port) = addr.split_first_chunk()?;
                let ip = Ipv6Addr::from(*ip as [u8; 16]).to_canonical();
                let port = u16::from_le_bytes(*port.first_chunk()?);
                Some(Message::Hello {
                    party: Party::parse(party)?,
                    from: SocketAddr::new(ip, port),
                })
            }
            (2, 0) => Some(Message::Welcome),
            (3, PARTY) => Some(Message::Attach(Party::parse(body.first_chunk()?)?)),
            (4, n) if n <= MAX_REASON => {
                Some(Message::Decline(String::from_utf8_lossy(body).into_owned()))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn party() -> Party {
        Party {
            qp: 0x0102_0304,
            trusted: true,
            cookie_addr: 0x7f00_1234_5678,
            cookie: *b"0123456789abcdef",
            domain: *b"ABCDEFGHIJKLMNOP",
        }
    }

    fn bytes(message: &Message) -> Vec<u8> {
        let mut out = Vec::new();
        message.emit(&mut out);
        out
    }

    #[test]
    fn messages_survive_the_round_trip() {
        for message in [
            Message::Hello {
                party: party(),
                from: "127.0.0.1:4711".parse().unwrap(),
            },
            Message::Hello {
                party: Party {
                    trusted: false,
                    ..party()
                },
                from: "[fe80::1]:1".parse().unwrap(),
            },
            Message::Welcome,
            Message::Attach(party()),
            Message::Decline("no".into()),
        ] {
            let bytes = bytes(&message);
            assert!(bytes.len() <= MAX_LEN);
            assert_eq!(Message::parse(&bytes), Some(message));
        }
    }

    #[test]
    fn the_layout_is_as_written_down() {
        let hello = bytes(&Message::Hello {
            party: party(),
            from: "127.0.0.1:513".parse().unwrap(),
        });
        let mut expected =
            b"weft\x01\x00\x01\x00\x04\x03\x02\x01\x01\0\0\0\x78\x56\x34\x12\0\x7f\0\0".to_vec();
        expected.extend_from_slice(b"0123456789abcdefABCDEFGHIJKLMNOP");
        expected.extend_from_slice(b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x7f\0\0\x01\x01\x02");
        assert_eq!(hello, expected);
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
        for (at, value) in [(0, b'W'), (4, 2), (6, 9)] {
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
