//! The environment of a program that is started: `LD_PRELOAD` names this library only where the program can load it.
//!
//! A program of another C library, or with an address sanitizer, does not start with it. It is started without, on plain TCP, and so is what it starts.
//!
//! # Safety
//!
//! The arguments are those of a call that starts a program. Memory that is not mapped is the kernel's to refuse.

use libc::{c_char, c_int};
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use weft_ring::checked;
use weft_run::preload::without_ours;
use weft_sys::elf;

use crate::iov::is_bad;
use crate::work::LIBRARY;
use crate::{handlers, signal};

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
    changed: Option<Changed>,
}

impl ChildEnv {
    /// `folder`: where a relative path begins, if it is not where this process is.
    ///
    /// # Safety
    /// As the call that starts the program with the environment `given`.
    pub(crate) unsafe fn of(
        program: Program,
        folder: &Path,
        given: *const *const c_char,
    ) -> ChildEnv {
        let errno = crate::errno();
        // The `close` of the file is no place to be cancelled.
        let _busy = signal::again(&LIBRARY);
        // SAFETY: the caller's promise.
        let changed = unsafe { changed(program, folder, given) };
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

/// A list in place of the caller's, and the strings in it that are not the caller's.
type Changed = (Vec<*const c_char>, Vec<CString>);

unsafe fn changed(program: Program, folder: &Path, given: *const *const c_char) -> Option<Changed> {
    // In a sandbox no call may be made that the program does not make.
    if handlers::are_given_back() {
        return None;
    }
    // SAFETY: the caller's promise.
    let strings = unsafe { strings(given) }?;
    let (mut list, mut own) = (Vec::with_capacity(strings.len() + 1), Vec::new());
    let mut is_in = false;
    // A name may be there several times. The last counts for the GNU C library, and the first for musl.
    for one in strings {
        // SAFETY: as above.
        let rest = is_named(one).then(|| unsafe { text(one) }).flatten();
        let Some(rest) = rest.and_then(|value| without_ours(value.strip_prefix(NAME)?)) else {
            list.push(one);
            continue;
        };
        is_in = true;
        if !rest.is_empty() {
            let value = CString::new([NAME, &rest].concat()).ok()?;
            list.push(value.as_ptr());
            own.push(value);
        }
    }
    list.push(std::ptr::null());
    // SAFETY: as above.
    (is_in && refuses(unsafe { file(program, folder) }?, folder)).then_some((list, own))
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

/// # Safety
/// A string, or memory that is not mapped.
pub(crate) unsafe fn path(from: *const c_char) -> Option<PathBuf> {
    // SAFETY: the caller's promise.
    let text = unsafe { text(from) }?;
    Some(std::ffi::OsString::from_vec(text).into())
}

/// The program's file, if it is one that can be read.
unsafe fn file(program: Program, folder: &Path) -> Option<OwnedFd> {
    // SAFETY: the caller's promise.
    unsafe {
        match program {
            Program::At(name) => elf::open(&folder.join(path(name)?)),
            Program::Named(name) => named(&path(name)?, folder),
            Program::Below(fd, _, _) if fd < 0 && fd != libc::AT_FDCWD => None,
            Program::Below(fd, name, flags) => {
                let name = path(name)?;
                let folder = if fd == libc::AT_FDCWD {
                    PathBuf::from(".")
                } else {
                    format!("/proc/self/fd/{fd}").into()
                };
                match name.as_os_str().is_empty() {
                    true if flags & libc::AT_EMPTY_PATH != 0 => elf::open(&folder),
                    true => None,
                    // An absolute path replaces the folder's.
                    false => elf::open(&folder.join(name)),
                }
            }
        }
    }
}

/// As `execvp` finds it.
fn named(name: &Path, folder: &Path) -> Option<OwnedFd> {
    let bytes = name.as_os_str().as_bytes();
    if bytes.contains(&b'/') || bytes.is_empty() {
        return elf::open(&folder.join(name));
    }
    // SAFETY: a name with its end. Another thread may not change the environment meanwhile, as with `execvp` itself.
    let path = unsafe { libc::getenv(c"PATH".as_ptr()) };
    let path = if path.is_null() {
        USUAL_PATH.as_bytes()
    } else {
        // SAFETY: the C library's string.
        unsafe { CStr::from_ptr(path) }.to_bytes()
    };
    path.split(|&byte| byte == b':').find_map(|place| {
        let candidate = folder.join(OsStr::from_bytes(place)).join(name);
        let is_executable = rustix::fs::access(&candidate, rustix::fs::Access::EXEC_OK).is_ok();
        elf::open(&candidate).filter(|_| is_executable)
    })
}

/// Returns true if the program, or the interpreter that a script leads to, does not start with this library.
fn refuses(file: OwnedFd, folder: &Path) -> bool {
    let file = match elf::interpreter(&file, folder) {
        Some(path) => elf::open(&path),
        None => Some(file),
    };
    file.is_some_and(|file| matches!(elf::refuses_preload(&file), Ok(Some(_))))
}
