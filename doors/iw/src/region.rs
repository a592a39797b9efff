//! Local and remote memory, and the message that advertises it.

use weft_verbs::any::Mr;
use weft_verbs::{MemError, RemoteAddr, Sge};

use crate::Error;

/// Length of an advertisement in bytes.
pub const ADV_LEN: usize = 16;

/// A region of local memory. Dropping it deregisters it; an advertisement of it is void then.
///
/// It is reached by copies, because a peer may write to it at any time.
pub struct Lmr(pub(crate) Mr);

impl Lmr {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Copies `bytes` to offset `at`.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), MemError> {
        self.0.write(at, bytes)
    }

    /// Copies from offset `at` to `out`.
    pub fn read(&self, at: usize, out: &mut [u8]) -> Result<(), MemError> {
        self.0.read(at, out)
    }

    /// A copy of `len` bytes from offset `at`.
    pub fn to_vec(&self, at: usize, len: usize) -> Result<Vec<u8>, MemError> {
        self.0.to_vec(at, len)
    }

    /// A scatter/gather element of `len` bytes from offset `at`.
    ///
    /// # Errors
    /// [`Error::Range`] beyond the region, and for more than an element can have (4 GiB - 1).
    pub fn sge(&self, at: usize, len: usize) -> Result<Sge, Error> {
        check(at as u64, len as u64, self.len() as u64)?;
        check(0, len as u64, u32::MAX.into())?;
        Ok(self.0.sge(at, len))
    }

    /// The region of the verbs underneath.
    pub fn mr(&self) -> &Mr {
        &self.0
    }

    /// Deregisters the memory, waits until no peer uses it, and returns a registered buffer.
    pub fn deregister(self) -> Result<Option<Vec<u8>>, Error> {
        Ok(self.0.deregister()?)
    }

    /// The address, key and length that the peer needs to use the region: 16 bytes, see docs/spec/iw.md.
    pub(crate) fn advertisement(&self) -> Result<[u8; ADV_LEN], Error> {
        let remote = self.0.remote(0);
        check(0, self.len() as u64, u32::MAX.into())?;
        let len = self.len() as u32;
        Ok(Rmr { remote, len }.encode())
    }
}

/// A region at the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rmr {
    remote: RemoteAddr,
    len: u32,
}

impl Rmr {
    /// A region that the peer has advertised by other means.
    pub fn new(remote: RemoteAddr, len: u32) -> Self {
        Self { remote, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its address and key.
    pub fn remote(&self) -> RemoteAddr {
        self.remote
    }

    /// The address of `len` bytes from offset `at`.
    pub(crate) fn at(&self, at: usize, len: usize) -> Result<RemoteAddr, Error> {
        check(at as u64, len as u64, self.len.into())?;
        // The peer's address may be anything: a sum that wraps is refused by the peer.
        Ok(RemoteAddr {
            addr: self.remote.addr.wrapping_add(at as u64),
            rkey: self.remote.rkey,
        })
    }

    /// The region as an advertisement.
    pub fn encode(&self) -> [u8; ADV_LEN] {
        let mut out = [0; ADV_LEN];
        out[..RemoteAddr::LEN].copy_from_slice(&self.remote.to_bytes());
        out[RemoteAddr::LEN..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Reads an advertisement.
    pub fn decode(bytes: [u8; ADV_LEN]) -> Self {
        let [remote @ .., _, _, _, _] = bytes;
        let [.., a, b, c, d] = bytes;
        Self {
            remote: RemoteAddr::from_bytes(remote),
            len: u32::from_be_bytes([a, b, c, d]),
        }
    }
}

fn check(at: u64, len: u64, region: u64) -> Result<(), Error> {
    if at.checked_add(len).is_some_and(|end| end <= region) {
        Ok(())
    } else {
        Err(Error::Range { at, len, region })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_advertisement_is_sixteen_big_endian_bytes() {
        let rmr = Rmr::new(
            RemoteAddr {
                addr: 0x0102_0304_0506_0708,
                rkey: 0x1112_1314,
            },
            0x2122_2324,
        );
        let bytes = [
            1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x21, 0x22, 0x23, 0x24,
        ];
        assert_eq!(rmr.encode(), bytes);
        assert_eq!(Rmr::decode(bytes), rmr);
    }

    #[test]
    fn offsets_stay_in_the_region() {
        let rmr = Rmr::new(
            RemoteAddr {
                addr: u64::MAX - 1,
                rkey: 1,
            },
            10,
        );
        assert_eq!(rmr.at(2, 8).unwrap().addr, 0);
        assert!(rmr.at(10, 0).is_ok());
        assert!(rmr.at(3, 8).is_err());
        assert!(rmr.at(usize::MAX, 2).is_err());
    }
}
