//! Opening and closing; names.
//!
//! # Safety
//!
//! See the crate's.

use std::ffi::{c_char, c_int, c_uint};

use libc::{mode_t, off_t};
use weft_fs::name::RemotePath;
use weft_fs::wire::{Flags, Op, Request};
use weft_fs::{Errno, Error};

use weft_sys::{
    interpose,
    next::{errno, set_errno},
    real,
};

use crate::table::{Kind, Table, is_guest, kind, number, table};
use crate::{done, fail, fail_name, link, resolve};

/// The bits of a mode that are not the owner's.
const OTHERS: mode_t = 0o077;

/// The protocol's flags for those of `open(2)`.
fn flags_of(how: c_int) -> Flags {
    let mut flags = match how & libc::O_ACCMODE {
        libc::O_WRONLY => Flags::WRITE,
        libc::O_RDWR => Flags::READ.with(Flags::WRITE),
        _ => Flags::READ,
    };
    for (bit, flag) in [
        (libc::O_CREAT, Flags::CREATE),
        (libc::O_EXCL, Flags::EXCLUSIVE),
        (libc::O_TRUNC, Flags::TRUNCATE),
        (libc::O_APPEND, Flags::APPEND),
    ] {
        if how & bit != 0 {
            flags = flags.with(flag);
        }
    }
    flags
}

/// `mode` counts where the buffer is made: one that gives nothing to others is for a buffer of the owner's alone, as `mkstemp` makes it.
pub(crate) fn open_path(path: Result<RemotePath, Errno>, how: c_int, mode: mode_t) -> c_int {
    match path
        .map_err(Error::from)
        .and_then(|path| try_open(&path, how, mode))
    {
        Ok(fd) => fd,
        Err(e) => fail_name(&e),
    }
}

fn try_open(path: &RemotePath, how: c_int, mode: mode_t) -> Result<c_int, Error> {
    let table = table();
    let folder = || {
        if link::attr(path)?.dir {
            table.open_folder(path, how)
        } else {
            Err(Errno::NOTDIR.into())
        }
    };
    if how & libc::O_DIRECTORY != 0 || path.name.is_root() {
        if how & libc::O_ACCMODE != libc::O_RDONLY {
            return Err(Errno::ISDIR.into());
        }
        return folder();
    }
    let mut flags = flags_of(how);
    if flags.has(Flags::CREATE) && mode & OTHERS == 0 {
        flags = flags.with(Flags::PRIVATE);
    }
    let request = Request {
        flags,
        size: path.size,
        ..Request::named(Op::Open, &path.name)
    };
    let opened = match link::here(path, &request) {
        Ok(Some((reply, Some(file)))) => {
            let fd = number(file);
            if how & libc::O_CLOEXEC == 0 {
                // SAFETY: a descriptor of ours.
                unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
            }
            if how & libc::O_TRUNC != 0 {
                crate::io::follow(&path.endpoint, reply.attr.ino, fd)?;
            }
            table.note_local(fd, path, &reply.attr);
            Ok(fd)
        }
        Ok(Some(_)) => Err(Errno::IO.into()),
        Ok(None) => table.open_remote(path, flags, how),
        Err(e) => Err(e),
    };
    match opened {
        Err(e) if e.errno() == Errno::ISDIR && how & libc::O_ACCMODE == libc::O_RDONLY => folder(),
        opened => opened,
    }
}

/// Forgets a number that the kernel has just assigned anew.
pub(crate) fn fresh(fd: c_int) -> c_int {
    if fd >= 0 && kind(fd) != Kind::Plain {
        let _ = table().closed(fd);
    }
    fd
}

