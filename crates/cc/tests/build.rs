//! Workers, a daemon and real compilers on one machine: what comes back is what the compiler here makes, whatever happens on the way.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_cc::client::{compile, write_launcher};
use weft_cc::daemon;
use weft_cc::ipc::{Answer, Ask, JobAsk, Line, Status};
use weft_cc::options::{self, Language};
use weft_cc::wire::{End, Hello, Job, Output, Region, Report, Request, Verdict};
use weft_cc::worker::{Config, Worker};
use weft_cc::{Endpoint, find_program};
use weft_verbs::cm::{self, ConnParam};
use weft_verbs::tls::{Identity, Tls};
use weft_verbs::{Access, Cq, Device, Mr, Qp, QpInit, RecvWr, SendWr, Wc, WcStatus};

fn tls() -> Tls {
    Tls::new(Identity::generate().unwrap()).unwrap()
}

/// Says why a test cannot run.
fn has_gcc() -> bool {
    let missing = ["gcc", "make"]
        .into_iter()
        .find(|name| find_program(name).is_none());
    if let Some(name) = missing {
        eprintln!("skipped: there is no {name} (Debian's packages gcc and make)");
    }
    missing.is_none()
}

fn config() -> Config {
    Config {
        slots: 2,
        ..Config::new("127.0.0.1:0".parse().unwrap(), tls())
    }
}

