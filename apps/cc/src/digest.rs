//! The identity of a compiler: the digest of everything that determines the object for a preprocessed source.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;

use crate::lock;
use crate::options::Language;
use crate::wire::DIGEST_LEN;

/// A digest of driver, compiler proper, assembler, their libraries, and the specs.
pub type Digest = [u8; DIGEST_LEN];

/// The files that a digest was made of, as they were then: path, inode, length, time of the last change.
type Seen = Vec<(PathBuf, u64, u64, i64)>;

/// Driver, language, `PATH`.
type Key = (PathBuf, Language, String);

/// Digests, made again when a file has changed.
#[derive(Default)]
pub struct Digests(Mutex<HashMap<Key, (Digest, Seen)>>);

impl Digests {
    /// The digest of a driver for a language, where it finds its programs in this `PATH`.
    ///
    /// # Errors
    /// Why there is none, in words.
    pub fn of(&self, driver: &Path, language: Language, path: &str) -> Result<Digest, String> {
        let key = (driver.to_owned(), language, path.to_owned());
        // Held meanwhile: the first commands of a make come together, and one reading of a compiler's files does for all.
        let mut all = lock(&self.0);
        if let Some((digest, seen)) = all.get(&key)
            && seen
                .iter()
                .all(|was| look(&was.0).is_ok_and(|is| is == *was))
        {
            return Ok(*digest);
        }
        let (digest, seen) = make(driver, language, path)?;
        all.insert(key, (digest, seen));
        Ok(digest)
    }
}

fn look(path: &Path) -> io::Result<(PathBuf, u64, u64, i64)> {
    let about = path.metadata()?;
    Ok((
        path.into(),
        about.ino(),
        about.len(),
        about
            .mtime_nsec()
            .wrapping_add(about.mtime().wrapping_mul(1_000_000_000)),
    ))
}

fn output(program: &Path, args: &[&str], path: &str) -> Result<Vec<u8>, String> {
    asked(program, args, path).map(|done| done.stdout)
}

/// The output of a compiler, or of a helper program, with messages in English.
pub(crate) fn asked(program: &Path, args: &[&str], path: &str) -> Result<Output, String> {
    let done = Command::new(program)
        .args(args)
        .env("LC_ALL", "C")
        .env("PATH", path)
        // A compilation with these variables set is not sent.
        .env_remove("GCC_EXEC_PREFIX")
        .env_remove("COMPILER_PATH")
        .env(crate::client::ACTIVE, "1")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("{}: {e}", program.display()))?;
    let failed = || format!("{} {} failed", program.display(), args.join(" "));
    done.status.success().then_some(done).ok_or_else(failed)
}

/// The output of `ldd`: shared libraries under the names by which programs load them, and the loader as [`LOADER`]. Nothing for a static program.
fn libraries(program: &Path, path: &str) -> Vec<(String, PathBuf)> {
    let Ok(text) = output(Path::new("ldd"), &[&program.to_string_lossy()], path) else {
        return Vec::new();
    };
    let library = |line: &str| {
        let mut words = line.split_whitespace();
        let first = words.next()?;
        if first.starts_with('/') {
            return Some((LOADER.into(), first.into()));
        }
        let found = words.find(|word| word.starts_with('/'))?;
        Some((first.to_owned(), found.into()))
    };
    String::from_utf8_lossy(&text)
        .lines()
        .filter_map(library)
        .collect()
}

/// Names under which a compiler's own files count; its compiler proper has its own.
pub(crate) const DRIVER: &str = "driver";
pub(crate) const ASSEMBLER: &str = "as";
/// For `-gsplit-dwarf`.
const SPLITTER: &str = "objcopy";
pub(crate) const LOADER: &str = "loader";
pub(crate) const SPECS: &str = "specs";

