//! `weft cp` of many small files: packs of them, and names that are asked for in batches.

use crate::common;

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

use crate::common::{Listener, RawSender, names, send};
use weft::cp::digest::digest;
use weft::cp::link::Link;
use weft::cp::protocol::{
    Asked, Code, FileFlags, FileSpec, Held, Message, Meta, Mtime, RelPath, Version, pack,
};

#[test]
fn many_small_files_and_those_that_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("tree"), dir.path().join("to"));
    fs::create_dir(&to).unwrap();
    for d in ["a", "b", "b/c"] {
        fs::create_dir_all(from.join(d)).unwrap();
        for i in 0..150usize {
            // Across the length from which on a file goes alone.
            let len = if i % 50 == 0 { 32_700 + i } else { i * 7 };
            fs::write(from.join(d).join(format!("f{i}")), vec![i as u8; len]).unwrap();
        }
    }
    let same = |to: &std::path::Path| {
        for d in ["a", "b", "b/c"] {
            for i in 0..150 {
                let name = format!("{d}/f{i}");
                let got = fs::read(to.join("tree").join(&name)).unwrap();
                assert_eq!(got, fs::read(from.join(&name)).unwrap(), "{name}");
            }
        }
    };
    let path = from.to_str().unwrap();
    for wire in [&[][..], &["--plain-tcp"]] {
        let to = to.join(wire.len().to_string());
        fs::create_dir(&to).unwrap();
        let listener = Listener::start(&to, wire);
        let with = |more: &[&'static str]| {
            let args: Vec<_> = wire
                .iter()
                .chain(more)
                .copied()
                .chain(["-r", path])
                .collect();
            send(&args, &listener.target(""))
        };
        let out = with(&[]);
        out.ok();
        assert!(out.stdout.contains("450 files"), "{}", out.stdout);
        same(&to);
        // What is there stays as it is.
        fs::write(to.join("tree/a/f7"), "mine").unwrap();
        for gone in ["tree/b/f0", "tree/b/c/f149"] {
            fs::remove_file(to.join(gone)).unwrap();
        }
        let out = with(&["-n"]);
        out.ok();
        for part in ["2 files", "448 left alone"] {
            assert!(out.stdout.contains(part), "{}", out.stdout);
        }
        assert_eq!(fs::read(to.join("tree/a/f7")).unwrap(), b"mine");
        with(&[]).ok();
        same(&to);
    }
}

fn record(path: &str, content: &[u8]) -> Vec<u8> {
    let spec = FileSpec {
        flags: FileFlags::default(),
        meta: Meta::default(),
        size: content.len() as u64,
        room: content.len() as u64,
        source: [1; 16],
        path: RelPath::new(path.as_bytes()).unwrap(),
    };
    let mut bytes = pack::record(&spec).unwrap();
    bytes.extend(content);
    bytes
}

fn pack_of(id: u32, count: u16, bytes: &[u8]) -> Message {
    Message::Pack {
        id,
        slot: 0,
        count,
        len: bytes.len() as u32,
        digest: digest(bytes),
    }
}

/// What is said of entries, up to the answer for `last`.
fn outcomes(sender: &RawSender, last: u32) -> Vec<(u32, Code)> {
    let mut told = Vec::new();
    while told.last().is_none_or(|(id, _)| *id != last) {
        match sender.next().expect("still there") {
            Message::Packed { id, count } => {
                told.extend((id..id + u32::from(count)).map(|id| (id, Code::Written)));
            }
            Message::Result { id, code, .. } => told.push((id, code)),
            Message::Free { slot } => assert_eq!(slot, 0),
            other => panic!("{other:?}"),
        }
    }
    told
}

#[test]
fn each_file_of_a_pack_has_its_own_outcome() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("d")).unwrap();
    let listener = Listener::start(dir.path(), &[]);
    let sender = RawSender::start(listener.addr());
    let bytes = [record("a", b"one"), record("d", b"two"), record("e/f", b"")].concat();
    sender.put(&bytes, &pack_of(0, 3, &bytes));
    assert_eq!(
        outcomes(&sender, 2),
        [
            (0, Code::Written),
            (1, Code::IsDirectory),
            (2, Code::Written)
        ]
    );
    // Damaged on the way: none of them is written.
    let other = [record("x", b"one"), record("y", b"two")].concat();
    sender.put(&other, &pack_of(3, 2, &bytes[..other.len()]));
    assert_eq!(
        outcomes(&sender, 4),
        [(3, Code::Corrupt), (4, Code::Corrupt)]
    );
    let again = record("x", b"three");
    sender.put(&again, &pack_of(5, 1, &again));
    assert_eq!(outcomes(&sender, 5), [(5, Code::Written)]);
    assert_eq!(names(dir.path()), ["a", "d", "e", "x"]);
    assert_eq!(fs::read(dir.path().join("a")).unwrap(), b"one");
    assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"three");
}

