//! `weft cp` from outside: the real binary, two processes, real files.

use crate::common;

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use crate::common::{Listener, Output, names, noise, send, weft};

const BOTH: [&[&str]; 2] = [&[], &["--plain-tcp"]];

#[test]
fn sizes_from_nothing_to_many_blocks() {
    for wire in BOTH {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).unwrap();
        fs::create_dir(&to).unwrap();
        let sizes = [0, 1, 4095, 1 << 20, (1 << 20) + 1, 20_000_000];
        let mut args: Vec<String> = Vec::new();
        for size in sizes {
            let path = from.join(size.to_string());
            fs::write(&path, noise(size, size as u64)).unwrap();
            args.push(path.to_str().unwrap().into());
        }
        let listener = Listener::start(&to, wire);
        let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
        args.extend(wire);
        send(&args, &listener.target("")).ok();
        for size in sizes {
            assert!(
                fs::read(to.join(size.to_string())).unwrap() == noise(size, size as u64),
                "{size} {wire:?}"
            );
        }
        assert_eq!(names(&to).len(), sizes.len(), "nothing else is left");
    }
}

#[test]
fn a_sparse_file_larger_than_the_ring_over_ipv6_with_fsync() {
    let dir = tempfile::tempdir().unwrap();
    let (source, to) = (dir.path().join("sparse"), dir.path().join("to"));
    fs::create_dir(&to).unwrap();
    let file = fs::File::create(&source).unwrap();
    file.set_len(150 << 20).unwrap();
    file.write_all_at(b"in the middle", 77 << 20).unwrap();
    let listener = match std::net::TcpListener::bind("[::1]:0") {
        Ok(_) => Listener::start_on(&to, "[::1]:0", &[]),
        Err(e) => {
            println!("skipped: no IPv6 here: {e}");
            return;
        }
    };
    let out = send(
        &["--fsync", source.to_str().unwrap()],
        &listener.target("deep/er"),
    );
    out.ok();
    assert!(
        out.stdout.contains("are holes") && out.stdout.contains("CPU"),
        "{}",
        out.stdout
    );
    let got = fs::File::open(to.join("deep/er/sparse")).unwrap();
    let mut word = [0; 13];
    got.read_exact_at(&mut word, 77 << 20).unwrap();
    assert_eq!(
        (&word, got.metadata().unwrap().len()),
        (b"in the middle", 150 << 20)
    );
}

#[test]
fn holes_stay_holes_and_are_not_sent() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    let (mut paths, mut wanted) = (Vec::new(), Vec::new());
    // Data in the middle of a block, at the end, nowhere, and in a file that would fit a pack.
    let files: [(&str, u64, &[u64]); 4] = [
        (
            "some",
            300 << 20,
            &[64 << 10, 1 << 20, 77 << 20, (77 << 20) + (64 << 10)],
        ),
        ("end", 5 << 20, &[(5 << 20) - 4096]),
        ("none", 200 << 20, &[]),
        ("small", 32 << 10, &[4096]),
    ];
    for (name, size, pieces) in files {
        let path = dir.path().join(name);
        let file = fs::File::create(&path).unwrap();
        file.set_len(size).unwrap();
        for &at in pieces {
            file.write_all_at(&noise(4096, at), at).unwrap();
        }
        file.sync_all().unwrap();
        wanted.push((
            to.join(name),
            size,
            pieces,
            file.metadata().unwrap().blocks(),
        ));
        paths.push(path.to_str().unwrap().to_owned());
    }
    for wire in BOTH {
        let listener = Listener::start(&to, wire);
        let mut args: Vec<&str> = paths.iter().map(String::as_str).collect();
        args.push("--json");
        args.extend(wire);
        let out = send(&args, &listener.target(""));
        out.ok();
        let json: serde_json::Value = serde_json::from_str(&out.stdout).unwrap();
        let data = 4096 * 6;
        assert_eq!(json["bytes"], data, "{json}");
        assert_eq!(json["holes"], (505 << 20) + (32 << 10) - data, "{json}");
        for (path, size, pieces, blocks) in &wanted {
            let got = fs::File::open(path).unwrap();
            let meta = got.metadata().unwrap();
            assert_eq!(meta.len(), *size);
            assert!(meta.blocks() <= *blocks, "{path:?}: {}", meta.blocks());
            for &at in *pieces {
                let mut piece = [0; 4096];
                got.read_exact_at(&mut piece, at).unwrap();
                assert!(piece[..] == noise(4096, at), "{path:?} {at}");
            }
        }
    }
}

