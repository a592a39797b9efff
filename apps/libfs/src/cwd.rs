//! A working directory on a server.
//!
//! The kernel keeps it, as it keeps the offsets of placeholders: the process's directory is one that has been removed, and whose path contains the remote one.
//! So children and the programs that a process executes inherit it, and a relative path that does not pass through this library finds nothing.
//!
//! # Safety
//!
//! See the crate's.

use std::ffi::{CString, OsStr, OsString, c_char, c_int};
use std::fs::DirBuilder;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::size_t;
use weft_fs::name::RemotePath;
use weft_fs::{Errno, Error};

use weft_sys::{interpose, next::set_errno, real};

use crate::open::remote;
use crate::table::{Kind, is_guest, kind, lock, table};
use crate::{copied, done, link, resolve};

/// The working directory is on a server: only then the table is asked.
static REMOTE: AtomicBool = AtomicBool::new(false);
/// Beginning of the name of the removed folder.
const MARK: &str = "weft-fs-cwd.";
/// How the kernel ends the paths of removed folders.
const REMOVED: &[u8] = b" (deleted)";

/// The working directory, if it is on a server.
pub(crate) fn remote() -> Option<RemotePath> {
    if REMOTE.load(Ordering::Acquire) {
        lock(&table().cwd).clone()
    } else {
        None
    }
}

/// Learns from the kernel what was inherited.
pub(crate) extern "C" fn adopt() {
    note(inherited());
}

fn inherited() -> Option<RemotePath> {
    let path = std::fs::read_link("/proc/self/cwd").ok()?;
    let path = path.as_os_str().as_bytes().strip_suffix(REMOVED)?;
    let mark = path
        .windows(MARK.len())
        .position(|part| part == MARK.as_bytes())?;
    let slash = path[mark..].iter().position(|&b| b == b'/')?;
    link::of_text(&path[mark + slash..])
}

fn note(path: Option<RemotePath>) {
    let is_remote = path.is_some();
    *lock(&table().cwd) = path;
    REMOTE.store(is_remote, Ordering::Release);
}

/// Makes a folder of this kind, moves into it, and removes it.
fn enter(path: &RemotePath) -> Result<(), Errno> {
    let mut random = [0_u8; 8];
    // SAFETY: room for so many bytes.
    unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) };
    let name = format!("{MARK}{:016x}", u64::from_ne_bytes(random));
    let below: PathBuf = OsString::from_vec(link::text(path)).into();
    let below = below.strip_prefix("/").map_err(|_| Errno::INVAL)?;
    let places = ["/dev/shm".into(), "/tmp".into(), std::env::temp_dir()];
    let mut failed = Errno::ACCESS;
    for place in places {
        let top = place.join(&name);
        let folder = top.join(below);
        let made = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
            .and_then(|()| move_to(folder.as_os_str()));
        for part in folder.ancestors().take_while(|part| *part != place) {
            let _ = std::fs::remove_dir(part);
        }
        match made {
            Ok(()) => return Ok(()),
            Err(e) => failed = e,
        }
    }
    Err(failed)
}

fn move_to(folder: &OsStr) -> Result<(), Errno> {
    let folder = CString::new(folder.as_bytes()).map_err(|_| Errno::INVAL)?;
    // SAFETY: a C string.
    if unsafe { real!(chdir(*const c_char) -> c_int)(folder.as_ptr()) } < 0 {
        return Err(Errno::from_raw_os_error(weft_sys::next::errno()));
    }
    Ok(())
}

fn change(path: Result<RemotePath, Errno>) -> c_int {
    done(path.map_err(Error::from).and_then(|path| {
        if !link::attr(&path)?.dir {
            return Err(Errno::NOTDIR.into());
        }
        enter(&path)?;
        moved(Some(path));
        Ok(())
    }))
}

/// Notes the new directory. That of a `vfork` child is not its parent's, whose memory it uses.
fn moved(path: Option<RemotePath>) {
    if !is_guest() {
        note(path);
    }
}

fn left(rc: c_int) -> c_int {
    if rc == 0 && REMOTE.load(Ordering::Acquire) {
        moved(None);
    }
    rc
}

/// The working directory's path in `room` bytes at `buf`, or in memory that the program frees.
///
/// # Safety
/// As for `getcwd(3)`.
unsafe fn give(path: &RemotePath, buf: *mut c_char, room: size_t) -> *mut c_char {
    let text = link::text(path);
    if buf.is_null() && room == 0 {
        return copied(&text);
    }
    if room <= text.len() {
        set_errno(if room == 0 {
            libc::EINVAL
        } else {
            libc::ERANGE
        });
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's promise, or memory of this length.
    unsafe {
        let to = if buf.is_null() {
            libc::malloc(room).cast()
        } else {
            buf
        };
        if !to.is_null() {
            to.cast::<u8>()
                .copy_from_nonoverlapping(text.as_ptr(), text.len());
            to.add(text.len()).write(0);
        }
        to
    }
}

interpose! {

    "C"
    fn chdir(path: *const c_char) -> c_int {
        match remote!(path) {
            Some(path) => change(path),
            None => left(real!(chdir(*const c_char) -> c_int)(path)),
        }
    }
    fn fchdir(fd: c_int) -> c_int {
        if kind(fd) == Kind::Folder {
            return change(table().path(fd).ok_or(Errno::BADF));
        }
        left(real!(fchdir(c_int) -> c_int)(fd))
    }
    fn getcwd(buf: *mut c_char, room: size_t) -> *mut c_char {
        match remote() {
            Some(path) => give(&path, buf, room),
            None => real!(getcwd(*mut c_char, size_t) -> *mut c_char)(buf, room),
        }
    }
    fn __getcwd_chk(buf: *mut c_char, room: size_t, len: size_t) -> *mut c_char {
        match remote() {
            Some(path) if room <= len => give(&path, buf, room),
            _ => real!(__getcwd_chk(*mut c_char, size_t, size_t) -> *mut c_char)(buf, room, len),
        }
    }
    fn getwd(buf: *mut c_char) -> *mut c_char {
        match remote() {
            Some(path) => give(&path, buf, libc::PATH_MAX as size_t),
            None => real!(getwd(*mut c_char) -> *mut c_char)(buf),
        }
    }
    fn get_current_dir_name() -> *mut c_char {
        match remote() {
            Some(path) => give(&path, std::ptr::null_mut(), 0),
            None => real!(get_current_dir_name() -> *mut c_char)(),
        }
    }
}
