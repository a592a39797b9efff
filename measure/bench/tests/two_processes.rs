//! Every operation end to end for one tiny point: this program is both the benchmark and, run again
//! by it, its peer process.

use clap::Parser;
use std::path::Path;
use std::process::{Command, ExitCode};
use weft_bench::{BenchArgs, PEER_ARGS};
use weft_report::record::{Metric, Record, Side, read_lines};

/// Runs `bench WORDS`, and returns what it writes as JSON and as a page.
fn suite(directory: &Path, words: &str) -> (String, String) {
    let (json, html) = (directory.join("out.jsonl"), directory.join("out.html"));
    let words = format!("bench {words}");
    let args = words.split_whitespace().map(str::to_owned).chain([
        format!("--json={}", json.display()),
        format!("--html={}", html.display()),
    ]);
    let code = weft_bench::run(BenchArgs::parse_from(args)).expect(&words);
    assert_eq!(code, ExitCode::SUCCESS, "{words}");
    let read = |file| std::fs::read_to_string(file).expect("a file");
    (read(json), read(html))
}

/// Runs the suite of verbs with `options` and returns its records and its page.
fn bench(directory: &Path, options: &str) -> (Vec<Record>, String) {
    let plots = directory.join("plots");
    let words = format!(
        "verbs --runs 2 --seconds 0.002 {options} --svg={}",
        plots.display()
    );
    let (text, page) = suite(directory, &words);
    (read_lines(&text).expect("JSON lines"), page)
}

fn find(records: &[Record], stack: &str, metric: Metric, crc: Option<bool>) -> Option<Record> {
    records
        .iter()
        .find(|record| record.stack == stack && record.metric == metric && record.crc == crc)
        .cloned()
}

fn transfers(directory: &Path) {
    for op in ["send", "write", "write_imm", "read"] {
        for size in ["1", "5000", "1M"] {
            let (records, page) = bench(directory, &format!("--op {op} --size {size}"));
            assert!(records.iter().all(|record| record.op == op));
            assert!(page.contains("<svg"));
            for (stack, crc) in [("weft", Some(false)), ("weft", Some(true)), ("tcp", None)] {
                for metric in [
                    Metric::bandwidth_GBps,
                    Metric::messages_per_s,
                    Metric::cpu_s_per_GB,
                    Metric::latency_us_p50,
                    Metric::latency_us_p99,
                ] {
                    let record = find(&records, stack, metric, crc)
                        .unwrap_or_else(|| panic!("{op} {size} {stack} {metric:?} is missing"));
                    let summary = record.summary;
                    assert_eq!(summary.runs, 2);
                    assert!(
                        summary.min <= summary.median && summary.median <= summary.max,
                        "{record:?}"
                    );
                    assert!(summary.max > 0.0, "{record:?}");
                    assert_eq!(record.ratio_tcp.is_some(), stack != "tcp", "{record:?}");
                }
            }
            for side in [Side::Sender, Side::Receiver] {
                assert!(records.iter().any(|record| record.side == Some(side)));
            }
            let polls = |poll: &str| {
                records
                    .iter()
                    .any(|record| record.poll.as_deref() == Some(poll))
            };
            assert!(polls("busy"));
            assert_eq!(polls("block"), op != "write");
        }
    }
}

fn atomics(directory: &Path) {
    for op in ["fetch_add", "compare_swap", "swap"] {
        let (records, _) = bench(directory, &format!("--op {op} --crc on"));
        let latency = find(&records, "weft", Metric::latency_us_p50, Some(true));
        assert_eq!(latency.expect(op).bytes, 8);
        assert!(find(&records, "weft", Metric::messages_per_s, Some(true)).is_some());
    }
}

fn rate(directory: &Path) {
    let (records, page) = bench(directory, "--op rate");
    let rate = find(&records, "weft", Metric::messages_per_s, Some(false)).expect("a rate");
    assert_eq!((rate.op.as_str(), rate.bytes), ("rate", 64));
    assert!(page.contains("Aims"));
}

