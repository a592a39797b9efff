//! The machines of RoCE v2 against the kernel's `rxe` in a guest, on a tap device in a network namespace of its own: the ICRC covers addresses,
//! so nothing may translate them.

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::thread;
use std::time::Duration;

use weft_interop::guest::{GUEST, Guest, HOST, say};
use weft_interop::roce::{self, Report};

const LIMIT: Duration = Duration::from_mins(2);
const TAP: &str = "weft-roce";

#[test]
fn rxe_understands_the_machines_of_roce() {
    let me = std::env::current_exe().expect("this program");
    let done = Command::new("unshare")
        .args(["--net", "--"])
        .arg(me)
        .args([
            "--exact",
            "in_a_network_of_its_own",
            "--ignored",
            "--nocapture",
        ])
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
    let done = Command::new("ip")
        .args(line.split(' '))
        .status()
        .expect("ip");
    assert!(done.success(), "ip {line}");
}

#[test]
#[ignore = "in a network namespace, which the other test makes"]
fn in_a_network_of_its_own() {
    ip("link set lo up");
    ip(&format!("tuntap add {TAP} mode tap"));
    ip(&format!("addr add {HOST}/24 dev {TAP}"));
    ip(&format!("link set {TAP} up"));
    let mut guest = match Guest::boot_on(TAP) {
        Ok(guest) => guest,
        Err(why) => return say(&format!("skipped: {why}")),
    };
    // rdma_cm takes the first device of the interface.
    guest.must("rdma link delete siw0", LIMIT);
    guest.must("rdma link add rxe0 type rxe netdev eth0", LIMIT);
    let (host, peer): (IpAddr, IpAddr) = (HOST.parse().unwrap(), GUEST.parse().unwrap());
    let check = |what: &str, report: Result<Report, roce::Failed>, rounds, drops| {
        let report = report.unwrap_or_else(|why| panic!("{what}: {why}"));
        say(&format!("{what}: {report:?}"));
        assert_eq!((report.rounds, report.damaged), (rounds, 0), "{what}");
        assert_eq!(report.dropped > 0, drops, "{what}");
    };
    for (size, drop_every) in [(64, 0), (5000, 0), (60_000, 0), (5000, 23), (60_000, 41)] {
        let rounds = 20;
        let server = thread::spawn(move || {
            let report = roce::serve(host, peer, drop_every, LIMIT);
            if let Err(why) = &report {
                // The client waits longer than this.
                say(&format!("serving: {why}"));
            }
            report
        });
        let line = format!("rping -c -a {HOST} -p 7174 -C {rounds} -S {size} -V");
        guest.must(&line, LIMIT);
        let what = format!("rping's client, {size} B, one of {drop_every} lost");
        check(&what, server.join().unwrap(), rounds, drop_every > 0);

        let running = guest.start(&format!(
            "rping -s -a {GUEST} -p 7175 -C {rounds} -S {size}"
        ));
        let to = SocketAddr::new(peer, 7175);
        let report = retry(|| roce::client(host, to, (rounds, size), drop_every, LIMIT));
        let what = format!("rping's server, {size} B, one of {drop_every} lost");
        check(&what, report, rounds, drop_every > 0);
        guest.finish(&running, LIMIT);
    }
}

/// Until the guest's server listens.
fn retry(mut f: impl FnMut() -> Result<Report, roce::Failed>) -> Result<Report, roce::Failed> {
    for _ in 0..100 {
        match f() {
            Err(why) if why.to_string().contains("Rejected") => {
                thread::sleep(Duration::from_millis(100));
            }
            other => return other,
        }
    }
    f()
}