#[test]
fn trees_keep_modes_times_and_empty_directories() {
    let dir = tempfile::tempdir().unwrap();
    let (tree, to) = (dir.path().join("tree"), dir.path().join("to"));
    fs::create_dir(&to).unwrap();
    fs::create_dir_all(tree.join("a/empty")).unwrap();
    for i in 0..500 {
        fs::write(tree.join(format!("a/{i}")), noise(i, 7)).unwrap();
    }
    let script = tree.join("script");
    fs::write(&script, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o751)).unwrap();
    let then = SystemTime::UNIX_EPOCH + Duration::new(1_234_567_890, 123_456_789);
    fs::File::open(&script).unwrap().set_modified(then).unwrap();
    symlink("script", tree.join("link")).unwrap();
    fs::File::open(tree.join("a/empty"))
        .unwrap()
        .set_modified(then)
        .unwrap();
    fs::set_permissions(tree.join("a/empty"), fs::Permissions::from_mode(0o555)).unwrap();
    let listener = Listener::start(&to, &[]);
    let tree_arg = tree.to_str().unwrap();

    let out = send(&[tree_arg], &listener.target(""));
    assert_eq!(out.code, 1);
    assert!(out.stderr.contains("use --recursive"), "{}", out.stderr);

    let out = send(&["-r", tree_arg], &listener.target("x"));
    out.ok();
    assert!(out.stderr.contains("symbolic link"), "{}", out.stderr);
    assert!(!to.join("x/tree/link").exists());
    send(&["-r", "--links", tree_arg], &listener.target("x")).ok();
    assert_eq!(
        fs::read_link(to.join("x/tree/link")).unwrap(),
        Path::new("script")
    );
    // A link that leads out fails, and nothing else does, unless the listener wants it.
    symlink("/etc/hostname", tree.join("out")).unwrap();
    let out = send(&["-r", "--links", tree_arg], &listener.target("x"));
    assert_eq!(out.code, 1, "{out:?}");
    assert!(out.stderr.contains("--any-links") && !to.join("x/tree/out").is_symlink());
    let any = Listener::start(&to, &["--any-links"]);
    send(&["-r", "--links", tree_arg], &any.target("x")).ok();
    assert!(to.join("x/tree/out").is_symlink());
    for i in 0..500 {
        assert_eq!(
            fs::read(to.join(format!("x/tree/a/{i}"))).unwrap(),
            noise(i, 7)
        );
    }
    let meta = fs::metadata(to.join("x/tree/script")).unwrap();
    assert_eq!(meta.mode() & 0o7777, 0o751);
    assert_eq!(meta.modified().unwrap(), then);
    let meta = fs::metadata(to.join("x/tree/a/empty")).unwrap();
    assert_eq!(
        (meta.mode() & 0o7777, meta.modified().unwrap()),
        (0o555, then)
    );
}

