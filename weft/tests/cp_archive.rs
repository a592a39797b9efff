//! `weft cp --archive`: owners, special mode bits, extended attributes and hard links.

use crate::common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::common::{Listener, Output, RawSender, noise, send};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use weft::cp::digest::BlockList;
use weft::cp::link::Link;
use weft::cp::protocol::{
    Attributes, Code, FileFlags, FileSpec, Message, Meta, Mtime, RelPath, Xattr,
};

/// `u::rw-,u:4321:r--,g::r--,m::r--,o::---`, as the kernel writes it.
const ACL: [u8; 44] = [
    2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 0xe1, 0x10, 0, 0, 4, 0, 4, 0, 255, 255,
    255, 255, 16, 0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
];

fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 1000];
    let len = getxattr(path, name, &mut value).ok()?;
    value.truncate(len);
    Some(value)
}

/// A tree with one of everything. It belongs to others if that is possible.
fn tree(at: &Path) {
    fs::create_dir_all(at.join("d")).unwrap();
    let file = |name: &str, len, mode| {
        fs::write(at.join(name), noise(len, 1)).unwrap();
        if rustix::process::geteuid().is_root() {
            chown(at.join(name), Some(1234), Some(2345)).unwrap();
        }
        fs::set_permissions(at.join(name), fs::Permissions::from_mode(mode)).unwrap();
    };
    file("setuid", 100, 0o4755);
    file("large", 2 << 20, 0o2711);
    file("acl", 100, 0o640);
    setxattr(
        at.join("acl"),
        "system.posix_acl_access",
        &ACL,
        XattrFlags::empty(),
    )
    .unwrap();
    setxattr(at.join("acl"), "user.color", b"red", XattrFlags::empty()).unwrap();
    setxattr(at.join("d"), "user.color", b"blue", XattrFlags::empty()).unwrap();
    for name in ["d/again", "d/zlast"] {
        fs::hard_link(at.join("setuid"), at.join(name)).unwrap();
    }
    fs::hard_link(at.join("large"), at.join("larger")).unwrap();
    symlink("large", at.join("link")).unwrap();
    if rustix::process::geteuid().is_root() {
        lchown(at.join("link"), Some(1234), Some(2345)).unwrap();
    }
    let fifo = rustix::fs::FileType::Fifo;
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mknodat(rustix::fs::CWD, at.join("fifo"), fifo, mode, 0).unwrap();
    fs::set_permissions(at.join("d"), fs::Permissions::from_mode(0o1777)).unwrap();
    let then = SystemTime::UNIX_EPOCH + Duration::new(1_234_567_890, 123_456_789);
    fs::File::open(at.join("d"))
        .unwrap()
        .set_modified(then)
        .unwrap();
}

/// Whether the tests' folder can hold all this; without root nobody else can own files.
fn possible(dir: &Path) -> bool {
    let probe = dir.join("probe");
    fs::write(&probe, "x").unwrap();
    let root = rustix::process::geteuid().is_root();
    let possible = root && setxattr(&probe, "user.x", b"x", XattrFlags::empty()).is_ok();
    if !possible {
        println!("skipped: needs root, and extended attributes in the temporary folder");
    }
    possible
}

