//! Senders that do not play by the rules, against the real receiver.

use crate::common;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::Duration;

use crate::common::{Listener, Output, RawSender, names, send, weft};
use weft::cp::digest::{BlockList, digest};
use weft::cp::link::Link;
use weft::cp::protocol::{
    Code, FileFlags, FileSpec, Hello, MAX_PATH, Message, Meta, RelPath, RingAdvert, Status,
    VERSION, WINDOW,
};
use weft_verbs::cm::{self, ConnParam, ConnectError};
use weft_verbs::{Device, QpInit};

fn spec(path: &str, size: u64, no_wait: bool) -> FileSpec {
    let path = RelPath::new(path.as_bytes()).unwrap();
    let flags = FileFlags {
        no_wait,
        ..FileFlags::default()
    };
    FileSpec {
        flags,
        meta: Meta {
            mode: 0o644,
            ..Meta::default()
        },
        size,
        room: size,
        source: [1; 16],
        path,
    }
}

fn file(id: u32, path: &str, size: u64) -> Message {
    Message::File {
        id,
        spec: spec(path, size, true),
    }
}

/// The bytes of a message whose path the codec would refuse to build: every byte of `placeholder` is
/// replaced by `path`, which has the same length.
fn with_path(message: &Message, placeholder: &str, path: &str) -> Vec<u8> {
    assert_eq!(placeholder.len(), path.len());
    let mut bytes = Vec::new();
    message.encode(0, &mut bytes);
    let at = bytes
        .windows(placeholder.len())
        .rposition(|w| w == placeholder.as_bytes())
        .unwrap();
    bytes[at..at + path.len()].copy_from_slice(path.as_bytes());
    bytes
}

/// Sends raw bytes as one message over a connection of its own, after a proper start; true if the receiver
/// ended the connection.
fn raw(listener: &Listener, bytes: &[u8]) -> bool {
    let mut stream = TcpStream::connect(listener.addr()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let hello = Hello {
        version: VERSION,
        status: Status::Ok,
        key: false,
        nonce: [1; 32],
    };
    stream.write_all(&hello.encode()).unwrap();
    let mut start = Vec::new();
    Message::Start {
        receives: 64,
        fetches: false,
        proof: [0; 32],
    }
    .encode(0, &mut start);
    stream.write_all(&start).unwrap();
    stream.write_all(bytes).unwrap();
    // Until the end: the receiver's hello, READY, a refusal.
    stream.read_to_end(&mut Vec::new()).is_ok()
}

#[test]
fn paths_that_lead_out_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (to, outside) = (dir.path().join("to"), dir.path().join("outside"));
    fs::create_dir(&to).unwrap();
    fs::create_dir(&outside).unwrap();
    symlink(&outside, to.join("link")).unwrap();
    symlink(outside.join("new"), to.join("dangling")).unwrap();

    // Paths that the codec cannot even express, byte by byte over the plain wire.
    let plain = Listener::start(&to, &["--plain-tcp"]);
    for (placeholder, path) in [
        ("xx/outside/f", "../outside/f"),
        ("x/xx/xx/outside/f", "x/../../outside/f"),
        ("xtmp/weft-escape", "/tmp/weft-escape"),
        ("x/outside/f", "./outside/f"),
        ("xx", ".."),
        ("x", "/"),
    ] {
        assert!(
            raw(
                &plain,
                &with_path(&file(0, placeholder, 0), placeholder, path)
            ),
            "{path}"
        );
        let mkdir = Message::Directory {
            id: 0,
            leave: false,
            meta: Meta::default(),
            path: RelPath::new(placeholder.as_bytes()).unwrap(),
        };
        assert!(raw(&plain, &with_path(&mkdir, placeholder, path)), "{path}");
    }
    let nul = with_path(&file(0, "abc", 0), "abc", "a\0c");
    assert!(raw(&plain, &nul));

    // Links that the sender makes: those that lead out are refused.
    let listener = Listener::start(&to, &[]);
    let sender = RawSender::start(listener.addr());
    let targets = [
        ("mine", "../outside", Code::LinkOut),
        ("mine", "/etc/passwd", Code::LinkOut),
        ("d/mine", "../../outside", Code::LinkOut),
        // Through a link to elsewhere `..` leads elsewhere too.
        ("d/mine", "up/../../outside", Code::LinkOut),
        ("d/mine", "../link/f", Code::Written),
        ("d/mine", "./../mine/.x/", Code::Written),
        ("mine", "d", Code::Written),
    ];
    let mut expected = Vec::new();
    for (id, (path, target, code)) in (0..).zip(targets) {
        let (path, target) = (RelPath::new(path.as_bytes()).unwrap(), target.into());
        let flags = FileFlags::default();
        let link = Message::Link {
            id,
            flags,
            meta: Meta::default(),
            target,
            path,
        };
        sender.link.send(&link).unwrap();
        expected.push(code);
    }
    // None of those that are there is followed.
    for (id, path, code) in [
        (7, "link/f", Code::NotDirectory),
        (8, "mine/f", Code::NotDirectory),
        (9, "dangling", Code::Written),
    ] {
        sender.link.send(&file(id, path, 0)).unwrap();
        let digest = BlockList::default().complete(0);
        sender.link.send(&Message::End { id, digest }).unwrap();
        expected.push(code);
    }
    let mut codes = Vec::new();
    while codes.len() < expected.len() {
        if let Message::Result { code, .. } = sender.next().unwrap() {
            codes.push(code);
        }
    }
    assert_eq!(codes, expected);
    assert!(names(&outside).is_empty(), "{:?}", names(&outside));
    assert!(
        to.join("dangling").symlink_metadata().unwrap().is_file(),
        "the link itself was replaced"
    );
    assert!(!std::path::Path::new("/tmp/weft-escape").exists());
}

