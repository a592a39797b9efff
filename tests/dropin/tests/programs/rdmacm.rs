//! rdmacm-utils: programs that connect with `rdma_cm`.

use weft_dropin::{Weft, datagram_pair, free_port, have, pair, say};

use super::carriers;

const PACKAGE: &str = "rdmacm-utils";

fn rping(weft: &Weft, address: &str, options: &str, rounds: u32) {
    let port = free_port();
    let common = format!("-a {address} -p {port} -C {rounds} -v -V {options}");
    let (server, client) = pair(
        weft,
        port,
        &format!("rping -s {common}"),
        &format!("rping -c {common}"),
    );
    for (done, line) in [(server, "server ping data"), (client, "ping data")] {
        let last = format!("{line}: rdma-ping-{}: ", rounds - 1);
        done.says(&last).never_says("mismatch");
    }
}

#[test]
fn rping_both_roles() {
    if !have(&[("rping", PACKAGE)]) {
        return;
    }
    for devices in ["weft0", "weft_ib0"] {
        for weft in carriers(devices) {
            rping(&weft, "127.0.0.1", "", 100);
            rping(&weft, "127.0.0.1", "-S 60000", 20);
        }
    }
}

#[test]
fn rping_over_ipv6() {
    if !have(&[("rping", PACKAGE)]) {
        return;
    }
    for weft in carriers("weft0") {
        rping(&weft, "::1", "", 20);
    }
}

/// A queue pair that the program creates and moves from state to state itself. (The connection manager moves an RNIC's queue pairs.)
#[test]
fn rping_with_a_queue_pair_of_its_own() {
    if !have(&[("rping", PACKAGE)]) {
        return;
    }
    for weft in carriers("weft_ib0") {
        rping(&weft, "127.0.0.1", "-q", 20);
    }
}

/// One server, clients one after another. (Not at the same time: two threads of the server share one place for the newest request.)
#[test]
fn rping_persistent_server() {
    if !have(&[("rping", PACKAGE)]) {
        return;
    }
    let weft = Weft::on("weft0");
    let port = free_port();
    let server = weft.start(&format!("rping -s -P -v -a 127.0.0.1 -p {port}"));
    let server = server.listens(port);
    let line = format!("rping -c -a 127.0.0.1 -p {port} -C 20 -v -V");
    for _ in 0..5 {
        weft.run(&line).good().says("ping data: rdma-ping-19: ");
    }
    drop(server);
}

#[test]
fn rping_without_a_server() {
    if !have(&[("rping", PACKAGE)]) {
        return;
    }
    let line = format!("rping -c -a 127.0.0.1 -p {} -C 1", free_port());
    let done = Weft::on("weft0").run(&line);
    assert!(!done.is_good(), "{}", done.show());
    done.says("RDMA_CM_EVENT_REJECTED");
}

#[test]
fn ucmatose() {
    if !have(&[("ucmatose", PACKAGE)]) {
        return;
    }
    for weft in carriers("weft0") {
        let runs = [
            ("127.0.0.1", "-c 1"),
            ("127.0.0.1", "-c 8 -C 20 -S 3000"),
            ("127.0.0.1", "-m -c 2"),
            ("::1", "-f ipv6 -c 2"),
        ];
        for (address, options) in runs {
            let port = free_port();
            let common = format!("-p {port} {options}");
            let (server, client) = pair(
                &weft,
                port,
                &format!("ucmatose -b {address} {common}"),
                &format!("ucmatose -s {address} {common}"),
            );
            for done in [server, client] {
                done.says("test complete").says("return status 0");
            }
        }
    }
}

/// Datagrams. The program has one port, so the tests run one after another.
#[test]
fn udaddy() {
    const PORT: u16 = 7174;
    if !have(&[("udaddy", PACKAGE)]) {
        return;
    }
    let runs = [
        ("weft0,weft_ib0", "127.0.0.1", ""),
        ("weft_ib0", "127.0.0.1", "-c 8 -C 20 -S 4096"),
        ("weft_ib0", "127.0.0.1", "-p 0x0002"),
        ("weft_ib0", "::1", "-C 2"),
    ];
    for (devices, address, options) in runs {
        let (server, client) = datagram_pair(
            &Weft::on(devices),
            PORT,
            &format!("udaddy -b {address} {options}"),
            &format!("udaddy -s {address} {options}"),
        );
        for done in [server, client] {
            done.says("data transfers complete").says("return status 0");
        }
    }
    // No listener, and no datagrams.
    let done = Weft::on("weft_ib0").run("udaddy -s 127.0.0.1");
    assert!(!done.is_good(), "{}", done.show());
    done.says("RDMA_CM_EVENT_UNREACHABLE, error: 1");
    let done = Weft::on("weft0").run("udaddy -s 127.0.0.1");
    assert!(!done.is_good(), "{}", done.show());
    done.says("unable to create QP: Operation not supported");
}

