//! Workers that die, stall or say what makes no sense, and queries that cannot be.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use weft_join::shell::{Question, Trouble, ask};
use weft_join::talk::Table;

use crate::help::{Workers, rows};

/// A worker as a process of its own.
struct Process(Child, std::net::SocketAddr);

impl Process {
    fn start() -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_weft-join"))
            .args(["worker", "--bind", "127.0.0.1:0"])
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
    let path = folder.path().join("big.csv");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    writeln!(file, "id").unwrap();
    for id in 0..60_000 {
        writeln!(file, "{id}").unwrap();
    }
    drop(file);
    let tables = [Table {
        name: "big".into(),
        file: path.to_str().unwrap().into(),
    }];
    let mut workers = [Process::start(), Process::start(), Process::start()];
    let question = |workers: &[Process], sql: &str| Question {
        workers: workers.iter().map(|w| w.1).collect(),
        tables: tables.to_vec(),
        sql: sql.into(),
        element: 65_536,
        patience: Duration::from_mins(1),
    };
    // 3.6 thousand million pairs: it does not end by itself in time.
    let long = question(
        &workers,
        "SELECT count(*) FROM big a JOIN big b ON a.id * b.id % 7 > 9",
    );
    let victim = workers[1].1;
    let (failed, took) = thread::scope(|scope| {
        let asking = scope.spawn(|| (ask(&long, |_| ()), Instant::now()));
        // Long enough to be at work; whenever it comes, the query fails.
        thread::sleep(Duration::from_millis(700));
        let killed = Instant::now();
        workers[1].0.kill().unwrap();
        let (answer, ended) = asking.join().unwrap();
        (answer, ended.saturating_duration_since(killed))
    });
    match failed {
        Err(Trouble::Peer(why) | Trouble::Query(why)) => {
            assert!(why.contains(&victim.to_string()), "{why}");
        }
        Ok(_) => panic!("the query ended"),
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
    // Nobody listens there any more.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = gone.local_addr().unwrap();
    drop(gone);
    question.workers.push(addr);
    let began = Instant::now();
    match ask(&question, |_| ()) {
        Err(Trouble::Peer(why)) => assert!(why.contains(&addr.to_string()), "{why}"),
        other => panic!("{:?}", other.map(|a| rows(&a.batches))),
    }
    // A minute is its patience with a worker that says nothing.
    assert!(began.elapsed() < Duration::from_secs(40));
}
