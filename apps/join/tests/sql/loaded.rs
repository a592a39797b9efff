//! Tables in the workers' memory: the rows of one process, without files.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use weft_join::shell::{Answer, Event, Question, Trouble, ask, stream};
use weft_join::tables::{self, Wanted};
use weft_join::talk::{Part, Table};

use crate::bad::Process;
use crate::band::explained;
use crate::help::{Workers, alone, rows};
use crate::joins::{QUERIES, data};

/// Joins by the keys by which `r` and `s` are loaded, and some that look like that.
const BY_KEY: &[&str] = &[
    "SELECT r.id, s.id FROM r FULL JOIN s ON r.k = s.k AND r.id < s.id",
    "SELECT a.id, b.id, c.id FROM r a JOIN r b ON a.k = b.k JOIN s c ON b.k = c.k WHERE a.id < 40",
    "SELECT r.id, s.id, b.id FROM r LEFT JOIN s ON r.k = s.k AND r.id < s.id LEFT JOIN s b ON s.k = b.k WHERE r.id < 60",
    "SELECT r.id, s.id, b.id FROM r LEFT JOIN s ON r.k = s.k AND r.id < s.id FULL JOIN s b ON s.k = b.k AND b.id < 30",
    "SELECT r.id, s.id, b.id FROM r RIGHT JOIN s ON r.k = s.k AND r.id < s.id RIGHT JOIN r b ON s.k = b.k AND b.id < 50",
    "SELECT a.id, b.id FROM (SELECT k AS x, id FROM r WHERE id % 3 = 0) a JOIN (SELECT id, k AS y FROM s) b ON a.x = b.y",
    "SELECT a.id, b.id FROM (SELECT k + 1 AS x, id FROM r) a JOIN s b ON a.x = b.k",
    "SELECT r.id, s.id FROM r JOIN s ON r.k IS NOT DISTINCT FROM s.k WHERE r.id < 300",
    "SELECT r.id, s.id FROM r JOIN s ON r.k = s.id",
    "SELECT r.id, s.id FROM r JOIN s ON r.k = s.k AND r.id = s.id",
    "SELECT k FROM r INTERSECT SELECT k FROM s",
    "SELECT k FROM r EXCEPT SELECT k FROM s",
    "SELECT a.k, b.c FROM r a JOIN (SELECT k, count(*) c FROM s GROUP BY k) b ON a.k = b.k",
    "SELECT a.id FROM (SELECT id, k FROM r UNION ALL SELECT id, k FROM s) a JOIN s ON a.k = s.k",
    "SELECT a.id FROM (SELECT * FROM r ORDER BY id LIMIT 90) a JOIN s ON a.k = s.k",
    "SELECT t.id, s.id, r.id FROM t JOIN s ON t.id = s.id JOIN r ON r.k = s.k",
    "SELECT r.id FROM r JOIN s ON r.k = s.k JOIN t ON t.id = r.id WHERE EXISTS (SELECT 1 FROM s x WHERE x.k = r.k AND x.id <> s.id)",
];

pub fn wanted(workers: &[SocketAddr], table: &Table, by: Option<&str>) -> Wanted {
    Wanted {
        workers: workers.to_vec(),
        table: table.clone(),
        by: by.map(Into::into),
        element: 4096,
        patience: Duration::from_mins(1),
    }
}

pub fn load(workers: &[SocketAddr], table: &Table, by: Option<&str>) -> Vec<Part> {
    match tables::load(&wanted(workers, table, by), |_, _| ()) {
        Ok(parts) => parts,
        Err(trouble) => panic!("{}: {trouble:?}", table.name),
    }
}

/// The names of each worker's tables, and the bytes that it says they take.
pub fn held(workers: &[SocketAddr]) -> Vec<(Vec<String>, u64)> {
    let reports = tables::list(workers, Duration::from_mins(1), None).unwrap();
    let names = |parts: Vec<Part>| parts.into_iter().map(|part| part.name).collect();
    reports
        .into_iter()
        .map(|report| (names(report.parts), report.used))
        .collect()
}

