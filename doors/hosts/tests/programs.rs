//! Unmodified programs on two hosts, each with or without a broker: they receive the same bytes as on TCP.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{Host, broker, hosts, switched, weft};
use weft_dropin::{Done, Running, Weft, have};

const PORT: u16 = 7479;
const PYTHON: (&str, &str) = ("/usr/bin/python3", "python3");

fn start_broker(host: &Host) -> Running {
    let running = Weft::bare().start(&host.on(&broker().display().to_string()));
    host.wait_for(PORT);
    running
}

/// The two ends of a seeded dialogue; `meanwhile` is called while it runs.
fn seeded(
    [near, far]: &[Host; 2],
    [client_side, server_side]: [&Weft; 2],
    seed: u16,
    by_v6: bool,
    meanwhile: impl FnOnce(),
) -> [Done; 2] {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/py/seeded.py");
    let (script, port) = (script.display(), 9000 + seed);
    let server = server_side.start(&far.on(&format!("{} {script} server {port} {seed}", PYTHON.0)));
    far.wait_for(port);
    let addr = if by_v6 { far.v6 } else { far.v4 };
    let client = client_side.start(&near.on(&format!(
        "{} {script} client {addr} {port} {seed}",
        PYTHON.0
    )));
    meanwhile();
    [client.end(), server.end()]
}

#[test]
fn seeded_dialogues_are_as_on_tcp() {
    let Some(hosts) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let brokers = [start_broker(&hosts[0]), start_broker(&hosts[1])];
    let mut went_over = [0, 0];
    for seed in 1..=12_u16 {
        let by_v6 = seed % 2 == 0;
        let done = seeded(&hosts, [&weft(), &weft()], seed, by_v6, || {});
        for one in &done {
            one.good().says("bytes are right").never_says("broken");
        }
        went_over[usize::from(by_v6)] += u32::from(switched(&done[0].text) > 0);
        // On a busy machine a short one can be over before the brokers have met.
        if seed >= 2 && went_over.iter().all(|&n| n > 0) {
            break;
        }
    }
    assert!(went_over.iter().all(|&n| n > 0), "{went_over:?}");
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
}

#[test]
fn a_peer_or_a_host_without_weft_stays_on_tcp() {
    let Some(hosts) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let plain = Weft::bare();
    let near = start_broker(&hosts[0]);
    // No broker there.
    let done = seeded(&hosts, [&weft(), &weft()], 1, false, || {});
    done[0]
        .good()
        .says("bytes are right")
        .says("no broker of weft answers on the peer's host");
    done[1]
        .good()
        .says("bytes are right")
        .says("no broker runs here");
    let far = start_broker(&hosts[1]);
    // A program there that knows nothing of weft, and the other way round.
    for (client, server) in [(weft(), plain.clone()), (plain, weft())] {
        let done = seeded(&hosts, [&client, &server], 2, false, || {});
        for one in &done {
            one.good().says("bytes are right");
            assert_eq!(switched(&one.text), 0, "{}", one.show());
        }
    }
    for broker in [near, far] {
        broker.kill().never_says("panicked");
    }
}

#[test]
fn a_broker_that_dies_never_changes_a_byte() {
    let Some(hosts) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    for (seed, pause) in [(3, 200), (4, 600)] {
        let near = start_broker(&hosts[0]);
        let far = start_broker(&hosts[1]);
        let mut victim = Some(if seed % 2 == 0 { near } else { far });
        let done = seeded(&hosts, [&weft(), &weft()], seed, false, || {
            std::thread::sleep(Duration::from_millis(pause));
            victim.take().unwrap().kill();
        });
        // Each has all of its bytes, or an error that the connection is broken.
        for one in &done {
            one.good().never_says("wrong bytes");
            let is_right = one.text.contains("bytes are right");
            assert!(is_right != one.text.contains("broken:"), "{}", one.show());
        }
    }
}

