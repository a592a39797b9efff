//! `weft media serve` and `play` from outside: the real binary, real files, hostile initiators.

use crate::common;

use std::fs;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::common::media::{Server, framemd5, make_movie, play, wire_of};
use crate::common::{Output, noise, until, weft};
use weft_media::client::{Dial, OpenError, Viewer};
use weft_media::wire::{self, Grant, Refusal, Request};
use weft_verbs::cm::{self, ConnParam, ConnectError};
use weft_verbs::{Access, Cq, Device, LocalMode, Mr, Qp, QpInit, RemoteAddr, SendWr, Wc, WcStatus};

const PATIENCE: Duration = Duration::from_secs(30);

fn title(name: &str) -> Request {
    Request::Title(name.into())
}

#[test]
fn movies_come_whole_by_shared_memory_and_by_tls() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("series")).unwrap();
    for (name, len) in [
        ("empty.mp4", 0),
        ("one.mp4", 1),
        ("series/long.mkv", 9_000_001),
    ] {
        fs::write(dir.path().join(name), noise(len, len as u64)).unwrap();
    }
    let server = Server::start(dir.path(), &[]);
    for local in ["auto", "off"] {
        for (name, len) in [
            ("empty.mp4", 0),
            ("one.mp4", 1),
            ("series/long.mkv", 9_000_001),
        ] {
            let (out, bytes) = play(&server.url(name), &[], local);
            assert_eq!(out.code, 0, "{out:?}");
            assert!(bytes == noise(len, len as u64), "{name} {local}");
            assert!(out.stderr.contains(wire_of(local)), "{out:?}");
        }
        let (_, part) = play(
            &server.url("series/long.mkv"),
            &[
                "--from", "12345", "--length", "777777", "--read", "8192", "--depth", "16",
            ],
            local,
        );
        assert!(part == noise(9_000_001, 9_000_001)[12_345..][..777_777]);
    }
    let list = Output::of(weft().args(["media", "list", &server.url(""), "--json"]));
    list.ok();
    let titles: serde_json::Value = serde_json::from_str(&list.stdout).unwrap();
    assert_eq!(titles.as_array().unwrap().len(), 3, "{titles}");
    assert_eq!(titles[2]["size"], 9_000_001);
}

#[test]
fn ffmpeg_sees_the_same_frames_and_a_player_on_a_pipe_gets_them() {
    let dir = tempfile::tempdir().unwrap();
    let Some(movie) = make_movie(dir.path(), "movie.mp4", &["-movflags", "+faststart"], 2) else {
        return;
    };
    let server = Server::start(dir.path(), &[]);
    let (out, bytes) = play(&server.url("movie.mp4"), &[], "auto");
    out.ok();
    let copy = dir.path().join("copy.mp4");
    fs::write(&copy, bytes).unwrap();
    let frames = framemd5(&movie);
    assert!(
        frames.lines().filter(|l| !l.starts_with('#')).count() > 40,
        "{frames}"
    );
    assert_eq!(framemd5(&copy), frames);
    let sums = dir.path().join("sums");
    let player = format!(
        "ffmpeg -v error -i - -f framemd5 -flags bitexact {}",
        sums.display()
    );
    let out = Output::of(weft().args([
        "media",
        "play",
        "--player",
        &player,
        &server.url("movie.mp4"),
    ]));
    out.ok();
    assert_eq!(fs::read_to_string(&sums).unwrap(), frames);
    let out = Output::of(weft().args([
        "media",
        "play",
        "--player",
        "exit 7",
        &server.url("movie.mp4"),
    ]));
    assert_eq!(out.code, 1, "{out:?}");
}

#[test]
fn names_that_lead_out_or_are_none_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let inside = dir.path().join("in");
    fs::create_dir(&inside).unwrap();
    fs::write(dir.path().join("secret.mp4"), "secret").unwrap();
    fs::write(inside.join("notes.txt"), "notes").unwrap();
    std::os::unix::fs::symlink("../secret.mp4", inside.join("link.mp4")).unwrap();
    let server = Server::start(&inside, &[]);
    for name in ["none.mp4", "notes.txt", "link.mp4"] {
        let (out, bytes) = play(&server.url(name), &[], "auto");
        assert_eq!((out.code, bytes.len()), (1, 0), "{out:?}");
    }
    // What the client would not even ask for.
    let device = Device::open().unwrap();
    for name in ["../secret.mp4", "", "x/../../secret.mp4", &"x".repeat(450)] {
        let asked = raw(&device, server.addr(), &title(name).encode());
        let Err(ConnectError::Rejected { private_data }) = asked.map(|_| ()) else {
            panic!("{name:?} was not rejected");
        };
        assert_eq!(
            wire::decode_reply(&private_data),
            Ok(Err(Refusal::Malformed))
        );
    }
    for junk in [&b""[..], b"GET / HTTP/1.1\r\n", &[0xff; 400]] {
        assert!(raw(&device, server.addr(), junk).is_err());
    }
    assert!(
        play(&server.url("none.mp4"), &[], "off")
            .0
            .stderr
            .contains("media list")
    );
}

