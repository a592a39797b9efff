//! Checks of the program's memory.

use std::ffi::c_void;

use rustix::io::Errno;
#[cfg(feature = "verbs")]
use weft_sys::map;

#[cfg(feature = "verbs")]
use crate::once::ForkOnce;

/// Checks that the whole range is mapped.
///
/// # Errors
/// `EFAULT` when a page is not mapped: an error now is better than a signal later.
pub(crate) fn mapped(addr: usize, len: usize) -> Result<(), Errno> {
    const PAGES: usize = 4096;
    // SAFETY: it only reads a setting. (rustix asks the kernel's own library, which debuggers such as valgrind hide.)
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let first = addr / page;
    let Some(end) = len.checked_sub(1) else {
        return Ok(());
    };
    let last = addr.checked_add(end).ok_or(Errno::FAULT)? / page;
    let mut resident = [0_u8; PAGES];
    let mut at = first;
    while at <= last {
        let pages = (last - at + 1).min(PAGES);
        // SAFETY: it only queries addresses; the answer has a byte for each page.
        let answer = unsafe {
            libc::mincore(
                (at * page) as *mut c_void,
                pages * page,
                resident.as_mut_ptr(),
            )
        };
        if answer != 0 {
            return Err(Errno::FAULT);
        }
        at += pages;
    }
    Ok(())
}

#[cfg(feature = "verbs")]
/// Checks that a range is readable, or writable. Only its ends are checked, because the check touches the pages.
///
/// # Errors
/// `EFAULT`.
pub(crate) fn allows(addr: usize, len: usize, write: bool) -> Result<(), Errno> {
    let Some(end) = len.checked_sub(1) else {
        return Ok(());
    };
    let last = addr.checked_add(end).ok_or(Errno::FAULT)?;
    if populate(addr, write) && (addr >> 12 == last >> 12 || populate(last, write)) {
        Ok(())
    } else {
        Err(Errno::FAULT)
    }
}

#[cfg(feature = "verbs")]
/// True if the page at `addr` can be faulted in for this access. Kernels before 5.14 cannot report that; then the result is true.
fn populate(addr: usize, write: bool) -> bool {
    static KNOWN: ForkOnce<bool> = ForkOnce::new();
    let known = *KNOWN.get_or_init(|| {
        let mut here = 0_u8;
        map::populate(&raw mut here as usize, 1, true).is_ok()
    });
    !known || map::populate(addr, 1, write).is_ok()
}

#[cfg(all(test, feature = "verbs"))]
mod tests {
    use super::*;

    fn map(pages: usize, protection: libc::c_int) -> usize {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping.
        let addr =
            unsafe { libc::mmap(std::ptr::null_mut(), pages * 4096, protection, flags, -1, 0) };
        assert_ne!(addr, libc::MAP_FAILED);
        addr as usize
    }

    #[test]
    fn what_cannot_be_reached_is_refused() {
        let writable = map(3, libc::PROT_READ | libc::PROT_WRITE);
        assert_eq!(mapped(writable + 1, 8191), Ok(()));
        assert_eq!(allows(writable, 3 * 4096, true), Ok(()));
        // SAFETY: ours, and not used by others.
        unsafe { libc::munmap((writable + 4096) as *mut c_void, 4096) };
        assert_eq!(mapped(writable, 3 * 4096), Err(Errno::FAULT));
        assert_eq!(mapped(writable, 4096), Ok(()));
        assert_eq!(mapped(usize::MAX - 10, 100), Err(Errno::FAULT));
        assert_eq!(mapped(0, 0), Ok(()));

        let readable = map(1, libc::PROT_READ);
        assert_eq!(allows(readable, 4096, false), Ok(()));
        assert_eq!(allows(readable, 4096, true), Err(Errno::FAULT));
        let hidden = map(1, libc::PROT_NONE);
        assert_eq!(allows(hidden, 1, false), Err(Errno::FAULT));
        assert_eq!(allows(0, 0, true), Ok(()));
    }
}
