//! The environment of a program that is started: `LD_PRELOAD` names this library only where the program can load it.
//!
//! A program of another C library, or with an address sanitizer, does not start with it. It is started without, on plain TCP, and so is what it starts.
//!
//! # Safety
//!
//! The arguments are those of a call that starts a program. Memory that is not mapped is the kernel's to refuse.

use libc::{c_char, c_int};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, openat, statat};
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use weft_ring::checked;
use weft_run::preload::without_ours;
use weft_sys::elf::{self, Kind};

use crate::iov::is_bad;
use crate::work::LIBRARY;
use crate::{handlers, signal};

/// The kernel follows so many scripts to their interpreters.
const SCRIPTS: u32 = 5;
const PAGE: usize = 4096;
/// The longest string of an environment, and the most strings: the kernel's limits are of this order.
const LONGEST: usize = 32 * PAGE;
const MOST: usize = 1 << 20;
const NAME: &[u8] = b"LD_PRELOAD=";
/// The path in which the C library looks for a program if there is no `PATH`.
const USUAL_PATH: &str = "/bin:/usr/bin";

/// The program that a call starts.
#[derive(Clone, Copy)]
pub(crate) enum Program {
    /// By its path.
    At(*const c_char),
    /// By its name in `PATH`.
    Named(*const c_char),
    /// By a descriptor of its file or of a folder, and the flags of `execveat`.
    Below(c_int, *const c_char, c_int),
}

/// The environment for a program.
pub(crate) struct ChildEnv {
    given: *const *const c_char,
    /// The list and the string in it that are not the caller's.
    changed: Option<(Vec<*const c_char>, CString)>,
}

impl ChildEnv {
    /// # Safety
    /// As the call that starts the program with the environment `given`.
    pub(crate) unsafe fn of(program: Program, given: *const *const c_char) -> ChildEnv {
        let errno = crate::errno();
        // The `close` of the file is no place to be cancelled.
        let _busy = signal::again(&LIBRARY);
        // SAFETY: the caller's promise.
        let changed = unsafe { changed(program, given) };
        crate::set_errno(errno);
        ChildEnv { given, changed }
    }

    /// The list for the call; it is the caller's as long as this lives.
    pub(crate) fn list(&self) -> *const *const c_char {
        self.changed
            .as_ref()
            .map_or(self.given, |(list, _)| list.as_ptr())
    }
}

/// The process's own environment.
pub(crate) fn own() -> *const *const c_char {
    unsafe extern "C" {
        static environ: *const *const c_char;
    }
    // SAFETY: the C library's variable.
    unsafe { environ }
}

unsafe fn changed(
    program: Program,
    given: *const *const c_char,
) -> Option<(Vec<*const c_char>, CString)> {
    // In a sandbox no call may be made that the program does not make.
    if handlers::are_given_back() {
        return None;
    }
    // SAFETY: the caller's promise.
    let mut list = unsafe { strings(given) }?;
    // The first of the name counts.
    let at = list.iter().position(|&text| is_named(text))?;
    // SAFETY: as above.
    let value = unsafe { text(list[at]) }?;
    let rest = without_ours(value.strip_prefix(NAME)?)?;
    // SAFETY: as above.
    if !refuses(unsafe { file(program) }?) {
        return None;
    }
    let mut value = Vec::new();
    if rest.is_empty() {
        list.remove(at);
    } else {
        value = [NAME, &rest].concat();
    }
    let value = CString::new(value).ok()?;
    if !rest.is_empty() {
        list[at] = value.as_ptr();
    }
    list.push(std::ptr::null());
    Some((list, value))
}

/// The pointers of a list, without the null at its end.
unsafe fn strings(given: *const *const c_char) -> Option<Vec<*const c_char>> {
    let mut list = Vec::new();
    while list.len() < MOST {
        let at = given.wrapping_add(list.len());
        if is_bad(at) {
            return None;
        }
        // SAFETY: it was readable a moment ago, and the caller's promise.
        let text = unsafe { at.read() };
        if text.is_null() {
            return Some(list);
        }
        list.push(text);
    }
    None
}

