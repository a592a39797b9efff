//! A worker's view of a master's tree: a directory in which each name of the master is either the fetched file, or a symbolic link to
//! itself.
//!
//! A compiler that searches for headers must not treat a name as absent only because it was not fetched: it would continue in the next directory, and use
//! another header. So an existing file that was not fetched is a symbolic link to itself. A compiler that opens it gets ELOOP, fails, and names the file; then
//! the worker fetches it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::remove::{Scratch, remove};

use crate::pull::scan;
use crate::wire::{Entry, Node};

/// Symbolic links on one way.
const MAX_LINKS: usize = 40;
/// The longest target of a link, in bytes.
const MAX_TARGET: usize = 4096;
/// Names, and bytes of files, that one view may have.
const MAX_NAMES: usize = 400_000;
const MAX_BYTES: u64 = 512 << 20;

/// Names of files that are known to be complete.
const MAX_COMPLETE: usize = 50_000;

/// The names in a source or header.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// In angle brackets?, the name.
    pub(super) names: Vec<(bool, String)>,
    /// It may name a file by its absolute name.
    pub(super) absolute: bool,
}

enum Kind {
    File(Facts),
    Directory(BTreeSet<String>),
    Way(BTreeSet<String>),
    Link(PathBuf),
    Refused,
}

struct Held {
    kind: Kind,
    number: u32,
    len: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum State {
    /// A file; where it is without links.
    File(PathBuf),
    Directory(PathBuf),
    /// There is nothing.
    Absent,
    /// Request this path from the master.
    Unknown(PathBuf),
    /// The master does not give this path.
    Refused(PathBuf),
}

/// A master's tree, as far as it was fetched.
pub(super) struct View {
    dir: Scratch,
    root: PathBuf,
    held: HashMap<PathBuf, Held>,
    /// Links whose targets were unknown when they arrived.
    links: HashSet<PathBuf>,
    /// Ways that were asked for in this job.
    asked: HashSet<PathBuf>,
    /// Files whose includes, including nested ones, are all present for a search in `searched`, by the names under which they were
    /// included.
    complete: HashSet<PathBuf>,
    searched: Vec<PathBuf>,
    names: usize,
    bytes: u64,
    /// There was more to hold than may be.
    full: bool,
}

impl View {
    /// In a directory of its own below `place`.
    pub(super) fn new(place: &Path) -> io::Result<Self> {
        let dir = Scratch::new("weft-cc-view-", place)?;
        let root = dir.path().canonicalize()?.join("r");
        std::fs::create_dir(&root)?;
        Ok(Self {
            dir,
            root,
            held: HashMap::new(),
            links: HashSet::new(),
            asked: HashSet::new(),
            complete: HashSet::new(),
            searched: Vec::new(),
            names: 0,
            bytes: 0,
            full: false,
        })
    }

    /// The compiler's `/`.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The directory that the compiler may read.
    pub(super) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// A new job may read other directories.
    pub(super) fn begin(&mut self) {
        self.asked.clear();
        self.held
            .retain(|_, held| !matches!(held.kind, Kind::Refused));
    }

    /// The files that are complete for a search of headers in these directories, in this order.
    pub(super) fn complete(&mut self, searched: Vec<PathBuf>) -> &mut HashSet<PathBuf> {
        if self.searched != searched || self.complete.len() > MAX_COMPLETE {
            self.complete.clear();
            self.searched = searched;
        }
        &mut self.complete
    }

