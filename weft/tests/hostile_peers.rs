//! `weft cp --listen` under the hostile peers of tests/hostile, which share no code with it, as far as these get: they do not speak TLS. (Peers that do stand
//! in hostile.rs and mitm.rs.) After each attack: honest senders go on, and the listener has not
//! grown, keeps no descriptors, and has no files that nobody sent it.

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use common::{Listener, Output, names, noise, weft};
use weft_hostile::network::connections::{Say, flood};
use weft_hostile::report::Report;

/// How much the listener may grow by an attack: the allocator gives little back of what it kept for some hundred peers.
const GROWTH: u64 = 96 << 20;
/// Descriptors that it may have more than at first, once the attackers have gone.
const DESCRIPTORS: usize = 12;

/// The most memory that the listener has had in use since [`forget`].
fn memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.unwrap() << 10
}

fn forget(pid: u32) {
    // proc_pid_clear_refs(5): 5 resets the peak.
    let _ = fs::write(format!("/proc/{pid}/clear_refs"), "5");
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

struct Stage {
    dir: tempfile::TempDir,
    listener: Listener,
    honest: u64,
}

impl Stage {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("to")).unwrap();
        let mut command = weft();
        // Each connection that is turned away is a line.
        command.stderr(Stdio::null());
        let listener =
            Listener::start_with(&mut command, &dir.path().join("to"), "127.0.0.1:0", &[]);
        let mut stage = Self {
            dir,
            listener,
            honest: 0,
        };
        for _ in 0..3 {
            stage.honest_sender();
        }
        forget(stage.listener.pid());
        stage
    }

    /// Sends a file, in shared memory and over TCP in turn.
    fn honest_sender(&mut self) {
        self.honest += 1;
        let name = self.dir.path().join(format!("honest-{}", self.honest));
        fs::write(&name, noise(100_000, self.honest)).unwrap();
        let mut command = weft();
        command
            .env("WEFT_LOCAL", ["auto", "off"][(self.honest % 2) as usize])
            .args(["cp", "--no-progress", "--peer", self.listener.fingerprint()])
            .arg(&name)
            .arg(self.listener.target(""));
        Output::of(&mut command).ok();
        let arrived = self.to().join(name.file_name().unwrap());
        assert!(fs::read(arrived).unwrap() == noise(100_000, self.honest));
    }

    fn to(&self) -> PathBuf {
        self.dir.path().join("to")
    }

    fn attack(&mut self, what: &str, attack: impl FnOnce(&mut Report)) {
        let pid = self.listener.pid();
        let (memory_before, descriptors_before) = (memory(pid), descriptors(pid));
        let mut report = Report::default();
        attack(&mut report);
        let (cases, faults) = report.outcome();
        assert!(cases > 0 && faults.is_empty(), "{what}: {faults:#?}");
        println!("{what}: {cases} cases");
        // What is kept stands while honest senders come.
        self.honest_sender();
        self.honest_sender();
        drop(report);
        let grown = memory(pid).saturating_sub(memory_before);
        assert!(grown < GROWTH, "{what}: it grew by {} KiB", grown >> 10);
        common::until("the attackers' descriptors are closed", || {
            (descriptors(pid) <= descriptors_before + DESCRIPTORS).then_some(())
        });
        let honest = names(&self.to());
        assert_eq!(honest.len() as u64, self.honest, "{what}: {honest:?}");
    }
}

#[test]
fn ten_thousand_connections_that_say_nothing_of_use() {
    let mut stage = Stage::new();
    let victim = stage.listener.addr();
    for say in [Say::Nothing, Say::Half] {
        stage.attack("flood", |report| {
            flood(victim, 10_000, say, Duration::from_secs(2), report);
        });
    }
}