/// `--tls` adds two stacks to the chosen ones; each can be chosen by name, too.
fn with_tls(directory: &Path) {
    let (records, page) = bench(
        directory,
        "--tls --op send,write,read --crc off --size 1,100K",
    );
    for stack in ["weft", "tcp", "weft-tls", "tcp-tls"] {
        let of_stack = || records.iter().filter(|record| record.stack == stack);
        for metric in [Metric::bandwidth_GBps, Metric::latency_us_p50] {
            let points = of_stack().filter(|record| record.metric == metric);
            // Two sizes of three operations; nobody sleeps for a Write.
            let expected = if metric == Metric::bandwidth_GBps {
                6
            } else {
                10
            };
            assert_eq!(points.count(), expected, "{stack} {metric:?}");
        }
        let crc = stack.starts_with("weft").then_some(false);
        for record in of_stack() {
            assert!(record.summary.min > 0.0, "{record:?}");
            assert_eq!(record.transport, "tcp");
            assert_eq!(record.crc, crc);
            assert_eq!(record.ratio_tcp.is_some(), stack != "tcp", "{record:?}");
            assert_eq!(record.ratio_tcp_tls.is_some(), stack == "weft-tls");
        }
    }
    assert!(page.contains("weft-tls GB/s") && page.contains("of TCP with TLS"));

    let (records, page) = bench(
        directory,
        "--stack weft-tls,tcp-tls --op write --figure bandwidth --size 1M",
    );
    let named = |stack| records.iter().any(|record| record.stack == stack);
    assert!(named("weft-tls") && named("tcp-tls") && !named("weft") && !named("tcp"));
    assert!(page.contains("of rustls over TCP"), "an aim");
}

fn library(directory: &Path) {
    let (records, _) = bench(directory, "--op iw --size 4K");
    for stack in ["weft", "weft-iw"] {
        assert!(find(&records, stack, Metric::bandwidth_GBps, Some(false)).is_some());
    }
}

fn buffers(directory: &Path) {
    let (records, _) = bench(directory, "--op buffers --size 64K");
    for case in ["reuse", "reregister", "copy"] {
        assert!(
            records
                .iter()
                .any(|record| record.case.as_deref() == Some(case))
        );
    }
}

fn registration(directory: &Path) {
    let (records, page) = bench(directory, "--op register --size 4K,1M");
    assert!(
        records
            .iter()
            .all(|record| record.metric == Metric::time_us)
    );
    for stack in ["weft", "memcpy"] {
        assert!(find(&records, stack, Metric::time_us, None).is_some());
    }
    assert!(page.contains("Critical buffer size"));
}

fn setup(directory: &Path) {
    let (records, _) = bench(directory, "--op setup --size 1,1M");
    for stack in ["weft", "tcp"] {
        for step in ["connect", "send data", "total"] {
            assert!(
                records
                    .iter()
                    .any(|record| record.stack == stack && record.case.as_deref() == Some(step)),
                "{stack} {step}"
            );
        }
    }
}

fn memory(directory: &Path) {
    let (records, _) = bench(directory, "--op memory --quick");
    assert_eq!(records.len(), 2);
    for record in &records {
        assert_eq!(record.metric, Metric::bytes_per_qp);
        assert!(record.summary.median > 0.0, "{record:?}");
    }
}

fn limits(directory: &Path) {
    let (records, page) = bench(
        directory,
        "--op write --figure bandwidth --stack weft,memcpy,vm --crc off --size 8,100K",
    );
    for stack in ["weft", "memcpy", "vm"] {
        let of_stack = records.iter().filter(|record| record.stack == stack);
        let speeds = of_stack.filter(|record| record.metric == Metric::bandwidth_GBps);
        assert_eq!(speeds.filter(|record| record.summary.min > 0.0).count(), 2);
    }
    assert!(page.contains("RDMA Write: throughput beside others"));
    assert!(page.contains("weft of memcpy"));
}

fn same_host(directory: &Path) {
    let (records, page) = bench(
        directory,
        "--transport local --op write,rate --stack weft,vm --size 64K",
    );
    assert!(records.iter().all(|record| record.transport == "local"));
    for case in [None, Some("ordinary")] {
        let speed = records.iter().find(|record| {
            (record.op.as_str(), record.stack.as_str()) == ("write", "weft")
                && record.metric == Metric::bandwidth_GBps
                && record.case.as_deref() == case
        });
        let speed = speed.unwrap_or_else(|| panic!("{case:?}"));
        assert_eq!(speed.crc, None);
        assert!(speed.summary.min > 0.0, "{speed:?}");
    }
    assert!(page.contains("weft local ordinary of vm"));
}

