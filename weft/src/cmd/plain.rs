//! Programs that a preload library has no effect on.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use weft_sys::elf::{self, Kind};

/// The reason why the library has no effect on the program, or may have none.
pub(crate) fn plain(program: &Path) -> Option<&'static str> {
    if let Ok(about) = fs::metadata(program) {
        let mode = about.permissions().mode();
        let user = mode & 0o4000 != 0 && about.uid() != rustix::process::geteuid().as_raw();
        let group = mode & 0o2000 != 0 && about.gid() != rustix::process::getegid().as_raw();
        if user || group {
            return Some(
                "it runs with other rights (setuid or setgid), so the loader ignores LD_PRELOAD",
            );
        }
    }
    // An unreadable file may be executable.
    let file = File::open(program).ok()?;
    match elf::kind(&file).ok()? {
        Kind::Static => Some("it is linked statically, so no library is loaded into it"),
        Kind::Dynamic { .. } if elf::is_go(&file).unwrap_or(false) => {
            Some("it is a Go program, which makes its own system calls")
        }
        Kind::Script(interpreter) => {
            let interpreter = PathBuf::from(interpreter);
            let file = File::open(&interpreter).ok()?;
            match elf::kind(&file).ok()? {
                Kind::Script(_) => None,
                _ => plain(&interpreter),
            }
        }
        _ => elf::refuses_preload(&file).ok()?,
    }
}