fn mode_of(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn an_archive_has_what_its_source_has() {
    let dir = tempfile::tempdir().unwrap();
    if !possible(dir.path()) {
        return;
    }
    let (from, to) = (dir.path().join("tree"), dir.path().join("to"));
    fs::create_dir(&to).unwrap();
    tree(&from);
    for wire in [&[][..], &["--plain-tcp"]] {
        let listener = Listener::start(&to, &[wire, &["--attributes"]].concat());
        // The second time everything is replaced.
        for _ in 0..2 {
            let args = [wire, &["-a", from.to_str().unwrap()]].concat();
            let out = send(&args, &listener.target(""));
            out.ok();
            assert!(
                out.stdout.contains("7 files, ") && out.stdout.contains("; 1 left out"),
                "{out:?}"
            );
            assert!(!out.stdout.contains("without"), "{out:?}");
        }
        let got = to.join("tree");
        for name in ["setuid", "large", "acl", "d", "d/again", "link"] {
            let [a, b] = [&from, &got].map(|dir| fs::symlink_metadata(dir.join(name)).unwrap());
            let of = |m: &fs::Metadata| {
                (
                    m.mode(),
                    m.uid(),
                    m.gid(),
                    m.nlink(),
                    m.mtime(),
                    m.mtime_nsec(),
                )
            };
            assert_eq!(of(&a), of(&b), "{name}");
            for attribute in ["user.color", "system.posix_acl_access"] {
                let [a, b] = [&from, &got].map(|dir| xattr(&dir.join(name), attribute));
                assert_eq!(a, b, "{name} {attribute}");
            }
        }
        let inode = |name| fs::metadata(got.join(name)).unwrap().ino();
        assert_eq!(inode("setuid"), inode("d/zlast"));
        assert_eq!(inode("large"), inode("larger"));
        assert!(fs::read(got.join("larger")).unwrap() == noise(2 << 20, 1));
        assert_eq!(
            common::names(&got),
            ["acl", "d", "large", "larger", "link", "setuid"]
        );
    }
    // An update after a change of one name leaves the other files' names as they are.
    let listener = Listener::start(&to, &["--attributes"]);
    fs::write(from.join("acl"), "changed").unwrap();
    fs::remove_file(to.join("tree/larger")).unwrap();
    let out = send(&["-au", from.to_str().unwrap()], &listener.target(""));
    out.ok();
    assert!(out.stdout.contains("; 4 left alone"), "{out:?}");
    assert_eq!(fs::metadata(to.join("tree/large")).unwrap().nlink(), 2);
}

#[test]
fn a_listener_without_the_option_or_the_right_keeps_no_owner_and_no_special_bits() {
    let dir = tempfile::tempdir().unwrap();
    if !possible(dir.path()) {
        return;
    }
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (from, to) = (dir.path().join("tree"), dir.path().join("to"));
    fs::create_dir(&to).unwrap();
    tree(&from);
    let listener = Listener::start(&to, &[]);
    let out = send(&["-a", from.to_str().unwrap()], &listener.target(""));
    out.ok();
    assert!(out.stderr.contains("start it with --attributes"), "{out:?}");
    assert!(out.stdout.contains("; 4 without all attributes"), "{out:?}");
    let meta = fs::metadata(to.join("tree/setuid")).unwrap();
    assert_eq!(
        (meta.mode() & 0o7777, meta.uid(), meta.nlink()),
        (0o755, 0, 3)
    );
    assert_eq!(xattr(&to.join("tree/acl"), "user.color"), None);

    // With the option, and as a user who cannot give files away.
    let to = dir.path().join("theirs");
    fs::create_dir(&to).unwrap();
    chown(&to, Some(4321), Some(4321)).unwrap();
    let mut command = common::as_user(dir.path(), 4321).unwrap();
    let args = ["--open", "--attributes"];
    let listener = Listener::start_with(&mut command, &to, "127.0.0.1:0", &args);
    let args = [
        "--peer",
        listener.fingerprint(),
        "-a",
        from.to_str().unwrap(),
    ];
    let out = send(&args, &listener.target(""));
    out.ok();
    // Three files, the directories and the link.
    assert!(out.stdout.contains("; 6 without all attributes"), "{out:?}");
    let meta = fs::metadata(to.join("tree/setuid")).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.uid()), (0o755, 4321));
    assert_eq!(mode_of(&to.join("tree/large")), 0o711);
    assert_eq!(mode_of(&to.join("tree/d")), 0o1777);
    assert_eq!(xattr(&to.join("tree/acl"), "user.color").unwrap(), b"red");
}

#[test]
fn links_that_are_refused_are_some_of_all() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("tree"), dir.path().join("to"));
    fs::create_dir(&from).unwrap();
    fs::create_dir(&to).unwrap();
    fs::write(from.join("a"), "file").unwrap();
    symlink("a", from.join("within")).unwrap();
    symlink("/etc/passwd", from.join("out")).unwrap();
    let listener = Listener::start(&to, &[]);
    let out = send(
        &["-r", "--links", from.to_str().unwrap()],
        &listener.target(""),
    );
    assert!(out.stdout.starts_with("2 files"), "{out:?}");
    assert!(out.stderr.contains("1 of 3 could not be sent"), "{out:?}");
}

#[test]
fn attributes_that_nobody_asked_for_are_not_given() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    let meta = |name: &str| Meta {
        mode: 0o7755,
        mtime: Mtime::default(),
        attributes: Some(Attributes {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            xattrs: vec![Xattr {
                name: name.into(),
                value: b"x".to_vec(),
            }],
        }),
    };
    let file = |listener: &Listener, name: &str, left: &str| {
        let sender = RawSender::start(listener.addr());
        let flags = FileFlags {
            no_wait: true,
            ..FileFlags::default()
        };
        let path = RelPath::new(b"f").unwrap();
        let spec = FileSpec {
            flags,
            meta: meta(name),
            size: 0,
            room: 0,
            source: [1; 16],
            path,
        };
        sender.link.send(&Message::File { id: 0, spec }).unwrap();
        let digest = BlockList::default().complete(0);
        sender.link.send(&Message::End { id: 0, digest }).unwrap();
        let Some(Message::Result { code, text, .. }) = sender.next() else {
            panic!("no result")
        };
        assert_eq!((code, text.contains(left)), (Code::Partly, true), "{text}");
    };
    file(
        &Listener::start(&to, &[]),
        "user.x",
        "the owner; set-user-ID",
    );
    assert_eq!(mode_of(&to.join("f")), 0o755);
    assert_eq!(xattr(&to.join("f"), "user.x"), None);
    // Names that no file has, and that would mean something to others.
    let listener = Listener::start(&to, &["--attributes"]);
    for name in ["system.nfs4_acl", "weft", "security.selinux"] {
        file(&listener, name, "not kept: extended attributes: 1");
    }
    let out = Output::of(common::weft().args(["cp", "--attributes", "f", "localhost:"]));
    assert_eq!(out.code, 2, "an option of listeners: {out:?}");
}