    /// The local path of a master's path.
    pub(super) fn at(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The state of a path, which may contain `..` and links as the compiler's may.
    pub(super) fn state(&self, path: &Path) -> State {
        let parts = |path: &Path| -> Vec<String> {
            path.to_string_lossy()
                .rsplit('/')
                .filter(|part| !part.is_empty() && *part != ".")
                .map(str::to_owned)
                .collect()
        };
        let (mut at, mut todo, mut links) = (PathBuf::from("/"), parts(path), 0);
        loop {
            let Some(held) = self.held.get(&at) else {
                return State::Unknown(at);
            };
            let (names, way) = match &held.kind {
                Kind::Refused => return State::Refused(at),
                Kind::File(_) if todo.is_empty() => return State::File(at),
                Kind::File(_) => return State::Absent,
                Kind::Link(to) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return State::Absent;
                    }
                    todo.extend(parts(to));
                    at = "/".into();
                    continue;
                }
                Kind::Directory(names) => (names, false),
                Kind::Way(names) => (names, true),
            };
            let Some(next) = todo.pop() else {
                return State::Directory(at);
            };
            if next == ".." {
                at.pop();
                if at.as_os_str().is_empty() {
                    at = "/".into();
                }
            } else if names.contains(&next) {
                at.push(next);
            } else if !way {
                return State::Absent;
            } else if self.asked.contains(&at) {
                at.push(next);
                return State::Refused(at);
            } else {
                return State::Unknown(at);
            }
        }
    }

    /// For a directory above those that may be read, at a path without links: whether it was asked for in this job.
    ///
    /// Names are missing in it that the master has, so no compiler may look for a header there.
    pub(super) fn way(&self, path: &Path) -> Option<bool> {
        match &self.held.get(path)?.kind {
            Kind::Way(_) => Some(self.asked.contains(path)),
            _ => None,
        }
    }

    /// Whether this exact path is known.
    pub(super) fn has(&self, path: &Path) -> bool {
        self.held.contains_key(path)
    }

    /// The names in the file at a path without links.
    pub(super) fn facts(&self, path: &Path) -> Option<&Facts> {
        match &self.held.get(path)?.kind {
            Kind::File(facts) => Some(facts),
            _ => None,
        }
    }

    /// The nodes whose change would change the compiler's result after it has read these files, which are without links.
    pub(super) fn to_check(&self, used: &HashSet<PathBuf>) -> Vec<u32> {
        let counts = |(path, held): &(&PathBuf, &Held)| match held.kind {
            Kind::File(_) => used.contains(*path),
            Kind::Directory(_) | Kind::Link(_) => true,
            Kind::Way(_) | Kind::Refused => false,
        };
        let all = self.held.iter().filter(counts);
        all.map(|(_, held)| held.number).collect()
    }

    /// The paths of these nodes.
    pub(super) fn paths_of(&self, numbers: &[u32]) -> Vec<PathBuf> {
        let numbers: HashSet<_> = numbers.iter().collect();
        let of = self.held.iter().filter(|(_, held)| {
            numbers.contains(&held.number) && !matches!(held.kind, Kind::Refused)
        });
        of.map(|(path, _)| path.clone()).collect()
    }

    /// Removes everything at and below a path.
    fn remove(&mut self, path: &Path) -> io::Result<()> {
        let (names, bytes) = (&mut self.names, &mut self.bytes);
        let mut gone = |held: &Held| {
            *bytes -= held.len;
            if let Kind::Directory(all) | Kind::Way(all) = &held.kind {
                *names -= all.len();
            }
        };
        if let Some(held) = self.held.remove(path) {
            self.complete.clear();
            gone(&held);
            if matches!(held.kind, Kind::Directory(_) | Kind::Way(_)) {
                self.held.retain(|other, held| {
                    let below = other.starts_with(path);
                    if below {
                        gone(held);
                    }
                    !below
                });
            }
        }
        self.links.remove(path);
        let at = self.at(path);
        match at.symlink_metadata() {
            Ok(about) if about.is_dir() => remove(&at),
            Ok(_) => std::fs::remove_file(at),
            Err(_) => Ok(()),
        }
    }

    /// Something is there that was not fetched.
    fn placeholder(&self, path: &Path) -> io::Result<()> {
        let name = path.file_name().unwrap_or_default();
        symlink(name, self.at(path))
    }

    /// `len`: bytes of a file.
    fn hold(&mut self, path: &Path, kind: Kind, entry: &Entry, len: u64) {
        self.bytes += len;
        self.held.insert(
            path.into(),
            Held {
                kind,
                number: entry.number,
                len,
            },
        );
    }

