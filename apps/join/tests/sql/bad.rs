//! Workers that die, stall or send invalid messages, and invalid queries.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use weft_join::shell::{Event, Question, Trouble, ask, stream};
use weft_join::talk::{ELEMENT, Table};
use weft_roundabout::{Next, Own, Ring, RingListener, Security, VISIT};

use crate::help::{Workers, alone, rows};

/// 3.6 thousand million pairs: the query does not complete within the test.
const ENDLESS: &str = "SELECT count(*) FROM big a JOIN big b ON a.id * b.id % 7 > 9";

/// A table with a column of 60,000 numbers.
fn big(folder: &Path) -> [Table; 1] {
    let path = folder.join("big.csv");
    let numbers: String = (0..60_000).map(|id| format!("{id}\n")).collect();
    std::fs::write(&path, format!("id\n{numbers}")).unwrap();
    [Table {
        name: "big".into(),
        file: path.to_str().unwrap().into(),
    }]
}

fn question(workers: &[Process], tables: &[Table], sql: &str) -> Question {
    Question {
        workers: workers.iter().map(|w| w.1).collect(),
        tables: tables.to_vec(),
        sql: sql.into(),
        element: 65_536,
        patience: Duration::from_mins(1),
    }
}

/// Runs a query, and reports when rows have gone round.
fn until_at_work(question: &Question, at_work: mpsc::Sender<()>) -> Result<(), Trouble> {
    stream(question, |event| {
        if let Event::Progress(_, progress) = event
            && progress.received > 0
        {
            let _ = at_work.send(());
        }
        Ok(())
    })
    .map(|_| ())
}

/// A worker in a separate process.
pub struct Process(pub Child, pub std::net::SocketAddr);

impl Process {
    pub fn start() -> Self {
        Self::at("127.0.0.1:0")
    }

