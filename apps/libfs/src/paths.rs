//! Calls that the C library makes out of others inside itself, where they do not pass through this library: for remote paths they are made of ours.
//!
//! # Safety
//!
//! See the crate's.

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};

use libc::{size_t, ssize_t};
use weft_fs::name::RemotePath;
use weft_fs::wire::{Op, Request};
use weft_fs::{Errno, Error};

use weft_sys::{
    interpose,
    next::{errno, set_errno},
    real,
};

use crate::open::{ignored, is_there, remote};
use crate::table::{Kind, kind, table};
use crate::{bytes, copied, done, fail_name, link, resolve};

/// Names that are tried for a temporary file, as many as the C library tries.
const TRIES: usize = 62 * 62 * 62;
const LETTERS: &[u8; 62] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

/// Fills the `XXXXXX` of a template until `make` succeeds, if the path is remote.
///
/// # Safety
/// As for `mkstemps(3)`.
unsafe fn temporary(
    template: *mut c_char,
    suffix: c_int,
    make: impl Fn(*const c_char) -> c_int,
) -> Option<c_int> {
    // SAFETY: the caller's promise.
    let text = unsafe {
        let _ = resolve(libc::AT_FDCWD, template)?;
        bytes(template)
    };
    let at = usize::try_from(suffix)
        .ok()
        .and_then(|suffix| text.len().checked_sub(6 + suffix))
        .filter(|&at| &text[at..at + 6] == b"XXXXXX");
    let Some(at) = at else {
        set_errno(libc::EINVAL);
        return Some(-1);
    };
    for _ in 0..TRIES {
        let mut random = [0_u8; 6];
        // SAFETY: room for so many bytes, and the template's six.
        unsafe {
            libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0);
            for (i, byte) in random.into_iter().enumerate() {
                let letter = LETTERS[usize::from(byte) % LETTERS.len()];
                template.add(at + i).write(letter as c_char);
            }
        }
        let made = make(template);
        if made >= 0 || errno() != libc::EEXIST {
            return Some(made);
        }
    }
    Some(-1)
}

/// # Safety
/// As for `mkstemps(3)`.
unsafe fn temporary_file(template: *mut c_char, suffix: c_int, how: c_int) -> Option<c_int> {
    let how = how & !libc::O_ACCMODE | libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    // SAFETY: the caller's promise.
    unsafe { temporary(template, suffix, |path| crate::open::open(path, how, 0o600)) }
}

macro_rules! temporary_files {
    ($($plain:ident, $flags:ident, $suffix:ident, $both:ident;)*) => { interpose! {"C" $(
        fn $plain(template: *mut c_char) -> c_int {
            temporary_file(template, 0, 0).unwrap_or_else(|| real!($plain(*mut c_char) -> c_int)(template))
        }
        fn $flags(template: *mut c_char, how: c_int) -> c_int {
            temporary_file(template, 0, how).unwrap_or_else(|| real!($flags(*mut c_char, c_int) -> c_int)(template, how))
        }
        fn $suffix(template: *mut c_char, suffix: c_int) -> c_int {
            temporary_file(template, suffix, 0).unwrap_or_else(|| real!($suffix(*mut c_char, c_int) -> c_int)(template, suffix))
        }
        fn $both(template: *mut c_char, suffix: c_int, how: c_int) -> c_int {
            temporary_file(template, suffix, how).unwrap_or_else(|| real!($both(*mut c_char, c_int, c_int) -> c_int)(template, suffix, how))
        }
    )*} };
}

temporary_files! {
    mkstemp, mkostemp, mkstemps, mkostemps;
    mkstemp64, mkostemp64, mkstemps64, mkostemps64;
}

