//! Modules of one crate must not import each other in a cycle: a reader would have no module to begin with, and none of them could be tested, or
//! moved to another crate, without all the others.
//!
//! A module is a file or folder directly below `src`. The modules of a folder are checked in the same way; tests are not. Edges are paths in the
//! text that begin at the crate's root or at the folder's.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use crate::source::code_only;

/// Packages, and folders below their `src`, that still have cycles. The check requires that an entry without cycles is removed. Never add one.
const EXEMPT: [&str; 1] = ["weft-exs"];

/// The imports of each module of a crate.
type Edges = BTreeMap<String, BTreeSet<String>>;

/// All errors in one package, from the files below its `src` (paths relative to that) and their text.
pub(crate) fn check(package: &str, files: &[(PathBuf, String)]) -> Vec<String> {
    let folders: BTreeSet<&Path> = files
        .iter()
        .flat_map(|(path, _)| path.ancestors().skip(1))
        .chain([Path::new("")])
        .collect();
    folders
        .into_iter()
        .filter_map(|folder| {
            let name = Path::new(package).join(folder).display().to_string();
            let name = name.trim_end_matches('/');
            judge(name, circle(&edges(&inside(files, folder))))
        })
        .collect()
}

fn judge(name: &str, circle: Option<Vec<String>>) -> Option<String> {
    match (circle, EXEMPT.contains(&name)) {
        (Some(circle), false) => {
            let way = circle.join(" -> ");
            Some(format!(
                "{name}: modules import each other in a circle: {way}; move what they share to a module below them"
            ))
        }
        (None, true) => Some(format!(
            "{name} has no circle of modules any more: take it off the list in xtask/src/modules.rs"
        )),
        _ => None,
    }
}

/// The files of a folder as if it were a crate: paths from the crate's root to elsewhere do not count.
fn inside(files: &[(PathBuf, String)], folder: &Path) -> Vec<(PathBuf, String)> {
    if folder.as_os_str().is_empty() {
        return files.to_vec();
    }
    let root: Vec<_> = folder.iter().map(|name| name.to_string_lossy()).collect();
    let root = format!("crate::{}::", root.join("::"));
    let of_folder = files.iter().filter_map(|(path, text)| {
        let path = path.strip_prefix(folder).ok()?;
        let is_root = path == Path::new("mod.rs");
        let path = if is_root { Path::new("lib.rs") } else { path };
        let mut pieces = text.split(&root);
        let mut code = pieces.next()?.replace("crate::", "elsewhere::");
        for piece in pieces {
            code += "crate::";
            code += &piece.replace("crate::", "elsewhere::");
        }
        Some((path.to_owned(), code))
    });
    of_folder.collect()
}

fn edges(files: &[(PathBuf, String)]) -> Edges {
    let files: Vec<_> = files
        .iter()
        .map(|(path, text)| (path.as_path(), without_tests(&code_only(text))))
        .collect();
    let tests: BTreeSet<_> = files
        .iter()
        .flat_map(|(path, (_, tests))| tests.iter().map(|name| folder_of(path).join(name)))
        .collect();
    let is_test = |path: &Path| {
        let mut parents = path.ancestors();
        parents.any(|parent| tests.contains(&parent.with_extension("")))
    };
    let modules: BTreeSet<_> = files
        .iter()
        .filter(|(path, _)| !is_test(path))
        .filter_map(|(path, _)| module_of(path))
        .collect();
    // Items of its modules that the root re-exports.
    let mut names = BTreeMap::new();
    for (path, (code, _)) in &files {
        if module_of(path).is_none() {
            exports(code, &modules, &mut names);
        }
    }
    let mut edges = Edges::new();
    for (path, (code, _)) in &files {
        let Some(module) = module_of(path).filter(|_| !is_test(path)) else {
            continue;
        };
        let to = edges.entry(module.clone()).or_default();
        for name in from_root(code, depth_of(path)) {
            let target = modules.get(name).or_else(|| names.get(name));
            to.extend(target.filter(|target| **target != module).cloned());
        }
    }
    edges
}

