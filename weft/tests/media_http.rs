//! `weft media proxy`: HTTP as players speak it, HLS, and the page in Chromium.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Stdio};

use crate::common::http::{Browser, get, request};
use crate::common::media::{Server, framemd5, have, make_movie};
use crate::common::{Output, noise, until, weft};
use serde_json::Value;

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

fn proxy(servers: &[&Server]) -> Server {
    let mut command = weft();
    command.args(["media", "proxy", "--http", "127.0.0.1:0"]);
    command.args(servers.iter().map(|server| server.addr().to_string()));
    Server::of(&mut command)
}

fn live(name: &str) -> (Server, std::process::ChildStdin) {
    let mut command = weft();
    command
        .args([
            "media",
            "live",
            "--bind",
            "127.0.0.1:0",
            "--linger",
            "30",
            name,
        ])
        .stdin(Stdio::piped());
    let mut server = Server::of(&mut command);
    let stdin = server.child().stdin.take().unwrap();
    (server, stdin)
}

#[test]
fn ranges_heads_and_tags() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = noise(3_000_000, 4);
    fs::create_dir(dir.path().join("a b")).unwrap();
    fs::write(dir.path().join("a b/ü.mp4"), &bytes).unwrap();
    fs::write(dir.path().join("empty.webm"), "").unwrap();
    let server = Server::start(dir.path(), &[]);
    let proxy = proxy(&[&server]);
    let addr = proxy.addr();
    let path = "/media/0/a%20b/%C3%BC.mp4";
    let whole = get(addr, path, &[]);
    assert_eq!(
        (whole.status, whole.header("content-length")),
        (200, Some("3000000"))
    );
    assert_eq!(whole.header("content-type"), Some("video/mp4"));
    assert_eq!(whole.header("accept-ranges"), Some("bytes"));
    assert!(whole.body == bytes);
    let tag = whole.header("etag").unwrap().to_owned();
    let head = request(addr, "HEAD", path, &[], &[]);
    assert_eq!((head.status, head.body.len()), (200, 0));
    for name in ["content-length", "etag", "content-type"] {
        assert_eq!(head.header(name), whole.header(name));
    }
    for (range, from, to) in [
        ("bytes=0-0", 0, 1),
        ("bytes=1000000-1999999", 1_000_000, 2_000_000),
        ("bytes=2999990-", 2_999_990, 3_000_000),
        ("bytes=-5", 2_999_995, 3_000_000),
        ("bytes=2999999-9999999", 2_999_999, 3_000_000),
    ] {
        let part = get(addr, path, &[("Range", range)]);
        assert_eq!(part.status, 206, "{range}");
        let expected = format!("bytes {from}-{}/3000000", to - 1);
        assert_eq!(part.header("content-range"), Some(expected.as_str()));
        assert!(part.body == bytes[from..to], "{range}");
    }
    let past = get(addr, path, &[("Range", "bytes=3000000-")]);
    assert_eq!(
        (past.status, past.header("content-range")),
        (416, Some("bytes */3000000"))
    );
    let same = get(addr, path, &[("If-None-Match", &tag)]);
    assert_eq!((same.status, same.body.len()), (304, 0));
    for (if_range, status) in [(tag.as_str(), 206), ("\"other\"", 200)] {
        let part = get(
            addr,
            path,
            &[("Range", "bytes=0-9"), ("If-Range", if_range)],
        );
        assert_eq!(part.status, status);
    }
    let empty = get(addr, "/media/0/empty.webm", &[]);
    assert_eq!((empty.status, empty.body.len()), (200, 0));
    assert_eq!(
        get(addr, "/media/0/empty.webm", &[("Range", "bytes=0-")]).status,
        416
    );
    // A file that is replaced has another tag, at the latest when the kept connections have gone.
    fs::write(dir.path().join("a b/ü.mp4"), "new").unwrap();
    let new = until("the new file", || {
        let new = get(addr, path, &[]);
        (new.body == b"new").then_some(new)
    });
    assert_ne!(new.header("etag"), Some(tag.as_str()));
    assert_eq!(get(addr, path, &[("If-None-Match", &tag)]).status, 200);
}

