//! A distributed compiler: chapter 5 of "iWARP Applicability" (P. W. Frey, 2010).
//!
//! A *master* passes a command ([`client`]) to the daemon of its host ([`daemon`]), which preprocesses and keeps connections to *workers* ([`worker`]). The
//! worker drives a job: it gets the `STag`s of the source and of the room for the object, reads the source by RDMA Read, compiles, writes the object by RDMA
//! Write, and Sends the end ([`wire`], `docs/spec/cc.md`). Commands that cannot be sent, or that fail on a worker, run on the local compiler, whose result
//! counts.
#![forbid(unsafe_code)]

/// A table of words.
macro_rules! words {
    ($($word:literal)*) => { &[$($word),*] };
}

pub mod client;
mod compiler_package;
pub mod daemon;
pub mod digest;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod ipc;
pub mod launch;
mod link;
pub mod options;
mod pull;
mod tree;
pub mod wire;
pub mod worker;

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

pub use weft_service::endpoint::Endpoint;
pub use weft_service::endpoint::port::CC as DEFAULT_PORT;
use weft_service::lock;
use weft_service::programs;

/// Workers as users list them, separated by commas or blanks.
///
/// # Errors
/// An invalid one.
pub fn workers(text: &str) -> Result<Vec<Endpoint>, String> {
    let mut all: Vec<Endpoint> = Vec::new();
    let words = text.split([',', ' ', '\t', '\n']);
    for word in words.filter(|word| !word.is_empty()) {
        let endpoint = Endpoint::parse(word, DEFAULT_PORT)
            .map_err(|e| format!("{e}: write HOST, HOST:PORT or [IPV6]:PORT"))?;
        if !all.contains(&endpoint) {
            all.push(endpoint);
        }
    }
    Ok(all)
}

/// The search path of a worker's compilers, and the default elsewhere.
pub const PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// The first program of this name in `PATH`.
pub fn find_program(name: &str) -> Option<PathBuf> {
    programs::find(name.as_ref()).ok()
}

/// The same, in this `PATH`, and not one of the files `not` (links to this program, which would call itself).
fn find_in(path: impl AsRef<OsStr>, name: &str, not: &[PathBuf]) -> Option<PathBuf> {
    find_in_dir(Path::new(""), path, name, not)
}

/// Why there is no compiler of this name for a command in the directory `dir`, and what to do.
pub fn no_compiler(dir: &Path, path: impl AsRef<OsStr>, name: &OsStr) -> String {
    let found = name
        .to_str()
        .and_then(|name| find_in_dir(dir, path, name, &[]));
    let name = name.display();
    match found {
        Some(found) => format!(
            "weft cc: {name}: {} is weft cc itself, and PATH has no other one\n  try: the path of the compiler, or its directory in PATH",
            found.display()
        ),
        None => format!(
            "weft cc: {name}: there is no such compiler\n  try: another one, as in weft cc gcc -c FILE.c, or weft cc --help"
        ),
    }
}

/// The same, as it is found from the directory `dir`.
fn find_in_dir(
    dir: &Path,
    path: impl AsRef<OsStr>,
    name: &str,
    not: &[PathBuf],
) -> Option<PathBuf> {
    let check = |file: &Path| {
        let file = dir.join(file);
        programs::is_program(&file)?;
        if not.is_empty() || !not.contains(&file.canonicalize()?) {
            Ok(())
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    };
    programs::search(name.as_ref(), std::env::split_paths(&path), check).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_as_users_list_them() {
        let all = workers("a, b:1,[::1]:2 a").unwrap();
        let shown: Vec<_> = all.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["a:7477", "b:1", "[::1]:2"]);
        assert!(workers("a,b:x").is_err() && workers("").unwrap().is_empty());
    }
}
