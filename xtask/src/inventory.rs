//! The crates that are linked into a package, for users of the binary package: a bill of materials (`CycloneDX` 1.5) and a copyright
//! file (Debian's machine-readable form, DEP-5).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::library::{self, at, output, write};
use crate::licences::{self, Part};

/// The parts, and which of them uses which.
#[derive(Debug, Default, PartialEq, Eq)]
struct Graph {
    edges: BTreeMap<String, BTreeSet<String>>,
}

/// Writes `sbom.cdx.json` and `copyright` to `dir`, for a package that is linked from the `roots`. Returns a summary.
pub(crate) fn lay_out(dir: &Path, package: &str, roots: &[&str]) -> Result<String, String> {
    let root = library::root()?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let run = |args: &[&str]| output(Command::new(&cargo).current_dir(root).args(args));
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let about = output(Command::new(rustc).arg("-vV"))?;
    let field = |name: &str| about.lines().find_map(|line| line.strip_prefix(name));
    let (Some(host), Some(release)) = (field("host: "), field("release: ")) else {
        return Err("rustc -vV has an unexpected form".into());
    };

    let mut graph = Graph::default();
    for name in roots {
        // no `--edges build`, no macros: code that runs only during the build is not in the package
        let edges = "normal,no-proc-macro";
        #[rustfmt::skip]
        let tree = run(&[
            "tree", "--locked", "--package", name, "--edges", edges, "--target", host, "--prefix", "depth", "--format", " {p}",
        ])?;
        graph.read(&tree)?;
    }
    #[rustfmt::skip]
    let metadata = run(&["metadata", "--format-version=1", "--locked", "--filter-platform", host])?;
    let metadata: Value = serde_json::from_str(&metadata).map_err(|e| e.to_string())?;
    let lock = library::read(&root.join("Cargo.lock"))?;
    let mut parts = parts(&graph, &metadata, &lock)?;
    if !parts.is_empty() {
        parts.push(standard_library(release, rust_source()));
    }

    fs::create_dir_all(dir).map_err(at(dir))?;
    let version = own_version(&metadata)?;
    let when = std::env::var("SOURCE_DATE_EPOCH").ok();
    let seconds = match &when {
        Some(text) => text
            .parse()
            .map_err(|_| format!("SOURCE_DATE_EPOCH is '{text}'"))?,
        None => 0,
    };
    let bom = bill(package, &version, &parts, &graph, seconds);
    let mut text = serde_json::to_string_pretty(&bom).map_err(|e| e.to_string())?;
    text.push('\n');
    write(&dir.join("sbom.cdx.json"), &text)?;
    let own = library::read(&root.join("LICENSE-MIT"))?;
    let others: Vec<&Part> = parts.iter().filter(|part| !part.own).collect();
    write(
        &dir.join("copyright"),
        &licences::copyright(&own, &others).map_err(|e| e.to_string())?,
    )?;
    Ok(format!(
        "{package}: {} crates of others, {} of this tree",
        others.len(),
        parts.len() - others.len()
    ))
}

impl Graph {
    /// Reads the output of `cargo tree --prefix depth`: `DEPTH NAME vVERSION (...)`. A crate that has appeared already has `(*)` in
    /// place of its dependencies.
    fn read(&mut self, tree: &str) -> Result<(), String> {
        let mut above: Vec<String> = Vec::new();
        for line in tree.lines().filter(|line| !line.is_empty()) {
            let mut words = line.split_whitespace();
            let (Some(depth), Some(name), Some(version)) =
                (words.next(), words.next(), words.next())
            else {
                return Err(format!("cargo tree says '{line}'"));
            };
            let depth: usize = depth
                .parse()
                .map_err(|_| format!("cargo tree says '{line}'"))?;
            let key = key(name, version.trim_start_matches('v'));
            above.truncate(depth);
            if let Some(user) = above.last() {
                let uses = self.edges.entry(user.clone()).or_default();
                uses.insert(key.clone());
            }
            self.edges.entry(key.clone()).or_default();
            above.push(key);
        }
        Ok(())
    }
}

fn key(name: &str, version: &str) -> String {
    format!("{name}@{version}")
}

fn parts(graph: &Graph, metadata: &Value, lock: &str) -> Result<Vec<Part>, String> {
    let checksums = checksums(lock);
    let packages = metadata["packages"].as_array();
    let mut found = BTreeMap::new();
    for package in packages.into_iter().flatten() {
        let text = |field: &str| package[field].as_str().map(str::to_owned);
        let (Some(name), Some(version), Some(manifest)) =
            (text("name"), text("version"), text("manifest_path"))
        else {
            return Err("cargo metadata has an unexpected form".into());
        };
        let key = key(&name, &version);
        let authors = package["authors"].as_array().into_iter().flatten();
        let part = Part {
            license: text("license").unwrap_or_else(|| "LicenseRef-see-text".into()),
            authors: authors
                .filter_map(|author| author.as_str().map(str::to_owned))
                .collect(),
            folder: Path::new(&manifest).parent().map(Path::to_owned),
            checksum: checksums.get(&key).cloned(),
            own: package["source"].is_null(),
            name,
            version,
        };
        found.insert(key, part);
    }
    let part = |key: &String| {
        found
            .remove(key)
            .ok_or_else(|| format!("cargo metadata does not know {key}"))
    };
    graph.edges.keys().map(part).collect()
}

