//! The files that a source of clang is compiled from: found by clang here, packed for a worker.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::ipc::TreeAsk;
use crate::lock;
use crate::options::{self, Language, Plan};
use crate::tree::{self, Entry, MAX_DIRECTORIES, MAX_ENTRIES};
use crate::wire::Searched;

/// Bytes of one file.
const MAX_FILE: u64 = 256 << 20;
/// Lists of options whose directories are kept, and how long: another installed compiler can change them.
const MAX_KEPT: usize = 256;
const KEPT_FOR: Duration = Duration::from_secs(30);

type Key = (PathBuf, Language, Vec<String>, String);

/// The directories that clang searches by itself.
#[derive(Default)]
pub(super) struct Searches(Mutex<HashMap<Key, (Instant, Vec<Searched>)>>);

impl Searches {
    /// Of a driver with these options.
    pub(super) fn of(
        &self,
        driver: &Path,
        language: Language,
        options: &[String],
        path: &str,
    ) -> Result<Vec<Searched>, String> {
        let key = (
            driver.to_owned(),
            language,
            options.to_vec(),
            path.to_owned(),
        );
        if let Some((found, known)) = lock(&self.0).get(&key)
            && found.elapsed() < KEPT_FOR
        {
            return Ok(known.clone());
        }
        let now = Instant::now();
        let first = crate::digest::first_step(driver, language, options, path)?;
        let mut all = Vec::new();
        let mut args = first.iter();
        while let Some(arg) = args.next() {
            let c = match arg.as_str() {
                "-internal-isystem" => false,
                "-internal-externc-isystem" => true,
                _ => continue,
            };
            let dir = args.next().cloned().unwrap_or_default();
            all.push(Searched { c, dir });
        }
        let mut kept = lock(&self.0);
        if kept.len() >= MAX_KEPT {
            kept.clear();
        }
        kept.insert(key, (now, all.clone()));
        Ok(all)
    }
}

/// The preprocessor's options of a command, for a worker that has the files.
pub(super) fn ask(plan: &Plan) -> Result<TreeAsk, String> {
    let source = plan.source.as_os_str();
    let mut left = Vec::new();
    let mut args = plan.preprocess.iter();
    while let Some(arg) = args.next() {
        let text = arg.to_str();
        if arg == source || text.is_some_and(|text| plan.job.iter().any(|job| job == text)) {
            continue;
        }
        match text.ok_or("an option that is not UTF-8")? {
            "-M" | "-MP" => {}
            "-x" | "-MQ" => drop(args.next()),
            // Its value may be the same text as the source or an option.
            text => {
                left.push(text);
                if tree::takes_value(text) {
                    let value = args.next().and_then(|value| value.to_str());
                    left.push(value.ok_or("an option without a value")?);
                }
            }
        }
    }
    let (cpp, search) = tree::split(left.into_iter())?;
    let mut paths = cpp.windows(2).filter(|pair| tree::takes_path(&pair[0]));
    let is_whole = plan.source.is_absolute() || paths.any(|pair| pair[1].starts_with('/'));
    if is_whole && plan.job.iter().any(|arg| arg.starts_with("-flto")) {
        return Err("-flto with a whole path, which the object may have in it".into());
    }
    Ok(TreeAsk { cpp, search })
}

/// The files of a tree as they are packed.
struct Packer<'a> {
    /// The source is C++, and a file that is not the system's has its whole path as its name.
    named: bool,
    searched: &'a [Searched],
    out: BufWriter<&'a File>,
    len: u64,
    entries: usize,
    /// All that a worker makes.
    directories: HashSet<PathBuf>,
    /// What is at a path: device and inode.
    at: HashMap<PathBuf, (u64, u64)>,
    /// The number of a file.
    numbers: HashMap<(u64, u64), u32>,
}

