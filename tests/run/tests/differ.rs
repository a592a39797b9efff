//! Random socket calls of two processes, the same on plain TCP and under `weft run`: no byte may be lost or wrong, no call may wait for ever, and results,
//! errnos and events are TCP's but for a known share of the scripts ([`KNOWN`]).
//!
//! The program is c/differ.c; its comment says how it makes TCP's answers independent of time. A script that differs is run again, and counts only if
//! plain TCP gives the same lines each time. To play one again: `differ --seed N`, with `LD_PRELOAD` for weft.
//!
//! - `WEFT_DIFFER_SECONDS` runs other scripts for this time, from `WEFT_SEED` on, and shows all differences by kind.
//! - `WEFT_DIFFER_USER`: the two ends are of two users, root and this one.
//! - `WEFT_DIFFER_APART` (`FILE ADDRESS ADDRESS`): they are in two network namespaces, the other one that of this file; with `WEFT_LOCAL_DIR`.
//! - `WEFT_DIFFER_WITHOUT` leaves groups of calls out (`bypass,faults,edges,handing,forks,resets`), so that known failures do not hide others.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use weft_run_tests::{have, library, say, switched};

/// Scripts that the test always runs, about a hundred operations each, in both ways.
const SCRIPTS: u64 = 5_000;
/// Groups of calls that are left out: docs/run.md names what they do as a limit (a socket that is handed on after its peer has ended).
const WITHOUT: &str = "handing";
/// Of a thousand scripts, so many differ at most, without a wrong byte. Most are edges of `EPOLLOUT` that TCP has or has not, and events for nothing at a
/// receiver whose peer goes back to TCP. This number may only shrink.
const KNOWN: u64 = 30;
/// Scripts that one start of the program runs.
const CHUNK: u64 = 50;
/// How often a script that differs is run again in both ways.
const AGAIN: u32 = 3;
/// Differences that are not seen again, and scripts that plain TCP itself answers differently, for each thousand scripts.
const DOUBTFUL: u64 = 2;

