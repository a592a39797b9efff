//! Attributes.
//!
//! # Safety
//!
//! See the crate's.

use std::ffi::{c_char, c_int, c_uint};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

use libc::{stat as Stat, statx as Statx};
use weft_fs::name::{Endpoint, RemotePath};
use weft_fs::wire::{Attr, Flags, Op, Request};
use weft_fs::{Errno, Error};

use weft_sys::next::errno;
use weft_sys::{interpose, real};

use crate::table::{Kind, kind, table};
use crate::{fail_name, link, resolve};

const AT_EMPTY_PATH: c_int = libc::AT_EMPTY_PATH;

/// A device number for each server.
fn device(endpoint: &Endpoint) -> u64 {
    let mut hasher = DefaultHasher::new();
    endpoint.hash(&mut hasher);
    0x7766_0000 | (hasher.finish() & 0xffff)
}

fn made_up(attr: &Attr, endpoint: &Endpoint) -> Stat {
    // SAFETY: numbers, for which zero is a value.
    let mut stat: Stat = unsafe { MaybeUninit::zeroed().assume_init() };
    stat.st_dev = device(endpoint);
    stat.st_ino = attr.ino;
    let kind = if attr.dir {
        libc::S_IFDIR
    } else {
        libc::S_IFREG
    };
    stat.st_mode = kind | libc::mode_t::from(attr.mode & 0o777);
    stat.st_nlink = if attr.dir { 2 } else { 1 };
    // SAFETY: no arguments.
    (stat.st_uid, stat.st_gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    stat.st_size = attr.size as i64;
    stat.st_blksize = 1 << 20;
    stat.st_blocks = attr.size.div_ceil(512) as i64;
    let (seconds, nanos) = (attr.mtime / 1_000_000_000, attr.mtime % 1_000_000_000);
    stat.st_mtime = seconds as i64;
    stat.st_mtime_nsec = nanos as i64;
    (stat.st_ctime, stat.st_ctime_nsec) = (stat.st_mtime, stat.st_mtime_nsec);
    (stat.st_atime, stat.st_atime_nsec) = (stat.st_mtime, stat.st_mtime_nsec);
    stat
}

/// Of a path. A buffer of this host has the attributes of its memory file, as `fstat` has.
fn of_path(path: &RemotePath) -> Result<Stat, Error> {
    if !path.name.is_root() {
        let request = Request {
            flags: Flags::READ,
            ..Request::named(Op::Open, &path.name)
        };
        match link::here(path, &request) {
            Ok(Some((reply, Some(file)))) => {
                let mode = reply.attr.writable.then_some(reply.attr.mode);
                return of_file(file.as_raw_fd(), mode);
            }
            // What may not be read has attributes all the same.
            Ok(_) | Err(Error::Errno(Errno::ISDIR | Errno::ACCESS)) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(made_up(&link::attr(path)?, &path.endpoint))
}

/// Of a file of this host. The mode of a buffer is not that of its memory file.
fn of_file(fd: c_int, mode: Option<u16>) -> Result<Stat, Error> {
    let mut stat = MaybeUninit::<Stat>::zeroed();
    // SAFETY: room for the structure that is written.
    let rc = unsafe { real!(fstat(c_int, *mut Stat) -> c_int)(fd, stat.as_mut_ptr()) };
    if rc < 0 {
        return Err(Errno::from_raw_os_error(errno()).into());
    }
    // SAFETY: filled, and zero is a value of all of it.
    let mut stat = unsafe { stat.assume_init() };
    if let Some(mode) = mode {
        stat.st_mode = libc::S_IFREG | libc::mode_t::from(mode);
    }
    // A memory file has no name, so no links.
    stat.st_nlink = stat.st_nlink.max(1);
    Ok(stat)
}

/// Of a descriptor of ours.
fn of_fd(fd: c_int) -> Result<Stat, Error> {
    if kind(fd) == Kind::Local {
        return of_file(fd, table().mode(fd));
    }
    if kind(fd) == Kind::Folder {
        let path = table().path(fd).ok_or(Errno::BADF)?;
        return of_path(&path);
    }
    let entry = table().entry(fd)?;
    let attr = entry.file.stat()?;
    Ok(made_up(&attr, entry.file.endpoint()))
}

fn give(done: Result<Stat, Error>, to: *mut Stat) -> c_int {
    match done {
        Ok(stat) => {
            // SAFETY: the program's promise.
            unsafe { to.write(stat) };
            0
        }
        Err(e) => fail_name(&e),
    }
}

/// Whether a descriptor is `/`.
pub(crate) fn is_root(fd: c_int) -> bool {
    let mut stats = [const { MaybeUninit::<Stat>::zeroed() }; 2];
    // SAFETY: room for the structures that are written, and zero is a value of all of them.
    let [of_fd, of_root] = unsafe {
        let rc = real!(fstat(c_int, *mut Stat) -> c_int)(fd, stats[0].as_mut_ptr())
            | real!(stat(*const c_char, *mut Stat) -> c_int)(c"/".as_ptr(), stats[1].as_mut_ptr());
        if rc != 0 {
            return false;
        }
        stats.map(|stat| stat.assume_init())
    };
    (of_fd.st_dev, of_fd.st_ino) == (of_root.st_dev, of_root.st_ino)
}

fn is_ours(fd: c_int) -> bool {
    match kind(fd) {
        Kind::Remote | Kind::Folder => true,
        Kind::Local => table().mode(fd).is_some(),
        Kind::Plain | Kind::Own => false,
    }
}

/// Returns the attributes of the object of `fstatat` and similar calls, if it is remote.
fn at(dir: c_int, path: *const c_char, how: c_int) -> Option<Result<Stat, Error>> {
    // SAFETY: the program's promise.
    if how & AT_EMPTY_PATH != 0 && unsafe { path.as_ref() }.is_none_or(|&first| first == 0) {
        if dir == libc::AT_FDCWD {
            return crate::cwd::remote().map(|path| of_path(&path));
        }
        return is_ours(dir).then(|| of_fd(dir));
    }
    // SAFETY: as above.
    let path = unsafe { resolve(dir, path) }?;
    Some(path.map_err(Error::from).and_then(|path| of_path(&path)))
}

macro_rules! stats {
    ($($stat:ident, $lstat:ident, $fstat:ident, $fstatat:ident;)*) => { interpose! {"C" $(
        fn $stat(path: *const c_char, to: *mut Stat) -> c_int {
            match at(libc::AT_FDCWD, path, 0) {
                Some(done) => give(done, to),
                None => real!($stat(*const c_char, *mut Stat) -> c_int)(path, to),
            }
        }
        fn $lstat(path: *const c_char, to: *mut Stat) -> c_int {
            match at(libc::AT_FDCWD, path, 0) {
                Some(done) => give(done, to),
                None => real!($lstat(*const c_char, *mut Stat) -> c_int)(path, to),
            }
        }
        fn $fstat(fd: c_int, to: *mut Stat) -> c_int {
            if is_ours(fd) {
                return give(of_fd(fd), to);
            }
            real!($fstat(c_int, *mut Stat) -> c_int)(fd, to)
        }
        fn $fstatat(dir: c_int, path: *const c_char, to: *mut Stat, how: c_int) -> c_int {
            match at(dir, path, how) {
                Some(done) => give(done, to),
                None => real!($fstatat(c_int, *const c_char, *mut Stat, c_int) -> c_int)(dir, path, to, how),
            }
        }
    )*} };
}

stats! {
    stat, lstat, fstat, fstatat;
    stat64, lstat64, fstat64, fstatat64;
}

// Programs that were linked before glibc 2.33 call these.
macro_rules! old_stats {
    ($($stat:ident, $lstat:ident, $fstat:ident, $fstatat:ident;)*) => { interpose! {"C" $(
        fn $stat(version: c_int, path: *const c_char, to: *mut Stat) -> c_int {
            match at(libc::AT_FDCWD, path, 0) {
                Some(done) => give(done, to),
                None => real!($stat(c_int, *const c_char, *mut Stat) -> c_int)(version, path, to),
            }
        }
        fn $lstat(version: c_int, path: *const c_char, to: *mut Stat) -> c_int {
            match at(libc::AT_FDCWD, path, 0) {
                Some(done) => give(done, to),
                None => real!($lstat(c_int, *const c_char, *mut Stat) -> c_int)(version, path, to),
            }
        }
        fn $fstat(version: c_int, fd: c_int, to: *mut Stat) -> c_int {
            if is_ours(fd) {
                return give(of_fd(fd), to);
            }
            real!($fstat(c_int, c_int, *mut Stat) -> c_int)(version, fd, to)
        }
        fn $fstatat(version: c_int, dir: c_int, path: *const c_char, to: *mut Stat, how: c_int) -> c_int {
            match at(dir, path, how) {
                Some(done) => give(done, to),
                None => real!($fstatat(c_int, c_int, *const c_char, *mut Stat, c_int) -> c_int)(version, dir, path, to, how),
            }
        }
    )*} };
}

old_stats! {
    __xstat, __lxstat, __fxstat, __fxstatat;
    __xstat64, __lxstat64, __fxstat64, __fxstatat64;
}

interpose! {

    "C"
    fn statx(dir: c_int, path: *const c_char, how: c_int, mask: c_uint, to: *mut Statx) -> c_int {
        let Some(done) = at(dir, path, how) else {
            return real!(statx(c_int, *const c_char, c_int, c_uint, *mut Statx) -> c_int)(dir, path, how, mask, to);
        };
        match done {
            Ok(stat) => {
                to.write(extended(&stat));
                0
            }
            Err(e) => fail_name(&e),
        }
    }
}

fn extended(stat: &Stat) -> Statx {
    // SAFETY: numbers, for which zero is a value.
    let mut out: Statx = unsafe { MaybeUninit::zeroed().assume_init() };
    out.stx_mask = libc::STATX_BASIC_STATS;
    out.stx_blksize = stat.st_blksize as u32;
    out.stx_nlink = stat.st_nlink as u32;
    (out.stx_uid, out.stx_gid) = (stat.st_uid, stat.st_gid);
    out.stx_mode = stat.st_mode as u16;
    out.stx_ino = stat.st_ino;
    out.stx_size = stat.st_size as u64;
    out.stx_blocks = stat.st_blocks as u64;
    (out.stx_atime.tv_sec, out.stx_atime.tv_nsec) = (stat.st_atime, stat.st_atime_nsec as u32);
    (out.stx_mtime.tv_sec, out.stx_mtime.tv_nsec) = (stat.st_mtime, stat.st_mtime_nsec as u32);
    (out.stx_ctime.tv_sec, out.stx_ctime.tv_nsec) = (stat.st_ctime, stat.st_ctime_nsec as u32);
    out.stx_dev_major = libc::major(stat.st_dev);
    out.stx_dev_minor = libc::minor(stat.st_dev);
    out
}
