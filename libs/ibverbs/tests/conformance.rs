//! A C program against Debian's header and our library: what the manual pages promise, in shared memory and over TCP.

#[path = "../../exs/tests/common/mod.rs"]
mod common;

use std::path::Path;
use std::process::Command;

use common::{good, root};

#[test]
fn the_manual_pages_promises_are_kept() {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        eprintln!("skipped: the header of libibverbs is not installed");
        return;
    }
    let dist = common::lay_out("verbs");
    let lib = dist.path().join("lib");
    let program = dist.path().join("conformance");
    good(
        Command::new("cc")
            .args([
                "-std=gnu11",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-O1",
                "-g",
                "-o",
            ])
            .arg(&program)
            .arg(root().join("libs/ibverbs/tests/conformance.c"))
            .arg("-L")
            .arg(&lib)
            .args(["-libverbs", "-lpthread"]),
    );
    for local in ["auto", "off"] {
        let mut run = Command::new(&program);
        run.env("LD_LIBRARY_PATH", &lib)
            .env("WEFT_LOCAL", local)
            .env_remove("WEFT_DEVICES")
            .env_remove("WEFT_FAULTS");
        good(&mut run);
    }
}
