//! `FILE` over remote buffers: the C library's internal calls do not pass through this library, so such a stream calls ours (`fopencookie(3)`).
//!
//! # Safety
//!
//! See the crate's. A cookie is a [`Stream`] that its close function frees.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

use libc::{FILE, off64_t, size_t, ssize_t};

use weft_sys::{interpose, next::set_errno, real};

use crate::table::{Kind, kind, lock};
use crate::{bytes, resolve};

#[repr(C)]
struct Functions {
    read: Option<unsafe extern "C" fn(*mut c_void, *mut c_char, size_t) -> ssize_t>,
    write: Option<unsafe extern "C" fn(*mut c_void, *const c_char, size_t) -> ssize_t>,
    seek: Option<unsafe extern "C" fn(*mut c_void, *mut off64_t, c_int) -> c_int>,
    close: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
    static mut stdin: *mut FILE;
    static mut stdout: *mut FILE;
    static mut stderr: *mut FILE;
}

struct Stream {
    fd: c_int,
    /// Closing the stream closes the descriptor.
    owns: bool,
}

/// # Safety
/// A cookie of ours.
unsafe fn stream<'a>(cookie: *mut c_void) -> &'a Stream {
    // SAFETY: the caller's promise.
    unsafe { &*cookie.cast::<Stream>() }
}

unsafe extern "C" fn cookie_read(cookie: *mut c_void, buf: *mut c_char, len: size_t) -> ssize_t {
    // SAFETY: the C library's promise.
    unsafe { crate::io::read(stream(cookie).fd, buf.cast(), len) }
}

unsafe extern "C" fn cookie_write(cookie: *mut c_void, buf: *const c_char, len: size_t) -> ssize_t {
    // SAFETY: as above. Zero is how this function says that it failed.
    unsafe { crate::io::write(stream(cookie).fd, buf.cast(), len).max(0) }
}

unsafe extern "C" fn cookie_seek(cookie: *mut c_void, off: *mut off64_t, whence: c_int) -> c_int {
    // SAFETY: as above.
    unsafe {
        let to = crate::io::lseek64(stream(cookie).fd, *off, whence);
        if to < 0 {
            return -1;
        }
        *off = to;
    }
    0
}

unsafe extern "C" fn cookie_close(cookie: *mut c_void) -> c_int {
    // SAFETY: as above; it was made by `over`, and is not used any more.
    let stream = unsafe { Box::from_raw(cookie.cast::<Stream>()) };
    if stream.owns {
        // SAFETY: the stream's own.
        return unsafe { crate::open::close(stream.fd) };
    }
    0
}

/// Our streams and their descriptors, for callers that ask for one; the C library knows none.
static STREAMS: LazyLock<Mutex<HashMap<usize, c_int>>> = LazyLock::new(Mutex::default);
static OPEN: AtomicUsize = AtomicUsize::new(0);

pub(crate) fn descriptor(file: *mut FILE) -> Option<c_int> {
    if OPEN.load(Ordering::Acquire) == 0 {
        return None;
    }
    lock(&STREAMS).get(&file.addr()).copied()
}

