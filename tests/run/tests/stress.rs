//! Random socket calls, the same on plain TCP and under `weft run`: every result and errno is compared.
//!
//! `WEFT_STRESS_SECONDS` runs other seeds for this time, from `WEFT_SEED` on.

use std::time::{Duration, Instant};

use weft_run_tests::{PYTHON, Weft, have, plain, python, same_lines, say, switched, weft};

fn run(weft: &Weft, seed: u64, rounds: u32) -> String {
    let done = weft.run(&format!("{} {seed} ={rounds}", python("stress.py")));
    done.good().says(&format!("stress: {rounds} rounds"));
    done.text
}

fn compare(seed: u64, rounds: u32) {
    let expected = run(&plain(), seed, rounds);
    let got = run(&weft(), seed, rounds);
    assert!(switched(&got) > rounds, "seed {seed}: {got}");
    same_lines(&expected, &got, &format!("seed {seed}"));
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
    // A child of a fork moves a registration of a set that it shares with its parent, which then removes the socket.
    compare(1585, 100);
}

/// The steps in which a connection goes over, with an end stopped or killed among them, and one pair of addresses for many connections.
#[test]
fn a_connection_goes_over_whatever_happens_to_its_ends() {
    if !have(&[PYTHON]) {
        return;
    }
    let script = python("steps.py");
    for (what, rounds) in [("stop", 20), ("kill", 15), ("reuse", 200)] {
        let done = weft().run(&format!("{script} {what} 1 {rounds}"));
        done.good().says(&format!("steps: {rounds} rounds"));
        assert!(
            what != "reuse" || switched(&done.text) >= rounds,
            "{}",
            done.show()
        );
    }
}
