//! Which state of a file it is.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

/// Device, inode, length, time of the last change.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Stamp([u64; 5]);

impl Stamp {
    /// # Errors
    /// As `fstat(2)`.
    pub fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self([
            meta.dev(),
            meta.ino(),
            meta.len(),
            meta.mtime().cast_unsigned(),
            meta.mtime_nsec().cast_unsigned(),
        ]))
    }

    /// The length of the file.
    pub fn length(self) -> u64 {
        self.0[2]
    }

    /// The same for the same state of the same file; others differ but by chance (FNV-1a, 128 bits).
    pub fn version(self) -> [u8; 16] {
        let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        for byte in self.0.iter().flat_map(|word| word.to_be_bytes()) {
            hash =
                (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
        hash.to_be_bytes()
    }
}
