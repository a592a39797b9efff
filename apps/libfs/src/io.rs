//! Reading, writing and everything else on descriptors.
//!
//! # Safety
//!
//! See the crate's. The program promises that its buffers are valid for the length of the call.

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd};

use libc::{iovec, off_t, size_t, ssize_t};
use weft_fs::name::Endpoint;
use weft_fs::wire::{Flags, Op, Request};
use weft_fs::{Errno, Error};
use weft_verbs::RawMemory;

use weft_sys::{
    interpose,
    next::{errno, set_errno},
    real,
};

use crate::table::{Entry, Kind, kind, lock, number, table};
use crate::{fail, link};

/// Bytes of one call, as the kernel limits them.
const MOST: usize = 0x7fff_f000;

fn is_remote(fd: c_int) -> bool {
    kind(fd) == Kind::Remote
}

fn count(done: Result<usize, Error>) -> ssize_t {
    match done {
        Ok(n) => n as ssize_t,
        Err(e) => fail(&e) as ssize_t,
    }
}

/// The offset that the kernel keeps for a placeholder.
fn tell(fd: c_int) -> off_t {
    // SAFETY: numbers.
    unsafe { real!(lseek64(c_int, off_t, c_int) -> off_t)(fd, 0, libc::SEEK_CUR) }
}

fn seek(fd: c_int, off: off_t) -> off_t {
    // SAFETY: numbers.
    unsafe { real!(lseek64(c_int, off_t, c_int) -> off_t)(fd, off, libc::SEEK_SET) }
}

/// Memory of the program for the length of a call.
///
/// # Safety
/// `buf` is the program's memory and stays valid until the call returns.
unsafe fn memory(buf: *const c_void, len: usize) -> Result<RawMemory, Error> {
    // SAFETY: the caller's promise.
    unsafe { RawMemory::new(buf.cast_mut().cast(), len.min(MOST)) }.ok_or(Errno::FAULT.into())
}

/// `iov` as a slice.
///
/// # Safety
/// As for `readv(2)`.
unsafe fn parts<'a>(iov: *const iovec, count: c_int) -> Result<&'a [iovec], Error> {
    let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    if count > 1024 {
        return Err(Errno::INVAL.into());
    }
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(iov, count) })
}

