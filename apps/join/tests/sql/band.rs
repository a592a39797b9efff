//! Band joins against the nested loops of one process, and against DuckDB.

use std::path::Path;

use datafusion::dataframe::DataFrameWriteOptions;
use datafusion::prelude::SessionContext;
use weft_join::shell::ask;
use weft_join::talk::Table;

use crate::help::{Workers, alone, duckdb, duckdb_says, rows, run_alone, sorted};

/// Random joins; `WEFT_BANDS` sets another number.
const JOINS: u64 = 150;

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) % limit
    }

    pub fn of<'a, T: ?Sized>(&mut self, choices: &[&'a T]) -> &'a T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// Two tables whose columns have all types of keys, with NULL, NaN, infinities, duplicates, and integers at the ends of their range. Decimals are in
/// quarters: `7.25` in a query is a `DOUBLE` here and a decimal in DuckDB, and that difference must not decide about rows at the very end of a band. `c`
/// is the same in all rows; `s` is text, which may be wider than an element.
pub fn data(folder: &Path, seed: u64) -> Vec<Table> {
    let mut random = Random::new(seed);
    let mut table = |name: &str, count: u64| {
        let mut values = Vec::new();
        for id in 0..count {
            let mut cell = |text: String| {
                if random.below(12) == 0 {
                    "NULL".to_owned()
                } else {
                    text
                }
            };
            let (int, small) = (cell(String::new()), cell(String::new()));
            let (float, date) = (cell(String::new()), cell(String::new()));
            let (time, money) = (cell(String::new()), cell(String::new()));
            let fill = |null: String, text: String| if null.is_empty() { text } else { null };
            let number = random.below(60) as i64 - 20;
            let float_text = match random.below(14) {
                0 => "'NaN'".to_owned(),
                1 => "'Infinity'".to_owned(),
                2 => "'-Infinity'".to_owned(),
                3 => "0.0".to_owned(),
                _ => format!("{}.{}", random.below(40), random.below(100)),
            };
            let end = match random.below(3) {
                0 => i64::MAX - random.below(8) as i64,
                1 => i64::MIN + 1 + random.below(8) as i64,
                _ => number,
            };
            values.push(format!(
                "({id}, {}, {}, {}, {}, {}, {}, {end}, {}, 7, {})",
                fill(int, number.to_string()),
                fill(small, (random.below(90) as i64 - 30).to_string()),
                fill(float, float_text),
                fill(
                    date,
                    format!(
                        "'2024-{:02}-{:02}'",
                        1 + random.below(4),
                        1 + random.below(29)
                    )
                ),
                fill(
                    time,
                    format!(
                        "'2024-02-28T{:02}:{:02}:00'",
                        random.below(24),
                        random.below(60)
                    )
                ),
                fill(
                    money,
                    format!("'{}.{:02}'", random.below(30), 25 * random.below(4))
                ),
                random.below(9),
                match random.below(16) {
                    0 => "NULL".to_owned(),
                    1 => format!("'{}'", "wide ".repeat(random.below(1500) as usize)),
                    _ => format!("'text {}'", random.below(30)),
                },
            ));
        }
        let sql = format!(
            "SELECT CAST(c1 AS BIGINT) AS id, CAST(c2 AS BIGINT) AS i, CAST(c3 AS SMALLINT) AS h, CAST(c4 AS DOUBLE) AS f, CAST(c5 AS DATE) AS d, \
             CAST(c6 AS TIMESTAMP) AS t, CAST(c7 AS DECIMAL(12,2)) AS m, CAST(c8 AS BIGINT) AS e, CAST(c9 AS BIGINT) AS w, CAST(c4 AS REAL) AS g, \
             CAST(c10 AS BIGINT) AS c, c11 AS s \
             FROM (VALUES {}) AS v(c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11)",
            values.join(", ")
        );
        let file = folder.join(format!("{name}.parquet"));
        let file = file.to_str().unwrap().to_owned();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let frame = SessionContext::new().sql(&sql).await.unwrap();
            let options = DataFrameWriteOptions::new().with_single_file_output(true);
            frame.write_parquet(&file, options, None).await.unwrap();
        });
        Table {
            name: name.into(),
            file,
        }
    };
    vec![table("a", 70), table("b", 50)]
}