fn forget(file: *mut FILE) {
    if OPEN.load(Ordering::Acquire) > 0 && lock(&STREAMS).remove(&file.addr()).is_some() {
        OPEN.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A stream over a remote descriptor.
fn over(fd: c_int, mode: *const c_char, owns: bool) -> *mut FILE {
    let functions = Functions {
        read: Some(cookie_read),
        write: Some(cookie_write),
        seek: Some(cookie_seek),
        close: Some(cookie_close),
    };
    let cookie = Box::into_raw(Box::new(Stream { fd, owns }));
    // SAFETY: the functions know this cookie.
    let file = unsafe { fopencookie(cookie.cast(), mode, functions) };
    if file.is_null() {
        // SAFETY: made above, and nothing else has it.
        drop(unsafe { Box::from_raw(cookie) });
        return file;
    }
    if lock(&STREAMS).insert(file.addr(), fd).is_none() {
        OPEN.fetch_add(1, Ordering::AcqRel);
    }
    file
}

/// The flags of `open(2)` for a mode of `fopen(3)`.
pub(crate) fn flags(mode: &[u8]) -> Option<c_int> {
    let plus = mode.contains(&b'+');
    let access = |one| if plus { libc::O_RDWR } else { one };
    let mut flags = match mode.first()? {
        b'r' => access(libc::O_RDONLY),
        b'w' => access(libc::O_WRONLY) | libc::O_CREAT | libc::O_TRUNC,
        b'a' => access(libc::O_WRONLY) | libc::O_CREAT | libc::O_APPEND,
        _ => return None,
    };
    if mode.contains(&b'x') {
        flags |= libc::O_EXCL;
    }
    if mode.contains(&b'e') {
        flags |= libc::O_CLOEXEC;
    }
    Some(flags)
}

fn open_stream(
    path: Result<weft_fs::name::RemotePath, weft_fs::Errno>,
    mode: *const c_char,
) -> *mut FILE {
    // SAFETY: the program's promise.
    let Some(how) = flags(unsafe { bytes(mode) }) else {
        set_errno(libc::EINVAL);
        return std::ptr::null_mut();
    };
    let fd = crate::open::open_path(path, how, 0o666);
    if fd < 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: a descriptor of ours, and the program's mode.
    let file = unsafe { fdopen(fd, mode) };
    if file.is_null() {
        // SAFETY: as above.
        unsafe { crate::open::close(fd) };
    }
    file
}

/// The standard stream of a number, as it is now.
pub(crate) fn stream_of(number: c_int) -> *mut FILE {
    // SAFETY: the C library's variables.
    unsafe {
        match number {
            0 => stdin,
            1 => stdout,
            _ => stderr,
        }
    }
}

/// The number of the standard stream that this is.
pub(crate) fn standard(file: *mut FILE) -> Option<c_int> {
    (0..3).find(|&number| stream_of(number) == file)
}

interpose! {

    "C"
    fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE {
        match resolve(libc::AT_FDCWD, path) {
            Some(path) => open_stream(path, mode),
            None => real!(fopen(*const c_char, *const c_char) -> *mut FILE)(path, mode),
        }
    }
    fn fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE {
        match resolve(libc::AT_FDCWD, path) {
            Some(path) => open_stream(path, mode),
            None => real!(fopen64(*const c_char, *const c_char) -> *mut FILE)(path, mode),
        }
    }
    fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
        if kind(fd) == Kind::Remote {
            return over(fd, mode, true);
        }
        real!(fdopen(c_int, *const c_char) -> *mut FILE)(fd, mode)
    }
    fn fileno(file: *mut FILE) -> c_int {
        match descriptor(file) {
            Some(fd) => fd,
            None => real!(fileno(*mut FILE) -> c_int)(file),
        }
    }
    fn fileno_unlocked(file: *mut FILE) -> c_int {
        match descriptor(file) {
            Some(fd) => fd,
            None => real!(fileno_unlocked(*mut FILE) -> c_int)(file),
        }
    }
    fn fclose(file: *mut FILE) -> c_int {
        // A descriptor that is closed inside of the C library is not seen by `close`.
        let fd = libc::fileno(file);
        let noted = fd >= 0 && kind(fd) == Kind::Local;
        forget(file);
        let rc = real!(fclose(*mut FILE) -> c_int)(file);
        if noted {
            let _ = crate::table::table().closed(fd);
        }
        rc
    }
}

/// The standard stream of a descriptor follows what the descriptor has become.
pub(crate) fn rebind(fd: c_int) {
    let remote = kind(fd) == Kind::Remote;
    static REBOUND: [AtomicPtr<FILE>; 3] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 3];
    let Some(original) = usize::try_from(fd).ok().and_then(|fd| REBOUND.get(fd)) else {
        return;
    };
    let before = original.load(Ordering::Acquire);
    if !remote && before.is_null() {
        return;
    }
    // SAFETY: the C library's variables, which programs may set; as in any program that does, other threads are not to use the stream meanwhile.
    unsafe {
        let variable = match fd {
            0 => &raw mut stdin,
            1 => &raw mut stdout,
            _ => &raw mut stderr,
        };
        if remote && before.is_null() {
            let mode = if fd == 0 { c"r" } else { c"w" };
            libc::fflush(*variable);
            let stream = over(fd, mode.as_ptr(), false);
            if !stream.is_null() {
                original.store(*variable, Ordering::Release);
                *variable = stream;
            }
        } else if !remote {
            forget(*variable);
            real!(fclose(*mut FILE) -> c_int)(*variable);
            *variable = before;
            original.store(std::ptr::null_mut(), Ordering::Release);
        }
    }
}

/// Standard streams that were inherited remote.
pub(crate) fn adopt() {
    for fd in 0..3 {
        rebind(fd);
    }
}
