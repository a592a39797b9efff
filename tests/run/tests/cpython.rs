//! `CPython`'s own tests of its socket modules: tests that pass without `weft run` pass under it.

use std::collections::BTreeSet;
use std::time::Duration;

use weft_run_tests::{Weft, plain, say, weft};

/// A Python that has its own tests.
fn python() -> Option<&'static str> {
    let candidates = ["python3", "/usr/bin/python3"];
    let found = candidates.into_iter().find(|python| {
        let words = [*python, "-c", "import test.test_socket"];
        let done = plain().start_words(&words).end();
        done.is_good()
    });
    if found.is_none() {
        say("cpython's tests skipped: no python3 has them (apt-get install libpython3-testsuite)");
    }
    found
}

/// How many tests of a module, or of several, ran, and the names of those that failed.
fn run(weft: Weft, python: &str, module: &str) -> (u64, BTreeSet<String>) {
    let dir = tempfile::tempdir().unwrap();
    let mut words = vec![python, "-m", "unittest", "-v"];
    words.extend(module.split(' '));
    let weft = weft.dir(dir.path()).limit(Duration::from_mins(15));
    let done = weft.start_words(&words).end();
    let ran = done.text.lines().find_map(|line| {
        let rest = line.strip_prefix("Ran ")?;
        rest.split(' ').next()?.parse::<u64>().ok()
    });
    let failed = done.text.lines().filter_map(|line| {
        let name = line
            .strip_prefix("FAIL: ")
            .or_else(|| line.strip_prefix("ERROR: "))?;
        Some(name.to_owned())
    });
    let failed = failed.collect();
    let ran = ran.unwrap_or_else(|| panic!("{module} did not come to its end: {}", done.show()));
    (ran, failed)
}

/// None fails that passes without. One that fails gets a second chance, as in each run of `CPython`'s tests: some depend on time.
fn compare(modules: &[&str]) {
    let Some(python) = python() else { return };
    let mut problems = Vec::new();
    for module in modules {
        let (count, before) = run(plain(), python, module);
        let (ran, mut failed) = run(weft(), python, module);
        if failed.difference(&before).next().is_some() {
            let again = run(weft(), python, module).1;
            failed.retain(|name| again.contains(name));
        }
        let new: Vec<_> = failed.difference(&before).collect();
        if !new.is_empty() {
            problems.push(format!("{module}: {new:?} fail, and pass without"));
        }
        if ran != count || ran == 0 {
            problems.push(format!("{module}: {ran} tests, {count} without"));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn selectors_and_some_of_asyncio() {
    compare(&["test.test_selectors", "test.test_asyncio.test_streams"]);
}

/// Both ends of each are in one process, so the datagrams go through the kernel: this tests that nothing is in their way.
#[test]
fn udp_sockets() {
    let classes = [
        "BasicUDPTest",
        "RecvmsgUDPTest",
        "RecvmsgIntoUDPTest",
        "SendmsgUDPTest",
        "RecvmsgUDP6Test",
        "RecvmsgIntoUDP6Test",
        "SendmsgUDP6Test",
        "RecvmsgRFC3542AncillaryUDP6Test",
        "RecvmsgIntoRFC3542AncillaryUDP6Test",
        "UDPTimeoutTest",
    ];
    let names = classes.map(|class| format!("test.test_socket.{class}"));
    compare(&[&names.join(" ")]);
}

#[test]
#[ignore = "takes some minutes"]
fn all_modules_that_use_sockets() {
    compare(&[
        "test.test_socket.BasicTCPTest",
        "test.test_socket.BasicTCPTest2",
        "test.test_socket.NonBlockingTCPTests",
        "test.test_socket.FileObjectClassTestCase",
        "test.test_socket.UnbufferedFileObjectClassTestCase",
        "test.test_socket.NetworkConnectionAttributesTest",
        "test.test_socket.TCPTimeoutTest",
        "test.test_socket.InterruptedRecvTimeoutTest",
        "test.test_socket.RecvmsgTCPTest",
        "test.test_socket.SendmsgTCPTest",
        "test.test_socket.RecvmsgIntoTCPTest",
        "test.test_socket.SendfileUsingSendfileTest",
        "test.test_socket.GeneralModuleTests",
        "test.test_selectors",
        "test.test_asyncio.test_events",
        "test.test_asyncio.test_streams",
        "test.test_asyncio.test_sendfile",
        "test.test_asyncio.test_selector_events",
        "test.test_asyncio.test_sock_lowlevel",
        "test.test_asyncio.test_server",
        "test.test_ssl",
        "test.test_httplib",
        "test.test_ftplib",
        "test.test_smtplib",
    ]);
}