impl Packer<'_> {
    fn put(&mut self, entry: &Entry) -> Result<(), String> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err("it reads too many files".into());
        }
        let (Entry::File { path, .. } | Entry::Link { path, .. } | Entry::Directory { path }) =
            entry;
        let below = usize::from(!matches!(entry, Entry::Directory { .. }));
        for dir in Path::new(path).ancestors().skip(below) {
            // Those above it are there too.
            if dir == Path::new("/") || !self.directories.insert(dir.into()) {
                break;
            }
        }
        if self.directories.len() > MAX_DIRECTORIES {
            return Err("its files are in too many directories".into());
        }
        let bytes = entry.encode();
        self.len += bytes.len() as u64;
        self.out.write_all(&bytes).map_err(|e| e.to_string())
    }

    /// The file that clang named so, at this path.
    fn file(&mut self, named: &Path, at: PathBuf) -> Result<(), String> {
        let told = |e: io::Error| format!("{}: {e}", named.display());
        let mut file = File::open(named).map_err(told)?;
        let about = file.metadata().map_err(told)?;
        let inode = (about.dev(), about.ino());
        match self.at.get(&at) {
            Some(there) if *there == inode => return Ok(()),
            Some(_) => {
                return Err(format!(
                    "two files would be at {}, because of a symbolic link",
                    at.display()
                ));
            }
            None => {}
        }
        let path = at.to_str().filter(|path| tree::is_clean(path));
        let path = path
            .ok_or_else(|| format!("a name that workers do not take: {}", at.display()))?
            .to_owned();
        self.at.insert(at, inode);
        if let Some(&to) = self.numbers.get(&inode) {
            return self.put(&Entry::Link { path, to });
        }
        if !about.is_file() || about.len() > MAX_FILE {
            return Err(format!("{} is no file, or too long", named.display()));
        }
        let mut bytes = Vec::with_capacity(about.len() as usize + 1);
        let most = MAX_FILE + 1;
        (&mut file)
            .take(most)
            .read_to_end(&mut bytes)
            .map_err(told)?;
        if let Some(why) = options::stays_in_code(&bytes) {
            return Err(format!("{why} ({})", named.display()));
        }
        if self.named && !is_searched(&path, self.searched) && options::names_functions(&bytes) {
            // clang maps no prefix there, and the object may have no more than the length of the text.
            return Err(format!(
                "__PRETTY_FUNCTION__ with whole paths of files ({})",
                named.display()
            ));
        }
        let len = bytes.len() as u64;
        self.put(&Entry::File { path, len })?;
        self.numbers.insert(inode, self.numbers.len() as u32);
        self.len += len;
        self.out.write_all(&bytes).map_err(|e| e.to_string())
    }
}

/// Whether a path is below a directory that clang searches by itself.
fn is_searched(path: &str, searched: &[Searched]) -> bool {
    let below = |searched: &Searched| {
        let dir = tree::walk(Path::new(&searched.dir), &mut |_| ());
        Path::new(path).starts_with(dir)
    };
    searched.iter().any(below)
}

/// Packs files that clang has named in the directory `dir`, which it calls `cwd`, and the directories that these options name; the length.
pub(super) fn pack(
    to: &File,
    (dir, cwd): (&Path, &Path),
    names: &[String],
    options: &TreeAsk,
    searched: &[Searched],
    cxx: bool,
) -> Result<u64, String> {
    let whole = |name: &String| {
        let at = tree::walk(&cwd.join(name), &mut |_| ());
        name.starts_with('/') && !is_searched(&at.to_string_lossy(), searched)
    };
    let mut packer = Packer {
        named: cxx && names.iter().any(whole),
        searched,
        out: BufWriter::with_capacity(256 << 10, to),
        len: 0,
        entries: 0,
        directories: HashSet::new(),
        at: HashMap::new(),
        numbers: HashMap::new(),
    };
    let mut passed = BTreeSet::from([cwd.to_owned()]);
    let mut through = |dir: &Path| {
        passed.insert(dir.to_owned());
    };
    for name in names {
        let at = tree::walk(&cwd.join(name), &mut through);
        packer.file(&dir.join(name), at)?;
    }
    let given = options.cpp.windows(2);
    let given = given.filter(|pair| tree::takes_path(&pair[0]) && pair[0] != "-include");
    let given = given.map(|pair| &pair[1]);
    for name in given.chain(searched.iter().map(|searched| &searched.dir)) {
        if dir.join(name).is_dir() {
            let at = tree::walk(&cwd.join(name), &mut through);
            through(&at);
        }
    }
    for at in passed {
        if packer.at.contains_key(&at) {
            return Err(format!(
                "{} would be a file and a directory, because of a symbolic link",
                at.display()
            ));
        }
        let path = at.to_str().filter(|path| tree::is_clean(path));
        let path = path.ok_or("a directory with a name that workers do not take")?;
        packer.put(&Entry::Directory { path: path.into() })?;
    }
    packer.out.flush().map_err(|e| e.to_string())?;
    Ok(packer.len)
}

