//! The machines of RoCE v2 against the kernel's `rxe` in a guest, on a tap device in a network namespace of its own: the ICRC covers addresses,
//! so nothing may translate them.

mod stacks;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use weft_dropin::{Weft, have, libraries};
use weft_interop::guest::{GUEST, Guest, HOST, say};
use weft_interop::roce::{self, Report};

const LIMIT: Duration = Duration::from_mins(2);
const TAP: &str = "weft-roce";

#[test]
fn rxe_understands_the_machines_of_roce() {
    // Built here, where there is a network.
    libraries();
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
    needs_its_port_and_its_way();
    two_processes();
    one_address();
    let mut guest = match Guest::boot_on(TAP) {
        Ok(guest) => guest,
        Err(why) => return say(&format!("skipped: {why}")),
    };
    // rdma_cm takes the first device of the interface.
    guest.must("rdma link delete siw0", LIMIT);
    guest.must("rdma link add rxe0 type rxe netdev eth0", LIMIT);
    chosen(&mut guest);
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
    programs(&mut guest);
    managed_programs(&mut guest);
    groups(&mut guest);
    stacks::stacks(&mut guest);
    bad_network(&mut guest);
}

/// A host that takes the wire that its peer needs: RoCE.
fn chosen(guest: &mut Guest) {
    if !have(PROGRAMS) || !have(MANAGED) {
        return;
    }
    let auto = weft().env("WEFT_IB_WIRE", "auto");
    let gid = gid_of_guest(guest);
    for line in [
        "ib_write_bw -F -n 200 -s 65536",
        "ib_send_lat -F -n 200 -s 64",
        "ib_send_bw -F -n 200 -s 1000 -c UD",
    ] {
        both_roles(guest, &auto, line, &gid);
    }
    for (server, client) in [
        (
            "rping -s -C 20 -V -S 60000 -a",
            "rping -c -C 20 -V -S 60000 -a",
        ),
        (
            "ib_send_bw -R -F -n 100 -s 65536",
            "ib_send_bw -R -F -n 100 -s 65536",
        ),
    ] {
        managed(guest, &auto, server, client);
    }
    say("WEFT_IB_WIRE=auto with rxe: in both roles");
}

/// A program of ours for the guest, which has its libraries.
fn put(guest: &mut Guest, program: &str) {
    guest.put(Path::new(program), program, LIMIT);
    guest.must(&format!("chmod +x {program}"), LIMIT);
}

/// Says that something is over, also when it fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A group of multicast, with members here and in the guest. A receiver ends when it has its messages; a sender does not wait for receivers, so it sends
/// until they have.
fn groups(guest: &mut Guest) {
    const MCKEY: &str = "/usr/bin/mckey";
    if !have(&[("mckey", "rdmacm-utils")]) {
        return;
    }
    put(guest, MCKEY);
    let weft = weft();
    let line = |ip: &str| format!("{MCKEY} -m 239.87.9.4 -b {ip} -S 1000");
    let mut member = weft.start(&line(HOST));
    while member.is_running() {
        guest.must(&format!("timeout 100 {} -s", line(GUEST)), LIMIT);
    }
    let done = member.end();
    done.good().says("data transfers complete");
    let running = guest.start(&format!("timeout 100 {}", line(GUEST)));
    let over = AtomicBool::new(false);
    let there = thread::scope(|scope| {
        let _ends = Ends(&over);
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                weft.run(&format!("{} -s", line(HOST))).good();
            }
        });
        guest.finish(&running, LIMIT)
    });
    assert_eq!(there.status, 0, "{}", there.text);
    let complete = there.text.contains("data transfers complete");
    assert!(complete, "{}", there.text);
    say("mckey: in both roles");
}

