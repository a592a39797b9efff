//! Queries on rings of workers give the rows of one process, and of DuckDB where it is installed.

use std::path::Path;
use std::process::Command;

use datafusion::dataframe::DataFrameWriteOptions;
use datafusion::prelude::{CsvReadOptions, SessionContext};
use weft_join::shell::{Trouble, ask};
use weft_join::talk::Table;

use crate::band::explained;
use crate::help::{Workers, alone, duckdb, rows};

/// Joins of all kinds, with the operators around them. `f` is a float without NULL, `k` a key with duplicates and
/// NULL.
pub const QUERIES: &[&str] = &[
    "SELECT r.id, s.id FROM r JOIN s ON r.k = s.k",
    "SELECT r.id, s.id FROM r LEFT JOIN s ON r.k = s.k",
    "SELECT r.id, s.id FROM r RIGHT JOIN s ON r.k = s.k",
    "SELECT r.id, s.id FROM r FULL JOIN s ON r.k = s.k",
    "SELECT r.id, s.id FROM r LEFT JOIN s ON r.k = s.k AND r.id < s.id",
    "SELECT r.id, s.id FROM r RIGHT JOIN s ON r.k < s.k - 150",
    "SELECT id FROM r WHERE k IN (SELECT k FROM s)",
    "SELECT id FROM r WHERE EXISTS (SELECT 1 FROM s WHERE s.k = r.k AND s.id > r.id)",
    "SELECT id FROM s WHERE NOT EXISTS (SELECT 1 FROM r WHERE s.k = r.k)",
    "SELECT id FROM r WHERE k NOT IN (SELECT k FROM s WHERE k IS NOT NULL)",
    "SELECT id FROM r WHERE k NOT IN (SELECT k FROM s)",
    "SELECT count(*) FROM r CROSS JOIN s",
    "SELECT r.id, s.id FROM r JOIN s ON s.k BETWEEN r.k - 1 AND r.k + 1 WHERE r.id < 60",
    "SELECT r.id, s.id FROM r JOIN s ON r.k * 3 > s.k * 5 + 700",
    "SELECT r.id, s.id, t.name FROM r JOIN s ON r.k = s.k JOIN t ON s.id = t.id",
    "SELECT t.name, count(*), sum(r.id), min(s.k), avg(s.id) FROM r JOIN s ON r.k = s.k JOIN t ON s.id % 7 = t.id GROUP BY t.name",
    "SELECT count(*), count(k), count(DISTINCT k), max(id) FROM r",
    "SELECT count(*), sum(k) FROM r WHERE id < 0",
    "SELECT k, count(*) FROM r GROUP BY k HAVING count(*) > (SELECT avg(c) FROM (SELECT count(*) AS c FROM s GROUP BY k))",
    "SELECT id FROM r WHERE k = (SELECT max(k) FROM s)",
    "SELECT id, k FROM r ORDER BY k NULLS LAST, id LIMIT 10",
    "SELECT k FROM r UNION SELECT k FROM s",
    "SELECT id, 1 FROM r UNION ALL SELECT id, 2 FROM s",
    "SELECT DISTINCT k FROM r WHERE k < 50",
    "SELECT id, row_number() OVER (PARTITION BY k ORDER BY id) FROM r",
    "SELECT a.id FROM r a JOIN r b ON a.id = b.id JOIN e ON e.id = a.id",
    "SELECT a.id, e.id FROM r a LEFT JOIN e ON e.id = a.id",
    "SELECT 1 + 1",
    "SELECT x.k, x.c FROM (SELECT k, count(*) AS c FROM r GROUP BY k) x JOIN s ON s.k = x.k WHERE s.id < 100",
];

/// Tables with a key, as CSV files. The last has no rows.
pub fn data(folder: &Path) -> Vec<Table> {
    let mut state = 42u64;
    let mut below = move |limit: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % limit
    };
    let mut tables = Vec::new();
    for (name, rows) in [("r", 700), ("s", 500), ("t", 40), ("e", 0)] {
        let path = folder.join(format!("{name}.csv"));
        let mut text = String::from("id,k,name\n");
        for id in 0..rows {
            let key = match below(10) {
                0 => String::new(),
                1 => "7".to_owned(),
                _ => below(200).to_string(),
            };
            text.push_str(&format!("{id},{key},name {}\n", id % 13));
        }
        std::fs::write(&path, text).unwrap();
        tables.push(Table {
            name: name.into(),
            file: path.to_str().unwrap().into(),
        });
    }
    tables
}

#[test]
fn rings_give_the_rows_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let tables = data(folder.path());
    let expected: Vec<_> = QUERIES.iter().map(|sql| alone(&tables, sql)).collect();
    assert!(expected.iter().filter(|rows| rows.len() > 20).count() > 12);
    for count in [1, 2, 3] {
        let workers = Workers::start(count);
        for (sql, expected) in QUERIES.iter().zip(&expected) {
            let answer = match ask(&workers.question(&tables, sql), |_| ()) {
                Ok(answer) => answer,
                Err(trouble) => panic!("{count} nodes: {sql}: {trouble:?}"),
            };
            assert_eq!(&rows(&answer.batches), expected, "{count} nodes: {sql}");
        }
    }
}

/// The same tables as Parquet files.
fn parquet(tables: &[Table]) -> Vec<Table> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let convert = |table: &Table| {
        let file = table.file.replace(".csv", ".parquet");
        runtime.block_on(async {
            let context = SessionContext::new();
            let frame = context
                .read_csv(&table.file, CsvReadOptions::new())
                .await
                .unwrap();
            let options = DataFrameWriteOptions::new();
            frame.write_parquet(&file, options, None).await.unwrap();
        });
        Table {
            name: table.name.clone(),
            file,
        }
    };
    tables.iter().map(convert).collect()
}

