//! The other engine: `datafusion-distributed` plans, and its batches travel on weft.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use datafusion::arrow::array::RecordBatch;
use datafusion::physical_plan::displayable;
use weft_join::engine::{self, Asked};
use weft_join::shell::{Question, Trouble};
use weft_join::talk::Table;
use weft_join::worker::Settings;
use weft_roundabout::{Next, Own, Ring, RingListener, Security, VISIT};

use crate::bad::Process;
use crate::help::{Workers, alone, rows};

/// All rows of a query that is spread over the workers, however small its files are.
pub fn ask(workers: &Workers, tables: &[Table], sql: &str) -> Result<Vec<RecordBatch>, Trouble> {
    let question = workers.question(tables, sql);
    let asked = Asked {
        question: &question,
        split: Some(1),
        partitions: 2,
    };
    let mut batches = Vec::new();
    engine::stream(&asked, |batch| {
        batches.push(batch);
        Ok(())
    })?;
    Ok(batches)
}

/// Folders of CSV files, so that every worker has some.
fn folders(folder: &Path) -> Vec<Table> {
    ["a", "b"]
        .map(|name| {
            let path = folder.join(format!("{name}.csv"));
            let mut file = std::fs::File::create(&path).unwrap();
            writeln!(file, "id,text").unwrap();
            for id in 0..20_000 {
                writeln!(file, "{},the text of {id} in {name}", id % 5_000).unwrap();
            }
            Table {
                name: name.into(),
                file: path.to_str().unwrap().into(),
            }
        })
        .into()
}

#[test]
fn joins_and_aggregates_are_as_in_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let tables = folders(folder.path());
    let rings = [1, 2, 3].map(Workers::start);
    for sql in [
        "SELECT count(*), sum(a.id) FROM a JOIN b ON a.id = b.id",
        "SELECT id, count(*) c, min(text), max(text) FROM a GROUP BY id ORDER BY id LIMIT 10",
        "SELECT a.id, a.text, b.text FROM a LEFT JOIN b ON a.id = b.id + 4000 AND a.text < b.text WHERE a.id % 7 = 0",
        "SELECT text FROM a WHERE id = 3 UNION ALL SELECT text FROM b WHERE id = 4",
        "SELECT id FROM a WHERE id NOT IN (SELECT id FROM b WHERE id < 4990)",
        "SELECT text FROM a WHERE id < 0",
        "SELECT 1 AS one",
    ] {
        let expected = alone(&tables, sql);
        for workers in &rings {
            let count = workers.addresses.len();
            let got = ask(workers, &tables, sql);
            let got = got.unwrap_or_else(|e| panic!("{sql} on {count} workers: {e:?}"));
            assert_eq!(rows(&got), expected, "{sql} on {count} workers");
        }
    }
}

#[test]
fn plans_are_cut_for_the_workers() {
    let folder = tempfile::tempdir().unwrap();
    let tables = folders(folder.path());
    let workers = Workers::start(3);
    let question = workers.question(&tables, "");
    let asked = Asked {
        question: &question,
        split: Some(1),
        partitions: 2,
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let plan = runtime.block_on(async {
        let context = engine::context(&asked).await.unwrap();
        let sql = "SELECT a.id, count(*) FROM a JOIN b ON a.id = b.id GROUP BY a.id";
        let frame = context.sql(sql).await.unwrap();
        frame.create_physical_plan().await.unwrap()
    });
    let plan = displayable(plan.as_ref()).indent(true).to_string();
    assert!(plan.contains("NetworkShuffleExec"), "{plan}");
}

#[test]
fn queries_that_are_given_up_end_on_the_workers() {
    let folder = tempfile::tempdir().unwrap();
    let tables = folders(folder.path());
    let workers = Workers::start(2);
    let sql = "SELECT a.text, b.text FROM a JOIN b ON a.id % 10 = b.id % 10";
    let question = workers.question(&tables, sql);
    let asked = Asked {
        question: &question,
        split: Some(1),
        partitions: 2,
    };
    let began = Instant::now();
    let mut seen = 0;
    let ended = engine::stream(&asked, |batch| {
        seen += batch.num_rows();
        Err(Trouble::Query("enough".into()))
    });
    assert!(matches!(ended, Err(Trouble::Query(why)) if why == "enough"));
    // 40 million rows would take longer.
    assert!(seen > 0 && seen < 1_000_000, "{seen}");
    println!("given up after {:?}", began.elapsed());
    let got = ask(&workers, &tables, "SELECT count(*) FROM a").unwrap();
    assert_eq!(rows(&got), ["20000"]);
}

#[test]
fn a_worker_that_is_killed_is_named_and_the_others_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let tables = folders(folder.path());
    let mut workers = [Process::start(), Process::start(), Process::start()];
    let question = |workers: &[Process], sql: &str| Question {
        workers: workers.iter().map(|worker| worker.1).collect(),
        tables: tables.clone(),
        sql: sql.into(),
        element: 0,
        patience: Duration::from_mins(1),
    };
    // 40 million rows, of which some are still to come when the first ones are here.
    let long = "SELECT a.text, b.text FROM a JOIN b ON a.id % 10 = b.id % 10";
    let long = question(&workers, long);
    let asked = |question| Asked {
        question,
        split: Some(1),
        partitions: 2,
    };
    let (victim, mut killed) = (workers[1].1, None);
    let failed = engine::stream(&asked(&long), |_| {
        if killed.is_none() {
            workers[1].0.kill().unwrap();
            killed = Some(Instant::now());
        }
        Ok(())
    });
    let took = killed.expect("no rows came").elapsed();
    match failed {
        Err(Trouble::Peer(why) | Trouble::Query(why)) => {
            assert!(why.contains(&victim.to_string()), "{why}");
        }
        Ok(()) => panic!("the query ended"),
    }
    assert!(took < Duration::from_secs(20), "{took:?}");
    println!("failed {took:?} after the kill");
    workers[1] = Process::start();
    let again = question(&workers, "SELECT count(*) FROM a JOIN b ON a.id = b.id");
    let mut got = Vec::new();
    let done = engine::stream(&asked(&again), |batch| {
        got.push(batch);
        Ok(())
    });
    done.unwrap();
    assert_eq!(rows(&got), ["80000"]);
}

