//! The files that a sender sends: the arguments, and with `--recursive` everything below them, in a fixed order.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, Stat};

use super::attributes;
use super::open_below::open_beneath;
pub use super::protocol::What;
use super::protocol::{Attributes, Meta, Mtime, RelPath, Version};
use weft_cli::failure::Failure;

/// The identity of a file, independent of its name: device and inode.
pub type FileId = (u64, u64);

/// The identity of an examined file.
pub fn id_of(stat: &Stat) -> FileId {
    (stat.st_dev, stat.st_ino)
}

/// One thing to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its path here.
    pub source: PathBuf,
    /// Its path at the receiver.
    pub path: RelPath,
    /// Its kind.
    pub kind: Kind,
    /// Which file it is.
    pub id: FileId,
    /// Whether it is a file with other names, of which one may be sent already.
    pub has_names: bool,
    /// The argument that it is, or is below: an index into [`Plan::roots`].
    pub root: usize,
}

/// An argument.
#[derive(Debug)]
pub struct Root {
    /// As it was given.
    pub path: PathBuf,
    /// Its identity, or that of the link's target.
    pub id: FileId,
}

/// The kind of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A regular file, and its version when it was found.
    File(Version),
    /// A directory whose content follows.
    Enter,
    /// The end of a directory's content.
    Leave(Meta),
    /// A symbolic link and its target.
    Link(Meta, Vec<u8>),
}

/// Everything to send.
#[derive(Debug, Default)]
pub struct Plan {
    /// In the order to send.
    pub entries: Vec<Entry>,
    /// The arguments that there is something to send of.
    pub roots: Vec<Root>,
    /// Sum of the files' lengths in bytes.
    pub bytes: u64,
    /// Number of files and links.
    pub files: u64,
    /// The entries that are left out, and the reasons: errors and kinds of files that are not copied.
    pub skipped: Vec<Skipped>,
    /// Directories of which not all attributes could be read.
    pub partial: u64,
}

/// Something that is not sent.
#[derive(Debug)]
pub struct Skipped {
    /// What.
    pub source: PathBuf,
    /// Why.
    pub why: String,
    /// Whether it makes the command fail.
    pub error: bool,
}

/// A file's modification time.
pub fn mtime(stat: &Stat) -> Mtime {
    Mtime {
        secs: stat.st_mtime,
        nanos: u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
    }
}

/// A file's permission bits and time.
pub fn meta_of(stat: &Stat) -> Meta {
    Meta {
        mode: stat.st_mode & 0o7777,
        mtime: mtime(stat),
        attributes: None,
    }
}

fn is_dir(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// Opens a directory and looks at it.
fn open_dir(at: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<(OwnedFd, Stat)> {
    let flags = flags | OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = fs::openat(at, path, flags, Mode::empty())?;
    let stat = fs::fstat(&dir)?;
    Ok((dir, stat))
}

/// The names in a directory, sorted.
fn names(dir: &OwnedFd) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name));
        }
    }
    names.sort();
    Ok(names)
}

/// Something that was found in a directory, or an argument.
struct Found<'a> {
    dir: BorrowedFd<'a>,
    /// Below `dir`.
    name: &'a Path,
    source: &'a Path,
    stat: Stat,
    /// A symbolic link in the place of a directory is followed.
    follow: bool,
}

impl Plan {
    /// Looks at `sources` and plans to send them below `dir`.
    pub fn new(sources: &[PathBuf], dir: Option<&RelPath>, what: What) -> Result<Self, Failure> {
        let mut plan = Self::default();
        let mut taken = HashSet::new();
        let base = dir.map_or(&[][..], RelPath::as_bytes);
        for source in sources {
            // A link that the user names is followed, as cp does.
            let stat = match fs::stat(source) {
                Ok(stat) => stat,
                Err(e) => {
                    if source == Path::new("-") && e == rustix::io::Errno::NOENT {
                        plan.skipped.push(Skipped {
                            source: source.clone(),
                            why: "standard input cannot be sent; write it to a file first"
                                .to_owned(),
                            error: true,
                        });
                    } else {
                        plan.error(source, &e.into());
                    }
                    continue;
                }
            };
            if is_dir(&stat) && !what.recursive {
                let why = "is a directory; use --recursive".to_owned();
                plan.skipped.push(Skipped {
                    source: source.clone(),
                    why,
                    error: true,
                });
                continue;
            }
            plan.roots.push(Root {
                path: source.clone(),
                id: id_of(&stat),
            });
            let found = Found {
                dir: fs::CWD,
                name: source,
                source,
                stat,
                follow: true,
            };
            match source.file_name() {
                Some(name) => {
                    if !taken.insert(name.to_owned()) {
                        return Err(Failure::usage(format!(
                            "two sources would both become `{}`",
                            name.display()
                        ))
                        .hint("send them to different directories, one command each"));
                    }
                    plan.add(&found, base, name, what);
                }
                // `.`, `..`, `/`: the content without a directory of its own.
                None => drop(plan.content(&found, base, what)),
            }
        }
        Ok(plan)
    }

