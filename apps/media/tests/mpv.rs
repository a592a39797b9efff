//! mpv with weft inside: apps/media/mpv/weft.lua plays weft:// URLs, with seeking, of a movie longer than the server's memory.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_weft-media");

fn have(program: &str) -> bool {
    let run = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    run.is_ok()
}

struct Server(Child, String);

impl Server {
    fn start(dir: &Path) -> Self {
        let mut child = Command::new(PROGRAM)
            .args(["serve", "--memory", "4M", "--bind", "127.0.0.1:0"])
            .arg(dir)
            .env("HOME", dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.next().unwrap().unwrap();
        let (_, addr) = line.split_once(" on ").expect(&line);
        let addr = addr.split(',').next().unwrap().to_owned();
        std::thread::spawn(move || lines.count());
        Self(child, addr)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The frames that mpv decodes from there on, and what it says.
fn frames(dir: &Path, url: &str, start: &str) -> (bool, String, String) {
    let out = dir.join("frames");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/mpv/weft.lua");
    let run = Command::new("timeout")
        .args(["-k", "5", "100", "mpv", "--no-config", "--no-audio"])
        .args(["--ovc=rawvideo", "--of=framemd5"])
        .arg(format!("--script={script}"))
        .arg(format!("--script-opts=weft-command={PROGRAM}"))
        .arg(format!("--start={start}"))
        .arg(format!("--o={}", out.display()))
        .arg(url)
        .env("HOME", dir)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[run.stdout, run.stderr].concat()).into_owned();
    let frames = std::fs::read_to_string(&out).unwrap_or_default();
    let _ = std::fs::remove_file(&out);
    (run.status.success(), frames, said)
}

#[test]
fn mpv_plays_a_weft_url_from_its_middle_as_it_plays_the_file() {
    if !have("mpv") || !have("ffmpeg") {
        println!("skipped: mpv or ffmpeg is not there");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let movie = dir.path().join("a b%.mkv");
    // 11 MB, because it is not compressed.
    let made = Command::new("ffmpeg")
        .args(["-loglevel", "error", "-f", "lavfi"])
        .args(["-i", "testsrc=duration=4:rate=25"])
        .args(["-c:v", "rawvideo", "-pix_fmt", "yuv420p"])
        .arg(&movie)
        .status();
    assert!(made.unwrap().success());
    let server = Server::start(dir.path());
    let url = format!("weft://{}/a b%.mkv", server.1);
    for (start, count) in [("0", 100), ("2", 50)] {
        let (well, of_file, said) = frames(dir.path(), movie.to_str().unwrap(), start);
        assert!(well, "{said}");
        let lines = of_file.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(lines.count(), count, "{of_file}");
        let (well, of_url, said) = frames(dir.path(), &url, start);
        assert!(well && of_url == of_file, "{said}");
    }
    let (well, _, said) = frames(dir.path(), &format!("weft://{}/none.mkv", server.1), "0");
    assert!(!well && said.contains("404"), "{said}");
    // The proxies have ended with their titles.
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let commands = all.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    let left = commands
        .map(|command| String::from_utf8_lossy(&command).into_owned())
        .find(|command| command.contains("\0proxy\0") && command.contains(&server.1));
    assert_eq!(left, None);
    let (well, _, said) = frames(dir.path(), "weft://no host/a.mkv", "0");
    assert!(!well && said.contains("does not listen"), "{said}");
}
