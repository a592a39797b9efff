//! C programs against Debian's header and our library: the behaviour of the manual pages, in shared memory and over TCP, and the capabilities of the devices.

use crate::common;

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{good, root, text};

/// Our library, and one of the programs of this folder, linked with it.
fn built(name: &str) -> Option<(tempfile::TempDir, PathBuf)> {
    for header in ["infiniband/verbs.h", "rdma/rsocket.h"] {
        if !Path::new("/usr/include").join(header).exists() {
            eprintln!("skipped: the headers of libibverbs and librdmacm are not installed");
            return None;
        }
    }
    let dist = common::lay_out("verbs");
    let program = dist.path().join(name);
    let source = root()
        .join("doors/libibverbs/tests")
        .join(format!("{name}.c"));
    good(
        Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-g"])
            .arg("-o")
            .args([&program, &source])
            .arg("-L")
            .arg(dist.path().join("lib"))
            .args(["-libverbs", "-lrdmacm", "-lpthread"]),
    );
    Some((dist, program))
}

fn run(dist: &Path, program: &Path) -> Command {
    let mut run = Command::new(program);
    run.env("LD_LIBRARY_PATH", dist.join("lib"))
        .env_remove("WEFT_DEVICES")
        .env_remove("WEFT_FAULTS");
    run
}

#[test]
fn the_manual_pages_promises_are_kept() {
    let Some((dist, program)) = built("conformance") else {
        return;
    };
    for local in ["auto", "off"] {
        good(run(dist.path(), &program).env("WEFT_LOCAL", local));
    }
}

/// The same on RoCE, in a network of its own: port 4791 is one process's. Left out are cases that need a second process of one address, XRC, and the
/// retries of a receiver that is not ready: `rnr_retry` 0 gives up at once on RoCE, as on adapters.
#[test]
fn the_manual_pages_promises_are_kept_on_roce() {
    const LEFT_OUT: [&str; 7] = [
        "receiver_not_ready",
        "rights",
        "forks",
        "filtered",
        "domains_by_file",
        "xrc",
        "opened",
    ];
    in_a_network_of_its_own(&LEFT_OUT, &[("WEFT_IB_WIRE", "roce")]);
}

/// The same where each queue pair takes the wire that its peer needs: shared memory; and RoCE for all, because nobody may have shared memory, so each
/// queue pair is replaced on its way to RTR. An address handle opens UDP port 4791, which needs a descriptor (`addresses`).
#[test]
fn the_manual_pages_promises_are_kept_where_the_wire_is_chosen() {
    const ROCE_ALONE: [&str; 5] = [
        "addresses",
        "receiver_not_ready",
        "rights",
        "forks",
        "filtered",
    ];
    let auto = ("WEFT_IB_WIRE", "auto");
    in_a_network_of_its_own(&["addresses", "rights", "forks"], &[auto]);
    in_a_network_of_its_own(&ROCE_ALONE, &[auto, ("WEFT_LOCAL", "off")]);
}

fn in_a_network_of_its_own(left_out: &[&str], settings: &[(&str, &str)]) {
    let Some((dist, program)) = built("conformance") else {
        return;
    };
    let source = std::fs::read_to_string(root().join("doors/libibverbs/tests/conformance.c"));
    let source = source.unwrap();
    let (_, table) = source
        .split_once("named_case cases[] = {")
        .expect("the table of cases");
    let names = table
        .split("{\"")
        .skip(1)
        .filter_map(|case| case.split('"').next());
    let names: Vec<_> = names.filter(|name| !left_out.contains(name)).collect();
    assert!(names.len() > 40, "{names:?}");
    let alone = Command::new("unshare").args(["--net", "true"]).status();
    if !alone.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no network namespace may be made here");
        return;
    }
    let program = program.to_str().expect("a path of a test");
    let line = format!("ip link set lo up && exec {program} {}", names.join(" "));
    let mut run = run(dist.path(), Path::new("unshare"));
    good(
        run.args(["--net", "sh", "-c", &line])
            .envs(settings.iter().copied()),
    );
}

#[test]
fn another_process_imports_what_is_shared() {
    let Some((dist, program)) = built("imports") else {
        return;
    };
    for local in ["auto", "off"] {
        good(run(dist.path(), &program).env("WEFT_LOCAL", local));
    }
}

#[test]
fn limits_are_where_the_page_says() {
    let Some((dist, program)) = built("limits") else {
        return;
    };
    for local in ["auto", "off"] {
        good(run(dist.path(), &program).env("WEFT_LOCAL", local));
    }
}

/// The body of a function of C or Rust with this name, in a file of these folders.
fn function(file: &str, name: &str) -> Option<String> {
    let folders = [
        "doors/libibverbs/tests",
        "tests/dropin/tests/programs",
        "doors/abi/tests",
    ];
    let mut paths = folders.iter().map(|folder| root().join(folder).join(file));
    let source = paths.find_map(|path| std::fs::read_to_string(path).ok())?;
    let begin = [
        format!("static void {name}("),
        format!("static int {name}("),
        format!("fn {name}("),
    ];
    let mut starts = begin.iter().filter_map(|begin| source.find(begin));
    let (_, body) = source.split_at(starts.next()?);
    let (body, _) = body.split_once("\n}\n")?;
    Some(body.to_owned())
}

/// Each row of the table of limits names the tests that meet them, and the errors in the row occur in those tests.
#[test]
fn each_limit_of_the_page_is_met_by_a_test() {
    let page = std::fs::read_to_string(root().join("docs/verbs-reference.md")).unwrap();
    let table = page.split_once("| limit | error | test |\n|---|---|---|\n");
    let (table, _) = table
        .and_then(|(_, rest)| rest.split_once("\n\n"))
        .expect("the table of limits");
    assert!(table.lines().count() > 15, "{table}");
    for row in table.lines() {
        let cells: Vec<_> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [_, errors, tests] = cells[..] else {
            panic!("three cells: {row}");
        };
        let mut bodies = String::new();
        for test in tests.split("; ") {
            let (file, name) = test
                .trim_matches('`')
                .split_once(": ")
                .expect("`FILE: NAME`");
            bodies += &function(file, name).unwrap_or_else(|| panic!("no {name} in {file}: {row}"));
        }
        let named = |word: &&str| word.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        for error in errors.split('`').skip(1).step_by(2).filter(named) {
            assert!(bodies.contains(error), "{error} is not in {tests}");
        }
    }
}

/// `WEFT_BLESS=1` writes the table.
#[test]
fn the_page_says_what_each_device_can_do() {
    const BEGIN: &str = "<!-- calls: begin -->\n";
    const END: &str = "<!-- calls: end -->";
    let Some((dist, program)) = built("refused") else {
        return;
    };
    let rows = text(&good(&mut run(dist.path(), &program)));
    let table = format!("| | `weft0` | `weft_ib0` |\n|---|---|---|\n{rows}");
    let page = root().join("docs/verbs-reference.md");
    let said = std::fs::read_to_string(&page).unwrap();
    let (before, rest) = said.split_once(BEGIN).expect("the table of calls");
    let (old, after) = rest.split_once(END).expect("its end");
    if std::env::var_os("WEFT_BLESS").is_some() {
        std::fs::write(&page, format!("{before}{BEGIN}{table}{END}{after}")).unwrap();
    } else {
        assert_eq!(
            table, old,
            "docs/verbs-reference.md: WEFT_BLESS=1 writes it"
        );
    }
}
