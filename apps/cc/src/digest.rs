//! The identity of a compiler: the digest of everything that determines the object for a preprocessed source.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;

use crate::lock;
use crate::options::{CLANG_ENVIRONMENT, ENVIRONMENT, Family, Language, SEARCH_ENVIRONMENT};
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
    let mut command = Command::new(program);
    command
        .args(args)
        .env("LC_ALL", "C")
        .env("PATH", path)
        .current_dir("/")
        .env(crate::client::ACTIVE, "1")
        .stdin(Stdio::null());
    // A compilation with these variables set is not sent.
    for name in [SEARCH_ENVIRONMENT, ENVIRONMENT, CLANG_ENVIRONMENT].concat() {
        command.env_remove(name);
    }
    let done = command
        .output()
        .map_err(|e| format!("{}: {e}", program.display()))?;
    let failed = || format!("{} {} failed", program.display(), args.join(" "));
    done.status.success().then_some(done).ok_or_else(failed)
}

/// The arguments of a quoted command.
fn unquoted(line: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match (c, &mut word) {
            ('"', Some(_)) => all.extend(word.take()),
            ('"', None) => word = Some(String::new()),
            ('\\', Some(word)) => word.extend(chars.next()),
            (c, Some(word)) => word.push(c),
            (_, None) => {}
        }
    }
    all
}

/// The version of clang whose objects are known to be the same on workers. Later ones change `__FILE__` where prefixes of files are mapped.
const KNOWN_CLANG: u32 = 14;

/// Whether workers make the same with the clang of this line.
fn is_exact(version: &str) -> Result<(), String> {
    let (vendor, number) = version.split_once("clang version ").unwrap_or_default();
    let number = number.split('.').next().and_then(|n| n.parse::<u32>().ok());
    // Apple counts in its own way.
    if number.is_some_and(|n| n == KNOWN_CLANG) && !vendor.contains("Apple") {
        return Ok(());
    }
    Err(format!(
        "clang {KNOWN_CLANG} is the one whose objects are known to be the same on workers"
    ))
}

/// What clang's driver makes of these options: the version, then the arguments of the first step.
///
/// # Errors
/// Why a worker cannot do the same.
pub(crate) fn first_step(
    driver: &Path,
    language: Language,
    options: &[String],
    path: &str,
) -> Result<Vec<String>, String> {
    let last = [
        "-###",
        "-x",
        language.name(),
        "-c",
        "-o",
        "/dev/null",
        "/dev/null",
    ];
    let args: Vec<_> = options.iter().map(String::as_str).chain(last).collect();
    let told = asked(driver, &args, path)?;
    let told = String::from_utf8_lossy(&told.stderr);
    if told.contains("Configuration file:") {
        return Err("clang has a file of options, which workers do not have".into());
    }
    let version = told.lines().find(|line| line.contains("clang version"));
    let steps: Vec<_> = told
        .lines()
        .filter(|line| line.trim_start().starts_with('"'))
        .collect();
    let (Some(version), [step]) = (version, &steps[..]) else {
        return Err(format!("{} has other steps than a clang", driver.display()));
    };
    is_exact(version)?;
    let step = unquoted(step);
    // These files are not on the worker.
    let foreign = |arg: &&String| {
        [
            "-fsanitize-",
            "-fprofile-",
            "-fxray-",
            "-load",
            "-include-pch",
        ]
        .iter()
        .any(|begin| arg.starts_with(begin))
            && arg.contains(['=', '/'])
    };
    if let Some(arg) = step.iter().find(foreign) {
        return Err(format!("clang reads another file ({arg})"));
    }
    // A program that starts the compiler, ccache for example, is not what the digest is to be of.
    let whole = |path: &Path| path.canonicalize().ok();
    let starts_itself = step.first().map(Path::new).and_then(whole) == whole(driver);
    if step.get(1).map(String::as_str) != Some("-cc1") || !starts_itself {
        return Err(format!(
            "{} is no clang, but starts another program",
            driver.display()
        ));
    }
    let mut all = vec![version.to_owned()];
    all.extend(step.into_iter().skip(2));
    Ok(all)
}

/// The same for C and then C++, without the directories of headers, which a master names.
fn settings(driver: &Path, path: &str) -> Result<Vec<u8>, String> {
    const DIRECTORIES: &[&str] = words! {
        "-internal-isystem" "-internal-externc-isystem" "-resource-dir"
    };
    let mut text = String::new();
    for language in [Language::C, Language::Cxx] {
        let mut args = first_step(driver, language, &[], path)?.into_iter();
        while let Some(arg) = args.next() {
            if DIRECTORIES.contains(&arg.as_str()) {
                args.next();
                continue;
            }
            text.push_str(&arg);
            text.push('\n');
        }
    }
    Ok(text.into_bytes())
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

/// The part of an ELF file that identifies its machine: class, byte order, machine.
const ELF_HEADER: usize = 20;

/// The machine of a program; `None` for a file that is no program.
pub(crate) fn machine(path: &Path) -> io::Result<Option<[u8; 4]>> {
    let mut head = [0; ELF_HEADER];
    let whole = File::open(path)?.read_exact(&mut head).is_ok();
    Ok((whole && head.starts_with(b"\x7fELF")).then_some([head[4], head[5], head[18], head[19]]))
}

/// Names under which a compiler's own files count; its compiler proper has its own.
pub(crate) const DRIVER: &str = "driver";
pub(crate) const ASSEMBLER: &str = "as";
/// All of clang is one program.
pub(crate) const CLANG: &str = "clang";
/// For `-gsplit-dwarf`.
const SPLITTER: &str = "objcopy";
pub(crate) const LOADER: &str = "loader";
pub(crate) const SPECS: &str = "specs";

/// All that a compiler consists of.
pub(crate) struct Parts {
    /// Its files, by name: the same ones may be elsewhere on another machine.
    pub(crate) files: BTreeMap<String, PathBuf>,
    /// The driver's output for `-dumpspecs`; what clang's makes of a command without options.
    pub(crate) specs: Vec<u8>,
    /// Whether some programs have shared libraries and others have none.
    pub(crate) mixed: bool,
}

impl Parts {
    /// Of this driver for this language, which finds its programs in this `PATH`.
    pub(crate) fn find(driver: &Path, language: Language, path: &str) -> Result<Self, String> {
        let named = driver;
        let driver = driver
            .canonicalize()
            .map_err(|e| format!("{}: {e}", driver.display()))?;
        let family = named.file_name().and_then(|name| name.to_str());
        let clang = family.and_then(Family::of) == Some(Family::Clang);
        let mut programs = vec![(if clang { CLANG } else { DRIVER }, driver.clone())];
        let further = [language.program(), ASSEMBLER, SPLITTER];
        for program in further.into_iter().filter(|_| !clang) {
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
        let specs = if clang {
            // A script may start any other program.
            if machine(&driver).ok().flatten().is_none() {
                return Err(format!("{} is a script", named.display()));
            }
            settings(named, path)?
        } else {
            output(&driver, &["-dumpspecs"], path)?
        };
        Ok(Self {
            files,
            specs,
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
    fn other_clangs_stay_here() {
        for good in ["Debian clang version 14.0.6", "clang version 14.0.0-1ubuntu1"] {
            is_exact(good).unwrap();
        }
        for bad in [
            "clang version 9.0.1-12",
            "Ubuntu clang version 15.0.7",
            "clang version 20.1.0 (https://github.com/llvm)",
            "Apple clang version 14.0.3",
            "clang version trunk",
        ] {
            is_exact(bad).expect_err(bad);
        }
    }

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
