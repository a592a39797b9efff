//! Calls that make and close sockets and descriptors.
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

weft_sys::interpose! {
    "C-unwind"

    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
        let fd = next::socket(domain, kind, protocol);
        if fd >= 0 {
            aside(|| fds::made(fd));
        }
        fd
    }

    fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
        let result = next::connect(fd, addr, len);
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

    fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
        accepted(next::accept(fd, addr, len))
    }

    fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
        accepted(next::accept4(fd, addr, len, flags))
    }

    fn close(fd: c_int) -> c_int {
        // Before: once it is closed another thread may get its number.
        fds::gone(fd);
        next::close(fd)
    }

    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        if flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0 {
            fds::gone_between(first, last);
        }
        next::close_range(first, last, flags)
    }

    fn dup(fd: c_int) -> c_int {
        let new = next::dup(fd);
        fds::gone(new);
        new
    }

    fn dup2(fd: c_int, to: c_int) -> c_int {
        if fd != to {
            fds::gone(to);
        }
        next::dup2(fd, to)
    }

    fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
        if fd != to {
            fds::gone(to);
        }
        next::dup3(fd, to, flags)
    }

    fn fclose(file: *mut libc::FILE) -> c_int {
        if !file.is_null() {
            // SAFETY: the caller's stream.
            aside(|| fds::gone(libc::fileno(file)));
        }
        next::fclose(file)
    }

    // Only the number is looked at.
    fn syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long {
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
        next::syscall(number, a, b, c, d, e, f)
    }
}
