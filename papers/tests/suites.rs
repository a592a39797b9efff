//! A small run of each suite, with what has to hold of its results, and the pages of the results that are kept.

mod common;

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{Output, papers};
use serde_json::Value;
use weft_report::record::{Metric, read_lines};

/// Runs a suite, and returns what it writes as JSON and as a page.
fn suite(words: &str) -> (String, String) {
    let directory = tempfile::tempdir().unwrap();
    let (json, html) = (directory.path().join("json"), directory.path().join("html"));
    let mut command = papers();
    command.args(words.split_whitespace());
    command.arg("--json").arg(&json).arg("--html").arg(&html);
    Output::of(&mut command).ok();
    let read = |file| std::fs::read_to_string(file).expect("a file");
    (read(json), read(html))
}

/// The JSON lines of a suite whose results are no records.
fn lines(text: &str) -> Vec<Value> {
    let lines = text.lines();
    lines
        .map(|line| serde_json::from_str(line).expect(line))
        .collect()
}

/// Whether a program is on this machine or, as `weft`, beside the program of the suites; else the test says that it does nothing.
fn has(program: &str) -> bool {
    let beside = Path::new(env!("CARGO_BIN_EXE_weft-papers")).with_file_name(program);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).map(|folder| folder.join(program));
    let found = beside.is_file() || places.any(|file| file.is_file());
    if !found {
        println!("skipped: {program} is not here");
    }
    found
}

/// Extended sockets: a point of each experiment and each target, with its conclusion.
#[test]
fn extended_sockets() {
    let words = "exs --quick --repetitions 2 --seconds 0.005 --figure table3,12a,if2,stream,sync";
    let (text, page) = suite(words);
    let lines = lines(&text);
    for transport in ["local", "tcp"] {
        for experiment in ["equal", "half", "sizes", "small"] {
            let speeds = lines.iter().filter(|line| {
                line["experiment"] == experiment
                    && line["transport"] == transport
                    && line["metric"] == "throughput_Gbps"
            });
            let speeds: Vec<f64> = speeds.filter_map(|line| line["min"].as_f64()).collect();
            assert!(speeds.len() >= 6, "{experiment} {transport}");
            assert!(
                speeds.iter().all(|speed| *speed > 0.0),
                "{experiment} {transport}"
            );
        }
    }
    // What each mode is for: the statistics say that it did that.
    let ratios = |variant: &str| {
        let of = lines
            .iter()
            .filter(|line| line["variant"] == variant && line["metric"] == "direct_ratio");
        of.filter_map(|line| line["max"].as_f64())
            .collect::<Vec<_>>()
    };
    assert!(ratios("direct").iter().all(|ratio| *ratio > 0.999));
    assert!(ratios("indirect").iter().all(|ratio| *ratio == 0.0));
    for words in [
        "Fig. 9a",
        "Fig. 12b",
        "Interface fig. 3",
        "1 MiB stream",
        "hold",
    ] {
        assert!(page.contains(words), "{words}");
    }
}

/// Every figure of the AZ-SDP paper, at few places.
#[test]
fn sockets_direct() {
    let (text, page) = suite("sdp --quick --runs 1 --seconds 0.001");
    let records = read_lines(&text).expect("JSON lines");
    for op in [
        "ping_pong",
        "throughput",
        "overlap_64k",
        "overlap_1m",
        "faults_64k",
        "faults_1m",
        "hot_spot",
        "multi_stream",
        "fan_in",
        "fan_out",
    ] {
        for stack in ["bsdp", "zsdp", "azsdp-block", "azsdp-copy", "tcp"] {
            for beside in ["local:", "tcp:"] {
                let found = records.iter().any(|record| {
                    let case = record.case.as_deref().unwrap_or_default();
                    record.op == op
                        && record.stack == stack
                        && case.starts_with(beside)
                        && record.summary.min > 0.0
                        && record.ratio_tcp.is_some() == (stack != "tcp")
                });
                assert!(found, "{op} {stack} {beside}");
            }
        }
    }
    let costs = records.iter().filter(|record| record.op == "costs");
    assert_eq!(costs.count(), 22);
    assert!(page.contains("The paper's conclusions") && page.contains("<svg"));
}

