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

/// Digests, made again when a file has changed.
#[derive(Default)]
pub struct Digests(Mutex<HashMap<(PathBuf, Language), (Digest, Seen)>>);

impl Digests {
    /// The digest of a driver for a language.
    ///
    /// # Errors
    /// Why there is none, in words.
    pub fn of(&self, driver: &Path, language: Language) -> Result<Digest, String> {
        let key = (driver.to_owned(), language);
        if let Some((digest, seen)) = lock(&self.0).get(&key)
            && seen
                .iter()
                .all(|was| look(&was.0).is_ok_and(|is| is == *was))
        {
            return Ok(*digest);
        }
        let (digest, seen) = make(driver, language)?;
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

fn output(program: &Path, args: &[&str]) -> Result<Vec<u8>, String> {
    let done = Command::new(program)
        .args(args)
        .env("LC_ALL", "C")
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
fn libraries(program: &Path) -> Vec<PathBuf> {
    let Ok(text) = output(Path::new("ldd"), &[&program.to_string_lossy()]) else {
        return Vec::new();
    };
    String::from_utf8_lossy(&text)
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect()
}

fn make(driver: &Path, language: Language) -> Result<(Digest, Seen), String> {
    let mut files = vec![
        driver
            .canonicalize()
            .map_err(|e| format!("{}: {e}", driver.display()))?,
    ];
    for program in [language.program(), "as"] {
        let told = output(driver, &[&format!("-print-prog-name={program}")])?;
        let name = String::from_utf8_lossy(&told).trim().to_owned();
        let path = if name.contains('/') {
            Some(PathBuf::from(&name))
        } else {
            crate::find_program(&name, None)
        };
        let path = path
            .and_then(|path| path.canonicalize().ok())
            .ok_or_else(|| format!("{} has no {program}", driver.display()))?;
        files.extend(libraries(&path));
        files.push(path);
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
    hasher.update(&output(driver, &["-dumpspecs"])?);
    Ok((*hasher.finalize().as_bytes(), seen))
}
