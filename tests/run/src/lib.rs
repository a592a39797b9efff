//! Runs unmodified sockets programs under `weft run`, and checks their output.
//!
//! The preload library is built once for each run of the tests (or taken from `WEFT_RUN_LIB`).
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

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

/// Python, and its package.
pub const PYTHON: (&str, &str) = ("/usr/bin/python3", "python3");

/// The command that runs a script of the folder py.
pub fn python(file: &str) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("py").join(file);
    format!("{} {}", PYTHON.0, script.display())
}

/// A program of the folder c, which is made in the folder `dir`; `None` without a compiler.
///
/// # Panics
/// When it cannot be compiled.
pub fn compiled(name: &str, dir: &str) -> Option<PathBuf> {
    if !have(&[("cc", "gcc")]) {
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("c/{name}.c"));
    let program = Path::new(dir).join(name);
    let made = Command::new("cc")
        .args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .arg(&source)
        .output()
        .expect("cc runs");
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{said}");
    Some(program)
}

/// Runs a case of a program on plain TCP and on rings: it has to end well, and to print the same.
///
/// # Panics
/// When it does not.
pub fn as_on_tcp(program: Option<&Path>, case: &str) {
    let Some(program) = program else { return };
    let line = format!("{} {case}", program.display());
    let expected = plain().run(&line);
    expected.good();
    let done = weft().limit(Duration::from_mins(1)).run(&line);
    done.good();
    same_lines(&expected.text, &done.text, case);
}

/// A test for each of these cases of a program of `c/`, which is compiled once: see [`as_on_tcp()`].
#[macro_export]
macro_rules! as_on_tcp {
    ($program:literal: $($case:ident)*) => {
        fn program() -> Option<&'static std::path::Path> {
            static PROGRAM: std::sync::OnceLock<Option<std::path::PathBuf>> =
                std::sync::OnceLock::new();
            PROGRAM
                .get_or_init(|| $crate::compiled($program, env!("CARGO_TARGET_TMPDIR")))
                .as_deref()
        }
        $(#[test]
        fn $case() {
            $crate::as_on_tcp(program(), stringify!($case));
        })*
    };
}

/// Returns true if the tests run as root.
pub fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|about| about.uid() == 0)
}

/// A server's side, a client's, and whether both go over.
pub fn sides() -> [(Weft, Weft, bool); 3] {
    [
        (weft(), weft(), true),
        (plain(), weft(), false),
        (weft(), plain(), false),
    ]
}

/// A client of a server on all [`sides`]: something goes over, as `over` counts it in what they print, only with both under weft. `start` starts the
/// server, `end` ends it.
///
/// # Panics
/// Where that is not so, or the client is not content.
pub fn with_and_without(
    start: impl Fn(&Weft, u16) -> Running,
    client: &str,
    end: impl Fn(Running) -> Done,
    over: impl Fn(&str) -> u32,
    check: impl Fn(&Done),
) {
    for (server_side, client_side, both) in sides() {
        let port = free_port();
        let running = start(&server_side, port);
        let done = client_side.run(&client.replace("PORT", &port.to_string()));
        done.good();
        check(&done);
        let served = end(running);
        served.never_says("panicked");
        let n = over(&done.text) + over(&served.text);
        let show = format!("client {}\nserver {}", done.show(), served.show());
        assert_eq!(n > 0, both, "{n} went over\n{show}");
    }
}

/// A server of one client of iperf3, and its port.
pub fn iperf3(side: &Weft) -> (Running, u16) {
    let port = free_port();
    let server = side.start(&format!("iperf3 -s -1 -p {port}")).listens(port);
    (server, port)
}

/// Returns `len` bytes for a file. Each group of four bytes at a multiple of four is unique.
pub fn pattern(len: u32) -> Vec<u8> {
    let words = (0..len.div_ceil(4)).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes());
    words.take(len as usize).collect()
}

/// Compares the output of programs, without the reports of their processes.
///
/// # Panics
/// At the first line that differs.
pub fn same_lines(expected: &str, got: &str, what: &str) {
    let ours = |line: &&str| !line.starts_with("weft run:") && !line.starts_with("  ");
    let expected: Vec<_> = expected.lines().filter(ours).collect();
    let got: Vec<_> = got.lines().filter(ours).collect();
    for (at, (one, other)) in expected.iter().zip(&got).enumerate() {
        let before = expected[at.saturating_sub(40)..at].join("\n");
        assert_eq!(other, one, "{what}, line {at}, after\n{before}");
    }
    assert_eq!(got.len(), expected.len(), "{what}");
}