/// A film in blocks whose file is written anew in place, with its length and time kept, while a player reads: no answer has bytes of both.
#[test]
fn a_film_that_is_overwritten_is_cut_off() {
    const LEN: usize = 48_000_000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.mp4");
    let bytes = noise(LEN, 5);
    fs::write(&path, &bytes).unwrap();
    let server = Server::start(dir.path(), &["--memory", "8M"]);
    let proxy = proxy(&[&server]);
    let mut player = TcpStream::connect(proxy.addr()).unwrap();
    player
        .write_all(b"GET /media/0/a.mp4 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut got = vec![0; 1_000_000];
    player.read_exact(&mut got).unwrap();
    let then = fs::metadata(&path).unwrap().modified().unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&noise(LEN, 6), 0).unwrap();
    file.set_modified(then).unwrap();
    // It may end with a reset.
    let _ = player.read_to_end(&mut got);
    let head = got.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
    assert!(got.starts_with(b"HTTP/1.1 200"));
    let body = &got[head..];
    assert!(body.len() < LEN, "all of it has come");
    assert!(body == &bytes[..body.len()], "bytes of another file");
}

#[test]
fn bad_requests_slow_players_and_servers_that_are_gone() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.mp4"), noise(20_000_000, 1)).unwrap();
    fs::write(dir.path().join("secret.txt"), "secret").unwrap();
    let mut server = Server::start(dir.path(), &[]);
    let proxy = proxy(&[&server]);
    let addr = proxy.addr();
    for (path, status) in [
        ("/media/0/none.mp4", 404),
        ("/media/0/secret.txt", 404),
        ("/media/0/..%2f..%2fetc%2fpasswd", 404),
        ("/media/0/%00.mp4", 404),
        ("/media/0/%ff.mp4", 400),
        ("/media/1/a.mp4", 404),
        ("/media/x/a.mp4", 400),
        ("/media/0/", 404),
        ("/hls/0/a.mp4/index.m3u8", 422),
        ("/hls/0/none.mp4/index.m3u8", 404),
        ("/hls/0/a.mp4/7.m4s", 404),
        ("/none", 404),
    ] {
        let answer = get(addr, path, &[]);
        assert_eq!(answer.status, status, "{path}: {}", answer.text());
    }
    let long = format!("/media/0/{}.mp4", "x".repeat(2000));
    assert_eq!(get(addr, &long, &[]).status, 404);
    // A page of another site that has pointed its name here.
    let rebound = get(addr, "/api/titles", &[("Host", "evil.example:80")]);
    assert_eq!(rebound.status, 421);
    assert_eq!(get(addr, "/", &[("Host", "localhost:1")]).status, 200);
    // Players that ask and do not read: others are served.
    let slow: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = TcpStream::connect(addr).unwrap();
            let ask = format!("GET /media/0/a.mp4 HTTP/1.1\r\nHost: {addr}\r\n\r\n");
            stream.write_all(ask.as_bytes()).unwrap();
            stream
        })
        .collect();
    let whole = get(addr, "/media/0/a.mp4", &[]);
    assert!(whole.body == noise(20_000_000, 1));
    drop(slow);
    let streams = || {
        let stats: Value = serde_json::from_slice(&get(addr, "/api/stats", &[]).body).unwrap();
        stats["servers"][0]["streams"].as_u64().unwrap()
    };
    until("the threads of players that have gone", || {
        (streams() == 0).then_some(())
    });
    server.kill();
    let gone = until("the end of what was kept", || {
        let answer = get(addr, "/media/0/b.mp4", &[]);
        (answer.status != 404).then_some(answer.status)
    });
    assert_eq!(gone, 502);
    let titles: Value = serde_json::from_slice(&get(addr, "/api/titles", &[]).body).unwrap();
    assert!(titles[0]["error"].is_string(), "{titles}");
}

#[test]
fn another_user_of_the_host_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.mp4"), "a").unwrap();
    let server = Server::start(dir.path(), &[]);
    let proxy = proxy(&[&server]);
    let out = Output::of(weft().args(["media", "proxy", "--http", "0.0.0.0:0", "localhost:1"]));
    assert_eq!(out.code, 2, "{out:?}");
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root, to become another user");
        return;
    }
    let script = format!(
        "exec 3<>/dev/tcp/127.0.0.1/{}; printf 'GET /api/titles HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n' >&3; head -c 12 <&3",
        proxy.addr().port()
    );
    let ask = |user: u32| {
        let mut command = std::process::Command::new("bash");
        std::os::unix::process::CommandExt::uid(&mut command, user);
        Output::of(command.args(["-c", &script])).stdout
    };
    assert_eq!(ask(0), "HTTP/1.1 200");
    assert_eq!(ask(1234), "");
}