/// Reads into several buffers.
///
/// # Safety
/// They are the program's.
unsafe fn read_parts(entry: &Entry, parts: &[iovec], off: u64) -> Result<usize, Error> {
    let mut sum = 0;
    for part in parts {
        // SAFETY: the caller's promise.
        let memory = unsafe { memory(part.iov_base, part.iov_len) }?;
        if memory.is_empty() {
            continue;
        }
        match entry.file.pread_raw(&memory, off + sum as u64) {
            Ok(n) => {
                sum += n;
                if n < memory.len() {
                    break;
                }
            }
            Err(_) if sum > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(sum)
}

/// Writes several buffers; at the end where `off` is `None`.
///
/// # Safety
/// As [`read_parts`].
unsafe fn write_parts(entry: &Entry, parts: &[iovec], off: Option<u64>) -> Result<usize, Error> {
    let mut sum = 0;
    for part in parts {
        // SAFETY: the caller's promise.
        let memory = unsafe { memory(part.iov_base, part.iov_len) }?;
        if memory.is_empty() {
            continue;
        }
        let done = match off {
            Some(off) => entry.file.pwrite_raw(&memory, off + sum as u64),
            None => entry.file.append_raw(&memory),
        };
        match done {
            Ok(n) => sum += n,
            Err(_) if sum > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(sum)
}

/// # Safety
/// As [`read_parts`].
pub(crate) unsafe fn read_at_offset(fd: c_int, parts: &[iovec]) -> Result<usize, Error> {
    let entry = table().entry(fd)?;
    let _offset = entry.offset(fd)?;
    let off = u64::try_from(tell(fd)).map_err(|_| Errno::BADF)?;
    // SAFETY: the caller's promise.
    let n = unsafe { read_parts(&entry, parts, off) }?;
    seek(fd, (off + n as u64) as off_t);
    Ok(n)
}

/// # Safety
/// As [`read_parts`].
pub(crate) unsafe fn write_at_offset(fd: c_int, parts: &[iovec]) -> Result<usize, Error> {
    let entry = table().entry(fd)?;
    if entry.flags.has(Flags::APPEND) {
        let mut offset = lock(&entry.offset);
        // SAFETY: the caller's promise.
        let n = unsafe { write_parts(&entry, parts, None) }?;
        *offset |= n > 0;
        return Ok(n);
    }
    let _offset = entry.offset(fd)?;
    let off = u64::try_from(tell(fd)).map_err(|_| Errno::BADF)?;
    // SAFETY: the caller's promise.
    let n = unsafe { write_parts(&entry, parts, Some(off)) }?;
    seek(fd, (off + n as u64) as off_t);
    Ok(n)
}

/// # Safety
/// As [`read_parts`].
unsafe fn at(fd: c_int, parts: &[iovec], off: off_t, write: bool) -> Result<usize, Error> {
    let off = u64::try_from(off).map_err(|_| Errno::INVAL)?;
    let entry = table().entry(fd)?;
    // SAFETY: the caller's promise.
    unsafe {
        match (write, entry.flags.has(Flags::APPEND)) {
            (false, _) => read_parts(&entry, parts, off),
            (true, false) => write_parts(&entry, parts, Some(off)),
            (true, true) => write_parts(&entry, parts, None),
        }
    }
}

fn one(buf: *const c_void, len: size_t) -> [iovec; 1] {
    [iovec {
        iov_base: buf.cast_mut(),
        iov_len: len,
    }]
}

/// The offset after `lseek(2)`.
fn move_to(fd: c_int, off: off_t, whence: c_int) -> Result<off_t, Error> {
    let entry = table().entry(fd)?;
    let _offset = entry.offset(fd)?;
    let size = || entry.file.stat().map(|attr| attr.size as off_t);
    let to = match whence {
        libc::SEEK_SET => off,
        libc::SEEK_CUR => tell(fd).checked_add(off).ok_or(Errno::OVERFLOW)?,
        libc::SEEK_END => size()?.checked_add(off).ok_or(Errno::OVERFLOW)?,
        libc::SEEK_DATA | libc::SEEK_HOLE => {
            let size = size()?;
            if off < 0 || off >= size {
                return Err(Errno::NXIO.into());
            }
            if whence == libc::SEEK_DATA { off } else { size }
        }
        _ => return Err(Errno::INVAL.into()),
    };
    if to < 0 {
        return Err(Errno::INVAL.into());
    }
    let to = seek(fd, to);
    if to < 0 {
        return Err(Errno::INVAL.into());
    }
    Ok(to)
}

/// `ftruncate(2)` of a remote or an ordinary file.
pub(crate) fn truncate_fd(fd: c_int, len: off_t) -> c_int {
    let done = if is_remote(fd) {
        u64::try_from(len)
            .map_err(|_| Errno::INVAL.into())
            .and_then(|len| table().entry(fd)?.file.truncate(len))
    } else {
        // SAFETY: numbers.
        let cut = unsafe { real!(ftruncate(c_int, off_t) -> c_int)(fd, len) };
        // A buffer's memory never shrinks: it gets a new one.
        if cut == 0 || kind(fd) != Kind::Local || errno() != libc::EPERM {
            return cut;
        }
        truncate_local(fd, len as u64)
    };
    match done {
        Ok(()) => 0,
        Err(e) => fail(&e),
    }
}

/// A new generation of a buffer of this host, in the place of the old one under all its descriptors.
fn truncate_local(fd: c_int, len: u64) -> Result<(), Error> {
    let table = table();
    let (path, ino) = table.local(fd).ok_or(Errno::PERM)?;
    // The server truncates by name, and the name may be another buffer's by now.
    if link::attr(&path).map_err(Error::of_reopening)?.ino != ino {
        return Err(Errno::STALE.into());
    }
    let request = Request {
        size: len,
        ..Request::named(Op::Truncate, &path.name)
    };
    let Some((_, Some(file))) = link::here(&path, &request)? else {
        return Err(Errno::STALE.into());
    };
    let new = number(file);
    // SAFETY: it came from the server, and nothing else has it.
    let _new = unsafe { OwnedFd::from_raw_fd(new) };
    Ok(follow(&path.endpoint, ino, new)?)
}

/// Puts a new generation in the place of the old one under all descriptors of a buffer of this host.
///
/// # Errors
/// That of opening it, and then some descriptors have the old one.
pub(crate) fn follow(endpoint: &Endpoint, ino: u64, new: c_int) -> Result<(), Errno> {
    for old in table().locals(endpoint, ino) {
        // SAFETY: numbers.
        unsafe {
            let how = libc::fcntl(old, libc::F_GETFL);
            let cloexec = libc::fcntl(old, libc::F_GETFD) & libc::FD_CLOEXEC;
            let at = libc::lseek(old, 0, libc::SEEK_CUR);
            let name = format!("/proc/self/fd/{new}\0");
            let open = real!(open(*const c_char, c_int, c_uint) -> c_int);
            let kept = how & (libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK);
            let fresh = open(name.as_ptr().cast(), kept | libc::O_CLOEXEC, 0);
            if fresh < 0 {
                return Err(Errno::from_raw_os_error(errno()));
            }
            {
                let how = if cloexec != 0 { libc::O_CLOEXEC } else { 0 };
                real!(dup3(c_int, c_int, c_int) -> c_int)(fresh, old, how);
                libc::lseek(old, at, libc::SEEK_SET);
                drop(OwnedFd::from_raw_fd(fresh));
            }
        }
    }
    Ok(())
}

fn sync(fd: c_int) -> c_int {
    match table().entry(fd).and_then(|entry| {
        if entry.flags.has(Flags::WRITE) {
            entry.file.sync()
        } else {
            Ok(())
        }
    }) {
        Ok(()) => 0,
        Err(e) => fail(&e),
    }
}

fn allocate(fd: c_int, off: off_t, len: off_t) -> Result<(), Error> {
    let end = off.checked_add(len).filter(|_| off >= 0 && len > 0);
    let end = end.ok_or(Errno::INVAL)?;
    table().entry(fd)?.file.grow(end as u64)
}

/// Makes a copy of a remote buffer in memory: writes to it and writes by others are not visible on the other side.
fn map(
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    off: off_t,
) -> Result<*mut c_void, Error> {
    if flags & libc::MAP_SHARED != 0 && prot & libc::PROT_WRITE != 0 {
        return Err(Errno::NODEV.into());
    }
    let off = u64::try_from(off).map_err(|_| Errno::INVAL)?;
    let entry = table().entry(fd)?;
    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let open = libc::PROT_READ | libc::PROT_WRITE;
    if flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0 {
        return Err(Errno::NODEV.into());
    }
    // SAFETY: new memory at an address of the kernel's choice.
    let at = unsafe { libc::syscall(libc::SYS_mmap, 0, len, open, how, -1, 0) };
    if at == -1 {
        return Err(Errno::NOMEM.into());
    }
    let at = at as *mut c_void;
    // SAFETY: it was mapped just now, and nothing else uses it yet.
    let filled = unsafe { read_parts(&entry, &one(at, len), off) };
    // SAFETY: as above.
    unsafe {
        if let Err(e) = filled {
            libc::munmap(at, len);
            return Err(e);
        }
        libc::mprotect(at, len, prot);
    }
    Ok(at)
}

macro_rules! positioned {
    ($($read:ident, $write:ident, $readv:ident, $writev:ident;)*) => { interpose! {"C" $(
        fn $read(fd: c_int, buf: *mut c_void, len: size_t, off: off_t) -> ssize_t {
            if is_remote(fd) { return count(at(fd, &one(buf, len), off, false)); }
            real!($read(c_int, *mut c_void, size_t, off_t) -> ssize_t)(fd, buf, len, off)
        }
        fn $write(fd: c_int, buf: *const c_void, len: size_t, off: off_t) -> ssize_t {
            if is_remote(fd) { return count(at(fd, &one(buf, len), off, true)); }
            real!($write(c_int, *const c_void, size_t, off_t) -> ssize_t)(fd, buf, len, off)
        }
        fn $readv(fd: c_int, iov: *const iovec, n: c_int, off: off_t) -> ssize_t {
            if is_remote(fd) { return count(parts(iov, n).and_then(|iov| at(fd, iov, off, false))); }
            real!($readv(c_int, *const iovec, c_int, off_t) -> ssize_t)(fd, iov, n, off)
        }
        fn $writev(fd: c_int, iov: *const iovec, n: c_int, off: off_t) -> ssize_t {
            if is_remote(fd) { return count(parts(iov, n).and_then(|iov| at(fd, iov, off, true))); }
            real!($writev(c_int, *const iovec, c_int, off_t) -> ssize_t)(fd, iov, n, off)
        }
    )*} };
}

positioned! {
    pread, pwrite, preadv, pwritev;
    pread64, pwrite64, preadv64, pwritev64;
}

interpose! {

    "C"
    fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
        if is_remote(fd) { return count(read_at_offset(fd, &one(buf, len))); }
        real!(read(c_int, *mut c_void, size_t) -> ssize_t)(fd, buf, len)
    }
    fn __read_chk(fd: c_int, buf: *mut c_void, len: size_t, room: size_t) -> ssize_t {
        if is_remote(fd) && len <= room { return count(read_at_offset(fd, &one(buf, len))); }
        real!(__read_chk(c_int, *mut c_void, size_t, size_t) -> ssize_t)(fd, buf, len, room)
    }
    fn __pread_chk(fd: c_int, buf: *mut c_void, len: size_t, off: off_t, room: size_t) -> ssize_t {
        if is_remote(fd) && len <= room { return count(at(fd, &one(buf, len), off, false)); }
        real!(__pread_chk(c_int, *mut c_void, size_t, off_t, size_t) -> ssize_t)(fd, buf, len, off, room)
    }
    fn __pread64_chk(fd: c_int, buf: *mut c_void, len: size_t, off: off_t, room: size_t) -> ssize_t {
        if is_remote(fd) && len <= room { return count(at(fd, &one(buf, len), off, false)); }
        real!(__pread64_chk(c_int, *mut c_void, size_t, off_t, size_t) -> ssize_t)(fd, buf, len, off, room)
    }
    fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
        if is_remote(fd) { return count(write_at_offset(fd, &one(buf, len))); }
        real!(write(c_int, *const c_void, size_t) -> ssize_t)(fd, buf, len)
    }
    fn readv(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
        if is_remote(fd) { return count(parts(iov, n).and_then(|iov| read_at_offset(fd, iov))); }
        real!(readv(c_int, *const iovec, c_int) -> ssize_t)(fd, iov, n)
    }
    fn writev(fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
        if is_remote(fd) { return count(parts(iov, n).and_then(|iov| write_at_offset(fd, iov))); }
        real!(writev(c_int, *const iovec, c_int) -> ssize_t)(fd, iov, n)
    }
    fn lseek(fd: c_int, off: off_t, whence: c_int) -> off_t {
        if is_remote(fd) {
            return move_to(fd, off, whence).unwrap_or_else(|e| fail(&e).into());
        }
        real!(lseek(c_int, off_t, c_int) -> off_t)(fd, off, whence)
    }
    fn lseek64(fd: c_int, off: off_t, whence: c_int) -> off_t {
        if is_remote(fd) {
            return move_to(fd, off, whence).unwrap_or_else(|e| fail(&e).into());
        }
        real!(lseek64(c_int, off_t, c_int) -> off_t)(fd, off, whence)
    }
    fn ftruncate(fd: c_int, len: off_t) -> c_int {
        if kind(fd) != Kind::Plain {
            return truncate_fd(fd, len);
        }
        real!(ftruncate(c_int, off_t) -> c_int)(fd, len)
    }
    fn ftruncate64(fd: c_int, len: off_t) -> c_int {
        if kind(fd) != Kind::Plain {
            return truncate_fd(fd, len);
        }
        real!(ftruncate64(c_int, off_t) -> c_int)(fd, len)
    }
    fn fsync(fd: c_int) -> c_int {
        if is_remote(fd) { return sync(fd); }
        real!(fsync(c_int) -> c_int)(fd)
    }
    fn fdatasync(fd: c_int) -> c_int {
        if is_remote(fd) { return sync(fd); }
        real!(fdatasync(c_int) -> c_int)(fd)
    }
    fn fallocate(fd: c_int, mode: c_int, off: off_t, len: off_t) -> c_int {
        if is_remote(fd) {
            let done = if mode == 0 { allocate(fd, off, len) } else { Err(Errno::OPNOTSUPP.into()) };
            return done.map_or_else(|e| fail(&e), |()| 0);
        }
        real!(fallocate(c_int, c_int, off_t, off_t) -> c_int)(fd, mode, off, len)
    }
    fn fallocate64(fd: c_int, mode: c_int, off: off_t, len: off_t) -> c_int {
        fallocate(fd, mode, off, len)
    }
    fn posix_fallocate(fd: c_int, off: off_t, len: off_t) -> c_int {
        if is_remote(fd) {
            return allocate(fd, off, len).map_or_else(|e| e.errno().raw_os_error(), |()| 0);
        }
        real!(posix_fallocate(c_int, off_t, off_t) -> c_int)(fd, off, len)
    }
    fn posix_fallocate64(fd: c_int, off: off_t, len: off_t) -> c_int {
        posix_fallocate(fd, off, len)
    }
    fn sendfile(out: c_int, from: c_int, off: *mut off_t, len: size_t) -> ssize_t {
        if is_remote(out) || is_remote(from) {
            set_errno(libc::EINVAL);
            return -1;
        }
        real!(sendfile(c_int, c_int, *mut off_t, size_t) -> ssize_t)(out, from, off, len)
    }
    fn sendfile64(out: c_int, from: c_int, off: *mut off_t, len: size_t) -> ssize_t {
        sendfile(out, from, off, len)
    }
    fn copy_file_range(from: c_int, a: *mut off_t, to: c_int, b: *mut off_t, len: size_t, how: c_uint) -> ssize_t {
        if is_remote(from) || is_remote(to) {
            set_errno(libc::EXDEV);
            return -1;
        }
        real!(copy_file_range(c_int, *mut off_t, c_int, *mut off_t, size_t, c_uint) -> ssize_t)(from, a, to, b, len, how)
    }
    fn splice(from: c_int, a: *mut off_t, to: c_int, b: *mut off_t, len: size_t, how: c_uint) -> ssize_t {
        if is_remote(from) || is_remote(to) {
            set_errno(libc::EINVAL);
            return -1;
        }
        real!(splice(c_int, *mut off_t, c_int, *mut off_t, size_t, c_uint) -> ssize_t)(from, a, to, b, len, how)
    }
    fn mmap(addr: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, off: off_t) -> *mut c_void {
        if fd >= 0 && is_remote(fd) && flags & libc::MAP_ANONYMOUS == 0 {
            return map(len, prot, flags, fd, off).unwrap_or_else(|e| {
                fail(&e);
                libc::MAP_FAILED
            });
        }
        // The system call: the C library may map before its functions can be looked for.
        libc::syscall(libc::SYS_mmap, addr, len, prot as c_long, flags as c_long, fd as c_long, off) as *mut c_void
    }
    fn mmap64(addr: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, off: off_t) -> *mut c_void {
        mmap(addr, len, prot, flags, fd, off)
    }
    fn _exit(code: c_int) -> () {
        table().flush();
        // A number; it does not come back.
        real!(_exit(c_int) -> ())(code);
    }
    fn execve(path: *const c_char, argv: *const *const c_char, env: *const *const c_char) -> c_int {
        // Bytes that are still buffered here would be lost.
        table().flush();
        real!(execve(*const c_char, *const *const c_char, *const *const c_char) -> c_int)(path, argv, env)
    }
    fn execvp(path: *const c_char, argv: *const *const c_char) -> c_int {
        table().flush();
        real!(execvp(*const c_char, *const *const c_char) -> c_int)(path, argv)
    }
    fn execv(path: *const c_char, argv: *const *const c_char) -> c_int {
        table().flush();
        real!(execv(*const c_char, *const *const c_char) -> c_int)(path, argv)
    }
}
