//! Compilers that travel: a master packs its own; a worker that accepts it keeps it in a folder, and runs it with the libraries in the package
//! (decision 45).
//!
//! A package has no directories and no links: files with plain names, one after the other, in one zstd frame. A name is a length byte and its bytes; contents
//! are a length of eight bytes, big-endian, and the bytes.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::fs::FlockOperation;

use crate::digest::{self, ASSEMBLER, CLANG, DRIVER, Digest, LOADER, Parts, SPECS, machine};
use crate::lock;
use crate::options::Family;

/// Bytes that a packed compiler may have, and files in it.
pub(crate) const MAX_PACKED: u64 = 256 << 20;
const MAX_FILES: usize = 64;
/// Bytes of one file, and of all of a compiler.
const MAX_UNPACKED: u64 = 1 << 30;
/// Workers of one user on one machine, each with a folder of its own.
const MAX_FOLDERS: usize = 64;
/// Names that lead nowhere else.
fn is_plain(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
    (1..=100).contains(&name.len()) && !name.starts_with(['.', '-']) && name.chars().all(good)
}

/// Writes a compiler whose digest this was.
pub(crate) fn pack(parts: &Parts, digest: &Digest, to: impl Write) -> Result<(), String> {
    let mut digests = BTreeMap::new();
    let mut packed = zstd::Encoder::new(to, 0).map_err(|e| e.to_string())?;
    let mut put = |name: &str, contents: &[u8]| -> Result<(), String> {
        if !is_plain(name) {
            return Err(format!("a file of it is named {name}"));
        }
        digests.insert(name.to_owned(), *blake3::hash(contents).as_bytes());
        packed
            .write_all(&[name.len() as u8])
            .and_then(|()| packed.write_all(name.as_bytes()))
            .and_then(|()| packed.write_all(&(contents.len() as u64).to_be_bytes()))
            .and_then(|()| packed.write_all(contents))
            .map_err(|e| e.to_string())
    };
    for (name, path) in &parts.files {
        let contents = fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        if !contents.starts_with(b"\x7fELF") {
            return Err(format!("{} is a script", path.display()));
        }
        put(name, &contents)?;
    }
    if parts.mixed {
        return Err("some of its programs are static, and others are not".into());
    }
    put(SPECS, &parts.specs)?;
    packed.finish().map_err(|e| e.to_string())?;
    if digest::of_files(&digests) == *digest {
        Ok(())
    } else {
        Err("it has just changed".into())
    }
}

/// Unpacks a package into an empty directory.
fn unpack(packed: impl Read, dir: &Path, most: u64) -> Result<(), String> {
    let told = |e: io::Error| format!("it is not packed as it should be: {e}");
    let mut packed = zstd::Decoder::new(packed).map_err(told)?;
    let mut left = most.min(MAX_UNPACKED);
    for count in 0.. {
        let mut len = [0; 1];
        if packed.read(&mut len).map_err(told)? == 0 {
            return Ok(());
        }
        if count == MAX_FILES {
            return Err("it has too many files".into());
        }
        let mut name = vec![0; len[0].into()];
        packed.read_exact(&mut name).map_err(told)?;
        let name = String::from_utf8(name).unwrap_or_default();
        if !is_plain(&name) {
            return Err("it has a file with a name that cannot be".into());
        }
        let mut len = [0; 8];
        packed.read_exact(&mut len).map_err(told)?;
        let len = u64::from_be_bytes(len);
        left = left.checked_sub(len).ok_or("it is too large")?;
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(if name == SPECS { 0o400 } else { 0o500 })
            .open(dir.join(name))
            .map_err(told)?;
        if io::copy(&mut packed.by_ref().take(len), &mut file).map_err(told)? != len {
            return Err("it ends too early".into());
        }
    }
    Ok(())
}

/// A compiler of a master.
pub(crate) struct Installed {
    pub(crate) dir: PathBuf,
    /// The beginning of its command.
    pub(crate) command: Vec<OsString>,
    pub(crate) family: Family,
    size: u64,
}

