//! `weft cp` where much is there already: updates, dry runs, and a limit of the rate.

use crate::common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use crate::common::{Listener, names, noise, send};

#[test]
fn an_update_sends_only_files_of_another_size_or_time() {
    let dir = tempfile::tempdir().unwrap();
    let (tree, to) = (dir.path().join("tree"), dir.path().join("to"));
    fs::create_dir(&to).unwrap();
    fs::create_dir_all(tree.join("d")).unwrap();
    for (name, len) in [
        ("small", 10),
        ("d/large", 3 << 20),
        ("resized", 5),
        ("touched", 7),
    ] {
        fs::write(tree.join(name), noise(len, 1)).unwrap();
    }
    let listener = Listener::start(&to, &[]);
    let update = || {
        let out = send(
            &["-ru", "--json", tree.to_str().unwrap()],
            &listener.target(""),
        );
        out.ok();
        let json: serde_json::Value = serde_json::from_str(&out.stdout).unwrap();
        [&json["files"], &json["kept"], &json["bytes"]].map(|n| n.as_u64().unwrap())
    };
    assert_eq!(update(), [4, 0, (3 << 20) + 22]);
    assert_eq!(update(), [0, 4, 0]);
    let then = fs::metadata(tree.join("resized"))
        .unwrap()
        .modified()
        .unwrap();
    fs::write(tree.join("resized"), "longer").unwrap();
    let open = |name| {
        fs::File::options()
            .write(true)
            .open(tree.join(name))
            .unwrap()
    };
    open("resized").set_modified(then).unwrap();
    open("touched")
        .set_modified(then + Duration::from_nanos(1))
        .unwrap();
    assert_eq!(update(), [2, 2, 13]);
    assert_eq!(fs::read(to.join("tree/resized")).unwrap(), b"longer");
    let out = send(&["-ru", tree.to_str().unwrap()], &listener.target(""));
    assert!(out.stdout.contains("; 4 left alone"), "{out:?}");
}

#[test]
fn a_dry_run_says_what_would_be_done_and_does_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (tree, to) = (dir.path().join("tree"), dir.path().join("to"));
    fs::create_dir_all(to.join("tree/blocked")).unwrap();
    fs::create_dir_all(tree.join("fresh")).unwrap();
    fs::create_dir_all(tree.join("sub")).unwrap();
    for name in ["blocked", "fresh/new", "old"] {
        fs::write(tree.join(name), "12345").unwrap();
    }
    fs::write(to.join("tree/old"), "here").unwrap();
    fs::write(to.join("tree/sub"), "a file").unwrap();
    fs::set_permissions(to.join("tree/old"), fs::Permissions::from_mode(0o600)).unwrap();
    let listener = Listener::start(&to, &[]);
    let run = |args: &[&str]| {
        let mut all = vec!["-r", "--dry-run", tree.to_str().unwrap()];
        all.extend(args);
        let out = send(&all, &listener.target(""));
        assert_eq!(out.code, 1, "two cannot be sent: {out:?}");
        out.stdout
    };
    assert_eq!(
        run(&[]),
        "not possible, a directory has the name: tree/blocked\n\
         make the directory: tree/fresh\n\
         send: tree/fresh/new\n\
         replace: tree/old\n\
         not possible, no directory has the name: tree/sub\n\
         dry run: 2 files, 10 B would be sent\n"
    );
    let kept = run(&["-n"]);
    for part in [
        "leave alone: tree/old\n",
        "1 file, 5 B would be sent; 1 left alone",
    ] {
        assert!(kept.contains(part), "{kept}");
    }
    assert_eq!(names(&to.join("tree")), ["blocked", "old", "sub"]);
    assert_eq!(fs::read(to.join("tree/old")).unwrap(), b"here");
}

#[test]
fn a_limit_of_the_rate_holds() {
    let dir = tempfile::tempdir().unwrap();
    let (source, to) = (dir.path().join("f"), dir.path().join("to"));
    fs::create_dir(&to).unwrap();
    fs::write(&source, noise(1 << 20, 1)).unwrap();
    let listener = Listener::start(&to, &[]);
    for local in ["auto", "off"] {
        let began = Instant::now();
        let mut command = common::weft();
        command
            .env("WEFT_LOCAL", local)
            .args(["cp", "--limit-rate", "1M"]);
        common::Output::of(command.arg(&source).arg(listener.target(""))).ok();
        // The first piece goes at once.
        assert!(began.elapsed() >= Duration::from_millis(940), "{local}");
        assert!(fs::read(to.join("f")).unwrap() == noise(1 << 20, 1));
    }
}
