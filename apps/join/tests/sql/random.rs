//! Random joins by equality and by any condition, against DuckDB: NULL, NaN, no rows, all keys equal, rows wider than an element.

use weft_join::shell::ask;

use crate::band::{Random, data};
use crate::help::{Workers, duckdb, duckdb_says, rows, sorted};

/// Random joins of a run of all tests; `WEFT_JOINS` sets another number.
const JOINS: u64 = 150;
/// Joins of one pair of tables.
const OF_A_PAIR: u64 = 500;

/// A random condition between `a` and `b`.
fn condition(random: &mut Random) -> String {
    let (n, m) = (random.below(9), 1 + random.below(4));
    let first = match random.below(20) {
        0 => "a.i = b.i".into(),
        1 => "a.i = b.h".into(),
        2 => "a.f = b.f".into(),
        3 => "a.d = b.d".into(),
        4 => "a.m = b.m".into(),
        5 => "a.w = b.w".into(),
        6 => "a.s = b.s".into(),
        7 => "a.c = b.c".into(),
        8 => format!("a.i = b.i + {n}"),
        9 => format!("a.i % {m} = b.h % {m}"),
        10 => "a.i = b.i AND a.w = b.w".into(),
        11 => "a.i IS NOT DISTINCT FROM b.i".into(),
        12 => "a.g = b.g".into(),
        13 => "a.t = b.t OR a.i = b.i".into(),
        14 => "a.i <> b.i".into(),
        15 => format!("a.i * b.w > a.h * {n}"),
        16 => "a.s < b.s".into(),
        17 => format!("(a.f > b.f OR a.d < b.d) AND a.w <> b.w + {n}"),
        18 => format!("a.i + b.i = {n}"),
        _ => "a.m - b.m < a.w - b.w".into(),
    };
    let rest = random.of(&[
        "",
        "",
        "",
        " AND a.id % 3 <> b.id % 4",
        " AND a.f < b.f",
        " AND (a.h < b.h OR a.s = b.s)",
    ]);
    format!("({first}){rest}")
}

/// One side: all of a table, a part of it, or no rows.
fn side(random: &mut Random, name: &str) -> String {
    match random.below(12) {
        0 => format!("(SELECT * FROM {name} WHERE id < 0) {name}"),
        1 => format!("(SELECT * FROM {name} WHERE f = 'NaN' OR i IS NULL) {name}"),
        2 => format!("(SELECT * FROM {name} WHERE id = 3) {name}"),
        _ => name.into(),
    }
}

fn query(random: &mut Random) -> String {
    let (on, a, b) = (condition(random), side(random, "a"), side(random, "b"));
    let exists = format!("EXISTS (SELECT 1 FROM {b} WHERE {on})");
    match random.below(12) {
        0 | 1 => format!("SELECT a.id, b.id FROM {a} JOIN {b} ON {on}"),
        2 => format!("SELECT a.id, b.s FROM {a} JOIN {b} ON {on} WHERE b.id < 9"),
        3 => format!("SELECT a.id, b.id FROM {a} LEFT JOIN {b} ON {on}"),
        4 => format!("SELECT a.id, b.id, a.s FROM {a} RIGHT JOIN {b} ON {on} WHERE b.id < 9"),
        5 => format!("SELECT a.id, b.id FROM {a} FULL JOIN {b} ON {on}"),
        6 => format!("SELECT a.id, a.s FROM {a} WHERE {exists}"),
        7 => format!("SELECT a.id FROM {a} WHERE NOT {exists}"),
        8 => format!("SELECT a.id FROM {a} WHERE {exists} OR a.id < 9"),
        9 => format!("SELECT a.id FROM {a} WHERE a.i NOT IN (SELECT b.i FROM {b} WHERE b.w > 2)"),
        10 => format!("SELECT a.w, count(*), max(b.s) FROM {a} JOIN {b} ON {on} GROUP BY a.w"),
        _ => format!("SELECT count(*), sum(a.id), min(b.m) FROM {a} JOIN {b} ON {on}"),
    }
}

#[test]
fn random_joins_are_as_duckdb_says() {
    let Some(python) = duckdb() else {
        return;
    };
    let seed: u64 = std::env::var("WEFT_SEED").map_or(1, |s| s.parse().unwrap());
    let joins: u64 = std::env::var("WEFT_JOINS").map_or(JOINS, |s| s.parse().unwrap());
    let rings = [1, 2, 3].map(Workers::start);
    let mut filled = 0;
    for begin in (0..joins).step_by(OF_A_PAIR as usize) {
        let folder = tempfile::tempdir().unwrap();
        let tables = data(folder.path(), seed + begin);
        let rounds = begin..joins.min(begin + OF_A_PAIR);
        let queries = rounds
            .clone()
            .map(|round| query(&mut Random::new(seed + round)));
        let queries: Vec<_> = queries.collect();
        let theirs = duckdb_says(&python, folder.path(), &tables, &queries);
        for ((round, sql), theirs) in rounds.zip(&queries).zip(theirs) {
            let workers = &rings[(round % 3) as usize];
            let told = format!("{sql} (seed {seed}, round {round})");
            let ours = ask(&workers.question(&tables, sql), |_| ());
            let ours = ours.unwrap_or_else(|trouble| panic!("{told}: {trouble:?}"));
            filled += u64::from(theirs.len() > 5);
            assert_eq!(rows(&ours.batches), sorted(theirs), "{told}");
        }
    }
    assert!(filled > joins / 3, "{filled} of {joins} gave rows");
}
