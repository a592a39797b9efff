//! Duplicating descriptors: the standard streams follow.
//!
//! # Safety
//!
//! See the crate's.

use std::ffi::{c_int, c_long};

use weft_sys::{doors, real};

use crate::open::fresh;
use crate::stdio;
use crate::table::{Kind, is_guest, kind, table};

doors! {

    "C"
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
