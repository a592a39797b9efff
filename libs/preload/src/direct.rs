//! `syscall(2)`: the calls that this library intercepts also arrive by their numbers.
//!
//! # Safety
//!
//! As each call's manual page says.

use libc::{c_int, c_long};

use weft_run::meet::Why;

use crate::conn::Conn;
use crate::lend::memory::{self, Sharing};
use crate::{dgram, io, lend, link, next, privileges, settings, sock, table};

fn pointer<T>(word: c_long) -> *mut T {
    std::ptr::with_exposed_provenance_mut(word as usize)
}

/// Moves every socket back to the kernel for good, because the library does not see what the process does from now on.
fn everything_back() {
    settings::turn_off();
    dgram::everything_plain(Why::IoUring);
    let mut all = Vec::new();
    table::each_socket(|_, conn: &'static Conn| all.push(conn));
    for conn in all {
        link::downgrade(conn, Why::IoUring);
    }
}

weft_sys::doors! {
    "C-unwind"

    fn syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long {
        by_number(number, [a, b, c, d, e, f])
    }
}

/// # Safety
/// As the call of that number.
unsafe fn by_number(number: c_long, args: [c_long; 6]) -> c_long {
    let [a, b, c, d, e, f] = args;
    let fd = a as c_int;
    let _nothing_lent = privileges::before_call(number, a);
    // SAFETY: the caller's promise; the arguments are those of the call of that number.
    unsafe {
        match number {
            libc::SYS_close => sock::close(fd).into(),
            libc::SYS_close_range => sock::close_range(a as u32, b as u32, c as c_int).into(),
            libc::SYS_read => io::read(fd, pointer(b), c as usize) as c_long,
            libc::SYS_write => io::write(fd, pointer(b), c as usize) as c_long,
            libc::SYS_readv => io::readv(fd, pointer(b), c as c_int) as c_long,
            libc::SYS_writev => io::writev(fd, pointer(b), c as c_int) as c_long,
            libc::SYS_recvfrom => io::recvfrom(
                fd,
                pointer(b),
                c as usize,
                d as c_int,
                pointer(e),
                pointer(f),
            ) as c_long,
            libc::SYS_sendto => {
                io::sendto(fd, pointer(b), c as usize, d as c_int, pointer(e), f as u32) as c_long
            }
            libc::SYS_recvmsg => io::recvmsg(fd, pointer(b), c as c_int) as c_long,
            libc::SYS_sendmsg => io::sendmsg(fd, pointer(b), c as c_int) as c_long,
            libc::SYS_socket => sock::socket(fd, b as c_int, c as c_int).into(),
            libc::SYS_connect => sock::connect(fd, pointer(b), c as u32).into(),
            libc::SYS_accept4 => sock::accept4(fd, pointer(b), pointer(c), d as c_int).into(),
            libc::SYS_shutdown => sock::shutdown(fd, b as c_int).into(),
            libc::SYS_dup => sock::dup(fd).into(),
            libc::SYS_dup3 => sock::dup3(fd, b as c_int, c as c_int).into(),
            libc::SYS_epoll_create1 => sock::epoll_create1(fd).into(),
            libc::SYS_epoll_ctl => sock::epoll_ctl(fd, b as c_int, c as c_int, pointer(d)).into(),
            libc::SYS_mmap => memory::mmap(
                pointer(a),
                b as usize,
                c as c_int,
                d as c_int,
                e as c_int,
                f,
            )
            .expose_provenance() as c_long,
            libc::SYS_munmap => memory::munmap(pointer(a), b as usize).into(),
            libc::SYS_mprotect => memory::mprotect(pointer(a), b as usize, c as c_int).into(),
            libc::SYS_mremap => {
                memory::mremap(pointer(a), b as usize, c as usize, d as c_int, pointer(e))
                    .expose_provenance() as c_long
            }
            libc::SYS_madvise => memory::madvise(pointer(a), b as usize, c as c_int).into(),
            // Threads have what we have.
            libc::SYS_clone if a as c_int & libc::CLONE_VM == 0 => {
                let _sharing = Sharing::begin();
                next::syscall(number, a, b, c, d, e, f)
            }
            #[cfg(target_arch = "x86_64")]
            libc::SYS_fork => {
                let _sharing = Sharing::begin();
                next::syscall(number, a, b, c, d, e, f)
            }
            libc::SYS_exit_group => {
                lend::finish_for_good();
                next::syscall(number, a, b, c, d, e, f)
            }
            libc::SYS_io_uring_setup => {
                everything_back();
                next::syscall(number, a, b, c, d, e, f)
            }
            _ => next::syscall(number, a, b, c, d, e, f),
        }
    }
}
