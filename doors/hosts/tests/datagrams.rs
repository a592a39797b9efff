//! UDP of unmodified programs between two hosts: frames of datagram-iWARP between those that take them, plain datagrams with all others, and the same results.

mod common;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{Host, broker, hosts, weft};
use weft_dropin::{Done, Running, Weft, have};
use weft_run::ud;
use weft_wire::dgram::{self, Datagram};

const PORT: u16 = 7479;
const PYTHON: (&str, &str) = ("/usr/bin/python3", "python3");

fn start_broker(host: &Host) -> Running {
    let running = Weft::bare().start(&host.on(&broker().display().to_string()));
    host.wait_for(PORT);
    running
}

/// Programs run as `weft run --hosts --datagrams --explain` runs them, and look for their peers at once.
fn framing() -> Weft {
    weft()
        .env("WEFT_RUN_DATAGRAMS", "on")
        .env("WEFT_RUN_LOOK", "1")
}

fn python(script: &str) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/py")
        .join(script);
    format!("{} {}", PYTHON.0, script.display())
}

fn file(name: &str) -> PathBuf {
    let file =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
    let _ = fs::remove_file(&file);
    file
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_mins(1);
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What passes the cable.
struct Sniffer {
    running: Running,
    log: PathBuf,
}

/// A datagram on the cable: its ports, and its bytes.
struct Seen {
    ports: [u16; 2],
    bytes: Vec<u8>,
}

impl Sniffer {
    /// `ready` is made when frames have passed in both directions.
    fn start(host: &Host, port: u16, ready: &Path) -> Sniffer {
        let log = file(&format!("log-{port}"));
        let line = format!(
            "{} {port} {} {}",
            python("sniff.py"),
            log.display(),
            ready.display()
        );
        let running = Weft::bare().start(&host.on(&line));
        wait_until("the sniffer starts", || running.text().contains("sniffs"));
        Sniffer { running, log }
    }

    /// Waits until it has written what `is_there` looks for: it may be behind.
    fn end_after(self, is_there: impl Fn(&[Seen]) -> bool) -> Vec<Seen> {
        wait_until("it passes the cable", || is_there(&self.seen()));
        self.end()
    }

    fn end(self) -> Vec<Seen> {
        let seen = self.seen();
        drop(self.running);
        seen
    }

    fn seen(&self) -> Vec<Seen> {
        let text = fs::read_to_string(&self.log).unwrap();
        let lines = text.lines().filter_map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let &[_, from, _, to, hex] = words.as_slice() else {
                return None;
            };
            let digits = if hex == "-" { "" } else { hex };
            let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).ok();
            Some(Seen {
                ports: [from.parse().ok()?, to.parse().ok()?],
                bytes: (0..digits.len()).step_by(2).map_while(byte).collect(),
            })
        });
        lines.collect()
    }
}

/// The payload of a frame, which is addressed as the specification says.
fn payload(seen: &Seen) -> Option<&[u8]> {
    let (numbers, range) = match dgram::read(&seen.bytes).ok()? {
        Datagram::Message(header, range) => ([header.src_qp, header.dst_qp], range),
        Datagram::Segment(segment, range) => ([segment.src_qp, segment.dst_qp], range),
        Datagram::Control(_) => return None,
    };
    assert_eq!(numbers, seen.ports.map(ud::number));
    Some(&seen.bytes[range])
}

/// Both ends of `udp.py`. They wait for `ready`.
fn both_ends(
    [near, far]: &[Host; 2],
    [client, server]: [&Weft; 2],
    by_v6: bool,
    port: u16,
    ready: &Path,
) -> [Done; 2] {
    let line = python("udp.py");
    // The server takes the family from the name.
    let family = if by_v6 { "6" } else { "4" };
    let server = server.start(&far.on(&format!("{line} server {port} family{family}")));
    wait_until("the server starts", || server.text().contains("bound"));
    let addr = if by_v6 { far.v6 } else { far.v4 };
    let client =
        client.start(&near.on(&format!("{line} client {addr} {port} {}", ready.display())));
    [client.end(), server.end()]
}

