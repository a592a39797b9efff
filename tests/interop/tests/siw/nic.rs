//! `weft doctor` and its report on the kernel's siw and rxe.

mod faults;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use weft_interop::guest::{GUEST, HOST, say};

use super::{PING_PORT, STEP, Siw, siw};

/// For every operation on a device, and the copy of the program; the guest is emulated.
const LONG: Duration = Duration::from_mins(5);

/// The program with this name, as it was built beside this test.
fn beside(name: &str) -> PathBuf {
    // target/debug/deps/NAME
    let test = std::env::current_exe().expect("/proc");
    let folder = test.ancestors().nth(2).expect("a target folder");
    folder.join(name)
}

fn host_program() -> PathBuf {
    beside("weft")
}

/// What cargo prints of this command, with the features of `./x test`: they are built already.
fn cargo(command: &str, args: &[&str]) -> String {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args([command, "--quiet", "--locked", "--workspace"]);
    cargo.args(["--features", "weft-exs/tokio"]).args(args);
    let done = cargo.stderr(Stdio::inherit()).output();
    let done = done.expect("cargo runs");
    assert!(done.status.success(), "{cargo:?}");
    String::from_utf8(done.stdout).unwrap()
}

/// Puts a program into /tmp of the guest, without what only debuggers read.
fn put(siw: &mut Siw, program: &Path, name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let stripped = dir.path().join(name);
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&stripped).arg(program);
    assert!(strip.status().expect("strip runs").success(), "{strip:?}");
    // One that a failed test has left running cannot be written.
    let gone = format!("killall {name} 2>/dev/null; rm -f /tmp/{name}");
    siw.guest.must(&gone, STEP);
    siw.guest.put(&stripped, &format!("/tmp/{name}"), LONG);
    siw.guest.must(&format!("chmod +x /tmp/{name}"), STEP);
}

/// The guest with the program in /tmp, and rxe0 on the interface that siw0 is on.
fn prepared(siw: &mut Siw) {
    siw.driver(&[]);
    cargo("build", &["--bin", "weft"]);
    put(siw, &host_program(), "weft");
    // rdma_cm takes the address for the device that came first: siw0, whatever a failed test has left.
    let add = "rdma link del rxe0 2>/dev/null; rdma link | grep -q siw0 || rdma link add siw0 type siw netdev eth0; \
               rdma link add rxe0 type rxe netdev eth0";
    siw.guest.must(add, STEP);
}

/// What the report says of an operation of a device.
fn outcome<'a>(report: &'a str, device: &str, operation: &str) -> &'a str {
    let device = format!("{device}: ");
    let mut lines = report.lines().skip_while(|line| !line.starts_with(&device));
    let line = lines.find_map(|line| {
        line.trim_start()
            .strip_prefix(operation)?
            .strip_prefix("  ")
    });
    line.unwrap_or_else(|| panic!("{device}{operation} is not in:\n{report}"))
        .trim()
}

