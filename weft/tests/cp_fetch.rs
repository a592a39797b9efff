//! `weft cp HOST:FILE DIR`: files fetched from a listener with `--serve`.

use crate::common;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::common::{Listener, Output, RawSender, names, noise, weft};
use weft::cp::digest::BlockList;
use weft::cp::link::Link;
use weft::cp::protocol::{
    Code, Fetch, FileFlags, FileSpec, Hello, Message, Meta, RelPath, RingAdvert, Status, VERSION,
    What,
};
use weft::cp::tcp::TcpLink;

fn fetch(args: &[&str], to: &Path) -> Output {
    Output::of(weft().arg("cp").args(args).arg(to))
}

/// An inbox, a served directory with a tree in it, and a directory for what is fetched.
fn folders(dir: &Path) -> [std::path::PathBuf; 3] {
    let folders = ["in", "out", "to"].map(|name| dir.join(name));
    for folder in &folders {
        fs::create_dir(folder).unwrap();
    }
    let out = &folders[1];
    fs::create_dir_all(out.join("tree/sub")).unwrap();
    for (name, len) in [("f", 10), ("tree/large", 3 << 20), ("tree/sub/small", 100)] {
        fs::write(out.join(name), noise(len, 1)).unwrap();
    }
    rustix::fs::mknodat(
        rustix::fs::CWD,
        out.join("tree/fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    fs::hard_link(out.join("tree/large"), out.join("tree/same")).unwrap();
    fs::set_permissions(out.join("f"), fs::Permissions::from_mode(0o640)).unwrap();
    folders
}

#[test]
fn files_and_trees_are_fetched() {
    let dir = tempfile::tempdir().unwrap();
    let [inbox, out, to] = folders(dir.path());
    let slow = &["--limit-rate", "50M"][..];
    for (args, local, more) in [
        (&[][..], "auto", slow),
        (&[], "off", slow),
        (&["--plain-tcp"], "auto", &[]),
    ] {
        let serve = [args, &["--serve", out.to_str().unwrap()]].concat();
        let listener = Listener::start(&inbox, &serve);
        let run = |more: &[&str], paths: &[&str]| {
            let paths: Vec<String> = paths.iter().map(|path| listener.target(path)).collect();
            let paths = paths.iter().map(String::as_str);
            let all: Vec<&str> = args.iter().chain(more).copied().chain(paths).collect();
            Output::of(weft().env("WEFT_LOCAL", local).arg("cp").args(all).arg(&to))
        };
        let one = run(more, &["f", "tree/sub/small"]);
        one.ok();
        assert!(one.stdout.contains("2 files, 110 B in "), "{one:?}");
        assert_eq!(names(&to), ["f", "small"]);
        assert_eq!(fs::metadata(to.join("f")).unwrap().mode() & 0o777, 0o640);
        let none = run(more, &["tree/fifo"]);
        assert!(
            none.code == 1 && none.stderr.contains("nothing was fetched"),
            "{none:?}"
        );
        let dry = run(&["--dry-run", "-r"], &["tree", "f"]);
        dry.ok();
        let plan = "make the directory: tree\nsend: tree/large\nsend: tree/same\nmake the directory: tree/sub\nsend: tree/sub/small\nreplace: f\n";
        assert_eq!(
            dry.stdout,
            format!("{plan}dry run: 4 files, 6.00 MiB would be sent\n")
        );
        assert_eq!(names(&to), ["f", "small"]);
        let archive = run(&["-a"], &["tree"]);
        archive.ok();
        assert!(archive.stdout.contains("; 1 left out"), "{archive:?}");
        assert!(fs::read(to.join("tree/same")).unwrap() == noise(3 << 20, 1));
        assert_eq!(fs::metadata(to.join("tree/large")).unwrap().nlink(), 2);
        // Everything, of which most is there.
        let rest = run(&["-ru"], &[""]);
        rest.ok();
        assert!(rest.stdout.contains("0 files, 0 B in "), "{rest:?}");
        assert!(names(&inbox).is_empty());
        for name in ["f", "small"] {
            fs::remove_file(to.join(name)).unwrap();
        }
        fs::remove_dir_all(to.join("tree")).unwrap();
    }
}

#[test]
fn nothing_but_files_below_the_served_directory_is_given() {
    let dir = tempfile::tempdir().unwrap();
    let [inbox, out, to] = folders(dir.path());
    fs::write(dir.path().join("secret"), "secret").unwrap();
    symlink(dir.path(), out.join("up")).unwrap();
    symlink(dir.path().join("secret"), out.join("link")).unwrap();
    symlink(dir.path().join("secret"), out.join("tree/link")).unwrap();
    let without = Listener::start(&inbox, &[]);
    let got = fetch(&[&without.target("f")], &to);
    assert_eq!(got.code, 4, "{got:?}");
    assert!(got.stderr.contains("gives no files") && got.stderr.contains("--serve DIR"));

    let listener = Listener::start(&inbox, &["--serve", out.to_str().unwrap()]);
    for (path, why) in [
        ("up/secret", "up/secret: "),
        ("link", "link: a symbolic link"),
        ("missing", "missing: No such file"),
        ("tree", "use --recursive"),
        ("up", "up: a symbolic link"),
    ] {
        let got = fetch(&[&listener.target(path), &listener.target("f")], &to);
        assert!(got.stderr.contains(why), "{path}: {got:?}");
        assert!(!got.stderr.contains(out.to_str().unwrap()), "{got:?}");
        assert_eq!(names(&to), ["f"], "{path}");
    }
    fetch(&["-r", &listener.target("tree")], &to).ok();
    assert_eq!(names(&to.join("tree")), ["large", "same", "sub"]);
    for path in ["../secret", "/etc/passwd"] {
        assert_eq!(fetch(&[&listener.target(path)], &to).code, 2);
    }

    // A stranger gets nothing.
    if let Some(mut command) = common::unprivileged(dir.path()) {
        command.args([
            "cp",
            "--peer",
            listener.fingerprint(),
            &listener.target("f"),
        ]);
        let got = Output::of(command.arg("/tmp"));
        assert_eq!(got.code, 4, "{got:?}");
        assert!(got.stderr.contains("weft key"), "{got:?}");
    }
}

#[test]
fn a_request_for_too_much_memory_ends_the_connection() {
    let dir = tempfile::tempdir().unwrap();
    let [inbox, out, _] = folders(dir.path());
    let listener = Listener::start(&inbox, &["--serve", out.to_str().unwrap()]);
    let link = common::dial(listener.addr());
    let start = Message::Start {
        receives: link.receives(),
        fetches: true,
        proof: [0; 32],
    };
    link.send(&start).unwrap();
    let Some(Message::Ready { receives, .. }) = link.recv(Duration::from_secs(10)).unwrap() else {
        panic!("not READY")
    };
    link.set_peer_receives(receives);
    let ring = RingAdvert {
        slots: 64,
        slot_len: 16 << 20,
        rkey: 1,
        addr: 0,
    };
    let fetch = Fetch {
        flags: FileFlags::default(),
        update: false,
        dry_run: false,
        what: What::default(),
        ring,
        limit_rate: 0,
        paths: vec![None],
    };
    link.send(&Message::Fetch(fetch)).unwrap();
    let sender = RawSender { link, ring };
    assert!(sender.refusal().unwrap().contains("too large"));
}

/// A sender that answers a fetch with other files than the user has named.
#[test]
fn what_was_not_asked_for_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let door = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("{}:wanted", door.local_addr().unwrap());
    let child = weft()
        .args(["cp", "--plain-tcp", &at])
        .arg(dir.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let link = TcpLink::new(door.accept().unwrap().0, Duration::from_secs(10)).unwrap();
    link.recv_hello(Duration::from_secs(10)).unwrap();
    let hello = Hello {
        version: VERSION,
        status: Status::Ok,
        key: false,
        nonce: [1; 32],
    };
    link.send_hello(&hello.encode()).unwrap();
    let next = || link.recv(Duration::from_secs(10)).unwrap().unwrap();
    assert!(matches!(next(), Message::Start { fetches: true, .. }));
    let ready = Message::Ready {
        receives: 64,
        attributes: false,
        ring: RingAdvert::default(),
        proof: [0; 32],
    };
    link.send(&ready).unwrap();
    assert!(matches!(next(), Message::Fetch(_)));
    let names_sent = [".bashrc", "wanted2", "dir/wanted", "wanted"];
    for (id, name) in names_sent.iter().enumerate() {
        let id = id as u32;
        let flags = FileFlags {
            no_wait: true,
            ..FileFlags::default()
        };
        let spec = FileSpec {
            flags,
            meta: Meta::default(),
            size: 0,
            room: 0,
            source: [1; 16],
            path: RelPath::new(name.as_bytes()).unwrap(),
        };
        link.send(&Message::File { id, spec }).unwrap();
        let digest = BlockList::default().complete(0);
        link.send(&Message::End { id, digest }).unwrap();
        let Message::Result { code, .. } = next() else {
            panic!("no result")
        };
        let wanted = [Code::BadPath, Code::Written][usize::from(*name == "wanted")];
        assert_eq!(code, wanted, "{name}");
    }
    link.send(&Message::Done { cpu_us: 0 }).unwrap();
    assert!(matches!(next(), Message::Done { .. }));
    drop(link);
    let out = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("wanted2: this name was not asked for"),
        "{stderr}"
    );
    assert_eq!(names(dir.path()), ["wanted"]);
}
