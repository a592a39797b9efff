//! `WEFT_FAULTS`: what unmodified programs see when something goes wrong on purpose, the same in each run.

use std::process::Command;

use weft_dropin::{Done, Weft, free_port, have};

const NEEDED: &[(&str, &str)] = &[("ibv_rc_pingpong", "ibverbs-utils")];

/// `ibv_rc_pingpong`, the client under a script of faults. How the client ended, and the server, which is ended when it waits for ever.
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

/// What a run has to say for itself: its end, and its lines about completions. Addresses and times differ from run to run.
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
    // Whatever the time: it breaks before the request goes out, and that one finds out.
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

#[test]
fn a_port_goes_down_and_comes_back() {
    if !have(&[
        ("cc", "gcc"),
        ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    ]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (program, faults) = (dir.path().join("events"), dir.path().join("faults"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/c/events.c");
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Werror", "-o"]).arg(&program);
    assert!(cc.args([source, "-libverbs"]).status().unwrap().success());
    std::fs::write(&faults, "send 10 on 1: port down 200ms\n").unwrap();
    let weft = Weft::on("weft_ib0").env("WEFT_FAULTS", &faults);
    let done = weft.run(program.to_str().unwrap());
    done.good()
        .says("20 sends\nport error, port 1\nport active, port 1\n");
}