/// The shortest cycle; its first module is repeated as the last element.
fn circle(edges: &Edges) -> Option<Vec<String>> {
    let circles = edges.keys().filter_map(|start| {
        let mut ways = vec![vec![start]];
        let mut seen = BTreeSet::new();
        while let Some(at) = (!ways.is_empty()).then(|| ways.remove(0)) {
            for next in edges.get(*at.last()?).into_iter().flatten() {
                let mut way = at.clone();
                way.push(next);
                if next == start {
                    return Some(way);
                }
                if seen.insert(next) {
                    ways.push(way);
                }
            }
        }
        None
    });
    let shortest = circles.min_by_key(Vec::len)?;
    Some(shortest.into_iter().cloned().collect())
}

/// The module that a file belongs to; `None`: it is a root.
fn module_of(path: &Path) -> Option<String> {
    let Component::Normal(first) = path.components().next()? else {
        return None;
    };
    let name = Path::new(first).with_extension("").display().to_string();
    let is_root = matches!(name.as_str(), "lib" | "main" | "bin" | "build");
    (!is_root).then_some(name)
}

/// Where the files of a file's submodules are.
fn folder_of(path: &Path) -> PathBuf {
    let is_folder = module_of(path).is_none() || path.ends_with("mod.rs");
    if is_folder {
        path.parent().unwrap_or(path).to_owned()
    } else {
        path.with_extension("")
    }
}

/// The number of `super::` that lead from a file to the root.
fn depth_of(path: &Path) -> usize {
    path.components().count() - usize::from(path.ends_with("mod.rs"))
}

/// The code without test-only items, and the names of the files of such items.
fn without_tests(code: &str) -> (String, Vec<String>) {
    const MARK: &str = "#[cfg(test)]";
    let (mut kept, mut tests) = (String::new(), Vec::new());
    let mut rest = code;
    while let Some(at) = rest.find(MARK) {
        kept.push_str(&rest[..at]);
        let item = &rest[at + MARK.len()..];
        let end = end_of_item(item);
        let words: Vec<_> = words(&item[..end]).collect();
        if let [.., "mod", name] = words[..]
            && item[..end].ends_with(';')
        {
            tests.push(name.to_owned());
        }
        rest = &item[end..];
    }
    (kept + rest, tests)
}

/// Where an item ends: behind its `;` or the brace that closes its body.
fn end_of_item(code: &str) -> usize {
    let mut depth = 0_u32;
    for (at, c) in code.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => {
                depth = depth.saturating_sub(1);
                // The braces of a `use` are followed by its `;`.
                if depth == 0 && !code[at + 1..].trim_start().starts_with(';') {
                    return at + 1;
                }
            }
            ';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    code.len()
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
}

/// Adds to `names` what the root re-exports from its modules, each with the module.
fn exports(code: &str, modules: &BTreeSet<String>, names: &mut BTreeMap<String, String>) {
    for item in code.split(';') {
        let Some(path) = item.rsplit_once("use ").map(|(_, path)| path.trim()) else {
            continue;
        };
        let path = path
            .trim_start_matches("crate::")
            .trim_start_matches("self::");
        let mut words = words(path);
        if let Some(module) = words.next().filter(|first| modules.contains(*first)) {
            names.extend(words.map(|name| (name.to_owned(), module.to_owned())));
        }
    }
}

/// The first names of all paths that begin at the root.
fn from_root(code: &str, depth: usize) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let up = "super::".repeat(depth);
    for start in ["crate::", &up] {
        for (at, _) in code.match_indices(start) {
            // Excludes `$crate::`, and `super::` chains that begin elsewhere.
            if code[..at].ends_with(['$', ':']) || code[..at].ends_with(char::is_alphanumeric) {
                continue;
            }
            let rest = &code[at + start.len()..];
            if let Some(group) = rest.strip_prefix('{') {
                found.extend(first_names(group));
            } else {
                found.extend(words(rest).next());
            }
        }
    }
    found
}

