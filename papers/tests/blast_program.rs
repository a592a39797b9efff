//! `weft-papers blast` and `weft-papers link` as a user runs them.

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::process::Stdio;

use common::{Output, papers};

/// The lines of a JSON file.
fn lines(path: &std::path::Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn both_ends_here() {
    let dir = tempfile::tempdir().unwrap();
    let (json, html) = (dir.path().join("b.jsonl"), dir.path().join("b.html"));
    let out = Output::of(
        papers()
            .args(["blast", "--transport", "tcp", "--exponential", "10K"])
            .args(["--max", "64K", "--messages", "300", "--repetitions", "3"])
            .args(["--mode", "indirect", "--verify", "--no-crc"])
            .arg("--json")
            .arg(&json)
            .arg("--html")
            .arg(&html),
    );
    out.ok();
    for words in ["throughput", "±", "CPU of the receiver", "Over tcp"] {
        assert!(out.stdout.contains(words), "{words}: {}", out.stdout);
    }
    let lines = lines(&json);
    let runs = lines.iter().filter(|line| !line["repetition"].is_null());
    let runs: Vec<_> = runs.collect();
    assert_eq!(runs.len(), 3);
    for run in runs {
        assert_eq!(run["messages"], 300);
        assert_eq!(run["plan"]["mode"], "indirect");
        assert_eq!(run["client"]["direct"], 0);
        assert!(run["seconds"].as_f64().unwrap() > 0.0);
    }
    let mean = lines
        .iter()
        .find(|line| line["metric"] == "throughput_Gbps");
    let mean = mean.expect("a mean");
    assert_eq!(mean["runs"], 3);
    assert!(mean["ci95"].as_f64().unwrap() >= 0.0);
    let page = fs::read_to_string(html).unwrap();
    assert!(page.contains("<svg") && page.contains("weft-papers blast"));
}

#[test]
fn a_server_and_its_client() {
    let mut server = papers()
        .args(["blast", "--listen=127.0.0.1:0", "--once"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(server.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    let addr = line.trim_end().strip_prefix("listening on ").expect(&line);
    let out = Output::of(
        papers()
            .args(["blast", addr, "--kind", "seqpacket", "--design", "source"])
            .args(["--size", "5K", "--messages", "100", "--repetitions", "2"])
            .args(["--verify", "--registered", "no", "--wait", "busy"]),
    );
    out.ok();
    assert!(
        out.stdout.contains("seqpacket, design source"),
        "{}",
        out.stdout
    );
    assert!(server.wait().unwrap().success());
}

#[test]
fn what_cannot_be_is_said() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let nobody = listener.local_addr().unwrap().to_string();
    drop(listener);
    let cases: [(&[&str], i32, &str); 8] = [
        (&[&nobody], 1, "cannot connect"),
        (&["not an address:1:2"], 2, "there is no address"),
        (&["--size", "0"], 2, "1 B to 1 GiB"),
        (&["--outstanding-send", "0"], 2, "operations"),
        (
            &["--messages", "1", "--bytes", "1"],
            2,
            "cannot be used with",
        ),
        (&["--registered", "maybe"], 2, "yes or no"),
        (&["--json", "/nowhere/at/all"], 1, "cannot write"),
        (&["--listen", "--once", "host"], 2, "cannot be used with"),
    ];
    for (args, code, words) in cases {
        let out = Output::of(papers().arg("blast").args(args));
        assert_eq!(out.code, code, "{args:?} {out:?}");
        assert!(out.stderr.contains(words), "{args:?} {out:?}");
    }
    // Something else listens there.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let other = listener.local_addr().unwrap().to_string();
    let answer = std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH_9.9\r\n").unwrap();
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let out = Output::of(papers().args(["blast", &other]));
    assert_eq!(out.code, 1, "{out:?}");
    assert!(out.stderr.contains("not a blast"), "{out:?}");
    answer.join().unwrap();
}

#[test]
fn a_long_link() {
    let program = env!("CARGO_BIN_EXE_weft-papers");
    let far = format!("{program} blast --once --listen=198.18.0.2:7000");
    let out = Output::of(
        papers()
            .args(["link", "--delay", "10ms", "--far", &far, "--"])
            .args([program, "blast", "198.18.0.2:7000", "--messages", "20"])
            .args(["--outstanding-send", "1", "--mode", "direct"])
            .args([
                "--outstanding-recv",
                "1",
                "--repetitions",
                "2",
                "--size",
                "1K",
            ]),
    );
    if ["root", "/dev/net/tun", "iproute2"]
        .iter()
        .any(|lack| out.stderr.contains(lack))
    {
        assert_eq!(out.code, 1);
        println!("skipped: {}", out.stderr);
        return;
    }
    out.ok();
    assert!(out.stdout.contains("Over tls"), "{}", out.stdout);
    assert!(out.stderr.contains("link: there: "), "{}", out.stderr);
    // One receive at a time, each with an advert that takes its way: twenty round trips.
    let line = out
        .stdout
        .lines()
        .find(|line| line.contains("time per message"));
    let number = line.and_then(|line| line.split_whitespace().nth(3));
    let value = number.expect(&out.stdout);
    let micros: f64 = match value.parse::<f64>() {
        // `number` writes thousands from ten thousand on as `20.1 k`.
        Ok(value) if line.is_some_and(|line| line.contains(" k ")) => value * 1000.0,
        Ok(value) => value,
        Err(error) => panic!("{error}: {}", out.stdout),
    };
    assert!(micros > 15_000.0, "{}", out.stdout);
    let code = Output::of(papers().args(["link", "--delay", "0ms", "--", "sh", "-c", "exit 7"]));
    assert_eq!(code.code, 7, "{code:?}");
}
