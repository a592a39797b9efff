//! The protocol of two brokers: how they verify that they mean the same TCP connection, and the frames that follow.
//!
//! All numbers are big-endian. The messages are in `docs/spec/run.md`.

use std::net::SocketAddr;
use weft_run::addr::{get_addr, put_addr};
use weft_run::hosts::{BEGINNING, Registration};
use weft_run::proof;
pub use weft_run::proof::{DIGEST, Prover, digest};

/// The first bytes of a broker's first message.
pub const MAGIC_LEN: usize = 8;
const MAGIC: [u8; MAGIC_LEN] = *b"weftrunH";
const VERSION: u16 = 1;
const ADDR: usize = 18;
/// Bytes of [`Open`].
pub const OPEN: usize = 8 + 2 + 2 + 2 * ADDR + 32;
/// Connections that are offered at a time: more than one only where addresses are translated on the way.
pub const CANDIDATES: usize = 8;
/// In a verdict: none of the connections.
pub const NONE: u8 = 0xff;

/// Why a message was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Not a broker of this version.
    #[error("the peer is no broker of weft, or of another version")]
    Foreign,
    /// A field has a value that cannot be.
    #[error("a message of the peer has a field that cannot be")]
    Field,
}

/// The dialler's first message: which connection it means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// The addresses of the end that has called `connect`, as it sees them.
    pub own: SocketAddr,
    /// The address that it has connected to.
    pub peer: SocketAddr,
    /// Bytes that it knows of each direction's beginning: sent and received.
    pub known: [u8; 2],
    /// Its part of the key.
    pub nonce: [u8; 32],
}

impl Open {
    /// As bytes.
    pub fn emit(&self) -> [u8; OPEN] {
        let mut out = [0; OPEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_be_bytes());
        out[10..12].copy_from_slice(&self.known);
        out[12..30].copy_from_slice(&put_addr(self.own));
        out[30..48].copy_from_slice(&put_addr(self.peer));
        out[48..].copy_from_slice(&self.nonce);
        out
    }

    pub fn parse(bytes: &[u8; OPEN]) -> Result<Open, WireError> {
        let array = |at: usize| std::array::from_fn::<u8, ADDR, _>(|i| bytes[at + i]);
        let version = u16::from_be_bytes([bytes[8], bytes[9]]);
        if bytes[..8] != MAGIC || version != VERSION {
            return Err(WireError::Foreign);
        }
        let known = [bytes[10], bytes[11]];
        if known.iter().any(|&n| usize::from(n) > BEGINNING) {
            return Err(WireError::Field);
        }
        Ok(Open {
            own: get_addr(&array(12)),
            peer: get_addr(&array(30)),
            known,
            nonce: std::array::from_fn(|i| bytes[48 + i]),
        })
    }
}

/// Returns how many bytes of each direction's beginning both ends know: from the dialler, and to it. `None`: too few to distinguish connections.
pub fn common(open: &Open, accepted: &Registration) -> Option<[u8; 2]> {
    proof::common(open.known, &accepted.received, &accepted.sent)
}

/// Bytes of a frame's head.
pub const HEAD: usize = 8;
/// The most bytes of a data frame.
pub const MAX_DATA: u32 = 64 << 10;

/// Meaning of a frame. The sender of a frame speaks for its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// I look at both: you may switch.
    Consent,
    /// From this offset of the stream on, what I send comes by frames. The offset follows, 8 bytes.
    Switch,
    /// This many bytes of the stream follow.
    Data(u32),
    /// Nothing more comes by frames; the rest of the stream comes over TCP.
    End,
    /// Send the rest over TCP.
    Stop,
    /// My program has closed its socket.
    Gone,
}

impl Frame {
    /// The head of the frame.
    pub fn emit(self) -> [u8; HEAD] {
        let (kind, len) = match self {
            Frame::Consent => (1, 0),
            Frame::Switch => (2, 8),
            Frame::Data(len) => (3, len),
            Frame::End => (4, 0),
            Frame::Stop => (5, 0),
            Frame::Gone => (6, 0),
        };
        let mut head = [0; HEAD];
        head[0] = kind;
        head[4..].copy_from_slice(&u32::to_be_bytes(len));
        head
    }

