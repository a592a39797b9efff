//! `WEFT_IB_WIRE=auto`: which wire two processes take on one host, on two addresses, and between two network namespaces. Each process has a setting of its
//! own. The kernel's `rxe` as a peer is in `roce.rs`.

use std::process::Command;
use std::time::Duration;

use weft_dropin::{Done, Weft, have, libraries};
use weft_interop::guest::say;

const LIMIT: Duration = Duration::from_secs(100);
/// For a meeting that fails.
const SHORT: Duration = Duration::from_secs(10);

/// Runs a test of this program again, in a network namespace.
fn in_a_network(test: &str) {
    libraries();
    let me = std::env::current_exe().expect("this program");
    let done = Command::new("unshare")
        .args(["--net", "--"])
        .arg(me)
        .args(["--exact", test, "--ignored", "--nocapture"])
        .output();
    let done = match done {
        Ok(done) => done,
        Err(error) => return say(&format!("skipped: cannot run unshare: {error}")),
    };
    let text = [done.stdout, done.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    if text.contains("unshare: unshare failed") {
        return say("skipped: no network namespace may be made here");
    }
    assert!(done.status.success(), "{text}");
    for line in text.lines().filter(|line| line.starts_with("interop: ")) {
        say(&line["interop: ".len()..]);
    }
}

fn ip(line: &str) {
    let done = Command::new("ip").args(line.split(' ')).status();
    assert!(done.expect("ip").success(), "ip {line}");
}

fn weft(wire: &str) -> Weft {
    let weft = Weft::on("weft_ib0").env("WEFT_IB_WIRE", wire);
    weft.env("WEFT_LOG", "info").limit(LIMIT)
}

/// UDP datagrams that this network namespace has sent.
fn datagrams() -> u64 {
    let text = std::fs::read_to_string("/proc/net/snmp").expect("/proc");
    let values = text.lines().filter(|line| line.starts_with("Udp:")).nth(1);
    let sent = values.and_then(|line| line.split(' ').nth(4)?.parse().ok());
    sent.expect("a counter")
}

/// The table of programs says what runs on which device; here each process has another wire.
#[track_caller]
fn fine(done: &Done) {
    assert!(done.is_good(), "{}", done.show());
}

/// What `auto` says that it took.
fn took(done: &Done, wire: &str) {
    done.says(&format!("wire=\"{wire}\""));
}

/// One of two at least is `auto`.
fn took_if_auto(both: [&Done; 2], wire: &str) {
    let says = |done: &&Done| done.text.contains("WEFT_IB_WIRE=auto");
    let autos: Vec<_> = both.into_iter().filter(says).collect();
    assert!(!autos.is_empty(), "{}", both[0].show());
    for done in autos {
        took(done, wire);
    }
}

#[test]
fn two_processes_of_one_host_take_the_wire_that_both_have() {
    in_a_network("one_host");
}

#[test]
#[ignore = "in a network namespace, which the other test makes"]
fn one_host() {
    ip("link set lo up");
    ip("addr add 127.0.0.2/8 dev lo");
    if !have(&[
        ("ibv_rc_pingpong", "ibverbs-utils"),
        ("ibv_srq_pingpong", "ibverbs-utils"),
        ("ib_write_bw", "perftest"),
        ("rping", "rdmacm-utils"),
        ("ucmatose", "rdmacm-utils"),
    ]) {
        return;
    }
    for (server, client, wire) in [
        ("auto", "auto", "weft"),
        ("auto", "weft", "weft"),
        ("weft", "auto", "weft"),
        ("auto", "roce", "roce"),
        ("roce", "auto", "roce"),
    ] {
        by_number(server, client, wire);
        by_manager(server, client, wire);
    }
    // Shared memory needs no address of its own for each process.
    let (server, client) = sides("auto", "auto", "weft");
    for _ in 0..5 {
        let line = "ibv_rc_pingpong -d weft_ib0 -g 0 -c -n 300";
        meet(&server, &client, (line, line), "weft");
    }
    without_shared_memory();
    other_users();
    unknown_user();
}

/// Two ends of a program that joins queue pairs by number. The client is at the first address of loopback.
fn meet(server: &Weft, client: &Weft, (at, to): (&str, &str), wire: &str) {
    let before = datagrams();
    let server = server.start(at).listens(18515);
    let client = client.run(&format!("{to} 127.0.0.1"));
    fine(&client);
    let server = server.end();
    fine(&server);
    let sent = datagrams() - before;
    assert_eq!(sent > 100, wire == "roce", "{at}: {sent} datagrams");
    say(&format!("{at}: {wire}, {sent} datagrams"));
    took_if_auto([&server, &client], wire);
}

/// Both sides, which insist on shared memory where they should have it.
fn sides(server: &str, client: &str, wire: &str) -> (Weft, Weft) {
    let local = if wire == "weft" { "require" } else { "auto" };
    let side = |asked| weft(asked).env("WEFT_LOCAL", local);
    (side(server), side(client))
}

fn by_number(server: &str, client: &str, wire: &str) {
    say(&format!("{server} and {client}"));
    let (server, client) = sides(server, client, wire);
    for line in [
        "ibv_rc_pingpong -d weft_ib0 -n 300 -c",
        "ibv_srq_pingpong -d weft_ib0 -n 300 -c -q 4",
        "ib_write_bw -d weft_ib0 -F -n 200 -s 65536",
        "ib_send_bw -d weft_ib0 -F -n 200 -s 1000 -c UC",
    ] {
        let index = if line.contains("ibv_") { "-g" } else { "-x" };
        let at = |n| format!("{line} {index} {n}");
        meet(&server, &client, (&at(0), &at(1)), wire);
    }
}

fn by_manager(server: &str, client: &str, wire: &str) {
    let (server, client) = sides(server, client, wire);
    for (at, to) in [
        (
            "rping -s -C 50 -V -S 3000 -p 7176 -a 127.0.0.2",
            "rping -c -C 50 -V -S 3000 -p 7176 -a 127.0.0.2 -I 127.0.0.1",
        ),
        (
            "ucmatose -c 10 -C 20 -S 5000 -p 7177 -b 127.0.0.2",
            "ucmatose -c 10 -C 20 -S 5000 -p 7177 -b 127.0.0.1 -s 127.0.0.2",
        ),
    ] {
        let before = datagrams();
        let running = server.start(at);
        // A client of the same moment finds a listener that is about to listen, if it comes within a second.
        let mut done = client.run(to);
        for _ in 0..50 {
            if done.is_good()
                || !["REJECTED", "UNREACHABLE", "cma event"]
                    .iter()
                    .any(|early| done.text.contains(early))
            {
                break;
            }
            done = client.run(to);
        }
        fine(&done);
        let there = running.end();
        if !at.starts_with("rping") {
            fine(&there);
        }
        let sent = datagrams() - before;
        assert_eq!(sent > 100, wire == "roce", "{at}: {sent} datagrams");
        say(&format!("{at}: {wire}, {sent} datagrams"));
        took_if_auto([&there, &done], wire);
    }
}

/// Where a side may not have shared memory, both take RoCE.
fn without_shared_memory() {
    let at = |n| format!("ibv_rc_pingpong -d weft_ib0 -n 300 -c -g {n}");
    for (server, client) in [("off", "auto"), ("auto", "off"), ("off", "off")] {
        let with = |local| weft("auto").env("WEFT_LOCAL", local);
        meet(&with(server), &with(client), (&at(0), &at(1)), "roce");
    }
}

/// Two users take RoCE, on both sides.
fn other_users() {
    if !have(&[("setpriv", "util-linux")]) {
        return;
    }
    let at = |n| format!("ibv_rc_pingpong -d weft_ib0 -n 300 -c -g {n}");
    let nobody = format!(
        "setpriv --reuid 65533 --regid 65533 --clear-groups {}",
        at(1)
    );
    meet(&weft("auto"), &weft("auto"), (&at(0), &nobody), "roce");
}

/// Processes of one user whom one of them cannot see as its own: it is in a user namespace that does not know the user.
fn unknown_user() {
    let may = Command::new("unshare").args(["--user", "true"]).status();
    if !may.is_ok_and(|status| status.success()) {
        return say("skipped: no user namespace may be made here");
    }
    let at = |n| format!("ibv_rc_pingpong -d weft_ib0 -n 300 -c -g {n}");
    let unknown = |n| format!("unshare --user {}", at(n));
    let auto = weft("auto");
    for (server, client) in [(at(0), unknown(1)), (unknown(0), at(1))] {
        meet(&auto, &auto, (&server, &client), "roce");
    }
}

#[test]
fn two_network_namespaces_take_roce() {
    in_a_network("two_hosts");
}

#[test]
#[ignore = "in a network namespace, which the other test makes"]
fn two_hosts() {
    if !have(&[
        ("nsenter", "util-linux"),
        ("ibv_rc_pingpong", "ibverbs-utils"),
    ]) {
        return;
    }
    let mut far = Command::new("unshare")
        .args(["--net", "sleep", "300"])
        .spawn()
        .expect("unshare");
    let pid = far.id();
    let net = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    while net(&pid.to_string()) == net("self") {
        std::thread::sleep(Duration::from_millis(2));
    }
    ip(&format!(
        "link add here type veth peer name there netns {pid}"
    ));
    ip("link set lo up");
    ip("addr add 10.77.0.1/24 dev here");
    ip("addr add fd00:77::1/64 dev here nodad");
    ip("link set here up");
    let there = |line: &str| {
        let done = Command::new("nsenter")
            .args(["-t", &pid.to_string(), "-n", "ip"])
            .args(line.split(' '))
            .status();
        assert!(done.expect("nsenter").success(), "ip {line}");
    };
    there("link set lo up");
    there("addr add 10.77.0.2/24 dev there");
    there("addr add fd00:77::2/64 dev there nodad");
    there("link set there up");
    let result = std::panic::catch_unwind(|| between_hosts(pid));
    let _ = far.kill();
    let _ = far.wait();
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
}

fn between_hosts(pid: u32) {
    let there = |line: &str| format!("nsenter -t {pid} -n {line}");
    let line = "ibv_rc_pingpong -d weft_ib0 -n 300 -c -g 0";
    // The server that is there is asked again until it listens.
    let meeting = |here: &str, far: &str, good: bool| {
        let limit = if good { LIMIT } else { SHORT };
        let server = weft(far).limit(limit).start(&there(line));
        let mut client = weft(here).limit(limit).run(&format!("{line} 10.77.0.2"));
        for _ in 0..50 {
            if !client.text.contains("Couldn't connect") {
                break;
            }
            client = weft(here).limit(limit).run(&format!("{line} 10.77.0.2"));
        }
        let server = server.end();
        if good {
            fine(&client);
            fine(&server);
        } else {
            assert!(!client.is_good(), "{}", client.show());
        }
        for (done, own) in [(&client, here), (&server, far)] {
            if own == "auto" {
                took(done, "roce");
                done.says("on another host");
            }
        }
        say(&format!("{here} here and {far} there: {good}"));
    };
    for (here, far) in [("auto", "auto"), ("auto", "roce"), ("roce", "auto")] {
        meeting(here, far, true);
    }
    let managed_by = |(here, far): (&str, &str), how: &str, wire: &str| {
        let line = format!("-C 30 -V -S 2000 -a 10.77.0.2 -p 7176{how}");
        let server = weft(far).start(&there(&format!("rping -s {line}")));
        let to = format!("rping -c {line}");
        let mut client = weft(here).run(&to);
        for _ in 0..50 {
            if client.is_good() {
                break;
            }
            client = weft(here).run(&to);
        }
        fine(&client);
        let server = server.end();
        for (done, own) in [(&client, here), (&server, far)] {
            if own == "auto" {
                took(done, wire);
            }
        }
        say(&format!("rping{how}, {here} here and {far} there: {wire}"));
    };
    let managed = |here: &str, far: &str, wire: &str| managed_by((here, far), "", wire);
    // Queue pairs that the programs move themselves, with the path MTU that `rdma_init_qp_attr` has for a way of 1,500 bytes.
    managed_by(("auto", "auto"), " -q", "roce");
    managed("auto", "auto", "roce");
    managed("auto", "roce", "roce");
    managed("roce", "auto", "roce");
    // A listener hears both.
    managed("weft", "auto", "weft");
}