/// What the guest sends is lost, delayed and overtaken: one packet in fifty, and one in four.
fn bad_network(guest: &mut Guest) {
    if !have(PROGRAMS) || !have(MANAGED) {
        return;
    }
    guest.must(
        "/usr/bin/tc qdisc add dev eth0 root netem delay 2ms reorder 25% 50% loss 2%",
        LIMIT,
    );
    let weft = weft();
    let (gid, rping) = (gid_of_guest(guest), "-C 50 -V -S 20000");
    managed(
        guest,
        &weft,
        &format!("rping -s {rping} -a"),
        &format!("rping -c {rping} -a"),
    );
    for line in [
        "ib_send_bw -F -n 100 -s 65536",
        "ib_write_bw -F -n 100 -s 65536",
        "ib_read_bw -F -n 100 -s 65536",
    ] {
        both_roles(guest, &weft, line, &gid);
    }
    let seen = guest.must("/usr/bin/tc -s qdisc show dev eth0", LIMIT);
    guest.must("/usr/bin/tc qdisc del dev eth0 root", LIMIT);
    let dropped = seen.split("dropped ").nth(1).unwrap_or_default();
    assert!(!dropped.starts_with("0,"), "nothing was lost: {seen}");
    say(&format!(
        "a bad network: dropped {}",
        dropped.lines().next().unwrap_or_default()
    ));
}

/// Programs of `rdma_cm`: here on our libraries, in the guest on `rxe`, each in both roles.
fn managed_programs(guest: &mut Guest) {
    if !have(MANAGED) {
        return;
    }
    let weft = weft();
    // Its last option is for an address.
    for (server, client) in [
        ("rping -s -C 20 -V -S 64 -a", "rping -c -C 20 -V -S 64 -a"),
        (
            "rping -s -C 20 -V -S 60000 -a",
            "rping -c -C 20 -V -S 60000 -a",
        ),
        ("udaddy -C 50 -S 1000 -b", "udaddy -C 50 -S 1000 -s"),
        (
            "ucmatose -c 10 -C 20 -S 5000 -b",
            "ucmatose -c 10 -C 20 -S 5000 -s",
        ),
    ] {
        managed(guest, &weft, server, client);
    }
    for line in [
        "ib_send_bw -R -F -n 100 -s 65536",
        "ib_send_lat -R -F -n 100",
        "ib_send_lat -R -F -n 100 -c UD",
        "ib_write_bw -R -F -n 100 -s 65536",
        "ib_write_lat -R -F -n 100",
        "ib_read_bw -R -F -n 100 -s 65536",
        "ib_read_lat -R -F -n 100",
        "/usr/bin/ib_atomic_bw -R -F -n 100",
        "/usr/bin/ib_atomic_lat -R -F -n 100",
    ] {
        managed(guest, &weft, line, line);
    }
}

/// One program of `rdma_cm` in both roles. A line that ends with an option gets the server's address there, and behind it the port.
fn managed(guest: &mut Guest, weft: &Weft, server: &str, client: &str) {
    let is_named = |line: &str| {
        line.rsplit(' ')
            .next()
            .is_some_and(|word| word.starts_with('-'))
    };
    let to = |line: &str, ip: &str| {
        if line.starts_with("udaddy") {
            // Its option -p is something else.
            format!("{line} {ip}")
        } else if is_named(line) {
            format!("{line} {ip} -p 7176")
        } else {
            format!("{line} -p 7176 {ip}")
        }
    };
    let at = |line: &str, ip: &str| to(line, if is_named(line) { ip } else { "" });
    let here = weft.start(&at(server, HOST));
    let there = retry_guest(guest, &to(client, HOST));
    let here = here.end();
    assert!(
        there.status == 0,
        "{client} in the guest: {}\n{}",
        there.text,
        here.show()
    );
    // rping's server ends with an error when its client has gone.
    if !server.starts_with("rping") {
        here.good();
    }
    let running = guest.start(&format!("timeout 100 {}", at(server, GUEST)));
    let here = retry_program(weft, &to(client, GUEST));
    let there = guest.finish(&running, LIMIT);
    here.good();
    say(&format!(
        "{client} with rdma_cm: in both roles ({})",
        there.status
    ));
}

/// Until our server listens.
fn retry_guest(guest: &mut Guest, line: &str) -> weft_interop::guest::Output {
    for _ in 0..20 {
        let done = guest.run(&format!("timeout 100 {line}"), LIMIT);
        if done.status == 0 {
            return done;
        }
        thread::sleep(Duration::from_millis(200));
    }
    guest.run(&format!("timeout 100 {line}"), LIMIT)
}

fn weft() -> Weft {
    Weft::on("weft_ib0")
        .env("WEFT_IB_WIRE", "roce")
        .env("WEFT_LOG", "warn")
        .limit(LIMIT)
}

