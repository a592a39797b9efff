//! `weft cc` as a user runs it: a worker, compilations, the summary; and its benchmark with virtual workers.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use crate::common::{Output, weft};

/// Says why a test cannot run.
fn has(programs: &[&str]) -> bool {
    let there = |name: &str| Path::new("/usr/bin").join(name).exists();
    let missing = programs.iter().find(|name| !there(name));
    if let Some(name) = missing {
        eprintln!("skipped: there is no {name} in /usr/bin (Debian's packages gcc, make)");
    }
    missing.is_none()
}

/// Some sources with a header and a makefile.
fn project(dir: &Path) {
    fs::write(
        dir.join("h.h"),
        "#include <stdio.h>\n#define TWICE(x) ((x) * 2)\n",
    )
    .unwrap();
    for n in 0..3 {
        let text =
            format!("#include \"h.h\"\nint f{n}(int x) {{ return printf(\"%d\", TWICE(x)); }}\n");
        fs::write(dir.join(format!("f{n}.c")), text).unwrap();
    }
    fs::write(
        dir.join("Makefile"),
        "CFLAGS = -O1 -Wall -MMD\nall: f0.o f1.o f2.o\n",
    )
    .unwrap();
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A worker and a master in a folder of their own.
struct Bed {
    dir: tempfile::TempDir,
    at: String,
    _worker: Killed,
}

impl Bed {
    /// The command starts the worker, which says first where it listens.
    fn start(dir: tempfile::TempDir, mut command: Command) -> Self {
        let mut worker = command
            .env("XDG_CONFIG_HOME", dir.path().join("config"))
            .env("XDG_CACHE_HOME", dir.path().join("cache"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(worker.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let at = line.split_whitespace().nth(2).expect(&line).to_owned();
        let worker = Killed(worker);
        Self {
            dir,
            at,
            _worker: worker,
        }
    }

    fn new(options: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        project(dir.path());
        let mut command = weft();
        command.args(["cc", "worker", "--bind", "127.0.0.1:0"]);
        command.args(options);
        Self::start(dir, command)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// As the master.
    fn surround<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .current_dir(self.dir.path())
            .env("XDG_CONFIG_HOME", self.path("config"))
            .env("WEFT_CC_SOCKET", self.path("socket"))
            .env("WEFT_CC_HOSTS", &self.at)
    }

    fn run(&self, args: &[&str]) -> Output {
        Output::of(self.surround(weft().args(args)))
    }

    fn status(&self) -> serde_json::Value {
        let out = self.run(&["cc", "status", "--json"]);
        out.ok();
        serde_json::from_str(&out.stdout).unwrap()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.run(&["cc", "stop"]);
    }
}

#[test]
fn a_build_is_summed_up_and_drawn() {
    if !has(&["gcc"]) {
        return;
    }
    let bed = Bed::new(&[]);
    for n in 0..3 {
        bed.run(&["cc", "gcc", "-O1", "-c", &format!("f{n}.c")])
            .ok();
    }
    // Linking stays here, and is not asked for.
    bed.run(&["cc", "gcc", "-shared", "f0.o", "-o", "f.so"]);
    let out = bed.run(&["cc", "summary", "--html", "build.html"]);
    out.ok();
    assert!(out.stdout.contains("3 compilations"), "{out:?}");
    assert!(
        out.stdout.contains(&bed.at) && out.stdout.contains("f2.c"),
        "{out:?}"
    );
    let page = fs::read_to_string(bed.path("build.html")).unwrap();
    assert!(page.contains("<rect class=\"compile\"") && page.contains("f1.c"));
    let lines = bed.run(&["cc", "summary", "--json"]);
    assert_eq!(lines.stdout.lines().count(), 3, "{lines:?}");
}

#[test]
fn the_small_program_compiles_too() {
    if !has(&["gcc"]) {
        return;
    }
    let bed = Bed::new(&[]);
    // Beside `weft`, from which it starts the daemon.
    let bin = bed.path("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_weft"), bin.join("weft")).unwrap();
    let out = bed.run(&["cc", "launcher", bin.to_str().unwrap()]);
    out.ok();
    let small = out.stdout.trim_end();
    // As itself, and as a link with a compiler's name; the daemon is the large program's.
    let link = bed.path("gcc");
    std::os::unix::fs::symlink(small, &link).unwrap();
    let compile = |program: &Path, args: &[&str]| {
        let mut command = Command::new(program);
        let out = Output::of(bed.surround(command.args(args)));
        out.ok();
        fs::read(bed.path("f0.o")).unwrap()
    };
    let args = ["-O1", "-g", "-c", "f0.c"];
    let own = compile(Path::new("/usr/bin/gcc"), &args);
    assert!(compile(Path::new(small), &["gcc", "-O1", "-g", "-c", "f0.c"]) == own);
    assert!(compile(&link, &args) == own);
    let status = bed.status();
    assert_eq!(status["done"], 2, "{status}");
    assert_eq!(status["reasons"].as_array().unwrap().len(), 0, "{status}");
    let out = Output::of(bed.surround(&mut Command::new(small)));
    assert!(
        out.code == 127 && out.stderr.contains("no compiler is named"),
        "{out:?}"
    );
    // Without `weft` there is nobody to start a daemon; without workers none is needed.
    bed.run(&["cc", "stop"]).ok();
    let args = ["gcc", "-c", "f0.c"];
    let out = Output::of(
        bed.surround(Command::new(small).args(args))
            .env_remove("WEFT_CC_HOSTS"),
    );
    out.ok();
    assert_ne!(bed.run(&["cc", "status"]).code, 0);
    fs::remove_file(bin.join("weft")).unwrap();
    let out = Output::of(
        bed.surround(Command::new(small).args(args))
            .env("PATH", "/bin"),
    );
    assert!(
        out.code == 127 && out.stderr.contains("no `weft`"),
        "{out:?}"
    );
}

#[test]
fn rules_of_dependencies_are_those_of_here() {
    if !has(&["gcc"]) {
        return;
    }
    let bed = Bed::new(&[]);
    fs::create_dir(bed.path("sub")).unwrap();
    fs::write(bed.path("sub/a.h"), "#include \"../h.h\"\n").unwrap();
    fs::write(bed.path("b c.h"), "#define B 1\n").unwrap();
    let plain = "#include \"sub/a.h\"\n#include \"b c.h\"\nint x = B;\n";
    fs::write(bed.path("plain.c"), plain).unwrap();
    let named = "#include <stdc-predef.h>\n#include \"h.h\"\nint x;\n";
    fs::write(bed.path("named.c"), named).unwrap();
    let options: [&[&str]; 10] = [
        &["-MMD"],
        &["-MD"],
        &["-MMD", "-MP"],
        &["-MD", "-MP"],
        &["-MP", "-MMD", "-MT", "one two", "-MTthree"],
        &["-MD", "-MP", "-MQ", "a$b c"],
        &["-MMD", "-MP", "-MT", "o.d", "-MF", "o.d"],
        &["-Wp,-MMD,o.d"],
        &["-Wp,-MD,o.d", "-MP"],
        &["-Wp,-MD,o.d", "-Wp,-MP", "-Wp,-MT,t"],
    ];
    for source in ["plain.c", "named.c"] {
        for options in options {
            let compile = |command: &mut Command| {
                let out = Output::of(
                    bed.surround(command.args(options).args(["-c", source, "-o", "o.o"])),
                );
                out.ok();
                let rules = fs::read_to_string(bed.path("o.d")).unwrap();
                fs::remove_file(bed.path("o.d")).unwrap();
                rules
            };
            let own = compile(&mut Command::new("gcc"));
            for pull in ["0", "1"] {
                let mut command = weft();
                command.args(["cc", "gcc"]).env("WEFT_CC_PULL", pull);
                let theirs = compile(&mut command);
                assert_eq!(theirs, own, "{source} {options:?}, pull {pull}");
            }
        }
    }
    // Of `-Wp,-MP`, which workers do not take, both sources are preprocessed here.
    let status = bed.status();
    assert_eq!((&status["done"], &status["here"]), (&40.into(), &0.into()));
    assert_eq!(status["reasons"][0][1], 2, "{status}");
}

#[test]
fn a_worker_takes_the_masters_compilers() {
    if !has(&["gcc", "g++"]) {
        return;
    }
    let level = weft_cc::worker::sandbox::level();
    if !level.is_complete() {
        return eprintln!("skipped: sent compilers need a complete sandbox; here is {level}");
    }
    let bed = Bed::new(&["--accept-compilers=1G"]);
    let source = "#include <map>\n#include \"h.h\"\nint f(std::map<int, int> &m) { return m[TWICE(2)]++; }\n";
    fs::write(bed.path("a.cc"), source).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", bed.dir.path().display());
    // By names that the worker does not know.
    for (name, real, source) in [("gcc-77", "gcc", "f0.c"), ("g++-77", "g++", "a.cc")] {
        let real = Path::new("/usr/bin").join(real).canonicalize().unwrap();
        std::os::unix::fs::symlink(&real, bed.path(name)).unwrap();
        let args = ["-O1", "-g", "-c", source];
        let compile = |command: &mut Command| {
            let out = Output::of(bed.surround(command.args(args).args(["-o", "a.o"])));
            out.ok();
            fs::read(bed.path("a.o")).unwrap()
        };
        let own = compile(&mut Command::new(bed.path(name)));
        for pull in ["0", "1"] {
            let mut command = weft();
            command.args(["cc", name]).env("PATH", &path);
            let theirs = compile(command.env("WEFT_CC_PULL", pull));
            assert!(theirs == own, "{name}, pull {pull}");
        }
    }
    let status = bed.status();
    assert_eq!(status["done"], 4, "{status}");
    assert_eq!(status["reasons"].as_array().unwrap().len(), 0, "{status}");
    // One for each language, and each came once.
    let kept = fs::read_dir(bed.path("cache/weft/compilers/0")).unwrap();
    assert_eq!(
        kept.filter(|entry| entry.as_ref().unwrap().path().is_dir())
            .count(),
        2
    );
}

/// Where connections to a worker go through that end after so many bytes, counted in both directions.
fn cut(to: &str, after: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (at, to) = (listener.local_addr().unwrap().to_string(), to.to_owned());
    let left = Arc::new(Mutex::new(after));
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let (near, Ok(far)) = (near.unwrap(), TcpStream::connect(&to)) else {
                return;
            };
            for (mut from, mut into) in [(&near, &far), (&far, &near)]
                .map(|(from, into)| (from.try_clone().unwrap(), into.try_clone().unwrap()))
            {
                let left = Arc::clone(&left);
                std::thread::spawn(move || {
                    let mut part = [0; 1000];
                    while let Ok(n @ 1..) = from.read(&mut part) {
                        let mut left = left.lock().unwrap();
                        let may = n.min(*left);
                        *left -= may;
                        if into.write_all(&part[..may]).is_err() || *left == 0 {
                            break;
                        }
                    }
                    for end in [&from, &into] {
                        let _ = end.shutdown(Shutdown::Both);
                    }
                });
            }
        }
    });
    at
}