impl Installed {
    /// Checks a whole directory: it is the compiler with this digest, and for this machine. It will be run from `home`, where it is or will be
    /// moved.
    fn check(dir: &Path, home: PathBuf, digest: &Digest) -> Result<Self, String> {
        let told = |e: io::Error| format!("{}: {e}", dir.display());
        let own = machine(Path::new("/proc/self/exe")).map_err(told)?;
        let mut digests = BTreeMap::new();
        let mut size = 0;
        for entry in fs::read_dir(dir).map_err(told)? {
            let entry = entry.map_err(told)?;
            let (path, name) = (entry.path(), entry.file_name());
            let about = entry.metadata().map_err(told)?;
            let name = name.to_str().filter(|_| about.is_file());
            let name = name.ok_or("something else than files is there")?.to_owned();
            size += about.len();
            if name != SPECS && machine(&path).map_err(told)? != own {
                return Err(format!("its {name} is not for this machine"));
            }
            digests.insert(name, digest::of_file(&path).map_err(told)?);
        }
        if digest::of_files(&digests) != *digest {
            return Err("it is not the one that was named".into());
        }
        let clang = digests.contains_key(CLANG);
        let needed: &[&str] = if clang {
            &[CLANG, SPECS]
        } else {
            &[DRIVER, ASSEMBLER, SPECS]
        };
        if let Some(name) = needed.iter().find(|&&name| !digests.contains_key(name)) {
            return Err(format!("it has no {name}"));
        }
        let mut command = Vec::new();
        let file = |name: &str| home.join(name).into_os_string();
        let joined = |texts: [&str; 2]| -> OsString {
            let mut all = OsString::from(texts[0]);
            all.push(&home);
            all.push(texts[1]);
            all
        };
        let dynamic = digests.contains_key(LOADER);
        if dynamic {
            command.extend([file(LOADER), "--library-path".into(), home.clone().into()]);
        }
        if clang {
            command.push(file(CLANG));
            return Ok(Self {
                dir: home,
                command,
                size,
                family: Family::Clang,
            });
        }
        // Programs and specs of this directory come before all others.
        command.extend([file(DRIVER), joined(["-B", "/"])]);
        if dynamic {
            let mut wrapper = file(LOADER);
            wrapper.push(joined([",--library-path,", ""]));
            command.extend(["-wrapper".into(), wrapper]);
        }
        Ok(Self {
            dir: home,
            command,
            size,
            family: Family::Gcc,
        })
    }
}

enum Entry {
    /// Some connection brings it.
    Coming,
    There(Arc<Installed>, Instant),
}

/// The compilers that a worker keeps.
pub(crate) struct Cache {
    dir: PathBuf,
    most: u64,
    all: Mutex<HashMap<Digest, Entry>>,
    _lock: File,
}

/// The cache's answer about a compiler.
pub(crate) enum Found<'a> {
    There(Arc<Installed>),
    /// Another connection brings it.
    Coming,
    /// This connection may bring it.
    Missing(Claim<'a>),
}

/// The right to bring a compiler, until it is dropped.
pub(crate) struct Claim<'a>(&'a Cache, Digest);

fn hex(digest: &Digest) -> String {
    blake3::Hash::from_bytes(*digest).to_hex().to_string()
}

