//! Attributes and rights.
//!
//! # Safety
//!
//! See the crate's.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::{stat as Stat, statfs as StatFs, statvfs as StatVfs, statx as Statx};

use weft_sys::next::Place;
use weft_sys::{interpose, real};

use crate::place::{fail, private};
use crate::root;

type FstatAt = unsafe extern "C" fn(c_int, *const c_char, *mut Stat, c_int) -> c_int;

/// The C library's, or the system call where the C library is older than its function of this name (glibc 2.33).
unsafe fn next_stat(dir: c_int, path: *const c_char, stat: *mut Stat, flags: c_int) -> c_int {
    static PLACE: Place = Place::new("fstatat\0");
    let next = PLACE.get();
    // SAFETY: the caller's promise; the function of this name has this type in the C library.
    unsafe {
        if next.is_null() {
            return libc::syscall(libc::SYS_newfstatat, dir, path, stat, flags) as c_int;
        }
        std::mem::transmute::<*mut c_void, FstatAt>(next)(dir, path, stat, flags)
    }
}

unsafe fn stat_at(dir: c_int, path: *const c_char, stat: *mut Stat, flags: c_int) -> c_int {
    // SAFETY: the program's promise.
    let Some(place) = (unsafe { private(path) }) else {
        // SAFETY: as above.
        return unsafe { next_stat(dir, path, stat, flags) };
    };
    let Some((major, minor)) = place.device() else {
        // SAFETY: as above.
        return unsafe { next_stat(dir, place.as_ptr(), stat, flags) };
    };
    let flags = flags & !libc::AT_SYMLINK_NOFOLLOW;
    // SAFETY: as above; it is filled if that went well.
    unsafe {
        let done = next_stat(dir, place.as_ptr(), stat, flags);
        if done == 0 {
            (*stat).st_rdev = libc::makedev(major, minor);
        }
        done
    }
}

macro_rules! stats {
    ($($flags:expr, $name:ident, $old:ident;)*) => { interpose! {"C" $(
        fn $name(path: *const c_char, stat: *mut Stat) -> c_int {
            stat_at(libc::AT_FDCWD, path, stat, $flags)
        }
        fn $old(_version: c_int, path: *const c_char, stat: *mut Stat) -> c_int {
            // There is one version on machines of 64 bits.
            stat_at(libc::AT_FDCWD, path, stat, $flags)
        }
    )*} };
}

stats! {
    0, stat, __xstat;
    0, stat64, __xstat64;
    libc::AT_SYMLINK_NOFOLLOW, lstat, __lxstat;
    libc::AT_SYMLINK_NOFOLLOW, lstat64, __lxstat64;
}

macro_rules! stats_at {
    ($($name:ident, $old:ident;)*) => { interpose! {"C" $(
        fn $name(dir: c_int, path: *const c_char, stat: *mut Stat, flags: c_int) -> c_int {
            stat_at(dir, path, stat, flags)
        }
        fn $old(_version: c_int, dir: c_int, path: *const c_char, stat: *mut Stat, flags: c_int) -> c_int {
            stat_at(dir, path, stat, flags)
        }
    )*} };
}

stats_at! {
    fstatat, __fxstatat;
    fstatat64, __fxstatat64;
}

interpose! {

    "C"
    fn statx(dir: c_int, path: *const c_char, flags: c_int, mask: c_uint, stat: *mut Statx) -> c_int {
        let next = real!(statx(c_int, *const c_char, c_int, c_uint, *mut Statx) -> c_int);
        let Some(place) = private(path) else {
            return next(dir, path, flags, mask, stat);
        };
        let Some((major, minor)) = place.device() else {
            return next(dir, place.as_ptr(), flags, mask, stat);
        };
        // It is filled if that went well.
        let done = next(dir, place.as_ptr(), flags & !libc::AT_SYMLINK_NOFOLLOW, mask, stat);
        if done == 0 {
            ((*stat).stx_rdev_major, (*stat).stx_rdev_minor) = (major, minor);
        }
        done
    }

    fn faccessat(dir: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
        let next = real!(faccessat(c_int, *const c_char, c_int, c_int) -> c_int);
        match private(path) {
            Some(path) => match next(dir, path.as_ptr(), mode, flags) {
                0 if path.read_only() && mode & libc::W_OK != 0 => fail(libc::EACCES),
                done => done,
            },
            None => next(dir, path, mode, flags),
        }
    }
}

macro_rules! accesses {
    ($($name:ident;)*) => { interpose! {"C" $(
        fn $name(path: *const c_char, mode: c_int) -> c_int {
            let next = real!($name(*const c_char, c_int) -> c_int);
            match private(path) {
                Some(path) => match next(path.as_ptr(), mode) {
                    0 if path.read_only() && mode & libc::W_OK != 0 => fail(libc::EACCES),
                    done => done,
                },
                None => next(path, mode),
            }
        }
    )*} };
}

accesses! {
    access;
    euidaccess;
    eaccess;
}

/// Calls whose first argument is the path, and which need nothing but another one.
macro_rules! of_path {
    ($($name:ident($($arg:ident: $type:ty),*) -> $ret:ty;)*) => { interpose! {"C" $(
        fn $name(path: *const c_char, $($arg: $type),*) -> $ret {
            let next = real!($name(*const c_char, $($type),*) -> $ret);
            match private(path) {
                Some(path) => next(path.as_ptr(), $($arg),*),
                None => next(path, $($arg),*),
            }
        }
    )*} };
}

of_path! {
    statfs(stat: *mut StatFs) -> c_int;
    statfs64(stat: *mut StatFs) -> c_int;
    statvfs(stat: *mut StatVfs) -> c_int;
    statvfs64(stat: *mut StatVfs) -> c_int;
    getxattr(name: *const c_char, value: *mut c_void, size: usize) -> isize;
    lgetxattr(name: *const c_char, value: *mut c_void, size: usize) -> isize;
    listxattr(list: *mut c_char, size: usize) -> isize;
    llistxattr(list: *mut c_char, size: usize) -> isize;
    chdir() -> c_int;
}

interpose! {

    "C"
    /// The kernel says nothing of changes in `/sys` either, and a program must not wait for them in our folder.
    fn inotify_add_watch(fd: c_int, path: *const c_char, mask: u32) -> c_int {
        if private(path).is_some() {
            return fail(libc::EACCES);
        }
        let next = real!(inotify_add_watch(c_int, *const c_char, u32) -> c_int);
        next(fd, path, mask)
    }
}

macro_rules! ends {
    ($($name:ident;)*) => { interpose! {"C" $(
        /// Shells end so, and nothing that was registered for the end is called then.
        fn $name(status: c_int) -> ! {
            root::remove();
            let next = real!($name(c_int) -> !);
            next(status)
        }
    )*} };
}

ends! {
    _exit;
    _Exit;
}
