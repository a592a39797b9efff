//! The libraries under test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The folder with `libibverbs.so.1` and `librdmacm.so.1`: that of `WEFT_VERBS_LIB`, or they are built now.
///
/// # Panics
/// When they cannot be built.
pub fn libraries() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| match std::env::var_os("WEFT_VERBS_LIB") {
        Some(dir) => fs::canonicalize(&dir)
            .unwrap_or_else(|e| panic!("WEFT_VERBS_LIB {}: {e}", dir.display())),
        None => built("verbs", "dropin"),
    })
}

/// The `lib` folder in the target folder `dir`, built now by `cargo xtask TASK`.
///
/// # Panics
/// When that fails.
pub fn built(task: &str, dir: &str) -> PathBuf {
    // target/debug/deps/NAME
    let program = std::env::current_exe().expect("/proc");
    let target = program.ancestors().nth(3).expect("a target folder");
    let dir = target.join(dir);
    fs::create_dir_all(&dir).expect("a writable target folder");
    // Test programs may run side by side.
    let lock = File::create(dir.join("lock")).expect("a writable target folder");
    lock.lock().expect("a file system with locks");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .args(["run", "--quiet", "--locked", "-p", "xtask", "--", task])
        .arg(&dir)
        .arg("--debug");
    let output = cargo.output().expect("cargo runs");
    assert!(
        output.status.success(),
        "{cargo:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    dir.join("lib")
}
