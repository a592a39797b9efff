//! The messages between neighbours: the greeting of a connection, and the 64 bytes at the start of every message (`docs/spec/roundabout.md`).

pub const VERSION: u16 = 1;
/// Bytes of a [`Header`].
pub const HEADER: usize = 64;
/// Bytes of a message without payload, at most.
pub const SMALL: usize = 256;
/// Bytes of a [`Hello`].
pub const HELLO: usize = 64;
const MAGIC: [u8; 4] = *b"WRB1";
const HELLO_MAGIC: [u8; 4] = *b"WRBH";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The transmitter requests to send an element.
    Request = 1,
    /// The receiver has an element free. Flag 1: a [`Kind::Filler`] comes first.
    Confirm = 2,
    /// An element with its control data.
    Payload = 3,
    /// Fills a receive that was posted for a failure.
    Filler = 4,
    /// The origin has no further elements.
    End = 5,
    /// The receiver has had everything.
    Bye = 6,
    /// The turn has failed; `origin` is the node to blame, the text follows.
    Fail = 7,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Kind::Request,
            2 => Kind::Confirm,
            3 => Kind::Payload,
            4 => Kind::Filler,
            5 => Kind::End,
            6 => Kind::Bye,
            7 => Kind::Fail,
            _ => return None,
        })
    }
}

/// Control data of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    /// Bits of the kind, or of the user for a payload.
    pub flags: u8,
    /// Links that it has travelled when it arrives.
    pub hop: u16,
    /// The node that it comes from.
    pub origin: u16,
    /// Number among the elements of its origin.
    pub seq: u32,
    /// Bytes that follow.
    pub len: u32,
    /// The user's words.
    pub user: [u64; 4],
}

impl Header {
    /// A message without payload.
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            flags: 0,
            hop: 0,
            origin: 0,
            seq: 0,
            len: 0,
            user: [0; 4],
        }
    }

    pub fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = self.kind as u8;
        out[5] = self.flags;
        out[6..8].copy_from_slice(&self.hop.to_be_bytes());
        out[8..10].copy_from_slice(&self.origin.to_be_bytes());
        out[12..16].copy_from_slice(&self.seq.to_be_bytes());
        out[16..20].copy_from_slice(&self.len.to_be_bytes());
        for (word, at) in self.user.iter().zip((24..).step_by(8)) {
            out[at..at + 8].copy_from_slice(&word.to_be_bytes());
        }
        out
    }

    /// Reads it; `None` for anything that [`Header::encode`] does not make.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER] = bytes.first_chunk()?;
        let zero = |range: std::ops::Range<usize>| bytes[range].iter().all(|&b| b == 0);
        if bytes[..4] != MAGIC || !zero(10..12) || !zero(20..24) || !zero(56..64) {
            return None;
        }
        let mut user = [0; 4];
        for (word, at) in user.iter_mut().zip((24..).step_by(8)) {
            *word = u64::from_be_bytes(field(bytes, at));
        }
        Some(Self {
            kind: Kind::of(bytes[4])?,
            flags: bytes[5],
            hop: u16::from_be_bytes(field(bytes, 6)),
            origin: u16::from_be_bytes(field(bytes, 8)),
            seq: u32::from_be_bytes(field(bytes, 12)),
            len: u32::from_be_bytes(field(bytes, 16)),
            user,
        })
    }
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// A failure as a small message: the node to blame and why.
pub fn encode_failure(node: usize, why: &str) -> Vec<u8> {
    let mut text = why;
    while text.len() > SMALL - HEADER {
        let mut end = SMALL - HEADER;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text = &text[..end];
    }
    let header = Header {
        origin: node as u16,
        len: text.len() as u32,
        ..Header::new(Kind::Fail)
    };
    let mut out = header.encode().to_vec();
    out.extend_from_slice(text.as_bytes());
    out
}

/// The text of a failure, with nothing in it that a terminal would obey.
pub fn failure_text(bytes: &[u8]) -> String {
    let text = weft_service::text::printable(bytes);
    text.chars().take(SMALL).collect()
}

/// The greeting: the private data of a connection request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The predecessor's version.
    pub version: u16,
    /// Its position.
    pub from: u16,
    /// Nodes of the ring.
    pub nodes: u16,
    /// Whether elements return to their origin.
    pub home: bool,
    /// Which of the rings of one query.
    pub exchange: u32,
    /// Bytes of an element.
    pub element: u32,
    /// The query.
    pub id: [u8; 16],
    /// Further data on which the nodes must agree: a digest of the plan, for example.
    pub agreement: u64,
    /// The port of the predecessor's own listener.
    pub port: u16,
}

