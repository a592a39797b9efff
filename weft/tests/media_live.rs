//! `weft media live`: streams made by ffmpeg, late and slow viewers, a writer that is killed.

use crate::common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::common::media::{Server, framemd5, have, make_movie, play};
use crate::common::{until, weft};
use weft_media::client::{Dial, OpenError, Viewer};
use weft_media::watch::{Event, From, Watch};
use weft_media::wire::{Refusal, Request, Slot};
use weft_verbs::Device;

const PATIENCE: Duration = Duration::from_secs(30);
const FRAGMENTED: &[&str] = &[
    "-movflags",
    "+frag_keyframe+empty_moov+default_base_moof",
    "-f",
    "mp4",
];

/// A child that is killed on drop.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `weft media live`, and where its input goes.
fn live(args: &[&str]) -> (Server, std::process::ChildStdin) {
    let mut command = weft();
    command
        .args(["media", "live", "--bind", "127.0.0.1:0", "cam"])
        .args(args)
        .stdin(Stdio::piped());
    if !args.contains(&"--linger") {
        // Longer than any load: it ends with its viewers, or is killed.
        command.args(["--linger", "120"]);
    }
    let mut server = Server::of(&mut command);
    let stdin = server.child().stdin.take().unwrap();
    (server, stdin)
}

fn open(device: &Device, dial: &Dial) -> Result<Viewer, OpenError> {
    Viewer::open(device, dial, &Request::Title("cam".into()))
}

/// A watcher, as soon as the stream has begun.
fn watch(device: &Device, server: &Server, from: From) -> Watch {
    let viewer = until("the stream", || match open(device, &server.dial()) {
        Ok(viewer) => Some(viewer),
        Err(OpenError::Refused(Refusal::NotYet)) => None,
        Err(e) => panic!("{e}"),
    });
    Watch::new(viewer, from).unwrap()
}