#[test]
fn viewers_keep_a_file_that_is_truncated_or_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.mp4");
    let before = noise(20_000_000, 1);
    fs::write(&path, &before).unwrap();
    let server = Server::start(dir.path(), &[]);
    for local in ["auto", "off"] {
        fs::write(&path, &before).unwrap();
        let mut viewer = weft()
            .args(["media", "play", &server.url("a.mp4")])
            .env("WEFT_LOCAL", local)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = viewer.stdout.take().unwrap();
        let mut seen = vec![0; 100_000];
        stdout.read_exact(&mut seen).unwrap();
        // In place, and then by another file.
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(10)
            .unwrap();
        let (_, short) = play(&server.url("a.mp4"), &[], local);
        assert!(short == before[..10], "later viewers get the file as it is");
        fs::write(dir.path().join("new"), "new").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        assert_eq!(play(&server.url("a.mp4"), &[], local).1, b"new");
        stdout.read_to_end(&mut seen).unwrap();
        assert!(viewer.wait().unwrap().success());
        assert!(seen == before, "who watched goes on with what there was");
    }
}

#[test]
fn memory_for_movies_is_limited() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a.mp4", "b.mp4"] {
        fs::write(dir.path().join(name), noise(700_000, 3)).unwrap();
    }
    let server = Server::start(dir.path(), &["--memory", "1M"]);
    let device = Device::open().unwrap();
    let dial = server.dial();
    let one = Viewer::open(&device, &dial, &title("a.mp4")).unwrap();
    let two = Viewer::open(&device, &dial, &title("b.mp4"));
    assert!(matches!(
        two.map(|_| ()),
        Err(OpenError::Refused(Refusal::NoRoom))
    ));
    drop(one);
    until("the place of who has left", || {
        Viewer::open(&device, &dial, &title("b.mp4")).ok()
    });
}

#[test]
fn a_movie_longer_than_the_memory_comes_whole_to_several_players_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let movie = noise(9_000_001, 7);
    fs::write(dir.path().join("a.mp4"), &movie).unwrap();
    let server = Server::start(dir.path(), &["--memory", "4M"]);
    std::thread::scope(|scope| {
        for (number, local) in ["auto", "off", "auto", "off"].iter().enumerate() {
            let (server, movie) = (&server, &movie);
            scope.spawn(move || {
                let from = number * 2_100_000;
                let begin = from.to_string();
                let (out, bytes) = play(&server.url("a.mp4"), &["--from", &begin], local);
                assert_eq!(out.code, 0, "{out:?}");
                assert!(bytes == movie[from..], "{local} from {from}");
            });
        }
    });
}

#[test]
fn strangers_that_keep_connecting_do_not_keep_a_known_viewer_out() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let movie = noise(100_000, 1);
    fs::write(dir.path().join("a.mp4"), &movie).unwrap();
    let server = Server::start(dir.path(), &["--max-viewers", "1"]);
    if common::unprivileged(dir.path()).is_none() {
        return;
    }
    let url = server.url("a.mp4");
    for _ in 0..3 {
        let strangers: Vec<_> = (0..4)
            .map(|_| {
                let mut command = common::unprivileged(dir.path()).unwrap();
                command.args(["media", "play", "--peer", server.fingerprint(), &url]);
                command.stdout(Stdio::null()).stderr(Stdio::null());
                command.spawn().unwrap()
            })
            .collect();
        let seen = until("a place, once the last viewer is gone", || {
            let (out, seen) = play(&url, &[], "off");
            (out.code == 0).then_some(seen)
        });
        assert!(seen == movie);
        for mut stranger in strangers {
            assert_eq!(stranger.wait().unwrap().code(), Some(4));
        }
    }
}

struct Raw {
    qp: Qp,
    cq: Cq,
    mr: Mr,
    grant: Grant,
}

