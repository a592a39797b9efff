//! Calls that unmap memory, or have the kernel write to it: protected memory in their range is settled first. Only under `--mode azsdp`.
//!
//! # Safety
//!
//! Each call is as safe as its manual page says. The mapping calls are made directly: an allocator may come here before the loader can be asked for a name.

use libc::{c_int, c_void, iovec, off_t, size_t, ssize_t};
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use weft_sys::protect;

use crate::iov::vector;
use crate::next;

static ACTIVE: AtomicBool = AtomicBool::new(false);

pub(super) fn start() {
    if std::env::var_os(weft_run::lend::SHARED).is_some_and(|value| value == "trust") {
        protect::trust_others();
    }
    // The C library unmaps freed memory by internal calls that this library does not see. These options make it keep the memory.
    // SAFETY: the arguments are numbers.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
        libc::mallopt(libc::M_TOP_PAD, 64 << 20);
    }
    ACTIVE.store(true, Relaxed);
}

pub(crate) fn is_active() -> bool {
    ACTIVE.load(Relaxed)
}

/// Waits until nothing of the range is under way, and makes it writable.
#[inline]
pub(crate) fn settle(start: *const c_void, len: usize) {
    if ACTIVE.load(Relaxed) {
        settle_now(start, len);
    }
}

#[cold]
fn settle_now(start: *const c_void, len: usize) {
    let errno = crate::errno();
    protect::settle(start.cast(), len);
    crate::set_errno(errno);
}

/// The same for a vector.
#[inline]
pub(crate) fn settle_all(iov: &[iovec]) {
    if ACTIVE.load(Relaxed) {
        for one in iov {
            settle_now(one.iov_base, one.iov_len);
        }
    }
}

fn result(made: rustix::io::Result<()>) -> c_int {
    match made {
        Ok(()) => 0,
        Err(errno) => {
            crate::set_errno(errno.raw_os_error());
            -1
        }
    }
}

fn address(made: rustix::io::Result<*mut c_void>) -> *mut c_void {
    made.unwrap_or_else(|errno| {
        crate::set_errno(errno.raw_os_error());
        libc::MAP_FAILED
    })
}

unsafe fn map(
    at: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    if flags & libc::MAP_FIXED != 0 {
        settle(at, len);
    }
    let prot = ProtFlags::from_bits_retain(prot as u32);
    let kind = MapFlags::from_bits_retain(flags as u32);
    let make = || {
        // SAFETY: the caller's promise.
        unsafe {
            if flags & libc::MAP_ANONYMOUS != 0 {
                return rustix::mm::mmap_anonymous(at, len, prot, kind);
            }
            if fd < 0 {
                return Err(rustix::io::Errno::BADF);
            }
            let fd = BorrowedFd::borrow_raw(fd);
            rustix::mm::mmap(at, len, prot, kind, fd, offset as u64)
        }
    };
    let shared = ACTIVE.load(Relaxed) && flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
    if shared && flags & libc::MAP_ANONYMOUS != 0 {
        let mut made = Err(rustix::io::Errno::INVAL);
        protect::made_shared(|| {
            made = make();
            made.ok().map(|at| at.cast_const().cast())
        });
        return address(made);
    }
    let made = make();
    if shared {
        renamed();
    }
    address(made)
}

/// Must be called before the program gets the result of a call that may make a shared mapping writable by another name.
fn renamed() {
    if ACTIVE.load(Relaxed) {
        let errno = crate::errno();
        protect::settle_shared();
        crate::set_errno(errno);
    }
}

/// Memory that others can have is not lent while this lives: the process forks.
pub(crate) struct Sharing(());

impl Sharing {
    pub(crate) fn begin() -> Option<Sharing> {
        if !ACTIVE.load(Relaxed) {
            return None;
        }
        let errno = crate::errno();
        protect::begin_sharing();
        crate::set_errno(errno);
        Some(Sharing(()))
    }
}

impl Drop for Sharing {
    fn drop(&mut self) {
        protect::end_sharing();
    }
}