/// A port that another program has, a path MTU that is too long for the way, and TLS, are errors that are said.
fn needs_its_port_and_its_way() {
    if !have(&[("ibv_rc_pingpong", "ibverbs-utils")]) {
        return;
    }
    // The GIDs: the tap device's address, and these two.
    ip("addr add 127.0.0.2/8 dev lo");
    let line = "ibv_rc_pingpong -d weft_ib0 -n 100";
    let run = |weft: &Weft, server: &str, client: &str| {
        let server = weft.start(&format!("{line} {server}")).listens(18515);
        let client = weft.run(&format!("{line} {client} 127.0.0.1"));
        (server.end(), client)
    };
    let (server, client) = run(&weft(), "-g 1 -c", "-g 2 -c");
    server.good();
    client.good();
    // The end that is refused leaves the other one waiting.
    let short = || weft().limit(Duration::from_secs(10));
    let other = std::net::UdpSocket::bind("127.0.0.2:4791").expect("a port");
    let (server, client) = run(&short(), "-g 1", "-g 2");
    drop(other);
    let text = [&server, &client].map(weft_dropin::Done::show).concat();
    assert!(
        !client.is_good() && text.contains("no RoCE on UDP port 4791"),
        "{text}"
    );
    ip("link set lo mtu 1500");
    let (server, client) = run(&short(), "-g 1 -m 4096", "-g 2 -m 4096");
    ip("link set lo mtu 65536");
    let text = [&server, &client].map(weft_dropin::Done::show).concat();
    assert!(
        !client.is_good() && text.contains("Failed to modify QP to RTR"),
        "{text}"
    );
    let (server, client) = run(&short().env("WEFT_TLS", "on"), "-g 1", "-g 2");
    let text = [&server, &client].map(weft_dropin::Done::show).concat();
    assert!(text.contains("RoCE has no encryption"), "{text}");
}

const PROGRAMS: &[(&str, &str)] = &[
    ("ib_write_bw", "perftest"),
    ("ibv_rc_pingpong", "ibverbs-utils"),
];
const MANAGED: &[(&str, &str)] = &[
    ("rping", "rdmacm-utils"),
    ("ucmatose", "rdmacm-utils"),
    ("ib_write_bw", "perftest"),
];

/// The index of the guest's GID that is its IPv4 address.
fn gid_of_guest(guest: &mut Guest) -> String {
    let gid = "for i in 0 1 2 3; do case $(cat /sys/class/infiniband/rxe0/ports/1/gids/$i) in *ffff:*) echo $i;; esac; done";
    guest.must(gid, LIMIT).trim().to_owned()
}

/// UDP datagrams that this network namespace has sent.
fn datagrams() -> u64 {
    let text = std::fs::read_to_string("/proc/net/snmp").expect("/proc");
    let values = text.lines().filter(|line| line.starts_with("Udp:")).nth(1);
    let sent = values.and_then(|line| line.split(' ').nth(4)?.parse().ok());
    sent.expect("a counter")
}

