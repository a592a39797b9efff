//! Sources of clang and their headers, as one region: a worker has the files themselves, under the names that they have here, below a directory of
//! its own. clang puts digests of the files into debug information, and quotes their lines: no preprocessed text has both.
//!
//! An entry is a kind (1 byte), the length of a path (2, big-endian), and the path, which is absolute and has no `.` and `..`. After that of a file
//! come the length of the contents (8) and the contents; after that of a link the number of the file (4), counted from 0, that it is another name of;
//! after that of a directory nothing.

use std::path::{Component, Path, PathBuf};

use crate::options::is_argument;
use crate::wire::Tree;

/// Entries of a tree, directories that they may make, and bytes and components of a path.
pub(crate) const MAX_ENTRIES: usize = 20_000;
pub(crate) const MAX_DIRECTORIES: usize = 20_000;
const MAX_PATH: usize = 4096;
const MAX_COMPONENTS: usize = 128;

/// Options with a path, and those with another value.
const PATHS: &[&str] = &["-I", "-iquote", "-isystem", "-idirafter", "-include"];
const VALUES: &[&str] = &["-D", "-U"];

/// One entry without its contents.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    File { path: String, len: u64 },
    Link { path: String, to: u32 },
    Directory { path: String },
}

/// Whether a path can be that of an entry.
pub(crate) fn is_clean(path: &str) -> bool {
    let Some(rest) = path.strip_prefix('/') else {
        return false;
    };
    let mut count = 0;
    path.len() <= MAX_PATH
        && (rest.is_empty()
            || rest.split('/').all(|part| {
                count += 1;
                !["", ".", ".."].contains(&part) && !part.contains('\0') && count <= MAX_COMPONENTS
            }))
}

impl Entry {
    /// Its bytes, before the contents.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (kind, path) = match self {
            Self::File { path, .. } => (0, path),
            Self::Link { path, .. } => (1, path),
            Self::Directory { path } => (2, path),
        };
        let mut bytes = vec![kind];
        bytes.extend((path.len() as u16).to_be_bytes());
        bytes.extend(path.as_bytes());
        match self {
            Self::File { len, .. } => bytes.extend(len.to_be_bytes()),
            Self::Link { to, .. } => bytes.extend(to.to_be_bytes()),
            Self::Directory { .. } => {}
        }
        bytes
    }

    /// The entry at the beginning, and its length; `None` if it is none. All but the contents has to be there.
    pub(crate) fn decode(bytes: &[u8]) -> Option<(Self, usize)> {
        let (&kind, rest) = bytes.split_first()?;
        let (len, rest) = rest.split_first_chunk::<2>()?;
        let (path, rest) = rest.split_at_checked(u16::from_be_bytes(*len).into())?;
        let path = std::str::from_utf8(path).ok()?.to_owned();
        if !is_clean(&path) {
            return None;
        }
        let (entry, rest) = match kind {
            0 => {
                let (len, rest) = rest.split_first_chunk()?;
                let len = u64::from_be_bytes(*len);
                (Self::File { path, len }, rest)
            }
            1 => {
                let (to, rest) = rest.split_first_chunk()?;
                let to = u32::from_be_bytes(*to);
                (Self::Link { path, to }, rest)
            }
            2 => (Self::Directory { path }, rest),
            _ => return None,
        };
        Some((entry, bytes.len() - rest.len()))
    }
}

/// The bytes of the longest entry, without contents.
pub(crate) const LONGEST: usize = 1 + 2 + MAX_PATH + 8;

/// A path without `.`, and with `..` taken as text; and the directories that the kernel passes through where `..` follows them.
pub(crate) fn walk(path: &Path, through: &mut dyn FnMut(&Path)) -> PathBuf {
    let mut at = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::ParentDir => {
                through(&at);
                at.pop();
            }
            Component::Normal(part) => at.push(part),
            _ => {}
        }
    }
    at
}

