//! CRC-32C (Castagnoli, reflected), the checksum of FPDUs (RFC 5044 4.4).
//!
//! On the wire the FPDU trailer is this value in little-endian byte order, as in iSCSI: `crc32c(..).to_le_bytes()`.

use crc_fast::CrcAlgorithm;

/// The CRC-32C of `data`.
///
/// ```
/// assert_eq!(weft_wire::crc::crc32c(b"123456789"), 0xe306_9283);
/// ```
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

/// Continues a CRC-32C: `crc` is that of the bytes before `data` (0 for none).
///
/// One call over contiguous bytes is quicker than several appended ones.
///
/// ```
/// use weft_wire::crc::{crc32c, crc32c_append};
/// assert_eq!(crc32c_append(crc32c(b"1234"), b"56789"), crc32c(b"123456789"));
/// ```
#[inline]
pub fn crc32c_append(crc: u32, data: &[u8]) -> u32 {
    let mut digest =
        crc_fast::Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(data);
    digest.finalize() as u32
}
