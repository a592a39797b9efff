//! Markers: RFC 5044 4.3.
//!
//! A marker is four bytes, `reserved[2] | fpduptr[2]`, at every 512th byte of the TCP stream counted from the first FPDU
//! byte, the first one right there at its start. FPDUPTR is the distance in the stream from the first byte of the FPDU's
//! length field to the marker, other markers counted; it is zero for a marker right before an FPDU, which belongs to that
//! FPDU. FPDUs, markers and intervals are multiples of four, so that a marker never splits a length field or a CRC.
//!
//! The FPDU's CRC covers its markers. Code on the inner side of [`MarkerInserter`] and [`MarkerStripper`] sees FPDUs as if
//! there were no markers, CRC included: the two translate it. Since a CRC is linear, they do so without judging it: the
//! difference between the CRCs of the bytes with and without markers is added to the trailer, so that a trailer that was
//! wrong stays wrong, by the same bits.

use thiserror::Error;

use super::{CRC_LEN, FPDU_HEADER_LEN, fpdu_len};
use crate::crc::crc32c_append;

/// Bytes from the start of a marker to the start of the next.
pub const MARKER_INTERVAL: usize = 512;
/// Bytes of a marker.
pub const MARKER_LEN: usize = 4;

/// The longest ULPDU to send with markers: FPDUPTR has 16 bits, and reaches this far wherever the markers fall.
pub const MAX_MARKED_ULPDU: usize = 64_768;

/// Stream bytes between two markers.
const GAP: usize = MARKER_INTERVAL - MARKER_LEN;

/// A marker that does not point to the FPDU's start (RFC 5044 8, error code 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[error("marker points {found} bytes back, the FPDU started {expected} bytes back")]
pub struct MarkerError {
    /// The start of the FPDU according to the length fields.
    pub expected: u32,
    /// The start according to the marker.
    pub found: u16,
}

/// Puts markers into the FPDUs of one direction of a connection.
#[derive(Clone, Debug)]
pub struct MarkerInserter {
    crc: bool,
    /// Stream bytes until the next marker.
    gap: usize,
}

impl MarkerInserter {
    /// For a connection whose next byte is the first FPDU's; `crc` says whether FPDUs carry CRCs.
    pub const fn new(crc: bool) -> Self {
        Self { crc, gap: 0 }
    }

    /// Appends to `out` one whole FPDU, of at most [`MAX_MARKED_ULPDU`], with the markers that fall before and into it.
    pub fn insert(&mut self, fpdu: &[u8], out: &mut Vec<u8>) {
        debug_assert!(
            fpdu.first_chunk()
                .is_some_and(|&len| fpdu_len(usize::from(u16::from_be_bytes(len))) == fpdu.len()),
            "one whole FPDU at a time"
        );
        let start = out.len();
        let (mut body, trailer) = fpdu.split_at(fpdu.len().saturating_sub(CRC_LEN));
        let mut fpdu_start = start;
        // A marker that falls right before the trailer is due when the body is done, hence the second condition.
        loop {
            if self.gap == 0 {
                if out.len() == start {
                    fpdu_start += MARKER_LEN;
                }
                let pointer = out.len().saturating_sub(fpdu_start) as u16;
                out.extend_from_slice(&[0, 0]);
                out.extend_from_slice(&pointer.to_be_bytes());
                self.gap = GAP;
            }
            if body.is_empty() {
                break;
            }
            let (run, rest) = body.split_at(body.len().min(self.gap));
            out.extend_from_slice(run);
            self.gap -= run.len();
            body = rest;
        }
        let mut delta = 0;
        if self.crc {
            let plain = &fpdu[..fpdu.len() - trailer.len()];
            delta = crc32c_append(0, plain) ^ crc32c_append(0, &out[start..]);
        }
        out.extend(
            trailer
                .iter()
                .zip(delta.to_le_bytes())
                .map(|(byte, delta)| byte ^ delta),
        );
        self.gap = self.gap.saturating_sub(trailer.len());
    }
}

