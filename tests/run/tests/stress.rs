//! Random socket calls, the same on plain TCP and under `weft run`: every result and errno is compared.
//!
//! `WEFT_STRESS_SECONDS` runs other seeds for so long, from `WEFT_SEED` on.

use std::path::Path;
use std::time::{Duration, Instant};

use weft_run_tests::{Weft, have, plain, say, switched, weft};

const PYTHON: (&str, &str) = ("/usr/bin/python3", "python3");

fn run(weft: &Weft, seed: u64, rounds: u32) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("py/stress.py");
    let done = weft.run(&format!(
        "{} {} {seed} ={rounds}",
        PYTHON.0,
        script.display()
    ));
    done.good().says(&format!("stress: {rounds} rounds"));
    done.text
}

fn compare(seed: u64, rounds: u32) {
    let expected = run(&plain(), seed, rounds);
    let got = run(&weft(), seed, rounds);
    assert!(switched(&got) > rounds, "seed {seed}: {got}");
    // What the processes say of themselves stands between the lines.
    let ours = |line: &&str| !line.starts_with("weft run:") && !line.starts_with("  ");
    let lines = |text: &str| {
        text.lines()
            .filter(ours)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let (expected, got) = (lines(&expected), lines(&got));
    for (at, (one, other)) in expected.iter().zip(&got).enumerate() {
        let before = expected[at.saturating_sub(40)..at].join("\n");
        assert_eq!(other, one, "seed {seed}, line {at}, after\n{before}");
    }
    assert_eq!(got.len(), expected.len(), "seed {seed}");
}

#[test]
fn every_result_is_that_of_plain_tcp() {
    if !have(&[PYTHON]) {
        return;
    }
    let seconds = std::env::var("WEFT_STRESS_SECONDS").ok();
    if let Some(seconds) = seconds.and_then(|text| text.parse().ok()) {
        let begun = Instant::now();
        let first = std::env::var("WEFT_SEED").ok();
        let first = first.and_then(|text| text.parse().ok()).unwrap_or(1000);
        let mut seed = first;
        while begun.elapsed() < Duration::from_secs(seconds) {
            compare(seed, 100);
            seed += 1;
            if seed.is_multiple_of(100) {
                say(&format!("{} seeds", seed - first));
            }
        }
        say(&format!("{} seeds, none differs", seed - first));
        return;
    }
    for seed in 1..=4 {
        compare(seed, 60);
    }
    // A child of a fork moves a registration of a set that it shares with its parent, who takes the socket out then.
    compare(1585, 100);
}

/// The steps in which a connection goes over, with an end stopped or killed among them, and one pair of addresses for many connections.
#[test]
fn a_connection_goes_over_whatever_happens_to_its_ends() {
    if !have(&[PYTHON]) {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("py/steps.py");
    for (what, rounds) in [("stop", 20), ("kill", 15), ("reuse", 200)] {
        let done = weft().run(&format!(
            "{} {} {what} 1 {rounds}",
            PYTHON.0,
            script.display()
        ));
        done.good().says(&format!("steps: {rounds} rounds"));
        assert!(
            what != "reuse" || switched(&done.text) >= rounds,
            "{}",
            done.show()
        );
    }
}
