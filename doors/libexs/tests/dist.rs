//! libexs as programs get it: the exported names, the manual pages, and C programs built against it with pkg-config and run.

mod common;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use common::{dynamic, exported, good, is_of_the_system, root, text};

/// The output of `./x dist` from a debug build, made once.
fn dist() -> &'static Path {
    static DIST: OnceLock<tempfile::TempDir> = OnceLock::new();
    DIST.get_or_init(|| common::lay_out("libexs")).path()
}

/// The calls that the header declares.
fn declared() -> BTreeSet<String> {
    let header = std::fs::read_to_string(root().join("include/sys/exs.h")).unwrap();
    let header = header.split("/* ---- calls").nth(1).unwrap();
    header
        .lines()
        .filter_map(|line| line.split_once('(')?.0.rsplit(' ').next())
        .filter(|name| name.starts_with("exs_"))
        .map(Into::into)
        .collect()
}

#[test]
fn the_library_exports_what_the_header_declares_and_nothing_else() {
    let library = dist().join("lib/libexs.so");
    let expected: BTreeSet<String> = declared()
        .iter()
        .map(|name| format!("{name}@@EXS_1.0"))
        .collect();
    assert!(expected.len() > 60);
    assert_eq!(exported(&library), expected);

    let dynamic = dynamic(&library);
    assert_eq!(dynamic.soname, "libexs.so.0");
    let needed = dynamic.needed;
    assert!(
        needed.iter().all(|library| is_of_the_system(library)),
        "{needed:?}"
    );
}

#[test]
fn the_header_compiles_as_c_and_as_cplusplus_by_itself() {
    for (compiler, standard) in [
        ("cc", "c11"),
        ("cc", "c17"),
        ("c++", "c++11"),
        ("c++", "c++20"),
    ] {
        for header in ["exs.h", "sys/exs.h"] {
            let language = if compiler == "cc" { "c" } else { "c++" };
            good(
                Command::new(compiler)
                    .args([&format!("-std={standard}"), "-x", language])
                    .args(["-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"])
                    .arg("-I")
                    .arg(dist().join("include"))
                    .arg(dist().join("include").join(header)),
            );
        }
    }
}

/// Compiles a program as a user would.
fn compile(source: &Path, flags: &[&str]) -> PathBuf {
    let program = dist().join(source.file_stem().unwrap());
    let flags_of_pkg = text(&good(
        Command::new("pkg-config")
            .env("PKG_CONFIG_PATH", dist().join("lib/pkgconfig"))
            .args(["--cflags", "--libs", "exs"]),
    ));
    good(
        Command::new("cc")
            .args([
                "-O1",
                "-g",
                "-Wall",
                "-Wextra",
                "-pedantic",
                "-Werror",
                "-pthread",
            ])
            .args(flags)
            .arg("-o")
            .arg(&program)
            .arg(source)
            .args(flags_of_pkg.split_whitespace()),
    );
    program
}

fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", dist().join("lib"));
    command
}

const STEPS: [&str; 5] = [
    "0-plain-sockets",
    "1-sync",
    "2-registered",
    "3-async",
    "4-small-packets",
];

fn example(name: &str) -> PathBuf {
    let source = root().join("examples/exs").join(format!("{name}.c"));
    compile(&source, &["-std=c11", "-D_POSIX_C_SOURCE=200809L"])
}

/// A server, killed on drop if the test fails.
struct Server {
    child: Child,
    port: String,
}

impl Server {
    fn start(mut command: Command, address: &str) -> Server {
        let mut child = command
            .args(["server", address])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let port = line
            .strip_prefix("port ")
            .unwrap_or_else(|| panic!("{line:?}"));
        Server {
            port: port.trim().to_owned(),
            child,
        }
    }

