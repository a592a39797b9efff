//! Files about devices, as the kernel shows them below `/sys/class/infiniband`.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::OnceLock;

use rustix::io::Errno;

use crate::call;

/// Where the file system of the kernel's devices is: `SYSFS_PATH`, else `/sys`.
pub fn ibv_get_sysfs_path() -> *const c_char {
    static PATH: OnceLock<CString> = OnceLock::new();
    let path = PATH.get_or_init(|| {
        let path = std::env::var_os("SYSFS_PATH").unwrap_or_default();
        let path = path.as_bytes().trim_ascii_end();
        let end = path
            .iter()
            .rposition(|byte| *byte != b'/')
            .map_or(0, |last| last + 1);
        match CString::new(&path[..end]) {
            Ok(path) if !path.is_empty() => path,
            _ => c"/sys".to_owned(),
        }
    });
    path.as_ptr()
}

/// Reads a file into `buf`, a NUL behind it; a newline at the end goes. The length, or -1 also where the file is longer than `buf`.
///
/// # Safety
/// `dir` and `file` are strings, `buf` is good for `size` bytes.
pub unsafe fn ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    call::run(|| {
        if dir.is_null() || file.is_null() || buf.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let (dir, file) = unsafe { (CStr::from_ptr(dir), CStr::from_ptr(file)) };
        let path =
            Path::new(OsStr::from_bytes(dir.to_bytes())).join(OsStr::from_bytes(file.to_bytes()));
        let mut text = Vec::new();
        let from = std::fs::File::open(path)
            .and_then(|file| file.take(size as u64).read_to_end(&mut text));
        from.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        if text.last() == Some(&b'\n') {
            text.pop();
        }
        if text.len() >= size {
            return Err(Errno::OVERFLOW);
        }
        text.push(0);
        // SAFETY: the caller's promise; there are at most `size` bytes.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buf, text.len()) };
        c_int::try_from(text.len() - 1).map_err(|_| Errno::OVERFLOW)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(dir: &CStr, file: &CStr, room: usize) -> Result<Vec<u8>, i32> {
        let mut buf = vec![0xEE_u8; room];
        // SAFETY: strings, and a buffer of that size.
        let len = unsafe {
            ibv_read_sysfs_file(dir.as_ptr(), file.as_ptr(), buf.as_mut_ptr().cast(), room)
        };
        let Ok(len) = usize::try_from(len) else {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap());
        };
        assert_eq!(buf[len], 0);
        buf.truncate(len);
        Ok(buf)
    }

    #[test]
    fn a_file_is_read_without_its_newline_and_never_past_the_buffer() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("node_type"), "4: RNIC\n").unwrap();
        let dir = CString::new(dir.path().as_os_str().as_bytes()).unwrap();
        assert_eq!(read(&dir, c"node_type", 64).unwrap(), b"4: RNIC");
        assert_eq!(read(&dir, c"node_type", 8).unwrap(), b"4: RNIC");
        assert_eq!(read(&dir, c"node_type", 7).unwrap_err(), libc::EOVERFLOW);
        assert_eq!(read(&dir, c"none", 64).unwrap_err(), libc::ENOENT);
    }
}