#[test]
fn doctor_and_its_report_know_the_kernels_devices() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    let doctor = siw
        .guest
        .run("/tmp/weft doctor --json | grep RNICs", LONG)
        .text;
    for words in [
        "siw0: iWARP, port 1 ACTIVE, Ethernet eth0",
        "rxe0: RoCE, port 1 ACTIVE, Ethernet eth0",
    ] {
        assert!(doctor.contains(words), "{doctor}");
    }
    assert!(
        doctor.contains(GUEST),
        "rxe0 has the guest's address: {doctor}"
    );

    let done = siw.guest.run("/tmp/weft doctor --report", LONG);
    say(&format!(
        "weft doctor --report in the guest:\n{}",
        done.text
    ));
    assert_eq!(done.status, 0, "{}", done.text);
    let both = [
        "Send",
        "Write",
        "Read",
        "inline data",
        "shared receive queue",
        "completion events",
        "a key that is wrong",
    ];
    for operation in both {
        assert_eq!(
            outcome(&done.text, "siw0", operation),
            "ok",
            "siw0, {operation}"
        );
        assert_eq!(
            outcome(&done.text, "rxe0", operation),
            "ok",
            "rxe0, {operation}"
        );
    }
    let infiniband = [
        "Send with immediate",
        "Write with immediate",
        "compare and swap",
        "fetch and add",
        "datagrams (UD)",
        "datagrams with immediate",
    ];
    for operation in infiniband {
        assert_eq!(
            outcome(&done.text, "siw0", operation),
            "not supported by the device",
            "siw0, {operation}"
        );
        assert_eq!(
            outcome(&done.text, "rxe0", operation),
            "ok",
            "rxe0, {operation}"
        );
    }
    assert_eq!(outcome(&done.text, "siw0", "connection by rdma_cm"), "ok");

    // Where both are on one interface, rdma_cm takes its address for siw0.
    siw.guest.must("rdma link del siw0", STEP);
    let done = siw.guest.run("/tmp/weft doctor --report", LONG);
    let outcome = outcome(&done.text, "rxe0", "connection by rdma_cm");
    assert_eq!(outcome, "ok", "{}", done.text);
    let back = "rdma link del rxe0 && rdma link add siw0 type siw netdev eth0";
    siw.guest.must(back, STEP);
}

/// `weft hello` and `weft cp` of 64 MiB between two processes of the guest, on a device of it.
fn hello_and_cp_on(siw: &mut Siw, device: &str) {
    let hello = format!(
        "{}; ./weft hello --device {device} {GUEST}:7472; {ENDED} cat responder; exit $status",
        serving(
            &format!("./weft hello --device {device} --listen={GUEST}:7472"),
            "responder"
        )
    );
    let done = siw.guest.run(&in_a_shell(&hello), LONG);
    say(&format!("weft hello on {device}:\n{}", done.text));
    assert_eq!(done.status, 0, "{}", done.text);
    let through = format!("connected over an RNIC ({device})");
    assert!(done.text.contains(&through), "{}", done.text);
    assert!(done.text.contains("as written"), "{}", done.text);

    let done = siw.guest.run(&in_a_shell(&cp_on(device, 64)), LONG);
    say(&format!("weft cp on {device}:\n{}", done.text));
    assert_eq!(done.status, 0, "{}", done.text);
    assert!(done.text.contains("over an RNIC"), "{}", done.text);
}

/// `weft cp` of so many MiB between two processes of the guest.
fn cp_on(device: &str, mib: usize) -> String {
    let listen = format!(
        "./weft cp --device {device} --plain --open --once --listen to --bind {GUEST}:7471"
    );
    format!(
        "cd /tmp; rm -rf to; mkdir to; dd if=/dev/urandom of=large bs=1M count={mib} 2>/dev/null; {}; \
         ./weft cp --device {device} --plain large {GUEST}:; {ENDED} cat receiver; \
         cmp large to/large && rm -rf to large && exit $status",
        serving(&listen, "receiver")
    )
}

fn in_a_shell(line: &str) -> String {
    format!("sh -c '{line}'")
}

/// Starts a program in the background in /tmp of the guest, its output in this file, and waits until it listens. An earlier one may have left the file.
fn serving(program: &str, file: &str) -> String {
    format!(
        "cd /tmp; rm -f {file}; {program} >{file} 2>&1 & server=$!; \
         until grep -q -e listening -e serving {file} 2>/dev/null || ! kill -0 $server; do usleep 10000; done"
    )
}

/// After a client of [`serving`]: its status, and the end of the server, which would wait for another one if this one has failed.
const ENDED: &str = "status=$?; [ $status = 0 ] || kill $server; wait $server;";

