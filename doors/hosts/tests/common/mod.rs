//! Two hosts: network namespaces with a cable between them.
#![allow(dead_code, reason = "each test program uses a part")]

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use weft_dropin::{Weft, built, have, say};

/// A process that keeps a network namespace.
pub(crate) struct Host {
    keeper: Child,
    /// Its addresses.
    pub(crate) v4: &'static str,
    pub(crate) v6: &'static str,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

fn run(words: &str) -> Result<(), String> {
    let mut words = words.split(' ');
    let output = Command::new(words.next().unwrap_or_default())
        .args(words)
        .output()
        .map_err(|e| e.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

impl Host {
    fn new(v4: &'static str, v6: &'static str) -> Result<Host, String> {
        // It ends with this test, which has the other end of its standard input.
        let mut keeper = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo up; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| e.to_string())?;
        let mut line = String::new();
        if let Some(out) = keeper.stdout.take() {
            let _ = BufReader::new(out).read_line(&mut line);
        }
        let host = Host { keeper, v4, v6 };
        if line != "up\n" {
            return Err("unshare --net fails".into());
        }
        Ok(host)
    }

    fn pid(&self) -> u32 {
        self.keeper.id()
    }

    /// A command line that runs there.
    pub(crate) fn on(&self, line: &str) -> String {
        format!("nsenter --net=/proc/{}/ns/net {line}", self.pid())
    }

    fn ip(&self, line: &str) -> Result<(), String> {
        run(&self.on(&format!("ip {line}")))
    }

    /// Returns true if something listens on a port there.
    pub(crate) fn listens(&self, port: u16) -> bool {
        let wanted = format!(":{port:04X} ");
        ["tcp", "tcp6"].iter().any(|file| {
            let path = format!("/proc/{}/net/{file}", self.pid());
            let text = std::fs::read_to_string(path).unwrap_or_default();
            text.lines().any(|line| {
                let words: Vec<_> = line.split_whitespace().collect();
                words.get(3) == Some(&"0A") && words[1].ends_with(wanted.trim_end())
            })
        })
    }

    /// Waits until a UDP socket has the port.
    pub(crate) fn wait_for_datagrams(&self, port: u16) {
        let wanted = format!(":{port:04X}");
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let path = format!("/proc/{}/net/udp", self.pid());
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let mut addrs = text
                .lines()
                .filter_map(|line| line.split_whitespace().nth(1));
            if addrs.any(|addr| addr.ends_with(&wanted)) {
                return;
            }
            assert!(Instant::now() < until, "no socket has port {port}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until it does.
    pub(crate) fn wait_for(&self, port: u16) {
        let until = Instant::now() + Duration::from_secs(30);
        while !self.listens(port) {
            assert!(Instant::now() < until, "nothing listens on port {port}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Two of them. `None`, and it is said why, where they cannot be made.
pub(crate) fn hosts() -> Option<[Host; 2]> {
    if !have(&[
        ("ip", "iproute2"),
        ("unshare", "util-linux"),
        ("nsenter", "util-linux"),
    ]) {
        return None;
    }
    let make = || -> Result<[Host; 2], String> {
        let near = Host::new("10.77.0.1", "fd77::1")?;
        let far = Host::new("10.77.0.2", "fd77::2")?;
        near.ip(&format!(
            "link add weft0 type veth peer name weft0 netns {}",
            far.pid()
        ))?;
        for host in [&near, &far] {
            host.ip("link set lo up")?;
            host.ip(&format!("addr add {}/24 dev weft0", host.v4))?;
            // A machine without IPv6 has only the rest.
            let _ = host.ip(&format!("addr add {}/64 dev weft0 nodad", host.v6));
            host.ip("link set weft0 up")?;
        }
        Ok([near, far])
    };
    make()
        .inspect_err(|why| say(&format!("skipped: no network namespaces: {why}")))
        .ok()
}

/// Programs run as `weft run --hosts --explain` runs them.
pub(crate) fn weft() -> Weft {
    // Once: programs that run have it mapped.
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| match std::env::var_os("WEFT_RUN_LIB") {
        Some(dir) => PathBuf::from(dir),
        None => built("run", "run"),
    });
    Weft::bare()
        .env("LD_PRELOAD", library.join("libweft-run.so"))
        .env("WEFT_RUN_EXPLAIN", "1")
        .env("WEFT_RUN_HOSTS", "auto")
}

/// The broker of this crate's example.
pub(crate) fn broker() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    // target/debug/deps/NAME
    program
        .ancestors()
        .nth(2)
        .unwrap()
        .join("examples")
        .join("broker")
}

/// How many connections of a program went over.
pub(crate) fn switched(text: &str) -> u32 {
    let counts = text.lines().filter_map(|line| {
        let (before, _) = line.split_once(" went over to shared memory")?;
        before.rsplit(' ').next()?.parse::<u32>().ok()
    });
    counts.sum()
}
