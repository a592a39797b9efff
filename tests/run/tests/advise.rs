//! Unmodified programs under the observer of `weft advise`: they behave as without it, and the record has their calls.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

use weft_advise::record::{self, Count, Flow, Process, Record};
use weft_advise::verdict::{Door, judge};
use weft_run_tests::{PYTHON, Weft, free_port, have, iperf3, plain};

/// The observer's library, built now or that of `WEFT_ADVISE_LIB`.
fn library() -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    let dir = DIR.get_or_init(|| match std::env::var_os("WEFT_ADVISE_LIB") {
        Some(dir) => fs::canonicalize(dir).expect("the folder WEFT_ADVISE_LIB"),
        None => weft_dropin::built("advise", "advise"),
    });
    dir.join("libweft-advise.so")
}

/// A record that programs can be started with.
struct Observed(tempfile::NamedTempFile);

impl Observed {
    fn new() -> Self {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(record::TABLE_BYTES as u64).unwrap();
        file.write_all(&record::beginning()).unwrap();
        Self(file)
    }

    fn weft(&self) -> Weft {
        Weft::bare()
            .env("LD_PRELOAD", library())
            .env(record::ENVIRONMENT, self.0.path())
    }

    fn read(&self) -> Record {
        record::read(&fs::read(self.0.path()).unwrap()).expect("a record")
    }

    /// The process of this program with the most calls.
    fn process(&self, name: &str) -> Process {
        let record = self.read();
        let named = record
            .processes
            .into_iter()
            .filter(|p| p.name.contains(name));
        named
            .max_by_key(Process::calls)
            .unwrap_or_else(|| panic!("no {name} in the record"))
    }
}

fn python(script: &str) -> Vec<String> {
    [PYTHON.0, "-c", script].map(str::to_owned).to_vec()
}

fn run(weft: &Weft, words: &[String]) -> weft_run_tests::Done {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    weft.start_words(&words).end()
}

#[test]
fn iperf3_sends_from_one_buffer_of_the_size_that_it_was_told() {
    if !have(&[("iperf3", "iperf3")]) {
        return;
    }
    let (server, port) = iperf3(&plain());
    let observed = Observed::new();
    let line = format!("iperf3 -c 127.0.0.1 -p {port} -l 128K -n 64M");
    observed.weft().run(&line).good();
    server.end();
    let client = observed.process("iperf3");
    let usual = client.sends.usual().expect("sends");
    assert_eq!((usual.least, usual.most), (131_072, 131_072), "{usual:?}");
    assert!(usual.count >= 512, "{usual:?}");
    assert!(client.sends.get(Flow::Bytes) >= 64 << 20);
    let same = client.sends.share(Flow::BytesSameHost, Flow::Bytes);
    assert_eq!(same, Some(1.0));
    // The control connection sends from other memory, a few times.
    let moved = client.sends.get(Flow::Calls) - client.sends.get(Flow::Again);
    let again = client.sends.get(Flow::Again1) as f64 / moved as f64;
    assert!(again > 0.97, "{again}");
    assert!(
        client
            .sends
            .share(Flow::Resident, Flow::Pages)
            .is_none_or(|part| part > 0.9)
    );
    assert_eq!(client.get(Count::Connects), 2);
    assert_eq!(client.get(Count::Accepts), 0);
    assert!(client.get(Count::Ended) > 0);
    assert_eq!(judge(&client, None).door, Door::Run);
}

#[test]
fn redis_is_seen_on_both_ends() {
    if !have(&[
        ("redis-server", "redis-server"),
        ("redis-benchmark", "redis-tools"),
    ]) {
        return;
    }
    let port = free_port();
    let dir = tempfile::tempdir().unwrap();
    let (server, client) = (Observed::new(), Observed::new());
    let line = format!(
        "redis-server --port {port} --dir {} --save",
        dir.path().display()
    );
    let running = server
        .weft()
        .start_words(&line.split_whitespace().chain([""]).collect::<Vec<_>>());
    let running = running.listens(port);
    let line = format!("redis-benchmark -p {port} -n 2000 -c 10 -t set,get -d 100 --csv");
    client.weft().run(&line).good().says("GET");
    running.interrupt();
    let benchmark = client.process("redis-benchmark");
    assert!(benchmark.get(Count::Connects) >= 10);
    assert!(benchmark.sends.get(Flow::Calls) >= 4000);
    let redis = server.process("redis");
    assert!(redis.get(Count::Accepts) >= 10);
    assert!(redis.get(Count::SameHost) >= 10);
    // Each answer follows a request.
    assert!(
        redis.get(Count::Turns) >= 4000,
        "{}",
        redis.get(Count::Turns)
    );
    assert!(redis.sends.middle_size() < 1024);
    assert!(redis.get(Count::Waits) > 0);
    assert!(redis.own_cost() > 0);
}

