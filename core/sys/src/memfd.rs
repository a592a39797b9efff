//! Files of memory that two processes share (`memfd_create(2)`), and their mappings.
//!
//! A mapped file that its other owner shortens kills the reader with `SIGBUS`. So a file that came from
//! a peer is mapped only after [`check`] has seen that it can never shrink.

use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fchmod, fcntl_add_seals,
    fcntl_get_seals, fstat, fstatfs, ftruncate, memfd_create, open,
};
use rustix::mm::{
    Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap, munmap,
};
use rustix::process::{Resource, getrlimit};
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// A new file of `len` zero bytes whose size is sealed for good (`F_SEAL_SHRINK`, `F_SEAL_GROW`,
/// `F_SEAL_SEAL`), closed on exec, mode 0600. `name` is for `/proc` only.
///
/// # Errors
/// `ENOSYS` without memfds, `EFBIG` above `RLIMIT_FSIZE`, `EMFILE`, `ENOMEM`, `EINVAL` for a name that
/// is too long or has a zero byte.
pub fn create(name: &str, len: u64) -> io::Result<OwnedFd> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    within_limit(len)?;
    ftruncate(&fd, len)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// A new file of `len` zero bytes that only the returned mapping can write: a process that gets the descriptor cannot write to it or map it
/// for writing (`F_SEAL_FUTURE_WRITE`). Its size is sealed too; it is closed on exec.
///
/// # Errors
/// As [`create`], and `EINVAL` before Linux 5.1.
pub fn create_owned(name: &str, len: usize) -> io::Result<(OwnedFd, Mapping)> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    within_limit(len as u64)?;
    ftruncate(&fd, len as u64)?;
    let mapping = Mapping::new(&fd, 0, len, true)?;
    fcntl_add_seals(
        &fd,
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL,
    )?;
    Ok((fd, mapping))
}

/// A second descriptor of a memory file that cannot be written or mapped for writing. The file's mode becomes 0400, so that a process that
/// gets the descriptor cannot open it again for writing either, unless it runs as root, or as the user that made the file and changes its
/// mode back.
///
/// # Errors
/// `NotFound` without a mounted `/proc`, `EMFILE`.
pub fn reader(fd: impl AsFd) -> io::Result<OwnedFd> {
    no_second_writer(&fd)?;
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    Ok(open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Changes the file's mode to 0400: it cannot be opened again for writing, with the exceptions of [`reader`].
///
/// # Errors
/// Those of `fchmod(2)`.
pub fn no_second_writer(fd: impl AsFd) -> io::Result<()> {
    Ok(fchmod(&fd, Mode::RUSR)?)
}

/// Gives the memory behind a page-aligned range of a file back; it reads as zeros afterwards.
///
/// # Errors
/// `EPERM` when a seal forbids it, `EINVAL`, `EBADF` without the right to write.
pub fn punch(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::io::retry_on_intr(|| {
        fallocate(&fd, how, offset, len)
    })?)
}

/// Allocates the memory of the first `len` bytes of a file now, charged to this process.
///
/// # Errors
/// `ENOMEM` and `ENOSPC` if there is not enough.
pub fn fill(fd: impl AsFd, len: u64) -> io::Result<()> {
    let how = FallocateFlags::KEEP_SIZE;
    Ok(rustix::io::retry_on_intr(|| fallocate(&fd, how, 0, len))?)
}

/// A memory file that grows and never shrinks (`F_SEAL_SHRINK`, `F_SEAL_SEAL`): empty, closed on exec, mode 0600. `name` is for `/proc` only. Its descriptor
/// is one that [`is_ours_alone`] can be asked about.
///
/// # Errors
/// As [`create`], and `NotFound` without a mounted `/proc`.
pub fn create_growing(name: &str) -> io::Result<OwnedFd> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::SEAL)?;
    // The kernel counts the writers of a file that was opened by a name, but not of one from memfd_create.
    reopen(&fd, OFlags::RDWR)
}

/// A new description of an open file, with an offset and flags of its own.
///
/// # Errors
/// `NotFound` without a mounted `/proc`, and those of `open(2)`.
pub fn reopen(fd: impl AsFd, flags: OFlags) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    Ok(open(path, flags | OFlags::CLOEXEC, Mode::empty())?)
}

/// Makes a growing file at least `len` bytes long.
///
/// # Errors
/// `EFBIG` above `RLIMIT_FSIZE`, `ENOMEM`.
pub fn grow(fd: impl AsFd, len: u64) -> io::Result<()> {
    within_limit(len)?;
    match ftruncate(&fd, len) {
        // Another process has extended it.
        Err(rustix::io::Errno::PERM) if fstat(&fd)?.st_size as u64 >= len => Ok(()),
        done => Ok(done?),
    }
}

/// Whether only this description has the file open (or mapped): the kernel grants a write lease (`fcntl(2)`) only then.
///
/// # Errors
/// The errors of `F_SETLEASE`, except that the lease is refused.
pub fn is_ours_alone(fd: impl AsFd) -> io::Result<bool> {
    let set = |lease: libc::c_int| {
        // SAFETY: takes two numbers, touches no memory of ours.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_fcntl,
                fd.as_fd().as_raw_fd(),
                libc::F_SETLEASE,
                lease,
            )
        };
        if rc < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    };
    match set(libc::F_WRLCK) {
        Ok(()) => set(libc::F_UNLCK).map(|()| true),
        Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Making a file larger than `RLIMIT_FSIZE` allows would end the process (`SIGXFSZ`).
fn within_limit(len: u64) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if len > limit => Err(io::ErrorKind::FileTooLarge.into()),
        _ => Ok(()),
    }
}