/// Takes the markers out of the stream of one direction of a connection.
///
/// It follows the FPDUs by their length fields and checks each marker's pointer. However the stream is cut into inputs,
/// the outputs together are the same.
#[derive(Clone, Debug)]
pub struct MarkerStripper {
    crc: bool,
    /// Stream bytes until the next marker.
    gap: usize,
    /// The marker under way, and how many of its bytes have come.
    marker: [u8; MARKER_LEN],
    marker_have: usize,
    /// The length field under way.
    length: [u8; FPDU_HEADER_LEN],
    /// Bytes of the current FPDU that have come, markers not counted.
    have: usize,
    /// Its length without markers, once the length field is there.
    total: usize,
    /// Bytes of markers within the current FPDU, not counting one right before it.
    markers: usize,
    /// CRCs of the current FPDU's bytes so far, without and with markers.
    plain: u32,
    marked: u32,
    failed: Option<MarkerError>,
}

impl MarkerStripper {
    /// For a connection whose next byte is the first of Full Operation; `crc` says whether FPDUs carry CRCs.
    pub const fn new(crc: bool) -> Self {
        Self {
            crc,
            gap: 0,
            marker: [0; MARKER_LEN],
            marker_have: 0,
            length: [0; FPDU_HEADER_LEN],
            have: 0,
            total: 0,
            markers: 0,
            plain: 0,
            marked: 0,
            failed: None,
        }
    }

    /// Appends `input` without markers to `out`, at most `input.len()` bytes.
    ///
    /// After an error the stream is lost: every later call returns the same error and appends nothing.
    pub fn strip(&mut self, mut input: &[u8], out: &mut Vec<u8>) -> Result<(), MarkerError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        while !input.is_empty() {
            if self.gap == 0 {
                let (run, rest) = input.split_at(input.len().min(MARKER_LEN - self.marker_have));
                self.marker[self.marker_have..][..run.len()].copy_from_slice(run);
                self.marker_have += run.len();
                input = rest;
                if self.marker_have == MARKER_LEN {
                    self.check_marker()?;
                }
                continue;
            }
            let left = match self.have {
                0..FPDU_HEADER_LEN => FPDU_HEADER_LEN - self.have,
                // The CRC starts a new run: only then is the difference to add to it known.
                have if have < self.total - CRC_LEN => self.total - CRC_LEN - have,
                have => self.total - have,
            };
            let (run, rest) = input.split_at(input.len().min(left).min(self.gap));
            self.take(run, out);
            self.gap -= run.len();
            input = rest;
        }
        Ok(())
    }

    fn check_marker(&mut self) -> Result<(), MarkerError> {
        let [_, _, high, low] = self.marker;
        let found = u16::from_be_bytes([high, low]);
        let expected = if self.have == 0 {
            0
        } else {
            (self.have + self.markers) as u32
        };
        // The low two bits are taken as zero, and the reserved field is not looked at (RFC 5044 4.3).
        if u32::from(found & !3) != expected {
            let error = MarkerError { expected, found };
            self.failed = Some(error);
            return Err(error);
        }
        if self.have != 0 {
            self.markers += MARKER_LEN;
        }
        if self.crc {
            self.marked = crc32c_append(self.marked, &self.marker);
        }
        self.marker_have = 0;
        self.gap = GAP;
        Ok(())
    }

    /// Takes bytes of the FPDU that lie within one of its parts: length field, ULPDU and pad, CRC.
    fn take(&mut self, run: &[u8], out: &mut Vec<u8>) {
        if self.have >= FPDU_HEADER_LEN && self.have >= self.total - CRC_LEN {
            let done = self.have + CRC_LEN - self.total;
            let delta = (self.plain ^ self.marked).to_le_bytes();
            out.extend(
                run.iter()
                    .zip(&delta[done..])
                    .map(|(byte, delta)| byte ^ delta),
            );
        } else {
            out.extend_from_slice(run);
            if self.crc {
                self.plain = crc32c_append(self.plain, run);
                self.marked = crc32c_append(self.marked, run);
            }
            if self.have < FPDU_HEADER_LEN {
                self.length[self.have..][..run.len()].copy_from_slice(run);
            }
        }
        self.have += run.len();
        if self.have == FPDU_HEADER_LEN {
            self.total = fpdu_len(usize::from(u16::from_be_bytes(self.length)));
        }
        if self.have >= FPDU_HEADER_LEN && self.have == self.total {
            (self.have, self.total, self.markers, self.plain, self.marked) = (0, 0, 0, 0, 0);
        }
    }
}