fn is_named(text: *const c_char) -> bool {
    let mut start = [0_u8; NAME.len()];
    // SAFETY: ours, and all of it.
    let n = unsafe { checked::copy(start.as_mut_ptr(), text.cast(), start.len()) };
    n == start.len() && start == NAME
}

/// A copy of a string. `None`: it is not mapped, or has no end.
unsafe fn text(from: *const c_char) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    while text.len() < LONGEST {
        let at = from.cast::<u8>().wrapping_add(text.len());
        if is_bad(at) {
            return None;
        }
        // What is on one page is readable as a whole.
        let rest = (PAGE - at.addr() % PAGE).min(256);
        let mut piece = [0_u8; 256];
        // SAFETY: there is room for all of it.
        if unsafe { checked::copy(piece.as_mut_ptr(), at, rest) } != rest {
            return None;
        }
        let piece = &piece[..rest];
        if let Some(end) = piece.iter().position(|&byte| byte == 0) {
            text.extend(&piece[..end]);
            return Some(text);
        }
        text.extend(piece);
    }
    None
}

unsafe fn path(from: *const c_char) -> Option<PathBuf> {
    // SAFETY: the caller's promise.
    let text = unsafe { text(from) }?;
    Some(std::ffi::OsString::from_vec(text).into())
}

/// The program's file, if it is one that can be read.
unsafe fn file(program: Program) -> Option<OwnedFd> {
    // SAFETY: the caller's promise.
    unsafe {
        match program {
            Program::At(name) => open(&path(name)?),
            Program::Named(name) => named(&path(name)?),
            Program::Below(fd, _, _) if fd < 0 && fd != libc::AT_FDCWD => None,
            Program::Below(fd, name, flags) => {
                let name = path(name)?;
                let folder = if fd == libc::AT_FDCWD {
                    PathBuf::from(".")
                } else {
                    format!("/proc/self/fd/{fd}").into()
                };
                match name.as_os_str().is_empty() {
                    true if flags & libc::AT_EMPTY_PATH != 0 => open(&folder),
                    true => None,
                    // An absolute path replaces the folder's.
                    false => open(&folder.join(name)),
                }
            }
        }
    }
}

/// As `execvp` finds it.
fn named(name: &Path) -> Option<OwnedFd> {
    let bytes = name.as_os_str().as_bytes();
    if bytes.contains(&b'/') || bytes.is_empty() {
        return open(name);
    }
    // SAFETY: a name with its end. Another thread may not change the environment meanwhile, as with `execvp` itself.
    let path = unsafe { libc::getenv(c"PATH".as_ptr()) };
    let path = if path.is_null() {
        USUAL_PATH.as_bytes()
    } else {
        // SAFETY: the C library's string.
        unsafe { CStr::from_ptr(path) }.to_bytes()
    };
    path.split(|&byte| byte == b':').find_map(|folder| {
        let candidate = Path::new(OsStr::from_bytes(folder)).join(name);
        let is_executable = rustix::fs::access(&candidate, rustix::fs::Access::EXEC_OK).is_ok();
        open(&candidate).filter(|_| is_executable)
    })
}

/// Opens a regular file; what else has the name is left alone.
fn open(path: &Path) -> Option<OwnedFd> {
    let about = statat(CWD, path, AtFlags::empty()).ok()?;
    if FileType::from_raw_mode(about.st_mode) != FileType::RegularFile {
        return None;
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    openat(CWD, path, flags, Mode::empty()).ok()
}

/// Returns true if the program, or the interpreter that a script leads to, does not start with this library.
fn refuses(mut file: OwnedFd) -> bool {
    for _ in 0..=SCRIPTS {
        match elf::kind(&file) {
            Ok(Kind::Script(interpreter)) => match open(Path::new(&interpreter)) {
                Some(next) => file = next,
                None => return false,
            },
            _ => return matches!(elf::refuses_preload(&file), Ok(Some(_))),
        }
    }
    false
}
