//! A broker in the background stays as long as a process lives that has connected to it, and then ends.
//!
//! The test runs itself again in a new network namespace, because a broker's name belongs to its user and namespace.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use weft_dropin::{have, say};
use weft_hosts::{Broker, Config};
use weft_run::hosts;
use weft_verbs::{Device, LocalMode};

const PART: &str = "WEFT_HOSTS_IDLE";
const NAME: &str = "a_broker_stays_for_a_server_without_clients";
const IDLE: Duration = Duration::from_millis(300);

fn again(part: &str, program: &str) -> Command {
    let mut command = Command::new(program);
    command.env(PART, part);
    command
}

#[test]
fn a_broker_stays_for_a_server_without_clients() {
    match std::env::var(PART).as_deref() {
        Ok("broker") => return broker(),
        Ok("program") => return program(),
        _ => {}
    }
    if !have(&[("unshare", "util-linux")]) {
        return;
    }
    let own = std::env::current_exe().unwrap();
    let inside = |words: &[&str]| {
        let mut command = again("broker", "unshare");
        command.args(["--net", "--"]).args(words).output().unwrap()
    };
    if !inside(&["true"]).status.success() {
        return say("skipped: no network namespaces");
    }
    let output = inside(&[own.to_str().unwrap(), "--exact", NAME, "--nocapture"]);
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("@done"), "{text}");
}

/// As `weft run --hosts`: it comes, and becomes a program that has nothing to do with brokers.
fn program() {
    println!("@there {}", hosts::is_there());
    std::io::stdin().lines().for_each(drop);
}

fn broker() {
    let broker = Broker::start(Config {
        device: Device::builder().local(LocalMode::Off).open().unwrap(),
        bind: Vec::new(),
        port: 1,
        nat: false,
        idle: Some(IDLE),
    });
    let broker = broker.unwrap();
    let running = std::thread::spawn(move || broker.run());
    let own = std::env::current_exe().unwrap();
    let mut program = again("program", own.to_str().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(program.stdout.take().unwrap()).lines();
    assert!(
        lines
            .map_while(Result::ok)
            .any(|line| line.contains("@there true"))
    );
    std::thread::sleep(5 * IDLE);
    assert!(!running.is_finished(), "it did not wait for the program");
    drop(program.stdin.take());
    program.wait().unwrap();
    let until = Instant::now() + Duration::from_mins(1);
    while !running.is_finished() {
        assert!(Instant::now() < until, "it does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    running.join().unwrap().unwrap();
    println!("@done");
}
