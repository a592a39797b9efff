//! A C program with the calls that rdma-core has added since Debian 12.

use crate::common;

use std::path::Path;
use std::process::Command;

use crate::common::{good, root};

#[test]
fn a_c_program_of_a_later_release_runs() {
    if !Path::new("/usr/include/rdma/rdma_cma.h").exists() {
        eprintln!("skipped: the headers of librdmacm are not installed");
        return;
    }
    let dist = common::lay_out("verbs");
    let lib = dist.path().join("lib");
    let program = dist.path().join("later");
    good(
        Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-g"])
            .arg("-o")
            .arg(&program)
            .arg(root().join("doors/libibverbs/tests/later.c"))
            .arg("-L")
            .arg(&lib)
            .args(["-libverbs", "-lrdmacm"]),
    );
    let mut run = Command::new(&program);
    run.env("LD_LIBRARY_PATH", &lib)
        .env_remove("WEFT_DEVICES")
        .env_remove("WEFT_FAULTS");
    good(&mut run);
}
