//! The program around its subcommands: help, manual pages, completion, hello, doctor.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::common::{Output, copy_program, names, weft};

#[test]
fn help_names_every_subcommand_and_the_exit_codes() {
    let out = Output::of(weft().arg("--help"));
    out.ok();
    for word in [
        "cp",
        "key",
        "hello",
        "bench",
        "stat",
        "verbs",
        "doctor",
        "demo",
        "man",
        "completion",
        "Exit status",
        "Environment",
        "WEFT_LOCAL ",
        "WEFT_LOCAL_DIR",
        "WEFT_STAT",
        "  3  ",
    ] {
        assert!(out.stdout.contains(word), "{word}: {}", out.stdout);
    }
    let out = Output::of(weft().args(["cp", "--help"]));
    out.ok();
    for word in [
        "--listen <DIR>",
        "--key <FILE>",
        "--open",
        "--once",
        "--recursive",
        "--no-clobber",
        "Examples:",
    ] {
        assert!(out.stdout.contains(word), "{word}: {}", out.stdout);
    }
    let out = Output::of(&mut weft());
    assert_eq!(out.code, 2);
    let out = Output::of(weft().args(["cp", "onlyone"]));
    assert_eq!(out.code, 2);
    assert!(out.stderr.contains("HOST[:PORT]:DIR"), "{}", out.stderr);
    let out = Output::of(weft().args(["cp", "f", "host:../etc"]));
    assert_eq!(out.code, 2);
    assert!(out.stderr.contains("lead out"), "{}", out.stderr);
}

#[test]
fn manual_pages() {
    let out = Output::of(weft().arg("man"));
    out.ok();
    assert!(
        [".TH weft 1", "doctor", "WEFT_LOCAL_DIR"]
            .iter()
            .all(|word| out.stdout.contains(word)),
        "{}",
        out.stdout
    );
    let dir = tempfile::tempdir().unwrap();
    Output::of(weft().args(["man", "--dir", dir.path().to_str().unwrap()])).ok();
    let pages = names(dir.path());
    for page in [
        "weft.1",
        "weft-cp.1",
        "weft-key.1",
        "weft-hello.1",
        "weft-bench.1",
        "weft-doctor.1",
        "weft-stat.1",
        "weft-verbs.1",
    ] {
        assert!(pages.iter().any(|p| p == page), "{page} in {pages:?}");
    }
    let out = Output::of(weft().args(["man", "--dir", "/nowhere/at/all"]));
    assert_eq!(out.code, 1);
    assert!(out.stderr.contains("try: "), "{}", out.stderr);
}

#[test]
fn what_a_newcomer_types() {
    let out = Output::of(weft().args(["man", "cp"]));
    out.ok();
    assert!(out.stdout.contains("clobber"), "{}", out.stdout);
    assert!(out.stdout.contains("\"weft 0."), "whose page it is");
    let out = Output::of(weft().args(["man", "fs", "serve"]));
    out.ok();
    assert!(out.stdout.contains("quota"), "{}", out.stdout);
    Output::of(weft().args(["completions", "bash"])).ok();
    let out = Output::of(weft().args(["man", "nosuch"]));
    assert_eq!(out.code, 2);
    assert!(
        out.stderr.contains("no subcommand `nosuch`"),
        "{}",
        out.stderr
    );
    let out = Output::of(weft().arg("version"));
    out.ok();
    assert!(out.stdout.starts_with("weft "), "{}", out.stdout);
    let home = tempfile::tempdir().unwrap();
    let mut key = weft();
    let key = key
        .args(["key", "show"])
        .env("XDG_CONFIG_HOME", home.path());
    let out = Output::of(key);
    assert_eq!(out.code, 1);
    assert!(out.stderr.contains("no key pair"), "{}", out.stderr);
    let out = Output::of(weft().args(["join", "--help"]).env("PATH", "/nowhere"));
    assert!(out.stdout.contains("Data Roundabout"), "{}", out.stdout);
    let out = Output::of(weft().args(["stat", "abc"]));
    assert_eq!(out.code, 2);
    assert!(out.stderr.contains("number of a process"), "{}", out.stderr);
}