fn compiled() -> Option<PathBuf> {
    if !have(&[("cc", "gcc")]) {
        return None;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("c");
    let parts = ["", "_calls", "_ready", "_procs", "_plan", "_steps", "_many"];
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("differ");
    let made = Command::new("cc")
        .args(["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .args(parts.map(|part| folder.join(format!("differ{part}.c"))))
        .output()
        .expect("cc runs");
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{said}");
    Some(program)
}

/// The lines of each script, and what the program said besides.
#[derive(Default)]
struct Shown {
    scripts: BTreeMap<u64, Vec<String>>,
    operations: u64,
    switched: u32,
}

fn run(program: &Path, under_weft: bool, first: u64, scripts: u64) -> Shown {
    let mut command = Command::new(program);
    command
        .args(["--seed", &first.to_string()])
        .args(["--scripts", &scripts.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    let without = std::env::var("WEFT_DIFFER_WITHOUT");
    command.args(["--without", without.as_deref().unwrap_or(WITHOUT)]);
    if let Ok(user) = std::env::var("WEFT_DIFFER_USER") {
        command.args(["--solo", "0", "--user", &user]);
        command.env("WEFT_RUN_WITH", "any");
    }
    if let Ok(apart) = std::env::var("WEFT_DIFFER_APART") {
        command.args(["--solo", "0", "--apart"]);
        command.args(apart.split(' '));
    }
    if under_weft {
        command
            .env("LD_PRELOAD", library())
            .env("WEFT_RUN_EXPLAIN", "1");
    }
    let done = command.output().expect("differ runs");
    assert!(done.status.success(), "differ --seed {first}: {done:?}");
    let mut shown = Shown {
        switched: switched(&String::from_utf8_lossy(&done.stderr)),
        ..Shown::default()
    };
    let mut script = None;
    for line in String::from_utf8_lossy(&done.stdout).lines() {
        let mut words = line.split([' ', ',']);
        match (words.next(), words.next()) {
            (Some("script"), Some(seed)) => {
                script = seed.parse().ok();
                shown
                    .scripts
                    .insert(script.expect("a number"), vec![line.to_owned()]);
            }
            (Some("differ:"), Some(count)) => shown.operations = count.parse().expect("a count"),
            _ => {
                let lines = script.and_then(|seed| shown.scripts.get_mut(&seed));
                lines.expect("a script").push(line.to_owned());
            }
        }
    }
    shown
}

/// The first line in which two runs of a script differ.
fn first_difference(plain: &[String], weft: &[String]) -> Option<usize> {
    let same = plain.iter().zip(weft).take_while(|(a, b)| a == b).count();
    (same < plain.len().max(weft.len())).then_some(same)
}

/// What the lines have in common with those of other scripts: the call and its result, without numbers.
fn kind(line: &str) -> String {
    let text = line.split_once(' ').map_or(line, |(_, text)| text);
    let text = text.split_once(' ').map_or(text, |(_, text)| text);
    text.chars()
        .filter(|c| !c.is_ascii_digit())
        .take(60)
        .collect()
}

/// A difference for a reader: the script so far, and both lines.
fn report(seed: u64, plain: &[String], weft: &[String], at: usize) -> String {
    let mut text = String::new();
    for line in &plain[at.saturating_sub(60)..at] {
        let _ = writeln!(text, "    {line}");
    }
    let or_end = |lines: &[String]| lines.get(at).map_or("(the end)", |line| line).to_owned();
    let _ = writeln!(text, "plain {}\nweft  {}", or_end(plain), or_end(weft));
    let step = or_end(plain);
    let step = step.split_once(':').map_or("0", |(step, _)| step);
    format!("{text}seed {seed}: differ --seed {seed} --steps {step} --verbose\n")
}

/// What is known of all scripts so far.
#[derive(Default)]
struct Sum {
    /// Bytes that are lost or wrong, and calls that never return.
    grave: Vec<String>,
    /// Other differences that plain TCP never shows: by kind, how many, and the first.
    found: BTreeMap<String, (u64, String)>,
    /// Not seen again, or plain TCP differs from itself.
    doubtful: Vec<String>,
}

/// Runs one script that differed again and files what is seen.
fn file(program: &Path, seed: u64, plain: &[String], weft: &[String], sum: &Mutex<Sum>) {
    let Some(at) = first_difference(plain, weft) else {
        return;
    };
    let text = report(seed, plain, weft, at);
    let one = |under_weft| {
        let mut shown = run(program, under_weft, seed, 1);
        shown.scripts.remove(&seed).unwrap_or_default()
    };
    let is_stable = (0..AGAIN).all(|_| one(false) == plain);
    let said = weft.get(at).map_or("(the end)", |line| line);
    // Bytes that are lost or wrong are never an effect of load.
    let is_grave = ["WRONG", "MISSING", "DIED", "STALL", "STUCK"]
        .iter()
        .any(|word| said.contains(word));
    let is_seen = is_grave || (0..AGAIN).any(|_| one(true) != plain);
    let mut sum = sum.lock().unwrap();
    if is_stable && is_grave {
        sum.grave.push(text);
    } else if is_stable && is_seen {
        let entry = sum.found.entry(kind(said));
        entry.or_insert_with(|| (0, text)).0 += 1;
    } else {
        let why = if is_stable {
            "not seen again"
        } else {
            "plain TCP differs from itself"
        };
        sum.doubtful.push(format!("{why}:\n{text}"));
    }
}

#[test]
fn every_call_is_answered_as_by_tcp() {
    let Some(program) = compiled() else {
        return;
    };
    let number = |name| {
        let text = std::env::var(name).ok();
        text.and_then(|text| text.parse::<u64>().ok())
    };
    let time = number("WEFT_DIFFER_SECONDS").map(Duration::from_secs);
    let first = number("WEFT_SEED").unwrap_or(if time.is_some() { 1_000_000 } else { 1 });
    let workers = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8));
    let begun = Instant::now();
    let (next, operations, over) = (AtomicU64::new(first), AtomicU64::new(0), AtomicU64::new(0));
    let is_enough = AtomicBool::new(false);
    let sum = Mutex::new(Sum::default());
    library();
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while !is_enough.load(Relaxed) {
                    let seed = next.fetch_add(CHUNK, Relaxed);
                    if time.map_or(seed >= first + SCRIPTS, |time| begun.elapsed() > time) {
                        break;
                    }
                    let plain = run(&program, false, seed, CHUNK);
                    let weft = run(&program, true, seed, CHUNK);
                    operations.fetch_add(plain.operations + weft.operations, Relaxed);
                    over.fetch_add(weft.switched.into(), Relaxed);
                    let nothing = Vec::new();
                    for (seed, lines) in &plain.scripts {
                        let others = weft.scripts.get(seed).unwrap_or(&nothing);
                        file(&program, *seed, lines, others, &sum);
                        if time.is_none() && !sum.lock().unwrap().grave.is_empty() {
                            return is_enough.store(true, Relaxed);
                        }
                    }
                }
            });
        }
    });
    let sum = sum.into_inner().unwrap();
    let scripts = next.load(Relaxed) - first;
    say(&format!(
        "differ: about {scripts} scripts, {} operations in {:.0} s, {} connections went over, {} kinds of differences, {} doubtful",
        operations.load(Relaxed),
        begun.elapsed().as_secs_f64(),
        over.load(Relaxed),
        sum.found.len(),
        sum.doubtful.len()
    ));
    let mut text = String::new();
    for (kind, (count, first)) in &sum.found {
        let _ = writeln!(text, "{count} times: {kind}\n{first}");
    }
    assert!(sum.grave.is_empty(), "{}", sum.grave.concat());
    let differ: u64 = sum.found.values().map(|(count, _)| count).sum();
    if time.is_some() {
        say(&text);
    }
    assert!(
        differ <= scripts * KNOWN / 1000,
        "{differ} scripts differ:\n{text}"
    );
    assert!(over.load(Relaxed) > 0, "no connection went over");
    for one in &sum.doubtful {
        say(one);
    }
    assert!(
        sum.doubtful.len() as u64 <= scripts / 1000 * DOUBTFUL + 1,
        "{} doubtful differences",
        sum.doubtful.len()
    );
}