/// The other libraries' programs need not be there, or not work here: then the page says so.
fn peers(directory: &Path) {
    let (records, page) = bench(
        directory,
        "--peers --op send --stack weft,ucx-cma,fi-shm --size 64",
    );
    for (stack, metric, package) in [
        ("ucx-cma", Metric::bandwidth_GBps, "ucx-utils"),
        ("ucx-cma", Metric::latency_us_mean, "ucx-utils"),
        ("fi-shm", Metric::latency_us_mean, "libfabric-bin"),
    ] {
        match find(&records, stack, metric, None) {
            Some(record) => assert!(record.summary.min > 0.0, "{record:?}"),
            None => assert!(
                page.contains(&format!("apt-get install {package}"))
                    || page.contains(&format!(": {stack}: ")),
                "{stack} {metric:?}"
            ),
        }
    }
    assert!(find(&records, "weft", Metric::latency_us_mean, Some(false)).is_some());
    assert!(
        records
            .iter()
            .all(|record| record.poll.as_deref() != Some("block"))
    );
}

fn several_sizes_and_one_stack(directory: &Path) {
    let (records, _) = bench(
        directory,
        "--op write --figure bandwidth --stack weft --crc off --size 1..64*8 --bytes 1M",
    );
    let mut sizes: Vec<u64> = records.iter().map(|record| record.bytes).collect();
    sizes.dedup();
    assert_eq!(sizes, [1, 8, 64]);
    assert!(records.iter().all(|record| record.stack == "weft"));
}

/// Who asks for a suite of the papers is told where it is.
fn suites_of_the_papers_are_elsewhere(_: &Path) {
    for suite in ["exs", "link"] {
        let mut program = Command::new(env!("CARGO_BIN_EXE_weft-bench"));
        let out = program.arg(suite).output().expect("weft-bench");
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{said}");
        assert!(
            said.contains("./x papers SUITE") && said.contains(suite),
            "{said}"
        );
    }
}

/// A name and what to do, given a directory for results.
type Test = (&'static str, fn(&Path));

/// The page of results that are kept is made without a measurement.
fn kept_results(directory: &Path) {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/figures");
    for (file, title) in [
        ("verbs", "Throughput of the operations"),
        ("same-host-peers", "ucx-posix"),
    ] {
        let from = kept.join(file).with_extension("jsonl");
        let (records, page) = bench(directory, &format!("--from {}", from.display()));
        let text = std::fs::read_to_string(&from).expect("the file");
        assert_eq!(records, read_lines(&text).expect("JSON lines"));
        assert!(page.contains(title) && page.contains("<svg"), "{file}");
        assert!(page.contains("earlier runs"), "{file}");
    }
    for (name, title) in [
        ("fs", "remote, read 1 MiB (sshfs)"),
        ("run", "redis-benchmark -P 1, 1 client"),
    ] {
        let from = kept.join(name).with_extension("jsonl");
        let (text, page) = suite(directory, &format!("{name} --from {}", from.display()));
        assert!(page.contains(title), "{name}");
        let again = directory.join("again.jsonl");
        std::fs::write(&again, &text).expect("a file");
        let (_, second) = suite(directory, &format!("{name} --from {}", again.display()));
        assert_eq!(page, second, "{name}");
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words == PEER_ARGS {
        let args = BenchArgs::parse();
        return weft_bench::run(args).unwrap_or(ExitCode::FAILURE);
    }
    let directory = std::env::temp_dir().join(format!("weft-bench-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory for results");
    let tests: [Test; 15] = [
        ("transfers", transfers),
        ("atomics", atomics),
        ("rate", rate),
        ("with_tls", with_tls),
        ("library", library),
        ("buffers", buffers),
        ("registration", registration),
        ("setup", setup),
        ("memory", memory),
        ("limits", limits),
        ("same_host", same_host),
        ("peers", peers),
        ("kept_results", kept_results),
        (
            "suites_of_the_papers_are_elsewhere",
            suites_of_the_papers_are_elsewhere,
        ),
        ("several_sizes_and_one_stack", several_sizes_and_one_stack),
    ];
    // `cargo test NAME` and its lists work as with any other test; one at a time, as benchmarks should run.
    let list = std::env::args().any(|word| word == "--list");
    let wanted = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    for (name, test) in tests {
        if wanted.as_ref().is_some_and(|wanted| !name.contains(wanted)) {
            continue;
        }
        if list {
            println!("{name}: test");
            continue;
        }
        eprintln!("test {name} ...");
        test(&directory);
        eprintln!("test {name} ... ok");
    }
    std::fs::remove_dir_all(&directory).expect("remove the results");
    ExitCode::SUCCESS
}
