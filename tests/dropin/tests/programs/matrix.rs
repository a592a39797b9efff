//! perftest's programs times its options, on both devices, in shared memory and over TCP: the table in docs/verbs.md.
//!
//! It takes minutes, so it runs when it is asked for: `cargo test -p weft-dropin --test programs matrix -- --ignored`. With `WEFT_BLESS=1` it writes the
//! table anew. What fails is in the table, and fails the test unless the table says so already.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use weft_dropin::{Weft, free_port, have, say};

use super::carriers;

const BEGIN: &str = "<!-- perftest: begin -->\n";
const END: &str = "<!-- perftest: end -->";
const LIMIT: Duration = Duration::from_secs(40);

const SEND: &str = "ib_send_bw ib_send_lat";
const BANDWIDTH: &str = "ib_send_bw ib_write_bw ib_read_bw ib_atomic_bw";
const EVENTS: &str = "ib_send_bw ib_send_lat ib_write_bw ib_read_bw ib_read_lat ib_atomic_bw ib_atomic_lat";
const INLINE: &str = "ib_send_bw ib_send_lat ib_write_bw ib_write_lat";
const SIZES: &str = "ib_send_bw ib_send_lat ib_write_bw ib_write_lat ib_read_bw ib_read_lat";
const ALL: &str =
    "ib_send_bw ib_send_lat ib_write_bw ib_write_lat ib_read_bw ib_read_lat ib_atomic_bw ib_atomic_lat";

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

/// What the numbers of iterations and bytes are to be, where the option does not say.
fn sizes(program: &str, options: &str) -> &'static str {
    match options {
        "-a" => "-n 16",
        "-I 220" => "-n 320 -s 220",
        _ if program.contains("atomic") => "-n 320",
        _ => "-n 320 -s 4096",
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
            outcome = Err(format!("{}\nserver: {}", client.show(), server.kill().show()));
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
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/verbs.md");
    let text = fs::read_to_string(&document).unwrap();
    let (head, rest) = text.split_once(BEGIN).expect("a table");
    let (old, tail) = rest.split_once(END).expect("its end");
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
            row.push('\n');
            if row.contains("**no**") && !old.contains(&row) {
                problems += &row;
            }
            table += &row;
        }
    }
    say(&format!("perftest\n{table}"));
    if std::env::var_os("WEFT_BLESS").is_some() {
        fs::write(&document, format!("{head}{BEGIN}{table}{END}{tail}")).unwrap();
    }
    assert!(problems.is_empty(), "{problems}");
}