/// `weft bench` and `weft join` are programs of their own: found beside weft, given all arguments as they are, and asked for when missing.
#[test]
fn programs_of_their_own_are_found_beside_weft() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("weft");
    copy_program(env!("CARGO_BIN_EXE_weft"), &copy);
    let run = |args: &[&str]| Output::of(Command::new(&copy).args(args).env("PATH", "/nowhere"));
    for (name, build) in [("bench", "./x build"), ("join", "apps/join")] {
        let out = run(&[name, "verbs"]);
        assert_eq!(out.code, 1, "{out:?}");
        let lack = format!("weft-{name} is neither beside weft nor on PATH");
        assert!(out.stderr.contains(&lack), "{}", out.stderr);
        assert!(out.stderr.contains(build), "{}", out.stderr);

        let program = dir.path().join(format!("weft-{name}"));
        let script = "#!/bin/sh\nprintf '<%s>' \"$@\"\nexit 7\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let out = run(&[name, "verbs", "--help", "-q", "a b"]);
        assert_eq!(out.code, 7, "{out:?}");
        assert_eq!(out.stdout, "<verbs><--help><-q><a b>");
    }
}

#[test]
fn tables_are_ascii_where_the_locale_is() {
    let doctor = |locale: &str| Output::of(weft().arg("doctor").env("LC_ALL", locale));
    let plain = doctor("C");
    assert!(plain.stdout.is_ascii(), "{}", plain.stdout);
    assert!(plain.stdout.starts_with("+--"), "{}", plain.stdout);
    assert!(doctor("C.UTF-8").stdout.starts_with('┌'));
}

#[test]
fn completion_scripts() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let out = Output::of(weft().args(["completion", shell]));
        out.ok();
        assert!(
            out.stdout.contains("weft") && out.stdout.contains("doctor"),
            "{shell}"
        );
    }
    assert_eq!(Output::of(weft().args(["completion", "tcsh"])).code, 2);
}

