//! A table of the names that the libraries of rdma-core's releases export (`names.txt`).
//!
//! To add another release: unpack the packages of all releases that the first line names, and of the new one (`apt-get download`, `dpkg -x`), below one folder,
//! add the new one to that line, and run the tests of this crate with `WEFT_BLESS=1 WEFT_RELEASES=FOLDER`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::common::exported;

const TABLE: &str = include_str!("names.txt");
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/releases/names.txt");

/// A name of a library, `NAME@VERSION`, and the first and the last of the releases that have it.
pub(crate) struct Row {
    pub(crate) library: String,
    pub(crate) name: String,
    first: usize,
    last: usize,
}

impl Row {
    /// True if a release has it. A release that the table does not list has no names.
    pub(crate) fn is_in(&self, release: &str) -> bool {
        let at = releases(TABLE).iter().position(|known| known == release);
        at.is_some_and(|at| (self.first..=self.last).contains(&at))
    }
}

/// The releases of a table: `# 44.0 Debian 12, ...`, oldest first.
fn releases(table: &str) -> Vec<String> {
    let first = table.lines().next().unwrap_or_default();
    let each = first.trim_start_matches("# ").split(", ");
    each.map(|one| one.split(' ').next().unwrap_or_default().to_owned())
        .collect()
}

/// The table, one line for each name: `LIBRARY NAME@VERSION FIRST LAST`.
pub(crate) fn table() -> Vec<Row> {
    let releases = releases(TABLE);
    let at = |release: &str| releases.iter().position(|known| known == release).unwrap();
    let lines = TABLE.lines().filter(|line| !line.starts_with('#'));
    let rows = lines.map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let [library, name, first, last] = words[..] else {
            panic!("{line}");
        };
        Row {
            library: library.to_owned(),
            name: name.to_owned(),
            first: at(first),
            last: at(last),
        }
    });
    rows.collect()
}

/// The release of a library, from its file name: `libibverbs.so.1.14.44.0` is of 44.0.
pub(crate) fn of(file: &Path) -> Option<String> {
    let name = file.file_name()?.to_str()?;
    let mut parts = name.rsplitn(3, '.');
    let (minor, major) = (parts.next()?, parts.next()?);
    Some(format!("{major}.{minor}"))
}

fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            files_below(&entry.path(), found);
        } else if entry.file_type().unwrap().is_file() {
            found.push(entry.path());
        }
    }
}

#[test]
fn the_table_is_that_of_the_packages_where_they_are() {
    let Some(folder) = std::env::var_os("WEFT_RELEASES") else {
        return;
    };
    let known = releases(TABLE);
    let mut files = Vec::new();
    files_below(Path::new(&folder), &mut files);
    let mut names: BTreeMap<(&str, String), Vec<usize>> = BTreeMap::new();
    let mut seen = Vec::new();
    for library in super::LIBRARIES {
        let start = format!("{library}.");
        for file in &files {
            let name = file.file_name().unwrap().to_string_lossy();
            if !name.starts_with(&start) {
                continue;
            }
            let release = of(file).unwrap();
            let at = known.iter().position(|one| *one == release);
            let at = at.unwrap_or_else(|| panic!("the table's first line lacks {release}"));
            seen.push((library, at));
            for name in super::plain(&exported(file)) {
                names.entry((library, name)).or_default().push(at);
            }
        }
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(
        seen.len(),
        2 * known.len(),
        "packages are missing: {seen:?}"
    );
    let head = TABLE.lines().take_while(|line| line.starts_with('#'));
    let mut text = head.collect::<Vec<_>>().join("\n") + "\n";
    for ((library, name), mut at) in names {
        at.sort_unstable();
        at.dedup();
        let (first, last) = (at[0], at[at.len() - 1]);
        assert_eq!(at.len(), last - first + 1, "{name} went and came again");
        writeln!(text, "{library} {name} {} {}", known[first], known[last]).unwrap();
    }
    if std::env::var_os("WEFT_BLESS").is_some() {
        std::fs::write(FILE, text).unwrap();
    } else {
        assert_eq!(text, TABLE);
    }
}