/// A random condition between `a` and `b`, and whether it can overflow, which other engines report.
fn condition(random: &mut Random) -> (String, bool) {
    let (n, m) = (random.below(9), random.below(9));
    let (lower, upper) = (random.of(&[">=", ">"]), random.of(&["<=", "<"]));
    let mut overflows = false;
    let band = match random.below(13) {
        0 => format!("a.i BETWEEN b.i - {n} AND b.i + {m}"),
        1 => format!("a.i {lower} b.i - {n} AND a.i {upper} b.i + {m}"),
        2 => format!("a.h {lower} b.i - {n} AND b.i + {m} > a.h"),
        3 => format!("a.f {lower} b.f - {n}.5 AND a.f {upper} b.f + {m}.25"),
        4 => format!("a.d BETWEEN b.d - INTERVAL '{n}' DAY AND b.d + INTERVAL '1' MONTH"),
        5 => format!(
            "a.t {lower} b.t - INTERVAL '{n}' MINUTE AND a.t {upper} b.t + INTERVAL '{m}' HOUR"
        ),
        6 => format!("a.m BETWEEN b.m - {n}.25 AND b.m + {m}.5"),
        7 => format!("a.i {upper} b.i + b.w AND b.i {upper} a.i + a.w"),
        8 => format!("a.i {lower} b.i + {n} + 20"),
        9 => {
            overflows = true;
            format!("a.e BETWEEN b.e - {n} AND b.e + {m}")
        }
        10 => format!("a.i {lower} b.m - {n} AND a.i {upper} b.f + {m}"),
        11 => format!("a.g BETWEEN b.g - {n} AND b.g + {m}"),
        _ => format!("a.i + a.w {lower} b.i AND a.i - a.w {upper} b.i AND a.f {upper} b.f"),
    };
    let rest = random.of(&[
        "",
        "",
        " AND a.id % 3 <> b.id % 4",
        " AND a.w + b.w > 4",
        " AND (a.h < b.h OR a.f > b.f)",
    ]);
    (format!("{band}{rest}"), overflows)
}

/// A random query with it.
fn query(random: &mut Random, condition: &str) -> String {
    let exists = format!("EXISTS (SELECT 1 FROM b WHERE {condition})");
    match random.below(9) {
        0 | 1 => format!("SELECT a.id, b.id FROM a JOIN b ON {condition}"),
        2 => format!("SELECT a.id, b.id FROM a LEFT JOIN b ON {condition}"),
        3 => format!("SELECT a.id, b.id FROM a RIGHT JOIN b ON {condition}"),
        4 => format!("SELECT a.id, b.id FROM a FULL JOIN b ON {condition}"),
        5 => format!("SELECT id, i FROM a WHERE {exists}"),
        6 => format!("SELECT id, w FROM a WHERE NOT {exists}"),
        7 => format!("SELECT id FROM a WHERE {exists} OR a.id < 9"),
        _ => format!("SELECT count(*) FROM a, b WHERE {condition}"),
    }
}

/// The plan of a query.
pub fn explained(workers: &Workers, tables: &[Table], sql: &str) -> String {
    let sql = format!("EXPLAIN {sql}");
    rows(
        &ask(&workers.question(tables, &sql), |_| ())
            .unwrap()
            .batches,
    )
    .join("\n")
}

