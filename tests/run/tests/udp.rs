//! UDP programs, unmodified: with both ends under `weft run`, and with either alone; and random calls compared with plain UDP.

use std::fs;
use std::time::{Duration, Instant};

use weft_run_tests::{
    Done, PYTHON, Running, Weft, free_port, have, iperf3, paths, plain, python, same_lines, sides,
    weft,
};

/// A client of a server, with both and with either under weft: only with both there are rings.
fn with_and_without(server: &str, client: &str, check: impl Fn(&Done)) {
    let start = |side: &Weft, port: u16| {
        let line = server.replace("PORT", &port.to_string());
        side.start(&line).hears(port, 1)
    };
    let end = |running: Running| {
        if server.starts_with("dnsmasq") {
            running.terminate()
        } else {
            running.interrupt()
        }
    };
    weft_run_tests::with_and_without(start, client, end, paths, check);
}

#[test]
fn asyncio_echoes_each_message() {
    if !have(&[PYTHON]) {
        return;
    }
    let script = python("udp_echo.py");
    with_and_without(
        &format!("{script} server PORT"),
        &format!("{script} client PORT"),
        |done| {
            done.says("all messages came back");
        },
    );
}

#[test]
fn a_wait_ends_when_the_socket_is_shut_down_for_reading() {
    if !have(&[PYTHON]) {
        return;
    }
    with_and_without(
        &format!("{} server PORT", python("udp_echo.py")),
        &format!("{} PORT", python("udp_end.py")),
        |done| {
            done.says("both waits ended");
        },
    );
}

#[test]
fn sipp_places_calls() {
    if !have(&[("sipp", "sip-tester")]) {
        return;
    }
    with_and_without(
        "sipp -sn uas -i 127.0.0.1 -p PORT -nostdin",
        "sipp -sn uac -i 127.0.0.1 127.0.0.1:PORT -r 200 -m 200 -d 0 -nostdin -timeout 40",
        |done| {
            assert_eq!(done.code(), 0, "{}", done.show());
        },
    );
}

#[test]
fn iperf3_sends_datagrams() {
    if !have(&[("iperf3", "iperf3")]) {
        return;
    }
    for (server_side, client_side, both) in sides() {
        let (server, port) = iperf3(&server_side);
        let line = format!("iperf3 -u -c 127.0.0.1 -p {port} -n 8M -b 200M -l 8K");
        let done = client_side.run(&line);
        done.good().says("iperf Done.");
        let served = server.end();
        let n = paths(&done.text) + paths(&served.text);
        assert_eq!(n > 0, both, "{}\n{}", done.show(), served.show());
    }
}

/// Both ends are busy from the first datagram on: the sender has no moment to wait for its ring, and the receiver looks for it while it is being offered.
#[test]
fn a_sender_that_never_stops_goes_over() {
    if !have(&[("iperf3", "iperf3")]) {
        return;
    }
    for _ in 0..5 {
        let (server, port) = iperf3(&weft());
        let done = weft().run(&format!(
            "iperf3 -u -c 127.0.0.1 -p {port} -n 100M -b 0 -l 1400"
        ));
        done.good().says("iperf Done.");
        assert_eq!(paths(&done.text), 1, "{}", done.show());
        server.end().good();
    }
}

#[test]
fn other_descriptors_are_heard_of_beside_a_busy_ring() {
    if !have(&[PYTHON]) {
        return;
    }
    let line = python("udp_others.py");
    plain().run(&line).good().says("others: heard");
    let done = weft().run(&line);
    done.good().says("others: heard");
    assert!(paths(&done.text) > 0, "{}", done.show());
}

