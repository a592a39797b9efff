//! Protection domains and memory regions.

use std::io;
use std::os::fd::AsFd;

use super::{Either, convert};
use crate::{Access, Error, MemError, RawMemory, RemoteAddr, Sge};

/// As [`crate::Pd`]. Clones are handles of the same one.
#[derive(Clone)]
pub struct Pd(pub(super) Either<crate::Pd, weft_nic::Pd>);

impl Pd {
    /// That of the soft RNIC.
    pub fn soft(&self) -> Option<&crate::Pd> {
        self.0.soft()
    }

    /// As [`crate::Pd::alloc_mr`]; the address of the first byte is not 0 on an RNIC.
    ///
    /// # Errors
    /// As there; on an RNIC as `ibv_reg_mr`, and for a region without bytes.
    pub fn alloc_mr(&self, len: usize, access: Access) -> Result<Mr, Error> {
        Ok(Mr(match &self.0 {
            Either::Soft(pd) => Either::Soft(pd.alloc_mr(len, access)?),
            Either::Rnic(pd) => {
                has_bytes(len)?;
                let mr = pd.alloc_mr(len, convert::access(access));
                Either::Rnic(mr.map_err(|e| convert::error(&e))?)
            }
        }))
    }

    /// Registers the memory of a region of the soft RNIC with this device too. It stays while either registration exists; the new one has rights and keys
    /// of its own.
    ///
    /// # Errors
    /// As [`Pd::alloc_mr`].
    pub fn reg_mr_of(&self, soft: &crate::Mr, access: Access) -> Result<Mr, Error> {
        Ok(Mr(match &self.0 {
            Either::Soft(pd) => Either::Soft(pd.reg_part(soft, 0, soft.len(), access)?),
            Either::Rnic(pd) => {
                has_bytes(soft.len())?;
                let mr = pd.reg_region(soft.region(), convert::access(access));
                Either::Rnic(mr.map_err(|e| convert::error(&e))?)
            }
        }))
    }

    /// As [`crate::Pd::reg_mr`].
    ///
    /// # Errors
    /// As [`Pd::alloc_mr`].
    pub fn reg_mr(&self, buffer: Vec<u8>, access: Access) -> Result<Mr, Error> {
        Ok(Mr(match &self.0 {
            Either::Soft(pd) => Either::Soft(pd.reg_mr(buffer, access)?),
            Either::Rnic(pd) => {
                has_bytes(buffer.len())?;
                let mr = pd.reg_mr(buffer, convert::access(access));
                Either::Rnic(mr.map_err(|e| convert::error(&e))?)
            }
        }))
    }

    /// As [`crate::Pd::reg_raw`].
    ///
    /// # Errors
    /// As [`Pd::alloc_mr`].
    pub fn reg_raw(&self, memory: &RawMemory, access: Access) -> Result<Mr, Error> {
        Ok(Mr(match &self.0 {
            Either::Soft(pd) => Either::Soft(pd.reg_raw(memory, access)?),
            Either::Rnic(pd) => {
                has_bytes(memory.len())?;
                let mr = pd.reg_raw(memory, convert::access(access));
                Either::Rnic(mr.map_err(|e| convert::error(&e))?)
            }
        }))
    }

    /// As [`crate::Pd::reg_memfd`].
    ///
    /// # Errors
    /// As there, and as [`Pd::alloc_mr`].
    pub fn reg_memfd(&self, file: impl AsFd, len: usize, access: Access) -> Result<Mr, Error> {
        Ok(Mr(match &self.0 {
            Either::Soft(pd) => Either::Soft(pd.reg_memfd(file, len, access)?),
            Either::Rnic(pd) => {
                let mr = pd.reg_memfd(file, len, convert::access(access));
                Either::Rnic(mr.map_err(|e| convert::error(&e))?)
            }
        }))
    }
}

fn has_bytes(len: usize) -> Result<(), Error> {
    if len == 0 {
        return Err(Error::Invalid("an RNIC registers no region without bytes"));
    }
    Ok(())
}

/// As [`crate::Mr`].
pub struct Mr(Either<crate::Mr, weft_nic::Mr>);

impl From<crate::Mr> for Mr {
    fn from(mr: crate::Mr) -> Self {
        Self(Either::Soft(mr))
    }
}

impl Mr {
    /// That of the soft RNIC.
    pub fn soft(&self) -> Option<&crate::Mr> {
        self.0.soft()
    }

    /// Key for our own work requests.
    #[inline]
    pub fn lkey(&self) -> u32 {
        either!(&self.0, mr => mr.lkey())
    }

    /// The key for peers.
    #[inline]
    pub fn rkey(&self) -> u32 {
        either!(&self.0, mr => mr.rkey())
    }