/// Datagrams: both figures, of a message that is one datagram and of one that is several.
#[test]
fn datagrams() {
    let words = "dgram --runs 2 --seconds 0.002 --size 100,200000";
    let (text, page) = suite(words);
    assert!(page.contains("<svg") && page.contains("Write-Record"));
    let records = read_lines(&text).expect("JSON");
    assert!(records.iter().all(|record| record.bench == "dgram"));
    for bytes in [100, 200_000] {
        for (op, transport, stack) in [
            ("send", "udp", "weft-ud"),
            ("write_record", "udp", "weft-ud"),
            ("send", "tcp", "weft"),
            ("write", "tcp", "weft"),
            ("write", "local", "weft"),
            ("send", "udp", "udp"),
        ] {
            for metric in [Metric::latency_us_p50, Metric::bandwidth_GBps] {
                let found = records.iter().find(|record| {
                    (record.bytes, record.metric) == (bytes, metric)
                        && (record.op.as_str(), record.transport.as_str()) == (op, transport)
                        && record.stack == stack
                });
                let found = found.unwrap_or_else(|| panic!("{op} {transport} {stack} {metric:?}"));
                assert!(found.summary.median > 0.0, "{found:?}");
            }
        }
    }
}

/// What arrives over a link that loses packets.
#[test]
fn lossy_datagrams() {
    if let Err(error) = weft_link::Link::new(weft_link::Shape::default(), 1500) {
        println!("skipped: {error}");
        return;
    }
    let (text, _) = suite("dgram --figure 9 --quick --runs 1 --size 16K");
    let records = read_lines(&text).expect("JSON");
    let shares = records.iter().filter(|r| r.metric == Metric::valid_share);
    let shares: Vec<f64> = shares.map(|record| record.summary.median).collect();
    assert_eq!(shares.len(), 6);
    assert!(
        shares.iter().all(|share| (0.0..=1.0).contains(share)),
        "{shares:?}"
    );
}

/// Hash and merge joins on rings, by RDMA and by TCP, count the same matches of the same relations.
#[test]
fn joins_agree() {
    let words = "join --rows 20 --nodes 3 --volume 16 --repetitions 1";
    let (points, _) = suite(words);
    let matches = |what: &[&str]| -> Vec<u64> {
        let lines = points
            .lines()
            .filter(|l| what.iter().all(|w| l.contains(w)));
        lines
            .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap())
            .filter(|l| l["nodes"] == 3 && l["work"]["Join"]["rows"] == 20_000)
            .filter(|l| l["work"]["Join"]["skew"] == 0.0)
            .map(|l| l["matches"].as_u64().unwrap())
            .collect()
    };
    let (hash, merge) = (matches(&["\"Hash\""]), matches(&["\"Merge\""]));
    assert!(!merge.is_empty() && merge[0] > 0, "{points}");
    assert!(
        hash.iter().chain(&merge).all(|&m| m == merge[0]),
        "{points}"
    );
}

/// The chapter on costs, with its conclusions.
#[test]
fn costs_of_this_machine() {
    let (text, page) = suite("advise --quick --runs 1 --size 4K,1M");
    let records = read_lines(&text).expect("JSON lines");
    for op in ["costs", "setup", "buffers"] {
        let found = records.iter().filter(|record| record.op == op);
        assert!(found.count() > 0, "{op}");
    }
    assert!(page.contains("The chapter's conclusions") && page.contains("<svg"));
}

/// Servers of movies are measured beside each other, and a seek on each.
#[test]
fn movies() {
    if !has("weft") {
        return;
    }
    let words = "media --experiment load,seek --server weft-local,weft-tcp,http-rust --viewers 3 \
                 --rate 5.3 --seconds 1.5";
    let (text, page) = suite(words);
    let lines = lines(&text);
    for experiment in ["load", "seek"] {
        let of = lines.iter().filter(|line| line["experiment"] == experiment);
        assert_eq!(of.count(), 3, "{text}");
    }
    for line in lines.iter().filter(|line| line["experiment"] == "load") {
        // How much a loaded machine gets done is not asked.
        assert!(
            line["cpu_s"].is_number() && line["switches_per_s"].is_number(),
            "{line}"
        );
    }
    assert!(page.contains("<svg"));
}

