//! `WEFT_TLS` under unmodified programs.

use weft_dropin::{Weft, free_port, have, pair};

const PACKAGE: &str = "rdmacm-utils";

fn secured(devices: &str) -> Weft {
    Weft::on(devices).over_tcp().env("WEFT_TLS", "on")
}

#[test]
fn programs_run_over_tls() {
    if !have(&[("rping", PACKAGE), ("ib_write_bw", "perftest")]) {
        return;
    }
    for devices in ["weft0", "weft_ib0"] {
        let port = free_port();
        let common = format!("-a 127.0.0.1 -p {port} -C 50 -v -V -S 60000");
        let (server, client) = pair(
            &secured(devices),
            port,
            &format!("rping -s {common}"),
            &format!("rping -c {common}"),
        );
        server.says("server ping data: rdma-ping-49: ");
        client
            .says("ping data: rdma-ping-49: ")
            .never_says("mismatch");
    }
    let port = free_port();
    let common = format!("ib_write_bw -d weft_ib0 -F -p {port} -s 65536 -n 500");
    let (server, client) = pair(
        &secured("weft_ib0"),
        port,
        &common,
        &format!("{common} 127.0.0.1"),
    );
    server.good();
    client.good();
}

/// A program without TLS and one with it do not connect, in either role; the log has the reason.
#[test]
fn one_side_without_tls_is_refused() {
    if !have(&[("rping", PACKAGE)]) {
        return;
    }
    let plain = || Weft::on("weft0").over_tcp().env("WEFT_LOG", "warn");
    for (near, far) in [
        (plain(), plain().env("WEFT_TLS", "on")),
        (plain().env("WEFT_TLS", "on"), plain()),
    ] {
        let port = free_port();
        let server = far.start(&format!("rping -s -a 127.0.0.1 -p {port} -v"));
        let server = server.listens(port);
        let done = near.run(&format!("rping -c -a 127.0.0.1 -p {port} -C 1 -v"));
        assert!(!done.is_good(), "{}", done.show());
        done.never_says("rdma-ping-0");
        server.kill().says("TLS").never_says("rdma-ping-0");
    }
}

/// Invalid settings: no device, and the reason in the log. No connection is made without TLS.
#[test]
fn bad_settings_are_an_error() {
    if !have(&[("rping", PACKAGE)]) {
        return;
    }
    for (name, value) in [
        ("WEFT_TLS", "yes"),
        ("WEFT_TLS_KEY", "/nowhere"),
        ("WEFT_LOCAL", "foo"),
        ("WEFT_CRC", "maybe"),
        ("WEFT_LOG", "loud"),
    ] {
        let weft = Weft::on("weft0").env("WEFT_LOG", "error").env(name, value);
        let done = weft.run(&format!("rping -c -a 127.0.0.1 -p {} -C 1", free_port()));
        assert!(!done.is_good(), "{}", done.show());
        done.says(name);
    }
}