/// What the programs have printed, without the reports of weft.
fn told(done: &Done) -> Vec<&str> {
    let is_report = |line: &&str| line.starts_with("weft run:") || line.starts_with("  ");
    done.text
        .lines()
        .filter(|line| !line.is_empty() && !is_report(line))
        .collect()
}

/// A number of the report: `"sent"`, `"received"` or `"as they are"`.
fn count(done: &Done, what: &str) -> u64 {
    let reports = done.text.lines().filter_map(|line| {
        let report = line.trim().strip_prefix("datagram-iWARP: ")?;
        let part = report.split(", ").find(|part| part.contains(what))?;
        part.split(' ').next()?.parse::<u64>().ok()
    });
    reports.sum()
}

#[test]
fn every_call_tells_programs_what_it_tells_them_on_plain_udp() {
    let Some(hosts) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let brokers = [start_broker(&hosts[0]), start_broker(&hosts[1])];
    for (by_v6, port) in [(false, 9200), (true, 9210)] {
        let there = file("there");
        fs::write(&there, "").unwrap();
        let bare = Weft::bare();
        let plain = both_ends(&hosts, [&bare, &bare], by_v6, port, &there);
        let ready = file(&format!("ready-{port}"));
        let sniffer = Sniffer::start(&hosts[1], port, &ready);
        let framed = both_ends(&hosts, [&framing(), &framing()], by_v6, port, &ready);
        let seen = sniffer.end_after(|seen| {
            seen.iter()
                .any(|one| payload(one).unwrap_or(&one.bytes) == b"closing")
        });
        for (plain, framed) in plain.iter().zip(&framed) {
            assert_eq!(
                told(framed.good()),
                told(plain.good()),
                "{}{}",
                framed.show(),
                plain.show()
            );
            assert!(count(framed, "sent") > 30, "{}", framed.show());
            assert!(count(framed, "received") > 30, "{}", framed.show());
            assert_eq!(count(framed, "as they are"), 0, "{}", framed.show());
        }
        assert!(
            plain[0].text.contains("refused ECONNREFUSED"),
            "{}",
            plain[0].show()
        );
        // On the cable: both kinds of frames, in both directions.
        let versions = |ports: [u16; 2], version: u8| {
            let frames = seen.iter().filter(|one| one.ports == ports);
            frames
                .filter(|one| payload(one).is_some() && one.bytes[1] >> 4 == version)
                .count()
        };
        for ports in [[port, port + 1], [port + 1, port]] {
            assert!(versions(ports, 1) > 20, "{ports:?}");
        }
        // A datagram that was one packet is one, also on a path with the least MTU: longer ones of one packet go without a frame.
        let mtu = if by_v6 { 1452 } else { 1472 };
        for len in [1400, mtu] {
            assert!(seen.iter().any(|one| one.bytes.len() == len), "{len}");
        }
        let is_it = |one: &Seen| payload(one).is_some_and(|it| it.len() == 500);
        assert!(seen.iter().any(is_it));
        // Of those in fragments the first is seen.
        let is_long = |one: &Seen| one.bytes.starts_with(b"W\x20");
        assert!(by_v6 || seen.iter().any(is_long));
    }
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
}

