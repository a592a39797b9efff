//! The codec of packets (docs/spec/fi.md). A packet is the payload of one datagram message.

use std::ops::Range;

/// The longest packet in bytes.
pub const MAX_PACKET: usize = 8192;
/// Bytes of the header of every packet.
pub const HEADER: usize = 24;
/// Bytes of a message in its first packet, and in each further one.
pub const FIRST: usize = MAX_PACKET - HEADER - 24;
/// As [`FIRST`], for the further ones.
pub const MORE: usize = MAX_PACKET - HEADER;
/// Ranges that one packet can ask for again.
pub const MAX_LACKS: usize = 256;

const MAGIC: u8 = b'F';
const VERSION: u8 = 2;
const TAGGED: u8 = 1;
const WITH_DATA: u8 = 2;

/// The header of every packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The key of the endpoint that sent it.
    pub key: u32,
    /// Its number; 0 for packets that are not numbered.
    pub seq: u32,
    /// The number that is expected next in the other direction.
    pub ack: u32,
    /// Bit i: number `ack + 1 + i` has come.
    pub sack: u64,
}

/// The matching data of a message, and its length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Whether it matches receives with a tag.
    pub tagged: bool,
    /// The tag; 0 without one.
    pub tag: u64,
    /// The sender's data of the message.
    pub data: Option<u64>,
    /// Bytes.
    pub len: u64,
}

/// The memory in which a receiver takes a large message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The key of the region.
    pub rkey: u32,
    /// The address of the first byte.
    pub addr: u64,
}

/// The contents of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// Nothing: it acknowledges.
    Ack,
    /// The endpoint has closed, and has received everything that it waited for.
    Bye,
    /// The beginning of a small message, or all of it.
    Message(Meta, &'a [u8]),
    /// The next bytes of the message that has begun.
    More(&'a [u8]),
    /// A large message waits at the sender under this number.
    Request(Meta, u32),
    /// The first `len` bytes of message `id` may be written, with `target_id` as immediate data.
    Ready {
        id: u32,
        target_id: u64,
        target: Target,
        len: u64,
    },
    /// All that was asked for has been written.
    Written { target_id: u64 },
    /// These ranges have not come.
    Lacks { id: u32, ranges: Vec<Range<u64>> },
    /// All has come.
    Done { id: u32 },
    /// The sender takes a connection from this peer at this TCP port of its address, with the token as private data.
    Offer { port: u16, token: u64 },
}

impl Body<'_> {
    fn kind(&self) -> u8 {
        match self {
            Body::Ack => 0,
            Body::Message(..) => 1,
            Body::More(_) => 2,
            Body::Request(..) => 3,
            Body::Ready { .. } => 4,
            Body::Written { .. } => 5,
            Body::Lacks { .. } => 6,
            Body::Done { .. } => 7,
            Body::Bye => 8,
            Body::Offer { .. } => 9,
        }
    }

    /// Whether packets of this kind have a number and are repeated until they are acknowledged.
    pub fn is_numbered(&self) -> bool {
        !matches!(self, Body::Ack | Body::Bye)
    }
}

/// Writes a packet; its header is filled in by [`stamp`] when it is sent.
///
/// # Panics
/// When the body does not fit into a packet.
pub fn encode(body: &Body<'_>) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + 64);
    let mut flags = 0;
    if let Body::Message(meta, _) | Body::Request(meta, _) = body {
        flags = u8::from(meta.tagged) * TAGGED + u8::from(meta.data.is_some()) * WITH_DATA;
    }
    out.extend_from_slice(&[MAGIC, VERSION, body.kind(), flags]);
    out.resize(HEADER, 0);
    let put_meta = |out: &mut Vec<u8>, meta: &Meta| {
        for value in [meta.tag, meta.data.unwrap_or(0), meta.len] {
            out.extend_from_slice(&value.to_be_bytes());
        }
    };
    match body {
        Body::Ack | Body::Bye => {}
        Body::Message(meta, bytes) => {
            put_meta(&mut out, meta);
            out.extend_from_slice(bytes);
        }
        Body::More(bytes) => out.extend_from_slice(bytes),
        Body::Request(meta, id) => {
            put_meta(&mut out, meta);
            out.extend_from_slice(&id.to_be_bytes());
        }
        Body::Ready {
            id,
            target_id,
            target,
            len,
        } => {
            out.extend_from_slice(&id.to_be_bytes());
            out.extend_from_slice(&target.rkey.to_be_bytes());
            for value in [*target_id, target.addr, *len] {
                out.extend_from_slice(&value.to_be_bytes());
            }
        }
        Body::Written { target_id } => out.extend_from_slice(&target_id.to_be_bytes()),
        Body::Lacks { id, ranges } => {
            out.extend_from_slice(&id.to_be_bytes());
            for range in ranges {
                out.extend_from_slice(&range.start.to_be_bytes());
                out.extend_from_slice(&range.end.to_be_bytes());
            }
        }
        Body::Done { id } => out.extend_from_slice(&id.to_be_bytes()),
        Body::Offer { port, token } => {
            out.extend_from_slice(&u32::from(*port).to_be_bytes());
            out.extend_from_slice(&token.to_be_bytes());
        }
    }
    assert!(out.len() <= MAX_PACKET, "a packet of {} bytes", out.len());
    out
}