#[test]
fn packs_that_lie_end_the_connection() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    symlink(dir.path(), to.join("up")).unwrap();
    let listener = Listener::start(&to, &[]);
    let good = record("good", b"content");
    let mut climbs = record("xx/f", b"");
    let at = climbs.windows(2).rposition(|w| w == b"xx").unwrap();
    climbs[at..at + 2].copy_from_slice(b"..");
    let mut long = good.clone();
    // The length of the content.
    long[16..20].copy_from_slice(&[0xff; 4]);
    let cases: [(&str, &[u8], Message); 8] = [
        (
            "cut short",
            &good[..good.len() - 1],
            pack_of(0, 1, &good[..good.len() - 1]),
        ),
        ("fewer files than it says", &good, pack_of(0, 2, &good)),
        ("no files", &good, pack_of(0, 0, &good)),
        ("too many files", &good, pack_of(0, 129, &good)),
        ("a path that climbs", &climbs, pack_of(0, 1, &climbs)),
        ("more content than there is", &long, pack_of(0, 1, &long)),
        ("out of order", &good, pack_of(1, 1, &good)),
        (
            "a slot beyond the ring",
            &good,
            Message::Pack {
                id: 0,
                slot: 63,
                count: 1,
                len: good.len() as u32,
                digest: digest(&good),
            },
        ),
    ];
    for (what, bytes, message) in cases {
        let sender = RawSender::start(listener.addr());
        sender.put(bytes, &message);
        assert!(sender.refusal().is_some(), "{what}");
    }
    // Something after the last file, and a pack in the middle of a file.
    let two = [&good[..], b"x"].concat();
    let sender = RawSender::start(listener.addr());
    sender.put(&two, &pack_of(0, 1, &two));
    assert!(sender.refusal().is_some(), "bytes behind the last file");
    let sender = RawSender::start(listener.addr());
    let spec = FileSpec {
        flags: FileFlags {
            no_wait: true,
            ..FileFlags::default()
        },
        meta: Meta::default(),
        size: 5,
        room: 5,
        source: [1; 16],
        path: RelPath::new(b"alone").unwrap(),
    };
    sender.link.send(&Message::File { id: 0, spec }).unwrap();
    sender.put(&good, &pack_of(1, 1, &good));
    assert!(sender.refusal().is_some(), "in the middle of a file");
    // No symbolic link is followed out of the directory.
    let out = record("up/escaped", b"x");
    let sender = RawSender::start(listener.addr());
    sender.put(&out, &pack_of(0, 1, &out));
    assert_eq!(outcomes(&sender, 0), [(0, Code::NotDirectory)]);
    assert_eq!(names(dir.path()), ["to"]);
    let there = names(&to);
    assert!(there == ["up"] || there == ["good", "up"], "{there:?}");
}

#[test]
fn names_are_looked_for_and_nothing_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir_all(to.join("d")).unwrap();
    fs::write(to.join("d/there"), "x").unwrap();
    fs::write(dir.path().join("outside"), "x").unwrap();
    symlink("nowhere", to.join("link")).unwrap();
    symlink("..", to.join("up")).unwrap();
    let listener = Listener::start(&to, &[]);
    let sender = RawSender::start(listener.addr());
    let meta = fs::metadata(to.join("d/there")).unwrap();
    let version = |size| {
        let (secs, nanos) = (meta.mtime(), meta.mtime_nsec() as u32);
        let mtime = Mtime { secs, nanos };
        Some(Version { size, mtime })
    };
    let expected = [
        ("d/there", None, Held::Other),
        ("d/missing", None, Held::Nothing),
        ("d", None, Held::Directory),
        ("new/missing", None, Held::Nothing),
        ("link", None, Held::Other),
        ("up/outside", None, Held::Nothing),
        ("d/there/f", None, Held::Nothing),
        ("d/there", version(1), Held::Same),
        ("d/there", version(2), Held::Other),
        ("link/f", None, Held::Nothing),
    ];
    let asked = expected.map(|(path, version, _)| {
        let path = RelPath::new(path.as_bytes()).unwrap();
        Asked { path, version }
    });
    let names = asked.to_vec();
    sender.link.send(&Message::Ask { names }).unwrap();
    let Some(Message::Held { held }) = sender.next() else {
        panic!("no answer")
    };
    assert_eq!(held, expected.map(|(_, _, held)| held));
    assert_eq!(common::names(&to), ["d", "link", "up"]);
}
