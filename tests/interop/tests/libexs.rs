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

fn compile(source: &str, dir: &Path) -> PathBuf {
    let program = dir.join("program");
    let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(source);
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-pthread", "-o"])
        .args([&program, &source]);
    cc.arg("-I").arg(libexs().join("include"));
    good(cc.arg("-L").arg(libexs().join("lib")).arg("-lexs"));
    program
}

#[test]
fn the_calls_do_what_the_pages_say_on_an_rnic() {
    let dir = tempfile::tempdir().unwrap();
    let program = compile("doors/libexs/tests/conformance.c", dir.path());
    let run = |device: &str| {
        let mut run = Command::new(&program);
        run.env("LD_LIBRARY_PATH", libexs().join("lib"))
            .env("WEFT_NIC_LIB", weft_dropin::libraries())
            .env("WEFT_DEVICE", device);
        run
    };
    good(&mut run("weft0"));
    assert!(!run("mlx5_9").output().unwrap().status.success());
}
