//! Runs unmodified sockets programs under `weft run`, and looks at what they print.
//!
//! The preload library is built once for each run of the tests (or taken from `WEFT_RUN_LIB`).
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use weft_dropin::built;

pub use weft_dropin::{Done, Running, Weft, free_port, have, listening, say};

/// The preload library: that of the folder `WEFT_RUN_LIB`, or it is built now.
///
/// # Panics
/// When it cannot be built.
pub fn library() -> &'static Path {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| match std::env::var_os("WEFT_RUN_LIB") {
        Some(dir) => fs::canonicalize(&dir)
            .unwrap_or_else(|e| panic!("WEFT_RUN_LIB {}: {e}", dir.display()))
            .join("libweft-run.so"),
        None => built("run", "run").join("libweft-run.so"),
    })
}

/// Programs run as `weft run --explain` runs them.
pub fn weft() -> Weft {
    Weft::bare()
        .env("LD_PRELOAD", library())
        .env("WEFT_RUN_EXPLAIN", "1")
}

/// Programs run on plain TCP.
pub fn plain() -> Weft {
    Weft::bare()
}

/// How many connections a program says went over to shared memory; its children count too.
pub fn switched(text: &str) -> u32 {
    let counts = text.lines().filter_map(|line| {
        let (before, _) = line.split_once(" went over to shared memory")?;
        before.rsplit(' ').next()?.parse::<u32>().ok()
    });
    counts.sum()
}

/// How many one-way paths for datagrams a program says it had; its children count too.
pub fn paths(text: &str) -> u32 {
    let counts = text.lines().filter_map(|line| {
        let (before, _) = line.split_once(" one-way paths through shared memory")?;
        before.rsplit(' ').next()?.parse::<u32>().ok()
    });
    counts.sum()
}
