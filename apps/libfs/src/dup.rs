//! Duplicating descriptors, and opening streams anew: the standard streams follow.
//!
//! # Safety
//!
//! See the crate's.

use std::ffi::{c_char, c_int, c_long};

use libc::FILE;

use weft_sys::{interpose, next::set_errno, real};

use crate::open::{self, fresh};
use crate::table::{Kind, is_guest, kind, table};
use crate::{bytes, resolve, stdio};

/// Opens a path under the descriptor of a stream, where the path or the stream is remote. Only a standard stream can become remote: the program keeps the
/// pointers to its other streams, and a remote stream is another one.
///
/// # Safety
/// As for `freopen(3)`.
unsafe fn reopen(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
    // SAFETY: the caller's promise, and descriptors of ours.
    unsafe {
        let Some(how) = stdio::flags(bytes(mode)) else {
            set_errno(libc::EINVAL);
            return std::ptr::null_mut();
        };
        let fd = open::open(path, how, 0o666);
        if fd < 0 {
            return std::ptr::null_mut();
        }
        let number = stdio::standard(file);
        let mut stream = file;
        if stdio::descriptor(file).is_none() {
            // It loses what it has read or not written yet, and has the new mode.
            stream = real!(freopen(*const c_char, *const c_char, *mut FILE) -> *mut FILE)(
                c"/dev/null".as_ptr(),
                mode,
                file,
            );
        } else if let Some(number) = number {
            let nothing = open::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC, 0);
            dup2(nothing, number);
            open::close(nothing);
        }
        let can =
            number.is_some() || (kind(fd) != Kind::Remote && stdio::descriptor(file).is_none());
        if stream.is_null() || !can {
            open::close(fd);
            set_errno(libc::ENOTSUP);
            return std::ptr::null_mut();
        }
        dup2(fd, number.unwrap_or_else(|| libc::fileno(stream)));
        open::close(fd);
        number.map_or(stream, stdio::stream_of)
    }
}

interpose! {

    "C"
    fn freopen(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
        if stdio::descriptor(file).is_none() && resolve(libc::AT_FDCWD, path).is_none() {
            return real!(freopen(*const c_char, *const c_char, *mut FILE) -> *mut FILE)(path, mode, file);
        }
        reopen(path, mode, file)
    }
    fn freopen64(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
        freopen(path, mode, file)
    }
    fn dup(fd: c_int) -> c_int {
        let to = fresh(real!(dup(c_int) -> c_int)(fd));
        if to >= 0 && kind(fd) != Kind::Plain {
            table().duplicated(fd, to);
        }
        to
    }
    fn dup2(fd: c_int, to: c_int) -> c_int {
        duplicate(fd, to, || {
            real!(dup2(c_int, c_int) -> c_int)(fd, to)
        })
    }
    fn dup3(fd: c_int, to: c_int, how: c_int) -> c_int {
        duplicate(fd, to, || {
            real!(dup3(c_int, c_int, c_int) -> c_int)(fd, to, how)
        })
    }
    fn fcntl(fd: c_int, command: c_int, arg: c_long) -> c_int {
        // The program's promise: a number or a pointer, as the command wants it.
        copied(fd, command, real!(fcntl(c_int, c_int, c_long) -> c_int)(fd, command, arg))
    }
    fn fcntl64(fd: c_int, command: c_int, arg: c_long) -> c_int {
        copied(fd, command, real!(fcntl64(c_int, c_int, c_long) -> c_int)(fd, command, arg))
    }
}

fn duplicate(fd: c_int, to: c_int, real: impl FnOnce() -> c_int) -> c_int {
    if kind(fd) == Kind::Plain && kind(to) == Kind::Plain {
        return real();
    }
    if fd == to {
        return real();
    }
    // SAFETY: a number; whether it is open at all.
    let open = unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
    if open && kind(to) != Kind::Plain {
        // As in dup2(2): the error of closing is lost.
        let _ = table().closed(to);
    }
    let done = real();
    if done >= 0 {
        table().duplicated(fd, to);
        if !is_guest() {
            stdio::rebind(to);
        }
    }
    done
}

fn copied(fd: c_int, command: c_int, done: c_int) -> c_int {
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) && done >= 0 {
        let _ = fresh(done);
        if kind(fd) != Kind::Plain {
            table().duplicated(fd, done);
        }
    }
    done
}