    /// At this address, with memory for tables.
    pub fn at(bind: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_weft-join"))
            .args(["worker", "--tables", "64", "--bind", bind])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("working on ").unwrap();
        Self(child, address.parse().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_worker_that_is_killed_is_named_and_the_ring_forms_anew() {
    let folder = tempfile::tempdir().unwrap();
    let tables = big(folder.path());
    let mut workers = [Process::start(), Process::start(), Process::start()];
    let question = |workers: &[Process], sql: &str| question(workers, &tables, sql);
    let long = question(&workers, ENDLESS);
    let victim = workers[1].1;
    let (at_work, started) = mpsc::channel();
    let (failed, took) = thread::scope(|scope| {
        let asking = scope.spawn(|| (until_at_work(&long, at_work), Instant::now()));
        // In the middle of a turn, however slow the machine is.
        started
            .recv()
            .expect("the query ended before rows came round");
        let killed = Instant::now();
        workers[1].0.kill().unwrap();
        let (answer, ended) = asking.join().unwrap();
        (answer, ended.saturating_duration_since(killed))
    });
    match failed {
        Err(Trouble::Peer(why) | Trouble::Query(why)) => {
            assert!(why.contains(&victim.to_string()), "{why}");
        }
        Ok(()) => panic!("the query ended"),
    }
    // The promise is a second; the machine may be slow.
    assert!(took < Duration::from_secs(20), "{took:?}");
    println!("failed {took:?} after the kill");
    workers[1] = Process::start();
    let again = question(
        &workers,
        "SELECT count(*) FROM big a JOIN big b ON a.id = b.id",
    );
    assert_eq!(rows(&ask(&again, |_| ()).unwrap().batches), ["60000"]);
}

#[test]
fn a_worker_that_is_not_there_is_named_at_once() {
    let workers = Workers::start(2);
    let mut question = workers.question(&[], "SELECT 1");
    // A port without a listener.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = gone.local_addr().unwrap();
    drop(gone);
    question.workers.push(addr);
    let began = Instant::now();
    match ask(&question, |_| ()) {
        Err(Trouble::Peer(why)) => assert!(why.contains(&addr.to_string()), "{why}"),
        other => panic!("{:?}", other.map(|a| rows(&a.batches))),
    }
    // The patience with a silent worker is a minute.
    assert!(began.elapsed() < Duration::from_secs(40));
}

/// Sends a signal to a process of ours.
fn signal(process: &Child, name: &str) {
    let status = Command::new("kill")
        .args([&format!("-{name}"), &process.id().to_string()])
        .status();
    assert!(status.unwrap().success());
}

/// Clock ticks of CPU time that a process has used.
fn ticks(process: &Child) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap();
    let fields: Vec<_> = text
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn a_shell_that_is_killed_ends_the_query_on_all_workers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.csv");
    let numbers: String = (0..3_000).map(|id| format!("{id}\n")).collect();
    std::fs::write(&path, format!("id\n{numbers}")).unwrap();
    let tables = [Table {
        name: "small".into(),
        file: path.to_str().unwrap().into(),
    }];
    // 27 thousand million triples: the query does not complete within the test.
    let sql = "SELECT count(*) FROM small a JOIN small b ON a.id * b.id % 7 > 1 JOIN small c ON (a.id + b.id) * c.id % 5 > 2";
    let workers = [Process::start(), Process::start()];
    let names: Vec<_> = workers.iter().map(|w| w.1.to_string()).collect();
    let file = format!("small={}", tables[0].file);
    let mut shell = Command::new(env!("CARGO_BIN_EXE_weft-join"))
        .args(["sql", "-w", &names.join(","), "--table", &file, sql])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    // Both are at work when they have used a second.
    let idle: Vec<_> = workers.iter().map(|w| ticks(&w.0)).collect();
    let began = Instant::now();
    while workers
        .iter()
        .zip(&idle)
        .any(|(w, idle)| ticks(&w.0) < idle + 100)
    {
        assert!(shell.try_wait().unwrap().is_none(), "the query ended");
        assert!(began.elapsed() < Duration::from_mins(3));
        thread::sleep(Duration::from_millis(50));
    }
    // A parent that ignores SIGINT, as shells let background jobs do, hands that down.
    signal(&shell, "TERM");
    assert!(!shell.wait().unwrap().success());
    let began = Instant::now();
    loop {
        let before: Vec<_> = workers.iter().map(|w| ticks(&w.0)).collect();
        thread::sleep(Duration::from_secs(1));
        if workers
            .iter()
            .zip(&before)
            .all(|(w, before)| ticks(&w.0) <= before + 1)
        {
            break;
        }
        assert!(began.elapsed() < Duration::from_mins(2), "a worker goes on");
    }
    println!("idle {:?} after the interrupt", began.elapsed());
    let next = question(&workers, &tables, "SELECT count(*) FROM small");
    assert_eq!(rows(&ask(&next, |_| ()).unwrap().batches), ["3000"]);
}

#[test]
fn a_worker_that_stands_still_for_a_while_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let tables = big(folder.path());
    let workers = [Process::start(), Process::start(), Process::start()];
    let sql = "SELECT count(*), sum(a.id) FROM big a JOIN big b ON a.id = b.id";
    signal(&workers[2].0, "STOP");
    let long = question(&workers, &tables, sql);
    let answer = thread::scope(|scope| {
        let asking = scope.spawn(|| ask(&long, |_| ()));
        thread::sleep(Duration::from_millis(1500));
        assert!(!asking.is_finished());
        signal(&workers[2].0, "CONT");
        asking.join().unwrap()
    });
    assert_eq!(rows(&answer.unwrap().batches), ["60000|1799970000"]);
}

#[test]
fn rows_that_are_larger_than_an_element_come_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("wide.csv");
    let rows_of = |id: u32| format!("{id},{}\n", "xyz".repeat(id as usize * 20_000));
    let text: String = (1..6).map(rows_of).collect();
    std::fs::write(&path, format!("id,text\n{text}")).unwrap();
    let tables = [Table {
        name: "wide".into(),
        file: path.to_str().unwrap().into(),
    }];
    let workers = Workers::start(3);
    let sql = "SELECT a.id, b.text FROM wide a JOIN wide b ON a.id = b.id - 1";
    let answer = ask(&workers.question(&tables, sql), |_| ()).unwrap();
    assert_eq!(rows(&answer.batches), alone(&tables, sql));
}

#[test]
fn a_hash_join_beyond_its_memory_says_so_and_the_next_query_works() {
    let folder = tempfile::tempdir().unwrap();
    let tables = big(folder.path());
    let workers = Workers::with_memory(2, Some(400_000));
    let sql = "SELECT count(*) FROM big a JOIN big b ON a.id = b.id";
    match ask(&workers.question(&tables, sql), |_| ()) {
        Err(Trouble::Query(why)) => {
            assert!(why.contains("memory") || why.contains("allocat"), "{why}")
        }
        other => panic!("{:?}", other.map(|a| rows(&a.batches))),
    }
    let sql = "SELECT count(*) FROM big";
    let answer = ask(&workers.question(&tables, sql), |_| ()).unwrap();
    assert_eq!(rows(&answer.batches), ["60000"]);
}

#[test]
fn a_sort_beyond_its_memory_spills_and_is_right() {
    let folder = tempfile::tempdir().unwrap();
    let tables = big(folder.path());
    // 10 MB of rows, and DataFusion sets 10 MiB aside for merging what has been spilled.
    let workers = Workers::with_memory(2, Some(14 << 20));
    let sql = "SELECT a.id x, b.id y FROM (SELECT id FROM big WHERE id < 400) a CROSS JOIN (SELECT id FROM big WHERE id < 1000) b ORDER BY y % 7, x, y";
    let answer = ask(&workers.question(&tables, sql), |_| ()).unwrap();
    let mut expected = Vec::new();
    for rest in 0..7 {
        for x in 0..400 {
            let ys = (rest..1000).step_by(7);
            expected.extend(ys.map(|y: u32| format!("{x}|{y}")));
        }
    }
    assert_eq!(crate::help::rows_in_order(&answer.batches), expected);
}