/// The client and the server of `ends.py`, and the file of one word between them.
fn both_ends(
    side: &Weft,
    [near, far]: &[Host; 2],
    port: u16,
    how: &str,
) -> ([Running; 2], PathBuf) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/py/ends.py");
    let file =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ends-{}-{port}", std::process::id()));
    let _ = fs::remove_file(&file);
    let (line, word) = (format!("{} {}", PYTHON.0, script.display()), file.display());
    let server = side.start(&far.on(&format!("{line} server {port} {how} {word}")));
    far.wait_for(port);
    let line = format!("{line} client {} {port} {how} {word}", far.v4);
    let client = side.start(&near.on(&line));
    ([client, server], file)
}

/// What they print; both have gone over to shared memory.
fn ends(hosts: &[Host; 2], port: u16, how: &str) -> [Done; 2] {
    let (both, _) = both_ends(&weft(), hosts, port, how);
    let done = both.map(Running::end);
    for one in &done {
        assert!(switched(&one.good().text) > 0, "{}", one.show());
    }
    done
}

#[test]
fn bytes_that_nobody_reads_end_the_connection_by_a_reset() {
    let Some(hosts) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let brokers = [start_broker(&hosts[0]), start_broker(&hosts[1])];
    for (port, how) in [(9101, "close"), (9102, "pass")] {
        let [client, server] = ends(&hosts, port, how);
        client.says("told: ['0x2019']");
        client.says("client: ConnectionResetError then 0 bytes");
        if how == "pass" {
            server.says("taken: ConnectionResetError then 0 bytes");
        }
    }
    drop(brokers);
}

#[test]
fn a_connection_that_has_gone_back_to_tcp_has_no_false_events() {
    let Some(hosts) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let brokers = [start_broker(&hosts[0]), start_broker(&hosts[1])];
    for (port, how) in [(9111, "zerocopy"), (9112, "lowat"), (9113, "oob")] {
        let [client, _] = ends(&hosts, port, how);
        client.never_says("wrong event");
        client.says("event: ['0x1'] 17 bytes");
    }
    drop(brokers);
}

#[test]
fn poll_select_and_a_shutdown_for_reading_are_as_on_tcp() {
    let Some(hosts) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let brokers = [start_broker(&hosts[0]), start_broker(&hosts[1])];
    for (port, how) in [(9121, "waits"), (9123, "shut")] {
        let plain = both_ends(&Weft::bare(), &hosts, port, how).0;
        let plain = plain.map(Running::end);
        let ours = ends(&hosts, port + 1, how);
        for (plain, ours) in plain.iter().zip(&ours) {
            let told = |done: &Done| -> Vec<String> {
                let lines = done.text.lines().filter(|line| !line.is_empty());
                let is_report =
                    |line: &&str| line.starts_with("weft run:") || line.starts_with("  ");
                lines
                    .filter(|line| !is_report(line))
                    .map(str::to_owned)
                    .collect()
            };
            assert_eq!(told(ours), told(plain.good()), "{}", ours.show());
        }
    }
    drop(brokers);
}

/// The brokers answer only when the sender has ended its direction: it makes no call that would hear the answer.
#[test]
fn an_end_before_the_brokers_answer_is_heard() {
    let Some(hosts) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let brokers = [start_broker(&hosts[0]), start_broker(&hosts[1])];
    brokers.iter().for_each(Running::pause);
    let (both, _) = both_ends(&weft(), &hosts, 9141, "half");
    while !both[0].text().contains("over") {
        std::thread::sleep(Duration::from_millis(10));
    }
    brokers.iter().for_each(Running::go_on);
    let [client, server] = both.map(Running::end);
    client.good().says("end: 0 bytes");
    server.good();
    drop(brokers);
}

