//! A C program against our extension header: checks the layout of its structs, and that its calls do what it says.

use crate::common;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::common::{exported, good, root};
use weft_abi::verbs::dgram::{
    weft_dgram_attr, weft_dgram_range, weft_dgram_record, weft_dgram_reliable, weft_dgram_write,
};

#[test]
fn a_c_program_writes_records() {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        eprintln!("skipped: the header of libibverbs is not installed");
        return;
    }
    let dist = common::lay_out("verbs");
    let lib = dist.path().join("lib");
    let own: BTreeSet<String> = exported(&lib.join("libibverbs.so.1"))
        .into_iter()
        .filter(|name| name.ends_with("@@WEFT_DGRAM_1"))
        .collect();
    let names = [
        "pair_failed",
        "post_write_record",
        "reset_pair",
        "set_reliable",
        "setup",
        "take_record",
        "validity_map",
    ];
    let names = names.map(|name| format!("weft_dgram_{name}@@WEFT_DGRAM_1"));
    assert_eq!(own, BTreeSet::from(names));

    let program = dist.path().join("dgram");
    let sizes = [
        ("weft_dgram_attr", size_of::<weft_dgram_attr>()),
        ("weft_dgram_write", size_of::<weft_dgram_write>()),
        ("weft_dgram_range", size_of::<weft_dgram_range>()),
        ("weft_dgram_record", size_of::<weft_dgram_record>()),
        ("weft_dgram_reliable", size_of::<weft_dgram_reliable>()),
    ];
    let checks: Vec<_> = sizes
        .iter()
        .map(|(name, size)| {
            format!("_Static_assert(sizeof(struct {name}) == {size}, \"{name}\");\n")
        })
        .collect();
    let checks = checks.concat();
    let header = dist.path().join("sizes.h");
    let text = format!("#include <infiniband/weft_dgram.h>\n{checks}");
    std::fs::write(&header, text).expect("written");
    good(
        Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-g"])
            .arg("-I")
            .arg(dist.path().join("include"))
            .arg("-include")
            .arg(&header)
            .arg("-o")
            .arg(&program)
            .arg(root().join("doors/libibverbs/tests/dgram.c"))
            .arg("-L")
            .arg(&lib)
            .arg("-libverbs"),
    );
    let mut run = Command::new(&program);
    run.env("LD_LIBRARY_PATH", &lib)
        .env_remove("WEFT_DEVICES")
        .env_remove("WEFT_FAULTS");
    good(&mut run);
    good(run.env("WEFT_IB_WIRE", "roce"));
}
