//! The programs of the tree that start each other.

use std::env;
use std::path::PathBuf;

/// The file of one of weft's programs: in the folder of the program that runs, or on PATH.
pub fn find(name: &str) -> Option<PathBuf> {
    let here = env::current_exe().ok();
    let beside = here.iter().filter_map(|path| path.parent());
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = beside.map(PathBuf::from).chain(env::split_paths(&path));
    folders
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}
