//! Programs in the environment of containers: a root with only their own files, and no root's rights.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use weft_dropin::{Done, Weft, free_port, have, libraries, say};

use super::seccomp;

/// The status with which the helpers report that the machine does not allow the test.
const ELSEWHERE: i32 = 77;
/// The place of the libraries in the root, as in the Dockerfile of docs/verbs.md.
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

/// The libraries that a file is linked with, and their loader, except those that weft replaces.
fn needs(file: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(file).output().expect("ldd");
    let text = String::from_utf8(output.stdout).expect("paths");
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    let others = words.filter(|word| !word.contains("libibverbs") && !word.contains("librdmacm"));
    others.map(PathBuf::from).collect()
}

/// The environment of a container's image.
fn inside(local: &str) -> Weft {
    Weft::bare()
        .env("LD_LIBRARY_PATH", INSIDE)
        .env("LD_PRELOAD", format!("{INSIDE}/libweft-sysfs.so"))
        .env("WEFT_LOCAL", local)
}

fn words<'a>(root: &'a Path, program: &'a str) -> Vec<&'a str> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/sh/chroot.sh");
    // The preload library is for the program. The programs that start it only warn that they do not find it.
    let mut words = vec!["unshare", "-Urm", "sh", script, root.to_str().unwrap()];
    words.extend(program.split_whitespace());
    words
}

/// True if user namespaces are forbidden here; prints that.
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
    // Without this check the test proves nothing: the root must have no shell.
    assert!(!run("/bin/sh -c true").is_good());
    // Each side has its own user namespace and its own root, like two containers of one pod.
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

/// Runs as a user that is not root, in a root with a shell, under the engine's profile. Server and client of one container share memory. Those of two
/// containers with separate user namespaces are kept apart ([one-host.md](../../../../docs/one-host.md)) and reach each other by TCP.
#[test]
fn containers_of_a_user_that_is_not_root() {
    let needed = [
        ("rping", "rdmacm-utils"),
        ("bwrap", "bubblewrap"),
        ("setpriv", "util-linux"),
        ("busybox", "busybox-static"),
        ("cc", "gcc"),
    ];
    if !have(&needed) {
        return;
    }
    let root = root_with(&["rping", "busybox"]);
    let profile = seccomp::profiles().into_iter().next();
    let build = tempfile::tempdir().unwrap();
    let forbid = seccomp::forbid(build.path(), profile.as_deref());
    fs::copy(forbid, root.path().join("forbid")).unwrap();
    for dir in ["proc", "dev", "tmp", "sys"] {
        fs::create_dir(root.path().join(dir)).unwrap();
    }
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(root.path(), open).unwrap();
    let run = |local: &str, program: &[&str]| {
        let mut words = vec!["setpriv", "--no-new-privs"];
        if rustix::process::getuid().is_root() {
            // Not `nobody`: in a user namespace that is the number of all unknown users.
            words.extend(["--reuid=12345", "--regid=12345", "--clear-groups"]);
        }
        words.extend("bwrap --unshare-user --unshare-pid --unshare-ipc --unshare-uts".split(' '));
        words.extend([
            "--die-with-parent",
            "--ro-bind",
            root.path().to_str().unwrap(),
        ]);
        words.extend("/ --proc /proc --dev /dev --tmpfs /tmp /forbid".split(' '));
        words.extend(program);
        inside(local).start_words(&words)
    };
    let done = run("auto", &["/usr/bin/busybox", "id", "-u"]).end();
    if done.text.contains("bwrap: ") || done.code() == ELSEWHERE {
        say(&format!("skipped: no containers here: {}", done.show()));
        return;
    }
    assert_ne!(
        done.good().text.lines().last(),
        Some("0"),
        "{}",
        done.show()
    );
    // In one container, shared memory is required.
    let port = free_port();
    let rping = format!("/usr/bin/rping -a 127.0.0.1 -v -C 5 -p {port}");
    let client = format!("until {rping} -c; do sleep 1; done");
    let script = format!("{rping} -s & {client}; wait");
    let done = run("require", &["/usr/bin/busybox", "sh", "-c", &script]).end();
    done.says("server ping data: rdma-ping-4: ");
    // In two containers.
    for (local, works) in [("auto", true), ("require", false)] {
        let port = free_port();
        let line = format!("/usr/bin/rping -a 127.0.0.1 -v -C 5 -p {port}");
        let words: Vec<&str> = line.split(' ').collect();
        let server = run(local, &[&words[..], &["-s"]].concat()).listens(port);
        let client = run(local, &[&words[..], &["-c"]].concat()).end();
        let server = server.kill();
        let pinged = client.text.contains("ping data: rdma-ping-4: ");
        assert_eq!(pinged, works, "{}\n{}", client.show(), server.show());
    }
}