#[test]
fn existing_files_are_replaced_whole_or_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (source, to) = (dir.path().join("f"), dir.path().join("to"));
    fs::create_dir(&to).unwrap();
    fs::write(&source, "new").unwrap();
    fs::write(to.join("f"), "old").unwrap();
    let listener = Listener::start(&to, &[]);
    let path = source.to_str().unwrap();
    let out = send(&["-n", path], &listener.target(""));
    out.ok();
    for part in ["0 files, 0 B in", "1 left alone"] {
        assert!(out.stdout.contains(part), "{}", out.stdout);
    }
    assert!(!out.stdout.contains("B/s"), "{}", out.stdout);
    assert_eq!(out.stderr, "");
    assert_eq!(fs::read(to.join("f")).unwrap(), b"old");
    let out = send(
        &["-n", path, dir.path().join("none").to_str().unwrap()],
        &listener.target(""),
    );
    assert_eq!(out.code, 1);
    assert!(out.stderr.contains("1 of 2 could not"), "{}", out.stderr);
    send(&[path], &listener.target("")).ok();
    assert_eq!(fs::read(to.join("f")).unwrap(), b"new");
    fs::set_permissions(to.join("f"), fs::Permissions::from_mode(0o400)).unwrap();
    let out = send(&[path], &listener.target(""));
    assert_eq!(out.code, 1);
    assert!(
        out.stderr.contains("read-only") && out.stderr.contains("--force"),
        "{}",
        out.stderr
    );
    send(&["-f", path], &listener.target("")).ok();
    fs::create_dir(to.join("d")).unwrap();
    fs::write(dir.path().join("d"), "x").unwrap();
    let out = send(
        &[dir.path().join("d").to_str().unwrap()],
        &listener.target(""),
    );
    assert_eq!(out.code, 1);
    assert!(
        out.stderr.contains("a directory of this name"),
        "{}",
        out.stderr
    );
}

/// Kills one side with SIGKILL once part of the file is there, then sends again.
fn killed_in_the_middle(kill_sender: bool) {
    let dir = tempfile::tempdir().unwrap();
    let (source, to) = (dir.path().join("big"), dir.path().join("to"));
    fs::create_dir(&to).unwrap();
    let size = 96 << 20;
    fs::write(&source, noise(size, 3)).unwrap();
    let mut listener = Listener::start(&to, &[]);
    // The FIFO of the sender's standard error is not needed; the receiver's directory tells how far it is.
    let mut sender = weft()
        .args(["cp", source.to_str().unwrap(), &listener.target("")])
        .spawn()
        .unwrap();
    let part = common::until("the temporary file grows", || {
        let name = names(&to).into_iter().find(|n| n.contains(".part"))?;
        (fs::metadata(to.join(&name)).ok()?.len() >= 8 << 20).then_some(name)
    });
    if kill_sender {
        sender.kill().unwrap();
    } else {
        listener.kill();
    }
    let status = sender.wait().unwrap();
    if !kill_sender {
        assert_eq!(
            status.code(),
            Some(3),
            "the sender says that the peer has gone"
        );
        listener = Listener::start(&to, &[]);
    }
    assert!(
        !to.join("big").exists(),
        "never a half-written file under its final name"
    );
    if kill_sender {
        // The receiver has to let go of the file before it can go on.
        let lock = fs::File::open(to.join(&part)).unwrap();
        common::until("the receiver gives up", || lock.try_lock().ok());
    }
    let out = send(&[source.to_str().unwrap()], &listener.target(""));
    out.ok();
    assert!(out.stdout.contains("were there already"), "{}", out.stdout);
    assert!(fs::read(to.join("big")).unwrap() == noise(size, 3));
    assert_eq!(names(&to), ["big"], "no part, no journal");
}

#[test]
fn a_transfer_goes_on_after_kill_9_of_the_sender() {
    killed_in_the_middle(true);
}

#[test]
fn a_transfer_goes_on_after_kill_9_of_the_receiver() {
    killed_in_the_middle(false);
}