/// Two receivers and a sender on one interface.
#[test]
fn mckey() {
    if !have(&[("mckey", PACKAGE)]) {
        return;
    }
    // Other runs of this test on the host have other groups. The last byte of a group determines its port.
    let [.., high, low] = std::process::id().to_be_bytes();
    let port = 0x5700 | u16::from(low);
    let group = |number: u8| format!("239.{}.{high}.{low}", 90 + number);
    let runs = [
        ("weft0,weft_ib0", group(1), ""),
        ("weft_ib0", group(2), "-c 2 -C 50 -S 4000"),
        ("weft_ib0", group(3), "-p 0x0002"),
    ];
    for (devices, group, options) in runs {
        let weft = Weft::on(devices);
        let line = format!("mckey -b 127.0.0.1 -m {group} {options}");
        let each = if options.contains("-c 2") { 2 } else { 1 };
        let first = weft.start(&line).hears(port, each);
        let second = weft.start(&line).hears(port, 2 * each);
        let sender = weft.run(&format!("{line} -s"));
        for done in [&sender, &first.end(), &second.end()] {
            done.good()
                .says("data transfers complete")
                .says("return status 0");
        }
    }
    let weft = Weft::on("weft_ib0");
    // Without the loopback of a member's own messages: other members on this host still receive them. And the GID itself instead of an address, in the form
    // that RoCE's first version has for an IPv4 group.
    let deaf = format!("mckey -b 127.0.0.1 -M ff0e::ffff:{} -l", group(5));
    let receiver = weft.start(&deaf).hears(port, 1);
    weft.run(&format!("{deaf} -s")).good();
    receiver.end().good().says("data transfers complete");
    let done = weft.run("mckey -b 127.0.0.1 -M ::ffff:127.0.0.1");
    assert!(!done.is_good(), "{}", done.show());
    let group = group(4);
    let done = weft.run(&format!("mckey -b 127.0.0.1 -m {group} -C 0 -o"));
    done.good().says(&format!("joined dgid: ::ffff:{group}"));
    let done = weft.run("mckey -b 127.0.0.1 -m 127.0.0.1");
    assert!(!done.is_good(), "{}", done.show());
    done.says("failure joining");
}