#[test]
fn hello_and_cp_run_on_the_kernels_devices() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    hello_and_cp_on(&mut siw, "siw0");
    // Where both are on one interface, rdma_cm takes its address for siw0.
    siw.guest.must("rdma link del siw0", STEP);
    hello_and_cp_on(&mut siw, "rxe0");
    let back = "rdma link del rxe0 && rdma link add siw0 type siw netdev eth0";
    siw.guest.must(back, STEP);
}

#[test]
fn bench_measures_the_kernels_devices() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    cargo("build", &["--bin", "weft-bench"]);
    put(&mut siw, &beside("weft-bench"), "weft-bench");
    let mut measure = |device: &str, other: &str| {
        siw.guest.must(&format!("rdma link del {other}"), STEP);
        let bench = format!("/tmp/weft-bench verbs --device {device} --runs 2 --seconds 0.1");
        let line = format!("{bench} --stack device --size 64,64K");
        let done = siw.guest.run(&line, LONG);
        assert_eq!(done.status, 0, "{}", done.text);
        for operation in ["send", "write", "read"] {
            let is_row = |line: &&str| line.trim_start().starts_with(operation);
            let rows = done.text.lines().filter(is_row);
            let figures = rows.filter(|line| line.contains(" ("));
            assert_eq!(figures.count(), 4, "{operation}: {}", done.text);
        }
        // perftest beside it is told, and not judged: here it cannot always tell the speed of its clock, and its two ends lose each other.
        let line = format!("{bench} --op write --figure bandwidth --size 64K");
        let done = siw.guest.run(&line, LONG);
        say(&format!("weft bench verbs on {device}:\n{}", done.text));
        let kind = other.trim_end_matches('0');
        let again = format!("rdma link add {other} type {kind} netdev eth0");
        siw.guest.must(&again, STEP);
    };
    measure("siw0", "rxe0");
    measure("rxe0", "siw0");
}

/// Buffers of a server from a client on the same device; only atomics can append. At the end the device is removed, which ends the server.
fn fs_on(siw: &mut Siw, device: &str, has_atomics: bool) {
    let serve =
        format!("./weft fs serve --keep --plain --open --device {device} --bind {GUEST}:7474");
    let client = format!("--plain --device {device}");
    let name = format!("/rdma/{GUEST}:7474/data");
    let fs = format!(
        "{}; dd if=/dev/urandom of=large bs=1M count=8 2>/dev/null; \
         ./weft fs put {client} large {name} && ./weft fs get {client} {name} got && cmp large got; status=$?; \
         ./weft fs put {client} --append large {name} 2>&1; echo append: $?; ./weft fs ls {client} {name}; \
         rdma link del {device}; wait $server; echo server: $?; cat server; rm -f large got; exit $status",
        serving(&serve, "server")
    );
    let done = siw.guest.run(&in_a_shell(&fs), LONG);
    say(&format!("weft fs on {device}:\n{}", done.text));
    assert_eq!(done.status, 0, "{}", done.text);
    let append = if has_atomics {
        "append: 0"
    } else {
        "Operation not supported"
    };
    assert!(done.text.contains(append), "{}", done.text);
    let size = if has_atomics { "16777216" } else { "8388608" };
    assert!(done.text.contains(size), "{}", done.text);
    assert!(done.text.contains("server: 1"), "{}", done.text);
    let words = format!("nobody can come any more: RNIC: {device}");
    assert!(done.text.contains(&words), "{}", done.text);
}

#[test]
fn remote_memory_as_files_runs_on_the_kernels_devices() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    cargo("build", &["--bin", "weft-fs"]);
    put(&mut siw, &beside("weft-fs"), "weft-fs");
    siw.guest.must("rdma link del rxe0", STEP);
    fs_on(&mut siw, "siw0", false);
    siw.guest
        .must("rdma link add rxe0 type rxe netdev eth0", STEP);
    fs_on(&mut siw, "rxe0", true);
    siw.guest
        .must("rdma link add siw0 type siw netdev eth0", STEP);
}