/// An initiator that knows the protocol and keeps to none of its rules.
fn raw(device: &Device, addr: SocketAddr, request: &[u8]) -> Result<Raw, ConnectError> {
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(64, None).unwrap();
    let mr = pd.alloc_mr(65_536, Access::LOCAL_WRITE).unwrap();
    let qp = pd.create_qp(&QpInit::new(&cq, &cq)).unwrap();
    let param = ConnParam {
        private_data: request.to_vec(),
        tls: Some(common::tls()),
        ..ConnParam::default()
    };
    let connection = cm::connect_qp(addr, qp, device, &param)?;
    let grant = wire::decode_reply(&connection.private_data);
    Ok(Raw {
        qp: connection.qp,
        cq,
        mr,
        grant: grant.unwrap().unwrap(),
    })
}

impl Raw {
    fn outcome(&self, wr: SendWr) -> WcStatus {
        // A connection that has ended already may refuse the post itself.
        if self.qp.post_send_one(wr.signaled()).is_err() {
            return WcStatus::WrFlushErr;
        }
        let mut wcs = [Wc::default(); 1];
        assert_eq!(self.cq.wait(&mut wcs, Some(PATIENCE)), Ok(1));
        wcs[0].status
    }
}

#[test]
fn an_initiator_reads_its_own_movie_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    for (name, seed) in [("a.mp4", 1), ("b.mp4", 2)] {
        fs::write(dir.path().join(name), noise(100_000, seed)).unwrap();
    }
    let server = Server::start(dir.path(), &[]);
    for mode in [LocalMode::Auto, LocalMode::Off] {
        let device = Device::builder().local(mode).open().unwrap();
        let mut honest = Viewer::open(&device, &server.dial(), &title("b.mp4")).unwrap();
        let secret = honest.grant().at;
        type Attack = fn(&Raw, RemoteAddr) -> SendWr;
        let attacks: [(&str, Attack); 8] = [
            ("another movie's STag", |raw, other| {
                SendWr::read(1, other).sge(raw.mr.sge(0, 4096))
            }),
            ("past the end", |raw, _| {
                let addr = raw.grant.at.addr + 99_000;
                let at = RemoteAddr {
                    addr,
                    ..raw.grant.at
                };
                SendWr::read(1, at).sge(raw.mr.sge(0, 4096))
            }),
            ("before the beginning", |raw, _| {
                let addr = raw.grant.at.addr.wrapping_sub(8);
                let at = RemoteAddr {
                    addr,
                    ..raw.grant.at
                };
                SendWr::read(1, at).sge(raw.mr.sge(0, 4096))
            }),
            ("a guessed STag", |raw, _| {
                let rkey = raw.grant.at.rkey ^ 0x0001_0000;
                let at = RemoteAddr {
                    rkey,
                    ..raw.grant.at
                };
                SendWr::read(1, at).sge(raw.mr.sge(0, 4096))
            }),
            ("a Write", |raw, _| {
                SendWr::write(1, raw.grant.at).sge(raw.mr.sge(0, 4096))
            }),
            ("an atomic", |raw, _| {
                SendWr::fetch_add(1, raw.grant.at, 1).sge(raw.mr.sge(0, 8))
            }),
            ("a Write into another movie", |raw, other| {
                SendWr::write(1, other).sge(raw.mr.sge(0, 4096))
            }),
            ("a Send", |raw, _| SendWr::send(1).sge(raw.mr.sge(0, 4096))),
        ];
        for (what, attack) in attacks {
            let raw = raw(&device, server.addr(), &title("a.mp4").encode()).unwrap();
            let good = SendWr::read(0, raw.grant.at).sge(raw.mr.sge(0, 50_000));
            assert_eq!(raw.outcome(good), WcStatus::Success, "{what}");
            assert!(raw.mr.to_vec(0, 50_000).unwrap() == noise(100_000, 1)[..50_000]);
            raw.mr.fill(0, 65_536, 0xee).unwrap();
            let mut status = raw.outcome(attack(&raw, secret));
            if status == WcStatus::Success {
                // A Write or Send is complete when it is on its way: the answer meets the next request.
                let again = SendWr::read(2, raw.grant.at).sge(raw.mr.sge(60_000, 8));
                status = raw.outcome(again);
            }
            assert_ne!(status, WcStatus::Success, "{what}");
            assert!(
                raw.mr.to_vec(0, 50_000).unwrap() == vec![0xee; 50_000],
                "{what}"
            );
        }
        // Whatever they do, others watch on, and nothing has changed.
        assert!(honest.fetch(0, 100_000).unwrap() == noise(100_000, 2));
        let mut other = Viewer::open(&device, &server.dial(), &title("a.mp4")).unwrap();
        assert!(other.fetch(0, 100_000).unwrap() == noise(100_000, 1));
    }
}