fn checksums(lock: &str) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let (mut name, mut version) = ("", "");
    for line in lock.lines() {
        let value = |field: &str| line.strip_prefix(field).map(|rest| rest.trim_matches('"'));
        if let Some(text) = value("name = ") {
            name = text;
        } else if let Some(text) = value("version = ") {
            version = text;
        } else if let Some(text) = value("checksum = ") {
            all.insert(key(name, version), text.to_owned());
        }
    }
    all
}

fn own_version(metadata: &Value) -> Result<String, String> {
    let packages = metadata["packages"].as_array();
    let weft = packages
        .into_iter()
        .flatten()
        .find(|package| package["name"] == "weft");
    weft.and_then(|package| package["version"].as_str())
        .map(str::to_owned)
        .ok_or_else(|| "there is no package weft".into())
}

/// Where rustup keeps the licences of the toolchain.
fn rust_source() -> Option<PathBuf> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let sysroot = output(Command::new(rustc).args(["--print", "sysroot"])).ok()?;
    let folder = Path::new(sysroot.trim()).join("share/doc/rust");
    folder.is_dir().then_some(folder)
}

fn standard_library(version: &str, folder: Option<PathBuf>) -> Part {
    Part {
        name: "rust-std".into(),
        version: version.to_owned(),
        license: "MIT OR Apache-2.0".into(),
        authors: vec!["The Rust Project Contributors".into()],
        folder,
        checksum: None,
        own: false,
    }
}

/// A bill of materials. It has no serial number, for the same package has the same bill.
fn bill(package: &str, version: &str, parts: &[Part], graph: &Graph, seconds: u64) -> Value {
    let reference = |part: &Part| format!("pkg:cargo/{}", key(&part.name, &part.version));
    let components: Vec<Value> = parts
        .iter()
        .map(|part| {
            let mut component = json!({
                "type": "library",
                "bom-ref": reference(part),
                "name": part.name,
                "version": part.version,
                "licenses": [{ "expression": part.license.replace('/', " OR ") }],
            });
            if part.name != "rust-std" {
                component["purl"] = reference(part).into();
            }
            if let Some(checksum) = &part.checksum {
                component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
            }
            component
        })
        .collect();
    let dependencies: Vec<Value> = graph
        .edges
        .iter()
        .map(|(user, uses)| {
            let uses: Vec<String> = uses.iter().map(|key| format!("pkg:cargo/{key}")).collect();
            json!({ "ref": format!("pkg:cargo/{user}"), "dependsOn": uses })
        })
        .collect();
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": timestamp(seconds),
            "component": {
                "type": "application",
                "bom-ref": package,
                "name": package,
                "version": version,
                "licenses": [{ "expression": "MIT OR Apache-2.0" }],
            },
        },
        "components": components,
        "dependencies": dependencies,
    })
}

/// Seconds since 1970 as RFC 3339 writes them, in UTC.
fn timestamp(seconds: u64) -> String {
    let (mut days, rest) = (seconds / 86_400, seconds % 86_400);
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    let day = days + 1;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_of_cargo_becomes_a_graph() {
        let mut graph = Graph::default();
        let tree =
            "0 a v1.0.0 (/src/a)\n1 b v2.0.0\n2 c v3.0.0\n1 c v3.0.0\n0 d v1.0.0\n1 b v2.0.0 (*)\n";
        graph.read(tree).unwrap();
        let uses = |key: &str| {
            graph.edges[key]
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>()
        };
        assert_eq!(uses("a@1.0.0"), ["b@2.0.0", "c@3.0.0"]);
        assert_eq!(uses("b@2.0.0"), ["c@3.0.0"]);
        assert_eq!(uses("d@1.0.0"), ["b@2.0.0"]);
        assert!(uses("c@3.0.0").is_empty());
        assert!(Graph::default().read("no tree").is_err());
    }

    #[test]
    fn checksums_go_to_their_crates() {
        let lock = "[[package]]\nname = \"a\"\nversion = \"1.0.0\"\n\n[[package]]\nname = \"b\"\nversion = \"2.0.0\"\nchecksum = \"ff\"\n";
        let all = checksums(lock);
        assert_eq!(all.len(), 1);
        assert_eq!(all["b@2.0.0"], "ff");
    }

    #[test]
    fn seconds_become_a_date() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(timestamp(1_735_689_599), "2024-12-31T23:59:59Z");
        assert_eq!(timestamp(1_795_394_532), "2026-11-23T00:42:12Z");
    }

    #[test]
    fn a_bill_names_every_part_with_its_licence_and_checksum() {
        let part = |name: &str, checksum: Option<&str>| Part {
            name: name.into(),
            version: "1.0.0".into(),
            license: "MIT/Apache-2.0".into(),
            authors: Vec::new(),
            folder: None,
            checksum: checksum.map(str::to_owned),
            own: checksum.is_none(),
        };
        let mut graph = Graph::default();
        graph.read("0 a v1.0.0\n1 b v1.0.0\n").unwrap();
        let parts = [part("a", None), part("b", Some("ff"))];
        let bom = bill("pkg", "0.1.0", &parts, &graph, 0);
        assert_eq!(bom["metadata"]["component"]["name"], "pkg");
        assert_eq!(bom["components"][1]["purl"], "pkg:cargo/b@1.0.0");
        assert_eq!(bom["components"][1]["hashes"][0]["content"], "ff");
        assert_eq!(
            bom["components"][0]["licenses"][0]["expression"],
            "MIT OR Apache-2.0"
        );
        assert!(bom["components"][0]["hashes"].is_null());
        assert_eq!(bom["dependencies"][0]["dependsOn"][0], "pkg:cargo/b@1.0.0");
    }
}
