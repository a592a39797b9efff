//! UDP of unmodified programs between two hosts: frames of datagram-iWARP between those that take them, plain datagrams with all others, and the same results.

mod common;

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
    let until = Instant::now() + Duration::from_secs(60);
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

    fn end(self) -> Vec<Seen> {
        drop(self.running);
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

/// A number of the report: `"sent"`, `"received"` or `"dropped"`.
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
        let seen = sniffer.end();
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
            assert_eq!(count(framed, "dropped"), 0, "{}", framed.show());
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
        // A datagram that was one packet is one: the longest of one packet goes without a frame.
        let mtu = if by_v6 { 1452 } else { 1472 };
        let lone = seen.iter().filter(|one| one.bytes.len() == mtu);
        assert!(lone.clone().count() > 0);
        assert!(
            seen.iter()
                .any(|one| payload(one).is_some_and(|it| it.len() == 1400))
        );
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
    for broker in brokers {
        broker.kill().never_says("panicked");
    }
}