/// All that a compiler consists of.
pub(crate) struct Parts {
    /// Its files, by name: the same ones may be elsewhere on another machine.
    pub(crate) files: BTreeMap<String, PathBuf>,
    /// The driver's output for `-dumpspecs`.
    pub(crate) specs: Vec<u8>,
    /// Whether some programs have shared libraries and others have none.
    pub(crate) mixed: bool,
}

impl Parts {
    /// Of this driver for this language, which finds its programs in this `PATH`.
    pub(crate) fn find(driver: &Path, language: Language, path: &str) -> Result<Self, String> {
        let driver = driver
            .canonicalize()
            .map_err(|e| format!("{}: {e}", driver.display()))?;
        let mut programs = vec![(DRIVER, driver.clone())];
        for program in [language.program(), ASSEMBLER, SPLITTER] {
            let told = output(&driver, &[&format!("-print-prog-name={program}")], path)?;
            let name = String::from_utf8_lossy(&told).trim().to_owned();
            let found = if name.contains('/') {
                Some(PathBuf::from(&name))
            } else {
                crate::find_in(path, &name, &[])
            };
            let found = found
                .and_then(|path| path.canonicalize().ok())
                .ok_or_else(|| format!("{} has no {program}", driver.display()))?;
            programs.push((program, found));
        }
        let mut files = BTreeMap::new();
        let mut dynamic = 0;
        for (name, program) in &programs {
            let libraries = libraries(program, path);
            dynamic += usize::from(!libraries.is_empty());
            files.insert((*name).to_owned(), program.clone());
            for (name, library) in libraries {
                match files.get(&name) {
                    // Two of one name: it counts, and its name is one that is not sent.
                    Some(other) if *other != library => {
                        files.insert(library.display().to_string(), library)
                    }
                    _ => files.insert(name, library),
                };
            }
        }
        Ok(Self {
            files,
            specs: output(&driver, &["-dumpspecs"], path)?,
            mixed: dynamic != 0 && dynamic != programs.len(),
        })
    }
}

/// The digest of a compiler whose files have these names and digests.
pub(crate) fn of_files(files: &BTreeMap<String, Digest>) -> Digest {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"weft cc environment 3\0");
    for (name, digest) in files {
        hasher.update(name.as_bytes()).update(b"\0").update(digest);
    }
    *hasher.finalize().as_bytes()
}

/// The digest of a file's contents.
pub(crate) fn of_file(path: &Path) -> io::Result<Digest> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok(*hasher.finalize().as_bytes())
}

fn make(driver: &Path, language: Language, path: &str) -> Result<(Digest, Seen), String> {
    let parts = Parts::find(driver, language, path)?;
    let mut digests = BTreeMap::from([(SPECS.into(), *blake3::hash(&parts.specs).as_bytes())]);
    let mut seen = Vec::new();
    for (name, path) in parts.files {
        let failed = |e: io::Error| format!("{}: {e}", path.display());
        seen.push(look(&path).map_err(failed)?);
        digests.insert(name, of_file(&path).map_err(failed)?);
    }
    Ok((of_files(&digests), seen))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn another_assembler_in_the_path_is_another_compiler() {
        let Some(gcc) = crate::find_program("gcc") else {
            eprintln!("skipped: there is no gcc (Debian's package gcc)");
            return;
        };
        let path = std::env::var("PATH").unwrap();
        if crate::find_program("as").is_none() {
            eprintln!("skipped: there is no as in PATH (Debian's package binutils)");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("as");
        std::fs::write(&own, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o755)).unwrap();
        let told = output(&gcc, &["-print-prog-name=as"], &path).unwrap();
        if told != b"as\n" {
            eprintln!("skipped: this gcc does not look for its assembler in PATH");
            return;
        }
        let digests = Digests::default();
        let of = |path: &str| digests.of(&gcc, Language::C, path).unwrap();
        assert_eq!(of(&path), of(&path));
        assert_ne!(of(&path), of(&format!("{}:{path}", dir.path().display())));
    }
}