/// `weft cp` by `WEFT_DEVICE=auto` on both sides, between two processes of the guest; both say that this device carries the files.
fn auto_finds(siw: &mut Siw, device: &str) {
    let listen = format!("./weft -v cp --plain --open --once --listen to --bind {GUEST}:7471");
    let cp = format!(
        "cd /tmp; rm -rf to; mkdir to; dd if=/dev/urandom of=small bs=1M count=1 2>/dev/null; export WEFT_DEVICE=auto; {}; \
         ./weft -v cp --plain small {GUEST}:; {ENDED} cat receiver; \
         cmp small to/small && rm -rf to small && exit $status",
        serving(&listen, "receiver")
    );
    let done = siw.guest.run(&in_a_shell(&cp), LONG);
    assert_eq!(done.status, 0, "{}", done.text);
    let says = format!("the RNIC {device} carries the files");
    assert_eq!(done.text.matches(&says).count(), 2, "{}", done.text);
}

#[test]
fn auto_takes_the_device_of_the_route() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    siw.guest.must("rdma link del rxe0", STEP);
    auto_finds(&mut siw, "siw0");
    siw.guest.must(
        "rdma link del siw0; rdma link add rxe0 type rxe netdev eth0",
        STEP,
    );
    auto_finds(&mut siw, "rxe0");
    let back = "rdma link del rxe0 && rdma link add siw0 type siw netdev eth0";
    siw.guest.must(back, STEP);
}

/// The test program of this package with this name.
fn test_program(name: &str) -> PathBuf {
    let args = ["--no-run", "--message-format=json", "--test", name];
    let built = cargo("test", &args);
    let begin = "\"executable\":\"";
    let lines = built.lines().filter_map(|line| line.split_once(begin));
    let path = lines
        .filter_map(|(_, rest)| rest.split('"').next())
        .next_back();
    path.expect("an executable").into()
}

#[test]
fn the_objects_of_any_device_are_those_of_the_kernels_devices() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    put(&mut siw, &test_program("any"), "any");
    let run = |siw: &mut Siw, device: &str| {
        let line = format!("WEFT_TEST_RNIC={device}@{GUEST} /tmp/any --test-threads=1");
        let done = siw.guest.run(&line, LONG);
        say(&format!(
            "objects of any device on {device}:\n{}",
            done.text
        ));
        assert_eq!(done.status, 0, "{}", done.text);
    };
    // The last test of each removes it.
    let removal = |siw: &mut Siw, device: &str| {
        let line = format!("WEFT_TEST_RNIC={device}@{GUEST} /tmp/any --ignored");
        let done = siw.guest.run(&line, LONG);
        assert_eq!(done.status, 0, "{}", done.text);
        assert!(done.text.contains("1 passed"), "{}", done.text);
    };
    siw.guest.must("rdma link del rxe0", STEP);
    run(&mut siw, "siw0");
    removal(&mut siw, "siw0");
    siw.guest
        .must("rdma link add rxe0 type rxe netdev eth0", STEP);
    run(&mut siw, "rxe0");
    removal(&mut siw, "rxe0");
    siw.guest
        .must("rdma link add siw0 type siw netdev eth0", STEP);
}

