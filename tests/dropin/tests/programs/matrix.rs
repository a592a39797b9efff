//! perftest's programs times its options, on both devices, in shared memory and over TCP.
//!
//! It takes minutes, and a machine without much other work: `cargo test -p weft-dropin --test programs perftest_matrix -- --ignored` runs it, prints a
//! table, and with `WEFT_BLESS=1` writes it into docs/figures/perftest.md. What fails is said with what both sides said. `WEFT_MATRIX="ib_send_bw ib_read_lat"`
//! runs these programs alone, and writes nothing.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use weft_dropin::{Done, Weft, free_port, have, say};

use super::carriers;

const LIMIT: Duration = Duration::from_mins(3);
/// A program that refuses its options says so before it opens a device.
const REFUSAL: Duration = Duration::from_secs(20);
const DOCUMENT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/figures/perftest.md"
);
const BEGIN: &str = "<!-- matrix: begin -->\n";
const END: &str = "<!-- matrix: end -->";

const ALL: [&str; 8] = [
    "ib_send_bw",
    "ib_send_lat",
    "ib_write_bw",
    "ib_write_lat",
    "ib_read_bw",
    "ib_read_lat",
    "ib_atomic_bw",
    "ib_atomic_lat",
];
const OPTIONS: [&str; 8] = ["", "-a", "-b", "-e", "-q 8", "-l 16", "-I 220", "--use-srq"];
const DEVICES: [(&str, &str); 2] = [("weft0", "-R -d weft0"), ("weft_ib0", "-d weft_ib0")];

/// What the numbers of iterations and bytes are to be, where the option does not say. Hundreds: with `-b` on an iWARP device perftest 4.5
/// does not end with 128 or 320 iterations, unless `-Q 1` has it ask for each completion (docs/verbs.md says why).
fn sizes(program: &str, options: &str) -> &'static str {
    let (latency, atomic) = (program.ends_with("lat"), program.contains("atomic"));
    match options {
        "-a" => "-n 6",
        "-I 220" => "-n 300 -s 220",
        // A multiple of the list.
        "-l 16" if atomic => "-n 320",
        "-l 16" => "-n 320 -s 4096",
        _ if atomic => "-n 300",
        "" if latency => "-n 1000 -s 64",
        "" => "-n 1000 -s 65536",
        _ => "-n 300 -s 4096",
    }
}

/// Runs that perftest itself does not end, however right all completions are.
fn endless(program: &str, device: &str, options: &str) -> bool {
    // It sleeps for a completion of its own while it waits for the peer's credits, which it looks for in memory.
    (program, device, options) == ("ib_send_bw", "weft0", "-e")
}

/// What came of a cell's run.
enum Outcome {
    /// Both sides ended well, and this is the client's line of numbers, or the last of them.
    Good(Vec<f64>),
    /// The program refuses the option.
    Refused,
    /// With what both sides said.
    Bad(String),
}

/// Whether a program says by itself, without a peer, that it does not have these options.
fn refuses(weft: &Weft, line: &str) -> bool {
    let done = weft
        .clone()
        .limit(REFUSAL)
        .run(&format!("{line} -p {} 127.0.0.1", free_port()));
    let tried = done.text.contains("Unable to init the socket connection");
    !done.is_good() && done.code() != 124 && !tried
}

fn run(weft: &Weft, line: &str, rows: usize) -> Outcome {
    let mut outcome = String::new();
    // With -R the server closes its first listener before it has the second: a client that is quicker finds none.
    for _ in 0..3 {
        let port = free_port();
        let server = weft.start(&format!("{line} -p {port}")).listens(port);
        let client = weft.run(&format!("{line} -p {port} 127.0.0.1"));
        if !client.is_good() {
            let server = server.kill();
            outcome = format!("{}\nserver: {}", client.show(), server.show());
            if client.text.contains("RDMA_CM_EVENT_REJECTED") {
                continue;
            }
            return Outcome::Bad(outcome);
        }
        let server = server.end();
        return measured(&server, &client, rows);
    }
    Outcome::Bad(outcome)
}

fn measured(server: &Done, client: &Done, rows: usize) -> Outcome {
    let mut table = client.table();
    if !server.is_good() {
        return Outcome::Bad(server.show());
    }
    match table.pop() {
        Some(last) if table.len() + 1 == rows => Outcome::Good(last),
        _ => Outcome::Bad(client.show()),
    }
}