/// The host of the sender answers no more while a socket is passed on: the call takes two seconds, and the connection is reset.
#[test]
fn a_sender_that_does_not_go_back_is_waited_for_two_seconds() {
    let Some(hosts) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let brokers = [start_broker(&hosts[0]), start_broker(&hosts[1])];
    let ([client, server], file) = both_ends(&weft(), &hosts, 9131, "held");
    while !client.text().contains("over") {
        std::thread::sleep(Duration::from_millis(10));
    }
    brokers[0].pause();
    fs::write(&file, "now\n").unwrap();
    let server = server.end();
    brokers[0].go_on();
    server
        .good()
        .says("taken: ConnectionResetError then 0 bytes");
    let took = server.text.lines().find_map(|line| {
        let after = line.strip_prefix("passed after ")?;
        after.strip_suffix(" s")?.parse::<f64>().ok()
    });
    let took = took.expect("it says how long");
    assert!((1.9..8.0).contains(&took), "{}", server.show());
    client.end();
    drop(brokers);
}

#[test]
fn redis_iperf3_and_nginx_serve_the_other_host() {
    let Some([near, far]) = hosts() else { return };
    let brokers = [start_broker(&near), start_broker(&far)];
    let dir = tempfile::tempdir().unwrap();
    if have(&[
        ("redis-server", "redis-server"),
        ("redis-benchmark", "redis-tools"),
    ]) {
        let line = format!(
            "redis-server --port 7000 --bind 0.0.0.0 --protected-mode no --dir {} --save ",
            dir.path().display()
        );
        let server = weft().start_words(&far.on(&line).split(' ').collect::<Vec<_>>());
        far.wait_for(7000);
        let line = format!(
            "redis-benchmark -h {} -p 7000 -n 6000 -c 4 -d 3000 -t set,get --csv",
            far.v4
        );
        let done = weft().run(&near.on(&line));
        done.good().never_says("ERR");
        assert!(switched(&done.text) > 0, "{}", done.show());
        server.interrupt().never_says("panicked");
    }
    if have(&[("iperf3", "iperf3")]) {
        for options in ["", " -R"] {
            let server = weft().start(&far.on("iperf3 -s -1 -p 7001"));
            far.wait_for(7001);
            let line = format!("iperf3 -c {} -p 7001 -n 30M -l 128K{options}", far.v4);
            weft().run(&near.on(&line)).good().says("iperf Done.");
            server.end().good();
        }
    }
    if have(&[("nginx", "nginx"), ("curl", "curl")]) {
        let root = dir.path();
        let content: Vec<u8> = (0..3_000_000_u32)
            .map(|n| (n.wrapping_mul(n) >> 7) as u8)
            .collect();
        fs::write(root.join("big"), &content).unwrap();
        let config = format!(
            "daemon off; worker_processes 1; pid {0}/pid; error_log stderr;
             events {{}} http {{ access_log off; sendfile on; keepalive_requests 10000;
             client_body_temp_path {0}/a; proxy_temp_path {0}/b; fastcgi_temp_path {0}/c; uwsgi_temp_path {0}/d; scgi_temp_path {0}/e;
             server {{ listen [::]:7002 ipv6only=off; root {0}; }} }}",
            root.display()
        );
        fs::write(root.join("nginx.conf"), "user root;".to_owned() + &config).unwrap();
        let server =
            weft().start(&far.on(&format!("nginx -p {0} -c {0}/nginx.conf", root.display())));
        far.wait_for(7002);
        let url = format!("http://[{}]:7002/big", far.v6);
        let line = format!("curl -sS -g --fail {}", format!("{url} ").repeat(8));
        let out = root.join("out");
        let script = root.join("get.sh");
        fs::write(&script, format!("{line} > {}", out.display())).unwrap();
        weft()
            .run(&near.on(&format!("sh {}", script.display())))
            .good();
        let got = fs::read(&out).unwrap();
        assert_eq!(got.len(), 8 * content.len());
        assert!(got.chunks(content.len()).all(|one| one == content));
        server.interrupt().never_says("panicked");
    }
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
}