#[test]
fn peers_without_it_get_plain_datagrams() {
    let Some(hosts) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let there = file("there-too");
    fs::write(&there, "").unwrap();
    let bare = Weft::bare();
    let run = |sides: [&Weft; 2], port: u16| {
        let sniffer = Sniffer::start(&hosts[1], port, &file("never"));
        let done = both_ends(&hosts, sides, false, port, &there);
        let frames = sniffer
            .end()
            .iter()
            .filter(|one| payload(one).is_some())
            .count();
        assert_eq!(frames, 0);
        done
    };
    let plain = run([&bare, &bare], 9230);
    let without = weft().env("WEFT_RUN_LOOK", "1");
    // No broker on the server's host, then one.
    let near = start_broker(&hosts[0]);
    let alone = run([&framing(), &framing()], 9230);
    assert_eq!(told(alone[0].good()), told(plain[0].good()));
    drop(near);
    let brokers = [start_broker(&hosts[0]), start_broker(&hosts[1])];
    let framing = framing();
    for sides in [
        [&framing, &bare],
        [&bare, &framing],
        [&framing, &without],
        [&without, &framing],
    ] {
        let done = run(sides, 9230);
        for (plain, done) in plain.iter().zip(&done) {
            assert_eq!(told(done.good()), told(plain.good()), "{}", done.show());
        }
    }
    // Brokers that do not answer.
    brokers.iter().for_each(Running::pause);
    let done = run([&framing, &framing], 9230);
    brokers.iter().for_each(Running::go_on);
    for (plain, done) in plain.iter().zip(&done) {
        assert_eq!(told(done.good()), told(plain.good()), "{}", done.show());
    }
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
}

/// Datagrams that a server of `counted.py` has printed: what they say.
fn got(server: &Running) -> Vec<String> {
    let text = server.text();
    let lines = text.lines().filter_map(|line| line.strip_prefix("got "));
    lines.map(str::to_owned).collect()
}

/// Waits until the server has printed `n` datagrams more. All that it has printed are the client's.
fn serves(server: &Running, n: usize) {
    let before = got(server).len();
    wait_until("the server is sent to", || got(server).len() >= before + n);
    for line in got(server) {
        assert!(line.starts_with("b'number "), "{line}");
    }
}

#[test]
fn a_socket_in_the_place_of_another_gets_what_it_takes() {
    let Some([near, far]) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let port = 9250;
    let brokers = [start_broker(&near), start_broker(&far)];
    let line = python("counted.py");
    let serve = |how: &Weft| {
        let server = how.start(&far.on(&format!("{line} server {port}")));
        wait_until("the server starts", || server.text().contains("bound"));
        server
    };
    let cable = || {
        let ready = file("framed");
        (Sniffer::start(&far, port, &ready), ready)
    };
    let (sniffer, ready) = cable();
    let client = framing().start(&near.on(&format!("{line} client {} {port}", far.v4)));
    let server = serve(&framing());
    wait_until("frames pass", || ready.exists());
    serves(&server, 20);
    // Again under weft: it takes frames from its first datagram on, although the sender's answer is of its predecessor.
    server.kill();
    let server = serve(&framing());
    serves(&server, 50);
    // Without weft.
    server.kill();
    let server = serve(&Weft::bare());
    serves(&server, 100);
    drop(sniffer.end());
    // And under weft once more: frames pass again.
    server.kill();
    let (sniffer, ready) = cable();
    let server = serve(&framing());
    wait_until("frames pass again", || ready.exists());
    drop(sniffer.end());
    // The brokers end: plain datagrams, after the last frames.
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
    serves(&server, 50);
    let (sniffer, _) = cable();
    serves(&server, 50);
    let seen = sniffer.end();
    assert!(seen.len() > 50);
    assert!(seen.iter().all(|one| payload(one).is_none()));
    client.kill().never_says("wrong");
}

#[test]
fn a_socket_of_one_interface_without_weft_gets_no_frames() {
    let Some([near, far]) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let port = 9370;
    let brokers = [start_broker(&near), start_broker(&far)];
    let line = python("counted.py");
    let serve = |how: &Weft, interface: &str| {
        let server = how.start(&far.on(&format!("{line} server {port} {interface}")));
        wait_until("the server starts", || server.text().contains("bound"));
        server
    };
    let send = || framing().start(&near.on(&format!("{line} client {} {port}", far.v4)));
    let open = serve(&framing(), "any");
    let ready = file("of-one-interface");
    let sniffer = Sniffer::start(&far, port, &ready);
    let client = send();
    wait_until("frames pass", || ready.exists());
    client.kill().never_says("wrong");
    drop(sniffer.end());
    // From now on another socket gets what comes by the cable.
    let narrow = serve(&Weft::bare(), "weft0");
    let client = send();
    serves(&narrow, 200);
    client.kill().never_says("wrong");
    open.kill().never_says("wrong");
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
}