impl Cache {
    /// Below this folder; what an earlier worker left there is looked at, and kept if it is whole.
    pub(crate) fn open(folder: &Path, most: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let folder = folder.canonicalize()?;
        // These characters separate the arguments of the loader and the driver.
        let separates = |name: &str| name.contains([',', ':', ';', '$', ' ', '\n']);
        if folder.to_str().is_none_or(separates) {
            return Err(io::Error::other(
                "its name has a character that compilers take for a separator",
            ));
        }
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))?;
        for number in 0..MAX_FOLDERS {
            let dir = folder.join(number.to_string());
            fs::create_dir_all(&dir)?;
            let lock = File::open(&dir)?;
            if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
                continue;
            }
            let mut all = HashMap::new();
            for entry in fs::read_dir(&dir)? {
                let path = entry?.path();
                let name = path.file_name().and_then(|name| name.to_str());
                let digest = name.and_then(|name| blake3::Hash::from_hex(name).ok());
                let kept = digest.and_then(|digest| {
                    let kept = Installed::check(&path, path.clone(), digest.as_bytes()).ok()?;
                    Some((*digest.as_bytes(), kept))
                });
                match kept {
                    Some((digest, kept)) => {
                        all.insert(digest, Entry::There(Arc::new(kept), Instant::now()));
                    }
                    None => fs::remove_dir_all(&path)?,
                }
            }
            let cache = Self {
                dir,
                most,
                all: Mutex::new(all),
                _lock: lock,
            };
            cache.shrink();
            return Ok(cache);
        }
        Err(io::Error::other("too many workers keep compilers there"))
    }

    pub(crate) fn find(&self, digest: &Digest) -> Found<'_> {
        let mut all = lock(&self.all);
        match all.get_mut(digest) {
            Some(Entry::There(kept, used)) => {
                *used = Instant::now();
                Found::There(Arc::clone(kept))
            }
            Some(Entry::Coming) => Found::Coming,
            None => {
                all.insert(*digest, Entry::Coming);
                Found::Missing(Claim(self, *digest))
            }
        }
    }

    /// Removes those that were not used for longest, and are not used now, until the others have room.
    fn shrink(&self) {
        let mut all = lock(&self.all);
        loop {
            let mut size = 0;
            let mut oldest: Option<(Instant, Digest)> = None;
            for (digest, entry) in &*all {
                let Entry::There(kept, used) = entry else {
                    continue;
                };
                size += kept.size;
                if Arc::strong_count(kept) == 1 && oldest.is_none_or(|(least, _)| *used < least) {
                    oldest = Some((*used, *digest));
                }
            }
            let Some((_, digest)) = oldest.filter(|_| size > self.most) else {
                return;
            };
            all.remove(&digest);
            let _ = fs::remove_dir_all(self.dir.join(hex(&digest)));
        }
    }
}