#[test]
fn a_full_disk_is_told_early_and_late() {
    let Some(small) = common::Tmpfs::mount(8 << 20) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::start(small.path(), &[]);
    let big = dir.path().join("big");
    fs::write(&big, noise(12 << 20, 1)).unwrap();
    let out = send(&[big.to_str().unwrap()], &listener.target(""));
    assert_eq!(out.code, 1);
    assert!(
        out.stderr.contains("no space") && out.stderr.contains("free some space"),
        "{}",
        out.stderr
    );
    assert!(names(small.path()).is_empty(), "told before the first byte");

    // Files that fit one by one, and not together: the last does not find room while it is written.
    let mut paths = Vec::new();
    for i in 0..10 {
        let path = dir.path().join(format!("f{i}"));
        fs::write(&path, noise(1 << 20, i)).unwrap();
        paths.push(path);
    }
    let args: Vec<&str> = paths.iter().map(|p| p.to_str().unwrap()).collect();
    let out = send(&args, &listener.target(""));
    assert_eq!(out.code, 1);
    assert!(out.stderr.contains("No space left"), "{}", out.stderr);
    let there = names(small.path());
    assert!(!there.is_empty() && there.len() < 10);
    for name in there {
        let i = name[1..].parse().expect("no temporary file is left");
        assert!(
            fs::read(small.path().join(&name)).unwrap() == noise(1 << 20, i),
            "{name} is whole"
        );
    }
}

#[test]
fn no_permission_is_told_by_both_sides() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let to = dir.path().join("to");
    fs::create_dir_all(to.join("closed")).unwrap();
    fs::write(dir.path().join("f"), "x").unwrap();
    let source = dir.path().join("f");
    let Some(mut command) = common::unprivileged(dir.path()) else {
        return;
    };
    // The unprivileged listener may write to `to`, not to `to/closed`.
    fs::set_permissions(&to, fs::Permissions::from_mode(0o777)).unwrap();
    let listener = Listener::start_with(&mut command, &to, "127.0.0.1:0", &["--open"]);
    let args = ["--peer", listener.fingerprint(), source.to_str().unwrap()];
    let out = send(&args, &listener.target("closed"));
    assert_eq!(out.code, 1);
    assert!(
        out.stderr.contains("Permission denied") && out.stderr.contains("run the listener as"),
        "{}",
        out.stderr
    );
    send(&args, &listener.target("")).ok();

    fs::set_permissions(&to, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = common::unprivileged(dir.path()).unwrap();
    let out = Output::of(command.args([
        "cp",
        "--bind",
        "127.0.0.1:0",
        "--listen",
        to.to_str().unwrap(),
    ]));
    assert_eq!(out.code, 1);
    assert!(out.stderr.contains("cannot receive into"), "{}", out.stderr);
}

#[test]
fn unreadable_and_missing_sources_do_not_stop_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    fs::write(dir.path().join("good"), "x").unwrap();
    let listener = Listener::start(&to, &[]);
    let (good, missing) = (dir.path().join("good"), dir.path().join("missing"));
    let out = send(
        &[missing.to_str().unwrap(), good.to_str().unwrap()],
        &listener.target(""),
    );
    assert_eq!(out.code, 1);
    assert!(
        out.stderr.contains("missing: No such file"),
        "{}",
        out.stderr
    );
    assert_eq!(names(&to), ["good"]);
    let out = send(&[missing.to_str().unwrap()], &listener.target(""));
    assert!(out.stderr.contains("nothing was sent"), "{}", out.stderr);
}