/// The length of a peer's memory file, which can be mapped that far without fear of `SIGBUS`.
///
/// # Errors
/// `InvalidData` unless it is a file of memory, of plain pages, with `F_SEAL_SHRINK`.
pub fn check(fd: impl AsFd) -> io::Result<u64> {
    let seals = fcntl_get_seals(&fd).map_err(|_| bad("not a file of memory"))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(bad("its size is not sealed"));
    }
    // Touching a hole of a file of huge pages kills when the pool of those pages is empty.
    if fstatfs(&fd)?.f_type != TMPFS {
        return Err(bad("not of plain pages"));
    }
    u64::try_from(fstat(&fd)?.st_size).map_err(|_| bad("a negative size"))
}

/// As [`check`], of a file whose size can never change, and whose seals cannot either.
///
/// # Errors
/// As there.
pub fn check_sealed(fd: impl AsFd) -> io::Result<u64> {
    let seals = fcntl_get_seals(&fd).map_err(|_| bad("not a file of memory"))?;
    if !seals.contains(SealFlags::GROW | SealFlags::SEAL) {
        return Err(bad("its size is not sealed for good"));
    }
    check(fd)
}

/// Whether all memory of a file is allocated. Its owner can give it back at any time.
///
/// # Errors
/// `InvalidData` if some of it is not.
pub fn check_filled(fd: impl AsFd) -> io::Result<()> {
    let about = fstat(fd)?;
    // Blocks of 512 bytes, whatever the file system's are.
    if about.st_blocks.saturating_mul(512) < about.st_size {
        return Err(bad("it has holes"));
    }
    Ok(())
}

/// The `statfs` type of memory files (`TMPFS_MAGIC`).
const TMPFS: i64 = 0x0102_1994;

fn bad(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Bytes that are mapped (of a file always `MAP_SHARED`), unmapped on drop.
///
/// Others with the file may change the bytes at any time: access them through atomics and racing copies only.
#[derive(Debug)]
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: it is an address range that belongs to the process; using the bytes is `unsafe` anyway.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method touches the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of the file from `offset` (a multiple of the page size), for reading and, if
    /// `writable`, writing. Bytes past the end of the file cannot be touched (`SIGBUS`): see [`check`].
    ///
    /// # Errors
    /// `EINVAL` for a length of 0 or a misaligned offset, `EACCES` or `EPERM` when the descriptor or a
    /// seal forbids writing, `ENOMEM`.
    pub fn new(fd: impl AsFd, offset: u64, len: usize, writable: bool) -> io::Result<Mapping> {
        let prot = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let ptr = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                prot,
                MapFlags::SHARED,
                &fd,
                offset,
            )
        }?;
        Mapping::made(ptr, len)
    }

    /// Zeroed bytes of no file; those of a `shared` one are also those of the children of this process.
    ///
    /// # Errors
    /// `EINVAL` for a length of 0, `ENOMEM`.
    pub fn anonymous(len: usize, shared: bool) -> io::Result<Mapping> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let sharing = if shared {
            MapFlags::SHARED
        } else {
            MapFlags::PRIVATE
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let ptr = unsafe { mmap_anonymous(std::ptr::null_mut(), len, rights, sharing) }?;
        Mapping::made(ptr, len)
    }

    /// A second mapping of shared memory that the program has mapped at `addr`, a multiple of the page size.
    ///
    /// # Errors
    /// `EINVAL` if the mapping is private, `EFAULT` if there is none.
    pub fn again(addr: usize, len: usize) -> io::Result<Mapping> {
        let old = std::ptr::with_exposed_provenance_mut(addr);
        // SAFETY: a length of 0 leaves the old mapping as it is, and makes a new one at an address of the kernel's choice.
        let ptr = unsafe { mremap(old, 0, len, MremapFlags::MAYMOVE) }?;
        Mapping::made(ptr, len)
    }

    fn made(ptr: *mut c_void, len: usize) -> io::Result<Mapping> {
        let ptr = NonNull::new(ptr.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { ptr, len })
    }

    /// Gives the memory behind it back; its bytes are zeros then, in the file too.
    pub fn clear(&self) {
        // SAFETY: our own mapping; others may change its bytes at any time, and so may this.
        let _ = unsafe { madvise(self.ptr.as_ptr().cast(), self.len, Advice::LinuxRemove) };
    }

    /// A word of it, which others may change at any time.
    ///
    /// # Panics
    /// When it is not inside.
    #[allow(clippy::cast_ptr_alignment)] // a page is aligned for all
    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.len / 8);
        // SAFETY: inside the mapping, aligned, and only reached by atomics.
        unsafe { AtomicU64::from_ptr(self.ptr.as_ptr().cast::<u64>().add(index)) }
    }

    /// Makes a page-aligned range present in our page tables in one go, instead of one fault a page. Done for
    /// reading also where writes follow: the kernel then maps many pages at a time, and these can be
    /// written at once. Only advice: a kernel that does not know it (before 5.14) leaves the faults.
    pub fn populate(&self, offset: usize, len: usize) {
        if offset > self.len || len > self.len - offset {
            return;
        }
        let advice = Advice::LinuxPopulateRead;
        // SAFETY: a range of our own mapping; no byte changes.
        let _ = unsafe { madvise(self.ptr.as_ptr().add(offset).cast(), len, advice) };
    }

    /// Its first byte; `len` bytes from there stay mapped while `self` lives.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Bytes mapped; never 0.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length, and nobody may use the bytes after `self`.
        let unmapped = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}
