//! Calls for what a server does not have: links, special files, extended attributes. They fail as on a file system without it.
//!
//! # Safety
//!
//! See the crate's.

use std::ffi::{c_char, c_int, c_void};

use libc::{dev_t, mode_t, size_t, ssize_t};
use weft_fs::name::RemotePath;
use weft_fs::{Errno, Error};
use weft_sys::{interpose, next::set_errno, real};

use crate::open::remote;
use crate::table::{Kind, kind};
use crate::{fail, fail_name, link, resolve};

/// The call would make something at this path that a server has no kind for.
fn refused(path: Result<RemotePath, Errno>) -> c_int {
    match path.map_err(Error::from).and_then(|path| link::attr(&path)) {
        Ok(_) => fail(&Errno::EXIST.into()),
        Err(e) if e.errno() == Errno::NOENT => fail(&Errno::PERM.into()),
        Err(e) => fail_name(&e),
    }
}

/// A hard link, if one of its ends is on a server.
fn hard_link(
    from: Option<Result<RemotePath, Errno>>,
    to: Option<Result<RemotePath, Errno>>,
) -> Option<c_int> {
    match (from, to) {
        (None, None) => None,
        (Some(_), Some(to)) => Some(refused(to)),
        _ => Some(fail(&Errno::XDEV.into())),
    }
}

interpose! {

    "C"
    fn link(from: *const c_char, to: *const c_char) -> c_int {
        hard_link(remote!(from), remote!(to))
            .unwrap_or_else(|| real!(link(*const c_char, *const c_char) -> c_int)(from, to))
    }
    fn linkat(a: c_int, from: *const c_char, b: c_int, to: *const c_char, how: c_int) -> c_int {
        hard_link(remote!(a, from), remote!(b, to)).unwrap_or_else(|| {
            real!(linkat(c_int, *const c_char, c_int, *const c_char, c_int) -> c_int)(a, from, b, to, how)
        })
    }
    fn symlink(text: *const c_char, path: *const c_char) -> c_int {
        match remote!(path) {
            Some(path) => refused(path),
            None => real!(symlink(*const c_char, *const c_char) -> c_int)(text, path),
        }
    }
    fn symlinkat(text: *const c_char, dir: c_int, path: *const c_char) -> c_int {
        match remote!(dir, path) {
            Some(path) => refused(path),
            None => real!(symlinkat(*const c_char, c_int, *const c_char) -> c_int)(text, dir, path),
        }
    }
    fn mkfifo(path: *const c_char, mode: mode_t) -> c_int {
        match remote!(path) {
            Some(path) => refused(path),
            None => real!(mkfifo(*const c_char, mode_t) -> c_int)(path, mode),
        }
    }
    fn mkfifoat(dir: c_int, path: *const c_char, mode: mode_t) -> c_int {
        match remote!(dir, path) {
            Some(path) => refused(path),
            None => real!(mkfifoat(c_int, *const c_char, mode_t) -> c_int)(dir, path, mode),
        }
    }
    fn mknod(path: *const c_char, mode: mode_t, dev: dev_t) -> c_int {
        match remote!(path) {
            Some(path) => refused(path),
            None => real!(mknod(*const c_char, mode_t, dev_t) -> c_int)(path, mode, dev),
        }
    }
    fn mknodat(dir: c_int, path: *const c_char, mode: mode_t, dev: dev_t) -> c_int {
        match remote!(dir, path) {
            Some(path) => refused(path),
            None => real!(mknodat(c_int, *const c_char, mode_t, dev_t) -> c_int)(dir, path, mode, dev),
        }
    }
}

/// Calls for extended attributes, of a path and of a descriptor.
macro_rules! attributes {
    ($($of_path:ident, $of_link:ident, $of_fd:ident ($($arg:ident: $type:ty),*) -> $out:ty;)*) => { interpose! {"C" $(
        fn $of_path(path: *const c_char $(, $arg: $type)*) -> $out {
            match remote!(path) {
                Some(_) => unsupported() as $out,
                None => real!($of_path(*const c_char $(, $type)*) -> $out)(path $(, $arg)*),
            }
        }
        fn $of_link(path: *const c_char $(, $arg: $type)*) -> $out {
            match remote!(path) {
                Some(_) => unsupported() as $out,
                None => real!($of_link(*const c_char $(, $type)*) -> $out)(path $(, $arg)*),
            }
        }
        fn $of_fd(fd: c_int $(, $arg: $type)*) -> $out {
            match kind(fd) {
                Kind::Remote | Kind::Local | Kind::Folder => unsupported() as $out,
                _ => real!($of_fd(c_int $(, $type)*) -> $out)(fd $(, $arg)*),
            }
        }
    )*} };
}

fn unsupported() -> ssize_t {
    set_errno(libc::ENOTSUP);
    -1
}

attributes! {
    getxattr, lgetxattr, fgetxattr(name: *const c_char, value: *mut c_void, len: size_t) -> ssize_t;
    setxattr, lsetxattr, fsetxattr(name: *const c_char, value: *const c_void, len: size_t, how: c_int) -> c_int;
    listxattr, llistxattr, flistxattr(names: *mut c_char, len: size_t) -> ssize_t;
    removexattr, lremovexattr, fremovexattr(name: *const c_char) -> c_int;
}