impl Hello {
    pub fn encode(&self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        out[..4].copy_from_slice(&HELLO_MAGIC);
        out[4..6].copy_from_slice(&self.version.to_be_bytes());
        out[6..8].copy_from_slice(&self.from.to_be_bytes());
        out[8..10].copy_from_slice(&self.nodes.to_be_bytes());
        out[10] = self.home.into();
        out[12..16].copy_from_slice(&self.exchange.to_be_bytes());
        out[16..20].copy_from_slice(&self.element.to_be_bytes());
        out[24..40].copy_from_slice(&self.id);
        out[40..48].copy_from_slice(&self.agreement.to_be_bytes());
        out[48..50].copy_from_slice(&self.port.to_be_bytes());
        out
    }

    /// Parses it; `None` for an invalid greeting. A kernel peer can add zero bytes.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HELLO] = bytes.first_chunk()?;
        if bytes[..4] != HELLO_MAGIC || bytes[10] > 1 {
            return None;
        }
        Some(Self {
            version: u16::from_be_bytes(field(bytes, 4)),
            from: u16::from_be_bytes(field(bytes, 6)),
            nodes: u16::from_be_bytes(field(bytes, 8)),
            home: bytes[10] == 1,
            exchange: u32::from_be_bytes(field(bytes, 12)),
            element: u32::from_be_bytes(field(bytes, 16)),
            id: field(bytes, 24),
            agreement: u64::from_be_bytes(field(bytes, 40)),
            port: u16::from_be_bytes(field(bytes, 48)),
        })
    }

    /// Why a predecessor that says this is not ours, which would say `ours`.
    pub fn differs(&self, ours: &Self) -> Option<String> {
        if self.version != ours.version {
            let (theirs, ours) = (self.version, ours.version);
            return Some(format!("versions differ: {theirs} and {ours}"));
        }
        let pairs = [
            ("position", u64::from(self.from), u64::from(ours.from)),
            (
                "number of nodes",
                u64::from(self.nodes),
                u64::from(ours.nodes),
            ),
            ("way home", self.home.into(), ours.home.into()),
            ("element size", self.element.into(), ours.element.into()),
            ("plan", self.agreement, ours.agreement),
        ];
        pairs
            .iter()
            .find(|(_, theirs, ours)| theirs != ours)
            .map(|(what, theirs, ours)| {
                format!("the nodes do not agree on the {what}: {theirs} and {ours}")
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_come_back(kind in 1u8..=7, flags: u8, hop: u16, origin: u16, seq: u32, len: u32, user: [u64; 4]) {
            let kind = Kind::of(kind).unwrap();
            let header = Header { kind, flags, hop, origin, seq, len, user };
            prop_assert_eq!(Header::decode(&header.encode()), Some(header));
        }

        #[test]
        fn any_bytes_are_a_header_or_not(bytes: Vec<u8>) {
            if let Some(header) = Header::decode(&bytes) {
                prop_assert_eq!(&header.encode()[..], &bytes[..HEADER]);
            }
            let _ = Hello::decode(&bytes);
        }

        #[test]
        fn failures_are_small(node in 0usize..1024, why: String) {
            let bytes = encode_failure(node, &why);
            prop_assert!(bytes.len() <= SMALL);
            let header = Header::decode(&bytes).unwrap();
            prop_assert_eq!(usize::from(header.origin), node);
            prop_assert_eq!(header.len as usize, bytes.len() - HEADER);
            prop_assert!(std::str::from_utf8(&bytes[HEADER..]).is_ok());
        }
    }

    #[test]
    fn a_greeting_names_what_differs() {
        let ours = Hello {
            version: VERSION,
            from: 1,
            nodes: 3,
            home: false,
            exchange: 7,
            element: 4096,
            id: [9; 16],
            agreement: 5,
            port: 7478,
        };
        assert_eq!(Hello::decode(&ours.encode()), Some(ours));
        assert_eq!(ours.differs(&ours), None);
        let other = Hello { version: 2, ..ours };
        assert!(other.differs(&ours).unwrap().contains("versions"));
        let other = Hello { element: 1, ..ours };
        assert!(other.differs(&ours).unwrap().contains("element size"));
    }
}
