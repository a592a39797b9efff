//! `weft stat`.

use std::time::{Duration, Instant};

use weft_verbs::stat::{Survey, survey};

use crate::rnics::{self, Rnic};
use crate::stat::{Watch, table};
use crate::stat_run;
use weft_cli::failure::{Exit, Failure};
use weft_cli::terminal::{self, Keys};

pub(crate) const LONG: &str = "\
Show the connections of this host's weft processes: all programs that use the weft libraries, of this user, or for root of all \
users.

For each connection: its transport (`local` is shared memory) and the reason if it is not shared memory, its age, payload bytes sent and \
received, how many of them were copied once more than needed, one-sided operations that the process carried out in its peer's \
memory itself, FPDUs and system calls, out and in. A second table has the programs under `weft run`: bytes through rings \
and over TCP, and the reason if a connection is not on the rings. Without PIDs, a last table has the machine's own RNICs. Processes with WEFT_STAT=off and processes of \
another network namespace are not shown.";

/// The time limit for processes that do not answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Options of `weft stat`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Show only these processes
    #[arg(value_name = "PID", value_parser = pid)]
    pids: Vec<u32>,
    /// Print JSON, one connection a line
    #[arg(long)]
    json: bool,
    /// Repeat every SECONDS, and show the rates; `q` ends it
    #[arg(short, long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_parser = seconds)]
    watch: Option<Duration>,
}

fn pid(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| {
        "write the number of a process, as `ps` shows it (seconds follow `--watch=`)".to_owned()
    })
}

fn seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .filter(|s| (0.1..=86_400.0).contains(s))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "from 0.1 to 86400 seconds".to_owned())
}

/// Shows the connections once, or until it is interrupted or the named processes have ended.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let mut watch = Watch::default();
    let mut first = true;
    let keys = args.watch.and_then(|_| Keys::new());
    // Of the machine, not of a process; asked for once, because each question opens the device.
    let machine = args.pids.is_empty().then(rnics::all);
    loop {
        let began = Instant::now();
        let found = survey(PATIENCE).map_err(|e| {
            Failure::failed(format!("cannot read /proc/net/unix: {e}")).hint("mount /proc")
        })?;
        // Programs under `weft run` are read, not asked.
        let ledgers = stat_run::ledgers(&args.pids);
        let has_ledger = |pid: u32| ledgers.iter().any(|ledger| ledger.pid == pid);
        let knows = |found: &Survey, pid: u32| has_ledger(pid) || knows(found, pid);
        let answered = |found: &Survey, pid: u32| has_ledger(pid) || answered(found, pid);
        let unknown = args.pids.iter().find(|pid| !knows(&found, **pid));
        if let Some(pid) = unknown.filter(|_| first) {
            let hint = if args.watch.is_some() {
                "seconds are written with `=`, as in --watch=2"
            } else {
                "`weft stat` without arguments lists all; it may run as another user, in another network namespace, or with WEFT_STAT=off"
            };
            let what = format!("no weft process {pid} is seen from here");
            return Err(Failure::failed(what).hint(hint));
        }
        if unknown.is_some() && !args.pids.iter().any(|pid| knows(&found, *pid)) {
            // All that were to be watched have ended.
            return Ok(Exit::Ok);
        }
        let mute = args.pids.iter().find(|pid| !answered(&found, **pid));
        if let Some(pid) = mute.filter(|_| args.watch.is_none()) {
            return Err(
                Failure::failed(format!("process {pid} does not answer")).hint(
                    "it is stopped or ending, or many ask at once: the same command again later",
                ),
            );
        }
        if first {
            for note in notes(&found, &args.pids) {
                weft_cli::tell!("weft: {note}");
            }
        }
        let rows = watch.rows(found, &args.pids);
        let mut text = if args.json {
            let lines = rows.iter().map(|row| row.json() + "\n");
            let of_machine = machine.iter().flatten().flatten().flat_map(Rnic::json);
            let of_machine = of_machine.map(|object| format!("{object}\n"));
            lines.collect::<String>() + &stat_run::json(&ledgers) + &of_machine.collect::<String>()
        } else {
            let width = terminal::width();
            let run = stat_run::table(&ledgers, width);
            let mut text = match (rows.is_empty(), run.is_empty()) {
                (true, true) => "no connections\n".to_owned(),
                (true, false) => run,
                _ => table(&rows, args.watch.is_some() && !first, width) + "\n" + &run,
            };
            if let Some(machine) = &machine {
                text += &rnics::table(machine, width);
            }
            text
        };
        // The output to a program or a file is not cleared.
        if args.watch.is_some() && !args.json {
            let out = std::io::stdout();
            if weft_report::terminal::redraws(&out) {
                text = terminal::first_screen(&text);
                text.insert_str(0, "\x1b[H\x1b[2J");
            } else if !first {
                text.insert(0, '\n');
            }
        }
        if !weft_cli::print(text.as_bytes()) {
            return Ok(Exit::Ok);
        }
        let Some(interval) = args.watch else {
            return Ok(Exit::Ok);
        };
        first = false;
        let pause = interval.saturating_sub(began.elapsed());
        match &keys {
            Some(keys) if keys.quits_within(pause) => return Ok(Exit::Ok),
            Some(_) => {}
            None => std::thread::sleep(pause),
        }
    }
}

fn answered(found: &Survey, pid: u32) -> bool {
    found.devices.iter().any(|process| process.pid == Some(pid))
}

fn knows(found: &Survey, pid: u32) -> bool {
    answered(found, pid) || found.silent.contains(&Some(pid))
}

/// The text below the table.
fn notes(found: &Survey, pids: &[u32]) -> Vec<String> {
    let asked = |pid: &&Option<u32>| pids.is_empty() || pid.is_some_and(|pid| pids.contains(&pid));
    let silent = found.silent.iter().filter(asked).map(|pid| {
        let who = pid.map_or("a process out of sight".to_owned(), |pid| {
            format!("process {pid}")
        });
        format!("{who} does not answer: stopped, ending, or asked by many at once")
    });
    let foreign = (found.foreign > 0 && pids.is_empty()).then(|| {
        format!(
            "processes of other users, which only root may ask: {}",
            found.foreign
        )
    });
    silent.chain(foreign).collect()
}