/// A program of one host, which has a UDP port (or address and port, as `/proc/net/udp` has them) when it is ready, and its peer on another host.
type Meeting = (&'static str, &'static str, &'static str);

/// Datagrams between two hosts, in the form of two network namespaces.
#[test]
fn datagrams_between_two_hosts() {
    let meetings = [
        ("7174", "udaddy -S 4000", "udaddy -s 10.77.0.2 -S 4000"),
        (
            "22275",
            "mckey -b 10.77.0.2 -m 239.87.9.3 -S 4000",
            "mckey -b 10.77.0.1 -m 239.87.9.3 -S 4000 -s",
        ),
        (
            "22391",
            "mckey -b fd00:77::2 -m ff1e::77",
            "mckey -b fd00:77::1 -m ff1e::77 -s",
        ),
        (
            "22392",
            "mckey -b fd00:77::2 -m ff12::78%there",
            "mckey -b fd00:77::1 -m ff12::78%here -s",
        ),
    ];
    on_two_hosts(&Weft::on("weft_ib0"), &meetings);
}

/// The same as RoCE v2. The path MTU is 1,024 bytes on Ethernet.
#[test]
fn roce_datagrams_between_two_hosts() {
    let meetings = [
        (
            "4791",
            "udaddy -S 1024 -C 50",
            "udaddy -s 10.77.0.2 -S 1024 -C 50",
        ),
        (
            "4791",
            "udaddy -b fd00:77::2 -c 4",
            "udaddy -b fd00:77::1 -s fd00:77::2 -c 4",
        ),
        (
            "030957EF:12B7",
            "mckey -b 10.77.0.2 -m 239.87.9.3 -S 1024",
            "mckey -b 10.77.0.1 -m 239.87.9.3 -S 1024 -s",
        ),
        (
            "00001EFF000000000000000077000000:12B7",
            "mckey -b fd00:77::2 -m ff1e::77",
            "mckey -b fd00:77::1 -m ff1e::77 -s",
        ),
        (
            "000012FF000000000000000078000000:12B7",
            "mckey -b fd00:77::2 -m ff12::78%there",
            "mckey -b fd00:77::1 -m ff12::78%here -s",
        ),
    ];
    let weft = Weft::on("weft_ib0").env("WEFT_IB_WIRE", "roce");
    on_two_hosts(&weft, &meetings);
}

fn on_two_hosts(weft: &Weft, meetings: &[Meeting]) {
    const ELSEWHERE: i32 = 77;
    let needed = [
        ("udaddy", PACKAGE),
        ("mckey", PACKAGE),
        ("ip", "iproute2"),
        ("unshare", "util-linux"),
    ];
    if !have(&needed) {
        return;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/sh/two_hosts.sh");
    for (port, there, here) in meetings {
        let words = ["unshare", "-rn", "sh", script, port, there, here];
        let done = weft.start_words(&words).end();
        if !done.is_good() && (done.code() == ELSEWHERE || done.text.contains("unshare failed")) {
            say(&format!("skipped: no two namespaces here: {}", done.show()));
            return;
        }
        done.good();
        assert_eq!(done.text.matches("data transfers complete").count(), 2);
    }
}

#[test]
fn rdma_client_and_server() {
    if !have(&[("rdma_client", PACKAGE), ("rdma_server", PACKAGE)]) {
        return;
    }
    for weft in carriers("weft0") {
        let port = free_port();
        let (server, client) = pair(
            &weft,
            port,
            &format!("rdma_server -s 127.0.0.1 -p {port}"),
            &format!("rdma_client -s 127.0.0.1 -p {port}"),
        );
        server.says("rdma_server: end 0");
        client.says("rdma_client: end 0");
    }
}

#[test]
fn rdma_xclient_and_xserver() {
    if !have(&[("rdma_xclient", PACKAGE), ("rdma_xserver", PACKAGE)]) {
        return;
    }
    for weft in carriers("weft0") {
        let port = free_port();
        let (server, client) = pair(
            &weft,
            port,
            &format!("rdma_xserver -p {port}"),
            &format!("rdma_xclient -s 127.0.0.1 -p {port}"),
        );
        server.says("rdma_xserver: end 0");
        client.says("rdma_xclient: end 0");
    }
}

/// XRC by `rdma_cm`: the server's answer names the queue for the client's message. `weft0`, the first device, has no XRC.
#[test]
fn rdma_xclient_and_xserver_with_xrc() {
    if !have(&[("rdma_xclient", PACKAGE), ("rdma_xserver", PACKAGE)]) {
        return;
    }
    for devices in ["weft0,weft_ib0", "weft_ib0"] {
        for weft in carriers(devices) {
            let port = free_port();
            let (server, client) = pair(
                &weft,
                port,
                &format!("rdma_xserver -c x -p {port}"),
                &format!("rdma_xclient -c x -s 127.0.0.1 -p {port}"),
            );
            server.says("rdma_xserver: end 0");
            client.says("rdma_xclient: end 0");
        }
    }
    // Without weft_ib0 there is no XRC: the program reports that.
    let port = free_port();
    let client = Weft::on("weft0").run(&format!("rdma_xclient -c x -s 127.0.0.1 -p {port}"));
    client.says("rdma_create_ep: Operation not supported");
}

#[test]
fn cmtime() {
    if !have(&[("cmtime", PACKAGE)]) {
        return;
    }
    for weft in carriers("weft0") {
        let port = free_port();
        let server = weft.start(&format!("cmtime -b 127.0.0.1 -p {port} -c 50"));
        let server = server.listens(port);
        let client = weft.run(&format!("cmtime -s 127.0.0.1 -p {port} -c 50"));
        client.good();
        // step : total ms, max ms, min us, us / conn
        let measured = |step| {
            let lines = client.text.lines().filter_map(|line| line.split_once(':'));
            let numbers = lines.filter(|(name, _)| name.trim_end() == step);
            let numbers = numbers.flat_map(|(_, numbers)| numbers.split_whitespace());
            numbers.filter_map(|n| n.parse::<f64>().ok()).sum::<f64>()
        };
        for step in [
            "resolve addr",
            "resolve route",
            "create qp",
            "connect",
            "disconnect",
        ] {
            assert!(measured(step) > 0.0, "{step}: {}", client.show());
        }
        drop(server);
    }
}