#[test]
fn a_reader_that_has_enough_ends_the_query() {
    let folder = tempfile::tempdir().unwrap();
    let tables = big(folder.path());
    let workers = [Process::start(), Process::start()];
    let names: Vec<_> = workers.iter().map(|w| w.1.to_string()).collect();
    let file = format!("big={}", tables[0].file);
    let sql = "SELECT a.id, b.id FROM big a CROSS JOIN big b";
    let mut shell = Command::new(env!("CARGO_BIN_EXE_weft-join"))
        .args([
            "sql",
            "-w",
            &names.join(","),
            "--table",
            &file,
            "--format",
            "csv",
            sql,
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The first of 3.6 thousand million rows come before the last.
    let mut start = [0; 100];
    shell.stdout.take().unwrap().read_exact(&mut start).unwrap();
    assert!(start.starts_with(b"id,id\n"));
    assert!(shell.wait().unwrap().success());
    let next = question(&workers, &tables, "SELECT count(*) FROM big");
    assert_eq!(rows(&ask(&next, |_| ()).unwrap().batches), ["60000"]);
}

#[test]
fn workers_of_both_families_work_together() {
    let Some(workers) = Workers::at(&["127.0.0.1:0", "[::1]:0", "127.0.0.1:0"]) else {
        println!("skipped: this host has no ::1");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let tables = big(folder.path());
    let sql = "SELECT count(*), sum(a.id) FROM big a JOIN big b ON a.id = b.id";
    let answer = ask(&workers.question(&tables, sql), |_| ()).unwrap();
    assert_eq!(rows(&answer.batches), ["60000|1799970000"]);
}

/// A worker's answer to a first element of these bytes.
fn told(text: &str) -> String {
    told_with(text.as_bytes(), 0)
}

/// The same, with this first user word.
pub fn told_with(text: &[u8], word: u64) -> String {
    let workers = Workers::start(1);
    let listener =
        RingListener::open("127.0.0.1:0".parse().unwrap(), Security::SameUser, None).unwrap();
    let nodes = vec![listener.local_addr(), workers.addresses[0]];
    let ring = Ring {
        exchange: VISIT,
        element: ELEMENT,
        elements: 4,
        ..Ring::new([9; 16], nodes, 0)
    };
    let mut node = listener.join(&ring).unwrap();
    let mut own = Own::Now;
    loop {
        match node.next_with(own) {
            Ok(Next::Room(mut room)) => {
                room.write(0, text).unwrap();
                drop(room.commit(text.len(), 0, [word, 0, 0, 0]).unwrap());
                own = Own::Never;
            }
            Ok(Next::End) => return "it ended".into(),
            Ok(_) => {}
            Err(error) => return error.to_string(),
        }
    }
}

#[test]
fn questions_that_make_no_sense_are_refused() {
    let id = "[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]";
    let ask = |version: u32, nodes: &str, me: usize, element: u64| {
        format!(
            r#"{{"version":{version},"id":{id},"nodes":[{nodes}],"me":{me},"element":{element},"sql":"SELECT 1","tables":[],"loaded":[]}}"#
        )
    };
    // The message of that version.
    let old = ask(2, r#""127.0.0.1:1""#, 0, 4096).replace(r#","loaded":[]"#, "");
    let why = told(&old);
    assert!(
        why.contains("the shell speaks version 2, this worker 3"),
        "{why}"
    );
    // Each error goes to its own shell, and none ends a worker.
    for text in ["", "{}", "\u{0}\u{1}", &"[".repeat(100_000)] {
        let why = told(text);
        assert!(why.contains("gave up"), "{why}");
    }
    for ask in [
        ask(3, "", 0, 4096),
        ask(3, r#""127.0.0.1:1""#, 7, 4096),
        ask(3, r#""127.0.0.1:1""#, 0, 3),
        ask(3, r#""127.0.0.1:1""#, 0, u64::MAX),
    ] {
        let why = told(&ask);
        assert!(why.contains("gave up") && why.contains("settings"), "{why}");
    }
}

#[test]
fn deep_queries_do_not_end_a_worker() {
    let workers = [Process::start()];
    let deep = [
        format!("SELECT {}1{}", "(".repeat(20_000), ")".repeat(20_000)),
        format!("SELECT 1{}", " + 1".repeat(500)),
        format!("SELECT {}1", "NOT ".repeat(20_000)),
        format!("SELECT 1{}", " + 1".repeat(100_000)),
        format!("SELECT {}1", "- ".repeat(1_000)),
        format!("SELECT 1{}", " UNION ALL SELECT 1".repeat(150)),
    ];
    for sql in deep {
        // An answer or an error: no dead worker.
        let began = Instant::now();
        if let Err(Trouble::Peer(why)) = ask(&question(&workers, &[], &sql), |_| ()) {
            panic!("{why}");
        }
        println!("{}...: {:?}", &sql[..30], began.elapsed());
    }
    let next = question(&workers, &[], "SELECT 2");
    assert_eq!(rows(&ask(&next, |_| ()).unwrap().batches), ["2"]);
}