impl Claim<'_> {
    /// Unpacks it, and keeps it if it is the one that was named.
    pub(crate) fn install(self, packed: impl Read) -> Result<Arc<Installed>, String> {
        let Self(cache, digest) = &self;
        let told = |e: io::Error| format!("there is no room for it: {e}");
        let new = tempfile::Builder::new()
            .prefix("new-")
            .tempdir_in(&cache.dir)
            .map_err(told)?;
        unpack(packed, new.path(), cache.most)?;
        let dir = cache.dir.join(hex(digest));
        let kept = Arc::new(Installed::check(new.path(), dir, digest)?);
        fs::rename(new.path(), &kept.dir).map_err(told)?;
        lock(&cache.all).insert(*digest, Entry::There(Arc::clone(&kept), Instant::now()));
        cache.shrink();
        Ok(kept)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut all = lock(&self.0.all);
        if matches!(all.get(&self.1), Some(Entry::Coming)) {
            all.remove(&self.1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Language;

    fn archive(files: &[(&[u8], u64, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (name, len, contents) in files {
            bytes.push(name.len() as u8);
            bytes.extend_from_slice(name);
            bytes.extend(len.to_be_bytes());
            bytes.extend_from_slice(contents);
        }
        zstd::encode_all(&bytes[..], 0).unwrap()
    }

    fn entries(dir: &Path) -> usize {
        fs::read_dir(dir).unwrap().count()
    }

    #[test]
    fn hostile_archives_leave_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(&folder.path().join("a/b"), 1 << 20).unwrap();
        let install = |digest: Digest, bytes: &[u8]| {
            let Found::Missing(claim) = cache.find(&digest) else {
                panic!()
            };
            assert!(matches!(cache.find(&digest), Found::Coming));
            claim.install(bytes).map(|_| ()).unwrap_err()
        };
        let name = "a file with a name that cannot be";
        let many: Vec<_> = (0..=MAX_FILES).map(|i| format!("f{i}")).collect();
        let many: Vec<_> = many.iter().map(|n| (n.as_bytes(), 0, &b""[..])).collect();
        let whole = archive(&[(b"driver", 3, b"abc")]);
        for (bytes, reason) in [
            (archive(&[(b"..", 1, b"x")]), name),
            (archive(&[(b"../../x", 1, b"x")]), name),
            (archive(&[(b"/tmp/x", 1, b"x")]), name),
            (archive(&[(b"a/b", 1, b"x")]), name),
            (archive(&[(b"", 1, b"x")]), name),
            (archive(&[(b".x", 1, b"x")]), name),
            (archive(&[(b"a\0b", 1, b"x")]), name),
            (archive(&[(b"\xff", 1, b"x")]), name),
            (archive(&[(b"a", 1, b"x"), (b"a", 1, b"y")]), "File exists"),
            (archive(&[(b"a", (1 << 20) + 1, b"")]), "too large"),
            (archive(&[(b"a", u64::MAX, b"")]), "too large"),
            (archive(&[(b"a", 9, b"x")]), "too early"),
            (archive(&many), "too many files"),
            (b"no frame of zstd".to_vec(), "not packed"),
            (whole[..whole.len() - 2].to_vec(), ""),
            (whole, "not for this machine"),
            (archive(&[]), "not the one that was named"),
        ] {
            let why = install([7; 32], &bytes);
            assert!(why.contains(reason), "{reason}: {why}");
        }
        // A directory with the right digest that is not a complete compiler.
        let files = BTreeMap::from([(SPECS.to_owned(), *blake3::hash(b"x").as_bytes())]);
        let why = install(digest::of_files(&files), &archive(&[(b"specs", 1, b"x")]));
        assert!(why.contains("it has no driver"), "{why}");
        assert_eq!(entries(&folder.path().join("a/b/0")), 0);
        assert_eq!(entries(&folder.path().join("a")), 1);
    }

    #[test]
    fn compilers_are_kept_until_others_need_the_room() {
        let Some(gcc) = crate::find_program("gcc") else {
            eprintln!("skipped: there is no gcc (Debian's package gcc)");
            return;
        };
        let parts = Parts::find(&gcc, Language::C, crate::PATH).unwrap();
        let digests = digest::Digests::default();
        let first = digests.of(&gcc, Language::C, crate::PATH).unwrap();
        let mut packed = Vec::new();
        pack(&parts, &first, &mut packed).unwrap();
        // The same with other specs is another one.
        let mut other = parts;
        other.specs.push(b'\n');
        assert!(
            pack(&other, &first, io::sink())
                .unwrap_err()
                .contains("changed")
        );
        let folder = tempfile::tempdir().unwrap();
        let size = {
            let cache = Cache::open(folder.path(), 1 << 30).unwrap();
            let Found::Missing(claim) = cache.find(&first) else {
                panic!()
            };
            let kept = claim.install(&packed[..]).unwrap();
            assert!(matches!(cache.find(&first), Found::There(_)));
            // Another worker has a folder of its own.
            let beside = Cache::open(folder.path(), 1 << 30).unwrap();
            assert!(matches!(beside.find(&first), Found::Missing(_)));
            kept.size
        };
        // The next worker has it.
        let cache = Cache::open(folder.path(), size).unwrap();
        let Found::There(kept) = cache.find(&first) else {
            panic!()
        };
        // A compiler in use stays.
        let few = Cache { most: 1, ..cache };
        few.shrink();
        assert!(kept.dir.join(DRIVER).exists());
        let dir = kept.dir.clone();
        drop(kept);
        few.shrink();
        assert!(!dir.exists() && matches!(few.find(&first), Found::Missing(_)));
        drop(few);
        // A directory that was changed meanwhile does not stay.
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join(SPECS), b"x").unwrap();
        let cache = Cache::open(folder.path(), size).unwrap();
        assert!(matches!(cache.find(&first), Found::Missing(_)) && !dir.exists());
    }
}
