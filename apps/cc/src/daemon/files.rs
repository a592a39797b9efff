//! The master's files for workers that preprocess: the allowed files, and the check that they have not changed since the worker read them.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use crate::ipc::PullAsk;
use crate::lock;
use crate::options::Language;
use crate::pull::is_of_no_interest;
use crate::wire::{DIGEST_LEN, Entry, Node};

/// The longest file, and the contents of one answer, in bytes.
const MAX_FILE: u64 = 16 << 20;
const MAX_ANSWER: usize = 64 << 20;
/// Names of a directory, and nodes of a connection.
const MAX_NAMES: usize = 50_000;
const MAX_NODES: usize = 500_000;
/// A file that was changed this shortly before it was read may be changed again with the same time.
const YOUNG: Duration = Duration::from_secs(2);

type Key = (PathBuf, Language, Vec<String>, String);

/// The directories that compilers search by themselves.
#[derive(Default)]
pub(super) struct System(Mutex<HashMap<Key, Vec<String>>>);

impl System {
    pub(super) fn of(
        &self,
        driver: &Path,
        language: Language,
        search: &[String],
        path: &str,
    ) -> Result<Vec<String>, String> {
        let key = (
            driver.to_owned(),
            language,
            search.to_vec(),
            path.to_owned(),
        );
        if let Some(known) = lock(&self.0).get(&key) {
            return Ok(known.clone());
        }
        let last = ["-E", "-v", "-x", language.name(), "/dev/null"];
        let args: Vec<_> = search.iter().map(String::as_str).chain(last).collect();
        let told = crate::digest::asked(driver, &args, path)?;
        let text = String::from_utf8_lossy(&told.stderr);
        let mut dirs = None;
        for line in text.lines() {
            match (&mut dirs, line) {
                (None, "#include <...> search starts here:") => dirs = Some(Vec::new()),
                (Some(_), "End of search list.") => break,
                (Some(dirs), line) => dirs.push(line.trim().to_owned()),
                _ => {}
            }
        }
        let dirs = dirs.ok_or_else(|| {
            format!(
                "{} does not say where it looks for headers",
                driver.display()
            )
        })?;
        lock(&self.0).insert(key, dirs.clone());
        Ok(dirs)
    }
}

/// The files that the worker of one job may read.
pub(super) struct Roots(Vec<PathBuf>);

impl Roots {
    pub(super) fn new(ask: &PullAsk, system: &[String]) -> Self {
        let mut all: Vec<PathBuf> = ask.roots.iter().map(PathBuf::from).collect();
        for dir in system {
            all.extend(Path::new(dir).canonicalize());
            all.push(dir.into());
        }
        Self(all)
    }

    /// Below a root, and not hidden there.
    fn reads(&self, real: &Path) -> bool {
        let plain = |part: Component<'_>| matches!(part, Component::Normal(name) if !name.as_bytes().starts_with(b"."));
        self.0.iter().any(|root| {
            real.strip_prefix(root)
                .is_ok_and(|rest| rest.components().all(plain))
        })
    }

    /// The same, or on the way to a root.
    fn lists(&self, real: &Path) -> bool {
        self.reads(real) || self.0.iter().any(|root| root.starts_with(real))
    }

    /// The names in a directory that lead to roots.
    fn way(&self, dir: &Path) -> Vec<String> {
        let next = |root: &PathBuf| {
            let first = root.strip_prefix(dir).ok()?.components().next()?;
            first.as_os_str().to_str().map(str::to_owned)
        };
        self.0.iter().filter_map(next).collect()
    }
}

/// Device, inode, length, times of the last change of contents and of the inode.
type Stamp = (u64, u64, u64, i64, i64);

struct Seen {
    path: PathBuf,
    node: Node,
    digest: [u8; DIGEST_LEN],
    mtime: i64,
    /// `None`: it has to be read again.
    stamp: Option<Stamp>,
}

/// The nodes that a connection's worker has.
#[derive(Default)]
pub(super) struct Served(Vec<Seen>);

fn nanos(seconds: i64, nanos: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
}

/// The stamp of a path's target, only if it has been unchanged for a while.
fn stamp(about: &std::fs::Metadata) -> Option<Stamp> {
    let changed = nanos(about.mtime(), about.mtime_nsec());
    let inode = nanos(about.ctime(), about.ctime_nsec());
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |now| i64::try_from(now.as_nanos()).unwrap_or(i64::MAX));
    let limit = now.saturating_sub(YOUNG.as_nanos() as i64);
    (changed < limit && inode < limit).then_some((
        about.dev(),
        about.ino(),
        about.len(),
        changed,
        inode,
    ))
}

/// Names in one order, each ended by a zero byte.
fn joined(mut names: Vec<String>) -> Vec<u8> {
    names.sort_unstable();
    names.dedup();
    names
        .join("\0")
        .into_bytes()
        .into_iter()
        .chain((!names.is_empty()).then_some(0))
        .collect()
}