/// Fills in the header of a packet.
///
/// # Panics
/// When it is shorter than a header.
pub fn stamp(packet: &mut [u8], header: &Header) {
    packet[4..8].copy_from_slice(&header.key.to_be_bytes());
    packet[8..12].copy_from_slice(&header.seq.to_be_bytes());
    packet[12..16].copy_from_slice(&header.ack.to_be_bytes());
    packet[16..24].copy_from_slice(&header.sack.to_be_bytes());
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn u32(&mut self) -> Option<u32> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_be_bytes(*bytes))
    }

    fn u64(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_be_bytes(*bytes))
    }

    fn meta(&mut self, flags: u8) -> Option<Meta> {
        let (tag, data) = (self.u64()?, self.u64()?);
        Some(Meta {
            tagged: flags & TAGGED != 0,
            tag,
            data: (flags & WITH_DATA != 0).then_some(data),
            len: self.u64()?,
        })
    }

    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

/// Parses a packet; `None` for an invalid one.
pub fn decode(packet: &[u8]) -> Option<(Header, Body<'_>)> {
    let (&[magic, version, kind, flags], rest) = packet.split_first_chunk()?;
    if magic != MAGIC || version != VERSION || packet.len() > MAX_PACKET {
        return None;
    }
    let mut reader = Reader(rest);
    let header = Header {
        key: reader.u32()?,
        seq: reader.u32()?,
        ack: reader.u32()?,
        sack: reader.u64()?,
    };
    let body = match kind {
        0 => Body::Ack,
        1 => {
            let meta = reader.meta(flags)?;
            let bytes = reader.rest();
            if bytes.len() as u64 > meta.len {
                return None;
            }
            Body::Message(meta, bytes)
        }
        2 => Body::More(reader.rest()),
        3 => Body::Request(reader.meta(flags)?, reader.u32()?),
        4 => {
            let (id, rkey) = (reader.u32()?, reader.u32()?);
            Body::Ready {
                id,
                target_id: reader.u64()?,
                target: Target {
                    rkey,
                    addr: reader.u64()?,
                },
                len: reader.u64()?,
            }
        }
        5 => Body::Written {
            target_id: reader.u64()?,
        },
        6 => {
            let id = reader.u32()?;
            let mut ranges = Vec::new();
            while !reader.0.is_empty() {
                ranges.push(reader.u64()?..reader.u64()?);
            }
            if ranges.is_empty() || ranges.len() > MAX_LACKS {
                return None;
            }
            Body::Lacks { id, ranges }
        }
        7 => Body::Done { id: reader.u32()? },
        8 => Body::Bye,
        9 => Body::Offer {
            port: u16::try_from(reader.u32()?).ok()?,
            token: reader.u64()?,
        },
        _ => return None,
    };
    let sound = reader.0.is_empty() && body.is_numbered() == (header.seq != 0);
    sound.then_some((header, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_come_back_as_they_were() {
        let meta = Meta {
            tagged: true,
            tag: 7,
            data: Some(9),
            len: 5,
        };
        let target = Target {
            rkey: 3,
            addr: 1 << 40,
        };
        let bodies = [
            Body::Ack,
            Body::Bye,
            Body::Message(meta, b"hello"),
            Body::More(b"more"),
            Body::Request(Meta { data: None, ..meta }, 4),
            Body::Ready {
                id: 4,
                target_id: 8,
                target,
                len: 5,
            },
            Body::Written { target_id: 8 },
            Body::Lacks {
                id: 4,
                ranges: vec![0..1, 3..5],
            },
            Body::Done { id: 4 },
            Body::Offer {
                port: 65_535,
                token: u64::MAX - 1,
            },
        ];
        for body in bodies {
            let header = Header {
                key: 1,
                seq: u32::from(body.is_numbered()),
                ack: 2,
                sack: 5,
            };
            let mut packet = encode(&body);
            stamp(&mut packet, &header);
            assert_eq!(decode(&packet), Some((header, body.clone())));
            // Cut anywhere, it is another packet or none, and nothing panics.
            for len in 0..packet.len() {
                if let Some((_, other)) = decode(&packet[..len]) {
                    assert_ne!(other, body);
                }
            }
        }
    }

    #[test]
    fn a_packet_on_the_wire() {
        let meta = Meta {
            tagged: true,
            tag: 0x0102,
            data: None,
            len: 2,
        };
        let mut packet = encode(&Body::Message(meta, b"hi"));
        let header = Header {
            key: 0xa1,
            seq: 2,
            ack: 3,
            sack: 1,
        };
        stamp(&mut packet, &header);
        let expected = [
            &[b'F', 2, 1, 1, 0, 0, 0, 0xa1, 0, 0, 0, 2, 0, 0, 0, 3][..],
            &[0, 0, 0, 0, 0, 0, 0, 1],
            &[0, 0, 0, 0, 0, 0, 1, 2],
            &[0; 8],
            &[0, 0, 0, 0, 0, 0, 0, 2],
            b"hi",
        ];
        assert_eq!(packet, expected.concat());
    }
}
