//! perftest's programs times its options, on both devices, in shared memory and over TCP.
//!
//! It takes minutes, and a machine without much other work: `cargo test -p weft-dropin --test programs perftest_matrix -- --ignored` runs it and prints a
//! table. What fails is said with what both sides said.

use std::fmt::Write as _;
use std::time::Duration;

use weft_dropin::{Weft, free_port, have, say};

use super::carriers;

const LIMIT: Duration = Duration::from_mins(2);

const SEND: &str = "ib_send_bw ib_send_lat";
const BANDWIDTH: &str = "ib_send_bw ib_write_bw ib_read_bw ib_atomic_bw";
const EVENTS: &str = "ib_send_bw ib_send_lat ib_read_bw ib_read_lat ib_atomic_bw ib_atomic_lat";
const INLINE: &str = "ib_send_bw ib_send_lat ib_write_bw ib_write_lat";
const SIZES: &str = "ib_send_bw ib_send_lat ib_write_bw ib_write_lat ib_read_bw ib_read_lat";
const ALL: &str = "ib_send_bw ib_send_lat ib_write_bw ib_write_lat ib_read_bw ib_read_lat ib_atomic_bw ib_atomic_lat";

/// A column: options, and the programs that have them. perftest itself refuses them for the others.
const COLUMNS: [(&str, &str); 8] = [
    ("", ALL),
    ("-a", SIZES),
    ("-b", BANDWIDTH),
    ("-e", EVENTS),
    ("-q 8", BANDWIDTH),
    ("-l 16", "ib_send_bw ib_write_bw ib_read_bw"),
    ("-I 220", INLINE),
    ("--use-srq", SEND),
];

/// What the numbers of iterations and bytes are to be, where the option does not say. Hundreds: with `-b` on an iWARP device perftest 4.5
/// does not end with 128 or 320 iterations, unless `-Q 1` has it ask for each completion.
fn sizes(program: &str, options: &str) -> &'static str {
    match options {
        "-a" => "-n 6",
        "-I 220" => "-n 300 -s 220",
        // A multiple of the list.
        "-l 16" => "-n 320 -s 4096",
        _ if program.contains("atomic") => "-n 300",
        _ => "-n 300 -s 4096",
    }
}

/// Whether both sides end well and the client has its lines of numbers; else what was wrong.
fn run(weft: &Weft, line: &str, rows: usize) -> Result<(), String> {
    let mut outcome = Ok(());
    // With -R the server closes its first listener before it has the second: a client that is quicker finds none.
    for _ in 0..3 {
        let port = free_port();
        let server = weft.start(&format!("{line} -p {port}")).listens(port);
        let client = weft.run(&format!("{line} -p {port} 127.0.0.1"));
        if !client.is_good() {
            outcome = Err(format!(
                "{}\nserver: {}",
                client.show(),
                server.kill().show()
            ));
            if client.text.contains("RDMA_CM_EVENT_REJECTED") {
                continue;
            }
            return outcome;
        }
        let server = server.end();
        if !server.is_good() {
            return Err(server.show());
        }
        let good = client.table().len() == rows;
        return if good { Ok(()) } else { Err(client.show()) };
    }
    outcome
}

#[test]
#[ignore = "takes minutes"]
fn perftest_matrix() {
    if !have(&[("ib_send_bw", "perftest")]) {
        return;
    }
    let mut table = "| program | device |".to_owned();
    for (options, _) in COLUMNS {
        let _ = match options {
            "" => write!(table, " plain |"),
            options => write!(table, " `{options}` |"),
        };
    }
    table.push_str("\n|---|---|");
    table.push_str(&"---|".repeat(COLUMNS.len()));
    table.push('\n');
    let mut problems = String::new();
    for program in ALL.split(' ') {
        for (device, by) in [("weft0", "-R -d weft0"), ("weft_ib0", "-d weft_ib0")] {
            let mut row = format!("| `{program}` | {device} |");
            for (options, programs) in COLUMNS {
                if !programs.split(' ').any(|one| one == program) {
                    row.push_str(" — |");
                    continue;
                }
                let rows = if options == "-a" { 23 } else { 1 };
                let line = format!("{program} -F {by} {} {options}", sizes(program, options));
                let cells = carriers(device).map(|weft| {
                    let outcome = run(&weft.limit(LIMIT), &line, rows);
                    if let Err(why) = &outcome {
                        say(&format!("matrix: {line}: {why}"));
                    }
                    if outcome.is_ok() { "ok" } else { "**no**" }
                });
                let _ = match cells {
                    ["ok", "ok"] => write!(row, " ok |"),
                    [shared, tcp] => write!(row, " {shared} / {tcp} |"),
                };
            }
            say(&row);
            row.push('\n');
            if row.contains("**no**") {
                problems += &row;
            }
            table += &row;
        }
    }
    say(&format!("perftest\n{table}"));
    assert!(problems.is_empty(), "{problems}");
}