/// The present state of a path, with its contents.
///
/// `roots`: the allowed files; `None` if that has been decided.
fn look(path: &Path, roots: Option<&Roots>) -> (Node, i64, Option<Stamp>, Vec<u8>) {
    let is = |node| (node, 0, None, Vec::new());
    let plain = path.is_absolute()
        && path
            .components()
            .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    // As a worker walks: each link is asked for by itself.
    let parent = path.parent().unwrap_or(Path::new("/"));
    // Whether something exists beyond the roots is not disclosed either.
    let known = |roots: &Roots| roots.reads(parent) || roots.lists(path);
    if !plain || !roots.is_none_or(known) {
        return is(Node::Refused);
    }
    match parent.canonicalize() {
        Ok(real) if real == parent => {}
        Ok(_) => return is(Node::Refused),
        Err(_) => return is(Node::Absent),
    }
    let Ok(about) = path.symlink_metadata() else {
        return is(Node::Absent);
    };
    if about.is_symlink() {
        return match path.canonicalize() {
            Ok(real) => match real.to_str() {
                Some(real) => (Node::Link, 0, None, real.as_bytes().to_vec()),
                None => is(Node::Refused),
            },
            Err(_) => is(Node::Absent),
        };
    }
    if about.is_dir() {
        if roots.is_some_and(|roots| !roots.lists(path)) {
            return is(Node::Refused);
        }
        if let Some(roots) = roots.filter(|roots| !roots.reads(path)) {
            return (Node::Way, 0, None, joined(roots.way(path)));
        }
        let Ok(entries) = std::fs::read_dir(path) else {
            return is(Node::Refused);
        };
        let names: Vec<String> = entries
            .filter_map(|entry| {
                let entry = entry.ok()?;
                let name = entry.file_name().into_string().ok()?;
                // A compiler may look for headers in a directory of any name.
                let plain = entry.file_type().is_ok_and(|kind| kind.is_file());
                (!plain || !is_of_no_interest(&name)).then_some(name)
            })
            .collect();
        if names.len() > MAX_NAMES {
            return is(Node::Refused);
        }
        return (Node::Directory, 0, stamp(&about), joined(names));
    }
    if roots.is_some_and(|roots| !roots.reads(path)) {
        return is(Node::Refused);
    }
    // Another file may be there by now: a link is not followed, and a FIFO does not block.
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path);
    let Ok(file) = file else {
        return is(Node::Refused);
    };
    let opened = std::fs::read_link(format!(
        "/proc/self/fd/{}",
        std::os::fd::AsRawFd::as_raw_fd(&file)
    ));
    let Ok(about) = file.metadata() else {
        return is(Node::Refused);
    };
    if !about.is_file() || about.len() > MAX_FILE || !opened.is_ok_and(|opened| opened == path) {
        return is(Node::Refused);
    }
    let mut bytes = Vec::with_capacity(about.len() as usize);
    match file.take(MAX_FILE).read_to_end(&mut bytes) {
        Ok(n) if n as u64 == about.len() => {
            let mtime = nanos(about.mtime(), about.mtime_nsec());
            (Node::File, mtime, stamp(&about), bytes)
        }
        _ => is(Node::Refused),
    }
}

impl Served {
    /// Answers for these paths, and their contents one after the other.
    pub(super) fn answer(&mut self, paths: &[String], roots: &Roots) -> (Vec<Entry>, Vec<u8>) {
        let mut contents = Vec::new();
        let mut entries = Vec::with_capacity(paths.len());
        for path in paths {
            let path = PathBuf::from(path);
            let (mut node, mtime, stamp, bytes) = look(&path, Some(roots));
            if self.0.len() >= MAX_NODES || contents.len() + bytes.len() > MAX_ANSWER {
                node = Node::Refused;
            }
            let mut entry = Entry {
                node,
                number: self.0.len() as u32,
                mtime,
                at: contents.len() as u64,
                len: 0,
                digest: [0; DIGEST_LEN],
            };
            if !matches!(node, Node::Absent | Node::Refused) {
                entry.digest = *blake3::hash(&bytes).as_bytes();
                entry.len = bytes.len() as u64;
                contents.extend(bytes);
                self.0.push(Seen {
                    path,
                    node,
                    digest: entry.digest,
                    mtime,
                    stamp,
                });
            }
            entries.push(entry);
        }
        (entries, contents)
    }

