//! Where programs are.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// The file of one of weft's programs: in the folder of the program that runs, or on PATH.
pub fn of_weft(name: &str) -> Option<PathBuf> {
    let here = env::current_exe().ok();
    let beside = here.iter().filter_map(|path| path.parent());
    let folders = beside.map(PathBuf::from).chain(on_path());
    let folders = folders.filter(|folder| folder.is_absolute());
    search(name.as_ref(), folders, is_program).ok()
}

/// The file of a program, as execvp(3) looks for it.
///
/// # Errors
/// As those of [`search`].
pub fn find(name: &OsStr) -> io::Result<PathBuf> {
    search(name, on_path(), is_program)
}

/// The folders of PATH.
pub fn on_path() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    env::split_paths(&path).collect()
}

/// The first file with this name in `folders` that passes `check` (see [`is_program`]). A name with a slash is a path.
///
/// # Errors
/// That of the check of a path; `PermissionDenied` if a check said that, else `NotFound`.
pub fn search(
    name: &OsStr,
    folders: impl IntoIterator<Item = PathBuf>,
    check: impl Fn(&Path) -> io::Result<()>,
) -> io::Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return check(Path::new(name)).map(|()| name.into());
    }
    let mut error = io::Error::from(io::ErrorKind::NotFound);
    for folder in folders.into_iter().filter(|_| !name.is_empty()) {
        let file = folder.join(name);
        match check(&file) {
            Ok(()) => return Ok(file),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => error = e,
            Err(_) => {}
        }
    }
    Err(error)
}

/// Whether this is a file that can be executed.
///
/// # Errors
/// Why not.
pub fn is_program(file: &Path) -> io::Result<()> {
    let about = fs::metadata(file)?;
    if about.is_file() && about.mode() & 0o111 != 0 {
        Ok(())
    } else {
        Err(io::ErrorKind::PermissionDenied.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn programs_are_found_as_execvp_finds_them() {
        let dir = tempfile::tempdir().unwrap();
        let folders = ["a", "b", "c"].map(|name| dir.path().join(name));
        for (folder, mode) in folders.iter().zip([0o644, 0o755, 0o755]) {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("x"), "").unwrap();
            fs::set_permissions(folder.join("x"), fs::Permissions::from_mode(mode)).unwrap();
        }
        let find = |name: &OsStr, count| search(name, folders[..count].to_vec(), is_program);
        let kind = |name: &OsStr, count| find(name, count).unwrap_err().kind();
        let (x, path) = (OsStr::new("x"), folders[1].join("x"));
        assert_eq!(find(x, 3).unwrap(), path, "the first that is executable");
        assert_eq!(kind(x, 1), io::ErrorKind::PermissionDenied);
        assert_eq!(kind(x, 0), io::ErrorKind::NotFound);
        assert_eq!(kind(OsStr::new(""), 3), io::ErrorKind::NotFound);
        assert_eq!(find(path.as_ref(), 0).unwrap(), path);
        let folder = folders[1].as_os_str();
        assert_eq!(kind(folder, 3), io::ErrorKind::PermissionDenied);
    }
}
