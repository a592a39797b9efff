//! The common part of the layout tests: the values that a C or C++ compiler has for expressions.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

/// An expression to compare: its name, C's expression, Rust's value.
pub(crate) type Figure = (String, String, i128);

/// The figures' values in a program that `compiler` makes; its file ends in `.extension` and begins with `head`.
pub(crate) fn seen_by(
    compiler: &[&str],
    extension: &str,
    head: &str,
    figures: &[Figure],
) -> BTreeMap<String, i128> {
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (
        dir.path().join(format!("layout.{extension}")),
        dir.path().join("layout"),
    );
    let mut text = format!(
        "{head}#include <stddef.h>\n#include <stdio.h>\n#ifdef __cplusplus\n#define ALIGNOF(t) alignof(t)\n#else\n\
         #define ALIGNOF(t) _Alignof(t)\n#endif\nint main(void) {{\n"
    );
    for (name, expression, _) in figures {
        writeln!(
            text,
            "  printf(\"%s=%lld\\n\", \"{name}\", (long long)({expression}));"
        )
        .unwrap();
    }
    text.push_str("  return 0;\n}\n");
    std::fs::write(&source, text).unwrap();
    let built = Command::new(compiler[0])
        .args(&compiler[1..])
        .args(["-Wall", "-Wextra", "-pedantic", "-Werror"])
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap_or_else(|e| panic!("{}: {e}", compiler[0]));
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let printed = Command::new(&program).output().unwrap();
    String::from_utf8(printed.stdout)
        .unwrap()
        .lines()
        .map(|line| {
            let (name, value) = line.split_once('=').unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

/// The figures' names with Rust's values.
pub(crate) fn expected(figures: &[Figure]) -> BTreeMap<String, i128> {
    figures
        .iter()
        .map(|(name, _, value)| (name.clone(), *value))
        .collect()
}