fn frames_of(input: &str, before: &[&str]) -> String {
    let out = Output::of(
        std::process::Command::new("ffmpeg")
            .args(["-v", "error"])
            .args(before)
            .args(["-i", input, "-f", "framemd5", "-flags", "bitexact", "-"])
            .stdin(Stdio::null()),
    );
    assert_eq!(out.code, 0, "{out:?}");
    out.stdout
}

#[test]
fn ffmpeg_reads_files_and_playlists_by_url() {
    let dir = tempfile::tempdir().unwrap();
    let Some(movie) = make_movie(dir.path(), "movie.mp4", &[], 3) else {
        return;
    };
    let fragmented = make_movie(dir.path(), "frag.mp4", FRAGMENTED, 3).unwrap();
    let server = Server::start(dir.path(), &[]);
    let proxy = proxy(&[&server]);
    let at = |path: &str| format!("http://{}{path}", proxy.addr());
    // Its index is at the end, so ffmpeg seeks.
    assert_eq!(frames_of(&at("/media/0/movie.mp4"), &[]), framemd5(&movie));
    let seek = ["-ss", "1.7"];
    let local = frames_of(movie.to_str().unwrap(), &seek);
    assert_eq!(frames_of(&at("/media/0/movie.mp4"), &seek), local);
    let pictures = |text: String| {
        let lines = text.lines().filter(|l| l.starts_with("0,"));
        lines
            .map(|l| l.rsplit(',').next().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let hls = frames_of(&at("/hls/0/frag.mp4/index.m3u8"), &[]);
    assert_eq!(pictures(hls), pictures(framemd5(&fragmented)));
}

/// The segments of a playlist, with what each is named by.
fn segments(addr: SocketAddr, playlist: &str) -> Vec<String> {
    let text = get(addr, playlist, &[]).text();
    let folder = playlist.rsplit_once('/').unwrap().0;
    text.lines()
        .filter_map(|line| {
            let map = line.strip_prefix("#EXT-X-MAP:URI=\"");
            let name = map.map_or(line, |m| m.trim_end_matches('"'));
            (map.is_some() || !line.starts_with('#')).then(|| format!("{folder}/{name}"))
        })
        .collect()
}

#[test]
fn a_live_stream_comes_as_hls_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    for (name, args) in [("a.mp4", FRAGMENTED), ("a.ts", &["-f", "mpegts"][..])] {
        let Some(file) = make_movie(dir.path(), name, args, 6) else {
            return;
        };
        let bytes = fs::read(&file).unwrap();
        let (server, mut stdin) = live("cam");
        let proxy = proxy(&[&server]);
        let addr = proxy.addr();
        let playlist = "/hls/0/cam/index.m3u8";
        let titles: Value = serde_json::from_slice(&get(addr, "/api/titles", &[]).body).unwrap();
        assert_eq!(titles[0]["titles"][0]["live"], true, "{titles}");
        // Somebody asks before there is anything; the stream then comes in pieces, and ends.
        let early = get(addr, playlist, &[]);
        assert_eq!(early.status, 503, "{}", early.text());
        let (first, rest) = bytes.split_at(bytes.len() / 3);
        stdin.write_all(first).unwrap();
        until("a playlist", || {
            (get(addr, playlist, &[]).status == 200).then_some(())
        });
        stdin.write_all(rest).unwrap();
        drop(stdin);
        let text = until("the end", || {
            let text = get(addr, playlist, &[]).text();
            text.contains("#EXT-X-ENDLIST").then_some(text)
        });
        let target: f64 = text
            .lines()
            .find_map(|l| l.strip_prefix("#EXT-X-TARGETDURATION:")?.parse().ok())
            .unwrap();
        for line in text.lines().filter_map(|l| l.strip_prefix("#EXTINF:")) {
            let duration: f64 = line.trim_end_matches(',').parse().unwrap();
            assert!(duration > 0.0 && duration.round() <= target, "{text}");
        }
        let got: Vec<u8> = segments(addr, playlist)
            .iter()
            .flat_map(|item| {
                let answer = get(addr, item, &[]);
                assert_eq!(answer.status, 200, "{item}");
                answer.body
            })
            .collect();
        // The proxy began with the newest key frame of its moment: what it has is the end of the stream.
        let copy = dir.path().join(format!("copy-{name}"));
        fs::write(&copy, &got).unwrap();
        let sums = |path: &Path| {
            let text = framemd5(path);
            let lines = text.lines().filter(|l| l.starts_with("0,"));
            lines
                .map(|l| l.rsplit(',').next().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        let (all, tail) = (sums(&file), sums(&copy));
        assert!(tail.len() >= 80, "{} of {}", tail.len(), all.len());
        assert_eq!(all[all.len() - tail.len()..], tail, "{name}");
    }
}

#[test]
fn chromium_plays_pauses_and_seeks_by_clicks() {
    if !have("chromedriver") || !have("chromium") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(_) = make_movie(dir.path(), "movie.mp4", &["-movflags", "+faststart"], 30) else {
        return;
    };
    make_movie(dir.path(), "frag.mp4", FRAGMENTED, 10).unwrap();
    let aside = tempfile::tempdir().unwrap();
    let endless = make_movie(aside.path(), "live.mp4", FRAGMENTED, 10).unwrap();
    let mut encoder = Guard(
        std::process::Command::new("ffmpeg")
            .args(["-v", "error", "-re", "-stream_loop", "-1", "-i"])
            .arg(endless)
            .args(["-c", "copy"])
            .args(FRAGMENTED)
            .arg("-")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let server = Server::start(dir.path(), &[]);
    let camera = Server::of(
        weft()
            .args([
                "media",
                "live",
                "--bind",
                "127.0.0.1:0",
                "--linger",
                "0",
                "<b>cam</b>",
            ])
            .stdin(encoder.0.stdout.take().unwrap()),
    );
    let proxy = proxy(&[&server, &camera]);
    let browser = Browser::start();
    browser.open(&format!("http://{}/", proxy.addr()));
    browser.until("document.querySelectorAll('.title').length === 3");
    let names = browser.eval("[...document.querySelectorAll('.title')].map(t => t.dataset.name)");
    assert_eq!(
        names,
        serde_json::json!(["frag.mp4", "movie.mp4", "<b>cam</b>"])
    );
    assert_eq!(
        browser.eval("document.querySelectorAll('.title b').length"),
        0,
        "names are text"
    );
    let player = "document.querySelector('#player')";

    browser.click("[data-name='movie.mp4']");
    browser.until(&format!(
        "{player}.currentTime > 0.3 && {player}.videoWidth === 640"
    ));
    assert_eq!(browser.eval(&format!("Math.round({player}.duration)")), 30);
    browser.pause_and_seek(15.0, 2.0);
    assert_eq!(
        browser.eval("document.querySelector('#time').textContent.endsWith('0:30')"),
        true
    );
    browser.click("#forward");
    browser.until(&format!(
        "Math.abs({player}.currentTime - 25) < 2 && !{player}.seeking"
    ));
    browser.click("#play");
    browser.until(&format!("!{player}.paused && {player}.currentTime > 25.3"));
    browser.until("document.querySelector('#buffer').textContent.endsWith(' s')");
    browser.until("/[KM]iB/.test(document.querySelector('#bytes').textContent)");
    browser.until("document.querySelector('#rate').textContent.endsWith('bit/s')");

    // A fragmented file has a playlist, and with it a length.
    browser.click("[data-name='frag.mp4']");
    browser.until(&format!(
        "{player}.currentTime > 0.3 && Math.round({player}.duration) === 10"
    ));
    browser.click("#bar");
    browser.until(&format!(
        "{player}.currentTime > 4 && !{player}.seeking && {player}.readyState > 2"
    ));

    browser.click("[data-name='<b>cam</b>']");
    browser.until(&format!(
        "{player}.readyState > 2 && {player}.videoWidth === 640"
    ));
    browser.until("document.querySelector('#delay').textContent.endsWith(' ms')");
    // Pause, back to what is behind, and on with what is new.
    browser.until(&format!("{player}.currentTime > 2"));
    browser.click("#play");
    browser.until(&format!("{player}.paused"));
    let still = browser.eval(&format!("{player}.currentTime"));
    browser.click("#back");
    browser.until(&format!(
        "{player}.currentTime < {still} && !{player}.seeking && {player}.readyState > 2"
    ));
    browser.click("#newest");
    browser.click("#play");
    browser.until(&format!(
        "!{player}.paused && {player}.currentTime > {still} + 1"
    ));
    assert_eq!(
        browser.eval("document.querySelector('#notice').textContent"),
        ""
    );
}