macro_rules! opens {
    ($($name:ident, $name_at:ident;)*) => { interpose! {"C" $(
        fn $name(path: *const c_char, how: c_int, mode: c_uint) -> c_int {
            match resolve(libc::AT_FDCWD, path) {
                Some(path) => open_path(path, how, mode),
                None => fresh(real!($name(*const c_char, c_int, c_uint) -> c_int)(path, how, mode)),
            }
        }
        fn $name_at(dir: c_int, path: *const c_char, how: c_int, mode: c_uint) -> c_int {
            match resolve(dir, path) {
                Some(path) => open_path(path, how, mode),
                None => fresh(real!($name_at(c_int, *const c_char, c_int, c_uint) -> c_int)(dir, path, how, mode)),
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

/// The path of a call, if it is remote; without a folder, or with one.
macro_rules! remote {
    ($path:expr) => {
        // SAFETY: the program's promise.
        unsafe { resolve(libc::AT_FDCWD, $path) }
    };
    ($dir:expr, $path:expr) => {
        // SAFETY: the program's promise.
        unsafe { resolve($dir, $path) }
    };
}

fn change(path: Result<RemotePath, Errno>, op: Op) -> c_int {
    done(
        path.map_err(Error::from)
            .and_then(|path| link::change(&path, op)),
    )
}

/// Checks that a path exists, and that this client has the rights of `access(2)`.
pub(crate) fn is_there(path: Result<RemotePath, Errno>, mode: c_int) -> c_int {
    done(path.map_err(Error::from).and_then(|path| {
        let attr = link::attr(&path)?;
        if mode & libc::W_OK != 0 && !attr.writable {
            return Err(Errno::ROFS.into());
        }
        let wanted = [(libc::R_OK, 4), (libc::W_OK, 2)];
        let lacks = |(how, right)| mode & how != 0 && attr.rights & right == 0;
        if !attr.dir && (mode & libc::X_OK != 0 || wanted.into_iter().any(lacks)) {
            return Err(Errno::ACCESS.into());
        }
        Ok(())
    }))
}

fn rename_at(
    from: Option<Result<RemotePath, Errno>>,
    to: Option<Result<RemotePath, Errno>>,
) -> Option<c_int> {
    Some(done(match (from, to) {
        (None, None) => return None,
        (Some(from), Some(to)) => from
            .and_then(|from| Ok((from, to?)))
            .map_err(Error::from)
            .and_then(|(from, to)| link::rename(&from, &to)),
        _ => Err(Errno::XDEV.into()),
    }))
}

/// Accepts a call that would change owners or times of a remote buffer, and changes nothing: they are the server's.
pub(crate) fn ignored(path: Result<RemotePath, Errno>) -> c_int {
    done(
        path.map_err(Error::from)
            .and_then(|path| link::attr(&path).map(drop)),
    )
}

fn rights(path: Result<RemotePath, Errno>, mode: mode_t) -> c_int {
    done(
        path.map_err(Error::from)
            .and_then(|path| link::chmod(&path, mode)),
    )
}

fn cut(path: Result<RemotePath, Errno>, len: off_t) -> c_int {
    let fd = open_path(path, libc::O_WRONLY | libc::O_CLOEXEC, 0);
    if fd < 0 {
        return fd;
    }
    let cut = crate::io::truncate_fd(fd, len);
    let errno = errno();
    // SAFETY: opened above.
    unsafe { close(fd) };
    set_errno(errno);
    cut
}

pub(crate) use remote;

interpose! {

    "C"
    fn creat(path: *const c_char, mode: mode_t) -> c_int {
        open(path, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, mode)
    }
    fn creat64(path: *const c_char, mode: mode_t) -> c_int {
        open64(path, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, mode)
    }
    fn close(fd: c_int) -> c_int {
        let last = if kind(fd) == Kind::Plain { Ok(()) } else { table().closed(fd) };
        let closed = real!(close(c_int) -> c_int)(fd);
        match last {
            Ok(()) => closed,
            Err(e) => fail(&e),
        }
    }
    fn close_range(first: c_uint, last: c_uint, how: c_int) -> c_int {
        let sweep = |first: c_uint, last: c_uint| {
            if first > last {
                return 0;
            }
            libc::syscall(libc::SYS_close_range, first, last, how) as c_int
        };
        if is_guest() || how & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 || how & libc::CLOSE_RANGE_UNSHARE as c_int != 0 {
            return sweep(first, last);
        }
        let mut at = first;
        for (fd, what) in Table::ours(first as usize, last as usize) {
            if what == Kind::Own {
                // The connection's: around it.
                if fd as c_uint > at {
                    sweep(at, fd as c_uint - 1);
                }
                at = fd as c_uint + 1;
            } else {
                let _ = table().closed(fd);
            }
        }
        sweep(at, last)
    }
    fn closefrom(first: c_int) -> () {
        close_range(first.max(0) as c_uint, c_uint::MAX, 0);
    }
    fn unlink(path: *const c_char) -> c_int {
        match remote!(path) {
            Some(path) => change(path, Op::Unlink),
            None => real!(unlink(*const c_char) -> c_int)(path),
        }
    }
    fn unlinkat(dir: c_int, path: *const c_char, how: c_int) -> c_int {
        match remote!(dir, path) {
            Some(path) if how & libc::AT_REMOVEDIR != 0 => change(path, Op::Rmdir),
            Some(path) => change(path, Op::Unlink),
            None => real!(unlinkat(c_int, *const c_char, c_int) -> c_int)(dir, path, how),
        }
    }
    fn remove(path: *const c_char) -> c_int {
        match remote!(path) {
            Some(path) => {
                let gone = change(path.clone(), Op::Unlink);
                if gone < 0 && errno() == libc::EISDIR {
                    return change(path, Op::Rmdir);
                }
                gone
            }
            None => real!(remove(*const c_char) -> c_int)(path),
        }
    }
    fn mkdir(path: *const c_char, mode: mode_t) -> c_int {
        match remote!(path) {
            Some(path) => change(path, Op::Mkdir),
            None => real!(mkdir(*const c_char, mode_t) -> c_int)(path, mode),
        }
    }
    fn mkdirat(dir: c_int, path: *const c_char, mode: mode_t) -> c_int {
        match remote!(dir, path) {
            Some(path) => change(path, Op::Mkdir),
            None => real!(mkdirat(c_int, *const c_char, mode_t) -> c_int)(dir, path, mode),
        }
    }
    fn rmdir(path: *const c_char) -> c_int {
        match remote!(path) {
            Some(path) => change(path, Op::Rmdir),
            None => real!(rmdir(*const c_char) -> c_int)(path),
        }
    }
    fn rename(from: *const c_char, to: *const c_char) -> c_int {
        rename_at(remote!(from), remote!(to)).unwrap_or_else(|| {
            real!(rename(*const c_char, *const c_char) -> c_int)(from, to)
        })
    }
    fn renameat(a: c_int, from: *const c_char, b: c_int, to: *const c_char) -> c_int {
        rename_at(remote!(a, from), remote!(b, to)).unwrap_or_else(|| {
            real!(renameat(c_int, *const c_char, c_int, *const c_char) -> c_int)(a, from, b, to)
        })
    }
    fn renameat2(a: c_int, from: *const c_char, b: c_int, to: *const c_char, how: c_uint) -> c_int {
        let paths = (remote!(a, from), remote!(b, to));
        if paths.0.is_none() && paths.1.is_none() {
            return real!(renameat2(c_int, *const c_char, c_int, *const c_char, c_uint) -> c_int)(a, from, b, to, how);
        }
        if how != 0 {
            return fail(&Errno::INVAL.into());
        }
        rename_at(paths.0, paths.1).unwrap_or(-1)
    }
    fn access(path: *const c_char, mode: c_int) -> c_int {
        match remote!(path) {
            Some(path) => is_there(path, mode),
            None => real!(access(*const c_char, c_int) -> c_int)(path, mode),
        }
    }
    fn faccessat(dir: c_int, path: *const c_char, mode: c_int, how: c_int) -> c_int {
        match remote!(dir, path) {
            Some(path) => is_there(path, mode),
            None => real!(faccessat(c_int, *const c_char, c_int, c_int) -> c_int)(dir, path, mode, how),
        }
    }
    fn truncate(path: *const c_char, len: off_t) -> c_int {
        match remote!(path) {
            Some(path) => cut(path, len),
            None => real!(truncate(*const c_char, off_t) -> c_int)(path, len),
        }
    }
    fn truncate64(path: *const c_char, len: off_t) -> c_int {
        match remote!(path) {
            Some(path) => cut(path, len),
            None => real!(truncate64(*const c_char, off_t) -> c_int)(path, len),
        }
    }
    fn chmod(path: *const c_char, mode: mode_t) -> c_int {
        match remote!(path) {
            Some(path) => rights(path, mode),
            None => real!(chmod(*const c_char, mode_t) -> c_int)(path, mode),
        }
    }
    fn fchmodat(dir: c_int, path: *const c_char, mode: mode_t, how: c_int) -> c_int {
        match remote!(dir, path) {
            Some(path) => rights(path, mode),
            None => real!(fchmodat(c_int, *const c_char, mode_t, c_int) -> c_int)(dir, path, mode, how),
        }
    }
    fn fchownat(dir: c_int, path: *const c_char, uid: c_uint, gid: c_uint, how: c_int) -> c_int {
        match remote!(dir, path) {
            Some(path) => ignored(path),
            None => real!(fchownat(c_int, *const c_char, c_uint, c_uint, c_int) -> c_int)(dir, path, uid, gid, how),
        }
    }
    fn utimensat(dir: c_int, path: *const c_char, times: *const libc::timespec, how: c_int) -> c_int {
        let own = if path.is_null() { None } else { remote!(dir, path) };
        match own {
            Some(path) => ignored(path),
            None => real!(utimensat(c_int, *const c_char, *const libc::timespec, c_int) -> c_int)(dir, path, times, how),
        }
    }
}
