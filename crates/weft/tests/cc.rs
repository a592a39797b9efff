//! `weft cc` as a user runs it: a worker, compilations, the summary; and its benchmark with virtual workers.

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{Output, weft};

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

#[test]
fn a_build_is_summed_up_and_drawn() {
    if !has(&["gcc"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    project(dir.path());
    let config = dir.path().join("config");
    let mut worker = weft()
        .args(["cc", "worker", "--bind", "127.0.0.1:0"])
        .env("XDG_CONFIG_HOME", &config)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(worker.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let _worker = Killed(worker);
    let at = line.split_whitespace().nth(2).expect(&line).to_owned();
    let run = |args: &[&str]| {
        let mut command = weft();
        command
            .args(args)
            .current_dir(dir.path())
            .env("XDG_CONFIG_HOME", &config)
            .env("WEFT_CC_SOCKET", dir.path().join("socket"))
            .env("WEFT_CC_HOSTS", &at);
        Output::of(&mut command)
    };
    for n in 0..3 {
        run(&["cc", "gcc", "-O1", "-c", &format!("f{n}.c")]).ok();
    }
    // Linking stays here, and is not asked for.
    run(&["cc", "gcc", "-shared", "f0.o", "-o", "f.so"]);
    let out = run(&["cc", "summary", "--html", "build.html"]);
    out.ok();
    assert!(out.stdout.contains("3 compilations"), "{out:?}");
    assert!(
        out.stdout.contains(&at) && out.stdout.contains("f2.c"),
        "{out:?}"
    );
    let page = fs::read_to_string(dir.path().join("build.html")).unwrap();
    assert!(page.contains("<rect class=\"compile\"") && page.contains("f1.c"));
    let lines = run(&["cc", "summary", "--json"]);
    assert_eq!(lines.stdout.lines().count(), 3, "{lines:?}");
    run(&["cc", "stop"]).ok();
}

#[test]
fn virtual_workers_replay_a_make() {
    if !has(&["gcc", "make"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    project(dir.path());
    let json = dir.path().join("cc.jsonl");
    let mut command: Command = weft();
    command
        .args(["bench", "cc", "--workers", "2", "--seconds", "0.5"])
        .args(["--system", "rdma,pull", "--source"])
        .arg(dir.path())
        .arg("--json")
        .arg(&json);
    let out = Output::of(&mut command);
    out.ok();
    let text = fs::read_to_string(&json).unwrap();
    let points: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .filter(|line: &serde_json::Value| line["figure"] == "5.10")
        .collect();
    assert_eq!(points.len(), 2, "{text}");
    for point in points {
        // Neither compiled nor preprocessed here against its plan.
        assert_eq!(point["other_way"], 0, "{point}");
        assert!(point["jobs"].as_u64().unwrap() >= 1, "{point}");
        assert!(point["client_cpu_ms"].as_f64().unwrap() > 0.0, "{point}");
        let preprocesses = point["preprocess_cpu_ms"].as_f64().unwrap() > 1.0;
        assert_eq!(preprocesses, point["system"] == "weft cc", "{point}");
    }
}