    /// Looks at `paths` below `dir`, which follow no symbolic link, and plans to send them.
    pub fn beneath(dir: &Path, paths: &[Option<RelPath>], what: What) -> io::Result<Self> {
        let (root, stat) = open_dir(fs::CWD, dir, OFlags::empty())?;
        let mut plan = Self::default();
        plan.roots.push(Root {
            path: dir.into(),
            id: id_of(&stat),
        });
        let mut taken = HashSet::new();
        for path in paths {
            let (parent, name) = path.as_ref().map_or((&[][..], &b"."[..]), RelPath::split);
            let source = match path {
                Some(path) => dir.join(OsStr::from_bytes(path.as_bytes())),
                None => dir.into(),
            };
            let name = Path::new(OsStr::from_bytes(name));
            let parent = if parent.is_empty() {
                root.try_clone()
            } else {
                let parent = Path::new(OsStr::from_bytes(parent));
                open_beneath(&root, parent, OFlags::PATH | OFlags::DIRECTORY)
            };
            let found = parent.and_then(|parent| {
                let stat = fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
                Ok((parent, stat))
            });
            let (parent, stat) = match found {
                Ok(found) => found,
                Err(e) => {
                    plan.error(&source, &e);
                    continue;
                }
            };
            let why = if is_dir(&stat) && !what.recursive {
                "is a directory; use --recursive"
            } else if path.is_some() && !taken.insert(name.to_owned()) {
                "another one of its name is fetched"
            } else {
                let found = Found {
                    dir: parent.as_fd(),
                    name,
                    source: &source,
                    stat,
                    follow: false,
                };
                match path {
                    Some(_) => plan.add(&found, b"", name.as_os_str(), what),
                    None => drop(plan.content(&found, b"", what)),
                }
                continue;
            };
            plan.skipped.push(Skipped {
                source,
                why: why.into(),
                error: true,
            });
        }
        Ok(plan)
    }

    /// Number of entries that are of no kind that is copied.
    pub fn left_out(&self) -> u64 {
        self.skipped.iter().filter(|skipped| !skipped.error).count() as u64
    }

    fn error(&mut self, source: &Path, e: &io::Error) {
        self.skipped.push(Skipped {
            source: source.into(),
            why: e.to_string(),
            error: true,
        });
    }

    fn note(&mut self, source: &Path, why: &str) {
        self.skipped.push(Skipped {
            source: source.into(),
            why: why.into(),
            error: false,
        });
    }

