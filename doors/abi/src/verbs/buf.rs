//! Buffers that the library allocates, regions described by a struct, and the speed of a port: calls of rdma-core since version 59.

use std::ffi::{c_int, c_uint, c_void};

use rustix::io::Errno;
use weft_sys::memfd::Mapping;

use super::mr::{ibv_reg_dmabuf_mr, ibv_reg_mr, ibv_reg_mr_iova2};
use super::object::{Kind as _, find, kind};
use super::os_errno;
use super::pd::Pd;
use super::types::{IBV_ACCESS_ZERO_BASED, Zeroed, ibv_mr, ibv_pd};
use super::users::{Held, end};
use crate::call::{pointer, run};

/// The handle of a buffer, opaque to C.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_buf {
    private: usize,
}

// SAFETY: a number.
unsafe impl Zeroed for ibv_buf {}

/// The parameters of [`ibv_reg_mr_ex`] (`<infiniband/verbs.h>` of rdma-core 65; before version 63 without `buf`).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_mr_init_attr {
    /// Bytes.
    pub length: usize,
    /// `IBV_ACCESS_*`.
    pub access: c_int,
    /// `IBV_REG_MR_MASK_*`: the valid ones of the fields below.
    pub comp_mask: u64,
    /// The address that peers and work requests use.
    pub iova: u64,
    /// The memory.
    pub addr: *mut c_void,
    /// A DMA buffer in place of `addr`.
    pub fd: c_int,
    /// The offset of the region in it.
    pub fd_offset: u64,
    /// A handle of [processing hints](https://docs.kernel.org/PCI/tph.html).
    pub dmah: *mut c_void,
    /// The buffer that `addr` is in.
    pub buf: *mut ibv_buf,
}

const MASK_IOVA: u64 = 1 << 0;
const MASK_ADDR: u64 = 1 << 1;
const MASK_FD: u64 = 1 << 2;
const MASK_FD_OFFSET: u64 = 1 << 3;
const MASK_DMAH: u64 = 1 << 4;
const MASK_BUF: u64 = 1 << 5;

/// A buffer: whole pages, unmapped when it is freed.
struct Buf {
    memory: Mapping,
    /// The domain that it was allocated for.
    pd: usize,
    #[allow(dead_code)] // until it is dropped
    held: Held,
}

kind!(Buf as ibv_buf, 0x6275_6666);

/// `ibv_alloc_buf`
///
/// # Safety
/// As its manual page says: room for a pointer at `buf`.
pub unsafe fn ibv_alloc_buf(pd: *mut ibv_pd, size: usize, buf: *mut *mut ibv_buf) -> *mut c_void {
    pointer(|| {
        let of = find::<Pd>(pd)?;
        if size == 0 || buf.is_null() {
            return Err(Errno::INVAL);
        }
        let memory = Mapping::anonymous(size, false).map_err(|error| os_errno(&error))?;
        let addr = memory.as_ptr().cast();
        let body = Buf {
            memory,
            pd: pd as usize,
            held: of.users.hold(),
        };
        let made = Buf::pool().make(body, |_, _| {})?;
        // SAFETY: the caller's promise.
        unsafe { buf.write(made.handle()) };
        Ok(addr)
    })
}

/// `ibv_free_buf`. Regions in the buffer must be deregistered first.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_free_buf(buf: *mut ibv_buf) {
    end::<Buf>(buf);
}

/// `ibv_export_buf_dmabuf_fd`: these buffers are ordinary memory, which no DMA buffer is behind.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_export_buf_dmabuf_fd(buf: *mut ibv_buf) -> c_int {
    run(|| {
        find::<Buf>(buf)?;
        Err(Errno::NODATA)
    })
}

/// Checks that a range is within a buffer of this domain.
fn within(buf: *mut ibv_buf, pd: *mut ibv_pd, addr: *mut c_void, len: usize) -> Result<(), Errno> {
    let buf = find::<Buf>(buf)?;
    let at = (addr as usize)
        .checked_sub(buf.memory.as_ptr() as usize)
        .ok_or(Errno::INVAL)?;
    let end = at.checked_add(len).ok_or(Errno::INVAL)?;
    if buf.pd == pd as usize && end <= buf.memory.len() {
        Ok(())
    } else {
        Err(Errno::INVAL)
    }
}

/// `ibv_reg_buf_mr`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_reg_buf_mr(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    pointer(|| {
        within(buf, pd, addr, length)?;
        // SAFETY: the caller's promise.
        Ok(unsafe { ibv_reg_mr(pd, addr, length, access) })
    })
}

/// `ibv_reg_mr_ex`
///
/// # Safety
/// As its manual page says: an attribute that has the fields of its mask.
pub unsafe fn ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
    const KNOWN: u64 = MASK_IOVA | MASK_ADDR | MASK_FD | MASK_FD_OFFSET | MASK_DMAH | MASK_BUF;
    pointer(|| {
        if attr.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise, field by field: programs of an earlier version have a shorter struct.
        let (length, access, mask) = unsafe { ((*attr).length, (*attr).access, (*attr).comp_mask) };
        if mask & !KNOWN != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let (in_memory, in_file) = (mask & MASK_ADDR != 0, mask & MASK_FD != 0);
        if in_memory == in_file
            || (mask & MASK_FD_OFFSET != 0 && !in_file)
            || (mask & MASK_BUF != 0 && !in_memory)
        {
            return Err(Errno::INVAL);
        }
        if mask & MASK_DMAH != 0 {
            // No processing hints can have been allocated.
            return Err(Errno::OPNOTSUPP);
        }
        // SAFETY: as above.
        let (iova, addr) = unsafe { ((*attr).iova, (*attr).addr) };
        if in_file {
            // SAFETY: as above.
            let (fd, offset) = unsafe { ((*attr).fd, (*attr).fd_offset) };
            // SAFETY: the caller's promise.
            return Ok(unsafe { ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access) });
        }
        if mask & MASK_BUF != 0 {
            // SAFETY: as above; this field is there.
            within(unsafe { (*attr).buf }, pd, addr, length)?;
        }
        let iova = if mask & MASK_IOVA != 0 {
            iova
        } else if access as c_uint & IBV_ACCESS_ZERO_BASED != 0 {
            0
        } else {
            addr as u64
        };
        // SAFETY: the caller's promise.
        Ok(unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access as c_uint) })
    })
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// As a C compiler lays it out on 64-bit machines with the header of rdma-core 65.
    #[test]
    fn the_attribute_is_laid_out_as_c_has_it() {
        assert_eq!(size_of::<ibv_mr_init_attr>(), 72);
        assert_eq!(offset_of!(ibv_mr_init_attr, comp_mask), 16);
        assert_eq!(offset_of!(ibv_mr_init_attr, addr), 32);
        assert_eq!(offset_of!(ibv_mr_init_attr, fd_offset), 48);
        assert_eq!(offset_of!(ibv_mr_init_attr, buf), 64);
    }
}
