//! Links, and the names of files.
//!
//! # Safety
//!
//! See the crate's.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::null_mut;

use weft_sys::{interpose, next::set_errno, real};

use crate::place::{Private, fail, hidden, private, show};

/// As long as a path can be, for the kernel.
const LONGEST: usize = libc::PATH_MAX as usize;

/// Reads a link by `next`, and hides the private folder in what it says.
unsafe fn link(
    path: *const c_char,
    buf: *mut c_char,
    size: usize,
    next: impl FnOnce(*const c_char, *mut c_char, usize) -> isize,
) -> isize {
    // SAFETY: the program's promise.
    let place = unsafe { private(path) };
    if place.as_ref().is_some_and(|place| place.device().is_some()) {
        // A device's file, not a link.
        return fail(libc::EINVAL) as isize;
    }
    let path = place.as_ref().map_or(path, Private::as_ptr);
    let mut text = [0_u8; LONGEST];
    let len = next(path, text.as_mut_ptr().cast(), text.len());
    let Ok(whole) = usize::try_from(len) else {
        return len;
    };
    let shown = &text[hidden(&text[..whole])..whole];
    let len = shown.len().min(size);
    // SAFETY: the program says how much room there is.
    unsafe { std::ptr::copy_nonoverlapping(shown.as_ptr().cast(), buf, len) };
    len as isize
}

interpose! {

    "C"
    fn readlink(path: *const c_char, buf: *mut c_char, size: usize) -> isize {
        let next = real!(readlink(*const c_char, *mut c_char, usize) -> isize);
        link(path, buf, size, |path, buf, size| next(path, buf, size))
    }

    fn readlinkat(dir: c_int, path: *const c_char, buf: *mut c_char, size: usize) -> isize {
        let next = real!(readlinkat(c_int, *const c_char, *mut c_char, usize) -> isize);
        link(path, buf, size, |path, buf, size| next(dir, path, buf, size))
    }

    fn __readlink_chk(path: *const c_char, buf: *mut c_char, size: usize, room: usize) -> isize {
        // The C library's function ends the program where there is too little room.
        let next = real!(__readlink_chk(*const c_char, *mut c_char, usize, usize) -> isize);
        if size > room {
            return next(path, buf, size, room);
        }
        readlink(path, buf, size)
    }

    fn __readlinkat_chk(dir: c_int, path: *const c_char, buf: *mut c_char, size: usize, room: usize) -> isize {
        let next = real!(__readlinkat_chk(c_int, *const c_char, *mut c_char, usize, usize) -> isize);
        if size > room {
            return next(dir, path, buf, size, room);
        }
        readlinkat(dir, path, buf, size)
    }

    fn realpath(path: *const c_char, resolved: *mut c_char) -> *mut c_char {
        let next = real!(realpath(*const c_char, *mut c_char) -> *mut c_char);
        let Some(place) = private(path) else {
            // From a folder in the tree a name without a slash leads into it too.
            return show(next(path, resolved));
        };
        let name = if place.device().is_some() {
            // A device's file is where it is.
            clean(CStr::from_ptr(path))
        } else {
            // A string, and the C library's own memory.
            let name = show(next(place.as_ptr(), null_mut()));
            if name.is_null() {
                return name;
            }
            // A string of the C library's, ours to free.
            let copy = CStr::from_ptr(name).to_owned();
            libc::free(name.cast());
            copy
        };
        let len = name.as_bytes_with_nul().len();
        if len > LONGEST {
            set_errno(libc::ENAMETOOLONG);
            return null_mut();
        }
        let resolved = if resolved.is_null() {
            // No pointers.
            libc::malloc(len).cast()
        } else {
            resolved
        };
        if !resolved.is_null() {
            // The program has room for the longest path, or there is as much as is needed.
            std::ptr::copy_nonoverlapping(name.as_ptr(), resolved, len);
        }
        resolved
    }

    fn __realpath_chk(path: *const c_char, resolved: *mut c_char, room: usize) -> *mut c_char {
        if room < LONGEST {
            let next = real!(__realpath_chk(*const c_char, *mut c_char, usize) -> *mut c_char);
            // It ends the program.
            return next(path, resolved, room);
        }
        realpath(path, resolved)
    }

    fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
        realpath(path, null_mut())
    }

    fn getcwd(buf: *mut c_char, size: usize) -> *mut c_char {
        let next = real!(getcwd(*mut c_char, usize) -> *mut c_char);
        if buf.is_null() {
            return show(next(buf, size));
        }
        // The public name may fit where the private one does not.
        let mut text = [0_u8; LONGEST];
        // A buffer of ours.
        let cwd = show(next(text.as_mut_ptr().cast(), text.len()));
        if cwd.is_null() {
            // Longer than paths usually are, or there is no folder.
            return next(buf, size);
        }
        // A string in our buffer.
        let cwd = CStr::from_ptr(cwd).to_bytes_with_nul();
        if cwd.len() > size {
            set_errno(if size == 0 { libc::EINVAL } else { libc::ERANGE });
            return null_mut();
        }
        // The program says how much room there is.
        std::ptr::copy_nonoverlapping(cwd.as_ptr().cast(), buf, cwd.len());
        buf
    }

    fn __getcwd_chk(buf: *mut c_char, size: usize, room: usize) -> *mut c_char {
        if size > room {
            let next = real!(__getcwd_chk(*mut c_char, usize, usize) -> *mut c_char);
            // It ends the program.
            return next(buf, size, room);
        }
        getcwd(buf, size)
    }

    fn get_current_dir_name() -> *mut c_char {
        let next = real!(get_current_dir_name() -> *mut c_char);
        show(next())
    }
}

/// A path without empty components and `.`.
fn clean(path: &CStr) -> CString {
    let mut name = Vec::new();
    for part in path.to_bytes().split(|&byte| byte == b'/') {
        if !part.is_empty() && part != b"." {
            name.push(b'/');
            name.extend_from_slice(part);
        }
    }
    CString::new(name).unwrap_or_default()
}