/// Waits until no worker has anything: a query or a load that has ended gives its memory back a moment later.
pub fn nothing_is_left(workers: &[SocketAddr]) {
    let began = Instant::now();
    loop {
        let held = held(workers);
        if held
            .iter()
            .all(|(names, used)| names.is_empty() && *used == 0)
        {
            return;
        }
        assert!(began.elapsed() < Duration::from_mins(1), "{held:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn why(trouble: Result<Answer, Trouble>) -> String {
    match trouble {
        Err(Trouble::Query(why)) => why,
        other => panic!("{:?}", other.map(|answer| rows(&answer.batches))),
    }
}

/// Numbers below `count`, and their rest.
fn numbers(folder: &Path, name: &str, count: u32) -> Table {
    let path = folder.join(format!("{name}.csv"));
    let text: String = (0..count).map(|n| format!("{n},{}\n", n % 97)).collect();
    std::fs::write(&path, format!("id,k\n{text}")).unwrap();
    Table {
        name: name.into(),
        file: path.to_str().unwrap().into(),
    }
}

#[test]
fn loaded_tables_give_the_rows_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let tables = data(folder.path());
    let queries: Vec<_> = QUERIES.iter().chain(BY_KEY).collect();
    let expected: Vec<_> = queries.iter().map(|sql| alone(&tables, sql)).collect();
    assert!(expected.iter().filter(|rows| rows.len() > 20).count() > 24);
    for count in [1, 2, 3] {
        let workers = Workers::start(count);
        for (table, by) in tables.iter().zip([Some("k"), Some("k"), None, None]) {
            let parts = load(&workers.addresses, table, by);
            assert_eq!(parts.len(), count);
        }
        // The files are gone, and on the last ring some of them are back.
        let mixed = [&[][..], &tables[..1], &tables[1..3]];
        for files in &mixed[..if count == 3 { 3 } else { 1 }] {
            let hidden = folder.path().with_extension("hidden");
            if files.is_empty() {
                std::fs::rename(folder.path(), &hidden).unwrap();
            }
            for (sql, expected) in queries.iter().zip(&expected) {
                let answer = match ask(&workers.question(files, sql), |_| ()) {
                    Ok(answer) => answer,
                    Err(trouble) => panic!("{count} nodes: {sql}: {trouble:?}"),
                };
                let files = files.len();
                assert_eq!(
                    &rows(&answer.batches),
                    expected,
                    "{count} nodes, {files} files: {sql}"
                );
            }
            if files.is_empty() {
                std::fs::rename(&hidden, folder.path()).unwrap();
            }
        }
    }
}

#[test]
fn joins_by_the_keys_of_both_tables_move_no_rows() {
    let folder = tempfile::tempdir().unwrap();
    let tables = [
        numbers(folder.path(), "a", 40_000),
        numbers(folder.path(), "b", 30_000),
    ];
    let workers = Workers::start(3);
    let moved = |sql: &str| {
        let answer = ask(&workers.question(&[], sql), |_| ()).unwrap();
        assert_eq!(rows(&answer.batches), alone(&tables, sql), "{sql}");
        answer
            .outcomes
            .iter()
            .map(|outcome| outcome.sent)
            .sum::<u64>()
    };
    let queries = [
        "SELECT count(*), sum(a.k) FROM a JOIN b ON a.id = b.id",
        "SELECT count(*), count(b.id) FROM a FULL JOIN b ON a.id = b.id",
        "SELECT count(*), sum(a.k) FROM a JOIN b ON a.id = b.id JOIN a c ON c.id = b.id AND c.k = a.k",
        "SELECT count(*) FROM a WHERE NOT EXISTS (SELECT 1 FROM b WHERE b.id = a.id)",
    ];
    for table in &tables {
        load(&workers.addresses, table, Some("id"));
    }
    for sql in queries {
        let plan = explained(&workers, &[], sql);
        assert!(
            !plan.contains("Rotate") && plan.contains("by=id"),
            "{sql}: {plan}"
        );
        // The partial counts of three workers.
        let bytes = moved(sql);
        assert!(bytes < 20_000, "{sql}: {bytes}");
    }
    // By another column, or by none, the rows of one table go round.
    for by in [Some("k"), None] {
        load(&workers.addresses, &tables[1], by);
        for sql in [queries[0], queries[3]] {
            let plan = explained(&workers, &[], sql);
            assert!(plan.contains("Rotate"), "{sql}: {plan}");
            let bytes = moved(sql);
            assert!(bytes > 200_000, "{sql}: {bytes}");
        }
    }
}

#[test]
fn a_table_that_does_not_fit_is_refused_and_nothing_of_it_stays() {
    let folder = tempfile::tempdir().unwrap();
    let (small, large) = (
        numbers(folder.path(), "small", 1000),
        numbers(folder.path(), "large", 200_000),
    );
    let workers = Workers::with_tables(&[64 << 20, 1 << 20, 64 << 20]);
    let addresses = &workers.addresses;
    for by in [None, Some("id")] {
        load(addresses, &small, by);
        let before = held(addresses);
        for sql in [Some("id"), None] {
            match tables::load(&wanted(addresses, &large, sql), |_, _| ()) {
                Err(Trouble::Query(why)) => assert!(
                    why.contains(&addresses[1].to_string())
                        && why.contains("table large: it does not fit")
                        && why.contains("--tables"),
                    "{why}"
                ),
                other => panic!("{other:?}"),
            }
        }
        // The part that another worker has read is dropped a moment later.
        let began = Instant::now();
        while held(addresses) != before {
            assert!(
                began.elapsed() < Duration::from_mins(1),
                "{:?}",
                held(addresses)
            );
            thread::sleep(Duration::from_millis(20));
        }
        let answer = ask(&workers.question(&[], "SELECT count(*) FROM small"), |_| ()).unwrap();
        assert_eq!(rows(&answer.batches), ["1000"]);
    }
    for (_, used) in held(addresses) {
        assert!((1..1 << 20).contains(&used), "{used}");
    }
    let without = Workers::with_tables(&[0]);
    match tables::load(&wanted(&without.addresses, &small, None), |_, _| ()) {
        Err(Trouble::Query(why)) => assert!(why.contains("--tables MIB"), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn loads_that_cannot_be_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let table = numbers(folder.path(), "t", 100);
    let workers = Workers::start(2);
    let refused = |table: &Table, by, part: &str| match tables::load(
        &wanted(&workers.addresses, table, by),
        |_, _| (),
    ) {
        Err(Trouble::Query(why)) => assert!(why.contains(part), "{why}"),
        other => panic!("{other:?}"),
    };
    refused(
        &table,
        Some("nothing"),
        "there is no column nothing; columns are id, k",
    );
    let renamed = |name: &str| Table {
        name: name.into(),
        ..table.clone()
    };
    for name in ["", "T", "a b", "1", "t.t", &"x".repeat(100)] {
        refused(&renamed(name), None, "name");
    }
    let file = |file: &str| Table {
        file: file.into(),
        ..table.clone()
    };
    refused(&file("/nothing.csv"), None, "/nothing.csv");
    // One of its nodes is not there.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut addresses = workers.addresses.clone();
    addresses.push(gone.local_addr().unwrap());
    drop(gone);
    match tables::load(&wanted(&addresses, &table, None), |_, _| ()) {
        Err(Trouble::Peer(why)) => assert!(why.contains(&addresses[2].to_string()), "{why}"),
        other => panic!("{other:?}"),
    }
    nothing_is_left(&workers.addresses);
}

#[test]
fn a_table_that_is_dropped_stays_for_the_query_that_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let table = numbers(folder.path(), "t", 3000);
    let workers = Workers::start(2);
    let addresses = &workers.addresses;
    load(addresses, &table, Some("id"));
    let sql = "SELECT a.id, b.id FROM t a CROSS JOIN t b WHERE b.id < 400";
    let (mut count, mut dropped) = (0, false);
    // 1.2 million rows do not fit into what waits between a worker and the shell.
    stream(&workers.question(&[], sql), |event| {
        if let Event::Rows(batch) = event {
            count += batch.num_rows();
            if !std::mem::replace(&mut dropped, true) {
                let of = tables::drop_table(addresses, Duration::from_mins(1), "t", None).unwrap();
                assert!(of.iter().all(Option::is_some));
                let why = why(ask(
                    &workers.question(&[], "SELECT count(*) FROM t"),
                    |_| (),
                ));
                assert!(
                    why.contains("table t: no --table") && why.contains("load it again"),
                    "{why}"
                );
                // Its memory is still taken.
                assert!(
                    held(addresses)
                        .iter()
                        .all(|(names, used)| names.is_empty() && *used > 0)
                );
            }
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(count, 3000 * 400);
    nothing_is_left(addresses);
}

#[test]
fn the_second_load_of_a_name_takes_the_place_of_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::start(3);
    let addresses = &workers.addresses;
    let ask = |sql: &str| rows(&ask(&workers.question(&[], sql), |_| ()).unwrap().batches);
    let question = workers.question(&[], "SELECT count(*) FROM public.t");
    for count in [500, 300] {
        let table = numbers(folder.path(), "t", count);
        load(addresses, &table, (count == 500).then_some("k"));
        assert_eq!(
            ask("SELECT count(*), max(id) FROM t"),
            [format!("{count}|{}", count - 1)]
        );
    }
    // Queries beside loads.
    let table = numbers(folder.path(), "t", 300);
    thread::scope(|scope| {
        let loading = scope.spawn(|| (0..10).for_each(|_| drop(load(addresses, &table, None))));
        while !loading.is_finished() {
            match weft_join::shell::ask(&question, |_| ()) {
                Ok(answer) => assert_eq!(rows(&answer.batches), ["300"]),
                // Three loads in a row came between.
                Err(Trouble::Query(why)) => assert!(
                    why.contains("loaded anew") || why.contains("different loads"),
                    "{why}"
                ),
                Err(other) => panic!("{other:?}"),
            }
        }
    });
    // At once: one or none of them wins, and it does so on all workers.
    let versions = [1000, 2000, 3000].map(|count| {
        let folder = folder.path().join(count.to_string());
        std::fs::create_dir(&folder).unwrap();
        numbers(&folder, "t", count)
    });
    let mut won = 0;
    for round in 0..40 {
        if round >= 4 && won > 0 {
            break;
        }
        let loaded = thread::scope(|scope| {
            let loads = versions.each_ref().map(|table| {
                scope.spawn(|| tables::load(&wanted(addresses, table, None), |_, _| ()))
            });
            loads.map(|load| load.join().unwrap())
        });
        for failed in loaded.iter().filter_map(|load| load.as_ref().err()) {
            let Trouble::Query(why) = failed else {
                panic!("{failed:?}");
            };
            assert!(why.contains("under way"), "{why}");
        }
        let count = ask("SELECT count(*) FROM t");
        assert!(
            ["300", "1000", "2000", "3000"].contains(&count[0].as_str()),
            "{count:?}"
        );
        if let Some(last) = loaded.iter().position(Result::is_ok)
            && loaded.iter().filter(|load| load.is_ok()).count() == 1
        {
            assert_eq!(count, [((last + 1) * 1000).to_string()]);
            won += 1;
        }
    }
    assert!(won > 0);
}

#[test]
fn a_worker_without_its_part_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let table = numbers(folder.path(), "t", 1000);
    let mut workers = [Process::start(), Process::start()];
    let question = |workers: Vec<SocketAddr>| Question {
        workers,
        tables: Vec::new(),
        sql: "SELECT count(*), sum(a.id) FROM t a JOIN t b ON a.id = b.id".into(),
        element: 65_536,
        patience: Duration::from_mins(1),
    };
    let count =
        |workers: Vec<SocketAddr>| ask(&question(workers), |_| ()).map(|a| rows(&a.batches));
    let [a, b] = [workers[0].1, workers[1].1];
    load(&[a, b], &table, Some("id"));
    let all = ["1000|499500".to_owned()];
    assert_eq!(count(vec![a, b]).unwrap(), all);
    match ask(&question(vec![a, b, a]), |_| ()) {
        Err(Trouble::Query(why)) => assert!(why.contains("named twice"), "{why}"),
        other => panic!("{:?}", other.map(|answer| rows(&answer.batches))),
    }
    match tables::load(&wanted(&[a, a], &table, None), |_, _| ()) {
        Err(Trouble::Query(why)) => assert!(why.contains("named twice"), "{why}"),
        other => panic!("{other:?}"),
    }
    // In another order, and with a worker that has no part.
    assert_eq!(count(vec![b, a]).unwrap(), all);
    let third = Process::start();
    for with in [vec![third.1, b, a], vec![a, third.1, b]] {
        assert_eq!(count(with).unwrap(), all);
    }
    let why_not = |workers| why(ask(&question(workers), |_| ()));
    let part = why_not(vec![a]);
    assert!(
        part.contains("2 parts") && part.contains("only 1"),
        "{part}"
    );
    // A worker that was restarted.
    workers[1].0.kill().unwrap();
    workers[1].0.wait().unwrap();
    workers[1] = Process::at(&b.to_string());
    let lost = why_not(vec![a, b]);
    assert_eq!(
        lost,
        format!("table t: worker {b} has no part of it; load it again (weft join load)")
    );
    let lost = why_not(vec![third.1, a, b]);
    assert!(
        lost.contains(&format!("workers {}, {b} have no part", third.1)),
        "{lost}"
    );
    // Parts of two loads.
    load(&[b], &table, Some("id"));
    let mixed = why_not(vec![a, b]);
    assert!(mixed.contains("different loads"), "{mixed}");
    load(&[a, b], &table, None);
    assert_eq!(count(vec![a, b]).unwrap(), all);
    // A single worker cannot know that it ever had a part.
    drop(workers);
    let gone = why_not(vec![third.1]);
    assert!(
        gone.contains("table t: no --table") && gone.contains("load it again"),
        "{gone}"
    );
}

#[test]
fn the_command_line_loads_lists_and_drops() {
    let folder = tempfile::tempdir().unwrap();
    let table = numbers(folder.path(), "Numbers", 1000);
    let workers = [Process::start(), Process::start()];
    let names = format!("{},{}", workers[0].1, workers[1].1);
    let run = |args: &[&str]| {
        let out = Command::new(env!("CARGO_BIN_EXE_weft-join"))
            .args([&args[..1], &["-w", &names], &args[1..]].concat())
            .output()
            .unwrap();
        let [out_text, err] = [out.stdout, out.stderr].map(|text| String::from_utf8(text).unwrap());
        (out.status.code(), out_text, err)
    };
    let file = format!("Numbers={}", table.file);
    let (code, out, err) = run(&["load", "--table", &file, "--by", "id"]);
    assert_eq!((code, out.as_str()), (Some(0), ""), "{err}");
    assert!(
        err.starts_with("numbers: 1000 rows, ") && err.contains(" in 2 parts, "),
        "{err}"
    );
    let (code, out, err) = run(&["tables", "--format", "csv"]);
    assert_eq!(code, Some(0), "{err}");
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(
        lines[0],
        "table,by,worker,part,parts,rows,bytes,seconds_ago"
    );
    assert_eq!(lines.len(), 3, "{out}");
    assert!(
        lines[1].starts_with(&format!("numbers,id,{},0,2,", workers[0].1)),
        "{out}"
    );
    assert!(err.contains("of 64.0 MiB"), "{err}");
    let (code, out, err) = run(&[
        "sql",
        "--format",
        "csv",
        "SELECT count(*) AS n FROM Numbers",
    ]);
    assert_eq!((code, out.as_str()), (Some(0), "n\n1000\n"), "{err}");
    let (code, _, err) = run(&[
        "sql",
        "--engine",
        "distributed",
        "SELECT count(*) FROM numbers",
    ]);
    assert_eq!(code, Some(1));
    assert!(err.contains("--engine ring"), "{err}");
    assert_eq!(run(&["drop", "numbers"]).0, Some(0));
    let (code, _, err) = run(&["drop", "numbers"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("table numbers: no worker"), "{err}");
    let (code, _, err) = run(&["load", "--table", "a b=/x"]);
    assert_eq!(code, Some(2), "{err}");
}

#[test]
fn zeros_of_both_signs_and_nan_join_as_in_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let tables = ["a", "b"].map(|name| {
        let path = folder.path().join(format!("{name}.csv"));
        std::fs::write(&path, "f,id\n0.0,1\n-0.0,2\nNaN,3\n1.5,4\n,5\n").unwrap();
        Table {
            name: name.into(),
            file: path.to_str().unwrap().into(),
        }
    });
    let workers = Workers::start(2);
    for by in [Some("f"), Some("id")] {
        for table in &tables {
            load(&workers.addresses, table, by);
        }
        for on in [
            "a.f = b.f",
            "a.f IS NOT DISTINCT FROM b.f",
            "a.f = b.f AND a.id < b.id",
        ] {
            let sql = format!("SELECT a.id, b.id FROM a JOIN b ON {on}");
            let answer = ask(&workers.question(&[], &sql), |_| ()).unwrap();
            assert_eq!(
                rows(&answer.batches),
                alone(&tables, &sql),
                "{sql}, by {by:?}"
            );
        }
    }
}

#[test]
fn the_index_of_a_part_is_made_once_and_used_by_later_joins() {
    let folder = tempfile::tempdir().unwrap();
    let tables = [
        numbers(folder.path(), "a", 4000),
        numbers(folder.path(), "b", 9000),
    ];
    // With space for indexes, and with none.
    for limit in [64 << 20, 125_000] {
        let workers = Workers::with_tables(&[limit; 2]);
        load(&workers.addresses, &tables[0], Some("id"));
        load(&workers.addresses, &tables[1], None);
        let used = || {
            held(&workers.addresses)
                .iter()
                .map(|(_, used)| *used)
                .collect::<Vec<_>>()
        };
        let mut before = used();
        for (sql, is_new) in [
            (
                "SELECT count(*), sum(b.k) FROM a JOIN b ON a.id = b.id",
                true,
            ),
            (
                "SELECT a.k, b.k FROM a JOIN b ON a.id = b.id AND a.k + b.k < 90",
                false,
            ),
            (
                "SELECT count(*) FROM a JOIN b ON a.k = b.k AND a.id = b.id",
                true,
            ),
            (
                "SELECT count(*) FROM a JOIN b ON a.id IS NOT DISTINCT FROM b.id",
                false,
            ),
            ("SELECT count(*) FROM a JOIN b ON a.k = b.k", true),
        ] {
            let plan = explained(&workers, &[], sql);
            assert!(plan.contains("IndexedJoinExec"), "{sql}: {plan}");
            for _ in 0..2 {
                let answer = ask(&workers.question(&[], sql), |_| ()).unwrap();
                assert_eq!(rows(&answer.batches), alone(&tables, sql), "{sql}");
            }
            let after = used();
            let grown = after
                .iter()
                .zip(&before)
                .all(|(after, before)| after > before);
            assert_eq!(
                grown,
                is_new && limit > 1 << 20,
                "{sql}: {before:?}, {after:?}"
            );
            assert!(after.iter().all(|&used| used <= limit as u64));
            before = after;
        }
        for name in ["a", "b"] {
            tables::drop_table(&workers.addresses, Duration::from_mins(1), name, None).unwrap();
        }
        nothing_is_left(&workers.addresses);
    }
}