/// The first name of each path in a group, the text behind its opening brace.
fn first_names(group: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_i32;
    let end = group.find(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        depth < 0
    });
    let mut depth = 0_i32;
    let paths = group[..end.unwrap_or(group.len())].split(move |c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    paths.filter_map(|path| words(path).next())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Option<String> {
        let files: Vec<_> = files
            .iter()
            .map(|(path, text)| (PathBuf::from(path), (*text).to_owned()))
            .collect();
        circle(&edges(&files)).map(|circle| circle.join(" "))
    }

    #[test]
    fn modules_in_layers_pass() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c; pub use a::A; use c::X;"),
            ("a.rs", "use crate::b::{self, B}; use crate::c;"),
            (
                "b/mod.rs",
                "mod inner; use inner::I; use crate::{c, c::{X, Y}};",
            ),
            (
                "b/inner.rs",
                "use super::B; use crate::b; use super::super::c::X;",
            ),
            (
                "c.rs",
                "// use crate::a;\nconst S: &str = \"crate::a\"; crate::own!(); $crate::a!();",
            ),
        ];
        assert_eq!(found(&files), None);
    }

    #[test]
    fn folders_are_looked_at_too() {
        let file = |path: &str, text: &str| (PathBuf::from(path), text.to_owned());
        let mut files = vec![
            file("lib.rs", "mod f; mod x;"),
            file("x.rs", "use crate::f::b;"),
            file("f/mod.rs", "mod a; mod b; pub use a::A;"),
            file("f/a.rs", "use super::b::B; use crate::x;"),
            file("f/b.rs", "use crate::x::a;"),
        ];
        // Between x and f, but not inside f.
        let problems = check("p", &files);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with("p: "), "{problems:?}");
        for back in ["use crate::f::a::A;", "use super::A;"] {
            files[4].1 = back.to_owned();
            let problems = check("p", &files[2..]);
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].starts_with("p/f: "), "{problems:?}");
        }
    }

    #[test]
    fn a_circle_is_found_however_it_is_written() {
        let root = (
            "lib.rs",
            "mod a; mod b; pub use self::a::deep::{A, B as C}; pub use b::D;",
        );
        for import in [
            "use crate::a::A;",
            "use crate::{b::D, a};",
            "fn f(_: crate::a::A) {}",
            "use super::a;",
            "use crate::A;",
            "fn f() { crate::C::new() }",
            "#[cfg(test)] mod tests { fn f() {} } use crate::a;",
            "#[cfg(test)] use std::{fmt, io}; use crate::a;",
        ] {
            let files = [root, ("a.rs", "use crate::b;"), ("b.rs", import)];
            assert_eq!(found(&files).as_deref(), Some("a b a"), "{import}");
        }
    }

    #[test]
    fn a_long_circle_is_found_and_a_short_one_is_shown() {
        let (a, b) = (("a.rs", "use crate::b;"), ("b.rs", "use crate::c;"));
        let long = [a, b, ("c/mod.rs", ""), ("c/x.rs", "use crate::a;")];
        assert_eq!(found(&long).as_deref(), Some("a b c a"));
        let both = [a, b, ("c.rs", "use crate::{a, b};")];
        assert_eq!(found(&both).as_deref(), Some("b c b"));
    }

    #[test]
    fn tests_may_import_anything() {
        for b in [
            "#[cfg(test)] mod tests { use crate::a; fn f() { {} } }",
            "#[cfg(test)]\nuse crate::a;",
            "#[cfg(test)] pub(crate) fn f(_: crate::a::A) {}",
        ] {
            assert_eq!(
                found(&[("a.rs", "use crate::b;"), ("b.rs", b)]),
                None,
                "{b}"
            );
        }
        let files = [
            ("lib.rs", "mod a; mod b; #[cfg(test)] mod helpers;"),
            ("a.rs", "use crate::b; #[cfg(test)] use crate::helpers;"),
            ("b.rs", "#[cfg(test)] mod tests;"),
            ("b/tests.rs", "use crate::a;"),
            ("helpers/mod.rs", "use crate::a;"),
        ];
        assert_eq!(found(&files), None);
    }

    #[test]
    fn the_list_of_exemptions_is_held_to() {
        let circle = [("a.rs", "use crate::b;"), ("b.rs", "use crate::a;")]
            .map(|(path, text)| (path.into(), text.to_owned()));
        assert_eq!(check("new", &circle).len(), 1);
        assert!(check("new", &[]).is_empty());
        for package in EXEMPT {
            assert!(check(package, &circle).is_empty());
            assert_eq!(check(package, &[]).len(), 1, "it must be taken off");
        }
    }
}