    fn add(&mut self, found: &Found<'_>, parent: &[u8], name: &OsStr, what: What) {
        let Found { source, stat, .. } = *found;
        let joined = [
            parent,
            if parent.is_empty() { b"" } else { b"/" },
            name.as_bytes(),
        ]
        .concat();
        let path = match RelPath::new(&joined) {
            Ok(path) => path,
            Err(e) => {
                let why = format!("its path cannot be sent: {e}");
                self.skipped.push(Skipped {
                    source: source.into(),
                    why,
                    error: true,
                });
                return;
            }
        };
        let root = self.roots.len() - 1;
        let entry = |kind| Entry {
            source: source.into(),
            path: path.clone(),
            kind,
            id: id_of(&stat),
            has_names: what.attributes && !is_dir(&stat) && stat.st_nlink > 1,
            root,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let len = u64::try_from(stat.st_size).unwrap_or(0);
                self.bytes = self.bytes.saturating_add(len);
                self.files += 1;
                let version = Version {
                    size: len,
                    mtime: mtime(&stat),
                };
                self.entries.push(entry(Kind::File(version)));
            }
            FileType::Directory => {
                self.entries.push(entry(Kind::Enter));
                let mut meta = meta_of(&stat);
                if let Some(dir) = self.content(found, path.as_bytes(), what)
                    && what.attributes
                {
                    let (attributes, whole) = attributes::of(&dir, &stat);
                    meta.attributes = Some(attributes);
                    self.partial += u64::from(!whole);
                }
                self.entries.push(entry(Kind::Leave(meta)));
            }
            FileType::Symlink if what.links => {
                let mut meta = meta_of(&stat);
                meta.attributes = what.attributes.then_some(Attributes {
                    uid: stat.st_uid,
                    gid: stat.st_gid,
                    xattrs: Vec::new(),
                });
                match fs::readlinkat(found.dir, found.name, Vec::new()) {
                    Ok(target) => {
                        self.files += 1;
                        self.entries
                            .push(entry(Kind::Link(meta, target.into_bytes())));
                    }
                    Err(e) => self.error(source, &e.into()),
                }
            }
            FileType::Symlink => {
                let why = "a symbolic link, left out; --links copies it as a link";
                self.note(source, why);
            }
            _ => self.note(source, "neither a file nor a directory, left out"),
        }
    }

    /// Adds the contents of a directory, and returns it.
    fn content(&mut self, found: &Found<'_>, at: &[u8], what: What) -> Option<OwnedFd> {
        let source = found.source;
        let flags = if found.follow {
            OFlags::empty()
        } else {
            OFlags::NOFOLLOW
        };
        let listed = open_dir(found.dir, found.name, flags).and_then(|(dir, stat)| {
            if id_of(&stat) != id_of(&found.stat) {
                return Err(io::Error::other("another directory has taken its place"));
            }
            let names = names(&dir)?;
            Ok((dir, names))
        });
        let (dir, names) = match listed {
            Ok(listed) => listed,
            Err(e) => {
                self.error(source, &e);
                return None;
            }
        };
        for name in names {
            let source = source.join(&name);
            match fs::statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => {
                    let found = Found {
                        dir: dir.as_fd(),
                        name: Path::new(&name),
                        source: &source,
                        stat,
                        follow: false,
                    };
                    self.add(&found, at, &name, what);
                }
                Err(e) => self.error(&source, &e.into()),
            }
        }
        Some(dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_tree_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir_all(root.join("empty")).unwrap();
        std::fs::write(root.join("b"), "bb").unwrap();
        std::fs::write(root.join("a"), "a").unwrap();
        symlink("a", root.join("link")).unwrap();
        let to = RelPath::new(b"x/y").unwrap();
        let show = |plan: &Plan| {
            plan.entries
                .iter()
                .map(|e| {
                    let sign = match &e.kind {
                        Kind::File(version) => version.size.to_string(),
                        Kind::Enter => "<".into(),
                        Kind::Leave(_) => ">".into(),
                        Kind::Link(_, to) => format!("->{}", String::from_utf8_lossy(to)),
                    };
                    format!("{sign} {}", e.path)
                })
                .collect::<Vec<_>>()
        };
        let files = What {
            recursive: true,
            ..What::default()
        };
        let all = What {
            links: true,
            ..files
        };
        let plan = Plan::new(std::slice::from_ref(&root), Some(&to), all).unwrap();
        let expected = [
            "< x/y/root",
            "1 x/y/root/a",
            "2 x/y/root/b",
            "< x/y/root/empty",
            "> x/y/root/empty",
            "->a x/y/root/link",
            "> x/y/root",
        ];
        assert_eq!(show(&plan), expected);
        assert_eq!((plan.files, plan.bytes), (3, 3));

        let dot = Plan::new(&[root.join(".")], None, files).unwrap();
        assert_eq!(show(&dot)[0], "< root", "`dir/.` has the name dir");
        let here = Plan::new(&[root.join("empty/..")], None, files).unwrap();
        assert_eq!(show(&here), ["1 a", "2 b", "< empty", "> empty"]);
        assert!(!here.skipped[0].error, "the link is left out with a note");

        let flat = Plan::new(&[root.clone(), root.join("a")], None, What::default()).unwrap();
        assert_eq!(show(&flat), ["1 a"]);
        assert!(flat.skipped[0].error);
        let twice = [root.join("a"), root.join("./a")];
        assert!(Plan::new(&twice, None, What::default()).is_err());
    }
}
