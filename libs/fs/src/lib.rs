//! `libweft-fs.so`: programs that are run with it (`weft fs run`) find the memory of other machines under `/rdma/<host>:<port>/<name>[:<size>]`.
//!
//! If the server runs on this host for this user, `open` returns its memory file, and the kernel does the rest. Otherwise it returns a placeholder
//! (module `table`), and the calls on that go to the server by RDMA. Every call first checks for such a path or descriptor; all others go straight
//! to the C library.
//!
//! # Safety
//!
//! Each function has the type and the meaning of its manual page, and is as safe as that: the program promises that its pointers are valid.
#![allow(
    clippy::missing_safety_doc,
    clippy::not_unsafe_ptr_arg_deref,
    reason = "see above"
)]
#![allow(
    clippy::cast_possible_wrap,
    reason = "C counts with signed numbers, and lengths are below 2^63"
)]

mod dir;
mod dup;
mod io;
mod link;
mod open;
mod stat;
mod stdio;
mod table;

use std::ffi::{CStr, c_char, c_int};

use weft_fs::name::{Name, RemotePath};
use weft_fs::{Errno, Error};
use weft_verbs::cm::ConnectError;

use weft_sys::next::set_errno;

use table::{Kind, kind, table};

/// Fails as C functions do.
pub(crate) fn fail(e: &Error) -> c_int {
    set_errno(e.errno().raw_os_error());
    -1
}

/// As [`fail`], for calls with a path: there the reason why a server cannot be reached is useful.
pub(crate) fn fail_name(e: &Error) -> c_int {
    match e {
        Error::Connect(ConnectError::Tls(_)) => fail(e),
        Error::Connect(connect) => {
            set_errno(connect.raw_os_error());
            -1
        }
        e => fail(e),
    }
}

/// The bytes of a path.
///
/// # Safety
/// Null or a C string, which outlives the returned slice.
pub(crate) unsafe fn bytes<'a>(path: *const c_char) -> &'a [u8] {
    if path.is_null() {
        return b"";
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(path) }.to_bytes()
}

/// Returns the server's path behind a path, if it leads to one: absolute, or relative to an open folder.
///
/// # Safety
/// As [`bytes`].
pub(crate) unsafe fn resolve(dir: c_int, path: *const c_char) -> Option<Result<RemotePath, Errno>> {
    // The first bytes are enough for nearly all paths.
    // SAFETY: the caller's promise.
    let first = unsafe { path.as_ref() }.map_or(0, |&first| first as u8);
    if first == b'/' {
        // SAFETY: as above.
        let path = unsafe { bytes(path) };
        return RemotePath::is_remote(path).then(|| RemotePath::parse(path));
    }
    if dir == libc::AT_FDCWD || kind(dir) != Kind::Folder {
        return None;
    }
    let folder = table().path(dir)?;
    // SAFETY: as above.
    let path = unsafe { bytes(path) };
    let joined = [folder.name.as_bytes(), b"/", path].concat();
    Some(Name::lenient(&joined).map(|name| RemotePath {
        name,
        size: 0,
        ..folder
    }))
}

extern "C" fn at_exit() {
    table().flush();
}

extern "C" fn start() {
    table::own();
    table::adopt();
    stdio::adopt();
    // SAFETY: functions that stay.
    unsafe {
        libc::pthread_atfork(Some(table::before_fork), None, Some(table::after_fork));
        libc::atexit(at_exit);
    }
}

#[used]
// SAFETY: the loader calls this function once, before the program.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;