/// Whoever can write to a directory that is being sent must not choose what else is.
#[test]
fn what_was_put_in_the_place_of_a_source_is_not_sent() {
    let dir = tempfile::tempdir().unwrap();
    let (tree, to, secret) = (
        dir.path().join("tree"),
        dir.path().join("to"),
        dir.path().join("secret"),
    );
    fs::create_dir_all(tree.join("d/deep")).unwrap();
    fs::create_dir(&to).unwrap();
    fs::create_dir_all(secret.join("deep")).unwrap();
    for name in ["deep/x", "other", "aim"] {
        fs::write(secret.join(name), "secret").unwrap();
    }
    for name in ["link", "other", "good", "d/deep/x"] {
        fs::write(tree.join(name), "mine").unwrap();
    }
    let single = dir.path().join("single");
    fs::write(&single, "mine").unwrap();
    symlink(&single, dir.path().join("by-link")).unwrap();
    let listener = Listener::start(&to, &[]);
    let door = TcpListener::bind("127.0.0.1:0").unwrap();
    let sender = weft()
        .args(["cp", "-r", "--no-progress"])
        .args([&tree, &single, &dir.path().join("by-link")])
        .arg(format!("127.0.0.1:{}:", door.local_addr().unwrap().port()))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It connects when it has looked at everything.
    let (near, _) = door.accept().unwrap();
    fs::remove_file(tree.join("link")).unwrap();
    symlink(secret.join("aim"), tree.join("link")).unwrap();
    fs::rename(secret.join("other"), tree.join("other")).unwrap();
    fs::rename(tree.join("d"), dir.path().join("d")).unwrap();
    symlink(&secret, tree.join("d")).unwrap();
    fs::remove_file(&single).unwrap();
    symlink(secret.join("deep/x"), &single).unwrap();
    let far = std::net::TcpStream::connect(listener.addr()).unwrap();
    common::relay(near, far);
    let out = sender.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    for name in [
        "tree/link: ",
        "tree/other: ",
        "tree/d/deep/x: ",
        "single: ",
        "by-link: ",
    ] {
        assert!(stderr.contains(name), "{name}: {stderr}");
    }
    assert_eq!(names(&to), ["tree"]);
    assert_eq!(names(&to.join("tree")), ["d", "good"]);
    assert!(names(&to.join("tree/d/deep")).is_empty());
    assert_eq!(fs::read(to.join("tree/good")).unwrap(), b"mine");
}

#[test]
fn files_without_a_length_come_whole() {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::start(dir.path(), &[]);
    let mut paths = vec!["/proc/version", "/proc/cpuinfo"];
    // It says 4,096 bytes of itself, and has fewer.
    paths.extend(
        Some("/sys/kernel/mm/transparent_hugepage/enabled").filter(|p| Path::new(p).exists()),
    );
    send(&paths, &listener.target("")).ok();
    for path in paths {
        let got = fs::read(dir.path().join(Path::new(path).file_name().unwrap())).unwrap();
        // Clock rates change; the length of their text hardly does.
        assert!(
            !got.is_empty() && got.len().abs_diff(fs::read(path).unwrap().len()) < 100,
            "{path}"
        );
    }
}

#[test]
fn another_protocol_on_the_port() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("f");
    fs::write(&source, "x").unwrap();

    let http = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("127.0.0.1:{}:", http.local_addr().unwrap().port());
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = http.accept().unwrap();
        let _ = stream.write_all(
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        );
        stream
    });
    let out = send(&[source.to_str().unwrap()], &at);
    drop(answering.join().unwrap());
    assert_eq!(out.code, 4, "{}", out.stderr);
    assert!(
        out.stderr.contains("does not") && out.stderr.contains("iWARP"),
        "{}",
        out.stderr
    );

    // Accepted by the kernel, never answered.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("127.0.0.1:{}:", silent.local_addr().unwrap().port());
    let out = send(&[source.to_str().unwrap()], &at);
    assert_eq!(out.code, 3, "{}", out.stderr);
    assert!(out.stderr.contains("no answer"), "{}", out.stderr);
    drop(silent);

    // MPA without TLS.
    let hello = weft_iw::Listener::open("127.0.0.1:0").unwrap();
    let at = format!("127.0.0.1:{}:", hello.local_addr().port());
    let out = send(&[source.to_str().unwrap()], &at);
    assert_eq!(out.code, 4, "{}", out.stderr);
    assert!(out.stderr.contains("not `weft cp`"), "{}", out.stderr);

    // Nobody at all.
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let out = send(&[source.to_str().unwrap()], &format!("127.0.0.1:{free}:"));
    assert_eq!(out.code, 3, "{}", out.stderr);
    assert!(out.stderr.contains("weft cp --listen"), "{}", out.stderr);
}

