//! Helpers of the tests of the C libraries: build one as `./x dist` does, and inspect it with readelf.
#![allow(dead_code)] // each of the test files uses its part

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The output of `cargo xtask LIBRARY`, from a debug build.
pub(crate) fn lay_out(library: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .current_dir(root())
        .args(["run", "--quiet", "--locked", "-p", "xtask", "--", library])
        .arg(dir.path())
        .arg("--debug");
    good(&mut cargo);
    dir
}

pub(crate) fn good(command: &mut Command) -> Output {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

pub(crate) fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The names that a library exports, as `name@@VERSION`, or `name@VERSION` for those that new programs are not linked to.
pub(crate) fn exported(library: &Path) -> BTreeSet<String> {
    let mut readelf = Command::new("readelf");
    readelf.args(["--wide", "--dyn-syms"]).arg(library);
    text(&good(&mut readelf))
        .lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                // "ABS" is the version itself
                [_, _, _, "FUNC" | "OBJECT" | "TLS", _, _, place, name]
                    if !["UND", "ABS"].contains(&place) =>
                {
                    Some(name.to_owned())
                }
                _ => None,
            }
        })
        .collect()
}

/// The library's entries for the loader: its own name, the libraries that it needs, and where to look for them.
pub(crate) struct Dynamic {
    pub(crate) soname: String,
    pub(crate) needed: Vec<String>,
    pub(crate) runpath: Option<String>,
}

pub(crate) fn dynamic(library: &Path) -> Dynamic {
    let mut readelf = Command::new("readelf");
    readelf.args(["--wide", "--dynamic"]).arg(library);
    let shown = text(&good(&mut readelf));
    let all = |what: &str| -> Vec<String> {
        let lines = shown.lines().filter_map(|line| line.split_once(what));
        let values = lines.filter_map(|(_, value)| value.strip_suffix(']'));
        values.map(str::to_owned).collect()
    };
    Dynamic {
        soname: all("soname: [").remove(0),
        needed: all("Shared library: ["),
        runpath: all("runpath: [").pop(),
    }
}

/// True if a library comes with every system.
pub(crate) fn is_of_the_system(library: &str) -> bool {
    let known = ["libc.so.6", "libgcc_s.so.1", "libm.so.6", "ld-linux"];
    known.iter().any(|known| library.starts_with(known))
}