#[test]
fn exs_runs_on_the_kernels_devices() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    put(&mut siw, &test_program("exs"), "exs");
    let run = |siw: &mut Siw, device: &str, skip: &str| {
        let line = format!("WEFT_TEST_RNIC={device}@{GUEST} /tmp/exs --test-threads=1 {skip}");
        let done = siw.guest.run(&line, 2 * LONG);
        say(&format!("EXS on {device}:\n{}", done.text));
        assert_eq!(done.status, 0, "{}", done.text);
    };
    // One test removes the device and makes it again, which then comes behind all others.
    siw.guest.must("rdma link del rxe0", STEP);
    run(&mut siw, "siw0", "");
    // The thread that notices ends disconnects while another one destroys the queue pair.
    let ends = format!(
        "for i in $(seq 10); do WEFT_TEST_RNIC=siw0@{GUEST} /tmp/exs --test-threads=1 --exact \
         the_responder_may_speak_first the_end_of_the_peer_ends_the_operations >/tmp/said 2>&1 || exit 1; done"
    );
    let done = siw.guest.run(&in_a_shell(&ends), LONG);
    assert_eq!(done.status, 0, "{}", siw.guest.must("cat /tmp/said", STEP));
    siw.guest.must(
        "rdma link del siw0; rdma link add rxe0 type rxe netdev eth0",
        STEP,
    );
    // RoCE and iWARP do not meet.
    run(&mut siw, "rxe0", "--skip=with_the_soft_rnic");
    let back = "rdma link del rxe0 && rdma link add siw0 type siw netdev eth0";
    siw.guest.must(back, STEP);
}

/// A program here; it does not outlive the test.
struct OnHost(Child);

impl OnHost {
    fn ends_well(&mut self) -> bool {
        self.0.wait().unwrap().success()
    }
}

impl Drop for OnHost {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The program here, on the soft RNIC; a listener says `listening on ADDRESS` first.
fn on_the_host(args: &[&str]) -> (OnHost, impl Iterator<Item = String> + use<>) {
    started(Command::new(host_program()).args(args))
}

fn started(program: &mut Command) -> (OnHost, impl Iterator<Item = String> + use<>) {
    let mut child = program.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (OnHost(child), lines.map_while(Result::ok))
}

/// The port of the first line.
fn port(lines: &mut impl Iterator<Item = String>) -> String {
    let first = lines.next().expect("a line");
    let at = first.split("listening on ").nth(1).expect(&first);
    let port = at.split(',').next().unwrap().rsplit(':').next().unwrap();
    port.to_owned()
}

#[test]
fn siw_and_the_soft_rnic_of_the_host_reach_each_other() {
    const MIB: usize = 8;
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    // rdma_cm takes the address for the older of two devices.
    siw.guest.must("rdma link del rxe0", STEP);
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().to_str().unwrap();

    // From the guest to the host.
    let (mut responder, mut lines) = on_the_host(&["hello", "--listen=127.0.0.1:0"]);
    let to_us = format!("/tmp/weft hello --device siw0 {HOST}:{}", port(&mut lines));
    let said = siw.guest.must(&to_us, STEP);
    assert!(said.contains("as written"), "{said}");
    assert!(responder.ends_well());
    let listen = [
        "cp",
        "--plain",
        "--open",
        "--once",
        "--bind=127.0.0.1:0",
        "--listen",
        to,
    ];
    let (mut receiver, mut lines) = on_the_host(&listen);
    let to_us = format!(
        "cd /tmp; dd if=/dev/urandom of=large bs=1M count={MIB} 2>/dev/null; \
         ./weft cp --device siw0 --plain large {HOST}:{}:; sha256sum large",
        port(&mut lines)
    );
    let said = siw.guest.must(&to_us, LONG);
    assert!(said.contains("over an RNIC"), "{said}");
    assert!(receiver.ends_well());
    let file = dir.path().join("large");
    let sum = Command::new("sha256sum")
        .arg(&file)
        .output()
        .unwrap()
        .stdout;
    let sum = String::from_utf8(sum).unwrap();
    let sum = sum.split(' ').next().unwrap();
    assert!(said.contains(sum), "{sum} is not in {said}");

    // From the host to the guest.
    let guest = format!("127.0.0.1:{}", siw.forwarded);
    let listen = format!("./weft hello --device siw0 --listen={GUEST}:{PING_PORT}");
    siw.guest.must(&serving(&listen, "responder"), STEP);
    let (mut initiator, lines) = on_the_host(&["hello", &guest]);
    let said: Vec<_> = lines.collect();
    assert!(initiator.ends_well(), "{said:?}");
    let responder = siw.guest.must("wait; cat /tmp/responder", LONG);
    assert!(responder.contains("the buffer holds"), "{responder}");
    siw.guest.must("rm -rf /tmp/to; mkdir /tmp/to", STEP);
    let listen = format!(
        "./weft cp --device siw0 --plain --open --once --listen to --bind {GUEST}:{PING_PORT}"
    );
    siw.guest.must(&serving(&listen, "receiver"), LONG);
    let target = format!("{guest}:");
    let (mut sender, lines) = on_the_host(&["cp", "--plain", file.to_str().unwrap(), &target]);
    let said: Vec<_> = lines.collect();
    assert!(sender.ends_well(), "{said:?}");
    let received = siw.guest.must(
        "wait; sha256sum /tmp/to/large; rm -r /tmp/to /tmp/large",
        LONG,
    );
    assert!(received.contains(sum), "{sum} is not in {received}");
}

/// 2000 messages of 16 KiB there and back, several at a time.
#[test]
fn extended_sockets_on_siw_and_on_the_soft_rnic_of_the_host_reach_each_other() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    siw.guest.must("rdma link del rxe0", STEP);
    cargo("build", &["--example", "echo"]);
    let echo = beside("examples/echo");
    put(&mut siw, &echo, "echo");

