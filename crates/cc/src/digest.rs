//! What a compiler is: the digest of everything that decides which object comes out of a preprocessed source.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
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
        if let Some((digest, seen)) = lock(&self.0).get(&key)
            && seen
                .iter()
                .all(|was| look(&was.0).is_ok_and(|is| is == *was))
        {
            return Ok(*digest);
        }
        let (digest, seen) = make(driver, language, path)?;
        lock(&self.0).insert(key, (digest, seen));
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
    let done = Command::new(program)
        .args(args)
        .env("LC_ALL", "C")
        .env("PATH", path)
        // A compilation for which they are set does not go out.
        .env_remove("GCC_EXEC_PREFIX")
        .env_remove("COMPILER_PATH")
        .env(crate::client::ACTIVE, "1")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(|e| format!("{}: {e}", program.display()))?;
    if done.status.success() {
        Ok(done.stdout)
    } else {
        Err(format!("{} {} failed", program.display(), args.join(" ")))
    }
}

/// Shared libraries of a program, as the loader finds them. None for a static one.
fn libraries(program: &Path, path: &str) -> Vec<PathBuf> {
    let Ok(text) = output(Path::new("ldd"), &[&program.to_string_lossy()], path) else {
        return Vec::new();
    };
    String::from_utf8_lossy(&text)
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect()
}

fn make(driver: &Path, language: Language, path: &str) -> Result<(Digest, Seen), String> {
    let mut files = vec![
        driver
            .canonicalize()
            .map_err(|e| format!("{}: {e}", driver.display()))?,
    ];
    for program in [language.program(), "as"] {
        let told = output(driver, &[&format!("-print-prog-name={program}")], path)?;
        let name = String::from_utf8_lossy(&told).trim().to_owned();
        let found = if name.contains('/') {
            Some(PathBuf::from(&name))
        } else {
            crate::find_in(path, &name, None)
        };
        let found = found
            .and_then(|path| path.canonicalize().ok())
            .ok_or_else(|| format!("{} has no {program}", driver.display()))?;
        files.extend(libraries(&found, path));
        files.push(found);
    }
    files.sort();
    files.dedup();
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"weft cc environment 1\0");
    hasher.update(language.program().as_bytes());
    let mut contents = Vec::new();
    let mut seen = Vec::new();
    for path in files {
        let failed = |e: io::Error| format!("{}: {e}", path.display());
        seen.push(look(&path).map_err(failed)?);
        let mut one = blake3::Hasher::new();
        one.update_reader(File::open(&path).map_err(failed)?)
            .map_err(failed)?;
        contents.push(*one.finalize().as_bytes());
    }
    // By contents: the same files may have other names elsewhere.
    contents.sort_unstable();
    for one in contents {
        hasher.update(&one);
    }
    hasher.update(&output(driver, &["-dumpspecs"], path)?);
    Ok((*hasher.finalize().as_bytes(), seen))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn another_assembler_in_the_path_is_another_compiler() {
        let Some(gcc) = crate::find_program("gcc", None) else {
            eprintln!("skipped: there is no gcc (Debian's package gcc)");
            return;
        };
        let path = std::env::var("PATH").unwrap();
        if crate::find_program("as", None).is_none() {
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
