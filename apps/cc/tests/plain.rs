//! `--plain`, as a user gives it: both ends have to, and each says so to the other's user.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use crate::common::has_gcc;

const SOURCE: &str = "const char *secret = \"a text that is looked for\";\n";

struct Bed {
    dir: tempfile::TempDir,
    workers: Vec<Child>,
}

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.c"), SOURCE).unwrap();
        Self {
            dir,
            workers: Vec::new(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `weft cc`, without shared memory.
    fn weft_cc(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weft-ccd"));
        command
            .args(args)
            .current_dir(self.dir.path())
            .env("WEFT_LOCAL", "off")
            .env("XDG_CONFIG_HOME", self.path("config"))
            .env("XDG_CACHE_HOME", self.path("cache"))
            .env("WEFT_CC_SOCKET", self.path("socket"))
            .env_remove("WEFT_CC_PLAIN");
        command
    }

    /// Starts a worker; where it listens.
    fn worker(&mut self, options: &[&str]) -> String {
        let args = [&["worker", "--bind", "127.0.0.1:0"], options].concat();
        let mut command = self.weft_cc(&args);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        said.read_line(&mut line).unwrap();
        // It goes on to say things.
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        self.workers.push(child);
        line.split_whitespace().nth(2).expect(&line).to_owned()
    }

    /// A master's command.
    fn run(&self, at: &str, plain: bool, args: &[&str]) -> Output {
        let mut command = self.weft_cc(args);
        if plain {
            command.env("WEFT_CC_PLAIN", "1");
        }
        command.env("WEFT_CC_HOSTS", at).output().unwrap()
    }

    fn status(&self) -> serde_json::Value {
        let out = self.run("", false, &["status", "--json"]);
        serde_json::from_slice(&out.stdout).unwrap()
    }

    /// Compiles; whether a worker did it.
    fn compiles(&self, at: &str, plain: bool) -> bool {
        let done = || self.status()["done"].as_u64().unwrap();
        let before = if self.path("socket").exists() {
            done()
        } else {
            0
        };
        let _ = std::fs::remove_file(self.path("a.o"));
        let out = self.run(at, plain, &["gcc", "-c", "a.c"]);
        assert!(out.status.success() && self.path("a.o").exists(), "{out:?}");
        done() > before
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = self.run("", false, &["stop"]);
        for worker in &mut self.workers {
            let _ = worker.kill();
            let _ = worker.wait();
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Passes on what comes to a worker, and keeps it; where.
fn relay(to: String) -> (String, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&seen);
    let copy = move |mut from: TcpStream, mut to: TcpStream, kept: Arc<Mutex<Vec<u8>>>| {
        std::thread::spawn(move || {
            let mut bytes = [0; 8192];
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                kept.lock().unwrap().extend(&bytes[..n]);
                if to.write_all(&bytes[..n]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        })
    };
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(&to).unwrap());
            let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
            copy(client, server, Arc::clone(&kept));
            copy(back.0, back.1, Arc::clone(&kept));
        }
    });
    (at, seen)
}

#[test]
fn only_where_both_ends_say_plain_there_is_no_tls() {
    if !has_gcc() {
        return;
    }
    let mut bed = Bed::new();
    let (tls, plain) = (bed.worker(&[]), bed.worker(&["--plain"]));
    assert!(bed.compiles(&plain, true));
    let workers = bed.status();
    assert_eq!(workers["workers"][0]["transport"], "tcp", "{workers}");
    // A kept connection is not for a command that did not ask for it.
    assert!(!bed.compiles(&plain, false));
    assert!(bed.compiles(&plain, true));
    // One end alone, and what to do.
    for (at, is_plain, why) in [
        (&plain, false, "give --plain (WEFT_CC_PLAIN=1) here too"),
        (
            &tls,
            true,
            "only a worker that was started with --plain takes this",
        ),
    ] {
        let out = bed.run(at, is_plain, &["check"]);
        assert!(
            !out.status.success() && text(&out.stderr).contains(why),
            "{out:?}"
        );
        assert!(!bed.compiles(at, is_plain));
        let reasons = bed.status()["reasons"].to_string();
        assert!(reasons.contains(why), "{reasons}");
    }
    let out = bed.run(&plain, false, &["--plain", "check"]);
    assert!(out.status.success(), "{out:?}");
}

#[test]
fn who_reads_the_network_reads_what_is_plain() {
    if !has_gcc() {
        return;
    }
    let mut bed = Bed::new();
    let worker = bed.worker(&["--plain", "--open"]);
    let (at, seen) = relay(worker);
    assert!(bed.compiles(&at, true), "{}", bed.status());
    let secret = b"a text that is looked for";
    let seen = seen.lock().unwrap();
    // In the source, and in the object.
    let found = seen.windows(secret.len()).filter(|bytes| bytes == secret);
    assert!(found.count() >= 2);
}

#[test]
fn a_plain_worker_says_whom_it_lets_in() {
    let bed = Bed::new();
    let peer = format!("SHA256:{}", "A".repeat(43));
    let out = bed.run("127.0.0.1:1", true, &["check", "--peer", &peer]);
    let said = text(&out.stderr);
    assert!(said.contains("exclude each other"), "{said}");
    for (options, why, hint) in [
        (
            &["--bind", "0.0.0.0:0"][..],
            "no master can show its key",
            "add --open",
        ),
        (
            &["--bind", "[::]:0"],
            "no master can show its key",
            "add --open",
        ),
        (&["--authorized", "keys"], "exclude each other", "leave one"),
        (&["--identity", "key"], "exclude each other", "leave one"),
        (&["--open", "--accept-compilers"], "cannot be used with", ""),
    ] {
        let args = [&["worker", "--plain"], options].concat();
        let out = bed.weft_cc(&args).output().unwrap();
        let said = text(&out.stderr);
        assert!(!out.status.success(), "{options:?}: {out:?}");
        assert!(
            said.contains(why) && said.contains(hint),
            "{options:?}: {said}"
        );
    }
}