#[test]
fn keys_are_proved_both_ways() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("f"), "secret").unwrap();
    for key in ["right", "wrong"] {
        Output::of(weft().args(["cp", "--gen-key", &path(key)])).ok();
        assert_eq!(fs::metadata(path(key)).unwrap().mode() & 0o777, 0o600);
    }
    let out = Output::of(weft().args(["cp", "--gen-key", &path("right")]));
    assert_eq!(out.code, 1, "an existing key is never replaced");

    // On any address but loopback it has to be said who may send.
    let to_arg = to.to_str().unwrap();
    let out = Output::of(weft().args(["cp", "--bind", "0.0.0.0:0", "--listen", to_arg]));
    assert_eq!(out.code, 2);
    assert!(
        out.stderr.contains("--key") && out.stderr.contains("--open"),
        "{}",
        out.stderr
    );

    let listener = Listener::start_on(&to, "0.0.0.0:0", &["--key", &path("right")]);
    let target = format!("127.0.0.1:{}:", listener.port());
    let out = send(&[&path("f")], &target);
    assert_eq!(out.code, 4, "{}", out.stderr);
    assert!(
        out.stderr.contains("is not known yet") && out.stderr.contains("--key FILE"),
        "{}",
        out.stderr
    );
    let out = send(&["--key", &path("wrong"), &path("f")], &target);
    assert_eq!(out.code, 4, "{}", out.stderr);
    assert!(
        out.stderr.contains("the key is not the one"),
        "{}",
        out.stderr
    );
    assert!(names(&to).is_empty());
    send(&["--key", &path("right"), &path("f")], &target).ok();
    assert_eq!(names(&to), ["f"]);

    fs::set_permissions(path("right"), fs::Permissions::from_mode(0o644)).unwrap();
    let out = send(&["--key", &path("right"), &path("f")], &target);
    assert_eq!(out.code, 2);
    assert!(out.stderr.contains("chmod 600"), "{}", out.stderr);

    // A sender that wants a proof does not send to a receiver without a key.
    let open = Listener::start_on(&to, "0.0.0.0:0", &["--open"]);
    let out = send(
        &["--key", &path("wrong"), &path("f")],
        &format!("127.0.0.1:{}:", open.port()),
    );
    assert_eq!(out.code, 4, "{}", out.stderr);
    assert!(out.stderr.contains("no key to prove"), "{}", out.stderr);
    send(&[&path("f")], &format!("127.0.0.1:{}:g", open.port())).ok();
}

#[test]
fn a_listener_names_the_key_that_it_refuses_and_only_that() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (to, admitted) = (dir.path().join("to"), dir.path().join("admitted"));
    fs::create_dir(&to).unwrap();
    fs::write(dir.path().join("f"), "x").unwrap();
    let Some(mut key) = common::unprivileged(dir.path()) else {
        return;
    };
    let key = Output::of(key.arg("key"));
    key.ok();
    let fingerprint = key.stdout.lines().nth(1).unwrap();
    let mut command = weft();
    command.stderr(Stdio::piped());
    let args = ["--authorized", admitted.to_str().unwrap()];
    let mut listener = Listener::start_with(&mut command, &to, "127.0.0.1:0", &args);
    let send = |peer: &[&str]| {
        let mut command = common::unprivileged(dir.path()).unwrap();
        command.arg("cp").args(peer).arg(dir.path().join("f"));
        Output::of(command.arg(listener.target("")))
    };
    // Without a terminal it cannot ask, and ends the connection.
    let out = send(&[]);
    assert!(out.stderr.contains("is not known yet"), "{out:?}");
    let out = send(&["--peer", listener.fingerprint()]);
    assert_eq!(out.code, 4, "{out:?}");
    fs::write(&admitted, format!("{fingerprint}\n")).unwrap();
    send(&["--peer", listener.fingerprint()]).ok();
    let stderr = listener.child.stderr.take().unwrap();
    listener.kill();
    let said = std::io::read_to_string(stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains(&format!(
            "to admit it, add the line {fingerprint} to {}",
            admitted.display()
        )),
        "{said}"
    );
}

