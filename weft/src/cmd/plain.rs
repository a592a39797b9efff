//! Programs that the library has no effect on.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use weft_sys::elf::{self, Kind};

/// The reason why the library has no effect on the program, or may have none, if this user runs it.
pub(crate) fn plain(program: &Path) -> Option<&'static str> {
    let [uid, gid] = [
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    ];
    plain_for(program, uid, gid)
}

/// The same if a user of this number and first group runs it.
pub(crate) fn plain_for(program: &Path, uid: u32, gid: u32) -> Option<&'static str> {
    let interpreter = elf::open(program).and_then(|file| elf::interpreter(&file, Path::new("")));
    // The kernel takes no other rights from a script.
    let program = interpreter.as_deref().unwrap_or(program);
    if let Ok(about) = fs::metadata(program) {
        let mode = about.permissions().mode();
        let user = mode & 0o4000 != 0 && about.uid() != uid;
        let group = mode & 0o2000 != 0 && about.gid() != gid;
        if user || group {
            return Some(
                "it runs with other rights (setuid or setgid), so the loader ignores LD_PRELOAD",
            );
        }
    }
    // An unreadable file may be executable.
    let file = elf::open(program)?;
    match elf::kind(&file).ok()? {
        Kind::Static => Some("it is linked statically, so no library is loaded into it"),
        Kind::Dynamic { .. } if elf::is_go(&file).unwrap_or(false) => {
            Some("it is a Go program, which makes its own system calls")
        }
        _ => elf::refuses_preload(&file).ok()?,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    fn rights_are_other_rights_for_who_does_not_have_them() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        fs::copy("/proc/self/exe", &program).unwrap();
        let about = fs::metadata(&program).unwrap();
        let (uid, gid) = (about.uid(), about.gid());
        for (mode, uid, gid, is_told) in [
            (0o4755, uid, gid, false),
            (0o4755, uid + 1, gid, true),
            (0o2755, uid + 1, gid, false),
            (0o2755, uid, gid + 1, true),
        ] {
            fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
            let said = plain_for(&program, uid, gid).unwrap_or_default();
            assert_eq!(said.contains("setuid"), is_told, "{mode:o} {uid} {gid}");
        }
    }

    #[test]
    fn scripts_are_what_they_lead_to() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let script = |name: &str, interpreter: &str| {
            let path = dir.join(name);
            fs::write(&path, format!("#!{}\n", dir.join(interpreter).display())).unwrap();
            path
        };
        // A program without a loader: the start of this one, without its segments.
        let mut start = fs::read("/proc/self/exe").unwrap();
        start[56..58].fill(0);
        fs::write(dir.join("static"), &start[..64]).unwrap();
        script("first", "static");
        let said = plain(&script("second", "first")).unwrap_or_default();
        assert!(said.contains("statically"), "{said}");
        mknodat(CWD, dir.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(plain(&script("of_fifo", "fifo")), None);
    }
}