/// A server of `odd.py` to which frames come.
fn odd(how: &str, port: u16) -> Option<Done> {
    let [near, far] = hosts().filter(|_| have(&[PYTHON]))?;
    let brokers = [start_broker(&near), start_broker(&far)];
    let ready = file(how);
    let sniffer = Sniffer::start(&far, port, &ready);
    let line = format!("{} {how} {port} {}", python("odd.py"), ready.display());
    let server = framing().start(&far.on(&line));
    wait_until("the server starts", || server.text().contains("bound"));
    let line = format!("{} client {} {port}", python("counted.py"), far.v4);
    let client = framing().start(&near.on(&line));
    let done = server.end();
    done.good().says("framed").says("done").never_says("wrong");
    client.kill().never_says("wrong");
    drop(sniffer.end());
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
    Some(done)
}

#[test]
fn every_form_of_a_receive_takes_frames_off() {
    if let Some(done) = odd("arguments", 9300) {
        let refused = done.text.matches("refused -1 Bad address").count();
        assert_eq!(refused, 2, "{}", done.show());
    }
}

#[test]
fn a_program_that_is_executed_by_a_child_gets_no_frames() {
    if let Some(done) = odd("exec", 9310) {
        let lines: Vec<&str> = done
            .text
            .lines()
            .filter(|line| line.starts_with("exec "))
            .collect();
        assert_eq!(lines.len(), 60, "{}", done.show());
        for line in lines {
            assert!(line.starts_with("exec b'number "), "{line}");
        }
    }
}

#[test]
fn a_process_to_which_a_child_passes_a_socket_gets_no_frames() {
    if let Some(done) = odd("rights", 9320) {
        done.says("read");
    }
}

#[test]
fn a_socket_beside_another_that_is_passed_on_gets_no_frames() {
    if let Some(done) = odd("beside", 9380) {
        done.says("read");
    }
}

#[test]
fn a_sandbox_gets_no_frames() {
    if let Some(done) = odd("seccomp", 9330) {
        done.says("filter 0").says("read");
    }
}

#[test]
fn a_socket_with_a_peek_offset_gets_no_frames() {
    if let Some(done) = odd("peek", 9340) {
        done.says("read");
    }
}

#[test]
fn sockets_to_which_no_other_host_sends_keep_what_waits_and_their_errors() {
    let Some([near, far]) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let brokers = [start_broker(&near), start_broker(&far)];
    let line = near.on(&format!("{} {}", python("local.py"), far.v4));
    let plain = Weft::bare().run(&line);
    plain.good().says("left 40").says("error ECONNREFUSED");
    let framed = framing().run(&line);
    assert_eq!(told(framed.good()), told(&plain), "{}", framed.show());
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
}

#[test]
fn a_socket_takes_frames_again_when_its_broker_was_started_again() {
    let Some([near, far]) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let port = 9350;
    let first = [start_broker(&near), start_broker(&far)];
    let line = python("counted.py");
    let server = framing().start(&far.on(&format!("{line} server {port}")));
    wait_until("the server starts", || server.text().contains("bound"));
    let client = || {
        let ready = file("restarted");
        let sniffer = Sniffer::start(&far, port, &ready);
        let line = format!("{line} client {} {port}", far.v4);
        let client = framing().start(&near.on(&line));
        wait_until("frames pass", || ready.exists());
        client.kill().never_says("wrong");
        let seen = sniffer.end();
        let keys = seen.iter().filter(|one| one.ports[1] == port);
        let keys = keys.filter_map(|one| match dgram::read(&one.bytes).ok()? {
            Datagram::Message(header, _) => Some(header.qkey),
            _ => None,
        });
        keys.collect::<std::collections::BTreeSet<u32>>()
    };
    let before = client();
    for broker in first {
        broker.kill().never_says("panicked");
    }
    let second = [start_broker(&near), start_broker(&far)];
    // What one program has learned of the first broker another has learned of the second.
    assert_eq!(client(), before);
    serves(&server, 0);
    for broker in second {
        broker.kill().never_says("panicked");
    }
}

