//! What the tests of `weft media` share.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use weft_media::client::Dial;

use super::{Output, weft};

/// A running `weft media ...` that listens, killed on drop.
pub struct Server {
    child: Child,
    addr: SocketAddr,
    fingerprint: String,
}

impl Server {
    /// `weft media serve` on a free port.
    pub fn start(dir: &Path, args: &[&str]) -> Self {
        let mut command = weft();
        command
            .args(["media", "serve", "--bind", "127.0.0.1:0"])
            .args(args)
            .arg(dir);
        Self::of(&mut command)
    }

    /// Any program of ours that says where it listens, with its standard input as it is.
    pub fn of(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.next().expect("a line").unwrap();
        let addr = line
            .split_once(" on ")
            .and_then(|(_, rest)| rest.split([',', ' ']).next())
            .map(|addr| addr.trim_start_matches("http://").trim_end_matches('/'))
            .expect(&line)
            .parse()
            .expect(&line);
        let has_key = command.get_args().all(|arg| arg != "--plain")
            && (line.starts_with("listening") || line.starts_with("serving"));
        let fingerprint = if has_key {
            let found = lines.by_ref().map_while(Result::ok).find_map(|line| {
                let rest = line.strip_prefix("the key of this ")?;
                let (_, key) = rest.split_once(" is ")?;
                key.split(';').next().map(str::to_owned)
            });
            found.expect("its fingerprint")
        } else {
            String::new()
        };
        // Read on, so that it never waits for us.
        std::thread::spawn(move || lines.count());
        Self {
            child,
            addr,
            fingerprint,
        }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    pub fn url(&self, name: &str) -> String {
        format!("{}/{name}", self.addr)
    }

    /// How a viewer in this process connects.
    pub fn dial(&self) -> Dial {
        Dial::new(self.addr, Some(super::tls()))
    }

    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What `weft media play` says of the connection.
pub fn wire_of(local: &str) -> &'static str {
    match local {
        "off" => "TCP by TLS",
        _ => "over ",
    }
}

/// `weft media play ARGS... URL`, and what it writes.
pub fn play(url: &str, args: &[&str], local: &str) -> (Output, Vec<u8>) {
    let out = weft()
        .args(["media", "play"])
        .args(args)
        .arg(url)
        .env("WEFT_LOCAL", local)
        .output()
        .unwrap();
    let said = Output {
        code: out.status.code().unwrap_or(-1),
        stdout: String::new(),
        stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
    };
    (said, out.stdout)
}

/// Whether a program is there; otherwise the test says that it is skipped.
pub fn have(program: &str) -> bool {
    let there = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .any(|dir| dir.join(program).is_file());
    if !there {
        println!("skipped: no {program} here (./x test installs it)");
    }
    there
}

/// A movie of so many seconds, 25 frames each, H.264 and AAC, made by ffmpeg.
pub fn make_movie(dir: &Path, name: &str, args: &[&str], seconds: u32) -> Option<PathBuf> {
    let coders = "-c:v libx264 -preset ultrafast -g 10 -c:a aac";
    let args: Vec<&str> = coders.split(' ').chain(args.iter().copied()).collect();
    make(dir, name, "640x360", &args, seconds)
}

/// The same of 1,080 lines, and encoded as these arguments say.
pub fn make_film(dir: &Path, name: &str, args: &str, seconds: u32) -> Option<PathBuf> {
    let args: Vec<&str> = args.split(' ').collect();
    make(dir, name, "1920x1080", &args, seconds)
}

fn make(dir: &Path, name: &str, size: &str, args: &[&str], seconds: u32) -> Option<PathBuf> {
    if !have("ffmpeg") {
        return None;
    }
    let path = dir.join(name);
    let video = format!("testsrc2=size={size}:rate=25:duration={seconds}");
    let audio = format!("sine=frequency=440:duration={seconds}");
    let status = Command::new("ffmpeg")
        .args([
            "-v", "error", "-f", "lavfi", "-i", &video, "-f", "lavfi", "-i", &audio,
        ])
        .args(["-pix_fmt", "yuv420p", "-shortest"])
        .args(args)
        .arg(&path)
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    Some(path)
}

/// The checksum of each decoded frame.
pub fn framemd5(path: &Path) -> String {
    let out = Command::new("ffmpeg")
        .args(["-v", "error", "-i"])
        .arg(path)
        .args(["-f", "framemd5", "-flags", "bitexact", "-"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    text
}