/// During the handshake, the command, the source, while it compiles, and during the object: it is made here, whole, and nothing is left beside it.
#[test]
fn a_connection_that_ends_anywhere_costs_no_object() {
    if !has(&["gcc"]) {
        return;
    }
    let mut bed = Bed::new(&[]);
    let worker = bed.at.clone();
    let compile = |bed: &Bed, program: &mut Command| {
        program.env("WEFT_LOCAL", "off");
        let args = ["-O1", "-g", "-c", "f0.c", "-o", "f0.o"];
        Output::of(bed.surround(program.args(args))).ok();
        let object = fs::read(bed.path("f0.o")).unwrap();
        fs::remove_file(bed.path("f0.o")).unwrap();
        object
    };
    let own = compile(&bed, &mut Command::new("gcc"));
    let mut whole = 0;
    for after in [
        100,
        1500,
        3000,
        5000,
        20_000,
        60_000,
        70_000,
        75_000,
        80_000,
        1 << 30,
    ] {
        bed.at = cut(&worker, after);
        let theirs = compile(&bed, weft().args(["cc", "gcc"]));
        assert!(theirs == own, "after {after} bytes");
        let status = bed.status();
        let (done, why) = (status["done"].as_u64().unwrap(), &status["reasons"]);
        assert_eq!(
            done + u64::from(why != &serde_json::json!([])),
            1,
            "after {after}: {status}"
        );
        whole += done;
        bed.run(&["cc", "stop"]).ok();
    }
    let left = fs::read_dir(bed.dir.path()).unwrap();
    let left = left.filter(|entry| {
        entry
            .as_ref()
            .unwrap()
            .file_name()
            .to_string_lossy()
            .contains(".part")
    });
    assert_eq!(
        (left.count(), (1..8).contains(&whole)),
        (0, true),
        "{whole}"
    );
}

