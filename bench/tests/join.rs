//! `weft bench join` with small relations. The nodes are this program again, so it has no test harness.

use std::process::{Command, ExitCode};

use clap::Parser;
use weft_bench::BenchArgs;

fn main() -> ExitCode {
    if std::env::args().nth(1).is_some_and(|arg| arg == "join") {
        return match weft_bench::run(BenchArgs::parse()) {
            Ok(exit) => exit,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let file = std::env::temp_dir().join(format!("weft-bench-join-{}", std::process::id()));
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["join", "--rows", "20", "--nodes", "3"])
        .args(["--volume", "16", "--repetitions", "1", "--json"])
        .arg(&file)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let points = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    // Hash and merge, RDMA and TCP count the same matches of the same relations.
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
    println!("{text}test join ... ok");
    ExitCode::SUCCESS
}