#[test]
fn rings_read_parquet_beside_csv() {
    let folder = tempfile::tempdir().unwrap();
    let mut tables = data(folder.path());
    // A file without rows has no types in CSV, so it stays out.
    tables.pop();
    let mut mixed = parquet(&tables);
    mixed[1] = tables[1].clone();
    let workers = Workers::start(3);
    for sql in QUERIES.iter().filter(|sql| !sql.contains(" e ")) {
        let answer = ask(&workers.question(&mixed, sql), |_| ()).unwrap();
        assert_eq!(rows(&answer.batches), alone(&mixed, sql), "{sql}");
    }
}

/// Whether the build side (the first input) of the only hash join goes round.
fn build_goes_round(plan: &str) -> bool {
    let lines: Vec<_> = plan.lines().map(str::trim_start).collect();
    let join = lines.iter().position(|line| line.contains("HashJoinExec"));
    let input = join.and_then(|join| lines.get(join + 1));
    let input = input.unwrap_or_else(|| panic!("no hash join: {plan}"));
    input.contains("RoundaboutExec: Rotate")
}

#[test]
fn a_much_smaller_build_side_goes_round_and_the_large_side_stays() {
    let folder = tempfile::tempdir().unwrap();
    let mut tables = data(folder.path());
    tables.pop();
    let tables = parquet(&tables);
    let (many, few) = (Workers::start(3), Workers::with_memory(3, Some(1 << 10)));
    for (sql, small) in [
        ("SELECT r.id, t.name FROM t JOIN r ON r.k = t.id", true),
        ("SELECT r.id, t.name FROM r JOIN t ON r.k = t.id", true),
        ("SELECT r.id, t.name FROM r LEFT JOIN t ON r.k = t.id", true),
        (
            "SELECT r.id, t.id FROM t RIGHT JOIN r ON r.k = t.id AND r.id > t.id",
            true,
        ),
        ("SELECT id FROM r WHERE k IN (SELECT id FROM t)", true),
        (
            "SELECT id FROM r WHERE NOT EXISTS (SELECT 1 FROM t WHERE t.id = r.k)",
            true,
        ),
        // Rows of the small side that have no match are known where the small side stays alone.
        ("SELECT r.id, t.id FROM t LEFT JOIN r ON r.k = t.id", false),
        ("SELECT r.id, s.id FROM r JOIN s ON r.k = s.k", false),
    ] {
        let plan = explained(&many, &tables, sql);
        assert_eq!(build_goes_round(&plan), small, "{sql}: {plan}");
        let plan = explained(&few, &tables, sql);
        assert!(!build_goes_round(&plan), "{sql}: {plan}");
        let answer = ask(&many.question(&tables, sql), |_| ()).unwrap();
        assert_eq!(rows(&answer.batches), alone(&tables, sql), "{sql}");
    }
}

#[test]
fn rings_give_the_rows_of_duckdb() {
    let Some(python) = duckdb() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let tables = data(folder.path());
    let mut script = String::from("import duckdb\nc = duckdb.connect()\n");
    for table in &tables {
        script.push_str(&format!(
            "c.execute(\"CREATE TABLE {} AS SELECT * FROM read_csv('{}', header=true, columns={{'id':'BIGINT','k':'BIGINT','name':'VARCHAR'}})\")\n",
            table.name, table.file
        ));
    }
    script.push_str("def show(v): return 'NULL' if v is None else (repr(v) if isinstance(v, float) else str(v))\n");
    for sql in QUERIES {
        script.push_str(&format!(
            "for row in sorted('|'.join(show(v) for v in r) for r in c.execute(\"\"\"{sql}\"\"\").fetchall()): print(row)\nprint('--')\n"
        ));
    }
    let out = Command::new(python).args(["-c", &script]).output().unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let text = String::from_utf8(out.stdout).unwrap();
    let mut expected = text.split("--\n");
    let workers = Workers::start(3);
    for sql in QUERIES {
        let answer = ask(&workers.question(&tables, sql), |_| ()).unwrap();
        let theirs: Vec<_> = expected.next().unwrap().lines().collect();
        assert_eq!(rows(&answer.batches), theirs, "{sql}");
    }
}

#[test]
fn explain_shows_the_ring() {
    let folder = tempfile::tempdir().unwrap();
    let tables = data(folder.path());
    let workers = Workers::start(2);
    let sql = "EXPLAIN SELECT r.id FROM r JOIN s ON r.k = s.k";
    let answer = ask(&workers.question(&tables, sql), |_| ()).unwrap();
    let text = rows(&answer.batches).join("\n");
    assert!(
        text.contains("RoundaboutExec") && text.contains("HashJoinExec"),
        "{text}"
    );
}

#[test]
fn queries_that_write_or_fail_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let tables = data(folder.path());
    let workers = Workers::start(2);
    let target = folder.path().join("out.csv");
    let copy = format!("COPY r TO '{}'", target.display());
    for (sql, why) in [
        (copy.as_str(), "not supported"),
        ("CREATE TABLE x AS SELECT 1", "not supported"),
        ("SELECT nothing FROM r", "nothing"),
        ("SELEC 1", "Expected"),
        ("SELECT id / (id - id) FROM r", "ivide by zero"),
    ] {
        match ask(&workers.question(&tables, sql), |_| ()) {
            Err(Trouble::Query(text)) => assert!(text.contains(why), "{sql}: {text}"),
            other => panic!("{sql}: {:?}", other.map(|a| rows(&a.batches))),
        }
    }
    assert!(!target.exists());
    // The next query works.
    let answer = ask(&workers.question(&tables, "SELECT count(*) FROM r"), |_| ()).unwrap();
    assert_eq!(rows(&answer.batches), ["700"]);
}
