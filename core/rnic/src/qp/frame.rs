//! The framing of segments on a transport.

use weft_wire::mpa::{CRC_LEN, FPDU_HEADER_LEN, fpdu_len, fpdu_pad};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Frame {
    /// FPDUs (RFC 5044): two bytes of length, the ULPDU, padding and CRC.
    #[default]
    Mpa,
    /// On shared memory: four bytes of length and the ULPDU (docs/spec/local.md). Nothing is damaged there, and nothing
    /// bounds the length to 64 KiB.
    Local,
}

pub(super) const LOCAL_HEADER_LEN: usize = 4;

impl Frame {
    /// Bytes before the ULPDU.
    pub(super) const fn header_len(self) -> usize {
        match self {
            Frame::Mpa => FPDU_HEADER_LEN,
            Frame::Local => LOCAL_HEADER_LEN,
        }
    }

    /// Bytes of padding after the ULPDU.
    pub(super) const fn pad(self, ulpdu_len: usize) -> usize {
        match self {
            Frame::Mpa => fpdu_pad(ulpdu_len),
            Frame::Local => 0,
        }
    }

    /// Whether four bytes of CRC follow.
    pub(super) const fn has_crc(self) -> bool {
        matches!(self, Frame::Mpa)
    }

    /// Bytes after the ULPDU.
    pub(super) const fn trailer_len(self, ulpdu_len: usize) -> usize {
        self.pad(ulpdu_len) + if self.has_crc() { CRC_LEN } else { 0 }
    }

    /// Bytes in all.
    pub(super) const fn total(self, ulpdu_len: usize) -> usize {
        match self {
            Frame::Mpa => fpdu_len(ulpdu_len),
            Frame::Local => LOCAL_HEADER_LEN + ulpdu_len,
        }
    }

    /// The header of a frame on shared memory.
    pub(super) fn local_header(ulpdu_len: usize) -> [u8; LOCAL_HEADER_LEN] {
        (ulpdu_len as u32).to_le_bytes()
    }

    /// Append the header.
    pub(super) fn emit(self, ulpdu_len: usize, out: &mut Vec<u8>) {
        match self {
            Frame::Mpa => out.extend_from_slice(&(ulpdu_len as u16).to_be_bytes()),
            Frame::Local => out.extend_from_slice(&Self::local_header(ulpdu_len)),
        }
    }

    /// The length of the ULPDU and its available bytes; `None` without a complete header.
    pub(super) fn parse(self, have: &[u8]) -> Option<(usize, &[u8])> {
        match self {
            Frame::Mpa => {
                let (length, rest) = have.split_first_chunk()?;
                Some((u16::from_be_bytes(*length).into(), rest))
            }
            Frame::Local => {
                let (length, rest) = have.split_first_chunk()?;
                Some((u32::from_le_bytes(*length) as usize, rest))
            }
        }
    }
}
