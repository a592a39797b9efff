//! The guard of the crate graph: the table in ARCHITECTURE.md lists the permitted edges.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// The line before the table in ARCHITECTURE.md.
pub(crate) const MARK: &str = "<!-- crates: read by `cargo xtask deps` -->";

const COLUMNS: [&str; 4] = ["package", "folder", "may depend on", "unsafe"];

/// One line of the table.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) package: String,
    pub(crate) folder: String,
    pub(crate) may_use: BTreeSet<String>,
    pub(crate) unsafe_code: UnsafeCode,
}

/// The column `unsafe` of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnsafeCode {
    /// The crate may have unsafe code.
    Allowed,
    /// None in its own text, but a macro of another crate may expand to some, so `forbid` is not possible.
    InMacros,
    /// None, and each root of the crate forbids it.
    Forbidden,
}

/// One package of the tree, as cargo sees it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Relative to the root of the tree.
    pub(crate) folder: String,
    /// The other packages of the tree that it depends on, for any purpose: building, running or testing.
    pub(crate) uses: BTreeSet<String>,
    /// The root files of its libraries and programs.
    pub(crate) roots: Vec<PathBuf>,
}

/// Reads the table out of the document. Its columns may be followed by others, which are for people.
pub(crate) fn parse_table(document: &str) -> Result<Vec<Row>, String> {
    let mut lines = document
        .lines()
        .skip_while(|line| line.trim() != MARK)
        .skip(1)
        .skip_while(|line| line.trim().is_empty());
    let header = lines
        .next()
        .ok_or_else(|| format!("ARCHITECTURE.md has no table after the line {MARK}"))?;
    let header = cells(header);
    if header.len() < COLUMNS.len() || header[..COLUMNS.len()] != COLUMNS {
        return Err(format!(
            "the crate table begins with {header:?}; its columns must be {COLUMNS:?}"
        ));
    }
    lines.next(); // the rule under the header
    let mut rows: Vec<Row> = Vec::new();
    for line in lines.take_while(|line| line.trim_start().starts_with('|')) {
        let cells = cells(line);
        let [package, folder, may_use, unsafe_code, ..] = &cells[..] else {
            return Err(format!("too few cells in the crate table: {line}"));
        };
        let unsafe_code = match unsafe_code.as_str() {
            "allowed" => UnsafeCode::Allowed,
            "in macros" => UnsafeCode::InMacros,
            "forbidden" => UnsafeCode::Forbidden,
            other => {
                return Err(format!(
                    "'{other}' in the column unsafe of {package}: say 'allowed', 'in macros' or 'forbidden'"
                ));
            }
        };
        if rows.iter().any(|row| row.package == *package) {
            return Err(format!("{package} stands twice in the crate table"));
        }
        rows.push(Row {
            package: package.clone(),
            folder: folder.clone(),
            may_use: may_use
                .split([',', ' '])
                .filter(|name| !matches!(*name, "" | "-" | "—"))
                .map(Into::into)
                .collect(),
            unsafe_code,
        });
    }
    if rows.is_empty() {
        return Err("the crate table in ARCHITECTURE.md is empty".into());
    }
    Ok(rows)
}

fn cells(line: &str) -> Vec<String> {
    line.trim()
        .trim_matches('|')
        .split('|')
        .map(|cell| cell.replace('`', "").trim().to_owned())
        .collect()
}

/// Reads the packages, and the edges between packages of this tree, from the output of `cargo metadata --no-deps`.
pub(crate) fn parse_metadata(metadata: &Value, root: &Path) -> Result<Vec<Package>, String> {
    let malformed = || "cargo metadata has an unexpected form".to_owned();
    let mut packages = Vec::new();
    for package in metadata["packages"].as_array().ok_or_else(malformed)? {
        let manifest = Path::new(package["manifest_path"].as_str().ok_or_else(malformed)?);
        let folder = manifest
            .parent()
            .and_then(|dir| dir.strip_prefix(root).ok())
            .ok_or_else(malformed)?;
        let dependencies = package["dependencies"].as_array().ok_or_else(malformed)?;
        let targets = package["targets"].as_array().ok_or_else(malformed)?;
        packages.push(Package {
            name: package["name"].as_str().ok_or_else(malformed)?.to_owned(),
            folder: folder.display().to_string(),
            // only dependencies with a path are ours
            uses: dependencies
                .iter()
                .filter(|d| d["path"].is_string())
                .filter_map(|d| d["name"].as_str())
                .map(Into::into)
                .collect(),
            roots: targets
                .iter()
                .filter(|t| {
                    t["kind"]
                        .as_array()
                        .is_some_and(|kinds| kinds.iter().any(|k| k == "lib" || k == "bin"))
                })
                .filter_map(|t| t["src_path"].as_str())
                .map(PathBuf::from)
                .collect(),
        });
    }
    Ok(packages)
}

