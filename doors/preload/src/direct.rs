//! `syscall(2)`: the calls that this library intercepts also arrive by their numbers.
//!
//! # Safety
//!
//! As each call's manual page says.

use libc::{c_int, c_long, timespec};

use weft_ring::checked;
use weft_run::meet::Why;

use crate::lend::memory;
use crate::{clock, clone, exec, io, next, privileges, process, sock};

fn pointer<T>(word: c_long) -> *mut T {
    std::ptr::with_exposed_provenance_mut(word as usize)
}

weft_sys::interpose! {
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
    let _nothing_lent = privileges::before_call(number, a, b);
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
            libc::SYS_bind => sock::bind(fd, pointer(b), c as u32).into(),
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
            libc::SYS_recvmmsg => {
                io::recvmmsg(fd, pointer(b), c as u32, d as c_int, pointer(e)).into()
            }
            libc::SYS_sendmmsg => io::sendmmsg(fd, pointer(b), c as u32, d as c_int).into(),
            libc::SYS_sendfile => io::sendfile(fd, b as c_int, pointer(c), d as usize) as c_long,
            libc::SYS_splice => {
                io::splice(fd, pointer(b), c as c_int, pointer(d), e as usize, f as u32) as c_long
            }
            libc::SYS_preadv2 => {
                io::preadv64v2(fd, pointer(b), c as c_int, d, f as c_int) as c_long
            }
            libc::SYS_pwritev2 => {
                io::pwritev64v2(fd, pointer(b), c as c_int, d, f as c_int) as c_long
            }
            libc::SYS_getsockopt => {
                sock::getsockopt(fd, b as c_int, c as c_int, pointer(d), pointer(e)).into()
            }
            libc::SYS_setsockopt => {
                sock::setsockopt(fd, b as c_int, c as c_int, pointer(d), e as u32).into()
            }
            libc::SYS_listen => sock::listen(fd, b as c_int).into(),
            libc::SYS_fcntl => sock::fcntl(fd, b as c_int, c as u64).into(),
            libc::SYS_ioctl => sock::ioctl(fd, b as u64, c as u64).into(),
            libc::SYS_exit_group => {
                process::end();
                next::syscall(number, a, b, c, d, e, f)
            }
            libc::SYS_io_uring_setup => {
                privileges::everything_back(Why::IoUring);
                next::syscall(number, a, b, c, d, e, f)
            }
            _ => further(number, args),
        }
    }
}

/// The kernel's call writes the time that is left; the C library's function does not.
///
/// # Safety
/// As `ppoll(2)`.
unsafe fn write_rest(limit: *mut timespec, call: impl FnOnce(*const timespec) -> c_long) -> c_long {
    const LEN: usize = size_of::<timespec>();
    if limit.is_null() {
        return call(limit);
    }
    let mut time = clock::timespec(0);
    // SAFETY: a value of ours.
    let n = unsafe { checked::copy((&raw mut time).cast(), limit.cast(), LEN) };
    let is_time = time.tv_sec >= 0 && (0..1_000_000_000).contains(&time.tv_nsec);
    // A time of 0 is left as it is, and others are the kernel's to refuse.
    if n != LEN || !is_time || clock::nanoseconds_of(time) == 0 {
        return call(limit);
    }
    let began = clock::now();
    let result = call(limit);
    let errno = crate::errno();
    let took = clock::now().saturating_sub(began);
    let rest = clock::timespec(clock::nanoseconds_of(time).saturating_sub(took));
    // SAFETY: the caller's promise. Memory that cannot be written stays as it is.
    unsafe { checked::copy(limit.cast(), (&raw const rest).cast(), LEN) };
    crate::set_errno(errno);
    result
}

/// # Safety
/// As the call of that number.
unsafe fn further(number: c_long, args: [c_long; 6]) -> c_long {
    let [a, b, c, d, e, f] = args;
    let fd = a as c_int;
    // SAFETY: the caller's promise; the arguments are those of the call of that number.
    unsafe {
        match number {
            libc::SYS_epoll_pwait2 => {
                sock::epoll_pwait2(fd, pointer(b), c as c_int, pointer(d), pointer(e)).into()
            }
            libc::SYS_epoll_pwait => {
                sock::epoll_pwait(fd, pointer(b), c as c_int, d as c_int, pointer(e)).into()
            }
            libc::SYS_getrlimit => privileges::getrlimit(a as u32, pointer(b)).into(),
            libc::SYS_setrlimit => privileges::setrlimit(a as u32, pointer(b)).into(),
            libc::SYS_prlimit64 => {
                privileges::prlimit(a as i32, b as u32, pointer(c), pointer(d)).into()
            }
            libc::SYS_execve => exec::execve(pointer(a), pointer(b), pointer(c)).into(),
            libc::SYS_execveat => {
                exec::execveat(fd, pointer(b), pointer(c), pointer(d), e as c_int).into()
            }
            libc::SYS_clone => clone::by_flags(a as u64, |flags| {
                next::syscall(number, flags as c_long, b, c, d, e, f)
            }),
            libc::SYS_clone3 => clone::by_structure(pointer(a), b as usize),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_fork | libc::SYS_vfork => {
                process::raw_fork(0, || next::syscall(libc::SYS_fork, a, b, c, d, e, f))
            }
            #[cfg(target_arch = "x86_64")]
            libc::SYS_accept => sock::accept(fd, pointer(b), pointer(c)).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_dup2 => sock::dup2(fd, b as c_int).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll => sock::poll(pointer(a), b as u64, c as c_int).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_select => {
                sock::select(fd, pointer(b), pointer(c), pointer(d), pointer(e)).into()
            }
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_wait => sock::epoll_wait(fd, pointer(b), c as c_int, d as c_int).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_create => sock::epoll_create(fd).into(),
            libc::SYS_ppoll => write_rest(pointer(c), |limit| {
                sock::ppoll(pointer(a), b as u64, limit, pointer(d)).into()
            }),
            libc::SYS_pselect6 => {
                let mask = pointer::<*const libc::sigset_t>(f);
                let mask = if mask.is_null() {
                    std::ptr::null()
                } else {
                    *mask
                };
                write_rest(pointer(e), |limit| {
                    sock::pselect(fd, pointer(b), pointer(c), pointer(d), limit, mask).into()
                })
            }
            _ => next::syscall(number, a, b, c, d, e, f),
        }
    }
}
