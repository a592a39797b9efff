//! Where the libraries are that this program puts under others.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Seen from the folder above that of the program: where packages install them, where an archive or a wheel holds them, and where
/// `./x dist` leaves them beside a build.
const LIBRARIES: [&str; 3] = ["lib/weft", "lib", "dist/lib"];

/// The folders in which the libraries may be; the first that has a library counts.
///
/// # Errors
/// The file of this program cannot be found, which takes `/proc`.
pub fn libraries() -> Result<Vec<PathBuf>, Failure> {
    let program = std::env::current_exe().map_err(|e| {
        Failure::failed(format!("cannot find this program's file: {e}")).hint("mount /proc")
    })?;
    Ok(seen_from(program.parent().unwrap_or(Path::new("/"))))
}

/// The same, and behind them the folder of this program's file, where cargo leaves preload libraries.
///
/// # Errors
/// As of [`libraries`].
pub fn preload_libraries() -> Result<Vec<PathBuf>, Failure> {
    let mut places = libraries()?;
    let program = std::env::current_exe().ok();
    places.extend(
        program
            .as_deref()
            .and_then(Path::parent)
            .map(Path::to_owned),
    );
    Ok(places)
}

/// `..` is gone by the words alone: the folder is one without symbolic links, and the names are shown to people.
fn seen_from(folder: &Path) -> Vec<PathBuf> {
    let above = folder.parent().unwrap_or(folder);
    LIBRARIES.iter().map(|place| above.join(place)).collect()
}

/// A file, if `LD_PRELOAD` can name it.
pub fn preloadable(file: PathBuf) -> Result<PathBuf, Failure> {
    let ends = |byte: &u8| b" :\t\n".contains(byte);
    if file.as_os_str().as_bytes().iter().any(ends) {
        let what = format!(
            "the name of {} has a space or a colon, which ends a file in LD_PRELOAD",
            file.display()
        );
        return Err(Failure::failed(what)
            .hint("put it into a folder without one, and name that with --lib"));
    }
    Ok(file)
}

/// The folders in words, for an error that says where nothing was found.
pub fn named(places: &[PathBuf]) -> String {
    let names: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packages_folder_comes_before_the_systems() {
        let places = seen_from(Path::new("/usr/bin"));
        assert_eq!(places[0], Path::new("/usr/lib/weft"));
        assert!(preloadable("/a b/lib.so".into()).is_err());
        assert!(preloadable("/a/lib.so".into()).is_ok());
        assert_eq!(named(&places), "/usr/lib/weft, /usr/lib, /usr/dist/lib");
    }
}