    /// Installs the master's answer for a path, and replaces its old contents.
    ///
    /// # Errors
    /// The errors of the file system; `InvalidData` for an impossible tree; `StorageFull`, and then the view is full.
    pub(super) fn install(&mut self, path: &Path, entry: &Entry, bytes: &[u8]) -> io::Result<()> {
        let bad = || io::Error::from(io::ErrorKind::InvalidData);
        // Only names that are in a known directory's listing arrive here.
        let known = path == Path::new("/")
            || path.parent().and_then(|parent| self.held.get(parent)).is_some_and(|held| {
                let name = path.file_name().unwrap_or_default();
                matches!(&held.kind, Kind::Directory(names) | Kind::Way(names) if name.to_str().is_some_and(|name| names.contains(name)))
            });
        if !known {
            return Err(bad());
        }
        match entry.node {
            // A listed name can lead nowhere, or be replaced at this moment. Its directory need not change when it leads somewhere, so the next job asks again.
            Node::Absent | Node::Refused => {
                self.remove(path)?;
                if path != Path::new("/") {
                    self.placeholder(path)?;
                }
                self.hold(path, Kind::Refused, entry, 0);
            }
            Node::Link => {
                self.remove(path)?;
                self.placeholder(path)?;
                let to = std::str::from_utf8(bytes).map_err(|_| bad())?;
                let up = |part: Component<'_>| part == Component::ParentDir;
                if !to.starts_with('/')
                    || to.contains('\0')
                    || to.len() > MAX_TARGET
                    || Path::new(to).components().any(up)
                {
                    return Err(bad());
                }
                self.hold(path, Kind::Link(to.into()), entry, 0);
                self.links.insert(path.into());
            }
            Node::File => {
                self.remove(path)?;
                let len = bytes.len() as u64;
                if self.bytes + len > MAX_BYTES {
                    return Err(self.overflow());
                }
                let mut file = File::create_new(self.at(path))?;
                file.write_all(bytes)?;
                // `#pragma once` compares times.
                let time = u64::try_from(entry.mtime).unwrap_or(0);
                file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_nanos(time))?;
                let (names, absolute) = scan(bytes);
                self.hold(path, Kind::File(Facts { names, absolute }), entry, len);
            }
            Node::Directory | Node::Way => self.directory(path, entry, bytes)?,
        }
        Ok(())
    }

    fn overflow(&mut self) -> io::Error {
        self.full = true;
        io::ErrorKind::StorageFull.into()
    }

    fn directory(&mut self, path: &Path, entry: &Entry, bytes: &[u8]) -> io::Result<()> {
        let bad = || io::Error::from(io::ErrorKind::InvalidData);
        let text = std::str::from_utf8(bytes).map_err(|_| bad())?;
        let names: BTreeSet<String> = text.split_terminator('\0').map(str::to_owned).collect();
        let good = |name: &String| {
            !name.is_empty()
                && name.len() < 256
                && name != "."
                && name != ".."
                && !name.contains('/')
        };
        if !names.iter().all(good) {
            return Err(bad());
        }
        if self.names + names.len() > MAX_NAMES {
            return Err(self.overflow());
        }
        let before = match self.held.remove(path) {
            Some(Held {
                kind: Kind::Directory(names) | Kind::Way(names),
                ..
            }) => {
                self.complete.clear();
                names
            }
            other => {
                if let Some(held) = other {
                    self.held.insert(path.into(), held);
                }
                self.remove(path)?;
                if path != Path::new("/") || !self.root.is_dir() {
                    std::fs::create_dir(self.at(path))?;
                }
                BTreeSet::new()
            }
        };
        self.names = self.names - before.len() + names.len();
        for gone in before.difference(&names) {
            self.remove(&path.join(gone))?;
        }
        for new in names.difference(&before) {
            self.placeholder(&path.join(new))?;
        }
        // A directory of an earlier job, which had fewer names to read, is not taken for a whole one.
        for old in names.intersection(&before) {
            let old = path.join(old);
            if entry.node == Node::Directory && self.way(&old) == Some(false) {
                self.remove(&old)?;
                self.placeholder(&old)?;
            }
        }
        let kind = if entry.node == Node::Way {
            self.asked.insert(path.into());
            Kind::Way(names)
        } else {
            Kind::Directory(names)
        };
        self.hold(path, kind, entry, 0);
        Ok(())
    }

    /// Creates links whose targets are known now.
    pub(super) fn point_links(&mut self) -> io::Result<()> {
        let pending: Vec<_> = self.links.iter().cloned().collect();
        for link in pending {
            let Some(Kind::Link(to)) = self.held.get(&link).map(|held| &held.kind) else {
                self.links.remove(&link);
                continue;
            };
            if matches!(self.state(to), State::File(_) | State::Directory(_)) {
                let (at, to) = (self.at(&link), self.at(to));
                std::fs::remove_file(&at)?;
                symlink(to, at)?;
                self.links.remove(&link);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(node: Node) -> Entry {
        Entry {
            node,
            number: 0,
            mtime: 1_000_000_000,
            at: 0,
            len: 0,
            digest: [0; 32],
        }
    }

    #[test]
    fn what_was_not_fetched_is_not_absent() {
        let dir = tempfile::tempdir().unwrap();
        let mut view = View::new(dir.path()).unwrap();
        let path = Path::new;
        assert_eq!(view.state(path("/p/a.h")), State::Unknown("/".into()));
        view.install(path("/"), &entry(Node::Way), b"p\0").unwrap();
        view.install(path("/p"), &entry(Node::Directory), b"a.h\0l\0sub\0")
            .unwrap();
        assert_eq!(view.state(path("/p/a.h")), State::Unknown("/p/a.h".into()));
        let open = |view: &View, name: &str| {
            File::open(view.at(path(name)))
                .map(drop)
                .map_err(|e| e.raw_os_error())
        };
        assert_eq!(open(&view, "/p/a.h"), Err(Some(libc::ELOOP)));
        assert_eq!(open(&view, "/p/sub/x.h"), Err(Some(libc::ELOOP)));
        assert_eq!(open(&view, "/p/no.h"), Err(Some(libc::ENOENT)));
        assert_eq!(view.state(path("/p/no.h")), State::Absent);
        // Paths beyond the roots do not count as absent either.
        assert_eq!(view.state(path("/p/../q/x.h")), State::Refused("/q".into()));
        view.install(path("/p/l"), &entry(Node::Link), b"/p/sub")
            .unwrap();
        view.point_links().unwrap();
        assert_eq!(open(&view, "/p/l/x.h"), Err(Some(libc::ELOOP)));
        view.install(path("/p/sub"), &entry(Node::Directory), b"x.h\0")
            .unwrap();
        view.install(path("/p/sub/x.h"), &entry(Node::File), b"int x;")
            .unwrap();
        view.point_links().unwrap();
        assert_eq!(
            view.state(path("/p/l/x.h")),
            State::File("/p/sub/x.h".into())
        );
        assert_eq!(
            view.state(path("/p/l/../a.h")),
            State::Unknown("/p/a.h".into())
        );
        assert_eq!(open(&view, "/p/l/x.h"), Ok(()));
        // A directory that is read again keeps what stays.
        view.install(path("/p"), &entry(Node::Directory), b"l\0new.h\0sub\0")
            .unwrap();
        assert_eq!(
            (open(&view, "/p/a.h"), open(&view, "/p/new.h")),
            (Err(Some(libc::ENOENT)), Err(Some(libc::ELOOP)))
        );
        assert_eq!(open(&view, "/p/sub/x.h"), Ok(()));
        view.install(path("/p/sub/x.h"), &entry(Node::Absent), b"")
            .unwrap();
        // A listed link without a target may get one.
        let x = path("/p/sub/x.h");
        assert_eq!(view.state(x), State::Refused(x.into()));
        assert_eq!(open(&view, "/p/sub/x.h"), Err(Some(libc::ELOOP)));
        view.begin();
        assert_eq!(view.state(x), State::Unknown(x.into()));
        assert_eq!(view.bytes, 0);
    }

    #[test]
    fn what_an_earlier_job_saw_in_part_is_asked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut view = View::new(dir.path()).unwrap();
        let path = Path::new;
        for (at, names) in [("/", &b"p\0"[..]), ("/p", b"a\0"), ("/p/a", b"b\0")] {
            view.install(path(at), &entry(Node::Way), names).unwrap();
        }
        assert_eq!(view.way(path("/p/a")), Some(true));
        view.begin();
        assert_eq!(view.way(path("/p/a")), Some(false));
        view.install(path("/p"), &entry(Node::Directory), b"a\0x.h\0")
            .unwrap();
        assert_eq!(view.way(path("/p")), None);
        assert_eq!(view.state(path("/p/a")), State::Unknown("/p/a".into()));
        // `__has_include` must not find that there is nothing.
        let e = File::open(view.at(path("/p/a/y.h"))).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::ELOOP));
    }

    #[test]
    fn what_changes_makes_no_file_complete() {
        let dir = tempfile::tempdir().unwrap();
        let mut view = View::new(dir.path()).unwrap();
        let path = Path::new;
        let order = || vec![PathBuf::from("/p")];
        view.install(path("/"), &entry(Node::Directory), b"a.h\0b.h\0p\0")
            .unwrap();
        let found = |view: &mut View, change: &dyn Fn(&mut View)| {
            view.complete(order()).insert("/a.h".into());
            change(view);
            view.complete(order()).contains(path("/a.h"))
        };
        // New files are requested before any file is complete.
        let new = |view: &mut View| view.install(path("/b.h"), &entry(Node::File), b"").unwrap();
        assert!(found(&mut view, &new));
        assert!(found(&mut view, &|view| view.begin()));
        // It may name others; it may hide others; it may be removed.
        assert!(!found(&mut view, &new));
        assert!(!found(&mut view, &|view| {
            view.install(path("/"), &entry(Node::Directory), b"a.h\0b.h\0c.h\0p\0")
                .unwrap();
        }));
        assert!(!found(&mut view, &|view| {
            view.install(path("/b.h"), &entry(Node::Absent), b"")
                .unwrap();
        }));
        // And others are found elsewhere.
        assert!(!found(&mut view, &|view| {
            view.complete(vec![PathBuf::from("/q")]);
        }));
    }

    #[test]
    fn a_view_has_limits() {
        let dir = tempfile::tempdir().unwrap();
        let mut view = View::new(dir.path()).unwrap();
        let path = Path::new;
        view.install(path("/"), &entry(Node::Directory), b"f\0")
            .unwrap();
        // The received bytes count, not the length that the master names.
        view.install(path("/f"), &entry(Node::File), b"int x;")
            .unwrap();
        assert_eq!(view.bytes, 6);
        view.bytes = MAX_BYTES;
        view.install(path("/f"), &entry(Node::File), b"int x;")
            .unwrap();
        assert!(!view.is_full());
        let e = view.install(path("/f"), &entry(Node::File), b"int long_x;");
        assert_eq!(e.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(view.is_full());
        view.names = MAX_NAMES;
        view.install(path("/"), &entry(Node::Directory), b"f\0g\0")
            .unwrap_err();
    }

    #[test]
    fn a_hostile_master_stays_in_the_view() {
        let dir = tempfile::tempdir().unwrap();
        let mut view = View::new(dir.path()).unwrap();
        let path = Path::new;
        for bad in [&b"..\0"[..], b"a/b\0", b".\0", b"\0", b"\xff\0"] {
            view.install(path("/"), &entry(Node::Directory), bad)
                .unwrap_err();
        }
        view.install(path("/"), &entry(Node::Directory), b"p\0")
            .unwrap();
        for bad in ["/q", "/p/x", "/../x", "/p/.."] {
            view.install(path(bad), &entry(Node::File), b"x")
                .expect_err(bad);
        }
        for bad in ["etc/passwd", "/p/../../x", "/.."] {
            view.install(path("/p"), &entry(Node::Link), bad.as_bytes())
                .unwrap_err();
        }
        view.install(path("/p"), &entry(Node::Link), b"/etc/passwd")
            .unwrap();
        view.point_links().unwrap();
        File::open(view.at(path("/p"))).unwrap_err();
        // A circle ends.
        view.install(path("/p"), &entry(Node::Link), b"/p").unwrap();
        assert_eq!(view.state(path("/p/x")), State::Absent);
    }
}