/// Programs on two addresses of this host, one process each: those of `rdma_cm`, and UCX's transport of reliable connections.
fn two_processes() {
    let at = |gid: &str| weft().env("UCX_IB_GID_INDEX", gid);
    let (one, two) = (at("1"), at("2"));
    let wire = |what: &str, before: u64| {
        let sent = datagrams() - before;
        assert!(sent > 100, "{what}: {sent} datagrams");
        say(&format!(
            "{what} between two processes: {sent} datagrams or trains"
        ));
    };
    if have(&[("ucmatose", "rdmacm-utils")]) {
        let before = datagrams();
        let line = "ucmatose -c 10 -C 20 -S 5000 -p 7176 -b";
        let server = two.start(&format!("{line} 127.0.0.2"));
        let client = retry_program(&one, &format!("{line} 127.0.0.1 -s 127.0.0.2"));
        client.good();
        server.end().good();
        wire("ucmatose", before);
    }
    if have(&[
        ("rping", "rdmacm-utils"),
        ("gcc", "gcc"),
        ("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
    ]) {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("exits").display().to_string();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/exits.c");
        let line = format!("gcc -o {program} {source} -lrdmacm -libverbs");
        Weft::bare().run(&line).good();
        // It ends only when its peer has gone.
        let server = two.start("rping -s -a 127.0.0.2 -p 7176");
        let client = retry_program(&one, &format!("{program} 127.0.0.2 7176"));
        client.good().says("connected");
        let server = server.end();
        // The status of timeout(1).
        assert!(server.code() != 124, "{}", server.show());
        say("a peer that exits is noticed");
    }
    if have(&[("ucx_perftest", "ucx-utils")]) {
        for line in [
            "ucx_perftest -d weft_ib0:1 -x rc_verbs -n 500 -t am_lat -D zcopy",
            "ucx_perftest -d weft_ib0:1 -x rc_verbs -n 500 -s 65536 -t put_bw -D zcopy",
            "ucx_perftest -d weft_ib0:1 -x rc_verbs -n 500 -s 65536 -t get -D zcopy",
        ] {
            let before = datagrams();
            let server = two.start(&format!("{line} -p 13338")).listens(13338);
            let client = one.run(&format!("{line} -p 13338 127.0.0.1"));
            client.good().says("Final:");
            drop(server);
            wire(line, before);
        }
    }
}

/// All processes at one address of this host: two pairs of perftest at once, listeners, UCX's upper layer, and MPI on it.
fn one_address() {
    let weft = weft().env("UCX_IB_GID_INDEX", "0");
    if have(PROGRAMS) {
        for line in [
            "ib_write_bw -F -n 500 -s 65536 -d weft_ib0 -x 0",
            "ib_send_lat -F -n 200 -s 64 -d weft_ib0 -x 0",
            "ib_send_bw -F -n 500 -s 1000 -c UD -d weft_ib0 -x 0",
            "ib_read_bw -R -F -n 500 -s 65536 -d weft_ib0",
        ] {
            let managed = line.contains(" -R ");
            let servers = [18_601, 18_602].map(|port| {
                let server = weft.start(&format!("{line} -p {port}"));
                // With -R it has no TCP port.
                let server = if managed {
                    server
                } else {
                    server.listens(port)
                };
                (server, format!("{line} -p {port} {HOST}"))
            });
            thread::scope(|scope| {
                for (_, client) in &servers {
                    let weft = &weft;
                    scope.spawn(move || retry_program(weft, client).good().is_good());
                }
            });
            for (server, _) in servers {
                server.end().good();
            }
            say(&format!("{line}: two pairs at one address"));
        }
    }
    if have(&[("ucmatose", "rdmacm-utils")]) {
        let line = "ucmatose -c 10 -C 20 -S 5000 -p 7176";
        let server = weft.start(&format!("{line} -b {HOST}"));
        retry_program(&weft, &format!("{line} -s {HOST}")).good();
        server.end().good();
        say("ucmatose at one address");
    }
    if have(&[("ucx_perftest", "ucx-utils")]) {
        for tls in ["ud_verbs,self", "rc_verbs,ud_verbs,self"] {
            let weft = weft
                .clone()
                .env("UCX_TLS", tls)
                .env("UCX_NET_DEVICES", "weft_ib0:1");
            for line in [
                "ucx_perftest -n 500 -s 8 -t tag_lat",
                "ucx_perftest -n 500 -s 65536 -t tag_bw",
                "ucx_perftest -n 500 -s 65536 -t ucp_put_bw",
                "ucx_perftest -n 500 -s 65536 -t ucp_get",
            ] {
                let before = datagrams();
                let server = weft.start(&format!("{line} -p 13338")).listens(13338);
                let client = weft.run(&format!("{line} -p 13338 {HOST}"));
                client.good().says("Final:");
                drop(server);
                let sent = datagrams() - before;
                assert!(sent > 100, "{line}: {sent} datagrams");
                say(&format!(
                    "{line} over {tls} at one address: {sent} datagrams or trains"
                ));
            }
        }
    }
    mpi(&weft);
}

/// The program of MPI, built in this folder.
fn ring(folder: &Path) -> Option<String> {
    if !have(&[
        ("mpicc.openmpi", "libopenmpi-dev"),
        ("mpirun.openmpi", "openmpi-bin"),
    ]) {
        return None;
    }
    let program = folder.join("ring").display().to_string();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/ring.c");
    Weft::bare()
        .run(&format!("mpicc.openmpi -o {program} {source}"))
        .good();
    Some(program)
}

/// A ring of ranks on Open MPI and UCX, all at one address.
fn mpi(weft: &Weft) {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(program) = ring(folder.path()) else {
        return;
    };
    let weft = weft
        .clone()
        .env("UCX_TLS", "rc_verbs,ud_verbs,self")
        .env("UCX_NET_DEVICES", "weft_ib0:1")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    for ranks in [2, 3] {
        let before = datagrams();
        let options = "--oversubscribe --mca pml ucx --mca pml_ucx_tls any --mca pml_ucx_devices any --mca btl ^openib,tcp,vader";
        let done = weft.run(&format!("mpirun.openmpi {options} -n {ranks} {program}"));
        done.good().says(&format!("{ranks} ranks, all bytes right"));
        let sent = datagrams() - before;
        assert!(sent > 100, "{ranks} ranks: {sent} datagrams");
        say(&format!(
            "Open MPI with {ranks} ranks at one address: {sent} datagrams or trains"
        ));
    }
}

/// Programs that join queue pairs by number: here on our libraries, in the guest on `rxe`, each in both roles.
fn programs(guest: &mut Guest) {
    if !have(PROGRAMS) {
        return;
    }
    let weft = weft();
    let gid = gid_of_guest(guest);
    // The guest has no programs for atomics, nor this one for datagrams.
    for program in ["ib_atomic_bw", "ib_atomic_lat", "ibv_ud_pingpong"] {
        put(guest, &format!("/usr/bin/{program}"));
    }
    for line in [
        "ibv_rc_pingpong -n 200 -s 4096 -c",
        "ib_send_bw -F -n 200 -s 65536",
        "ib_send_bw -F -n 200 -s 4000 -b",
        "ib_send_bw -F -n 200 -s 1000 -c UC",
        "/usr/bin/ibv_ud_pingpong -n 200 -s 1024",
        "ib_send_bw -F -n 200 -s 1000 -c UD",
        "ib_send_lat -F -n 200 -s 64 -c UD",
        "ib_send_lat -F -n 200 -s 64",
        "ib_write_bw -F -n 200 -s 65536",
        "ib_write_bw -F -n 100 -s 65536 -q 4",
        "ib_write_lat -F -n 200 -s 64",
        "ib_read_bw -F -n 200 -s 65536",
        "ib_read_lat -F -n 200 -s 3000",
        "/usr/bin/ib_atomic_bw -F -n 200",
        "/usr/bin/ib_atomic_lat -F -n 200 -A CMP_AND_SWAP",
    ] {
        both_roles(guest, &weft, line, &gid);
    }
}

/// One program that joins queue pairs by number.
fn both_roles(guest: &mut Guest, weft: &Weft, line: &str, gid: &str) {
    let index = if line.contains("ibv_") { "-g" } else { "-x" };
    let ours = format!("{line} -d weft_ib0 {index} 0");
    let theirs = format!("timeout 100 {line} -d rxe0 {index} {gid}");
    let here = weft.start(&ours).listens(18515);
    let there = guest.run(&format!("{theirs} {HOST}"), LIMIT);
    if there.status != 0 {
        here.interrupt();
        panic!("{line}, client in the guest: {}", there.text);
    }
    let here = here.end();
    here.good();
    let running = guest.start(&theirs);
    let here = retry_program(weft, &format!("{ours} {GUEST}"));
    let there = guest.finish(&running, LIMIT);
    assert!(
        there.status == 0,
        "{line}, server in the guest: {}\n{}",
        there.text,
        here.show()
    );
    here.good();
    say(&format!("{line}: in both roles"));
}

/// Until the guest's server listens.
fn retry_program(weft: &Weft, line: &str) -> weft_dropin::Done {
    for _ in 0..50 {
        let done = weft.run(line);
        let text = done.show();
        let early = [
            "Connection refused",
            "Couldn't connect",
            "REJECTED",
            "Unexpected CM event",
            "RDMA_CM_EVENT_UNREACHABLE",
        ];
        if !early.iter().any(|early| text.contains(early)) {
            return done;
        }
        thread::sleep(Duration::from_millis(200));
    }
    weft.run(line)
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