#[test]
fn a_killed_suite_leaves_its_rows_and_no_server() {
    if !has("weft") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("figures.jsonl");
    let mut bench = papers()
        .args(["media", "--experiment", "load", "--seconds", "1"])
        .args(["--server", "weft-local,weft-tcp", "--viewers", "1"])
        .args(["--rate", "1,2,3,4,5,6,7,8", "--json"])
        .arg(&json)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pid = bench.id();
    let rows = || std::fs::read_to_string(&json).unwrap_or_default();
    let servers = || std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    while rows().is_empty() || servers().is_empty() {
        assert!(bench.try_wait().unwrap().is_none(), "it has ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    let servers = servers();
    bench.kill().unwrap();
    bench.wait().unwrap();
    let row: serde_json::Value = serde_json::from_str(rows().lines().next().unwrap()).unwrap();
    assert_eq!(row["experiment"], "load");
    for server in servers.split_whitespace() {
        // One that has ended has no command line, be it that nobody has asked for its end yet.
        let line = format!("/proc/{server}/cmdline");
        let lives = || std::fs::read(&line).is_ok_and(|line| !line.is_empty());
        let end = Instant::now() + Duration::from_secs(30);
        while lives() {
            assert!(Instant::now() < end, "its server still runs");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A make of three files through virtual workers, which neither compile nor preprocess here against their plan.
#[test]
fn virtual_workers_replay_a_make() {
    if !has("gcc") || !has("make") {
        return;
    }
    let source = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| std::fs::write(source.path().join(name), text).unwrap();
    for n in 0..3 {
        let text = format!("#include <stdio.h>\nint f{n}(void) {{ return puts(\"{n}\"); }}\n");
        file(&format!("f{n}.c"), &text);
    }
    file("Makefile", "CFLAGS = -O1 -Wall -MMD\nall: f0.o f1.o f2.o\n");
    let words = "cc --workers 2 --seconds 0.5 --system rdma,pull --source";
    let (text, _) = suite(&format!("{words} {}", source.path().display()));
    let points: Vec<Value> = lines(&text)
        .into_iter()
        .filter(|line| line["figure"] == "5.10")
        .collect();
    assert_eq!(points.len(), 2, "{text}");
    for point in points {
        assert_eq!(point["other_way"], 0, "{point}");
        assert!(point["jobs"].as_u64().unwrap() >= 1, "{point}");
        assert!(point["client_cpu_ms"].as_f64().unwrap() > 0.0, "{point}");
        let preprocesses = point["preprocess_cpu_ms"].as_f64().unwrap() > 1.0;
        assert_eq!(preprocesses, point["system"] == "weft cc", "{point}");
    }
}

/// Messages and a kernel between two ranks, on the MPI's own TCP: the drop-in libraries that the other transports need may not be built.
#[test]
fn messages_between_ranks() {
    if !has("weft") || !has("mpirun.openmpi") || !has("mpicc.openmpi") {
        return;
    }
    let words = "mpi --mpi openmpi --transport tcp --size 8 --ranks 2 --kernel is --rounds 10";
    let (text, page) = suite(&format!("{words} --runs 1"));
    for what in ["time one way, µs", "is S, s"] {
        let lines = lines(&text);
        let line = lines.iter().find(|line| line["what"] == what);
        let line = line.unwrap_or_else(|| panic!("{what}: {text}"));
        assert!(line["median"].as_f64() > Some(0.0), "{line}");
    }
    assert!(page.contains("What was measured"));
}

/// The same between two hosts, with a real mpirun on each.
#[test]
fn messages_between_hosts() {
    if !has("weft") || !has("mpirun.openmpi") || !has("mpicc.openmpi") || !has("nsenter") {
        return;
    }
    if let Err(error) = weft_link::Link::new(weft_link::Shape::default(), 1500) {
        eprintln!("skipped: {error}");
        return;
    }
    let words = "mpi --mpi openmpi --transport tcp --hosts 2 --size 8 --ranks 2 --kernel is";
    let (text, page) = suite(&format!("{words} --rounds 10 --runs 1"));
    let of = |what: &str| {
        let lines = lines(&text);
        let line = lines.iter().find(|line| line["what"] == what);
        let line = line.unwrap_or_else(|| panic!("{what}: {text}"));
        assert_eq!(line["mpi"], "openmpi, 2 hosts");
        line["median"].as_f64().unwrap()
    };
    // A packet is under way for 50 µs: the ranks are on two hosts.
    assert!(of("time one way, µs") > 50.0, "{text}");
    assert!(of("is S, s") > 0.0);
    assert!(page.contains("openmpi, 2 hosts"));
}

/// The pages of results that are kept are made without a measurement, and the same from what they write.
#[test]
fn kept_results() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
    for (name, title) in [
        ("cc", "Figure 5.10: jobs a second"),
        ("join", "What the chapter concludes"),
        ("dgram", "Write-Record"),
        ("media", "conclu"),
        ("mpi", "What was measured"),
    ] {
        let from = kept.join(name).with_extension("jsonl");
        let (text, page) = suite(&format!("{name} --from {}", from.display()));
        assert!(page.contains(title), "{name}");
        if matches!(name, "dgram" | "media") {
            continue; // their pages have the machine's load of the moment
        }
        let again = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(again.path(), &text).unwrap();
        let (_, second) = suite(&format!("{name} --from {}", again.path().display()));
        assert_eq!(page, second, "{name}");
    }
}