/// The path without `.`, `..` and repeated slashes, in `to` or in memory that the program frees. It has to exist.
///
/// # Safety
/// As for `realpath(3)`.
unsafe fn canonical(path: Result<RemotePath, Errno>, to: *mut c_char) -> *mut c_char {
    let found = path.map_err(Error::from).and_then(|path| {
        link::attr(&path)?;
        Ok(link::text(&path))
    });
    let text = match found {
        Ok(text) => text,
        Err(e) => {
            fail_name(&e);
            return std::ptr::null_mut();
        }
    };
    if to.is_null() {
        return copied(&text);
    }
    if text.len() >= libc::PATH_MAX as usize {
        set_errno(libc::ENAMETOOLONG);
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's promise: room for the longest path.
    unsafe {
        to.cast::<u8>()
            .copy_from_nonoverlapping(text.as_ptr(), text.len());
        to.add(text.len()).write(0);
    }
    to
}

/// There are no symbolic links.
fn no_link(path: Result<RemotePath, Errno>) -> ssize_t {
    let there = ignored(path);
    if there == 0 {
        set_errno(libc::EINVAL);
    }
    -1
}

/// The quota and its used part.
fn usage(path: &RemotePath) -> Result<(u64, u64), Error> {
    if link::is_servers(path) {
        return Ok((0, 0));
    }
    link::attr(path)?;
    match link::here(path, &Request::new(Op::Usage))? {
        Some((reply, _)) => Ok((reply.attr.size, reply.region.len)),
        None => table().client(&path.endpoint)?.usage(),
    }
}

/// The path of a remote descriptor.
fn path_of(fd: c_int) -> Option<Result<RemotePath, Errno>> {
    match kind(fd) {
        Kind::Remote | Kind::Folder => Some(table().path(fd).ok_or(Errno::BADF)),
        _ => None,
    }
}

/// Block size of what is said about a server's memory.
const BLOCK: u64 = 4096;
/// Its type for `statfs(2)`.
const TYPE: i64 = 0x7765_6674;

/// Blocks in all, and free ones.
fn blocks(path: Result<RemotePath, Errno>) -> Result<(u64, u64), Error> {
    let (limit, used) = usage(&path?)?;
    Ok((limit / BLOCK, limit.saturating_sub(used) / BLOCK))
}

/// # Safety
/// `to` has room.
unsafe fn give_statvfs(path: Result<RemotePath, Errno>, to: *mut libc::statvfs64) -> c_int {
    done(blocks(path).map(|(all, free)| {
        // SAFETY: the caller's promise; numbers, for which zero is a value.
        unsafe {
            to.write_bytes(0, 1);
            ((*to).f_bsize, (*to).f_frsize) = (BLOCK, BLOCK);
            ((*to).f_blocks, (*to).f_bfree, (*to).f_bavail) = (all, free, free);
            (*to).f_namemax = weft_fs::name::MAX_COMPONENT as u64;
        }
    }))
}

/// # Safety
/// `to` has room.
unsafe fn give_statfs(path: Result<RemotePath, Errno>, to: *mut libc::statfs64) -> c_int {
    done(blocks(path).map(|(all, free)| {
        // SAFETY: the caller's promise; numbers, for which zero is a value.
        unsafe {
            to.write_bytes(0, 1);
            (*to).f_type = TYPE;
            ((*to).f_bsize, (*to).f_frsize) = (BLOCK as i64, BLOCK as i64);
            ((*to).f_blocks, (*to).f_bfree, (*to).f_bavail) = (all, free, free);
            (*to).f_namelen = weft_fs::name::MAX_COMPONENT as i64;
        }
    }))
}

macro_rules! sizes {
    ($($give:ident, $type:ty: $of_path:ident, $of_fd:ident;)*) => { interpose! {"C" $(
        fn $of_path(path: *const c_char, to: *mut $type) -> c_int {
            match remote!(path) {
                Some(path) => $give(path, to),
                None => real!($of_path(*const c_char, *mut $type) -> c_int)(path, to),
            }
        }
        fn $of_fd(fd: c_int, to: *mut $type) -> c_int {
            match path_of(fd) {
                Some(path) => $give(path, to),
                None => real!($of_fd(c_int, *mut $type) -> c_int)(fd, to),
            }
        }
    )*} };
}

// On 64-bit machines both names have one type.
sizes! {
    give_statvfs, libc::statvfs64: statvfs, fstatvfs;
    give_statvfs, libc::statvfs64: statvfs64, fstatvfs64;
    give_statfs, libc::statfs64: statfs, fstatfs;
    give_statfs, libc::statfs64: statfs64, fstatfs64;
}

/// Calls that would change owners or times: they succeed if the object exists, and change nothing.
macro_rules! kept {
    (paths {$($name:ident($($arg:ident: $type:ty),*);)*} descriptors {$($of_fd:ident($($fd_arg:ident: $fd_type:ty),*);)*}) => { interpose! {"C" $(
        fn $name(path: *const c_char $(, $arg: $type)*) -> c_int {
            match remote!(path) {
                Some(path) => ignored(path),
                None => real!($name(*const c_char $(, $type)*) -> c_int)(path $(, $arg)*),
            }
        }
    )* $(
        fn $of_fd(fd: c_int $(, $fd_arg: $fd_type)*) -> c_int {
            match kind(fd) {
                Kind::Plain | Kind::Own => real!($of_fd(c_int $(, $fd_type)*) -> c_int)(fd $(, $fd_arg)*),
                _ => 0,
            }
        }
    )*} };
}

kept! {
    paths {
        utime(times: *const c_void);
        utimes(times: *const c_void);
        lutimes(times: *const c_void);
        chown(uid: c_uint, gid: c_uint);
        lchown(uid: c_uint, gid: c_uint);
    }
    descriptors {
        futimes(times: *const c_void);
        futimens(times: *const c_void);
        fchown(uid: c_uint, gid: c_uint);
    }
}

interpose! {

    "C"
    fn fchmod(fd: c_int, mode: c_uint) -> c_int {
        match kind(fd) {
            Kind::Remote => done(table().entry(fd).and_then(|entry| entry.file.chmod(mode & 0o777))),
            Kind::Folder => 0,
            Kind::Local => done(link::chmod_local(fd, mode & 0o777)),
            _ => real!(fchmod(c_int, c_uint) -> c_int)(fd, mode),
        }
    }
    fn mkdtemp(template: *mut c_char) -> *mut c_char {
        // SAFETY: the template is a C string.
        let make = |path| unsafe { crate::open::mkdir(path, 0o700) };
        match temporary(template, 0, make) {
            Some(0) => template,
            Some(_) => std::ptr::null_mut(),
            None => real!(mkdtemp(*mut c_char) -> *mut c_char)(template),
        }
    }
    fn realpath(path: *const c_char, to: *mut c_char) -> *mut c_char {
        match remote!(path) {
            Some(path) => canonical(path, to),
            None => real!(realpath(*const c_char, *mut c_char) -> *mut c_char)(path, to),
        }
    }
    fn __realpath_chk(path: *const c_char, to: *mut c_char, len: size_t) -> *mut c_char {
        match remote!(path) {
            Some(path) if len >= libc::PATH_MAX as size_t => canonical(path, to),
            _ => real!(__realpath_chk(*const c_char, *mut c_char, size_t) -> *mut c_char)(path, to, len),
        }
    }
    fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
        match remote!(path) {
            Some(path) => canonical(path, std::ptr::null_mut()),
            None => real!(canonicalize_file_name(*const c_char) -> *mut c_char)(path),
        }
    }
    fn readlink(path: *const c_char, to: *mut c_char, len: size_t) -> ssize_t {
        match remote!(path) {
            Some(path) => no_link(path),
            None => real!(readlink(*const c_char, *mut c_char, size_t) -> ssize_t)(path, to, len),
        }
    }
    fn __readlink_chk(path: *const c_char, to: *mut c_char, len: size_t, room: size_t) -> ssize_t {
        match remote!(path) {
            Some(path) => no_link(path),
            None => real!(__readlink_chk(*const c_char, *mut c_char, size_t, size_t) -> ssize_t)(path, to, len, room),
        }
    }
    fn readlinkat(dir: c_int, path: *const c_char, to: *mut c_char, len: size_t) -> ssize_t {
        match remote!(dir, path) {
            Some(path) => no_link(path),
            None => real!(readlinkat(c_int, *const c_char, *mut c_char, size_t) -> ssize_t)(dir, path, to, len),
        }
    }
    fn __readlinkat_chk(dir: c_int, path: *const c_char, to: *mut c_char, len: size_t, room: size_t) -> ssize_t {
        match remote!(dir, path) {
            Some(path) => no_link(path),
            None => real!(__readlinkat_chk(c_int, *const c_char, *mut c_char, size_t, size_t) -> ssize_t)(dir, path, to, len, room),
        }
    }
    fn euidaccess(path: *const c_char, mode: c_int) -> c_int {
        match remote!(path) {
            Some(path) => is_there(path, mode),
            None => real!(euidaccess(*const c_char, c_int) -> c_int)(path, mode),
        }
    }
    fn eaccess(path: *const c_char, mode: c_int) -> c_int {
        euidaccess(path, mode)
    }
    fn futimesat(dir: c_int, path: *const c_char, times: *const c_void) -> c_int {
        match remote!(dir, path) {
            Some(path) => ignored(path),
            None => real!(futimesat(c_int, *const c_char, *const c_void) -> c_int)(dir, path, times),
        }
    }
    fn pathconf(path: *const c_char, name: c_int) -> c_long {
        let Some(path) = remote!(path) else {
            return real!(pathconf(*const c_char, c_int) -> c_long)(path, name);
        };
        match name {
            _ if ignored(path) < 0 => -1,
            libc::_PC_NAME_MAX => weft_fs::name::MAX_COMPONENT as c_long,
            libc::_PC_LINK_MAX => 1,
            // As on any file system.
            _ => real!(pathconf(*const c_char, c_int) -> c_long)(c"/".as_ptr(), name),
        }
    }
}
