//! What a sender sends: the arguments, and with `--recursive` everything below them, in a fixed order.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::protocol::{Mtime, RelPath};
use crate::failure::Failure;

/// One thing to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Where it is here.
    pub source: PathBuf,
    /// Where it goes.
    pub path: RelPath,
    /// What it is.
    pub kind: Kind,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A regular file of this length when it was found.
    File(u64),
    /// A directory whose content follows.
    Enter,
    /// The end of a directory's content.
    Leave {
        /// Its permission bits.
        mode: u32,
        /// Its time.
        mtime: Mtime,
    },
    /// A symbolic link and what it says.
    Link(Vec<u8>),
}

/// Everything to send.
#[derive(Debug, Default)]
pub struct Plan {
    /// In the order to send.
    pub entries: Vec<Entry>,
    /// Sum of the files' lengths in bytes.
    pub bytes: u64,
    /// Number of files.
    pub files: u64,
    /// What is left out, and why: errors and kinds of files that are not copied.
    pub skipped: Vec<Skipped>,
}

/// Something that is not sent.
#[derive(Debug)]
pub struct Skipped {
    /// What.
    pub source: PathBuf,
    /// Why.
    pub why: String,
    /// Whether that makes the command fail.
    pub error: bool,
}

/// A file's modification time.
pub fn mtime(meta: &Metadata) -> Mtime {
    Mtime {
        secs: meta.mtime(),
        nanos: u32::try_from(meta.mtime_nsec()).unwrap_or(0),
    }
}

impl Plan {
    /// Looks at `sources` and plans to send them below `dir`.
    pub fn new(
        sources: &[PathBuf],
        dir: Option<&RelPath>,
        recursive: bool,
        links: bool,
    ) -> Result<Self, Failure> {
        let mut plan = Self::default();
        let mut taken = HashSet::new();
        let base = dir.map_or(&[][..], RelPath::as_bytes);
        for source in sources {
            // A link that the user names is followed, as cp does.
            let meta = match source.metadata() {
                Ok(meta) => meta,
                Err(e) => {
                    plan.error(source, &e);
                    continue;
                }
            };
            if meta.is_dir() && !recursive {
                let why = "is a directory; use --recursive".to_owned();
                plan.skipped.push(Skipped {
                    source: source.clone(),
                    why,
                    error: true,
                });
                continue;
            }
            match source.file_name() {
                Some(name) => {
                    if !taken.insert(name.to_owned()) {
                        return Err(Failure::usage(format!(
                            "two sources would both become `{}`",
                            name.display()
                        ))
                        .hint("send them to different directories, one command each"));
                    }
                    plan.add(source, base, name, &meta, links);
                }
                // `.`, `..`, `/`: the content without a directory of its own.
                None => plan.content(source, base, links),
            }
        }
        Ok(plan)
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

    fn add(&mut self, source: &Path, parent: &[u8], name: &OsStr, meta: &Metadata, links: bool) {
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
        let entry = |kind| Entry {
            source: source.into(),
            path: path.clone(),
            kind,
        };
        let kind = meta.file_type();
        if kind.is_file() {
            self.bytes = self.bytes.saturating_add(meta.len());
            self.files += 1;
            self.entries.push(entry(Kind::File(meta.len())));
        } else if kind.is_dir() {
            self.entries.push(entry(Kind::Enter));
            self.content(source, path.as_bytes(), links);
            self.entries.push(entry(Kind::Leave {
                mode: meta.mode() & 0o777,
                mtime: mtime(meta),
            }));
        } else if kind.is_symlink() {
            if !links {
                self.note(
                    source,
                    "a symbolic link, left out; --links copies it as a link",
                );
                return;
            }
            match source.read_link() {
                Ok(target) => self
                    .entries
                    .push(entry(Kind::Link(target.as_os_str().as_bytes().to_vec()))),
                Err(e) => self.error(source, &e),
            }
        } else {
            self.note(source, "neither a file nor a directory, left out");
        }
    }

    fn content(&mut self, dir: &Path, at: &[u8], links: bool) {
        let mut names = Vec::new();
        match dir.read_dir() {
            Ok(list) => {
                for entry in list {
                    match entry {
                        Ok(entry) => names.push(entry.file_name()),
                        Err(e) => self.error(dir, &e),
                    }
                }
            }
            Err(e) => self.error(dir, &e),
        }
        names.sort();
        for name in names {
            let source = dir.join(&name);
            match source.symlink_metadata() {
                Ok(meta) => self.add(&source, at, &name, &meta, links),
                Err(e) => self.error(&source, &e),
            }
        }
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
                        Kind::File(n) => n.to_string(),
                        Kind::Enter => "<".into(),
                        Kind::Leave { .. } => ">".into(),
                        Kind::Link(to) => format!("->{}", String::from_utf8_lossy(to)),
                    };
                    format!("{sign} {}", e.path)
                })
                .collect::<Vec<_>>()
        };
        let plan = Plan::new(std::slice::from_ref(&root), Some(&to), true, true).unwrap();
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
        assert_eq!((plan.files, plan.bytes), (2, 3));

        let dot = Plan::new(&[root.join(".")], None, true, false).unwrap();
        assert_eq!(show(&dot)[0], "< root", "`dir/.` has the name dir");
        let here = Plan::new(&[root.join("empty/..")], None, true, false).unwrap();
        assert_eq!(show(&here), ["1 a", "2 b", "< empty", "> empty"]);
        assert!(!here.skipped[0].error, "the link is left out with a note");

        let flat = Plan::new(&[root.clone(), root.join("a")], None, false, false).unwrap();
        assert_eq!(show(&flat), ["1 a"]);
        assert!(flat.skipped[0].error);
        assert!(Plan::new(&[root.join("a"), root.join("./a")], None, false, false).is_err());
    }
}
