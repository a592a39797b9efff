//! C programs against Debian's header and our library: what the manual pages promise, in shared memory and over TCP, and what the devices can do.

#[path = "../../exs/tests/common/mod.rs"]
mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{good, root, text};

/// Our library, and one of the programs here that is linked with it.
fn built(name: &str) -> Option<(tempfile::TempDir, PathBuf)> {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        eprintln!("skipped: the header of libibverbs is not installed");
        return None;
    }
    let dist = common::lay_out("verbs");
    let program = dist.path().join(name);
    let source = root().join("libs/ibverbs/tests").join(format!("{name}.c"));
    good(
        Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-g"])
            .arg("-o")
            .args([&program, &source])
            .arg("-L")
            .arg(dist.path().join("lib"))
            .args(["-libverbs", "-lpthread"]),
    );
    Some((dist, program))
}

fn run(dist: &Path, program: &Path) -> Command {
    let mut run = Command::new(program);
    run.env("LD_LIBRARY_PATH", dist.join("lib"))
        .env_remove("WEFT_DEVICES")
        .env_remove("WEFT_FAULTS");
    run
}

#[test]
fn the_manual_pages_promises_are_kept() {
    let Some((dist, program)) = built("conformance") else {
        return;
    };
    for local in ["auto", "off"] {
        good(run(dist.path(), &program).env("WEFT_LOCAL", local));
    }
}

#[test]
fn another_process_imports_what_is_shared() {
    let Some((dist, program)) = built("imports") else {
        return;
    };
    for local in ["auto", "off"] {
        good(run(dist.path(), &program).env("WEFT_LOCAL", local));
    }
}

/// `WEFT_BLESS=1` writes the table.
#[test]
fn the_page_says_what_each_device_can_do() {
    const BEGIN: &str = "<!-- calls: begin -->\n";
    const END: &str = "<!-- calls: end -->";
    let Some((dist, program)) = built("refused") else {
        return;
    };
    let rows = text(&good(&mut run(dist.path(), &program)));
    let table = format!("| | `weft0` | `weft_ib0` |\n|---|---|---|\n{rows}");
    let page = root().join("docs/verbs.md");
    let said = std::fs::read_to_string(&page).unwrap();
    let (before, rest) = said.split_once(BEGIN).expect("the table of calls");
    let (old, after) = rest.split_once(END).expect("its end");
    if std::env::var_os("WEFT_BLESS").is_some() {
        std::fs::write(&page, format!("{before}{BEGIN}{table}{END}{after}")).unwrap();
    } else {
        assert_eq!(table, old, "docs/verbs.md: WEFT_BLESS=1 writes it");
    }
}