#[test]
fn random_band_joins_are_as_nested_loops_say() {
    let seed: u64 = std::env::var("WEFT_SEED").map_or(1, |s| s.parse().unwrap());
    let joins: u64 = std::env::var("WEFT_BANDS").map_or(JOINS, |s| s.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let tables = data(folder.path(), seed);
    let rings = [1, 2, 3].map(Workers::start);
    let (mut bands, mut filled) = (0, 0);
    for round in 0..joins {
        let mut random = Random::new(seed + round);
        let (condition, _) = condition(&mut random);
        let sql = query(&mut random, &condition);
        let workers = &rings[(round % 3) as usize];
        if round < 30 {
            bands += usize::from(explained(workers, &tables, &sql).contains("BandJoinExec"));
        }
        let told = format!("{sql} (seed {seed}, round {round})");
        // A decimal can leave its range, in both.
        match (
            run_alone(&tables, &sql),
            ask(&workers.question(&tables, &sql), |_| ()),
        ) {
            (Ok(expected), Ok(got)) => {
                let expected = rows(&expected);
                filled += usize::from(expected.len() > 5);
                assert_eq!(rows(&got.batches), expected, "{told}");
            }
            (Err(_), Err(_)) => {}
            (expected, got) => panic!(
                "{told}: {:?} and {:?}",
                expected.map(|e| rows(&e)),
                got.map(|g| rows(&g.batches))
            ),
        }
    }
    // All but full joins; some of them select no existing rows.
    assert!(bands > 20, "{bands} of 30 plans had band joins");
    assert!(filled as u64 > joins / 3, "{filled} of {joins} gave rows");
}

#[test]
fn random_band_joins_are_as_duckdb_says() {
    let Some(python) = duckdb() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let tables = data(folder.path(), 7);
    let mut queries = Vec::new();
    for round in 0..JOINS {
        let mut random = Random::new(1000 + round);
        let (condition, overflows) = condition(&mut random);
        if overflows {
            continue;
        }
        let sql = query(&mut random, &condition);
        queries.push(sql);
    }
    let theirs = duckdb_says(&python, folder.path(), &tables, &queries);
    let workers = Workers::start(2);
    for (sql, theirs) in queries.iter().zip(theirs) {
        let ours = rows(
            &ask(&workers.question(&tables, sql), |_| ())
                .unwrap()
                .batches,
        );
        assert_eq!(ours, sorted(theirs), "{sql}");
    }
}

#[test]
fn explain_shows_the_band() {
    let folder = tempfile::tempdir().unwrap();
    let tables = data(folder.path(), 3);
    for count in [1, 2] {
        let workers = Workers::start(count);
        let sql = "SELECT a.id FROM a JOIN b ON a.i BETWEEN b.i - 2 AND b.i + 3 AND a.w <> b.w";
        let plan = explained(&workers, &tables, sql);
        assert!(
            plan.contains("BandJoinExec: join_type=Inner, band=["),
            "{plan}"
        );
        assert!(
            plan.contains("filter=") && !plan.contains("NestedLoopJoinExec"),
            "{plan}"
        );
        assert_eq!(plan.contains("RoundaboutExec: Rotate"), count > 1, "{plan}");
        // The rows that are kept stay; a comparison of text, and a difference of both sides, have no band.
        let sql = "SELECT a.id, b.id FROM a RIGHT JOIN b ON a.i < b.i AND a.i > b.i - 9";
        let plan = explained(&workers, &tables, sql);
        assert!(plan.contains("BandJoinExec: join_type=Left"), "{plan}");
        let sql = "SELECT a.id FROM a JOIN b ON a.i - b.i BETWEEN -2 AND 2";
        assert!(explained(&workers, &tables, sql).contains("NestedLoopJoinExec"));
        let sql = "SELECT a.id FROM a JOIN b ON a.i < b.i + 9 * random()";
        let plan = explained(&workers, &tables, sql);
        assert!(plan.contains("NestedLoopJoinExec"), "{plan}");
    }
}

/// A table of the numbers below 20,000.
fn numbers(folder: &Path) -> [Table; 1] {
    let file = folder.join("n.csv");
    let text: String = (0..20_000)
        .map(|id| format!("{}\n", id * 7919 % 20_000))
        .collect();
    std::fs::write(&file, format!("id\n{text}")).unwrap();
    [Table {
        name: "n".into(),
        file: file.to_str().unwrap().into(),
    }]
}

#[test]
fn a_band_join_that_needs_more_than_its_memory_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let tables = numbers(folder.path());
    let workers = Workers::with_memory(2, Some(300_000));
    let sql = "SELECT count(*) FROM n x JOIN n y ON x.id BETWEEN y.id - 5 AND y.id + 5";
    match ask(&workers.question(&tables, sql), |_| ()) {
        Err(weft_join::shell::Trouble::Query(why)) => {
            assert!(why.contains("BandJoin") && why.contains("allocat"), "{why}");
        }
        other => panic!("{:?}", other.map(|a| rows(&a.batches))),
    }
}

#[test]
fn a_large_band_gives_what_arithmetic_says() {
    let folder = tempfile::tempdir().unwrap();
    let tables = numbers(folder.path());
    let workers = Workers::start(3);
    // Each of 20,000 numbers has 11 neighbours up to 5 away, but for 30 pairs beyond the ends.
    let sql = "SELECT count(*) FROM n x JOIN n y ON x.id BETWEEN y.id - 5 AND y.id + 5";
    let answer = ask(&workers.question(&tables, sql), |_| ()).unwrap();
    assert_eq!(rows(&answer.batches), ["219970"]);
    // One key for all: more pairs of a batch than a batch has rows.
    let sql = "SELECT count(*) FROM n x JOIN n y ON x.id / 20000 + 1 BETWEEN y.id / 20000 AND y.id / 20000 + 1 WHERE x.id < 300 AND y.id < 900";
    assert_eq!(alone(&tables, sql), ["270000"]);
    let answer = ask(&workers.question(&tables, sql), |_| ()).unwrap();
    assert_eq!(rows(&answer.batches), ["270000"]);
}
