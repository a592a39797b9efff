//! Workers, a daemon and real compilers on one machine: what comes back is what the compiler here makes, whatever happens on the way.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use crate::common::{Bed, config, has_gcc, long_text, until, worker};
use weft_cc::ipc::{Answer, Ask, Line};
use weft_cc::worker::sandbox::Files;
use weft_cc::worker::{Config, Worker};
use weft_cc::{Endpoint, options};

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
    if weft_cc::worker::sandbox::level().files == Files::Free {
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
    let itself = run("ln -s ../weft-cc gcc-itself; gcc-itself -c f0.c");
    assert_eq!(itself.status.code(), Some(127), "{itself:?}");
    assert!(String::from_utf8_lossy(&itself.stderr).contains("is weft cc itself"));
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

/// Sources and options that are not everybody's: what is left is what the compiler here leaves, by a worker or, for the reason that is named, by itself.
#[test]
fn odd_sources_and_options_leave_the_same() {
    const WORKER: &str = "";
    if !has_gcc() {
        return;
    }
    let bed = Bed::new(1 << 20);
    let (_a, a) = worker(config());
    let make = bed.project(1, &[&a], 0);
    let write = |name: &str, text: &str| std::fs::write(bed.path(name), text).unwrap();
    std::fs::create_dir(bed.path("out")).unwrap();
    write(
        "a.c",
        "#include \"h.h\"\nint f(int a) { return a > 3 ? puts(\"x\") : SQUARE(a); }\n",
    );
    write(
        "pieces.c",
        "__asm__(\".data; .INC\" \"BIN \\\"/usr/bin/env\\\"\"); int x;\n",
    );
    write("bin.c", "__asm__(\".data; .incbin \\\"h.h\\\"\"); int x;\n");
    write("time.c", "const char *t = __DATE__ __TIME__;\n");
    write(
        "pch.c",
        "#include \"pre.h\"\nint g(void) { return puts(\"y\"); }\n",
    );
    write("pre.h", "#include <stdio.h>\n");
    write("args", "-O2 '-DN=a b' -c a.c -o out/a.o");
    write("bad.c", "int x = ;\n");
    let mut header = Command::new("gcc");
    let header = header
        .args(["-x", "c-header", "pre.h"])
        .current_dir(bed.dir.path());
    assert!(header.status().unwrap().success());
    let mut done = 0;
    let left = || {
        let mut all: Vec<_> = ["", "out"]
            .iter()
            .flat_map(|dir| std::fs::read_dir(bed.path(dir)).unwrap())
            .map(|entry| entry.unwrap().path())
            .filter(|path| {
                let extension = path.extension().and_then(|extension| extension.to_str());
                extension.is_some_and(|e| ["o", "dwo", "gcno", "s", "d"].contains(&e))
            })
            .map(|path| {
                (
                    path.clone(),
                    std::fs::read(&path).unwrap(),
                    std::fs::remove_file(path),
                )
            })
            .map(|(path, bytes, _)| (path, bytes))
            .collect();
        all.sort();
        all
    };
    for (line, files, why) in [
        ("-O1 -g -c a.c", 1, WORKER),
        ("-O1 -g -gsplit-dwarf -c a.c -o out/a.o", 2, WORKER),
        ("-O1 -g -gsplit-dwarf -c a.c", 2, WORKER),
        (
            "-O1 --coverage -frandom-seed=7 -c a.c -MD -o out/a.c.o",
            3,
            WORKER,
        ),
        (
            "-O1 -fprofile-arcs -ftest-coverage -frandom-seed=7 -g0 -c a.c",
            2,
            WORKER,
        ),
        (
            "-O1 --coverage -frandom-seed=7 -g -gsplit-dwarf -c a.c",
            3,
            "with coverage",
        ),
        ("@args", 1, WORKER),
        ("-O2 -S a.c -o out/a.s", 1, WORKER),
        ("-O2 -march=native -c a.c", 1, "native"),
        ("-c bin.c", 1, ".incbin"),
        ("-c pieces.c", 1, "the assembler read /usr/bin/env"),
        ("-pipe -c pieces.c", 1, "the assembler read /usr/bin/env"),
        ("-c time.c", 1, "__"),
        ("-O0 -c pch.c", 1, WORKER),
        ("-fplugin=./none.so -c a.c", 0, "plugin"),
        ("-c bad.c", 0, "failed"),
        ("-c none.c", 0, "preprocessing failed"),
    ] {
        let run = |program: &str, args: &[&str]| {
            let mut command = Command::new(program);
            let vars = make
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?)));
            command.args(args).args(line.split(' ')).envs(vars);
            // For `__TIME__`.
            command.env("SOURCE_DATE_EPOCH", "1000000000");
            let ended = command.current_dir(bed.dir.path()).output().unwrap();
            (ended.status.code(), left(), ended.stderr)
        };
        let theirs = run("./weft-cc", &["gcc"]);
        let ours = run("gcc", &[]);
        let names = |all: &[(std::path::PathBuf, Vec<u8>)]| -> Vec<_> {
            all.iter()
                .map(|(path, bytes)| (path.clone(), bytes.len()))
                .collect()
        };
        assert_eq!(
            (theirs.0, names(&theirs.1)),
            (ours.0, names(&ours.1)),
            "{line}"
        );
        assert!(theirs.1 == ours.1, "{line}: they differ");
        assert_eq!(theirs.1.len(), files, "{line}");
        assert_eq!(
            String::from_utf8_lossy(&theirs.2),
            String::from_utf8_lossy(&ours.2),
            "{line}"
        );
        let status = bed.status();
        done += u64::from(why == WORKER);
        let there = why == WORKER
            || status
                .reasons
                .iter()
                .any(|(reason, _)| reason.contains(why));
        assert!(status.done == done && there, "{line}: {status:?}");
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
    let e = Worker::start(nowhere).err().unwrap();
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
    if level.files == Files::Free {
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