    /// The nodes that have changed. Unknown numbers are among them.
    pub(super) fn stale(&mut self, nodes: Vec<u32>) -> Vec<u32> {
        let fresh = |seen: &mut Seen| {
            if seen.stamp.is_some()
                && seen
                    .path
                    .symlink_metadata()
                    .is_ok_and(|about| stamp(&about) == seen.stamp)
            {
                return true;
            }
            let (node, mtime, stamp, bytes) = look(&seen.path, None);
            let same = (node, mtime) == (seen.node, seen.mtime)
                && *blake3::hash(&bytes).as_bytes() == seen.digest;
            if same {
                seen.stamp = stamp;
            }
            same
        };
        nodes
            .into_iter()
            .filter(|&node| !self.0.get_mut(node as usize).is_some_and(fresh))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn ask(served: &mut Served, roots: &Roots, path: &Path) -> (Node, Vec<u8>, u32) {
        let (entries, bytes) = served.answer(&[path.to_str().unwrap().into()], roots);
        (entries[0].node, bytes, entries[0].number)
    }

    #[test]
    fn workers_read_what_a_compilation_may_read_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        for name in ["p/inc", "p/.moc", "p/.git", "p/conf.d"] {
            std::fs::create_dir_all(base.join(name)).unwrap();
        }
        for name in [
            "p/a.h",
            "p/inc/b.h",
            "p/.env",
            "p/.moc/m.h",
            "p/.git/x",
            "p/x.o",
            "p/.x.d",
            "secret",
        ] {
            std::fs::write(base.join(name), name).unwrap();
        }
        symlink("/etc/passwd", base.join("p/inc/passwd.h")).unwrap();
        symlink("../a.h", base.join("p/inc/up.h")).unwrap();
        symlink(&base, base.join("p/out")).unwrap();
        let pull = PullAsk {
            cpp: Vec::new(),
            search: Vec::new(),
            roots: ["p", "p/.moc"]
                .map(|root| base.join(root).to_str().unwrap().into())
                .to_vec(),
        };
        let (roots, mut served) = (Roots::new(&pull, &[]), Served::default());
        let mut get = |path: &str| ask(&mut served, &roots, &base.join(path));
        assert_eq!(
            (get("p/a.h").0, get("p/a.h").1),
            (Node::File, b"p/a.h".to_vec())
        );
        // Only names on the way there; no objects, and of hidden files only the name.
        assert_eq!((get("").0, get("").1), (Node::Way, b"p\0".to_vec()));
        assert_eq!(get("p").1, b".env\0.git\0.moc\0a.h\0conf.d\0inc\0out\0");
        // A hidden directory can be a root.
        assert_eq!(get("p/.moc").1, b"m.h\0");
        assert_eq!(get("p/.moc/m.h").0, Node::File);
        assert_eq!(get("p/conf.d").0, Node::Directory);
        assert_eq!(
            get("p/inc/up.h").1,
            base.join("p/a.h").to_str().unwrap().as_bytes()
        );
        assert_eq!(get("p/inc/passwd.h").1, b"/etc/passwd");
        assert_eq!(get("p/nothing").0, Node::Absent);
        for bad in [
            "secret",
            "p/.env",
            "p/.git",
            "p/.git/x",
            "p/../secret",
            "p/out/secret",
            "p/out/p/a.h",
            "p/inc/../a.h",
        ] {
            assert_eq!(get(bad).0, Node::Refused, "{bad}");
        }
        for bad in [
            "/etc/passwd",
            "/etc/shadow",
            "/etc",
            "/proc/self/environ",
            "/dev/zero",
            "/no/such/directory",
            "x",
        ] {
            assert_eq!(get(bad).0, Node::Refused, "{bad}");
        }
    }

    #[test]
    fn what_changes_is_stale() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        let pull = PullAsk {
            cpp: Vec::new(),
            search: Vec::new(),
            roots: vec![base.to_str().unwrap().into()],
        };
        let (roots, mut served) = (Roots::new(&pull, &[]), Served::default());
        std::fs::write(base.join("a.h"), "1").unwrap();
        let file = ask(&mut served, &roots, &base.join("a.h")).2;
        let names = ask(&mut served, &roots, &base).2;
        // Files that a build writes beside its sources change nothing.
        std::fs::write(base.join("a.o"), "1").unwrap();
        assert!(served.stale(vec![file, names]).is_empty());
        // The same length, within one tick of the file system's clock.
        let time = base.join("a.h").metadata().unwrap().modified().unwrap();
        std::fs::write(base.join("a.h"), "2").unwrap();
        File::options()
            .write(true)
            .open(base.join("a.h"))
            .unwrap()
            .set_modified(time)
            .unwrap();
        assert_eq!(served.stale(vec![file, names, 77]), [file, 77]);
        std::fs::write(base.join("b.h"), "").unwrap();
        assert_eq!(served.stale(vec![names]), [names]);
        std::fs::remove_file(base.join("b.h")).unwrap();
        assert!(served.stale(vec![names]).is_empty());
        std::fs::remove_file(base.join("a.h")).unwrap();
        assert_eq!(served.stale(vec![file, names]), [file, names]);
    }
}