    pub fn parse(head: [u8; HEAD]) -> Result<Frame, WireError> {
        let len = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
        if head[1..4] != [0; 3] {
            return Err(WireError::Field);
        }
        match (head[0], len) {
            (1, 0) => Ok(Frame::Consent),
            (2, 8) => Ok(Frame::Switch),
            (3, 1..=MAX_DATA) => Ok(Frame::Data(len)),
            (4, 0) => Ok(Frame::End),
            (5, 0) => Ok(Frame::Stop),
            (6, 0) => Ok(Frame::Gone),
            _ => Err(WireError::Field),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hmac::Mac;
    use weft_run::connection::Carrier;
    use weft_run::hosts::Beginning;
    use weft_run::meet::Ends;

    fn open() -> Open {
        Open {
            own: "10.0.0.2:4711".parse().unwrap(),
            peer: "10.0.0.1:80".parse().unwrap(),
            known: [40, 7],
            nonce: [9; 32],
        }
    }

    #[test]
    fn messages_are_read_back() {
        let sent = open();
        assert_eq!(Open::parse(&sent.emit()), Ok(sent));
        for frame in [
            Frame::Consent,
            Frame::Switch,
            Frame::Data(1),
            Frame::Data(MAX_DATA),
            Frame::End,
            Frame::Stop,
            Frame::Gone,
        ] {
            assert_eq!(Frame::parse(frame.emit()), Ok(frame));
        }
    }

    #[test]
    fn what_no_honest_broker_sends_is_refused() {
        let mut bytes = open().emit();
        bytes[9] = 2;
        assert_eq!(Open::parse(&bytes), Err(WireError::Foreign));
        let mut bytes = open().emit();
        bytes[10] = BEGINNING as u8 + 1;
        assert_eq!(Open::parse(&bytes), Err(WireError::Field));
        for kind in 0..=255 {
            for len in [0, 1, 8, MAX_DATA, MAX_DATA + 1, u32::MAX] {
                let mut head = [0; HEAD];
                head[0] = kind;
                head[4..].copy_from_slice(&len.to_be_bytes());
                if let Ok(frame) = Frame::parse(head) {
                    assert_eq!(frame.emit(), head);
                }
                head[2] = 1;
                assert!(Frame::parse(head).is_err());
            }
        }
    }

    #[test]
    fn a_proof_is_of_the_bytes_the_nonces_and_who_gives_it() {
        let accepted = Registration {
            ends: Ends {
                own: "10.0.0.1:80".parse().unwrap(),
                peer: "10.0.0.2:4711".parse().unwrap(),
            },
            dialled: false,
            carrier: Carrier::Bsdp,
            sent: Beginning::new(b"answer"),
            received: Beginning::new(b"a request that is longer"),
        };
        let lens = common(&open(), &accepted).unwrap();
        assert_eq!(lens, [24, 6]);
        let nonces = [[1; 32], [2; 32]];
        let proof = |who, nonces: &[[u8; 32]; 2], a: &[u8], b: &[u8]| {
            digest(who, nonces, lens, a, b)
                .unwrap()
                .finalize()
                .into_bytes()
        };
        let (a, b) = (b"a request that is longer, as sent", b"answer, longer");
        let good = proof(Prover::Dialler, &nonces, a, b);
        assert_eq!(
            good,
            proof(
                Prover::Dialler,
                &nonces,
                accepted.received.bytes(),
                accepted.sent.bytes()
            )
        );
        assert_ne!(good, proof(Prover::Acceptor, &nonces, a, b));
        assert_ne!(good, proof(Prover::Dialler, &[[1; 32], [3; 32]], a, b));
        assert_ne!(good, proof(Prover::Dialler, &nonces, a, b"Answer, longer"));
        assert!(digest(Prover::Dialler, &nonces, [24, 7], a, b"answer").is_none());
        let little = Open {
            known: [9, 6],
            ..open()
        };
        assert_eq!(common(&little, &accepted), None);
    }
}