    /// Address of its first byte in work requests.
    #[inline]
    pub fn addr(&self) -> u64 {
        either!(&self.0, mr => mr.addr())
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        either!(&self.0, mr => mr.len())
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As [`crate::Mr::sge`].
    #[inline]
    pub fn sge(&self, off: usize, len: usize) -> Sge {
        Sge {
            addr: self.addr().wrapping_add(off as u64),
            len: u32::try_from(len).unwrap_or(u32::MAX),
            lkey: self.lkey(),
        }
    }

    /// The whole region as one element.
    pub fn whole(&self) -> Sge {
        self.sge(0, self.len())
    }

    /// The address and key that a peer needs to reach the byte at `off`.
    #[inline]
    pub fn remote(&self, off: usize) -> RemoteAddr {
        RemoteAddr {
            addr: self.addr().wrapping_add(off as u64),
            rkey: self.rkey(),
        }
    }

    /// As [`crate::Mr::write`].
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn write(&self, off: usize, src: &[u8]) -> Result<(), MemError> {
        match &self.0 {
            Either::Soft(mr) => mr.write(off, src),
            Either::Rnic(mr) => mr.region().write(off, src),
        }
    }

    /// As [`crate::Mr::read`].
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn read(&self, off: usize, dst: &mut [u8]) -> Result<(), MemError> {
        match &self.0 {
            Either::Soft(mr) => mr.read(off, dst),
            Either::Rnic(mr) => mr.region().read(off, dst),
        }
    }

    /// A copy of `len` bytes from `off` on.
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn to_vec(&self, off: usize, len: usize) -> Result<Vec<u8>, MemError> {
        if off.checked_add(len).is_none_or(|end| end > self.len()) {
            return Err(MemError::Bounds);
        }
        let mut out = vec![0; len];
        self.read(off, &mut out)?;
        Ok(out)
    }

    /// Set `len` bytes from `off` on to `byte`.
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn fill(&self, off: usize, len: usize, byte: u8) -> Result<(), MemError> {
        match &self.0 {
            Either::Soft(mr) => mr.fill(off, len, byte),
            Either::Rnic(mr) => mr.region().fill(off, len, byte),
        }
    }

    /// As [`crate::Mr::copy_to_raw`].
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn copy_to_raw(&self, off: usize, dst: &RawMemory) -> Result<(), MemError> {
        match &self.0 {
            Either::Soft(mr) => mr.copy_to_raw(off, dst),
            Either::Rnic(mr) => mr.region().copy_to_raw(off, dst),
        }
    }

    /// As [`crate::Mr::copy_from_raw`].
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn copy_from_raw(&self, off: usize, src: &RawMemory) -> Result<(), MemError> {
        match &self.0 {
            Either::Soft(mr) => mr.copy_from_raw(off, src),
            Either::Rnic(mr) => mr.region().copy_from_raw(off, src),
        }
    }

    /// As [`crate::Mr::load_u64`].
    ///
    /// # Errors
    /// [`MemError::Bounds`], [`MemError::Misaligned`].
    pub fn load_u64(&self, off: usize) -> Result<u64, MemError> {
        match &self.0 {
            Either::Soft(mr) => mr.load_u64(off),
            Either::Rnic(mr) => mr.region().load_u64(off),
        }
    }

    /// As [`crate::Mr::load_u8`].
    ///
    /// # Errors
    /// [`MemError::Bounds`].
    pub fn load_u8(&self, off: usize) -> Result<u8, MemError> {
        match &self.0 {
            Either::Soft(mr) => mr.load_u8(off),
            Either::Rnic(mr) => mr.region().load_u8(off),
        }
    }

    /// As [`crate::Mr::read_from_file`].
    ///
    /// # Errors
    /// As there.
    pub fn read_from_file(
        &self,
        fd: impl AsFd,
        file_off: Option<u64>,
        off: usize,
        len: usize,
    ) -> io::Result<usize> {
        match &self.0 {
            Either::Soft(mr) => mr.read_from_file(fd, file_off, off, len),
            Either::Rnic(mr) => mr.region().read_from_file(fd.as_fd(), file_off, off, len),
        }
    }

    /// As [`crate::Mr::write_to_file`].
    ///
    /// # Errors
    /// As there.
    pub fn write_to_file(
        &self,
        fd: impl AsFd,
        file_off: Option<u64>,
        off: usize,
        len: usize,
    ) -> io::Result<usize> {
        match &self.0 {
            Either::Soft(mr) => mr.write_to_file(fd, file_off, off, len),
            Either::Rnic(mr) => mr.region().write_to_file(fd.as_fd(), file_off, off, len),
        }
    }

    /// As [`crate::Mr::deregister`].
    ///
    /// # Errors
    /// As there, without the region.
    pub fn deregister(self) -> Result<Option<Vec<u8>>, Error> {
        match self.0 {
            Either::Soft(mr) => mr.deregister().map_err(|(_, error)| error.into()),
            Either::Rnic(mr) => mr.deregister().map_err(|e| convert::error(&e)),
        }
    }
}
