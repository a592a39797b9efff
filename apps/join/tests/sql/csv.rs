//! CSV files whose values have line breaks: rows end where the grammar says, on any number of workers.

use std::fmt::Write as _;

use weft_join::shell::ask as ask_ring;
use weft_join::talk::Table;

use crate::band::Random;
use crate::help::{Workers, rows, run_alone};

/// Random files of a run of all tests; `WEFT_CSV` sets another number.
const FILES: u64 = 40;

fn table(folder: &std::path::Path, text: &str) -> Table {
    let path = folder.join("t.csv");
    std::fs::write(&path, text).unwrap();
    Table {
        name: "t".into(),
        file: path.to_str().unwrap().into(),
    }
}

/// Compares both engines on rings of 1 to 3 workers with one process.
fn compare(rings: &[Workers], table: &Table, sql: &str, what: &str) {
    let tables = std::slice::from_ref(table);
    let alone = run_alone(tables, sql);
    for workers in rings {
        let count = workers.addresses.len();
        let ring = ask_ring(&workers.question(tables, sql), |_| {}).map(|answer| answer.batches);
        let other = crate::distributed::ask(workers, tables, sql);
        for (engine, got) in [("ring", ring), ("distributed", other)] {
            match (&alone, got) {
                (Ok(alone), Ok(got)) => assert_eq!(
                    rows(&got),
                    rows(alone),
                    "{engine} on {count} workers: {sql} of {what}"
                ),
                (Err(_), Err(_)) => {}
                (alone, got) => panic!(
                    "{engine} on {count} workers: {sql} of {what}: {got:?}, one process: {alone:?}"
                ),
            }
        }
    }
}

#[test]
fn a_row_with_a_line_break_is_one_row() {
    let folder = tempfile::tempdir().unwrap();
    let rings = [1, 2, 3].map(Workers::start);
    let one = table(folder.path(), "id,t\n1,\"aaaaaa\n2,bbbbbb\"\n");
    compare(&rings, &one, "SELECT count(*), sum(id) FROM t", "one row");
    let mut text = String::from("id,t\n");
    for id in 0..2000 {
        writeln!(text, "{id},\"line of {id}\n{id},another \"\"line\"\"\"").unwrap();
    }
    let many = table(folder.path(), &text);
    for sql in [
        "SELECT count(*), sum(id), min(t), max(t) FROM t",
        "SELECT id, t FROM t",
    ] {
        compare(&rings, &many, sql, "2,000 rows");
    }
}

#[test]
fn all_workers_read_a_part_of_a_file_with_quotes() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::start(3);
    let mut text = String::from("id,t\n");
    for id in 0..3000 {
        writeln!(text, "{id},\"one\ntwo\"").unwrap();
    }
    let tables = [table(folder.path(), &text)];
    let answer = ask_ring(&workers.question(&tables, "SELECT id, t FROM t"), |_| {}).unwrap();
    for outcome in &answer.outcomes[1..] {
        assert!(
            outcome.sent > text.len() as u64 / 6,
            "{:?}",
            answer.outcomes
        );
    }
}

fn random_file(random: &mut Random) -> String {
    let end = random.of(&["\n", "\n", "\r\n"]);
    let mut text = String::new();
    if random.below(4) == 0 {
        text.push('\u{feff}');
    }
    text.push_str(random.of(&["id,s,t", "id,\"s\",t", "\"id\",\"s\",\"t\""]));
    text.push_str(end);
    let count = random.below(60);
    for id in 0..count {
        let mut cell = || match random.below(9) {
            0 => String::new(),
            1 => "\"\"".into(),
            2 => format!("\"line {id}{end}{id},x,y\""),
            3 => format!("\"\"\"said\"\" {id}\""),
            4 => format!("it is 5\" {id}"),
            5 => format!("\"a,b,{id}\""),
            6 => format!("\"{end}{end}\"\"{end}\""),
            _ => format!("plain {id}"),
        };
        let (s, t) = (cell(), cell());
        write!(text, "{id},{s},{t}").unwrap();
        if id + 1 < count || random.below(3) > 0 {
            text.push_str(end);
        }
    }
    text
}

#[test]
fn random_csv_files_are_as_in_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let rings = [1, 2, 3].map(Workers::start);
    let files = std::env::var("WEFT_CSV").map_or(FILES, |n| n.parse().unwrap());
    let mut random = Random::new(std::env::var("WEFT_SEED").map_or(1, |s| s.parse().unwrap()));
    for file in 0..files {
        let text = random_file(&mut random);
        let table = table(folder.path(), &text);
        let sql = random.of(&[
            "SELECT id, s, t FROM t",
            "SELECT count(*), count(s), max(t) FROM t",
        ]);
        compare(&rings, &table, sql, &format!("file {file}: {text:?}"));
    }
}

/// Functions of DataFusion's own shell.
#[test]
fn nested_values_digests_and_patterns_are_as_in_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let rings = [2].map(Workers::start);
    let table = table(folder.path(), "id,t\n1,a b\n2,c\n");
    for sql in [
        "SELECT get_field(k, 'a'), k['a'] FROM (SELECT named_struct('a', id, 'b', t) AS k FROM t)",
        "SELECT make_array(id, 2)[1], array_length(make_array(id, 2, 3)), array_to_string(string_to_array(t, ' '), '-') FROM t",
        "SELECT md5(t), encode(sha256(t), 'hex') FROM t",
        "SELECT id FROM t WHERE t ~ '^a'",
    ] {
        compare(&rings, &table, sql, "two rows");
    }
}