weft_sys::interpose! {
    "C-unwind"

    fn mmap(at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void {
        map(at, len, prot, flags, fd, offset)
    }

    fn mmap64(at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void {
        map(at, len, prot, flags, fd, offset)
    }

    fn munmap(at: *mut c_void, len: size_t) -> c_int {
        settle(at, len);
        result(rustix::mm::munmap(at, len))
    }

    fn mremap(at: *mut c_void, old: size_t, new: size_t, flags: c_int, to: *mut c_void) -> *mut c_void {
        // From 0 bytes on, it makes another mapping of the same memory, with the rights of now.
        settle(at, if old == 0 { new } else { old });
        let made = if flags & libc::MREMAP_FIXED != 0 {
            settle(to, new);
            let flags = MremapFlags::from_bits_retain((flags & !libc::MREMAP_FIXED) as u32);
            rustix::mm::mremap_fixed(at, old, new, flags, to)
        } else {
            rustix::mm::mremap(at, old, new, MremapFlags::from_bits_retain(flags as u32))
        };
        renamed();
        address(made)
    }

    fn mprotect(at: *mut c_void, len: size_t, prot: c_int) -> c_int {
        settle(at, len);
        let made = rustix::mm::mprotect(at, len, MprotectFlags::from_bits_retain(prot as u32));
        if prot & libc::PROT_WRITE != 0 { renamed(); }
        result(made)
    }

    fn remap_file_pages(at: *mut c_void, len: size_t, prot: c_int, page: size_t, flags: c_int) -> c_int {
        settle(at, len);
        let made = next::remap_file_pages(at, len, prot, page, flags);
        renamed();
        made
    }

    fn shmat(segment: c_int, at: *const c_void, flags: c_int) -> *mut c_void {
        // How long it is, and so what it replaces, is the segment's matter.
        if flags & libc::SHM_REMAP != 0 { settle(std::ptr::null(), usize::MAX); }
        let made = next::shmat(segment, at, flags);
        renamed();
        made
    }

    fn shmdt(at: *const c_void) -> c_int {
        renamed();
        next::shmdt(at)
    }

    fn madvise(at: *mut c_void, len: size_t, advice: c_int) -> c_int {
        if !ACTIVE.load(Relaxed) {
            return next::madvise(at, len, advice);
        }
        settle_now(at, len);
        match advice {
            libc::MADV_DONTNEED => result(rustix::mm::madvise(at, len, Advice::LinuxDontNeed)),
            _ => next::madvise(at, len, advice),
        }
    }

    fn malloc_trim(pad: size_t) -> c_int {
        // It discards freed pages by internal calls, also protected ones that a peer has still to fetch.
        if is_active() { return 0; }
        next::malloc_trim(pad)
    }

    fn fread(to: *mut c_void, size: size_t, n: size_t, file: *mut libc::FILE) -> size_t {
        settle(to, size.saturating_mul(n));
        next::fread(to, size, n, file)
    }

    fn fread_unlocked(to: *mut c_void, size: size_t, n: size_t, file: *mut libc::FILE) -> size_t {
        settle(to, size.saturating_mul(n));
        next::fread_unlocked(to, size, n, file)
    }

    fn __fread_chk(to: *mut c_void, room: size_t, size: size_t, n: size_t, file: *mut libc::FILE) -> size_t {
        if size.saturating_mul(n) > room { libc::abort(); }
        fread(to, size, n, file)
    }

    fn pread(fd: c_int, to: *mut c_void, n: size_t, offset: off_t) -> ssize_t {
        settle(to, n);
        next::pread64(fd, to, n, offset)
    }

    fn pread64(fd: c_int, to: *mut c_void, n: size_t, offset: off_t) -> ssize_t {
        settle(to, n);
        next::pread64(fd, to, n, offset)
    }

    fn __pread_chk(fd: c_int, to: *mut c_void, n: size_t, offset: off_t, room: size_t) -> ssize_t {
        if n > room { libc::abort(); }
        pread64(fd, to, n, offset)
    }

    fn __pread64_chk(fd: c_int, to: *mut c_void, n: size_t, offset: off_t, room: size_t) -> ssize_t {
        if n > room { libc::abort(); }
        pread64(fd, to, n, offset)
    }

    fn preadv(fd: c_int, iov: *const iovec, n: c_int, offset: off_t) -> ssize_t {
        if let Some(list) = vector(iov, n as usize) { settle_all(list); }
        next::preadv64(fd, iov, n, offset)
    }

    fn preadv64(fd: c_int, iov: *const iovec, n: c_int, offset: off_t) -> ssize_t {
        if let Some(list) = vector(iov, n as usize) { settle_all(list); }
        next::preadv64(fd, iov, n, offset)
    }
}