    fn ended_well(mut self) {
        let status = self.child.wait().unwrap();
        assert!(status.success(), "server: {status}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn each_step_of_the_examples_does_the_same_work_with_each_other() {
    let programs: Vec<PathBuf> = STEPS.iter().map(|name| example(name)).collect();
    let mut lines = BTreeSet::new();
    for address in ["127.0.0.1", "::1"] {
        for (s, server) in programs.iter().enumerate() {
            for (c, client) in programs.iter().enumerate() {
                if (s == 0) != (c == 0) {
                    continue; // plain sockets speak to plain sockets
                }
                let server = Server::start(command(server), address);
                let mut client = command(client);
                let output = good(client.args(["client", address, &server.port]));
                server.ended_well();
                let line = text(&output);
                let same = line.split(", ").take(2).map(str::trim).collect::<Vec<_>>();
                lines.insert(same.join(", "));
            }
        }
    }
    let lines: Vec<String> = lines.into_iter().collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("100 messages and 256 blocks, checksum "));
}

#[test]
fn an_example_whose_server_is_not_there_says_so() {
    let client = example("1-sync");
    let output = command(&client)
        .args(["client", "127.0.0.1", "1"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("Connection refused"));
}

#[test]
fn the_calls_do_what_the_pages_say() {
    for source in ["conformance.c", "calls.c"] {
        let source = root().join("doors/libexs/tests").join(source);
        let program = compile(&source, &["-std=gnu11"]);
        good(&mut command(&program));
        good(command(&program).env("WEFT_LOCAL", "off")); // and over TCP
    }
}

/// The program that papers/results/floor.md measures: the same source for plain sockets and for EXS; only the names of the calls differ.
#[test]
fn a_poll_server_is_ported_by_the_names_of_its_calls() {
    let source = root().join("doors/libexs/tests/poll_server.c");
    for flags in [&["-std=gnu11", "-DPLAIN"][..], &["-std=gnu11"]] {
        let program = compile(&source, flags);
        let took = text(&good(command(&program).args(["200", "3"])));
        assert!(took.trim().parse::<f64>().unwrap() > 0.0, "{took}");
    }
}

/// The source with `exs_sync_` before the name of every call that the header has.
fn prefixed(source: &str) -> String {
    let is_of_a_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut out = String::new();
    let mut rest = source;
    while let Some(at) = rest.find('(') {
        let (before, after) = rest.split_at(at);
        let name = before.rsplit(|c| !is_of_a_name(c)).next().unwrap();
        let call = format!("exs_sync_{name}");
        out += &before[..at - name.len()];
        out += if declared().contains(&call) {
            &call
        } else {
            name
        };
        out.push('(');
        rest = &after[1..];
    }
    out + rest
}

/// A server in the usual form of epoll(7) is ported by the prefix alone, level-triggered and edge-triggered, and serves several clients.
#[test]
fn an_epoll_server_is_ported_by_the_prefix() {
    let plain = root().join("doors/libexs/tests/epoll_server.c");
    let ported = dist().join("epoll_server_exs.c");
    let source = prefixed(&std::fs::read_to_string(&plain).unwrap());
    let (head, body) = source.split_once("#include").unwrap();
    let source = format!("{head}#include <sys/exs.h>\n#include{body}");
    std::fs::write(&ported, source).unwrap();
    for source in [plain, ported] {
        let program = compile(&source, &["-std=gnu11"]);
        for trigger in ["level", "edge"] {
            let mut server = command(&program);
            server.stdin(Stdio::piped());
            let mut server = Server::start(server, trigger);
            let clients = (0..4).map(|_| {
                let mut client = command(&program);
                client.args(["client", &server.port, "200"]);
                client.stdout(Stdio::piped()).spawn().unwrap()
            });
            for client in clients.collect::<Vec<_>>() {
                let output = client.wait_with_output().unwrap();
                assert!(output.status.success(), "{trigger}: {}", output.status);
                assert_eq!(text(&output), "200 answers\n");
            }
            drop(server.child.stdin.take());
            server.ended_well();
        }
    }
}

/// No invalid access, and no decision on uninitialized memory.
#[test]
fn valgrind_finds_nothing_in_the_last_example() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("skipped: there is no valgrind");
        return;
    }
    let program = example("4-small-packets");
    let valgrind = || {
        let mut command = command(Path::new("valgrind"));
        command
            .args([
                "--quiet",
                "--error-exitcode=99",
                "--leak-check=no",
                // A thread that spins would keep the only lock from the others.
                "--fair-sched=try",
                "--trace-children=no",
            ])
            .arg(&program);
        command
    };
    let server = Server::start(valgrind(), "127.0.0.1");
    let output = valgrind()
        .args(["client", "127.0.0.1", &server.port])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    server.ended_well();
}

/// The manual pages, as `man` finds them.
fn pages() -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for section in ["man3", "man7"] {
        for entry in std::fs::read_dir(dist().join("share/man").join(section)).unwrap() {
            pages.push(entry.unwrap().path());
        }
    }
    pages
}

#[test]
fn every_call_has_a_page_that_names_it() {
    let mut documented = BTreeSet::new();
    for page in pages() {
        let mut text = String::new();
        std::fs::File::open(&page)
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        let name = page.file_stem().unwrap().to_str().unwrap().to_owned();
        if let Some(link) = text.strip_prefix(".so ") {
            text = std::fs::read_to_string(dist().join("share/man").join(link.trim())).unwrap();
        }
        if page.extension().is_some_and(|section| section == "3") {
            let prototype = format!(".Fn {name}\n");
            let other = format!(".Fo {name}\n");
            let simple = format!(".Fn {name} ");
            assert!(
                [prototype, other, simple]
                    .iter()
                    .any(|form| text.contains(form.as_str())),
                "{name}: no prototype"
            );
            documented.insert(name);
        }
    }
    assert_eq!(documented, declared());
}

#[test]
fn mandoc_has_no_complaints() {
    if Command::new("mandoc").arg("-h").output().is_err() {
        eprintln!("skipped: there is no mandoc");
        return;
    }
    for page in std::fs::read_dir(root().join("doors/libexs/man")).unwrap() {
        let page = page.unwrap().path();
        let lint = Command::new("mandoc")
            .args(["-T", "lint", "-W", "warning"])
            .arg(&page)
            .output()
            .unwrap();
        assert!(
            lint.status.success() && lint.stdout.is_empty(),
            "{}",
            String::from_utf8_lossy(&lint.stdout)
        );
    }
}
