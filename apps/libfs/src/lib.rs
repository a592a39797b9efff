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

mod cwd;
mod dir;
mod dup;
mod io;
mod lacking;
mod link;
mod open;
mod paths;
mod stat;
mod stdio;
mod table;
mod walk;

use std::ffi::{CStr, c_char, c_int};

use weft_fs::name::{Name, PREFIX, RemotePath};
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

/// Returns the server's path behind a path, if it leads to one: absolute, or relative to an open folder or to the working directory.
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
        if RemotePath::is_remote(path) {
            return Some(RemotePath::parse(path));
        }
        // The folder of all servers exists for programs that make, or look for, the folders on the way to a name.
        return matches!(path, b"/rdma" | b"/rdma/").then(|| Ok(link::servers()));
    }
    if first == 0 {
        return None;
    }
    // SAFETY: as above.
    let path = unsafe { bytes(path) };
    let folder = if dir == libc::AT_FDCWD {
        cwd::remote()?
    } else if kind(dir) == Kind::Folder {
        table().path(dir)?
    } else {
        // Programs that follow no symbolic link open a path's components one after the other, from `/` on.
        if !(path == b"rdma" || path.starts_with(b"rdma/")) || !stat::is_root(dir) {
            return None;
        }
        link::servers()
    };
    if link::is_servers(&folder) {
        let path = path.strip_prefix(b"rdma").unwrap_or(path);
        let path = path.strip_prefix(b"/").unwrap_or(path);
        // Like the root, it is its own parent: programs that walk up end here.
        if matches!(path, b"" | b"." | b".." | b"../") {
            return Some(Ok(folder));
        }
        return Some(RemotePath::parse(&[PREFIX, path].concat()));
    }
    if folder.name.is_root() && matches!(path, b".." | b"../") {
        return Some(Ok(link::servers()));
    }
    let joined = [folder.name.as_bytes(), b"/", path].concat();
    Some(Name::lenient(&joined).map(|name| RemotePath {
        name,
        size: 0,
        ..folder
    }))
}

/// The result of a call that returns 0 or fails.
pub(crate) fn done(result: Result<(), Error>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(e) => fail_name(&e),
    }
}

/// A copy in memory that the program frees.
pub(crate) fn copied(text: &[u8]) -> *mut c_char {
    // SAFETY: room for the text and its end, which is written whole.
    unsafe {
        let room = libc::malloc(text.len() + 1).cast::<u8>();
        if !room.is_null() {
            room.copy_from_nonoverlapping(text.as_ptr(), text.len());
            room.add(text.len()).write(0);
        }
        room.cast()
    }
}

extern "C" fn at_exit() {
    table().flush();
}

extern "C" fn start() {
    table::own();
    table::adopt();
    cwd::adopt();
    stdio::adopt();
    // SAFETY: functions that stay.
    unsafe {
        libc::pthread_atfork(Some(table::before_fork), None, Some(table::after_fork));
        // After the table has been renewed.
        libc::pthread_atfork(None, None, Some(cwd::adopt));
        libc::atexit(at_exit);
    }
}

#[used]
// SAFETY: the loader calls this function once, before the program.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;
