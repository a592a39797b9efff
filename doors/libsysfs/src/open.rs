//! Opening files and folders.
//!
//! # Safety
//!
//! See the crate's.

use std::ffi::{CStr, c_char, c_int, c_uint};

use libc::{DIR, FILE};

use weft_sys::{interpose, next::set_errno, real};

use crate::place::{Private, fail, private};

/// Files in `/sys` cannot be written to, not even by root.
fn refused(path: &Private, how: c_int) -> bool {
    path.read_only() && (how & libc::O_ACCMODE != libc::O_RDONLY || how & libc::O_CREAT != 0)
}

macro_rules! opens {
    ($($name:ident, $name_at:ident;)*) => { interpose! {"C" $(
        fn $name(path: *const c_char, how: c_int, mode: c_uint) -> c_int {
            let next = real!($name(*const c_char, c_int, c_uint) -> c_int);
            match private(path) {
                Some(path) if refused(&path, how) => fail(libc::EACCES),
                Some(path) => next(path.as_ptr(), how, mode),
                None => next(path, how, mode),
            }
        }
        fn $name_at(dir: c_int, path: *const c_char, how: c_int, mode: c_uint) -> c_int {
            let next = real!($name_at(c_int, *const c_char, c_int, c_uint) -> c_int);
            match private(path) {
                Some(path) if refused(&path, how) => fail(libc::EACCES),
                Some(path) => next(dir, path.as_ptr(), how, mode),
                None => next(dir, path, how, mode),
            }
        }
    )*} };
}

opens! {
    open, openat;
    open64, openat64;
    __open_2, __openat_2;
    __open64_2, __openat64_2;
}

macro_rules! creats {
    ($($name:ident;)*) => { interpose! {"C" $(
        fn $name(path: *const c_char, mode: c_uint) -> c_int {
            let next = real!($name(*const c_char, c_uint) -> c_int);
            match private(path) {
                Some(path) if path.read_only() => fail(libc::EACCES),
                Some(path) => next(path.as_ptr(), mode),
                None => next(path, mode),
            }
        }
    )*} };
}

creats! {
    creat;
    creat64;
}

/// Returns true if a mode of `fopen(3)` asks to write.
///
/// # Safety
/// A C string.
unsafe fn writes(mode: *const c_char) -> bool {
    // SAFETY: the caller's promise.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    mode.first() != Some(&b'r') || mode.contains(&b'+')
}

macro_rules! fopens {
    ($($name:ident, $again:ident;)*) => { interpose! {"C" $(
        fn $name(path: *const c_char, mode: *const c_char) -> *mut FILE {
            let next = real!($name(*const c_char, *const c_char) -> *mut FILE);
            match private(path) {
                Some(path) if path.read_only() && writes(mode) => {
                    set_errno(libc::EACCES);
                    std::ptr::null_mut()
                }
                Some(path) => next(path.as_ptr(), mode),
                None => next(path, mode),
            }
        }
        fn $again(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
            let next = real!($again(*const c_char, *const c_char, *mut FILE) -> *mut FILE);
            match private(path) {
                // The old file is closed in every case. A read-only file is opened to read, and writing fails then.
                Some(path) if path.read_only() && writes(mode) => next(path.as_ptr(), c"r".as_ptr(), file),
                Some(path) => next(path.as_ptr(), mode, file),
                None => next(path, mode, file),
            }
        }
    )*} };
}

fopens! {
    fopen, freopen;
    fopen64, freopen64;
}

interpose! {

    "C"
    fn opendir(path: *const c_char) -> *mut DIR {
        let next = real!(opendir(*const c_char) -> *mut DIR);
        match private(path) {
            Some(path) => next(path.as_ptr()),
            None => next(path),
        }
    }
}
