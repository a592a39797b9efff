//! Jobs of clang: the master's files stand below a folder of the job, under their own names. What the compiler says of this folder is taken out.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use memchr::memmem;

use super::{JobDir, Limits, Unfit, limited, read_output, read_whole};
use crate::options::{Language, is_source_name, mapped};
use crate::tree::{self, Entry, LONGEST, MAX_DIRECTORIES, MAX_ENTRIES};
use crate::wire::{self, Job, MAX_DIAGNOSTICS};
use crate::worker::remove::Scratch;

/// The folder that stands for the master's root directory.
const ROOT: &str = "r";

/// Where the bytes of a tree come from.
pub(crate) trait Source {
    /// The bytes at this offset, at most so many as there is room for; the number.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<usize>;
    /// Copies into a file.
    fn copy(&self, at: u64, len: u64, to: &File) -> io::Result<()>;
}

/// The directories and files of a tree, as they are made.
struct Tree<'a> {
    root: &'a Path,
    /// Directories that may still be made.
    left: usize,
    files: Vec<PathBuf>,
}

fn bad(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

impl Tree<'_> {
    /// Makes the directories of a clean path.
    fn folder(&mut self, path: &str) -> io::Result<PathBuf> {
        let mut at = self.root.to_owned();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            at.push(part);
            match std::fs::create_dir(&at) {
                Ok(()) => {
                    let left = self.left.checked_sub(1);
                    self.left = left.ok_or_else(|| bad("too many directories"))?;
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
        }
        Ok(at)
    }

    /// The path of a new file.
    fn new_file(&mut self, path: &str) -> io::Result<PathBuf> {
        let (dir, name) = path.rsplit_once('/').unwrap_or_default();
        let file = self.folder(dir)?.join(name);
        (!name.is_empty())
            .then_some(file)
            .ok_or_else(|| bad("a file without a name"))
    }

    /// Writes the entries. No entry is a symbolic link, so no path leads out.
    fn unpack(&mut self, source: &dyn Source, len: u64) -> io::Result<()> {
        let mut at = 0;
        let mut head = [0; LONGEST];
        for _ in 0..MAX_ENTRIES {
            if at == len {
                return Ok(());
            }
            let n = source.read(at, &mut head)?;
            let n = n.min(usize::try_from(len - at).unwrap_or(usize::MAX));
            let (entry, size) =
                Entry::decode(&head[..n]).ok_or_else(|| bad("a file that cannot be"))?;
            at += size as u64;
            match entry {
                Entry::Directory { path } => {
                    if !self.folder(&path)?.is_dir() {
                        return Err(bad("a directory where a file is"));
                    }
                }
                Entry::Link { path, to } => {
                    let path = self.new_file(&path)?;
                    let of = usize::try_from(to).ok().and_then(|to| self.files.get(to));
                    std::fs::hard_link(of.ok_or_else(|| bad("a link to nothing"))?, path)?;
                }
                Entry::File {
                    path,
                    len: contents,
                } => {
                    if contents > len - at {
                        return Err(bad("contents beyond their region"));
                    }
                    let path = self.new_file(&path)?;
                    source.copy(at, contents, &File::create_new(&path)?)?;
                    at += contents;
                    self.files.push(path);
                }
            }
        }
        if at == len {
            return Ok(());
        }
        Err(bad("too many files"))
    }
}

/// Writes the entries of a tree below `root`, which is made, and its working directory. They make at most so many directories.
fn unpack(
    root: &Path,
    cwd: &str,
    source: &dyn Source,
    len: u64,
    left: usize,
) -> io::Result<PathBuf> {
    std::fs::create_dir(root)?;
    let mut tree = Tree {
        root,
        left,
        files: Vec::new(),
    };
    let cwd = tree.folder(cwd)?;
    tree.unpack(source, len)?;
    Ok(cwd)
}

impl JobDir {
    /// A folder with the files of a tree, of `len` bytes.
    pub(crate) fn of_tree(
        place: &Path,
        job: &Job,
        source: &dyn Source,
        len: u64,
    ) -> Result<Self, Unfit> {
        if !tree::is_clean(&job.cwd) || !is_source_name(&job.name) {
            return Err(Unfit::Name);
        }
        let dir = Scratch::new("weft-cc-", place)?;
        let root = dir.path().join(ROOT);
        let cwd = unpack(&root, &job.cwd, source, len, MAX_DIRECTORIES)?;
        let absolute = job.name.starts_with('/');
        let source = if absolute {
            root.join(&job.name[1..])
        } else {
            cwd.join(&job.name)
        };
        let name = if absolute {
            source.clone()
        } else {
            job.name.clone().into()
        };
        Ok(Self {
            dir,
            cwd,
            source,
            name,
            absolute,
        })
    }

    /// The folder, as compilers name it.
    fn root(&self) -> String {
        self.dir.path().join(ROOT).to_string_lossy().into_owned()
    }

    /// A path of the master, as the compiler here is given it.
    fn below(&self, path: &str) -> String {
        if path.starts_with('/') {
            format!("{}{path}", self.root())
        } else {
            path.into()
        }
    }

    /// The compiler that reads the tree.
    pub(crate) fn clang(
        &self,
        driver: &[OsString],
        job: &Job,
        tree: &wire::Tree,
        limits: &Limits,
    ) -> Result<Command, Unfit> {
        let mut command = limited(driver, limits);
        // The first map: of those that fit, the compilers take the last one, or the longest.
        command.arg(format!("-ffile-prefix-map={}=", self.root()));
        for arg in &job.args {
            match mapped(arg) {
                Some((map, prefix)) => command.arg(format!("{map}{}", self.below(prefix))),
                None => command.arg(arg),
            };
        }
        // None of this machine's headers.
        command.arg("-nostdinc");
        for searched in &tree.searched {
            let kind = if searched.c {
                "-internal-externc-isystem"
            } else {
                "-internal-isystem"
            };
            let dir = self.below(&searched.dir);
            command.args(["-Xclang", kind, "-Xclang", &dir]);
        }
        let mut cpp = tree.cpp.iter();
        while let Some(option) = cpp.next() {
            if !tree::takes_value(option) {
                command.arg(option);
                continue;
            }
            let value = cpp.next().ok_or(Unfit::Name)?;
            if tree::takes_path(option) {
                command.arg(option).arg(self.below(value));
            } else {
                command.arg(format!("{option}{value}"));
            }
        }
        let language = if job.cxx { Language::Cxx } else { Language::C };
        command
            .args([if tree.system { "-MD" } else { "-MMD" }, "-MQ", "x", "-MF"])
            .arg(self.dependencies())
            .args(["-x", language.name(), "-o"])
            .arg(self.output())
            .arg(&self.name);
        self.surround(&mut command, job)?;
        command.current_dir(&self.cwd).env("PWD", &self.cwd);
        Ok(command)
    }

    /// The files that the compiler has read, by the master's names; `Err` is why the object is not to be used.
    pub(crate) fn read_files(&self, room: &mut u64) -> io::Result<Result<String, String>> {
        let rule = read_whole(&self.dependencies(), room)?;
        let root = self.root();
        let cwd = self.cwd.to_string_lossy();
        let cwd = cwd.strip_prefix(&root).unwrap_or_default();
        let mut list = String::new();
        for name in std::str::from_utf8(&rule)
            .ok()
            .and_then(tree::names)
            .unwrap_or_default()
        {
            let below = name
                .strip_prefix(&root)
                .filter(|rest| rest.starts_with('/'));
            let theirs = below.or_else(|| (!name.starts_with('/')).then_some(&*name));
            let Some(theirs) = theirs.filter(|theirs| tree::stays_below(cwd, theirs)) else {
                return Ok(Err(format!(
                    "the compiler read {name}, which is of this machine"
                )));
            };
            list.push_str(theirs);
            list.push('\n');
        }
        Ok(Ok(list))
    }

    /// Whether an output has the name of the folder in it, as some sanitizers and macros may.
    pub(crate) fn is_named_in(&self, bytes: &[u8]) -> bool {
        memmem::find(bytes, self.root().as_bytes()).is_some()
    }

    /// The compiler's messages, with the master's names.
    pub(crate) fn messages(&self) -> io::Result<Vec<u8>> {
        let said = read_output(&self.diagnostics(), MAX_DIAGNOSTICS)?;
        let root = self.root();
        let mut out = Vec::with_capacity(said.len());
        let mut rest = &said[..];
        while let Some(at) = memmem::find(rest, root.as_bytes()) {
            out.extend(&rest[..at]);
            rest = &rest[at + root.len()..];
        }
        out.extend(rest);
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bytes(Vec<u8>);

    impl Source for Bytes {
        fn read(&self, at: u64, into: &mut [u8]) -> io::Result<usize> {
            let from = &self.0[at as usize..];
            let n = from.len().min(into.len());
            into[..n].copy_from_slice(&from[..n]);
            Ok(n)
        }

        fn copy(&self, at: u64, len: u64, mut to: &File) -> io::Result<()> {
            io::Write::write_all(&mut to, &self.0[at as usize..][..len as usize])
        }
    }

    fn file(path: &str, contents: &str) -> Vec<u8> {
        let len = contents.len() as u64;
        let path = path.into();
        [&Entry::File { path, len }.encode(), contents.as_bytes()].concat()
    }

    fn link(path: &str, to: u32) -> Vec<u8> {
        let path = path.into();
        Entry::Link { path, to }.encode()
    }

    fn directory(path: &str) -> Vec<u8> {
        let path = path.into();
        Entry::Directory { path }.encode()
    }

    fn tried(parts: &[Vec<u8>]) -> (tempfile::TempDir, io::Result<()>) {
        let dir = tempfile::tempdir().unwrap();
        let bytes = parts.concat();
        let len = bytes.len() as u64;
        let root = dir.path().join("r");
        let done = unpack(&root, "/w", &Bytes(bytes), len, 100);
        (dir, done.map(drop))
    }

    #[test]
    fn files_stand_where_the_master_has_them() {
        let parts = [
            file("/usr/include/a.h", "int a;\n"),
            link("/usr/b.h", 0),
            directory("/usr/bin"),
            file("/c", ""),
        ];
        let (dir, done) = tried(&parts);
        done.unwrap();
        let read = |name: &str| std::fs::read(dir.path().join("r").join(name)).unwrap();
        assert_eq!(read("usr/b.h"), b"int a;\n");
        assert_eq!(
            (read("usr/include/a.h"), read("c")),
            (b"int a;\n".to_vec(), Vec::new())
        );
        assert!(dir.path().join("r/usr/bin").is_dir());
    }

    #[test]
    fn hostile_trees_reach_nothing_outside() {
        let cut = file("/a", "abc");
        let whole = Entry::File {
            path: "/a".into(),
            len: u64::MAX,
        }
        .encode();
        for bad in [
            vec![file("/../x", "x")],
            vec![file("/a/../../x", "x")],
            vec![file("x", "x")],
            vec![directory("/a/..")],
            vec![link("/a", 0)],
            vec![file("/a", "x"), link("/b", 1)],
            vec![file("/a", "x"), file("/a", "y")],
            vec![file("/a", "x"), file("/a/b", "y")],
            vec![file("/a", "x"), directory("/a")],
            vec![cut[..cut.len() - 1].to_vec()],
            vec![whole],
            vec![b"\x07".to_vec()],
            vec![file("/", "x")],
            vec![directory("/a"); MAX_ENTRIES + 1],
            (0..2)
                .map(|n| directory(&format!("/{n}{}", "/x".repeat(60))))
                .collect(),
        ] {
            let (dir, done) = tried(&bad);
            done.unwrap_err();
            let others: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
            assert!(others.len() <= 1, "{others:?}");
        }
    }
}
