//! The paths that this library redirects, and where they lead.
//!
//! # Safety
//!
//! C strings are read as far as the program promises them.

use std::ffi::{CStr, CString, c_char, c_int};

use weft_sys::next::set_errno;

use crate::root;

const PLACES: [&[&[u8]]; 4] = [
    &[b"sys", b"class", b"infiniband"],
    &[b"sys", b"class", b"infiniband_verbs"],
    &[b"sys", b"devices", b"pci7766:00"],
    &[b"dev", b"infiniband"],
];

/// Returns true if an absolute path leads into one of the places. Empty components and `.` count for nothing; what leads there through `..` or a link of the
/// machine is not seen.
fn is_ours(path: &[u8]) -> bool {
    if path.first() != Some(&b'/') {
        return false;
    }
    let components = || {
        path.split(|&byte| byte == b'/')
            .filter(|part| !part.is_empty() && *part != b".")
    };
    // Nearly all paths end here.
    if !components()
        .next()
        .is_some_and(|first| first == b"sys" || first == b"dev")
    {
        return false;
    }
    PLACES
        .iter()
        .any(|place| components().take(place.len()).eq(place.iter().copied()))
}

/// A path in the private folder.
pub(crate) struct Private {
    path: CString,
    /// Below `/sys`, where nothing can be written.
    sys: bool,
}

impl Private {
    pub(crate) fn as_ptr(&self) -> *const c_char {
        self.path.as_ptr()
    }

    /// Returns true if nothing may be written there.
    pub(crate) fn read_only(&self) -> bool {
        self.sys
    }

    /// The device number that a file in `/dev` shows, if this is one of our files in `/dev`.
    pub(crate) fn device(&self) -> Option<(u32, u32)> {
        if self.sys {
            return None;
        }
        let path = self.path.to_str().ok()?;
        // Others are the machine's own.
        if std::fs::read_link(path).ok()?.as_os_str() != "/dev/null" {
            return None;
        }
        let number = path.rsplit('/').next()?.strip_prefix("uverbs");
        // As `dev` in the device's folder says; of `rdma_cm` the kernel chooses one.
        let minor = number.and_then(|number| number.parse::<u32>().ok());
        Some(minor.map_or((10, 120), |minor| (231, 192 + minor)))
    }
}

/// Returns the destination of a program's path, if this library redirects it.
///
/// # Safety
/// Null or a C string.
pub(crate) unsafe fn private(path: *const c_char) -> Option<Private> {
    // SAFETY: the caller's promise.
    if path.is_null() || unsafe { *path } as u8 != b'/' {
        return None;
    }
    // SAFETY: as above.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    if !is_ours(path) {
        return None;
    }
    let mut whole = root::root()?.to_bytes().to_vec();
    let sys = path.iter().find(|&&byte| byte != b'/' && byte != b'.') == Some(&b's');
    whole.extend_from_slice(path);
    let path = CString::new(whole).ok()?;
    Some(Private { path, sys })
}

/// Returns how many bytes to remove at the front of a path to hide the private folder's name.
pub(crate) fn hidden(path: &[u8]) -> usize {
    if root::is_busy() {
        return 0;
    }
    root::bases()
        .iter()
        .find_map(|base| root::length_below(base, path))
        .unwrap_or(0)
}

/// The same for a string that the C library has returned: it becomes the public name.
///
/// # Safety
/// Null or a C string that may be written to.
pub(crate) unsafe fn show(path: *mut c_char) -> *mut c_char {
    if path.is_null() {
        return path;
    }
    // SAFETY: the caller's promise; nothing else has the string.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes_with_nul();
    let (len, skip) = (bytes.len(), hidden(&bytes[..bytes.len() - 1]));
    if skip > 0 {
        if skip == len - 1 {
            // The folder itself represents the root.
            // SAFETY: it is longer than this.
            unsafe { (path.write(b'/' as c_char), path.add(1).write(0)) };
        } else {
            // SAFETY: within the string.
            unsafe { std::ptr::copy(path.add(skip), path, len - skip) };
        }
    }
    path
}

/// Fails as C functions do.
pub(crate) fn fail(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}
