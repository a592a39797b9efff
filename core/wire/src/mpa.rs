//! MPA: start-up frames (RFC 5044 7.1, RFC 6581), the arithmetic of FPDUs (RFC 5044 4.1) and markers (4.3).

mod marker;
mod start;

pub use marker::{
    MARKER_INTERVAL, MARKER_LEN, MAX_MARKED_ULPDU, MarkerError, MarkerInserter, MarkerStripper,
};
pub use start::{Enhanced, FrameKind, StartError, StartFrame};

/// Longest private data of a start-up frame, in bytes, the four enhanced bytes included (RFC 5044 7.1).
pub const MAX_PRIVATE_DATA: usize = 512;
/// Bytes of a start-up frame before its private data.
pub const START_HEADER_LEN: usize = 20;
/// Bytes of an FPDU's length field.
pub const FPDU_HEADER_LEN: usize = 2;
/// Bytes of an FPDU's trailer.
pub const CRC_LEN: usize = 4;

/// Zero bytes between an ULPDU of this length and its CRC, 0 to 3: an FPDU is a multiple of four (RFC 5044 4.1).
#[inline]
pub const fn fpdu_pad(ulpdu_len: usize) -> usize {
    (FPDU_HEADER_LEN + ulpdu_len % 4).wrapping_neg() % 4
}

/// Bytes of the FPDU that carries an ULPDU of this length: length field, ULPDU, pad and CRC, without markers.
#[inline]
pub const fn fpdu_len(ulpdu_len: usize) -> usize {
    FPDU_HEADER_LEN + ulpdu_len + fpdu_pad(ulpdu_len) + CRC_LEN
}