fn frames(path: &Path) -> Vec<String> {
    framemd5(path)
        .lines()
        .filter(|l| !l.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

#[test]
fn what_comes_out_is_what_went_in() {
    let dir = tempfile::tempdir().unwrap();
    for (name, args) in [("a.mp4", FRAGMENTED), ("a.ts", &["-f", "mpegts"][..])] {
        let Some(file) = make_movie(dir.path(), name, args, 3) else {
            return;
        };
        for local in ["auto", "off"] {
            let (server, mut stdin) = live(&[]);
            let bytes = fs::read(&file).unwrap();
            // The first half is there before the viewer comes, the rest follows, in odd pieces.
            let (first, rest) = bytes.split_at(bytes.len() / 2);
            stdin.write_all(first).unwrap();
            let copy = dir.path().join(format!("copy-{name}"));
            let mut viewer = Guard(
                weft()
                    .args([
                        "media",
                        "play",
                        "--oldest",
                        "--retry",
                        "30",
                        &server.url("cam"),
                    ])
                    .env("WEFT_LOCAL", local)
                    .stdout(File::create(&copy).unwrap())
                    .spawn()
                    .unwrap(),
            );
            until("the first bytes", || {
                fs::metadata(&copy).ok().filter(|m| m.len() > 10_000)
            });
            for piece in rest.chunks(7777) {
                stdin.write_all(piece).unwrap();
            }
            drop(stdin);
            assert!(viewer.0.wait().unwrap().success());
            assert_eq!(frames(&copy), frames(&file), "{name}");
            assert!(frames(&file).len() > 70);
        }
    }
}

#[test]
fn a_late_viewer_begins_with_the_newest_key_frame() {
    let dir = tempfile::tempdir().unwrap();
    let Some(file) = make_movie(dir.path(), "a.mp4", FRAGMENTED, 4) else {
        return;
    };
    let (server, mut stdin) = live(&[]);
    stdin.write_all(&fs::read(&file).unwrap()).unwrap();
    let device = Device::open().unwrap();
    let mut oldest = watch(&device, &server, From::Oldest);
    // 100 frames, a key frame each ten: ffmpeg puts the frames of each into a fragment.
    let mut seen = Vec::new();
    while seen.len() < 10 {
        match oldest.next(PATIENCE).unwrap() {
            Some(Event::Fragment { slot, .. }) => seen.push(slot),
            other => panic!("{other:?}"),
        }
    }
    let order: Vec<_> = seen.iter().map(Slot::sequence).collect();
    assert_eq!(order, (0..10).collect::<Vec<_>>());
    assert!(seen.iter().all(|s| s.key));
    assert!(seen.windows(2).all(|w| w[0].time < w[1].time), "{seen:?}");
    let mut newest = watch(&device, &server, From::Newest);
    let init = newest.init().unwrap();
    assert_eq!(&init[4..8], b"ftyp");
    let Some(Event::Fragment { slot, bytes, .. }) = newest.next(PATIENCE).unwrap() else {
        panic!("no fragment");
    };
    assert_eq!(slot.sequence(), 9);
    let alone = dir.path().join("alone.mp4");
    fs::write(&alone, [init, bytes].concat()).unwrap();
    let pictures = frames(&alone)
        .into_iter()
        .filter(|l| l.starts_with('0'))
        .count();
    assert_eq!(pictures, 10, "it decodes by itself");
    // The end is told to those who wait.
    drop(stdin);
    assert!(matches!(newest.next(PATIENCE), Ok(Some(Event::End))));
}

/// Boxes as an encoder makes them, small, without a picture: fragment `n` says so in its data.
mod boxes {
    pub(crate) fn of(kind: [u8; 4], parts: &[&[u8]]) -> Vec<u8> {
        let body = parts.concat();
        let mut out = (body.len() as u32 + 8).to_be_bytes().to_vec();
        out.extend(kind);
        out.extend(body);
        out
    }

    pub(crate) fn init() -> Vec<u8> {
        let tkhd = of(*b"tkhd", &[&[0; 12], &1_u32.to_be_bytes(), &[0; 68]]);
        let mdhd = of(*b"mdhd", &[&[0; 12], &1000_u32.to_be_bytes(), &[0; 8]]);
        let hdlr = of(*b"hdlr", &[&[0; 8], b"vide", &[0; 13]]);
        let trak = of(*b"trak", &[&tkhd, &of(*b"mdia", &[&mdhd, &hdlr])]);
        let trex = of(*b"trex", &[&[0; 4], &1_u32.to_be_bytes(), &[0; 16]]);
        let moov = of(*b"moov", &[&trak, &of(*b"mvex", &[&trex])]);
        [of(*b"ftyp", &[b"isom\0\0\0\0"]), moov].concat()
    }

    pub(crate) fn fragment(n: u32, len: usize) -> Vec<u8> {
        let flags = 0x20_u32.to_be_bytes();
        // Each tenth can be begun with.
        let sample: u32 = if n.is_multiple_of(10) { 0 } else { 0x0001_0000 };
        let tfhd = of(
            *b"tfhd",
            &[&flags, &1_u32.to_be_bytes(), &sample.to_be_bytes()],
        );
        let tfdt = of(*b"tfdt", &[&[0; 4], &(n * 40).to_be_bytes()]);
        let trun = of(*b"trun", &[&[0; 4], &1_u32.to_be_bytes()]);
        let moof = of(*b"moof", &[&of(*b"traf", &[&tfhd, &tfdt, &trun])]);
        let data = n.to_be_bytes().repeat(len / 4);
        [moof, of(*b"mdat", &[&data])].concat()
    }
}

#[test]
fn who_is_overtaken_skips_to_a_key_frame_and_is_told_and_nothing_is_torn() {
    let (server, mut stdin) = live(&["--ring", "1M"]);
    stdin.write_all(&boxes::init()).unwrap();
    stdin.write_all(&boxes::fragment(0, 40_000)).unwrap();
    let device = Device::open().unwrap();
    let dial = server.dial();
    // Both ways, with Reads so short that the writer often comes between them.
    let slow = Dial {
        read: 8192,
        depth: 1,
        ..dial.clone()
    };
    drop(watch(&device, &server, From::Oldest));
    let off = Device::builder()
        .local(weft_verbs::LocalMode::Off)
        .open()
        .unwrap();
    let mut watchers: Vec<_> = [&device, &off]
        .into_iter()
        .map(|device| Watch::new(open(device, &slow).unwrap(), From::Oldest).unwrap())
        .collect();
    for watch in &mut watchers {
        let first = watch.next(PATIENCE).unwrap();
        assert!(matches!(first, Some(Event::Fragment { slot, .. }) if slot.sequence() == 0));
    }
    let writer = std::thread::spawn(move || {
        for n in 1..2000 {
            stdin
                .write_all(&boxes::fragment(n, 40_000 + (n as usize % 7) * 4000))
                .unwrap();
        }
    });
    let mut skipped = [0; 2];
    for (watch, skipped) in watchers.iter_mut().zip(&mut skipped) {
        let mut expected = 1;
        loop {
            match watch.next(PATIENCE).unwrap().expect("something in time") {
                Event::Fragment { slot, bytes, .. } => {
                    assert_eq!(slot.sequence(), expected);
                    let n = slot.sequence() as u32;
                    let whole = boxes::fragment(n, 40_000 + (n as usize % 7) * 4000);
                    let whole = if n == 0 {
                        boxes::fragment(0, 40_000)
                    } else {
                        whole
                    };
                    assert!(bytes == whole, "fragment {n} is torn");
                    expected += 1;
                }
                Event::Skipped { from, to } => {
                    assert_eq!(from, expected);
                    assert!(to > from && to.is_multiple_of(10), "{to} is no key frame");
                    *skipped += to - from;
                    expected = to;
                }
                Event::End => break,
            }
        }
        assert_eq!(expected, 2000);
    }
    writer.join().unwrap();
    // The second began after the first was done: it was overtaken as far as the ring goes.
    assert!(skipped[1] > 0, "{skipped:?}");
}

#[test]
fn a_viewer_that_reads_nothing_does_not_hold_the_writer_up() {
    let (server, mut stdin) = live(&["--ring", "256K", "--linger", "0"]);
    stdin.write_all(&boxes::init()).unwrap();
    stdin.write_all(&boxes::fragment(0, 4000)).unwrap();
    let device = Device::open().unwrap();
    let lazy: Vec<_> = (0..10)
        .map(|_| watch(&device, &server, From::Newest))
        .collect();
    for n in 1..5000 {
        stdin.write_all(&boxes::fragment(n, 4000)).unwrap();
    }
    let mut one = watch(&device, &server, From::Newest);
    let Some(Event::Fragment { slot, .. }) = one.next(PATIENCE).unwrap() else {
        panic!("no fragment");
    };
    assert!(slot.sequence() > 1000, "{slot:?}");
    drop(lazy);
}

#[test]
fn a_writer_is_killed_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let Some(file) = make_movie(dir.path(), "a.ts", &["-f", "mpegts"], 2) else {
        return;
    };
    let bytes = fs::read(&file).unwrap();
    let (mut server, mut stdin) = live(&[]);
    stdin.write_all(&bytes).unwrap();
    let addr = server.addr().to_string();
    let device = Device::open().unwrap();
    drop(watch(&device, &server, From::Oldest));
    let out = dir.path().join("out.ts");
    let mut viewer = Guard(
        weft()
            .args([
                "media",
                "play",
                "--oldest",
                "--retry",
                "30",
                &format!("{addr}/cam"),
            ])
            .stdout(File::create(&out).unwrap())
            .spawn()
            .unwrap(),
    );
    let size = || fs::metadata(&out).map_or(0, |m| m.len());
    until("the first part", || (size() > 100_000).then_some(()));
    server.kill();
    drop(stdin);
    let mut command = weft();
    command
        .args(["media", "live", "--bind", &addr, "--linger", "120", "cam"])
        .stdin(Stdio::piped());
    let mut again = Server::of(&mut command);
    let mut stdin = again.child().stdin.take().unwrap();
    stdin.write_all(&bytes).unwrap();
    // The first part alone is no longer than its input: more than that is the second writer's.
    let more = bytes.len() as u64 + 50_000;
    until("the second part", || (size() > more).then_some(()));
    drop(stdin);
    assert!(viewer.0.wait().unwrap().success());
    let mut tail = Vec::new();
    File::open(&out).unwrap().read_to_end(&mut tail).unwrap();
    assert!(tail.ends_with(&bytes[bytes.len() - 50_000..]));
}

#[test]
fn input_that_is_no_stream_is_told() {
    let progressive = tempfile::tempdir().unwrap();
    let movie = make_movie(progressive.path(), "a.mp4", &["-movflags", "+faststart"], 1);
    let mut cases: Vec<(Vec<u8>, &str)> = vec![
        (
            b"this is a text, and not a movie at all".to_vec(),
            "neither",
        ),
        (vec![0x47; 1000], "boundaries"),
        (
            [boxes::init(), boxes::fragment(0, 1_000_000)].concat(),
            "longer than",
        ),
        (boxes::of(*b"ftyp", &[&[0; 3_000_000]]), "longer than"),
        (
            [&boxes::init()[..], &[0, 0, 0, 4, b'm', b'o', b'o', b'f']].concat(),
            "shorter",
        ),
        ([&boxes::init()[..], &boxes::init()].concat(), "moov"),
    ];
    // A TS packet's boundary is looked for at the second packet.
    cases[1].0[188 * 2] = 0;
    if let Some(movie) = movie {
        cases.push((fs::read(movie).unwrap(), "frag_keyframe"));
    }
    for (input, why) in cases {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("input");
        fs::write(&path, input).unwrap();
        let out = common::Output::of(
            weft()
                .args([
                    "media",
                    "live",
                    "--bind",
                    "127.0.0.1:0",
                    "--ring",
                    "1M",
                    "cam",
                ])
                .stdin(File::open(&path).unwrap()),
        );
        assert_eq!(out.code, 1, "{out:?}");
        assert!(out.stderr.contains(why), "{why}: {out:?}");
    }
}

#[test]
fn rtp_carries_a_transport_stream_to_ffmpeg() {
    let dir = tempfile::tempdir().unwrap();
    let Some(file) = make_movie(dir.path(), "a.ts", &["-crf", "48", "-f", "mpegts"], 3) else {
        return;
    };
    if !have("ffmpeg") {
        return;
    }
    let server = Server::start(dir.path(), &[]);
    let receiver = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    // All of it has room, whoever runs first; without the privilege, most of it.
    let room = rustix::net::sockopt::set_socket_recv_buffer_size_force(&receiver, 8 << 20);
    if room.is_err() {
        rustix::net::sockopt::set_socket_recv_buffer_size(&receiver, 8 << 20).unwrap();
    }
    let to = receiver.local_addr().unwrap().to_string();
    let sender = std::thread::spawn({
        let url = server.url("a.ts");
        move || play(&url, &["--rtp", &to], "auto").0
    });
    // What ffmpeg and VLC do first: order by sequence number, and take the payload. The end is an ending silence.
    let mut got = Vec::new();
    let mut expected = None;
    let mut buf = [0; 2048];
    let whole = fs::metadata(&file).unwrap().len();
    while (got.len() as u64) < whole {
        let n = receiver.recv(&mut buf).unwrap();
        assert_eq!(buf[..2], [0x80, 33]);
        let sequence = u16::from_be_bytes([buf[2], buf[3]]);
        assert!(expected.is_none_or(|e| e == sequence), "a datagram is lost");
        expected = Some(sequence.wrapping_add(1));
        assert!((n - 12).is_multiple_of(188) && n <= 1328);
        got.extend_from_slice(&buf[12..n]);
    }
    sender.join().unwrap().ok();
    let copy = dir.path().join("copy.ts");
    fs::write(&copy, got).unwrap();
    assert_eq!(frames(&copy), frames(&file));
    // Only a transport stream can be sent so.
    let Some(_) = make_movie(dir.path(), "b.mp4", &[], 1) else {
        return;
    };
    let (out, _) = play(&server.url("b.mp4"), &["--rtp", "127.0.0.1:9"], "auto");
    assert_eq!(out.code, 1, "{out:?}");
}