#[test]
fn a_worker_that_is_not_there_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let tables = folders(folder.path());
    let mut workers = Workers::start(1);
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = gone.local_addr().unwrap();
    drop(gone);
    workers.addresses.push(addr);
    let sql = "SELECT count(*), sum(a.id) FROM a JOIN b ON a.id = b.id";
    let began = Instant::now();
    match ask(&workers, &tables, sql) {
        Err(Trouble::Peer(why) | Trouble::Query(why)) => {
            assert!(why.contains(&addr.to_string()), "{why}");
        }
        Ok(got) => panic!("{:?}", rows(&got)),
    }
    assert!(began.elapsed() < Duration::from_mins(1));
}

#[test]
fn files_beyond_a_workers_folder_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let tables = folders(folder.path());
    let inner = folder.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    let workers = Workers::with(2, |bind| Settings {
        bind,
        dir: Some(inner.clone()),
        memory: None,
        tables: 0,
    });
    match ask(&workers, &tables, "SELECT count(*) FROM a GROUP BY id") {
        Err(Trouble::Query(why)) => assert!(why.contains("--dir"), "{why}"),
        other => panic!("{:?}", other.map(|got| rows(&got))),
    }
    let within = folders(&inner);
    let got = ask(&workers, &within, "SELECT count(*) FROM a").unwrap();
    assert_eq!(rows(&got), ["20000"]);
}

/// A worker's answer to a first element of these bytes, as a call whose JSON has length `json`.
fn called(workers: &Workers, text: &[u8], json: u64) -> String {
    let listener =
        RingListener::open("127.0.0.1:0".parse().unwrap(), Security::SameUser, None).unwrap();
    let nodes = vec![listener.local_addr(), workers.addresses[0]];
    let mut id = [0; 16];
    id[..8].copy_from_slice(&(text.len() as u64 ^ json).to_le_bytes());
    let ring = Ring {
        exchange: VISIT,
        element: 1 << 20,
        elements: 4,
        ..Ring::new(id, nodes, 0)
    };
    let mut node = listener.join(&ring).unwrap();
    let (mut own, mut said) = (Own::Now, String::from("it ended"));
    loop {
        match node.next_with(own) {
            Ok(Next::Room(mut room)) => {
                room.write(0, text).unwrap();
                drop(room.commit(text.len(), 0, [3, json, 0, 0]).unwrap());
                own = Own::Never;
            }
            Ok(Next::Element(element)) if element.origin() == 1 => {
                let mut bytes = vec![0; element.len()];
                element.read(0, &mut bytes).unwrap();
                said = String::from_utf8_lossy(&bytes).into_owned();
            }
            Ok(Next::End) => return said,
            Ok(_) => {}
            Err(error) => return error.to_string(),
        }
    }
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    let workers = Workers::start(1);
    let key = r#"{"query":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"stage":1,"task":0}"#;
    let call =
        |version: u32, what: &str| format!(r#"{{"version":{version},"headers":[],"what":{what}}}"#);
    let plan = format!(r#"{{"Plan":{{"key":{key},"tasks":1,"url":"weft://a:1","began":0}}}}"#);
    let task = |first: usize, end: usize| {
        format!(
            r#"{{"Task":{{"key":{key},"first":{first},"end":{end},"head":"None","dropped":false}}}}"#
        )
    };
    let all = |text: &str| called(&workers, text.as_bytes(), text.len() as u64);
    let why = all(&call(9, &plan));
    assert!(why.contains("version 9, this worker 1"), "{why}");
    for (first, end) in [(5, 2), (0, usize::MAX)] {
        let why = all(&call(1, &task(first, end)));
        assert!(why.contains("partitions that cannot be"), "{why}");
    }
    for (text, json) in [("", 0), ("{}", 2), ("{}", u64::MAX), ("[[[[", 4)] {
        let why = called(&workers, text.as_bytes(), json);
        assert!(why.contains("gave up"), "{why}");
    }
    // A plan that is none, and one that is damaged.
    let plan = call(1, &plan);
    for noise in [&b""[..], &[0xff; 300], &[0x0a; 5000]] {
        let text = [plan.as_bytes(), noise].concat();
        let why = called(&workers, &text, plan.len() as u64);
        assert!(why.contains("error\":\""), "{why}");
    }
    let why = all(&call(1, "\"Version\""));
    assert!(why.contains("\"error\":null"), "{why}");
}
