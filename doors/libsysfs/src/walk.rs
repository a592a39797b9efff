//! Calls that walk through folders: the C library's versions open folders by internal calls.
//!
//! # Safety
//!
//! See the crate's. The functions passed to `glob(3)` have the types of its manual page.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};

use libc::{DIR, stat as Stat};

use weft_sys::{interpose, real};

use crate::open::opendir;
use crate::place::{hidden, private};
use crate::stat::{lstat, stat};

macro_rules! scandirs {
    ($($name:ident, $name_at:ident;)*) => { interpose! {"C" $(
        fn $name(path: *const c_char, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int {
            let next = real!($name(*const c_char, *mut c_void, *const c_void, *const c_void) -> c_int);
            match private(path) {
                Some(path) => next(path.as_ptr(), list, filter, order),
                None => next(path, list, filter, order),
            }
        }
        fn $name_at(dir: c_int, path: *const c_char, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int {
            let next = real!($name_at(c_int, *const c_char, *mut c_void, *const c_void, *const c_void) -> c_int);
            match private(path) {
                Some(path) => next(dir, path.as_ptr(), list, filter, order),
                None => next(dir, path, list, filter, order),
            }
        }
    )*} };
}

scandirs! {
    scandir, scandirat;
    scandir64, scandirat64;
}

/// `struct FTW`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Ftw {
    base: c_int,
    level: c_int,
}

type Visit = unsafe extern "C" fn(*const c_char, *const Stat, c_int) -> c_int;
type VisitN = unsafe extern "C" fn(*const c_char, *const Stat, c_int, *mut Ftw) -> c_int;

thread_local! {
    /// The program's function for the walk of this thread.
    static VISIT: Cell<Option<Visit>> = const { Cell::new(None) };
    static VISIT_N: Cell<Option<VisitN>> = const { Cell::new(None) };
}

/// The public name is the end of the private one.
unsafe fn public(path: *const c_char) -> (*const c_char, usize) {
    // SAFETY: a C string.
    let skip = hidden(unsafe { CStr::from_ptr(path) }.to_bytes());
    // SAFETY: within the string.
    (unsafe { path.add(skip) }, skip)
}

unsafe extern "C" fn visit(path: *const c_char, stat: *const Stat, kind: c_int) -> c_int {
    // SAFETY: the C library's arguments, passed to the program's function.
    unsafe {
        VISIT
            .get()
            .map_or(0, |visit| visit(public(path).0, stat, kind))
    }
}

unsafe extern "C" fn visit_n(
    path: *const c_char,
    stat: *const Stat,
    kind: c_int,
    ftw: *mut Ftw,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        let (path, skip) = public(path);
        let mut at = *ftw;
        at.base -= skip as c_int;
        VISIT_N
            .get()
            .map_or(0, |visit| visit(path, stat, kind, &raw mut at))
    }
}

macro_rules! walks {
    ($($name:ident, $name_n:ident;)*) => { interpose! {"C" $(
        fn $name(path: *const c_char, call: Visit, fds: c_int) -> c_int {
            let next = real!($name(*const c_char, Visit, c_int) -> c_int);
            let Some(place) = private(path) else {
                return next(path, call, fds);
            };
            let before = VISIT.replace(Some(call));
            let done = next(place.as_ptr(), visit, fds);
            VISIT.set(before);
            done
        }
        fn $name_n(path: *const c_char, call: VisitN, fds: c_int, flags: c_int) -> c_int {
            let next = real!($name_n(*const c_char, VisitN, c_int, c_int) -> c_int);
            let Some(place) = private(path) else {
                return next(path, call, fds, flags);
            };
            let before = VISIT_N.replace(Some(call));
            let done = next(place.as_ptr(), visit_n, fds, flags);
            VISIT_N.set(before);
            done
        }
    )*} };
}

walks! {
    ftw, nftw;
    ftw64, nftw64;
}

/// `glob_t`, with the functions that stand in for the C library's.
#[repr(C)]
pub(crate) struct Glob {
    pathc: usize,
    pathv: *mut *mut c_char,
    offs: usize,
    flags: c_int,
    closedir: Option<unsafe extern "C" fn(*mut DIR) -> c_int>,
    readdir: Option<unsafe extern "C" fn(*mut DIR) -> *mut libc::dirent>,
    opendir: Option<unsafe extern "C" fn(*const c_char) -> *mut DIR>,
    lstat: Option<unsafe extern "C" fn(*const c_char, *mut Stat) -> c_int>,
    stat: Option<unsafe extern "C" fn(*const c_char, *mut Stat) -> c_int>,
}

macro_rules! globs {
    ($($name:ident;)*) => { interpose! {"C" $(
        fn $name(pattern: *const c_char, flags: c_int, error: *const c_void, found: *mut Glob) -> c_int {
            let next = real!($name(*const c_char, c_int, *const c_void, *mut Glob) -> c_int);
            if flags & libc::GLOB_ALTDIRFUNC != 0 || found.is_null() {
                // Its own functions open its folders.
                return next(pattern, flags, error, found);
            }
            // Without the flag the C library does not use the functions.
            (*found).opendir = Some(opendir);
            (*found).readdir = Some(libc::readdir);
            (*found).closedir = Some(libc::closedir);
            (*found).lstat = Some(lstat);
            (*found).stat = Some(stat);
            let done = next(pattern, flags | libc::GLOB_ALTDIRFUNC, error, found);
            (*found).flags &= !libc::GLOB_ALTDIRFUNC;
            done
        }
    )*} };
}

globs! {
    glob;
    glob64;
}