#[test]
fn hello_in_one_process_and_in_two() {
    let out = Output::of(weft().arg("hello"));
    out.ok();
    assert!(
        out.stdout
            .contains("read back \"Hello iWARP!\", as written"),
        "{}",
        out.stdout
    );

    let mut responder = weft()
        .args(["hello", "--listen", "127.0.0.1:0"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = std::io::BufReader::new(responder.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    let addr = line.trim().rsplit(' ').next().unwrap().to_owned();
    Output::of(weft().args(["hello", &addr])).ok();
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut stdout, &mut rest).unwrap();
    assert!(responder.wait().unwrap().success());
    assert!(rest.contains("the buffer holds \"Hello iWARP!\""), "{rest}");
    assert!(rest.contains("connected over shared memory"), "{rest}");
    let out = Output::of(weft().args(["hello", &addr]));
    assert_eq!(out.code, 3, "nobody is there any more: {}", out.stderr);
}

#[test]
fn the_example_prints_what_the_figure_says() {
    // Cargo builds examples of another package only when asked to; the library's doc test runs the same.
    let source = include_str!("../../doors/iw/examples/hello_iwarp.rs");
    assert!(source.lines().count() < 60);
}

#[test]
fn the_demo_moves_a_file_and_writes_one_page() {
    let dir = tempfile::tempdir().unwrap();
    let html = dir.path().join("report.html");
    let out = Output::of(weft().args([
        "demo",
        "--no-verbs",
        "--size",
        "5M",
        "--runs",
        "2",
        "--dir",
        dir.path().to_str().unwrap(),
        "--html",
        html.to_str().unwrap(),
    ]));
    out.ok();
    assert!(out.stdout.contains("of plain TCP"), "{}", out.stdout);
    let page = std::fs::read_to_string(&html).unwrap();
    assert!(page.contains("<svg") && page.contains("A file of 5 MiB"));
    // The page opens with one picture of what is gained, and the terminal says it too.
    assert!(out.stdout.contains("Largest gain: "), "{}", out.stdout);
    let picture = page.find("times as good as plain TCP").unwrap();
    assert!(picture < page.find("A file of 5 MiB").unwrap());
    for foreign in ["<script", "<link", "src=\"http", "@import"] {
        assert!(!page.contains(foreign), "the page stands alone: {foreign}");
    }
    assert_eq!(names(dir.path()), ["report.html"], "nothing else is left");
    let out = Output::of(weft().args(["demo", "--html", "/nowhere/at/all.html"]));
    assert_eq!(out.code, 1);
    assert!(
        out.stderr.contains("cannot write /nowhere"),
        "{}",
        out.stderr
    );
    // A report that cannot be written whole is not there, and one of before is not lost.
    std::fs::write(&html, "of yesterday").unwrap();
    let text = html.to_str().unwrap();
    let out = Output::of(weft().args(["demo", "--dir", "/nowhere", "--html", text]));
    assert_eq!(out.code, 1);
    assert_eq!(std::fs::read_to_string(&html).unwrap(), "of yesterday");
}

#[test]
fn doctor_as_table_and_json() {
    let out = Output::of(weft().arg("doctor"));
    out.ok();
    assert!(
        out.stdout.contains("RDMA over loopback") && out.stdout.contains("OK"),
        "{}",
        out.stdout
    );
    let out = Output::of(weft().args(["doctor", "--json"]));
    out.ok();
    let checks: Vec<serde_json::Value> = out
        .stdout
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert!(checks.len() >= 18);
    assert!(
        checks
            .iter()
            .all(|c| c["verdict"] == "OK" || !c["remedy"].as_str().unwrap().is_empty())
    );
}

#[test]
fn hello_says_why_it_is_on_tcp() {
    let out = Output::of(weft().arg("hello").env("WEFT_LOCAL", "off"));
    out.ok();
    assert!(out.stdout.contains("connected over TCP"), "{}", out.stdout);
}

/// The verdict and the finding of one of the doctor's checks.
fn diagnosis(doctor: &mut Command, check: &str) -> (String, String) {
    let out = Output::of(doctor);
    let checks = out.stdout.lines().map(|l| serde_json::from_str(l).unwrap());
    let check: serde_json::Value = checks
        .into_iter()
        .find(|c: &serde_json::Value| c["check"] == check)
        .unwrap();
    let text = |key: &str| check[key].as_str().unwrap().to_owned();
    (text("verdict"), text("finding"))
}

#[test]
fn the_doctor_tries_the_same_host_transport() {
    let json = || {
        let mut doctor = weft();
        doctor.args(["doctor", "--json"]);
        doctor
    };
    let (verdict, finding) = diagnosis(&mut json(), "same-host transport");
    assert!(finding.contains("rings"), "{finding}");
    // Where other processes may not be traced, that part is missed and named.
    assert_eq!(verdict == "OK", !finding.contains("does not"), "{finding}");

    let (verdict, _) = diagnosis(json().env("WEFT_LOCAL", "off"), "WEFT_LOCAL");
    assert_eq!(verdict, "WARN");
    let (verdict, finding) = diagnosis(json().env("WEFT_LOCAL", "on"), "WEFT_LOCAL");
    assert_eq!(verdict, "MISSING");
    assert!(finding.contains("off, auto or require"), "{finding}");
    let (verdict, finding) = diagnosis(
        json().env("WEFT_LOCAL_DIR", "/nowhere/at/all"),
        "WEFT_LOCAL",
    );
    assert_eq!(verdict, "WARN");
    assert!(finding.contains("No such file"), "{finding}");

    // Without long files there are no arenas: the doctor sees the cause and the effect.
    let limited = || {
        let mut shell = Command::new("sh");
        shell.args([
            "-c",
            "ulimit -f 1000; exec \"$0\" doctor --json",
            env!("CARGO_BIN_EXE_weft"),
        ]);
        shell
    };
    let (verdict, finding) = diagnosis(&mut limited(), "shared memory limits");
    assert_eq!(verdict, "WARN");
    assert!(finding.contains("RLIMIT_FSIZE"), "{finding}");
    let (verdict, finding) = diagnosis(&mut limited(), "same-host transport");
    assert_eq!(verdict, "WARN");
    assert!(finding.contains("stayed on TCP"), "{finding}");
}

#[test]
fn the_other_half_of_the_doctor_needs_a_doctor() {
    let out = Output::of(weft().args(["doctor", "--peer", "127.0.0.1:1"]));
    assert_eq!(out.code, 1);
    assert!(out.stderr.contains("weft: "), "{}", out.stderr);
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    for args in [["man"].as_slice(), &["dissector"], &["hello"]] {
        let full = std::fs::File::options().write(true).open("/dev/full");
        let mut command = weft();
        let out = command.args(args).stdout(full.unwrap()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains("standard output: No space"), "{said}");
        assert!(said.contains("free some space"), "{said}");
    }
    // A reader that has gone is no error.
    let program = env!("CARGO_BIN_EXE_weft");
    let line = format!("set -o pipefail; {program} man | head -1");
    let mut bash = Command::new("bash");
    Output::of(bash.args(["-c", &line])).ok();
}

/// The responder waits for a request that never comes: that must not keep the program.
#[test]
fn hello_ends_where_nothing_can_be_connected() {
    let program = env!("CARGO_BIN_EXE_weft");
    let out = Output::of(Command::new("timeout").args(["60", "unshare", "-rn", program, "hello"]));
    if out.stderr.contains("unshare") {
        println!("skipped: there are no user namespaces here: {}", out.stderr);
    } else {
        assert_eq!(out.code, 3, "{out:?}");
        assert!(out.stderr.contains("ip link set lo up"), "{}", out.stderr);
    }
    let line = format!("ulimit -n 12; exec timeout 60 {program} hello");
    let out = Output::of(Command::new("bash").args(["-c", &line]));
    assert_eq!(out.code, 1, "{out:?}");
    assert!(out.stderr.contains("ulimit -n 4096"), "{}", out.stderr);
}

/// Each answer says what is wrong and what to do, in the words of the subcommand that was used, and without numbers of the system.
#[test]
fn wrong_uses_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let missing = missing.to_str().unwrap();
    let cases: &[(&[&str], i32, &str)] = &[
        (&["demo", "--html", "x.html", "--size", "0"], 2, "1M"),
        (&["run", "--from", "10", "--", "true"], 2, "at least a page"),
        (&["fs", "list", "-l", "localhost:1"], 3, "cannot reach"),
        (&["cp", missing, "."], 2, "HOST:FILE... DIR"),
        (
            &["cp", "-", "localhost:"],
            1,
            "standard input cannot be sent",
        ),
        (&["cp", missing, "localhost:"], 1, "no source can be used"),
        (
            &["fs", "put", missing, "/rdma/localhost:1/x"],
            1,
            "No such file or directory",
        ),
        (&["run", "--nosuch", "true"], 2, "no option --nosuch"),
        (&["verbs", "--nosuch", "true"], 2, "no option --nosuch"),
        (&["fs", "run", "--nosuch", "true"], 2, "no option --nosuch"),
        (&["mpi", "--", "nosuch"], 127, "install an MPI"),
        (&["verbs", "--", "/tmp"], 126, "not executable"),
        (
            &["cp", "--timeout", "x", "f", "h:"],
            2,
            "write a whole number",
        ),
        (
            &["cp", "Cargo.toml", "me@nosuch.invalid:"],
            3,
            "write the host alone",
        ),
        (&["hello", "fe80::1"], 3, "fe80::1%eth0"),
        (&["media", "serve", "--memory", "1.5G", "."], 2, "K, M, G"),
        (&["media", "live", "--ring", "1KiB", "cam"], 2, "from 64K"),
        (&["cp", "--max-senders", "0", "--listen", "."], 2, "1..="),
        (
            &["fs", "mount", "/rdma/localhost", "Cargo.toml"],
            2,
            "no directory",
        ),
        (&["stat", "--watch", "1"], 1, "--watch=2"),
        (&["key", "--file", "/tmp"], 2, "is not a regular file"),
        (
            &["key", "--force", "--file", "/tmp"],
            1,
            "it is a directory",
        ),
        (&["key", "--show", "--file", missing], 1, "weft key --file"),
    ];
    for (args, code, words) in cases {
        let out = Output::of(weft().args(*args));
        assert_eq!(out.code, *code, "{args:?}: {}", out.stderr);
        assert!(out.stderr.contains(words), "{args:?}: {}", out.stderr);
    }
}

/// What the system lacks, or a variable says, is what the doctor's remedy is about.
#[test]
fn the_doctor_names_the_variable_that_is_wrong() {
    let mut doctor = weft();
    let out = Output::of(doctor.arg("doctor").env("WEFT_TLS", "perhaps"));
    assert_eq!(out.code, 1);
    assert!(out.stdout.contains("unset the variable"), "{}", out.stdout);
}

/// Messages that nobody takes do not end a program, nor change its exit status.
#[test]
fn messages_that_cannot_be_written_are_no_failure() {
    let full = std::fs::File::options().write(true).open("/dev/full");
    let mut command = weft();
    let command = command.args(["man", "nosuch"]).stderr(full.unwrap());
    assert_eq!(command.status().unwrap().code(), Some(2));
}

/// What a program that is interrupted had in memory of the machine does not stay there.
#[test]
fn an_interrupted_demo_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let html = dir.path().join("report.html");
    let mut demo = weft();
    let demo = demo.args(["demo", "--size", "64M", "--dir", path, "--html"]);
    let mut demo = demo
        .arg(&html)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = std::io::BufReader::new(demo.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    let pid = rustix::process::Pid::from_child(&demo);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = demo.wait().unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    assert_eq!(signal, Some(15), "{status}");
    assert_eq!(names(dir.path()), [] as [&str; 0]);
}