/// Whether a path, from this directory on if it is relative, never goes up from the root directory: there the kernel stays, and a worker would leave the
/// job's folder.
pub(crate) fn stays_below(cwd: &str, path: &str) -> bool {
    let mut depth = 0_usize;
    let begin = if path.starts_with('/') { "" } else { cwd };
    let parts = Path::new(begin)
        .components()
        .chain(Path::new(path).components());
    for part in parts {
        match part {
            Component::Normal(_) => depth += 1,
            Component::ParentDir => match depth.checked_sub(1) {
                Some(above) => depth = above,
                None => return false,
            },
            _ => {}
        }
    }
    true
}

/// Whether a worker takes this tree, for a source of this name in this directory.
///
/// # Errors
/// What it does not take.
pub(crate) fn check_job(tree: &Tree, cwd: &str, name: &str) -> Result<(), String> {
    check(&tree.cpp)?;
    let searched = tree.searched.iter().map(|searched| &searched.dir);
    if let Some(dir) = searched.clone().find(|dir| !dir.starts_with('/')) {
        return Err(format!(
            "{dir}: a directory that is not named from the root"
        ));
    }
    let given = tree
        .cpp
        .windows(2)
        .filter(|pair| takes_path(&pair[0]))
        .map(|pair| &pair[1]);
    let mut all = searched.chain(given).map(String::as_str).chain([name]);
    let out = all.find(|path| !stays_below(cwd, path));
    out.map_or(Ok(()), |path| {
        Err(format!("{path}: a path that leads out of the tree"))
    })
}

/// Whether these are options of the preprocessor that a worker takes: each with its value apart, or one without.
///
/// # Errors
/// The one that is not.
pub(crate) fn check(cpp: &[String]) -> Result<(), String> {
    let mut args = cpp.iter();
    while let Some(option) = args.next() {
        if option == "-trigraphs" {
            continue;
        }
        let path = PATHS.contains(&option.as_str());
        let value = args
            .next()
            .filter(|_| path || VALUES.contains(&option.as_str()));
        let good = |value: &&String| {
            // An empty value would take the next argument; `=` stands for a directory; `-I-` splits the list.
            !value.is_empty() && is_argument(value) && !(path && value.starts_with(['=', '$', '-']))
        };
        if !value.as_ref().is_some_and(good) {
            return Err(format!("{option}: not for a worker that has the files"));
        }
    }
    Ok(())
}

/// The options of the preprocessor among these arguments, in the form that [`check`] takes, and those that decide where a compiler searches.
///
/// # Errors
/// The option that a worker does not take.
pub(crate) fn split<'a>(
    args: impl Iterator<Item = &'a str>,
) -> Result<(Vec<String>, Vec<String>), String> {
    let (mut cpp, mut search) = (Vec::new(), Vec::new());
    let mut args = args;
    while let Some(arg) = args.next() {
        if arg == "-trigraphs" {
            cpp.push(arg.into());
            continue;
        }
        if arg.starts_with("-nostd") || arg.starts_with("-nobuiltin") || arg.starts_with("-stdlib=")
        {
            search.push(arg.into());
            continue;
        }
        let unfit = || format!("an option that workers of clang do not take ({arg})");
        let option = PATHS
            .iter()
            .chain(VALUES)
            .filter(|option| arg.starts_with(**option))
            .max_by_key(|option| option.len())
            .ok_or_else(unfit)?;
        let value = match &arg[option.len()..] {
            "" => args.next().ok_or_else(unfit)?,
            joined => joined,
        };
        cpp.extend([(*option).to_owned(), value.to_owned()]);
    }
    check(&cpp)?;
    Ok((cpp, search))
}

/// Whether an option of [`check`]'s form has a path.
pub(crate) fn takes_path(option: &str) -> bool {
    PATHS.contains(&option)
}

/// Whether an option's value is the next argument.
pub(crate) fn takes_value(option: &str) -> bool {
    takes_path(option) || VALUES.contains(&option)
}

