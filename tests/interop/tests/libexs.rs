//! libexs over an RNIC of the machine, with weft's own drop-in libraries in the place of the system's.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn good(command: &mut Command) -> Output {
    let output = command.output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{said}",
        output.status
    );
    output
}

/// Where the library was laid out.
fn libexs() -> PathBuf {
    let lib = weft_dropin::built("libexs", "libexs");
    lib.parent().expect("a folder").to_owned()
}

const CONFORMANCE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../doors/libexs/tests/conformance.c"
);

/// The names of its cases.
fn cases() -> Vec<String> {
    let source = std::fs::read_to_string(CONFORMANCE).unwrap();
    let table = source.split("} cases[] = {").nth(1).expect("a table");
    let table = table.split("};").next().unwrap();
    let names = table
        .split("{\"")
        .skip(1)
        .filter_map(|case| case.split('"').next());
    names.map(Into::into).collect()
}

fn compile(dir: &Path) -> PathBuf {
    let program = dir.join("program");
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-pthread", "-o"])
        .arg(&program)
        .arg(CONFORMANCE);
    cc.arg("-I").arg(libexs().join("include"));
    good(cc.arg("-L").arg(libexs().join("lib")).arg("-lexs"));
    program
}

#[test]
fn the_calls_do_what_the_pages_say_on_an_rnic() {
    let dir = tempfile::tempdir().unwrap();
    let program = compile(dir.path());
    let run = |device: &str| {
        let mut run = Command::new(&program);
        run.env("LD_LIBRARY_PATH", libexs().join("lib"))
            .env("WEFT_NIC_LIB", weft_dropin::libraries())
            .env("WEFT_DEVICE", device);
        run
    };
    // Children of `fork` may not use an RNIC.
    let forks = ["forked", "ended", "killed"];
    let mut cases = cases();
    assert!(
        forks
            .iter()
            .all(|name| cases.iter().any(|case| case == name))
    );
    cases.retain(|case| !forks.contains(&case.as_str()));
    good(run("weft0").args(cases));
    assert!(!run("mlx5_9").output().unwrap().status.success());
}