/// `WEFT_VIEWERS` sets another number than 200.
#[test]
fn many_viewers_come_at_once_and_vanish() {
    let viewers: usize = std::env::var("WEFT_VIEWERS").map_or(200, |n| n.parse().unwrap());
    let limit = viewers + 10;
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.mp4"), noise(300_000, 5)).unwrap();
    let server = Server::start(dir.path(), &["--max-viewers", &limit.to_string()]);
    let device = Device::open().unwrap();
    let dial = Dial {
        read: 8192,
        depth: 2,
        ..server.dial()
    };
    let mut viewers: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..viewers)
            .map(|_| scope.spawn(|| Viewer::open(&device, &dial, &title("a.mp4")).unwrap()))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for (i, viewer) in viewers.iter_mut().enumerate() {
        let from = i as u64 % 280 * 1000;
        assert!(
            viewer.fetch(from, 20_000).unwrap() == noise(300_000, 5)[from as usize..][..20_000]
        );
    }
    // Twenty more are ten too many.
    let more: Vec<_> = (0..20)
        .map(|_| Viewer::open(&device, &dial, &title("a.mp4")))
        .collect();
    let full = |v: &Result<Viewer, OpenError>| matches!(v, Err(OpenError::Refused(Refusal::Full)));
    assert_eq!(more.iter().filter(|v| full(v)).count(), 10);
    drop((viewers, more, device));
    // A viewer that is killed in the middle of a fetch gives its place back, too.
    for _ in 0..3 {
        let mut child = weft()
            .args(["media", "play", &server.url("a.mp4")])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut byte = [0];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut byte)
            .unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let device = Device::open().unwrap();
    let again = until("all places", || {
        let all: Result<Vec<_>, _> = (0..limit)
            .map(|_| Viewer::open(&device, &dial, &title("a.mp4")))
            .collect();
        all.ok()
    });
    assert_eq!(again.len(), limit);
}

#[test]
fn other_users_and_machines_are_not_let_in_without_a_key() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.mp4"), "a").unwrap();
    let out = Output::of(
        weft()
            .args(["media", "serve", "--bind", "0.0.0.0:0"])
            .arg(dir.path()),
    );
    assert_eq!(out.code, 2, "{out:?}");
    assert!(out.stderr.contains("--open"), "{out:?}");
    let out = Output::of(
        weft()
            .args(["media", "serve", "--plain", "--open", "--bind", "0.0.0.0:0"])
            .arg(dir.path()),
    );
    assert_eq!(out.code, 2, "{out:?}");
    let server = Server::start(dir.path(), &[]);
    let Some(mut stranger) = common::as_user(dir.path(), 1234) else {
        return;
    };
    make_reachable(dir.path());
    let peer = server.fingerprint().to_owned();
    let out = Output::of(stranger.args(["media", "play", "--peer", &peer, &server.url("a.mp4")]));
    assert_eq!((out.code, out.stdout.as_str()), (4, ""), "{out:?}");
    assert!(out.stderr.contains("weft key"), "{out:?}");
    // A key that is not known is not asked about without a terminal, and nothing is sent.
    let mut stranger = common::as_user(dir.path(), 1234).unwrap();
    let out = Output::of(stranger.args(["media", "play", &server.url("a.mp4")]));
    assert_eq!(out.code, 4, "{out:?}");
    let open = Server::start(dir.path(), &["--open"]);
    let mut stranger = common::as_user(dir.path(), 1234).unwrap();
    let peer = open.fingerprint().to_owned();
    let out = Output::of(stranger.args(["media", "play", "--peer", &peer, &open.url("a.mp4")]));
    assert_eq!((out.code, out.stdout.as_str()), (0, "a"), "{out:?}");
}

/// The temporary directory is for its owner alone; the other user needs the copy of the program in it.
fn make_reachable(dir: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_server_that_dies_is_told_and_a_reader_that_has_had_enough_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.mp4"), noise(30_000_000, 9)).unwrap();
    for local in ["auto", "off"] {
        let mut server = Server::start(dir.path(), &[]);
        let mut viewer = weft()
            .args(["media", "play", &server.url("a.mp4")])
            .env("WEFT_LOCAL", local)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut byte = [0];
        viewer
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut byte)
            .unwrap();
        server.kill();
        let out = viewer.wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(3), "{local}");
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(text.contains("ended") || text.contains("gone"), "{text}");
    }
    let server = Server::start(dir.path(), &[]);
    let mut viewer = weft()
        .args(["media", "play", &server.url("a.mp4")])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut byte = [0];
    viewer
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut byte)
        .unwrap();
    drop(viewer.stdout.take());
    assert!(viewer.wait().unwrap().success());
    let _ = std::io::stdout().flush();
}