/// The names in a rule that `-MD` or `-M` wrote with the target `x`; `None` if there are some with quotes, or it is no such rule.
pub(crate) fn names(rule: &str) -> Option<Vec<String>> {
    let names = rule.strip_prefix("x:")?.replace("\\\n", " ");
    let names = names.lines().next()?;
    // A blank, a dollar or a number sign in a name.
    let plain = !names.contains(['\\', '$', '#', '\t']);
    plain.then(|| names.split_whitespace().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        for entry in [
            Entry::File {
                path: "/a/b.h".into(),
                len: 7,
            },
            Entry::Link {
                path: "/usr/include/c".into(),
                to: 3,
            },
            Entry::Directory { path: "/".into() },
        ] {
            let bytes = entry.encode();
            for n in 0..bytes.len() {
                assert_eq!(Entry::decode(&bytes[..n]), None);
            }
            let len = bytes.len();
            assert!(len <= LONGEST);
            assert_eq!(
                Entry::decode(&[&bytes[..], b"more"].concat()),
                Some((entry, len))
            );
        }
    }

    #[test]
    fn no_path_leads_out() {
        let long = format!("/{}", "x/".repeat(3000));
        let deep = "/x".repeat(MAX_COMPONENTS + 1);
        for bad in [
            "", "a", "/../a", "/a/..", "/a/./b", "//a", "/a/", "/a\0", &long, &deep,
        ] {
            assert!(!is_clean(bad), "{bad}");
            let entry = Entry::Directory { path: bad.into() };
            assert_eq!(Entry::decode(&entry.encode()), None, "{bad}");
        }
        assert_eq!(Entry::decode(b"\x03\0\x02/a"), None);
        assert_eq!(Entry::decode(b"\x02\0\x03/a\xff"), None);
    }

    #[test]
    fn a_way_up_is_passed_through() {
        let mut passed = Vec::new();
        let at = walk(Path::new("/usr/bin/../lib/./x/../../y.h"), &mut |dir| {
            passed.push(dir.to_str().unwrap().to_owned());
        });
        assert_eq!(at, Path::new("/usr/y.h"));
        assert_eq!(passed, ["/usr/bin", "/usr/lib/x", "/usr/lib"]);
        assert_eq!(walk(Path::new("/../../a"), &mut |_| ()), Path::new("/a"));
    }

    #[test]
    fn ways_above_the_root_are_found() {
        for (cwd, path) in [
            ("/", "/a/../b"),
            ("/w/x", "../../a"),
            ("/w", "a/../../b/../c"),
            ("/w", "/usr/lib/gcc/../../include"),
        ] {
            assert!(stays_below(cwd, path), "{cwd} {path}");
        }
        for (cwd, path) in [
            ("/", ".."),
            ("/w", "../.."),
            ("/w", "/.."),
            ("/w", "/a/../../w"),
            ("/w/x", "a/../../../../w/x"),
        ] {
            assert!(!stays_below(cwd, path), "{cwd} {path}");
        }
    }

    #[test]
    fn options_come_in_one_form() {
        let of = |line: &str| split(line.split(' ')).map(|(cpp, _)| cpp.join(" "));
        let good = "-DA=1 -U B -Iinc -isystem /sys -iquoteq -include x.h -nostdinc++ -trigraphs";
        let form = "-D A=1 -U B -I inc -isystem /sys -iquote q -include x.h -trigraphs";
        assert_eq!(of(good).unwrap(), form);
        for bad in [
            "-imacros x",
            "-I=/x",
            "-I-",
            "-include-pch x",
            "-isysroot /x",
            "-D",
            "-I @x",
            "-fplugin=x",
        ] {
            of(bad).expect_err(bad);
        }
        check(&["-o".into(), "x".into()]).unwrap_err();
        check(&["-I".into()]).unwrap_err();
    }

    #[test]
    fn rules_are_read() {
        assert_eq!(
            names("x: a.c \\\n  b.h /c.h\nb.h:\n").unwrap(),
            ["a.c", "b.h", "/c.h"]
        );
        for bad in ["y: a", "x: a\\ b.c\n", "x: $$.c\n", ""] {
            assert_eq!(names(bad), None, "{bad}");
        }
    }
}
