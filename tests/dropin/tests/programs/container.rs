//! Where programs of containers run: in a root with nothing but their own files, without root's rights, and under a filter of system calls.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use weft_dropin::{Done, Weft, free_port, have, libraries, say};

use super::carriers;

/// The status with which the helpers say that the machine does not allow it.
const ELSEWHERE: i32 = 77;
/// Where the libraries are in the root, as in the Dockerfile of docs/verbs.md.
const INSIDE: &str = "/opt/weft/lib";
const HELPERS: &[(&str, &str)] = &[
    ("unshare", "util-linux"),
    ("chroot", "coreutils"),
    ("ldd", "libc-bin"),
];

/// A folder with these programs, the libraries that they are linked with, and weft's. Nothing else: no shell, no `/etc`, no `/tmp`.
fn root_with(programs: &[&str]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    let mut files = BTreeSet::new();
    let ours = ["libibverbs.so.1", "librdmacm.so.1", "libweft-sysfs.so"];
    for name in ours {
        let to = root.path().join(&INSIDE[1..]).join(name);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        // The file behind the link.
        fs::copy(libraries().join(name), to).unwrap();
        files.extend(needs(&libraries().join(name)));
    }
    for program in programs {
        let path = Path::new("/usr/bin").join(program);
        files.extend(needs(&path));
        files.insert(path);
    }
    for file in files {
        let to = root.path().join(file.strip_prefix("/").unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(&file, to).unwrap();
    }
    root
}

/// The libraries that a file is linked with, and their loader, but for those that weft has its own of.
fn needs(file: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(file).output().expect("ldd");
    let text = String::from_utf8(output.stdout).expect("paths");
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    let others = words.filter(|word| !word.contains("libibverbs") && !word.contains("librdmacm"));
    others.map(PathBuf::from).collect()
}

/// As a container's image has it set.
fn inside(local: &str) -> Weft {
    Weft::bare()
        .env("LD_LIBRARY_PATH", INSIDE)
        .env("LD_PRELOAD", format!("{INSIDE}/libweft-sysfs.so"))
        .env("WEFT_LOCAL", local)
}

fn words<'a>(root: &'a Path, program: &'a str) -> Vec<&'a str> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/sh/chroot.sh");
    // The preload library is of the program, not of those that start it: they only warn that it is not there.
    let mut words = vec!["unshare", "-Urm", "sh", script, root.to_str().unwrap()];
    words.extend(program.split_whitespace());
    words
}

/// Whether user namespaces are forbidden here; says so.
fn refused(done: &Done) -> bool {
    let refused = done.code() == ELSEWHERE || done.text.contains("unshare failed");
    if refused && !done.is_good() {
        say(&format!("skipped: no namespaces here: {}", done.show()));
    }
    refused && !done.is_good()
}

#[test]
fn programs_in_a_root_without_anything_else_and_without_root() {
    let needed = [("ibv_devinfo", "ibverbs-utils"), ("rping", "rdmacm-utils")];
    if !have(&needed) || !have(HELPERS) {
        return;
    }
    let root = root_with(&["ibv_devinfo", "rping"]);
    let run = |line: &str| inside("auto").start_words(&words(root.path(), line)).end();
    let done = run("/usr/bin/ibv_devinfo");
    if refused(&done) {
        return;
    }
    done.good().says("hca_id:\tweft0").says("hca_id:\tweft_ib0");
    // There is no shell, or this proves nothing.
    assert!(!run("/bin/sh -c true").is_good());
    // Each side in a user namespace and a root of its own, as two containers of one pod are.
    let other = root_with(&["rping"]);
    for local in ["auto", "off"] {
        let weft = inside(local);
        let port = free_port();
        let server = format!("/usr/bin/rping -s -a 127.0.0.1 -v -C 5 -p {port}");
        let server = weft.start_words(&words(root.path(), &server)).listens(port);
        let client = format!("/usr/bin/rping -c -a 127.0.0.1 -v -C 5 -p {port}");
        let client = weft.start_words(&words(other.path(), &client)).end();
        client.good().says("ping data: rdma-ping-4: ");
        server.end().says("server ping data: rdma-ping-4: ");
    }
}

/// `process_vm_readv(2)` and its like fail with `EPERM`, as under Docker's default profile: peers in shared memory do without them.
#[test]
fn a_filter_forbids_to_reach_into_other_processes() {
    let needed = [
        ("cc", "gcc"),
        ("rping", "rdmacm-utils"),
        ("ib_write_bw", "perftest"),
    ];
    if !have(&needed) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let forbid = dir.path().join("forbid");
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Werror", "-o"]).arg(&forbid);
    cc.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/c/forbid.c"));
    assert!(cc.status().unwrap().success());
    let forbid = forbid.display();
    let done = Weft::bare().run(&format!("{forbid} true"));
    if done.code() == ELSEWHERE {
        say(&format!("skipped: {}", done.show()));
        return;
    }
    done.good();
    // Large ones are what the calls are for; small ones go to a sleeping peer by them.
    let runs = [
        ("weft0", "ib_write_bw -R -d weft0 -n 100 -s 262144"),
        ("weft_ib0", "ib_write_bw -d weft_ib0 -n 100 -s 262144"),
        ("weft_ib0", "ib_read_bw -d weft_ib0 -n 100 -s 262144"),
        ("weft_ib0", "ib_send_lat -e -d weft_ib0 -n 100 -s 64"),
    ];
    for (device, line) in runs {
        // Shared memory or nothing, and with nobody or one side under the filter TCP would hide a failure.
        let weft = Weft::on(device).env("WEFT_LOCAL", "require");
        let client = weft_dropin::pair_or_again(&weft, "RDMA_CM_EVENT_REJECTED", |port| {
            let line = format!("{forbid} {line} -F -p {port}");
            (line.clone(), format!("{line} 127.0.0.1"))
        })
        .1;
        assert_eq!(client.table().len(), 1, "{}", client.show());
    }
    // The bytes are looked at by the programs.
    for weft in carriers("weft0") {
        let port = free_port();
        let common = format!("-a 127.0.0.1 -v -V -S 60000 -C 20 -p {port}");
        let (server, client) = weft_dropin::pair(
            &weft,
            port,
            &format!("{forbid} rping -s {common}"),
            &format!("{forbid} rping -c {common}"),
        );
        client.says("ping data: rdma-ping-19: ");
        server.never_says("verify failed");
    }
}