#[test]
fn a_socket_that_looks_for_the_longest_packet_sends_no_frames() {
    let Some([near, far]) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let port = 9360;
    let brokers = [start_broker(&near), start_broker(&far)];
    let line = python("counted.py");
    let server = framing().start(&far.on(&format!("{line} server {port}")));
    wait_until("the server starts", || server.text().contains("bound"));
    let ready = file("probes");
    let sniffer = Sniffer::start(&far, port, &ready);
    let client = |more: &str| {
        let line = format!("{line} client {} {port} {more}", far.v4);
        framing().start(&near.on(&line))
    };
    let other = client("");
    wait_until("frames pass", || ready.exists());
    let probing = client(&format!("{}", port + 1));
    let of_it = |seen: &[Seen]| -> Vec<bool> {
        let ports = [[port + 1, port], [port, port + 1]];
        let of_it = seen.iter().filter(|one| ports.contains(&one.ports));
        of_it.map(|one| payload(one).is_some()).collect()
    };
    let seen = sniffer.end_after(|seen| of_it(seen).len() > 300);
    let frames = seen
        .iter()
        .filter(|one| one.ports[0] == port + 1 && payload(one).is_some());
    assert_eq!(frames.count(), 0);
    for client in [other, probing] {
        client.kill().never_says("wrong");
    }
    serves(&server, 0);
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
}

/// A frame with this payload to the server's queue pair.
fn forged(port: u16, qkey: u32, payload: &[u8]) -> Vec<u8> {
    let (front, more) = ud::overhead(payload.len());
    let mut room = vec![0; payload.len() + more];
    room[front..][..payload.len()].copy_from_slice(payload);
    let frame = ud::Frame {
        from: 1,
        to: ud::number(port),
        qkey,
        incarnation: 1,
        msn: 1,
    };
    let len = frame.complete(&mut room, payload.len());
    assert_eq!(len, Some(room.len()));
    room
}

