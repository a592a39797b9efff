//! Sockets and descriptors come and go.
//!
//! # Safety
//!
//! Each function as its manual page says.

use libc::{c_int, c_long, c_uint, sockaddr, socklen_t};

use weft_advise::record::Count;

use crate::{errno, fds, next, set_errno, slot};

/// Does something with errno kept.
fn aside(what: impl FnOnce()) {
    let before = errno();
    what();
    set_errno(before);
}

/// `socket`: see its manual page.
/// # Safety
/// As the manual page says.
// SAFETY: this library is there to have this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: passed on.
    let fd = unsafe { next::socket(domain, kind, protocol) };
    if fd >= 0 {
        aside(|| fds::made(fd));
    }
    fd
}

/// `connect`: see its manual page.
/// # Safety
/// As the manual page says.
// SAFETY: this library is there to have this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: passed on.
    let result = unsafe { next::connect(fd, addr, len) };
    aside(|| {
        if let Some((fds::Kind::Stream, place)) = fds::socket(fd)
            && let Some(process) = slot::mine()
            && (result == 0 || errno() == libc::EINPROGRESS)
        {
            process.add(Count::Connects, 1);
            place.locate(fd, process);
        }
    });
    result
}

fn accepted(fd: c_int) -> c_int {
    if fd >= 0 {
        aside(|| {
            fds::made(fd);
            if let Some((fds::Kind::Stream, _)) = fds::socket(fd)
                && let Some(process) = slot::mine()
            {
                process.add(Count::Accepts, 1);
            }
        });
    }
    fd
}

/// `accept`: see its manual page.
/// # Safety
/// As the manual page says.
// SAFETY: this library is there to have this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: passed on.
    accepted(unsafe { next::accept(fd, addr, len) })
}

/// `accept4`: see its manual page.
/// # Safety
/// As the manual page says.
// SAFETY: this library is there to have this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept4(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: passed on.
    accepted(unsafe { next::accept4(fd, addr, len, flags) })
}

/// `close`: see its manual page.
/// # Safety
/// As the manual page says.
// SAFETY: this library is there to have this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    // Before: once it is closed another thread may get its number.
    fds::gone(fd);
    // SAFETY: passed on.
    unsafe { next::close(fd) }
}

/// `close_range`: see its manual page.
/// # Safety
/// As the manual page says.
// SAFETY: this library is there to have this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0 {
        fds::gone_between(first, last);
    }
    // SAFETY: passed on.
    unsafe { next::close_range(first, last, flags) }
}

/// `dup`: see its manual page.
/// # Safety
/// As the manual page says.
// SAFETY: this library is there to have this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    // SAFETY: passed on.
    let new = unsafe { next::dup(fd) };
    fds::gone(new);
    new
}

/// `dup2`: see its manual page.
/// # Safety
/// As the manual page says.
// SAFETY: this library is there to have this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup2(fd: c_int, to: c_int) -> c_int {
    if fd != to {
        fds::gone(to);
    }
    // SAFETY: passed on.
    unsafe { next::dup2(fd, to) }
}

/// `dup3`: see its manual page.
/// # Safety
/// As the manual page says.
// SAFETY: this library is there to have this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    if fd != to {
        fds::gone(to);
    }
    // SAFETY: passed on.
    unsafe { next::dup3(fd, to, flags) }
}

/// `fclose`: see its manual page.
/// # Safety
/// As the manual page says.
// SAFETY: this library is there to have this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fclose(file: *mut libc::FILE) -> c_int {
    if !file.is_null() {
        // SAFETY: the caller's stream.
        aside(|| fds::gone(unsafe { libc::fileno(file) }));
    }
    // SAFETY: passed on.
    unsafe { next::fclose(file) }
}

/// `syscall`: see its manual page. Only the number is looked at.
/// # Safety
/// As the manual page says.
// SAFETY: this library is there to have this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    if number == libc::SYS_io_uring_setup {
        if let Some(process) = slot::mine() {
            process.add(Count::Uring, 1);
        }
    } else if matches!(
        number,
        libc::SYS_sendto | libc::SYS_recvfrom | libc::SYS_sendmsg | libc::SYS_recvmsg
    ) && let Some(process) = slot::mine()
    {
        process.add(Count::Direct, 1);
    }
    // SAFETY: passed on.
    unsafe { next::syscall(number, a, b, c, d, e, f) }
}