#[test]
fn a_full_disk_costs_no_object() {
    if !has(&["gcc", "unshare", "mount"]) {
        return;
    }
    let alone = |command: &mut Command| {
        command
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    if !alone(Command::new("unshare").args(["-rm", "true"])) {
        return eprintln!("skipped: no mounts in a name space of our own");
    }
    let dir = tempfile::tempdir().unwrap();
    project(dir.path());
    let full = dir.path().join("full");
    fs::create_dir(&full).unwrap();
    // The directory for jobs has room for 32 KiB.
    let mut command = Command::new("unshare");
    command
        .args(["-rm", "sh", "-c"])
        .arg("mount -t tmpfs -o size=32k none \"$1\" && exec \"$0\" cc worker --bind 127.0.0.1:0 --dir \"$1\"")
        .arg(env!("CARGO_BIN_EXE_weft"))
        .arg(&full);
    let bed = Bed::start(dir, command);
    bed.run(&["cc", "gcc", "-O1", "-c", "f0.c", "-o", "there.o"])
        .ok();
    Output::of(bed.surround(Command::new("gcc").args(["-O1", "-c", "f0.c", "-o", "here.o"]))).ok();
    let [there, here] = ["there.o", "here.o"].map(|name| fs::read(bed.path(name)).unwrap());
    assert!(there == here);
    let status = bed.status();
    assert_eq!(status["done"], 0, "{status}");
    assert!(
        status["reasons"].to_string().contains("No space"),
        "{status}"
    );
}