#[test]
fn forged_frames_are_datagrams_of_their_sender() {
    let Some([near, far]) = hosts().filter(|_| have(&[PYTHON])) else {
        return;
    };
    let port = 9260;
    let brokers = [start_broker(&near), start_broker(&far)];
    let line = python("counted.py");
    let server = framing().start(&far.on(&format!("{line} server {port}")));
    wait_until("the server starts", || server.text().contains("bound"));
    let ready = file("framed-9260");
    let sniffer = Sniffer::start(&far, port, &ready);
    let client = framing().start(&near.on(&format!("{line} client {} {port}", far.v4)));
    wait_until("frames pass", || ready.exists());
    client.kill();
    // An attacker that reads the cable knows the Q_Key.
    let seen = sniffer.end();
    let to_server = seen.iter().filter(|one| one.ports[1] == port);
    let qkey = to_server
        .filter_map(|one| match dgram::read(&one.bytes) {
            Ok(Datagram::Message(header, _)) => Some(header.qkey),
            _ => None,
        })
        .next_back()
        .expect("there are frames");
    let good = forged(port, qkey, b"number forged");
    let mut datagrams = Vec::new();
    // Damaged in each place behind the Q_Key, cut, longer, for another number, with another kind of message.
    for at in (2..6).chain(14..good.len()) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        datagrams.push(bad);
    }
    datagrams.extend((14..good.len()).map(|len| good[..len].to_vec()));
    datagrams.push([&good[..], b"x"].concat());
    datagrams.push(forged(port + 1, qkey, b"number other"));
    let segment = dgram::Segment {
        dst_qp: ud::number(port),
        src_qp: 1,
        qkey,
        incarnation: 1,
        msn: 1,
        len: 8,
        offset: 0,
        target: None,
        imm: None,
        solicited: false,
        reliable: None,
    };
    let target = Some(dgram::Target {
        stag: 1,
        to: 1 << 40,
    });
    for (segment, payload) in [
        (dgram::Segment { target, ..segment }, &b"number w"[..]),
        (
            dgram::Segment {
                len: 1 << 29,
                ..segment
            },
            b"number p",
        ),
        (
            dgram::Segment {
                imm: Some(1),
                ..segment
            },
            b"number i",
        ),
    ] {
        let mut out = Vec::new();
        segment.emit(payload.len(), &mut out);
        out.extend_from_slice(payload);
        dgram::seal(&mut out);
        datagrams.push(out);
    }
    let refused = datagrams.len();
    // What only looks like a frame is the program's, and a frame within a frame is taken out once.
    let stranger = forged(port, qkey ^ 1, b"number stranger");
    datagrams.push(stranger);
    datagrams.push(forged(port, qkey, &good));
    datagrams.push(good);
    datagrams.push(b"the last".to_vec());
    let list = file("forged");
    let mut lines = String::new();
    for byte in datagrams
        .iter()
        .flat_map(|it| it.iter().map(Some).chain([None]))
    {
        match byte {
            Some(byte) => write!(lines, "{byte:02x}").unwrap(),
            None => lines.push('\n'),
        }
    }
    fs::write(&list, lines).unwrap();
    let before = got(&server).len();
    let line = format!("{} {} {port} {}", python("send.py"), far.v4, list.display());
    let attacker = Weft::bare().run(&near.on(&line));
    attacker
        .good()
        .says("back b'number forged'")
        .says("back b'the last'");
    wait_until("the server has said what it got", || {
        got(&server)
            .iter()
            .any(|line| line.starts_with("b'the last'"))
    });
    let after = got(&server);
    // The last ones of the client may come late.
    let is_forged = |line: &&str| {
        let number = line.strip_prefix("b'number ");
        number.is_none_or(|rest| !rest.starts_with(|digit: char| digit.is_ascii_digit()))
    };
    let told: Vec<&str> = after[before..]
        .iter()
        .map(String::as_str)
        .filter(is_forged)
        .collect();
    // A receive that `poll` has announced does not wait: what is no frame is the program's as it is.
    assert_eq!(told.len(), refused + 4, "{told:?}");
    let (bad, told) = told.split_at(refused);
    // Python writes a quotation mark in the other ones.
    let is_whole = |line: &&str| line.starts_with("b'W") || line.starts_with("b\"W");
    assert!(bad.iter().all(is_whole), "{bad:?}");
    assert!(
        told[0].starts_with("b'W\\x10") && told[0].contains("number stranger"),
        "{told:?}"
    );
    assert!(
        told[1].starts_with("b'W\\x10") && told[1].contains("number forged"),
        "{told:?}"
    );
    assert_eq!(told[2], format!("b'number forged' {}", near.v4));
    assert_eq!(told[3], format!("b'the last' {}", near.v4));
    assert!(refused > 60);
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
}

#[test]
fn sip_calls_go_by_datagram_iwarp() {
    let Some([near, far]) = hosts().filter(|_| have(&[("sipp", "sip-tester")])) else {
        return;
    };
    let port = 9270;
    let brokers = [start_broker(&near), start_broker(&far)];
    let sniffer = Sniffer::start(&far, port, &file("sip"));
    let server =
        framing().start(&far.on(&format!("sipp -sn uas -i {} -p {port} -nostdin", far.v4)));
    far.wait_for_datagrams(port);
    let line = format!(
        "sipp -sn uac {}:{port} -i {} -p {} -m 60 -r 60 -d 20 -nostdin",
        far.v4,
        near.v4,
        port + 1
    );
    let client = framing().run(&near.on(&line));
    client.good();
    let framed = |seen: &[Seen], from: u16, first: &[u8]| {
        let of = seen.iter().filter(|one| one.ports[0] == from);
        of.filter(|one| payload(one).is_some_and(|sip| sip.starts_with(first)))
            .count()
    };
    sniffer.end_after(|seen| {
        framed(seen, port + 1, b"INVITE sip:") >= 40
            && framed(seen, port, b"SIP/2.0 180") >= 40
            && framed(seen, port, b"SIP/2.0 200") >= 40
    });
    drop(server);
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
}