/// The directories whose headers are the system's, which `-MMD` leaves out.
pub(super) fn system(options: &TreeAsk, searched: &[Searched]) -> Vec<String> {
    let given = options.cpp.windows(2);
    let given = given.filter(|pair| ["-isystem", "-idirafter"].contains(&pair[0].as_str()));
    let given = given.map(|pair| &pair[1]);
    let all = given.chain(searched.iter().map(|searched| &searched.dir));
    // As clang names the files below.
    all.map(|dir| dir.trim_start_matches("./").trim_end_matches('/').into())
        .collect()
}

/// Whether a worker's compiler has read the files that the one here has, in the same order; those below the directories `missing` may be missing.
pub(super) fn agree(here: &[String], there: &[&str], missing: &[String]) -> bool {
    let may_miss = |name: &str| {
        let below = |dir: &String| name.strip_prefix(dir.as_str());
        missing
            .iter()
            .any(|dir| below(dir).is_some_and(|rest| rest.starts_with('/')))
    };
    let mut left = there.iter().peekable();
    here.first().map(String::as_str) == there.first().copied()
        && here
            .iter()
            .all(|name| left.next_if(|other| **other == name).is_some() || may_miss(name))
        && left.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_list_of_files_is_found() {
        let here = ["a.c", "b.h", "/sys/s.h", "c.h"].map(String::from);
        let options = TreeAsk {
            cpp: ["-isystem", "./sys/", "-I", "inc"].map(String::from).into(),
            search: Vec::new(),
        };
        let searched = [Searched {
            c: true,
            dir: "/sys".into(),
        }];
        let dirs = system(&options, &searched);
        assert_eq!(dirs, ["sys", "/sys"]);
        assert!(agree(&here, &["a.c", "b.h", "/sys/s.h", "c.h"], &[]));
        assert!(!agree(&here, &["a.c", "b.h", "c.h"], &[]));
        assert!(agree(&here, &["a.c", "b.h", "c.h"], &dirs));
        for bad in [
            &["a.c", "c.h", "b.h"][..],
            &["b.h"],
            &["a.c", "x.h"],
            &[],
            &["a.c", "b.h", "b.h"],
            // None of the system's.
            &["a.c", "/sys/s.h", "c.h"],
            &["a.c", "b.h"],
        ] {
            assert!(!agree(&here, bad, &dirs), "{bad:?}");
        }
    }

    #[test]
    fn directories_are_counted_as_a_worker_makes_them() {
        let file = tempfile::tempfile().unwrap();
        let mut packer = Packer {
            named: false,
            searched: &[],
            out: BufWriter::new(&file),
            len: 0,
            entries: 0,
            directories: HashSet::new(),
            at: HashMap::new(),
            numbers: HashMap::new(),
        };
        let mut put = |path: String| packer.put(&Entry::Link { path, to: 0 });
        // Each in three of its own, and in `/d`.
        let most = (MAX_DIRECTORIES - 1) / 3;
        for n in 0..most {
            put(format!("/d/{n}/x/y/a")).unwrap();
            put(format!("/d/{n}/x/y/b")).unwrap();
        }
        assert!(put("/e/x/y/z".into()).unwrap_err().contains("directories"));
    }

    #[test]
    fn files_that_would_be_one_another_stay_here() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let write = |name: &str, text: &str| std::fs::write(root.join(name), text).unwrap();
        std::fs::create_dir_all(root.join("far/deep")).unwrap();
        std::os::unix::fs::symlink("far/deep", root.join("near")).unwrap();
        write("x.h", "int near;\n");
        write("far/x.h", "int far;\n");
        write("t.h", "char *t = __TIME__;\n");
        std::fs::hard_link(root.join("x.h"), root.join("y.h")).unwrap();
        let options = TreeAsk {
            cpp: Vec::new(),
            search: Vec::new(),
        };
        let of = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            let file = tempfile::tempfile().unwrap();
            pack(&file, (&root, &root), &names, &options, &[], false)
        };
        assert!(of(&["x.h", "far/x.h", "y.h", "x.h"]).is_ok());
        // The kernel goes to far/x.h, the text to x.h.
        assert!(of(&["near/../x.h"]).is_ok());
        let why = of(&["x.h", "near/../x.h"]).unwrap_err();
        assert!(why.contains("symbolic link"), "{why}");
        assert!(of(&["t.h"]).unwrap_err().contains("__TIME__"));
        assert!(of(&["none.h"]).is_err() && of(&["far"]).is_err());
    }
}