/// All differences between the table and the packages.
pub(crate) fn check(table: &[Row], packages: &[Package]) -> Vec<String> {
    let mut problems = Vec::new();
    for package in packages {
        let Some(row) = table.iter().find(|row| row.package == package.name) else {
            problems.push(format!(
                "{} is not in the crate table of ARCHITECTURE.md",
                package.name
            ));
            continue;
        };
        if row.folder != package.folder {
            problems.push(format!(
                "{} is in {}, but the crate table says {}",
                package.name, package.folder, row.folder
            ));
        }
        problems.extend(package.uses.difference(&row.may_use).map(|used| {
            format!(
                "{} depends on {used}, which the crate table of ARCHITECTURE.md does not allow",
                package.name
            )
        }));
    }
    for row in table {
        if !packages.iter().any(|package| package.name == row.package) {
            problems.push(format!(
                "{} is in the crate table of ARCHITECTURE.md, but there is no such package",
                row.package
            ));
        }
        problems.extend(
            row.may_use
                .iter()
                .filter(|used| !table.iter().any(|other| other.package == **used))
                .map(|used| {
                    format!(
                        "the crate table lets {} depend on {used}, which it does not list",
                        row.package
                    )
                }),
        );
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const DOCUMENT: &str = "\
# Architecture
| package | folder |
|---|---|
| other table | x |

<!-- crates: read by `cargo xtask deps` -->

| package | folder | may depend on | unsafe | holds |
|---|---|---|---|---|
| `a` | crates/a | — | allowed | the floor |
| `b` | crates/b | `a` | forbidden | a wall |
| `c` | crates/c | `a`, `b` | forbidden | a roof |

| package | folder | may depend on | unsafe |
|---|---|---|---|
| not | ours | a | allowed |
";

    fn package(name: &str, uses: &[&str]) -> Package {
        Package {
            name: name.into(),
            folder: format!("crates/{name}"),
            uses: uses.iter().map(|&used| used.into()).collect(),
            roots: Vec::new(),
        }
    }

    fn problems(packages: &[Package]) -> Vec<String> {
        check(&parse_table(DOCUMENT).unwrap(), packages)
    }

    #[test]
    fn reads_the_marked_table_only() {
        let table = parse_table(DOCUMENT).unwrap();
        assert_eq!(
            table
                .iter()
                .map(|row| row.package.as_str())
                .collect::<Vec<_>>(),
            ["a", "b", "c"]
        );
        assert!(table[0].may_use.is_empty());
        assert_eq!(table[0].unsafe_code, UnsafeCode::Allowed);
        assert_eq!(table[2].may_use, ["a".to_owned(), "b".to_owned()].into());
        assert_eq!(
            (table[2].folder.as_str(), table[2].unsafe_code),
            ("crates/c", UnsafeCode::Forbidden)
        );
    }

    #[test]
    fn refuses_a_table_it_does_not_understand() {
        for (from, to, complaint) in [
            (MARK, "", "no table"),
            ("may depend on", "uses", "columns"),
            ("allowed | the floor", "sometimes | the floor", "sometimes"),
            ("| `c` |", "| `b` |", "twice"),
            (
                "| `b` | crates/b | `a` | forbidden | a wall |",
                "| `b` | crates/b |",
                "too few",
            ),
        ] {
            let error = parse_table(&DOCUMENT.replace(from, to)).unwrap_err();
            assert!(error.contains(complaint), "{error}");
        }
        let no_rows: String = DOCUMENT
            .lines()
            .filter(|line| !line.contains("crates/"))
            .collect::<Vec<_>>()
            .join("\n");
        assert!(parse_table(&no_rows).unwrap_err().contains("empty"));
    }

    #[test]
    fn accepts_the_allowed_edges_and_fewer() {
        assert_eq!(
            problems(&[
                package("a", &[]),
                package("b", &["a"]),
                package("c", &["b"])
            ]),
            [""; 0]
        );
    }

    #[test]
    fn an_edge_that_is_not_in_the_table_fails() {
        let found = problems(&[
            package("a", &["b"]),
            package("b", &["a"]),
            package("c", &["a", "b"]),
        ]);
        assert_eq!(
            found,
            ["a depends on b, which the crate table of ARCHITECTURE.md does not allow"]
        );
    }

    #[test]
    fn table_and_packages_must_name_the_same() {
        let found = problems(&[package("a", &[]), package("b", &[]), package("d", &[])]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].starts_with("d is not in") && found[1].starts_with("c is in the crate table")
        );
        let moved = Package {
            folder: "b".into(),
            ..package("b", &[])
        };
        assert_eq!(
            problems(&[package("a", &[]), moved, package("c", &[])]),
            ["b is in b, but the crate table says crates/b"]
        );
        let unknown = DOCUMENT.replace("`a`, `b`", "`a`, `z`");
        let found = check(
            &parse_table(&unknown).unwrap(),
            &[package("a", &[]), package("b", &[]), package("c", &[])],
        );
        assert_eq!(
            found,
            ["the crate table lets c depend on z, which it does not list"]
        );
    }

    #[test]
    fn edges_come_from_paths_of_every_kind() {
        let metadata = json!({"packages": [{
            "name": "b", "manifest_path": "/tree/crates/b/Cargo.toml",
            "dependencies": [
                {"name": "serde", "kind": null, "source": "registry+x"},
                {"name": "a", "kind": null, "path": "/tree/crates/a"},
                {"name": "c", "kind": "dev", "path": "/tree/crates/c"},
            ],
            "targets": [
                {"kind": ["lib"], "src_path": "/tree/crates/b/src/lib.rs"},
                {"kind": ["test"], "src_path": "/tree/crates/b/tests/t.rs"},
            ],
        }]});
        let packages = parse_metadata(&metadata, Path::new("/tree")).unwrap();
        let expected = Package {
            roots: vec!["/tree/crates/b/src/lib.rs".into()],
            ..package("b", &["a", "c"])
        };
        assert_eq!(packages, [expected]);
        assert!(parse_metadata(&json!({}), Path::new("/tree")).is_err());
    }

    #[test]
    fn this_tree_has_a_table() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let table =
            parse_table(&std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap()).unwrap();
        assert!(
            table
                .iter()
                .any(|row| row.package == "xtask" && row.unsafe_code == UnsafeCode::Forbidden)
        );
    }
}