#[test]
fn socat_carries_a_file() {
    if !have(&[("socat", "socat")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    // Less than the kernel's default buffer holds (a datagram of 1000 bytes counts as 2304), so that nothing is lost to a slow receiver.
    let bytes: Vec<u8> = (0..60_000_u32).map(|n| (n % 251) as u8).collect();
    fs::write(&from, &bytes).unwrap();
    let port = free_port();
    let server = weft()
        .start(&format!(
            "socat -u -T 20 UDP4-RECV:{port},bind=127.0.0.1 OPEN:{},creat,append",
            to.display()
        ))
        .hears(port, 1);
    let line = format!(
        "socat -u -b 1000 OPEN:{} UDP4-SENDTO:127.0.0.1:{port}",
        from.display()
    );
    weft().run(&line).good();
    let begun = Instant::now();
    while fs::metadata(&to).map_or(0, |m| m.len()) < bytes.len() as u64 {
        let has = fs::metadata(&to).map_or(0, |m| m.len());
        assert!(
            begun.elapsed().as_secs() < 20,
            "{has} bytes of {} have come",
            bytes.len()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    server.interrupt();
    assert_eq!(fs::read(&to).unwrap(), bytes);
}

#[test]
fn dnsmasq_answers_dig() {
    if !have(&[("dnsmasq", "dnsmasq-base"), ("dig", "bind9-dnsutils")]) {
        return;
    }
    for (server_side, client_side) in [(weft(), weft()), (weft(), plain()), (plain(), weft())] {
        let port = free_port();
        let server = server_side
            .env("WEFT_RUN_LOOK", "1")
            .start(&format!(
                "dnsmasq --keep-in-foreground --conf-file=/dev/null --no-resolv --no-hosts --bind-interfaces \
                 --listen-address=127.0.0.1 --port={port} --pid-file= --user= --address=/weft.test/192.0.2.7"
            ))
            .hears(port, 1);
        for _ in 0..6 {
            let line =
                format!("dig @127.0.0.1 -p {port} +short +tries=5 +time=2 a.weft.test b.weft.test");
            let done = client_side.run(&line);
            done.good();
            let answers = done.text.lines().filter(|line| *line == "192.0.2.7");
            assert_eq!(answers.count(), 2, "{}", done.show());
        }
        let served = server.terminate();
        assert!(!served.text.contains("panicked"), "{}", served.show());
    }
}

#[test]
fn dnsmasq_answers_dnsperf() {
    if !have(&[("dnsmasq", "dnsmasq-base"), ("dnsperf", "dnsperf")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let queries = dir.path().join("queries");
    fs::write(&queries, "a.weft.test A\nb.weft.test A\n").unwrap();
    let client = format!(
        "dnsperf -s 127.0.0.1 -p PORT -d {} -n 1000 -c 2 -t 20",
        queries.display()
    );
    with_and_without(
        "dnsmasq --keep-in-foreground --conf-file=/dev/null --no-resolv --no-hosts --bind-interfaces \
         --listen-address=127.0.0.1 --port=PORT --pid-file= --user= --address=/weft.test/192.0.2.7",
        &client,
        |done| {
            done.says("Queries completed:    2000 (100.00%)")
                .says("NOERROR 2000 (100.00%)");
        },
    );
}

/// It asks the kernel for time stamps, so its sockets stay the kernel's.
#[test]
fn chrony_tells_the_time() {
    if !have(&[("chronyd", "chrony")]) {
        return;
    }
    for (server_side, client_side) in [(weft(), weft()), (weft(), plain()), (plain(), weft())] {
        let dir = tempfile::tempdir().unwrap();
        let settings = dir.path().join("chrony.conf");
        let port = free_port();
        let pid = dir.path().join("pid");
        let text = format!(
            "port {port}\ncmdport 0\nbindaddress 127.0.0.1\nlocal stratum 1\nallow 127.0.0.1\npidfile {}\n",
            pid.display()
        );
        fs::write(&settings, text).unwrap();
        // -x: nobody's clock is set. -U: any user may.
        let server = format!("chronyd -x -U -d -u root -f {}", settings.display());
        let server = server_side.start(&server).hears(port, 1);
        let other = dir.path().join("other");
        let source = format!("server 127.0.0.1 port {port} iburst maxsamples 4");
        let pid = format!("pidfile {}", other.display());
        let words = ["chronyd", "-x", "-U", "-Q", "-t", "20", "-u", "root"];
        let words = [&words[..], &[&source, "cmdport 0", &pid]].concat();
        let done = client_side.start_words(&words).end();
        done.good().says("System clock wrong by");
        let served = server.interrupt();
        assert!(!served.text.contains("panicked"), "{}", served.show());
    }
}

/// It sets and reads the type of service of each datagram, so its sockets stay the kernel's.
#[test]
fn mosh_shows_a_terminal() {
    if !have(&[("mosh-server", "mosh"), PYTHON]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("program");
    fs::write(&program, "sleep 0.5; echo mosh-says-hello; sleep 0.5\n").unwrap();
    for (server_side, client_side) in [(weft(), weft()), (weft(), plain()), (plain(), weft())] {
        let port = free_port();
        let locale = |weft: Weft| weft.env("LC_ALL", "C.UTF-8").env("TERM", "xterm");
        // Its server goes to the background, and lives as long as what started it here.
        let server = format!(
            "mosh-server new -i 127.0.0.1 -p {port} -- sh {}; sleep 60",
            program.display()
        );
        let running = locale(server_side).start_words(&["sh", "-c", &server]);
        let (said, begun) = (format!("MOSH CONNECT {port} "), Instant::now());
        let key = loop {
            let text = running.text();
            if let Some(key) = text.lines().find_map(|line| line.strip_prefix(&said)) {
                break key.trim().to_owned();
            }
            assert!(begun.elapsed().as_secs() < 60, "no key: {text}");
            std::thread::sleep(Duration::from_millis(10));
        };
        let line = format!("{} mosh-client 127.0.0.1 {port}", python("terminal.py"));
        let done = locale(client_side).env("MOSH_KEY", key).run(&line);
        done.good()
            .says("mosh-says-hello")
            .says("[mosh is exiting.]");
    }
}

fn stress(weft: &Weft, seed: u64, rounds: u32) -> String {
    let line = format!("{} {seed} {rounds}", python("udp_stress.py"));
    let done = weft.run(&line);
    done.good().says(&format!("stress: {rounds} rounds"));
    done.text
}

#[test]
fn every_result_is_that_of_plain_udp() {
    if !have(&[PYTHON]) {
        return;
    }
    let rounds = 12;
    for seed in 1..=4 {
        let expected = stress(&plain(), seed, rounds);
        let got = stress(&weft().env("WEFT_RUN_LOOK", "1"), seed, rounds);
        assert!(paths(&got) > rounds, "seed {seed}: {got}");
        same_lines(&expected, &got, &format!("seed {seed}"));
    }
}

#[test]
fn time_limits_and_signals_are_those_of_udp() {
    if !have(&[PYTHON]) {
        return;
    }
    let line = python("udp_calls.py");
    plain().run(&line).good().says("udp calls: good");
    let done = weft().env("WEFT_RUN_LOOK", "1").run(&line);
    done.good().says("udp calls: good");
    assert!(paths(&done.text) > 3, "{}", done.show());
}

#[test]
fn what_is_told_of_a_datagram_is_true_of_the_next_one() {
    if !have(&[PYTHON]) {
        return;
    }
    for seed in 1..=3 {
        let line = format!("{} {seed}", python("udp_named.py"));
        plain().run(&line).good().says("named: thousands taken");
        let done = weft().run(&line);
        done.good().says("named: thousands taken");
        assert!(paths(&done.text) >= 5, "{}", done.show());
    }
}