#[test]
fn several_senders_at_once_and_one_too_many() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    let listener = Listener::start(&to, &["--max-senders", "4"]);
    let senders: Vec<_> = (0..4)
        .map(|i| {
            let path = dir.path().join(format!("f{i}"));
            fs::write(&path, noise(5_000_000, i)).unwrap();
            weft()
                .args(["cp", "-q", path.to_str().unwrap(), &listener.target("")])
                .spawn()
                .unwrap()
        })
        .collect();
    for mut sender in senders {
        assert!(sender.wait().unwrap().success());
    }
    for i in 0..4 {
        assert!(fs::read(to.join(format!("f{i}"))).unwrap() == noise(5_000_000, i));
    }

    // A sender that sits there takes the only place.
    let one = Listener::start(&to, &["--max-senders", "1"]);
    let held = common::RawSender::start(one.addr());
    let out = send(&[dir.path().join("f0").to_str().unwrap()], &one.target(""));
    assert_eq!(out.code, 3, "{}", out.stderr);
    assert!(out.stderr.contains("--max-senders"), "{}", out.stderr);
    drop(held);
    common::until("the place is free again", || {
        let out = send(&[dir.path().join("f0").to_str().unwrap()], &one.target(""));
        (out.code == 0).then_some(())
    });
}

#[test]
fn once_ends_with_the_first_senders_outcome() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    fs::write(dir.path().join("f"), "x").unwrap();
    let source = dir.path().join("f");
    let mut listener = Listener::start(&to, &["--once"]);
    // A stranger does not count.
    drop(std::net::TcpStream::connect(listener.addr()).unwrap());
    send(&[source.to_str().unwrap()], &listener.target("")).ok();
    assert_eq!(listener.wait(), Some(0));
    fs::create_dir(to.join("d")).unwrap();
    let mut listener = Listener::start(&to, &["--once"]);
    let out = send(&[source.to_str().unwrap()], &listener.target("f"));
    assert_eq!(
        out.code, 1,
        "`f` is a file, not a directory: {}",
        out.stderr
    );
    assert_eq!(listener.wait(), Some(1));
}

#[test]
fn the_summary_says_what_carried_it() {
    let (src, dst) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = src.path().join("file");
    std::fs::write(&file, [7; 5000]).unwrap();
    let listener = Listener::start(dst.path(), &[]);
    let cp = |mode: &str, options: &[&str]| {
        let out = Output::of(
            weft()
                .env("WEFT_LOCAL", mode)
                .arg("cp")
                .args(options)
                .args([file.to_str().unwrap(), &listener.target("")]),
        );
        out.ok();
        out.stdout
    };
    let text = cp("require", &[]);
    assert!(text.contains(" over shared memory, CPU"), "{text}");
    let text = cp("off", &[]);
    assert!(
        text.contains(" over TCP by TLS (") && text.contains("), CPU"),
        "{text}"
    );
    let json: serde_json::Value = serde_json::from_str(&cp("auto", &["--json"])).unwrap();
    assert_eq!(json["transport"], "local", "{json}");
    assert_eq!(json["cipher"], serde_json::Value::Null);
    assert_eq!(json["reason"], serde_json::Value::Null);
    let json: serde_json::Value = serde_json::from_str(&cp("off", &["--json"])).unwrap();
    assert_eq!(json["transport"], "tls", "{json}");
    assert!(json["cipher"].is_string(), "{json}");
}
