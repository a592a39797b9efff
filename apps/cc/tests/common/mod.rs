//! Workers, a daemon and a project for the tests.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_cc::client::write_launcher;
use weft_cc::daemon;
use weft_cc::ipc::{Answer, Ask, JobAsk, Line, Status};
use weft_cc::options::Language;
use weft_cc::worker::{Config, Worker};
use weft_cc::{Endpoint, find_program};
use weft_verbs::tls::{Identity, Tls};

pub(crate) fn tls() -> Tls {
    Tls::new(Identity::generate().unwrap()).unwrap()
}

/// Says why a test cannot run.
pub(crate) fn has_gcc() -> bool {
    let missing = ["gcc", "make"]
        .into_iter()
        .find(|name| find_program(name).is_none());
    if let Some(name) = missing {
        eprintln!("skipped: there is no {name} (Debian's packages gcc and make)");
    }
    missing.is_none()
}

pub(crate) fn config() -> Config {
    Config {
        slots: 2,
        ..Config::new("127.0.0.1:0".parse().unwrap(), tls())
    }
}

pub(crate) fn worker(config: Config) -> (Worker, Endpoint) {
    let worker = Worker::start(config).unwrap();
    let endpoint = Endpoint {
        host: "127.0.0.1".into(),
        port: worker.local_addr().port(),
    };
    (worker, endpoint)
}

pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_mins(1);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A daemon in this process, with a directory.
pub(crate) struct Bed {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) thread: Option<std::thread::JoinHandle<()>>,
}

impl Bed {
    pub(crate) fn new(room: u64) -> Self {
        Self::patient(room, Duration::from_mins(20))
    }

    pub(crate) fn patient(room: u64, patience: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = daemon::Config {
            room,
            patience,
            ..daemon::Config::new(dir.path().join("socket"), Arc::new(tls()))
        };
        let thread = std::thread::spawn(move || daemon::run(config).unwrap());
        let bed = Self {
            dir,
            thread: Some(thread),
        };
        until("the daemon listens", || {
            Line::connect(&bed.socket()).is_ok()
        });
        bed
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn status(&self) -> Status {
        let (answer, _) = Line::connect(&self.socket())
            .unwrap()
            .ask(&Ask::Status, &[])
            .unwrap();
        let Answer::Status(status) = answer else {
            panic!("{answer:?}")
        };
        *status
    }

    /// A job for a source that needs no preprocessing.
    pub(crate) fn job(workers: &[&Endpoint]) -> JobAsk {
        JobAsk {
            workers: workers.iter().copied().cloned().collect(),
            driver: find_program("gcc").unwrap(),
            name: "gcc".into(),
            path: std::env::var("PATH").unwrap(),
            language: Language::C,
            cwd: "/".into(),
            source: "a.c".into(),
            locale: String::new(),
            args: vec!["-O1".into(), "-c".into()],
            beside: String::new(),
            at: 0,
            len: 0,
            pull: None,
            tree: None,
            plain: false,
        }
    }

    pub(crate) fn send(&self, mut job: JobAsk, text: &[u8]) -> Line {
        let line = Line::connect(&self.socket()).unwrap();
        let fd = weft_sys::memfd::create("test", text.len() as u64).unwrap();
        let file = std::fs::File::from(fd);
        file.write_all_at(text, 0).unwrap();
        job.len = text.len() as u64;
        line.send(&Ask::Job(Box::new(job)), &[file.as_fd()])
            .unwrap();
        line
    }

    pub(crate) fn hand_over(&self, workers: &[&Endpoint], text: &[u8]) -> Line {
        self.send(Self::job(workers), text)
    }

    pub(crate) fn outcome(&self, workers: &[&Endpoint], text: &[u8]) -> (Answer, Option<OwnedFd>) {
        self.hand_over(workers, text).receive().unwrap().unwrap()
    }

    pub(crate) fn here(&self, workers: &[&Endpoint], text: &[u8]) -> String {
        match self.outcome(workers, text).0 {
            Answer::Here(reason) => reason,
            other => panic!("{other:?}"),
        }
    }

    /// A project of `n` sources that share a header, and a make for it whose compiler is this program.
    pub(crate) fn project(&self, n: usize, workers: &[&Endpoint], verify: u8) -> Command {
        std::fs::write(
            self.path("h.h"),
            "#include <stdio.h>\n#define SQUARE(x) ((x) * (x))\n",
        )
        .unwrap();
        for i in 0..n {
            let text = format!(
                "#include \"h.h\"\nint f{i}(int x)\n{{\n\treturn SQUARE(x + {i}) + printf(\"%s:%d\\n\", __FILE__, __LINE__);\n}}\n"
            );
            std::fs::write(self.path(&format!("f{i}.c")), text).unwrap();
        }
        let objects: Vec<_> = (0..n).map(|i| format!("f{i}.o")).collect();
        let objects = objects.join(" ");
        std::fs::write(
            self.path("Makefile"),
            format!("CFLAGS = -O2 -g -Wall -MD -Ifirst -isystem second -I$(CURDIR)/third\nall: {objects}\n-include *.d\n"),
        )
        .unwrap();
        write_launcher(self.dir.path()).unwrap();
        let mut make = self.make("./weft-cc gcc");
        let workers: Vec<_> = workers.iter().map(ToString::to_string).collect();
        make.env("WEFT_CC_HOSTS", workers.join(","))
            .env("WEFT_CC_SOCKET", self.socket())
            .env("WEFT_CC_VERIFY", verify.to_string());
        make
    }

    fn make(&self, cc: &str) -> Command {
        let mut make = Command::new("make");
        make.current_dir(self.dir.path())
            .arg("-j4")
            .arg(format!("CC={cc}"))
            .env_remove("MAKEFLAGS");
        make
    }

    /// Runs the make, and then one with the compiler itself: the same objects and dependencies.
    pub(crate) fn compare(&self, n: usize, mut make: Command) {
        let done = make.output().unwrap();
        assert!(
            done.status.success(),
            "{}",
            String::from_utf8_lossy(&done.stderr)
        );
        let read = || -> Vec<_> {
            let one =
                |i: usize, ext: &str| std::fs::read(self.path(&format!("f{i}.{ext}"))).unwrap();
            (0..n).map(|i| (one(i, "o"), one(i, "d"))).collect()
        };
        let theirs = read();
        for i in 0..n {
            std::fs::remove_file(self.path(&format!("f{i}.o"))).unwrap();
        }
        assert!(self.make("gcc").output().unwrap().status.success());
        for (i, (theirs, ours)) in theirs.iter().zip(read()).enumerate() {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            assert_eq!(
                text(&theirs.1),
                text(&ours.1),
                "the dependencies of f{i} differ"
            );
            assert!(
                theirs.0 == ours.0,
                "the objects of f{i} differ: {:?}",
                self.status()
            );
        }
        let left = std::fs::read_dir(self.dir.path()).unwrap().filter(|e| {
            e.as_ref()
                .unwrap()
                .file_name()
                .to_string_lossy()
                .contains(".part")
        });
        assert_eq!(left.count(), 0);
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = Line::connect(&self.socket()).and_then(|line| line.ask(&Ask::Stop, &[]));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A text on which a compiler works for long.
pub(crate) fn long_text() -> Vec<u8> {
    let mut text = b"#define A x = x * 3 + y[x & 7]; if (x > y[2]) y[x & 3] += x;\n#define B A A A A A A A A\n#define C B B B B B B B B\n#define D C C C C C C C C\n".to_vec();
    text.extend(b"#define E D D D D D D D D\n#define F E E E E E E E E\nint f(int x, int *y) { F F F F return x; }\n");
    text
}
