//! `weft media` with players as people have them: mpv, ffplay, VLC, ffmpeg, on a film of 1080 lines.

use crate::common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::http::{Browser, get};
use crate::common::media::{Server, framemd5, have, make_film};
use crate::common::weft;
use serde_json::Value;

const VLC: &str = "cvlc -I dummy --vout dummy --aout dummy --no-video-title-show --play-and-exit";
/// Before a program that refuses to be root.
const NOBODY: [&str; 4] = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
];

/// What a player of the shell says and how it ends, as whoever it may run as. It has no screen and no loudspeaker.
fn player(dir: &Path, command: &[&str], as_nobody: bool) -> (bool, String) {
    let mut run = Command::new("timeout");
    run.args(["-k", "5", "100"]);
    if as_nobody && rustix::process::geteuid().is_root() {
        run.args(NOBODY);
    }
    let out = run
        .args(command)
        .env("SDL_VIDEODRIVER", "dummy")
        .env("SDL_AUDIODRIVER", "dummy")
        .env("HOME", dir)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = [out.stdout, out.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    (out.status.success(), said)
}

/// Films by H.264 and VP9.
fn films(dir: &Path, seconds: u32) -> Option<[(&'static str, &'static str); 2]> {
    let h264 = "-c:v libx264 -preset ultrafast -g 10 -c:a aac -movflags +faststart";
    let vp9 = "-c:v libvpx-vp9 -deadline realtime -cpu-used 8 -row-mt 1 -g 10 -c:a libopus";
    make_film(dir, "film.mp4", h264, seconds)?;
    make_film(dir, "film.webm", vp9, seconds)?;
    std::fs::set_permissions(dir, PermissionsExt::from_mode(0o777)).unwrap();
    Some([("film.mp4", "h264"), ("film.webm", "vp9")])
}

#[test]
#[ignore = "takes minutes on a loaded machine; run it with --ignored"]
fn players_play_by_url_and_on_a_pipe_what_ffmpeg_sees() {
    let dir = tempfile::tempdir().unwrap();
    let Some(films) = films(dir.path(), 1) else {
        return;
    };
    let server = Server::start(dir.path(), &[]);
    // Another user's VLC, too: it refuses to be root.
    let mut command = weft();
    command.args(["media", "proxy", "--open", "--http", "127.0.0.1:0"]);
    let proxy = Server::of(command.arg(server.addr().to_string()));
    let fetched = || {
        let stats = get(proxy.addr(), "/api/stats", &[]).body;
        let stats: Value = serde_json::from_slice(&stats).unwrap();
        stats["servers"][0]["bytes"].as_u64().unwrap()
    };
    for (name, codec) in films {
        let url = format!("http://{}/media/0/{name}", proxy.addr());
        let file = dir.path().join(name);
        let len = file.metadata().unwrap().len();
        assert_eq!(framemd5(Path::new(&url)), framemd5(&file), "{name}");
        if have("mpv") {
            let mpv = ["mpv", "--no-config", "--vo=null", "--ao=null", "--untimed"];
            let seek = [
                "--start=50%",
                "--term-status-msg=at ${=time-pos} of ${width}",
            ];
            let (well, said) = player(
                dir.path(),
                &[&mpv[..], &seek[..], &[url.as_str()]].concat(),
                false,
            );
            assert!(well && said.contains(codec), "{said}");
            assert!(
                said.contains("of 1920") && !said.contains("at 0.0"),
                "{said}"
            );
        }
        if have("ffplay") {
            let ffplay = ["ffplay", "-hide_banner", "-autoexit", "-loglevel", "info"];
            let (well, said) = player(dir.path(), &[&ffplay[..], &[url.as_str()]].concat(), false);
            assert!(
                well && said.contains(codec) && said.contains("1920x1080"),
                "{said}"
            );
        }
        if have("cvlc") {
            let before = fetched();
            let vlc: Vec<&str> = VLC.split(' ').chain(["-vv", url.as_str()]).collect();
            let (well, said) = player(dir.path(), &vlc, true);
            assert!(well && fetched() - before >= len, "{said}");
            assert!(said.contains("vsz 1920x1080"), "{said}");
        }
    }
    // The same on a pipe.
    let nobody = if rustix::process::geteuid().is_root() {
        NOBODY.join(" ")
    } else {
        String::new()
    };
    let vlc = format!("{nobody} {VLC} -");
    for (program, command) in [
        ("mpv", "mpv --no-config --vo=null --ao=null --untimed -"),
        ("ffplay", "ffplay -autoexit -loglevel error -"),
        ("cvlc", vlc.as_str()),
    ] {
        if !have(program) {
            continue;
        }
        let out = weft()
            .args(["media", "play", "--player", command])
            .arg(server.url("film.mp4"))
            .env("SDL_VIDEODRIVER", "dummy")
            .env("SDL_AUDIODRIVER", "dummy")
            .env("HOME", dir.path())
            .stdout(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success() && said.contains("weft: "), "{said}");
    }
}

#[test]
#[ignore = "takes minutes on a loaded machine; run it with --ignored"]
fn chromium_plays_pauses_and_seeks_films_of_1080_lines() {
    if !have("chromedriver") || !have("chromium") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(films) = films(dir.path(), 8) else {
        return;
    };
    let server = Server::start(dir.path(), &[]);
    let mut command = weft();
    command.args(["media", "proxy", "--http", "127.0.0.1:0"]);
    let proxy = Server::of(command.arg(server.addr().to_string()));
    let browser = Browser::start();
    browser.open(&format!("http://{}/", proxy.addr()));
    browser.until("document.querySelectorAll('.title').length === 2");
    let player = "document.querySelector('#player')";
    for (name, _) in films {
        browser.click(&format!("[data-name='{name}']"));
        browser.until(&format!(
            "{player}.currentSrc.endsWith('{name}') && {player}.currentTime > 0.3 && {player}.videoWidth === 1920 && {player}.videoHeight === 1080"
        ));
        browser.pause_and_seek(4.0, 0.7);
        browser.click("#play");
        browser.until(&format!("!{player}.paused && {player}.currentTime > 4.8"));
    }
}

#[test]
#[ignore = "takes minutes on a loaded machine; run it with --ignored"]
fn ffmpeg_sees_the_same_through_files_of_weft_fs() {
    let dir = tempfile::tempdir().unwrap();
    let Some(library) = common::fs_library() else {
        println!("skipped: libweft-fs.so is not built (cargo build -p weft-libfs)");
        return;
    };
    let Some(films) = films(dir.path(), 1) else {
        return;
    };
    let mut command = weft();
    command
        .args(["fs", "serve", "--bind", "127.0.0.1:0"])
        .arg(dir.path());
    let server = Server::of(&mut command);
    // As a program of the server's host, and as one from elsewhere.
    for local in ["auto", "off"] {
        for (name, _) in films {
            let out = weft()
                .args(["fs", "run", "--peer", server.fingerprint(), "--"])
                .args(["ffmpeg", "-v", "error", "-i"])
                .arg(format!("/rdma/{}/{name}", server.addr()))
                .args(["-f", "framemd5", "-flags", "bitexact", "-"])
                .env("WEFT_FS_LIB", &library)
                .env("WEFT_LOCAL", local)
                .stdin(Stdio::null())
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success(), "{said}");
            let frames = String::from_utf8_lossy(&out.stdout);
            assert_eq!(frames, framemd5(&dir.path().join(name)), "{name} {local}");
        }
    }
}
