//! `WEFT_FAULTS`: unmodified programs under injected faults, which are the same in each run.

use std::process::Command;

use tempfile::TempDir;
use weft_dropin::{Done, Weft, free_port, have};

use crate::carriers;

const NEEDED: &[(&str, &str)] = &[("ibv_rc_pingpong", "ibverbs-utils")];

/// Runs `ibv_rc_pingpong` with the client under a script of faults. Returns the ends of the client and of the server, which is ended when it waits for ever.
fn under(script: &str) -> (Done, Done) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("faults");
    std::fs::write(&file, script).unwrap();
    let weft = Weft::on("weft_ib0");
    let port = free_port();
    let line = format!("ibv_rc_pingpong -d weft_ib0 -g 0 -p {port} -n 300");
    let server = weft.start(&line).listens(port);
    let client = weft
        .env("WEFT_FAULTS", &file)
        .run(&format!("{line} 127.0.0.1"));
    let server = if client.is_good() {
        server.end()
    } else {
        server.kill()
    };
    (client, server)
}

/// The comparable part of a run: its end, and its lines about completions. Addresses and times differ from run to run.
fn verdict(done: &Done) -> (i32, Vec<String>) {
    let lines = done.text.lines().filter(|line| line.contains("status"));
    (done.code(), lines.map(str::to_owned).collect())
}

#[test]
fn a_chosen_completion_error_comes_at_the_chosen_request_each_time() {
    if !have(NEEDED) {
        return;
    }
    let runs = [(); 2].map(|()| under("send 100: complete RETRY_EXC_ERR\n").0);
    for run in &runs {
        assert_eq!(run.code(), 1, "{}", run.show());
        // IBV_WC_RETRY_EXC_ERR
        run.says("Failed status transport retry counter exceeded (12)");
    }
    assert_eq!(verdict(&runs[0]), verdict(&runs[1]));
}

#[test]
fn a_connection_dies_without_a_word() {
    if !have(NEEDED) {
        return;
    }
    let (client, _) = under("send 50: die\n");
    assert_eq!(client.code(), 1, "{}", client.show());
    // Independent of the time: the connection breaks before the request is sent, and the request detects that.
    client.says("Failed status transport retry counter exceeded (12)");
}

#[test]
fn without_a_rule_that_applies_nothing_happens() {
    if !have(NEEDED) {
        return;
    }
    let (client, server) = under("send 100000: die  # it sends 300\n");
    client.good().says("300 iters in");
    server.good().says("300 iters in");
}

#[test]
fn a_script_that_means_nothing_is_not_ignored() {
    if !have(NEEDED) {
        return;
    }
    let (client, _) = under("send 100: explode\n");
    assert!(!client.is_good(), "{}", client.show());
    client.says("weft: ").says("line 1");
}

/// A program of ours, compiled in a folder; `None` where it cannot be.
pub(super) fn made(name: &str) -> Option<(TempDir, String)> {
    if !have(&[
        ("cc", "gcc"),
        ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    ]) {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join(name);
    let source = format!("{}/c/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Werror", "-o"]).arg(&program);
    assert!(cc.args([&source, "-libverbs"]).status().unwrap().success());
    let program = program.into_os_string().into_string().unwrap();
    Some((dir, program))
}

fn script(dir: &TempDir, text: &str) -> String {
    let file = dir.path().join("faults");
    std::fs::write(&file, text).unwrap();
    file.into_os_string().into_string().unwrap()
}

#[test]
fn a_port_goes_down_and_comes_back_and_nothing_moves_in_between() {
    let Some((dir, program)) = made("events") else {
        return;
    };
    let faults = script(&dir, "send 10 on 1: port down 200ms\n");
    for weft in carriers("weft_ib0") {
        let done = weft.env("WEFT_FAULTS", &faults).run(&program);
        done.good()
            .says("after 10 sends: port error, port 1\nafter 10 sends: port active, port 1\n");
    }
}

#[test]
fn a_send_through_a_port_that_stays_down_fails() {
    if !have(NEEDED) {
        return;
    }
    let (client, _) = under("send 50: port down\n");
    assert_eq!(client.code(), 1, "{}", client.show());
    client.says("Failed status transport retry counter exceeded (12)");
}

#[test]
fn a_peer_waits_for_a_port_that_is_down() {
    let Some((dir, program)) = made("two") else {
        return;
    };
    let faults = script(&dir, "recv 2: port down 300ms\n");
    for weft in carriers("weft_ib0") {
        let done = weft.run(&format!("{program} port {faults}"));
        done.good()
            .says("write: after the port was up\nsend: after the port was up\n");
    }
}

#[test]
fn a_dead_peer_flushes_where_that_is_asked_for() {
    let Some((dir, program)) = made("two") else {
        return;
    };
    let faults = script(&dir, "send 2: die\n");
    for weft in carriers("weft_ib0") {
        let weft = weft.env("WEFT_PEER_DEATH", "flush");
        // IBV_QPS_ERR
        for (how, line) in [("killed", "killed"), ("dies", &format!("dies {faults}"))] {
            let done = weft.run(&format!("{program} {line}"));
            done.good()
                .says(&format!("{how}: Work Request Flushed Error, state 6\n"));
        }
        let wrong = weft.env("WEFT_PEER_DEATH", "loud");
        let done = wrong.run(&format!("{program} killed"));
        assert!(!done.is_good(), "{}", done.show());
        done.says("WEFT_PEER_DEATH=loud: it has to be silent or flush");
    }
}

#[test]
fn faults_say_in_the_log_what_they_did() {
    if !have(NEEDED) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let faults = script(
        &dir,
        "send 2: delay 1ms\nsend 100 on 1: complete RETRY_EXC_ERR\n",
    );
    let weft = Weft::on("weft_ib0")
        .env("WEFT_FAULTS", faults)
        .env("WEFT_LOG", "info");
    let port = free_port();
    let line = format!("ibv_rc_pingpong -d weft_ib0 -g 0 -p {port} -n 300");
    let server = Weft::on("weft_ib0").start(&line).listens(port);
    let client = weft.run(&format!("{line} 127.0.0.1"));
    server.kill();
    client
        .says("fault on purpose: send 2 on 1: delay 1ms")
        .says("fault on purpose: send 100 on 1: complete RETRY_EXC_ERR");
}
