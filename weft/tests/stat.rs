//! `weft stat`: what processes say of their connections, to whom, and what becomes of those that do not.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Listener, Output, dial, unprivileged, weft};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use weft::cp::rdma::RdmaLink;

/// A listener in another process, and our connection to it.
struct Pair {
    // Ended first.
    _link: RdmaLink,
    listener: Listener,
    _dir: tempfile::TempDir,
}

impl Pair {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::start(dir.path(), &[]);
        Self {
            _link: dial(listener.addr()),
            listener,
            _dir: dir,
        }
    }

    fn pid(&self) -> String {
        self.listener.pid().to_string()
    }
}

fn lines(command: &mut Command) -> Vec<serde_json::Value> {
    let out = Output::of(command);
    out.ok();
    out.stdout
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect()
}

#[test]
fn both_ends_of_a_connection_are_seen() {
    let pair = Pair::new();
    let theirs = lines(weft().args(["stat", "--json", &pair.pid()]));
    assert_eq!(theirs.len(), 1, "{theirs:?}");
    let theirs = &theirs[0];
    assert_eq!(theirs["process"], "weft");
    assert_eq!(theirs["pid"], pair.listener.pid());
    assert_eq!(theirs["local"], pair.listener.addr().to_string());
    assert_eq!(theirs["state"], "connected");
    let ours = lines(weft().args(["stat", "--json"]));
    // Other tests have connections in this process too.
    let ours = ours
        .iter()
        .find(|c| c["peer"] == theirs["local"] && c["local"] == theirs["peer"]);
    let ours = ours.unwrap();
    assert_eq!(ours["pid"], std::process::id());
    assert_eq!(ours["transport"], theirs["transport"]);
    assert!(theirs["age_s"].as_f64().unwrap() < 60.0);
    assert!(theirs["since"].as_f64().unwrap() > 1e9);

    let out = Output::of(weft().args(["stat", &pair.pid()]));
    out.ok();
    let addrs = format!(
        "{} → {}",
        pair.listener.addr(),
        ours["local"].as_str().unwrap()
    );
    assert!(out.stdout.contains(&addrs), "{}", out.stdout);
}

#[test]
fn the_reason_for_tcp_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::start_with(
        weft().env("WEFT_LOCAL", "off"),
        dir.path(),
        "127.0.0.1:0",
        &[],
    );
    let _link = dial(listener.addr());
    let theirs = &lines(weft().args(["stat", "--json", &listener.pid().to_string()]))[0];
    assert_eq!(theirs["transport"], "tls");
    let all = lines(weft().args(["stat", "--json"]));
    let ours = all.iter().find(|c| c["local"] == theirs["peer"]).unwrap();
    assert_eq!(ours["transport"], "tls");
    assert!(
        ours["reason"]
            .as_str()
            .unwrap()
            .contains("no shared memory"),
        "{ours}"
    );
}

#[test]
fn processes_that_are_not_there_or_do_not_want_to_be_seen() {
    let out = Output::of(weft().args(["stat", "1"]));
    assert_eq!(out.code, 1);
    assert!(out.stderr.contains("no weft process 1 "), "{}", out.stderr);
    assert_eq!(Output::of(weft().args(["stat", "--watch=0"])).code, 2);

    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::start_with(
        weft().env("WEFT_STAT", "off"),
        dir.path(),
        "127.0.0.1:0",
        &[],
    );
    let _link = dial(listener.addr());
    let out = Output::of(weft().args(["stat", &listener.pid().to_string()]));
    assert_eq!(out.code, 1);
    assert!(out.stderr.contains("WEFT_STAT=off"), "{}", out.stderr);
}

#[test]
fn a_process_without_connections() {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::start(dir.path(), &[]);
    let pid = listener.pid().to_string();
    let out = Output::of(weft().args(["stat", &pid]));
    out.ok();
    assert_eq!(out.stdout, "no connections\n");
    assert!(lines(weft().args(["stat", "--json", &pid])).is_empty());
}

#[test]
fn a_stopped_process_is_named_and_holds_nobody_up() {
    let pair = Pair::new();
    let pid = Pid::from_raw(pair.listener.pid().cast_signed()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    // The signal takes its time; it is our child, and all of its threads have stopped when we are told.
    waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
    // Its backlog is finite: the last of these cannot even connect.
    for _ in 0..12 {
        let out = Output::of(weft().args(["stat", &pair.pid()]));
        assert_eq!(out.code, 1);
        assert!(out.stderr.contains("does not answer"), "{out:?}");
    }
    let out = Output::of(weft().arg("stat"));
    out.ok();
    let note = format!("process {} does not answer", pair.pid());
    assert!(out.stderr.contains(&note), "{out:?}");
    kill_process(pid, Signal::CONT).unwrap();
    // It turns to those who have gone first.
    let began = Instant::now();
    while Output::of(weft().args(["stat", &pair.pid()])).code != 0 {
        assert!(began.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn other_users_are_told_nothing() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(
        dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let Some(mut stranger) = unprivileged(dir.path()) else {
        return;
    };
    let pair = Pair::new();
    let out = Output::of(stranger.arg("stat"));
    out.ok();
    assert_eq!(out.stdout.lines().next(), Some("no connections"));
    assert!(out.stderr.contains("only root may ask"), "{}", out.stderr);
    // Nor when it asks without our program's manners.
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let name = format!("@weft-stat/1/{}/", pair.listener.pid());
    let name = table
        .split_ascii_whitespace()
        .find(|w| w.starts_with(&name))
        .unwrap();
    let script = "import socket, sys\n\
                  s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n\
                  s.settimeout(20)\n\
                  s.connect('\\0' + sys.argv[1][1:])\n\
                  print(len(s.recv(2048)))";
    let mut python = Command::new("python3");
    std::os::unix::process::CommandExt::uid(&mut python, 65534);
    if Command::new("python3").arg("--version").output().is_ok() {
        let out = Output::of(python.args(["-c", script, name]));
        assert_eq!(out.stdout, "0\n", "{out:?}");
    }
    // Root sees everybody's.
    let all = lines(weft().args(["stat", "--json"]));
    let local: SocketAddr = pair.listener.addr();
    assert!(all.iter().any(|c| c["local"] == local.to_string()));
}

#[test]
fn watching_shows_rates_and_ends_with_the_process() {
    let mut pair = Pair::new();
    let mut watch = weft()
        .args(["stat", "--watch=0.1", "--json", &pair.pid()])
        .stdout(Stdio::piped())
        .spawn()
        .map(Watcher)
        .unwrap();
    let mut stdout = BufReader::new(watch.0.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert!(!line.contains("per_s"), "{line}");
    line.clear();
    stdout.read_line(&mut line).unwrap();
    let second: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert!(second["per_s"]["tx_fpdus"].is_number(), "{line}");
    pair.listener.kill();
    assert!(watch.0.wait().unwrap().success());

    // A reader that has seen enough ends it too.
    let pair = Pair::new();
    let mut watch = weft()
        .args(["stat", "--watch=0.1", &pair.pid()])
        .stdout(Stdio::piped())
        .spawn()
        .map(Watcher)
        .unwrap();
    drop(watch.0.stdout.take());
    assert!(watch.0.wait().unwrap().success());
}

/// Does not outlive a test that fails.
struct Watcher(Child);

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