/// What a cell says of both carriers, and whether it is as it should be.
fn cell(line: &str, program: &str, device: &str, options: &str) -> (String, bool) {
    let rows = if options == "-a" { 23 } else { 1 };
    let outcomes = carriers(device).map(|weft| {
        if refuses_known(program, options) {
            let refused = refuses(&weft, line);
            return if refused {
                Outcome::Refused
            } else {
                Outcome::Bad(format!("{line} was not refused"))
            };
        }
        run(&weft.limit(LIMIT), line, rows)
    });
    let mut good = true;
    let mut words = outcomes.iter().map(|outcome| match outcome {
        Outcome::Refused => "—".to_owned(),
        Outcome::Bad(why) => {
            say(&format!("matrix: {line}: {why}"));
            good = false;
            "**no**".to_owned()
        }
        // t_typical; average bandwidth in MiB/s, and millions a second where they have eight bytes.
        Outcome::Good(row) if options.is_empty() && program.ends_with("lat") => {
            format!("{:.1} µs", row.get(4).copied().unwrap_or(f64::NAN))
        }
        Outcome::Good(row) if options.is_empty() && program.contains("atomic") => {
            format!("{:.3} M/s", row.get(4).copied().unwrap_or(f64::NAN))
        }
        Outcome::Good(row) if options.is_empty() => {
            format!("{:.0} MiB/s", row.get(3).copied().unwrap_or(f64::NAN))
        }
        Outcome::Good(_) => "ok".to_owned(),
    });
    let (shared, tcp) = (words.next(), words.next());
    drop(words);
    let (shared, tcp) = (shared.unwrap_or_default(), tcp.unwrap_or_default());
    let text = if shared == tcp {
        shared
    } else {
        format!("{shared} / {tcp}")
    };
    (text, good)
}

/// Options that perftest 4.5 does not have for a program. The run checks that it says so.
fn refuses_known(program: &str, options: &str) -> bool {
    let (_, rest) = program.split_once('_').unwrap_or_default();
    let (verb, kind) = rest.split_once('_').unwrap_or_default();
    match options {
        "-a" => verb == "atomic",
        "-b" | "-q 8" | "-l 16" => kind == "lat",
        "-e" => verb == "write",
        "-I 220" => matches!(verb, "read" | "atomic"),
        "--use-srq" => verb != "send",
        _ => false,
    }
}

#[test]
#[ignore = "takes minutes"]
fn perftest_matrix() {
    if !have(&[("ib_send_bw", "perftest")]) {
        return;
    }
    let only = std::env::var("WEFT_MATRIX").ok();
    let wanted = |program: &str| {
        let only = only.as_deref();
        only.is_none_or(|only| only.split_whitespace().any(|one| one == program))
    };
    let mut table = "| program | device |".to_owned();
    for options in OPTIONS {
        let _ = match options {
            "" => write!(table, " plain |"),
            options => write!(table, " `{options}` |"),
        };
    }
    table.push_str("\n|---|---|");
    table.push_str(&"---|".repeat(OPTIONS.len()));
    table.push('\n');
    let mut problems = String::new();
    for program in ALL.into_iter().filter(|program| wanted(program)) {
        for (device, by) in DEVICES {
            let mut row = format!("| `{program}` | {device} |");
            let mut all_good = true;
            for options in OPTIONS {
                let line = format!("{program} -F {by} {} {options}", sizes(program, options));
                let text = if endless(program, device, options) {
                    "(1)".to_owned()
                } else {
                    let (text, good) = cell(&line, program, device, options);
                    all_good &= good;
                    text
                };
                let _ = write!(row, " {text} |");
            }
            say(&row);
            row.push('\n');
            if !all_good {
                problems += &row;
            }
            table += &row;
        }
    }
    say(&format!("perftest\n{table}"));
    if std::env::var_os("WEFT_BLESS").is_some() && only.is_none() {
        let document = std::fs::read_to_string(Path::new(DOCUMENT)).expect("the page");
        let (head, rest) = document.split_once(BEGIN).expect("a place for the table");
        let (_, tail) = rest.split_once(END).expect("an end of the table");
        std::fs::write(DOCUMENT, format!("{head}{BEGIN}{table}{END}{tail}")).expect("the page");
    }
    assert!(problems.is_empty(), "{problems}");
}