fn worker(config: Config) -> (Worker, Endpoint) {
    let worker = Worker::start(config, Arc::new(())).unwrap();
    let endpoint = Endpoint {
        host: "127.0.0.1".into(),
        port: worker.local_addr().port(),
    };
    (worker, endpoint)
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_mins(1);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A daemon in this process, with a directory.
struct Bed {
    dir: tempfile::TempDir,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Bed {
    fn new(room: u64) -> Self {
        Self::patient(room, Duration::from_mins(20))
    }

    fn patient(room: u64, patience: Duration) -> Self {
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

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn status(&self) -> Status {
        let (answer, _) = Line::connect(&self.socket())
            .unwrap()
            .ask(&Ask::Status, &[])
            .unwrap();
        let Answer::Status(status) = answer else {
            panic!("{answer:?}")
        };
        *status
    }

    /// A job as a compilation hands it over, for a source that needs no preprocessing.
    fn hand_over(&self, workers: &[&Endpoint], text: &[u8]) -> Line {
        let line = Line::connect(&self.socket()).unwrap();
        let fd = weft_sys::memfd::create("test", text.len() as u64).unwrap();
        let file = std::fs::File::from(fd);
        file.write_all_at(text, 0).unwrap();
        let job = JobAsk {
            workers: workers.iter().copied().cloned().collect(),
            driver: find_program("gcc").unwrap(),
            name: "gcc".into(),
            path: std::env::var("PATH").unwrap(),
            language: Language::C,
            cwd: "/".into(),
            source: "a.c".into(),
            locale: String::new(),
            args: vec!["-O1".into(), "-c".into()],
            at: 0,
            len: text.len() as u64,
            pull: None,
        };
        line.send(&Ask::Job(Box::new(job)), &[file.as_fd()])
            .unwrap();
        line
    }

    fn outcome(&self, workers: &[&Endpoint], text: &[u8]) -> (Answer, Option<OwnedFd>) {
        self.hand_over(workers, text).receive().unwrap().unwrap()
    }

    fn here(&self, workers: &[&Endpoint], text: &[u8]) -> String {
        match self.outcome(workers, text).0 {
            Answer::Here(reason) => reason,
            other => panic!("{other:?}"),
        }
    }

    /// A project of `n` sources that share a header, and a make for it whose compiler is this program.
    fn project(&self, n: usize, workers: &[&Endpoint], verify: u8) -> Command {
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
    fn compare(&self, n: usize, mut make: Command) {
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
fn long_text() -> Vec<u8> {
    let mut text = b"#define A x = x * 3 + y[x & 7]; if (x > y[2]) y[x & 3] += x;\n#define B A A A A A A A A\n#define C B B B B B B B B\n#define D C C C C C C C C\n".to_vec();
    text.extend(b"#define E D D D D D D D D\n#define F E E E E E E E E\nint f(int x, int *y) { F F F F return x; }\n");
    text
}

#[test]
fn a_make_on_two_workers_gives_the_same_objects() {
    if !has_gcc() {
        return;
    }
    // So little room that each job has to ask for more.
    let bed = Bed::new(1024);
    let ((_a, a), (_b, b)) = (worker(config()), worker(config()));
    bed.compare(8, bed.project(8, &[&a, &b], 0));
    let status = bed.status();
    assert_eq!((status.done, status.again), (8, 0), "{status:?}");
    // And no object is older than its dependencies.
    for i in 0..8 {
        std::fs::remove_file(bed.path(&format!("f{i}.o"))).unwrap();
    }
    assert!(
        bed.project(8, &[&a, &b], 0)
            .output()
            .unwrap()
            .status
            .success()
    );
    assert_eq!(bed.status().done, 16);
    for i in 0..8 {
        let time = |ext: &str| {
            let path = bed.path(&format!("f{i}.{ext}"));
            path.metadata().unwrap().modified().unwrap()
        };
        assert!(time("o") >= time("d"), "f{i}");
    }
    assert!(
        status
            .workers
            .iter()
            .all(|worker| worker.lost == 0 && worker.in_use == 0)
    );
}

#[test]
fn workers_that_preprocess_make_the_same_objects() {
    if !has_gcc() {
        return;
    }
    if !weft_cc::worker::sandbox::level().files {
        return eprintln!("skipped: no Landlock, without which no worker preprocesses");
    }
    let bed = Bed::new(1 << 20);
    let (_a, a) = worker(config());
    let write = |name: &str, text: &str| {
        let path = bed.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let clean = || {
        for i in 0..8 {
            let _ = std::fs::remove_file(bed.path(&format!("f{}.{}", i / 2, ["o", "d"][i % 2])));
        }
    };
    let build = || {
        clean();
        let mut make = bed.project(4, &[&a], 0);
        make.env("WEFT_CC_PULL", "1");
        write("second/deep/x.h", "#pragma once\n#include \"../y.h\"\n");
        write("second/y.h", "int y(void);\n");
        write("third/z.h", "#define Z __FILE__\n");
        let _ = std::os::unix::fs::symlink("second/deep", bed.path("link"));
        write(
            "f1.c",
            "#include <deep/x.h>\n#include <z.h>\n#include \"link/../y.h\"\n#if __has_include(<new.h>)\n#include <new.h>\n#else\n#define N 1\n#endif\nconst char *z = Z; int n(void) { return y() + N; }\n",
        );
        write(
            "f2.c",
            "#define NAME \"link/x.h\"\n#include NAME\n#include <stdlib.h>\n#warning w\nint m(void) { return abs(y()); }\n",
        );
        bed.compare(4, make);
    };
    build();
    // A header that was edited, that came before another one, that was looked for, and that went.
    write("third/z.h", "#define Z \"  xy\"\n");
    build();
    write("first/z.h", "#define Z \"first\"\n");
    build();
    write("second/new.h", "#define N 2\n");
    build();
    std::fs::remove_file(bed.path("second/new.h")).unwrap();
    build();
    let status = bed.status();
    assert!(status.done == 20 && status.reasons.is_empty(), "{status:?}");
    // What lies beyond the roots, and what is hidden, is preprocessed here.
    let other = tempfile::tempdir().unwrap();
    std::fs::write(other.path().join("o.h"), "int o;\n").unwrap();
    let mut make = bed.project(4, &[&a], 0);
    let name = other.path().file_name().unwrap().to_str().unwrap();
    write("f0.c", &format!("#include \"../{name}/o.h\"\n"));
    write(
        "f1.c",
        &format!("#include \"{}/o.h\"\n", other.path().display()),
    );
    write(
        "f2.c",
        &format!("#define O <../{name}/o.h>\n#if __has_include(O)\nint found;\n#endif\n"),
    );
    write(
        "f3.c",
        "#include <sys/stat.h>\n#if !__has_include(\"/etc/passwd\")\n#error no\n#endif\nint x;\n",
    );
    make.env("WEFT_CC_PULL", "1");
    clean();
    bed.compare(4, make);
    let one = |(why, n): (String, u64)| n * u64::from(why.starts_with("preprocessed here"));
    let here = || -> u64 { bed.status().reasons.into_iter().map(one).sum() };
    assert_eq!((bed.status().done, here()), (24, 4), "{:?}", bed.status());
    // A home directory is not listed, and a worker that knows nothing of it does not take it for one without h.h.
    let (_b, b) = worker(config());
    let mut make = bed.project(4, &[&b], 0);
    write("second/h.h", "#define SQUARE(x) 7\nint printf();\n");
    make.env("HOME", bed.dir.path()).env("WEFT_CC_PULL", "1");
    write(
        "f1.c",
        "#define H \"h.h\"\n#include H\nint f(void) { return SQUARE(2); }\n",
    );
    clean();
    bed.compare(4, make);
    assert_eq!((bed.status().done, here()), (28, 8), "{:?}", bed.status());
}

#[test]
fn objects_are_compared_when_asked() {
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let (_a, a) = worker(config());
    bed.compare(2, bed.project(2, &[&a], 100));
    until("the comparisons are noted", || {
        bed.status().verified == (2, 0)
    });
}

#[test]
fn a_compiler_that_calls_weft_cc_runs_here_at_once() {
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let (_a, a) = worker(config());
    let mut make = bed.project(1, &[&a], 0);
    let path = std::env::var("PATH").unwrap();
    let (dir, gcc) = (bed.path("bin"), bed.path("bin/gcc"));
    std::fs::create_dir(&dir).unwrap();
    let script = format!(
        "#!/bin/sh\nPATH='{path}' exec {} gcc \"$@\"\n",
        bed.path("weft-cc").display()
    );
    std::fs::write(&gcc, script).unwrap();
    std::fs::set_permissions(&gcc, std::fs::Permissions::from_mode(0o755)).unwrap();
    make.env("PATH", format!("{}:{path}", dir.display()));
    let done = make.output().unwrap();
    assert!(done.status.success(), "{done:?}");
    // What the outer one did is all that the daemon knows of.
    let status = bed.status();
    let all: u64 = status.reasons.iter().map(|(_, n)| n).sum();
    assert_eq!((status.done, all), (0, 1), "{status:?}");
}

#[test]
fn a_command_leaves_what_its_compiler_would() {
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let (_a, a) = worker(config());
    let make = bed.project(1, &[&a], 0);
    let link = bed.path("bin/gcc");
    std::fs::create_dir(bed.path("bin")).unwrap();
    std::os::unix::fs::symlink("../weft-cc", &link).unwrap();
    std::fs::write(bed.path("bin/f0.c"), "#warning one\nint x;\n").unwrap();
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{path}", bed.path("bin").display());
    let run = |script: &str| {
        let mut shell = Command::new("sh");
        let vars = make
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?)));
        shell.args(["-c", script]).envs(vars).env("PATH", &path);
        shell.current_dir(bed.path("bin")).output().unwrap()
    };
    // A link finds the compiler that comes after it; the umask is the command's; what is said is said to it.
    let done = run("umask 027; gcc -O1 -MD -c f0.c");
    assert!(done.status.success(), "{done:?}");
    assert!(String::from_utf8_lossy(&done.stderr).contains("#warning one"));
    for name in ["bin/f0.o", "bin/f0.d"] {
        let mode = bed.path(name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640, "{name}");
    }
    assert_eq!((bed.status().done, bed.status().reasons.len()), (1, 0));
    // What links, what fails, and what is no compiler.
    assert!(run("gcc -shared f0.o -o f.so").status.success());
    assert_eq!(run("gcc -c nothing.c").status.code(), Some(1));
    let none = run("../weft-cc gcc-none -c f0.c");
    assert_eq!(none.status.code(), Some(127), "{none:?}");
    assert!(String::from_utf8_lossy(&none.stderr).contains("no such compiler"));
    // Two that see other files are not mixed up.
    let alone = run("unshare -rm true");
    if alone.status.success() {
        run("rm f0.o; unshare -m gcc -c f0.c || unshare -rm gcc -c f0.c");
        assert!(bed.path("bin/f0.o").exists());
        let reasons = bed.status().reasons;
        assert!(
            reasons.iter().any(|(why, _)| why.contains("other files")),
            "{reasons:?}"
        );
    }
}

#[test]
fn a_command_that_is_killed_ends_its_preprocessor() {
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let (_a, a) = worker(config());
    let make = bed.project(1, &[&a], 0);
    // Which blocks whoever opens it.
    use rustix::fs::{CWD, Mode, mkfifoat};
    mkfifoat(CWD, bed.path("h.fifo"), Mode::RUSR | Mode::WUSR).unwrap();
    std::fs::write(bed.path("f0.c"), "#include \"h.fifo\"\n").unwrap();
    let mut command = Command::new(bed.path("weft-cc"));
    let vars = make
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)));
    command.args(["gcc", "-c", "f0.c"]).envs(vars);
    let mut command = command.current_dir(bed.dir.path()).spawn().unwrap();
    until("it preprocesses", || bed.status().here == 1);
    command.kill().unwrap();
    command.wait().unwrap();
    until("the preprocessor has ended", || bed.status().here == 0);
}

#[test]
fn a_worker_that_ends_costs_no_object() {
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let ((a, first), (b, second)) = (worker(config()), worker(config()));
    let ending = std::thread::spawn(move || {
        until("it has done something", || a.jobs() > 0 || a.running() > 0);
        drop(a);
    });
    bed.compare(8, bed.project(8, &[&first, &second], 0));
    ending.join().unwrap();
    // And with nobody left, all is done here.
    drop(b);
    for i in 0..8 {
        std::fs::remove_file(bed.path(&format!("f{i}.o"))).unwrap();
    }
    bed.compare(8, bed.project(8, &[&first, &second], 0));
}

#[test]
fn errors_are_the_local_compilers() {
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let (_a, a) = worker(config());
    let mut make = bed.project(1, &[&a], 0);
    std::fs::write(bed.path("f0.c"), "int f(void) { return nothing; }\n").unwrap();
    let done = make.output().unwrap();
    assert!(!done.status.success());
    let text = String::from_utf8_lossy(&done.stderr);
    // With the quotation of the line, which only the compiler here can give.
    assert!(
        text.contains("undeclared") && text.contains("return nothing;"),
        "{text}"
    );
    assert!(!bed.path("f0.o").exists());
}

#[test]
fn a_compilation_that_goes_away_ends_its_job() {
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let (worker, at) = worker(config());
    let line = bed.hand_over(&[&at], &long_text());
    until("it compiles", || worker.running() == 1);
    drop(line);
    until("the compiler is killed", || worker.running() == 0);
    until("the slot is free", || {
        bed.status().workers[0].in_use == 0 && bed.status().jobs.is_empty()
    });
    // The worker goes on.
    assert!(matches!(
        bed.outcome(&[&at], b"int x;\n").0,
        Answer::Done { .. }
    ));
}

#[test]
fn a_daemon_that_is_told_to_stop_finishes_its_jobs() {
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let (worker, at) = worker(config());
    let line = bed.hand_over(&[&at], &long_text());
    until("it compiles", || worker.running() == 1);
    Line::connect(&bed.socket())
        .unwrap()
        .ask(&Ask::Stop, &[])
        .unwrap();
    assert!(!bed.socket().exists());
    assert!(!bed.thread.as_ref().unwrap().is_finished());
    // It is cancelled as before, and then nobody is left.
    drop(line);
    until("the compiler is killed", || worker.running() == 0);
    until("the daemon ends", || {
        bed.thread.as_ref().unwrap().is_finished()
    });
}

#[test]
fn limits_and_other_compilers_are_reasons() {
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let (_slow, at) = worker(Config {
        time_limit: Duration::from_millis(100),
        ..config()
    });
    let why = bed.here(&[&at], &long_text());
    assert!(why.contains("took more than"), "{why}");
    let (_small, at) = worker(Config {
        size_limit: 64,
        ..config()
    });
    let why = bed.here(&[&at], b"int x;\n");
    assert!(
        why.contains("outputs of") || why.contains("failed"),
        "{why}"
    );
    let (_poor, at) = worker(Config {
        memory: 64 << 20,
        ..config()
    });
    let long = format!("int a[] = {{{}}};\n", "1,".repeat(3_000_000));
    let why = bed.here(&[&at], long.as_bytes());
    assert!(why.contains("the compiler failed on a worker"), "{why}");
    let nowhere = Config {
        place: "/nowhere".into(),
        ..config()
    };
    let e = Worker::start(nowhere, Arc::new(())).err().unwrap();
    assert!(e.to_string().contains("/nowhere"), "{e}");
    let nobody = Endpoint {
        host: "127.0.0.1".into(),
        port: 1,
    };
    // The second one does not wait for it again.
    for _ in 0..2 {
        assert!(bed.here(&[&nobody], b"int x;\n").contains("127.0.0.1:1"));
    }
}

#[test]
fn the_sandbox_keeps_files_from_a_source() {
    if !has_gcc() {
        return;
    }
    let level = weft_cc::worker::sandbox::level();
    if !level.files {
        eprintln!("skipped: compilers are restricted by {level}");
        return;
    }
    let bed = Bed::new(1 << 20);
    let (_worker, at) = worker(config());
    let secret = bed.path("secret");
    std::fs::write(&secret, "int secret = 7;\n").unwrap();
    // A text that was not looked at, as a hostile master's.
    for text in [
        format!("#include \"{}\"\n", secret.display()),
        format!("asm(\".incbin \\\"{}\\\"\");\n", secret.display()),
    ] {
        let why = bed.here(&[&at], text.as_bytes());
        assert!(why.contains("failed on a worker"), "{why}");
    }
    assert!(options::stays(b"asm(\".incbin \\\"x\\\"\");").is_some());
}

/// A peer without manners: messages as it likes.
struct Peer {
    qp: Qp,
    cq: Cq,
    mr: Mr,
}

impl Peer {
    fn objects(device: &Device) -> (Qp, Cq, Mr) {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(64, None).unwrap();
        let mr = pd
            .alloc_mr(
                1 << 20,
                Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE,
            )
            .unwrap();
        let qp = pd.create_qp(&QpInit::new(&cq, &cq)).unwrap();
        for i in 0..4 {
            qp.post_recv(&[RecvWr::new(i).sge(mr.sge(i as usize * 65_536, 65_536))])
                .unwrap();
        }
        (qp, cq, mr)
    }

    fn param(hello: Hello) -> ConnParam {
        ConnParam {
            private_data: hello.encode().to_vec(),
            tls: Some(tls()),
            ..ConnParam::default()
        }
    }

    fn send(&self, bytes: &[u8]) {
        let at = 512 << 10;
        self.mr.write(at, bytes).unwrap();
        self.qp
            .post_send_one(SendWr::send(99).sge(self.mr.sge(at, bytes.len())))
            .unwrap();
    }

    /// The next message; `None` at the end of the connection.
    fn message(&self) -> Option<Vec<u8>> {
        let mut wc = [Wc::default(); 1];
        let end = Instant::now() + Duration::from_mins(1);
        loop {
            assert!(Instant::now() < end, "nothing comes");
            if self.cq.wait(&mut wc, Some(Duration::from_secs(1))).unwrap() == 0 {
                continue;
            }
            if wc[0].status != WcStatus::Success {
                return None;
            }
            if wc[0].wr_id < 4 {
                let at = wc[0].wr_id as usize * 65_536;
                let bytes = self.mr.to_vec(at, wc[0].byte_len as usize).unwrap();
                self.qp
                    .post_recv(&[RecvWr::new(wc[0].wr_id).sge(self.mr.sge(at, 65_536))])
                    .unwrap();
                return Some(bytes);
            }
        }
    }
}

#[test]
fn too_many_connections_are_turned_away_and_memory_is_limited() {
    if !has_gcc() {
        return;
    }
    let (_worker, at) = worker(Config {
        max_connections: 1,
        ..config()
    });
    let (first, second) = (Bed::new(1 << 20), Bed::new(1 << 20));
    assert!(matches!(
        first.outcome(&[&at], b"int x;\n").0,
        Answer::Done { .. }
    ));
    // The first daemon keeps its connection.
    let why = second.here(&[&at], b"int x;\n");
    assert!(why.contains("turned the connection away"), "{why}");
    drop(first);
    let (_small, at) = worker(Config {
        memory: 32 << 20,
        ..config()
    });
    let third = Bed::new(1 << 20);
    let why = third.here(&[&at], &long_text());
    assert!(why.contains("failed on a worker"), "{why}");
}

#[test]
fn hostile_masters_are_refused() {
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let (worker, at) = worker(config());
    let device = Device::open().unwrap();
    let region = |mr: &Mr, len| Region {
        rkey: mr.rkey(),
        addr: 0,
        len,
    };
    let hello = Hello::new(weft_cc::wire::Status::Ok, 0);
    let connect = || {
        let (qp, cq, mr) = Peer::objects(&device);
        let conn = cm::connect_qp(worker.local_addr(), qp, &device, &Peer::param(hello)).unwrap();
        Peer {
            qp: conn.qp,
            cq,
            mr,
        }
    };
    let digest = [0; 32];
    let job = |peer: &Peer| Job {
        id: 1,
        cxx: false,
        source: region(&peer.mr, 100),
        room: region(&peer.mr, 100),
        digest,
        driver: "gcc".into(),
        locale: String::new(),
        cwd: "/".into(),
        name: "a.c".into(),
        args: vec!["-c".into()],
        pull: None,
    };
    // What may not be asked is refused, and the connection goes on.
    let peer = connect();
    for (change, verdict) in [
        (
            Box::new(|job: &mut Job| job.args.push("-fplugin=/tmp/x.so".into()))
                as Box<dyn Fn(&mut Job)>,
            Verdict::Refused,
        ),
        (
            Box::new(|job: &mut Job| job.args.push("@/etc/passwd".into())),
            Verdict::Refused,
        ),
        // gcc would read the text as its arguments.
        (
            Box::new(|job: &mut Job| job.name = "@a/../a/../f".into()),
            Verdict::Refused,
        ),
        (
            Box::new(|job: &mut Job| job.name = "a/../-f.c".into()),
            Verdict::Refused,
        ),
        (
            Box::new(|job: &mut Job| job.locale = "../../x".into()),
            Verdict::Refused,
        ),
        (
            Box::new(|job: &mut Job| job.source.len = 1 << 40),
            Verdict::Limit,
        ),
        (
            Box::new(|job: &mut Job| job.driver = "/bin/sh".into()),
            Verdict::Environment,
        ),
        (Box::new(|_: &mut Job| {}), Verdict::Environment),
    ] {
        let mut job = job(&peer);
        change(&mut job);
        peer.send(&Request::Job(job).encode().unwrap());
        let Report::End(end) = Report::decode(&peer.message().unwrap()).unwrap() else {
            panic!()
        };
        assert_eq!(end.verdict, verdict, "{}", end.reason);
    }
    // Nonsense, room that nobody asked for, and a key that is nobody's end the connection.
    let room = Request::Room {
        id: 1,
        room: Region::default(),
    }
    .encode()
    .unwrap();
    for bytes in [vec![0xff; 40], vec![1], room] {
        let peer = connect();
        peer.send(&bytes);
        assert_eq!(peer.message(), None);
    }
    let real = weft_cc::digest::Digests::default()
        .of(
            &find_program("gcc").unwrap(),
            Language::C,
            &std::env::var("PATH").unwrap(),
        )
        .unwrap();
    let peer = connect();
    let mut stale = Job {
        digest: real,
        ..job(&peer)
    };
    stale.source.rkey ^= 0x5a5a_5a00;
    peer.send(&Request::Job(stale).encode().unwrap());
    assert_eq!(peer.message(), None);
    // Nobody else notices.
    assert!(matches!(
        bed.outcome(&[&at], b"int x;\n").0,
        Answer::Done { .. }
    ));
    until("no compiler is left", || worker.running() == 0);
}

#[test]
fn hostile_workers_cost_no_object() {
    if !has_gcc() {
        return;
    }
    let device = Device::open().unwrap();
    let listener = cm::Listener::bind(
        &device,
        "127.0.0.1:0".parse().unwrap(),
        16,
        &Peer::param(Hello::new(weft_cc::wire::Status::Ok, 1)),
    )
    .unwrap();
    let at = Endpoint {
        host: "127.0.0.1".into(),
        port: listener.local_addr().port(),
    };
    let end = |outputs: Vec<(Output, u64, u64)>| {
        move |id| {
            Report::End(End {
                outputs: outputs.clone(),
                ..End::new(id, Verdict::Done, "")
            })
            .encode()
        }
    };
    let answers: Vec<Box<dyn Fn(u32) -> Vec<u8> + Send>> = vec![
        Box::new(|_| vec![0x77; 50]),
        Box::new(end(vec![(Output::Object, 0, u64::MAX / 2)])),
        Box::new(end(vec![(Output::Object, u64::MAX - 5, 5)])),
        Box::new(end(vec![])),
        Box::new(end(vec![(Output::Object, 0, 0)])),
        Box::new(|id| Report::End(End::new(id + 1, Verdict::Done, "")).encode()),
    ];
    let count = answers.len();
    let hostile = std::thread::spawn(move || {
        for answer in answers {
            let request = listener.next_request(Some(Duration::from_mins(1))).unwrap();
            let (qp, cq, mr) = Peer::objects(&device);
            let conn = request
                .accept(qp, &Peer::param(Hello::new(weft_cc::wire::Status::Ok, 1)))
                .unwrap();
            let peer = Peer {
                qp: conn.qp,
                cq,
                mr,
            };
            let Ok(Request::Job(job)) = Request::decode(&peer.message().unwrap()) else {
                panic!()
            };
            peer.send(&answer(job.id));
            assert_eq!(peer.message(), None);
        }
    });
    for _ in 0..count {
        // A daemon of its own: a worker that failed gets no jobs for a while.
        let bed = Bed::new(1 << 20);
        let why = bed.here(&[&at], b"int x;\n");
        assert!(why.contains(&at.to_string()), "{why}");
        assert_eq!(bed.status().done, 0);
    }
    hostile.join().unwrap();
}

#[test]
fn a_worker_that_stays_busy_does_not_hold_a_build() {
    if !has_gcc() {
        return;
    }
    let device = Device::open().unwrap();
    let hello = || Peer::param(Hello::new(weft_cc::wire::Status::Ok, 1));
    let listener =
        cm::Listener::bind(&device, "127.0.0.1:0".parse().unwrap(), 16, &hello()).unwrap();
    let at = Endpoint {
        host: "127.0.0.1".into(),
        port: listener.local_addr().port(),
    };
    let busy = std::thread::spawn(move || {
        let request = listener.next_request(Some(Duration::from_mins(1))).unwrap();
        let (qp, cq, mr) = Peer::objects(&device);
        let conn = request.accept(qp, &hello()).unwrap();
        let peer = Peer {
            qp: conn.qp,
            cq,
            mr,
        };
        let mut times = 0;
        while let Some(bytes) = peer.message() {
            let Ok(Request::Job(job)) = Request::decode(&bytes) else {
                panic!()
            };
            let end = End::new(job.id, Verdict::Busy, "later");
            peer.send(&Report::End(end).encode());
            times += 1;
        }
        times
    });
    let bed = Bed::patient(1 << 20, Duration::from_secs(1));
    let why = bed.here(&[&at], b"int x;\n");
    assert!(why.contains("in time") || why.contains("too long"), "{why}");
    drop(bed);
    assert!(busy.join().unwrap() > 0);
}