#[test]
fn nginx_and_its_workers_are_told_apart() {
    if !have(&[("/usr/sbin/nginx", "nginx-light"), ("curl", "curl")]) {
        return;
    }
    let port = free_port();
    // nginx's workers are another user when it runs as root, and have to reach the folder.
    let dir = tempfile::tempdir().unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(dir.path(), open).unwrap();
    let shown = dir.path().display();
    fs::write(dir.path().join("file"), vec![b'x'; 1 << 20]).unwrap();
    let conf = format!(
        "daemon off; worker_processes 1; error_log stderr; pid {shown}/pid;\n\
         events {{ }}\nhttp {{ access_log off; sendfile on; client_body_temp_path {shown}/b; proxy_temp_path {shown}/p; \
         fastcgi_temp_path {shown}/f; uwsgi_temp_path {shown}/u; scgi_temp_path {shown}/s;\n\
         server {{ listen 127.0.0.1:{port}; root {shown}; }} }}\n"
    );
    fs::write(dir.path().join("conf"), conf).unwrap();
    let observed = Observed::new();
    let line = format!("/usr/sbin/nginx -c {shown}/conf -p {shown}");
    let running = observed.weft().start(&line).listens(port);
    for _ in 0..20 {
        let url =
            format!("curl -sS -o /dev/null -w %{{size_download}} http://127.0.0.1:{port}/file");
        plain().run(&url).good().says("1048576");
    }
    running.interrupt();
    let record = observed.read();
    assert!(record.forks >= 1, "{record:?}");
    let worker = observed.process("nginx");
    assert_eq!(worker.get(Count::FileBytes), 20 << 20);
    assert_eq!(worker.get(Count::Accepts), 20);
    assert_eq!(worker.get(Count::Closed), 20);
    // A megabyte each: more than what `weft run` leaves on TCP.
    assert_eq!(worker.get(Count::ShortLock), 0);
}

#[test]
fn calls_of_all_shapes_are_as_without() {
    if !have(&[PYTHON]) {
        return;
    }
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/py/shapes.py");
    let line = format!("{} {file}", PYTHON.0);
    let observed = Observed::new();
    let (expected, done) = (plain().run(&line), observed.weft().run(&line));
    expected.good().says("shapes: ");
    done.good();
    let checks = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("shapes: "));
        line.map(str::to_owned)
    };
    assert_eq!(checks(&done.text), checks(&expected.text));
    assert!(observed.process("python").calls() > 100);
}

#[test]
fn threads_datagrams_and_errors_are_counted_and_come_back_as_they_were() {
    if !have(&[PYTHON]) {
        return;
    }
    let script = "
import errno, socket, threading
u, v = socket.socket(type=socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_DGRAM)
u.bind(('127.0.0.1', 0))
def send():
    for n in range(100): v.sendto(b'x' * 100, u.getsockname())
threads = [threading.Thread(target=send) for _ in range(3)]
for t in threads: t.start()
for t in threads: t.join()
for n in range(100): assert len(u.recv(2000)) == 100
l = socket.create_server(('::1', 0), family=socket.AF_INET6) if socket.has_dualstack_ipv6() else socket.create_server(('127.0.0.1', 0))
c = socket.create_connection(l.getsockname()[:2]); s, _ = l.accept()
c.setblocking(False)
try: c.recv(1); print('bad')
except BlockingIOError as e: assert e.errno == errno.EAGAIN
s.close()
";
    let observed = Observed::new();
    run(&observed.weft(), &python(script))
        .good()
        .never_says("bad");
    let p = observed.process("python");
    assert_eq!(p.sends.get(Flow::DatagramCalls), 300);
    assert_eq!(p.sends.get(Flow::DatagramBytes), 30_000);
    assert_eq!(p.receives.get(Flow::DatagramCalls), 100);
    assert_eq!(p.receives.get(Flow::Again), 1);
    assert_eq!((p.get(Count::Connects), p.get(Count::Accepts)), (1, 1));
    assert_eq!(p.get(Count::SameHost), 2);
    // The three, and the one that began.
    assert_eq!(p.get(Count::Threads), 4);
    assert_eq!(judge(&p, None).door, Door::Verbs);
}

#[test]
fn a_record_that_is_full_stays_within_its_bounds() {
    if !have(&[PYTHON]) {
        return;
    }
    let script = "
import os, socket
for n in range(300):
    pid = os.fork()
    if pid == 0:
        a = socket.create_server(('127.0.0.1', 0)); a.close(); os._exit(0)
    os.waitpid(pid, 0)
print('done')
";
    let observed = Observed::new();
    run(&observed.weft(), &python(script)).good().says("done");
    let record = observed.read();
    assert_eq!(record.processes.len(), record::PROCESSES);
    assert_eq!(record.lost, 300 - record::PROCESSES as u64);
    // And that of `timeout`.
    assert!(record.forks >= 300, "{}", record.forks);
}

#[test]
fn a_file_that_is_no_record_changes_nothing() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), vec![7; record::TABLE_BYTES]).unwrap();
    for path in [file.path().to_owned(), "/no/such/file".into()] {
        let weft = Weft::bare()
            .env("LD_PRELOAD", library())
            .env(record::ENVIRONMENT, path);
        weft.run("echo hello").good().says("hello");
    }
    assert_eq!(fs::read(file.path()).unwrap(), vec![7; record::TABLE_BYTES]);
}