    // The guest connects; the server goes on until it is ended.
    let (_server, mut lines) = started(Command::new(&echo).args(["server", "127.0.0.1:0"]));
    let client = format!(
        "WEFT_DEVICE=siw0 /tmp/echo client {HOST}:{}",
        port(&mut lines)
    );
    let said = siw.guest.must(&client, LONG);
    assert!(said.contains("2000 messages of 16384 bytes"), "{said}");

    // The host connects.
    let listen = format!("env WEFT_DEVICE=siw0 ./echo server {GUEST}:{PING_PORT}");
    siw.guest.must(&serving(&listen, "server"), STEP);
    let guest = format!("127.0.0.1:{}", siw.forwarded);
    let (mut client, lines) = started(Command::new(&echo).args(["client", &guest]));
    let said: Vec<_> = lines.collect();
    assert!(client.ends_well(), "{said:?}");
    assert!(said[0].contains("2000 messages of 16384 bytes"), "{said:?}");
    siw.guest.must("kill $server", STEP);
}

#[test]
fn what_hinders_a_device_is_named_with_its_remedy() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    siw.guest.must("rdma link del rxe0", STEP);
    let report = |siw: &mut Siw, line: &str| siw.guest.run(line, LONG);

    let line = "mv /dev/infiniband/uverbs0 /tmp/; /tmp/weft doctor --report; mv /tmp/uverbs0 /dev/infiniband/";
    let text = report(&mut siw, line).text;
    assert!(
        text.contains("siw0: /dev/infiniband/uverbs0: No such file or directory"),
        "{text}"
    );
    assert!(text.contains("--device=/dev/infiniband/uverbs0"), "{text}");

    let user = "echo joe:x:1000:1000::/:/bin/sh >/etc/passwd; chmod 600 /dev/infiniband/uverbs0; \
                su joe -c '/tmp/weft doctor --report'; chmod 666 /dev/infiniband/uverbs0";
    let text = report(&mut siw, user).text;
    assert!(
        text.contains("siw0: ibv_open_device: Permission denied"),
        "{text}"
    );
    assert!(
        text.contains("let this user read and write /dev/infiniband/uverbs0"),
        "{text}"
    );

    // Root may lock everything (CAP_IPC_LOCK), which is why another user asks.
    let line = "(ulimit -l 64; su joe -c '/tmp/weft doctor --report')";
    let text = report(&mut siw, line).text;
    assert!(
        text.contains("siw0: ibv_reg_mr: Cannot allocate memory"),
        "{text}"
    );
    assert!(
        text.contains("64 KiB for this call, and this process may lock 64 KiB in all"),
        "{text}"
    );
}
