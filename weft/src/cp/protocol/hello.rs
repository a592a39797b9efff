//! The hellos: the private data of the MPA start-up frames.

use super::{DecodeError, HELLO_LEN, MAGIC, PROOF_LEN, VERSION};

/// A responder's answer to a hello, in the reply's private data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Go on (also in the initiator's hello, where it means nothing).
    Ok,
    /// This version is not spoken here.
    Version,
    /// Too many senders at once.
    Busy,
    /// A key is wanted and the initiator has none.
    KeyWanted,
    /// The initiator requires a proof of a key and there is none here.
    NoKey,
    /// The sender is not admitted: its key is not authorised, and the kernel does not attest that it is of the responder's user.
    UnknownPeer,
}

impl Status {
    fn code(self) -> u16 {
        match self {
            Self::Ok => 0,
            Self::Version => 1,
            Self::Busy => 2,
            Self::KeyWanted => 3,
            Self::NoKey => 4,
            Self::UnknownPeer => 5,
        }
    }
}

/// The private data in both MPA start-up frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The sender's protocol version.
    pub version: u16,
    /// The responder's verdict.
    pub status: Status,
    /// Whether this side has a shared key and requires the other side to prove it.
    pub key: bool,
    /// This side's fresh random challenge.
    pub nonce: [u8; PROOF_LEN],
}

impl Hello {
    /// The 48 bytes of the hello.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.version.to_be_bytes());
        out[10..12].copy_from_slice(&self.status.code().to_be_bytes());
        out[12..14].copy_from_slice(&u16::from(self.key).to_be_bytes());
        out[16..].copy_from_slice(&self.nonce);
        out
    }

    /// Reads a hello. One of another version is read as far as every version agrees: magic, version, status.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let Some((fields, rest)) = bytes.split_first_chunk::<12>() else {
            return Err(if bytes.starts_with(&MAGIC) {
                DecodeError::Short
            } else {
                DecodeError::Magic
            });
        };
        if !fields.starts_with(&MAGIC) {
            return Err(DecodeError::Magic);
        }
        let number = |at| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let version = number(8);
        let status = match number(10) {
            0 => Status::Ok,
            1 => Status::Version,
            2 => Status::Busy,
            3 => Status::KeyWanted,
            4 => Status::NoKey,
            5 => Status::UnknownPeer,
            _ => return Err(DecodeError::Value("status")),
        };
        if version != VERSION {
            return Ok(Self {
                version,
                status,
                key: false,
                nonce: [0; PROOF_LEN],
            });
        }
        let (flags, nonce) = rest.split_first_chunk().ok_or(DecodeError::Short)?;
        let key = match *flags {
            [0, 0, 0, 0] => false,
            [0, 1, 0, 0] => true,
            _ => return Err(DecodeError::Reserved),
        };
        let nonce = nonce.try_into().map_err(|_| match nonce.len() {
            ..PROOF_LEN => DecodeError::Short,
            _ => DecodeError::Trailing,
        })?;
        Ok(Self {
            version,
            status,
            key,
            nonce,
        })
    }
}
