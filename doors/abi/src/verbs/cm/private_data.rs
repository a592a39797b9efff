//! Private data: the programs' data in connection messages.

use std::ffi::c_void;

use rustix::io::Errno;

/// Longest private data of the persona's requests, replies and rejections: the limit of an InfiniBand CM message.
pub(super) const IB_REQUEST: usize = 56;
pub(super) const IB_REPLY: usize = 196;
pub(super) const IB_REJECT: usize = 148;
/// The same of requests and answers for datagrams.
pub(super) const UD_REQUEST: usize = 180;
pub(super) const UD_REPLY: usize = 136;

/// Copies the program's data.
///
/// # Safety
/// `len` bytes at `data`.
pub(super) unsafe fn read(data: *const c_void, len: u8) -> Result<Vec<u8>, Errno> {
    if len == 0 {
        return Ok(Vec::new());
    }
    if data.is_null() {
        return Err(Errno::INVAL);
    }
    let mut copy = vec![0; usize::from(len)];
    // SAFETY: the caller's promise; the bytes are copied at once.
    unsafe { std::ptr::copy_nonoverlapping(data.cast(), copy.as_mut_ptr(), copy.len()) };
    Ok(copy)
}

/// Private data in events: InfiniBand's messages have a fixed length and are padded with zeros, as their programs expect.
pub(super) fn delivered(mut data: Vec<u8>, persona: bool, ib: usize) -> Vec<u8> {
    if persona && data.len() < ib {
        data.resize(ib, 0);
    }
    data
}