/// Whoever runs the program of that user may write into the directory; anybody else on the host needs a key.
#[test]
fn another_user_of_the_host_is_not_let_in_without_a_key() {
    let dir = tempfile::tempdir().unwrap();
    let open_to_all = |path: &std::path::Path, mode| {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    open_to_all(dir.path(), 0o755);
    let (to, source) = (dir.path().join("to"), dir.path().join("f"));
    fs::create_dir(&to).unwrap();
    open_to_all(&to, 0o777);
    fs::write(&source, "x").unwrap();
    let Some(_) = common::unprivileged(dir.path()) else {
        return;
    };
    let stranger = || common::unprivileged(dir.path()).unwrap();
    let cp = |command: &mut Command, wire: &[&str], target: &str| {
        Output::of(command.arg("cp").args(wire).arg(&source).arg(target))
    };
    for wire in [&[][..], &["--plain-tcp"]] {
        for bind in ["127.0.0.1:0", "[::1]:0"] {
            if TcpListener::bind(bind).is_err() {
                println!("skipped: no {bind} here");
                continue;
            }
            // Root listens; then root is the stranger. Neither is told apart by shared memory alone.
            let root = Listener::start_on(&to, bind, wire);
            let user = Listener::start_with(&mut stranger(), &to, bind, wire);
            for (listener, mut sender) in [(&root, stranger()), (&user, weft())] {
                let known = ["--peer", listener.fingerprint()];
                let wire = [wire, if wire.is_empty() { &known } else { &[] }].concat();
                let wire = &wire[..];
                let out = cp(&mut sender, wire, &listener.target("stranger"));
                assert_eq!(out.code, 4, "{wire:?} {bind}: {out:?}");
                assert!(out.stderr.contains("only from its own user"), "{out:?}");
            }
            for (listener, mut sender) in [(&root, weft()), (&user, stranger())] {
                sender.env("WEFT_LOCAL", "off");
                cp(&mut sender, wire, &listener.target("own")).ok();
                fs::remove_dir_all(to.join("own")).unwrap();
            }
            assert!(names(&to).is_empty(), "{:?}", names(&to));
        }
    }
    // Every user that a user namespace does not know has this number: it is nobody's own.
    let nobody = || common::as_user(dir.path(), 65_534).unwrap();
    let listener = Listener::start_with(&mut nobody(), &to, "127.0.0.1:0", &[]);
    let peer = ["--peer", listener.fingerprint()];
    let out = cp(&mut nobody(), &peer, &listener.target(""));
    assert_eq!(out.code, 4, "{out:?}");
    assert!(out.stderr.contains("only from its own user"), "{out:?}");
    assert!(names(&to).is_empty(), "{:?}", names(&to));

    let open = Listener::start(&to, &["--open"]);
    let peer = ["--peer", open.fingerprint()];
    cp(&mut stranger(), &peer, &open.target("")).ok();
    assert_eq!(names(&to), ["f"]);
}

#[test]
fn messages_that_break_the_protocol_end_the_connection_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    fs::write(dir.path().join("good"), "good").unwrap();
    let listener = Listener::start(&to, &[]);
    let bystander = RawSender::start(listener.addr());
    bystander.link.send(&file(0, "bystander", 3)).unwrap();

    let block = |id, slot, index, len| Message::Block {
        id,
        slot,
        index,
        len,
        digest: [0; 16],
    };
    let waiting = Message::File {
        id: 0,
        spec: spec("w", 5 << 20, false),
    };
    let end = |id| Message::End {
        id,
        digest: [0; 16],
    };
    let cases: Vec<(&str, Vec<Message>)> = vec![
        ("a block of nothing", vec![block(0, 0, 0, 1)]),
        ("the end of nothing", vec![end(0)]),
        (
            "FROM without an offer",
            vec![Message::From { id: 0, block: 0 }],
        ),
        ("an entry out of order", vec![file(1, "a", 0)]),
        (
            "a second file before the end of the first",
            vec![file(0, "a", 0), file(1, "b", 0)],
        ),
        ("a big file that does not wait", vec![file(0, "a", 2 << 20)]),
        (
            "a slot beyond the ring",
            vec![file(0, "a", 5), block(0, 16, 0, 5)],
        ),
        (
            "a block longer than the file",
            vec![file(0, "a", 5), block(0, 0, 0, 6)],
        ),
        (
            "a block longer than a slot",
            vec![file(0, "a", 5), block(0, 0, 0, 2 << 20)],
        ),
        ("a block too many", vec![file(0, "a", 5), block(0, 0, 1, 5)]),
        (
            "a block of another file",
            vec![file(0, "a", 5), block(7, 0, 0, 5)],
        ),
        (
            "FROM beyond the offer",
            vec![waiting.clone(), Message::From { id: 0, block: 3 }],
        ),
        (
            "a block before FROM",
            vec![waiting, block(0, 0, 0, 1 << 20)],
        ),
        ("what only a receiver says", vec![Message::Free { slot: 0 }]),
        (
            "START again",
            vec![Message::Start {
                receives: 64,
                fetches: false,
                proof: [0; 32],
            }],
        ),
        (
            "more after DONE",
            vec![Message::Done { cpu_us: 0 }, file(0, "a", 0)],
        ),
        (
            "DONE in the middle",
            vec![file(0, "a", 5), Message::Done { cpu_us: 0 }],
        ),
    ];
    for (what, messages) in cases {
        let sender = RawSender::start(listener.addr());
        for message in &messages {
            if sender.link.send(message).is_err() {
                break;
            }
        }
        assert!(
            sender.refusal().is_some(),
            "{what}: refused, and not in silence"
        );
    }

    // More entries than the window, which a file in the middle keeps open.
    let sender = RawSender::start(listener.addr());
    sender
        .link
        .send(&Message::File {
            id: 0,
            spec: spec("w", 5 << 20, false),
        })
        .unwrap();
    for id in 1..=WINDOW as u32 + 1 {
        if sender.link.send(&file(id, "x", 0)).is_err() {
            break;
        }
    }
    while sender.next().is_some() {}

    // The bystander's file comes in as if nothing had been.
    let d = digest(b"abc");
    bystander.put(
        b"abc",
        &Message::Block {
            id: 0,
            slot: 0,
            index: 0,
            len: 3,
            digest: d,
        },
    );
    let mut list = BlockList::default();
    list.push(&d);
    bystander
        .link
        .send(&Message::End {
            id: 0,
            digest: list.complete(3),
        })
        .unwrap();
    loop {
        match bystander.next().expect("still there") {
            Message::Result { code, .. } => break assert_eq!(code, Code::Written),
            Message::Free { slot } => assert_eq!(slot, 0),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(fs::read(to.join("bystander")).unwrap(), b"abc");
    send(
        &[dir.path().join("good").to_str().unwrap()],
        &listener.target(""),
    )
    .ok();
    assert_eq!(
        names(&to),
        ["bystander", "good"],
        "nothing of the others is left"
    );
}

#[test]
fn a_block_that_does_not_match_its_checksum_fails_its_file_only() {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::start(dir.path(), &[]);
    let sender = RawSender::start(listener.addr());
    sender.link.send(&file(0, "bad", 5)).unwrap();
    sender.put(
        b"wrong",
        &Message::Block {
            id: 0,
            slot: 0,
            index: 0,
            len: 5,
            digest: digest(b"right"),
        },
    );
    sender
        .link
        .send(&Message::End {
            id: 0,
            digest: [0; 16],
        })
        .unwrap();
    sender.link.send(&file(1, "good", 0)).unwrap();
    sender
        .link
        .send(&Message::End {
            id: 1,
            digest: BlockList::default().complete(0),
        })
        .unwrap();
    let mut codes = Vec::new();
    while codes.len() < 2 {
        if let Message::Result { code, .. } = sender.next().unwrap() {
            codes.push(code);
        }
    }
    assert_eq!(codes, [Code::Corrupt, Code::Written]);
    assert_eq!(names(dir.path()), ["good"]);
}

/// A sender can write to a slot while its block is checked and written.
#[test]
fn what_is_written_is_what_was_checked() {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::start(dir.path(), &[]);
    let sender = RawSender::start(listener.addr());
    let len = sender.ring.slot_len;
    let (right, wrong) = (vec![b'r'; len as usize], vec![b'w'; len as usize]);
    let right_digest = digest(&right);
    let mut list = BlockList::default();
    list.push(&right_digest);
    let complete = list.complete(len.into());
    let (mut written, mut corrupt) = (0, 0);
    for id in 0..300 {
        sender.link.send(&file(id, "f", len.into())).unwrap();
        let block = Message::Block {
            id,
            slot: 0,
            index: 0,
            len,
            digest: right_digest,
        };
        sender.put(&right, &block);
        // Somewhere between the first look at the slot and the last.
        let began = std::time::Instant::now();
        while began.elapsed() < Duration::from_micros(u64::from(id % 100) * 12) {
            std::hint::spin_loop();
        }
        if id % 100 < 99 {
            sender.put(&wrong, &Message::Credit);
        }
        let digest = complete;
        sender.link.send(&Message::End { id, digest }).unwrap();
        let (mut code, mut free) = (None, false);
        while code.is_none() || !free {
            match sender.next().unwrap() {
                Message::Result { code: told, .. } => code = Some(told),
                other => free |= matches!(other, Message::Free { slot: 0 }),
            }
        }
        if code == Some(Code::Written) {
            let got = fs::read(dir.path().join("f")).unwrap();
            let wrong = got.iter().filter(|&&byte| byte != b'r').count();
            assert_eq!(wrong, 0, "round {id}: bytes that no checksum covers");
            written += 1;
        } else {
            assert_eq!(code, Some(Code::Corrupt));
            corrupt += 1;
        }
    }
    println!("{written} written, {corrupt} corrupt");
    assert!(written > 0);
}

#[test]
fn one_senders_ring_is_of_no_use_to_another_and_has_bounds() {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::start(dir.path(), &[]);
    let victim = RawSender::start(listener.addr());
    victim.link.send(&file(0, "f", 4)).unwrap();

    // The number of the victim's ring, and an address past the end of one's own.
    let stolen = victim.ring;
    let other = RawSender::start_with(listener.addr(), |_| stolen);
    other.put(b"yours", &Message::Credit);
    assert!(other.next().is_none(), "the connection has ended");
    let length = u64::from(victim.ring.slots) * u64::from(victim.ring.slot_len);
    let over = RawSender::start_with(listener.addr(), |ring| RingAdvert {
        addr: ring.addr + length - 2,
        ..ring
    });
    over.put(b"yours", &Message::Credit);
    assert!(over.next().is_none(), "the connection has ended");

    let d = digest(b"mine");
    victim.put(
        b"mine",
        &Message::Block {
            id: 0,
            slot: 0,
            index: 0,
            len: 4,
            digest: d,
        },
    );
    let mut list = BlockList::default();
    list.push(&d);
    victim
        .link
        .send(&Message::End {
            id: 0,
            digest: list.complete(4),
        })
        .unwrap();
    while !matches!(
        victim.next().unwrap(),
        Message::Result {
            code: Code::Written,
            ..
        }
    ) {}
    assert_eq!(fs::read(dir.path().join("f")).unwrap(), b"mine");
}

#[test]
fn strangers_and_silent_peers_are_shown_the_door() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    let listener = Listener::start(&to, &["--max-senders", "2"]);
    // HTTP, nothing at all, and half a start-up frame.
    let strangers: Vec<_> = [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        b"",
        b"MPA ID Req",
    ]
    .into_iter()
    .cycle()
    .take(30)
    .map(|bytes| {
        let mut stream = TcpStream::connect(listener.addr()).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    })
    .collect();
    // They do not take the places of senders.
    fs::write(dir.path().join("f"), "x").unwrap();
    send(
        &[dir.path().join("f").to_str().unwrap()],
        &listener.target(""),
    )
    .ok();
    drop(strangers);

    // A hello of another version, and one that is none, are rejected with our version.
    let device = Device::open().unwrap();
    for hello in [
        Hello {
            version: 77,
            status: Status::Ok,
            key: false,
            nonce: [0; 32],
        }
        .encode()
        .to_vec(),
        b"NFS/RDMA".to_vec(),
        Vec::new(),
    ] {
        let (pd, cq) = (
            device.alloc_pd().unwrap(),
            device.create_cq(4, None).unwrap(),
        );
        let param = ConnParam {
            private_data: hello,
            tls: Some(common::tls()),
            ..ConnParam::default()
        };
        let refused = cm::connect(listener.addr(), &pd, &QpInit::new(&cq, &cq), &param).err();
        let Some(ConnectError::Rejected { private_data }) = refused else {
            panic!("{refused:?}")
        };
        let theirs = Hello::decode(&private_data).unwrap();
        assert_eq!((theirs.version, theirs.status), (VERSION, Status::Version));
    }
}

/// Only who has proved what is asked for takes a place, and who is silent makes room for others.
#[test]
fn unproved_connections_keep_nobody_out() {
    let dir = tempfile::tempdir().unwrap();
    let (to, f) = (dir.path().join("to"), dir.path().join("f"));
    fs::create_dir(&to).unwrap();
    fs::write(&f, "x").unwrap();
    let listener = Listener::start(&to, &["--max-senders", "2"]);
    let silent: Vec<_> = (0..20).map(|_| common::dial(listener.addr())).collect();
    send(&[f.to_str().unwrap()], &listener.target("")).ok();
    // The oldest had to go, each at the coming of one more than an address may have.
    for link in &silent[..10] {
        assert!(link.recv(Duration::from_secs(20)).is_err());
    }
    let newest = silent.last().unwrap();
    assert_eq!(newest.recv(Duration::ZERO).unwrap(), None, "still there");

    // The same before the hello, where there is no start-up that the library guards.
    let plain = Listener::start(&to, &["--plain-tcp", "--max-senders", "2"]);
    let silent: Vec<_> = (0..20)
        .map(|_| TcpStream::connect(plain.addr()).unwrap())
        .collect();
    let source = f.to_str().unwrap();
    send(&["--plain-tcp", source], &plain.target("")).ok();
    let mut oldest = &silent[0];
    oldest
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    assert_eq!(oldest.read(&mut [0]).unwrap(), 0, "closed");
}

#[test]
fn longest_paths_travel() {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::start(dir.path(), &[]);
    let sender = RawSender::start(listener.addr());
    let long = "d/".repeat(200) + &"n".repeat(255);
    assert!(long.len() > 600 && long.len() < MAX_PATH);
    sender.link.send(&file(0, &long, 0)).unwrap();
    sender
        .link
        .send(&Message::End {
            id: 0,
            digest: BlockList::default().complete(0),
        })
        .unwrap();
    let Some(Message::Result { code, text, .. }) = sender.next() else {
        panic!("no result")
    };
    assert_eq!(code, Code::Written, "{text}");
    let target = vec![b't'; MAX_PATH - 100];
    let path = RelPath::new(b"link").unwrap();
    sender
        .link
        .send(&Message::Link {
            id: 1,
            flags: FileFlags::default(),
            meta: Meta::default(),
            target: target.clone(),
            path,
        })
        .unwrap();
    let Some(Message::Result { code, text, .. }) = sender.next() else {
        panic!("no result")
    };
    assert_eq!(code, Code::Written, "{text}");
    assert_eq!(
        fs::read_link(dir.path().join("link"))
            .unwrap()
            .as_os_str()
            .len(),
        target.len()
    );
}
