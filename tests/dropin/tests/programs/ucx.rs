//! UCX, on the persona: it refuses iWARP devices.

use weft_dropin::{Weft, free_port, have, pair};

use super::carriers;

/// Reliable connections, and the datagrams by which their ends meet.
pub(super) fn reliable(weft: Weft) -> Weft {
    weft.env("UCX_TLS", "rc_verbs,ud_verbs,self")
        .env("UCX_NET_DEVICES", "weft_ib0:1")
}

/// Datagrams alone: UCX makes them reliable itself.
#[test]
fn datagrams() {
    let weft = Weft::on("weft_ib0");
    for options in ["am_lat -s 64", "am_bw -D bcopy -s 2048"] {
        let (test, options) = options.split_once(' ').unwrap();
        let options = format!("-d weft_ib0:1 -x ud_verbs -n 500 -w 50 {options}");
        ucx(weft.clone(), test, &options);
    }
}

/// UCX's lower layer: one transport and one device, without its own choice.
#[test]
fn the_transport_alone() {
    for weft in carriers("weft_ib0") {
        for options in [
            "am_lat -s 64",
            "am_bw -D bcopy -s 4096",
            "am_bw -D zcopy -s 4096",
            "put_lat -s 64",
            "put_bw -D zcopy -s 65536",
            "get -D zcopy -s 65536",
            "fadd -s 8",
            "cswap -s 8",
        ] {
            let (test, options) = options.split_once(' ').unwrap();
            let options = format!("-d weft_ib0:1 -x rc_verbs -n 500 -w 50 {options}");
            ucx(weft.clone(), test, &options);
        }
    }
}

fn ucx(weft: Weft, test: &str, options: &str) {
    if !have(&[("ucx_perftest", "ucx-utils")]) {
        return;
    }
    let port = free_port();
    let common = format!("-p {port} -t {test} {options} -f");
    let (_, client) = pair(
        &reliable(weft),
        port,
        &format!("ucx_perftest {common}"),
        &format!("ucx_perftest 127.0.0.1 {common}"),
    );
    // iterations, latencies, bandwidth, rates
    let table = client.table();
    // Values below the clock's step are 0; the rates are not.
    let good = table
        .iter()
        .any(|row| row.len() >= 6 && row.last().is_some_and(|rate| *rate > 0.0));
    assert!(good, "{}", client.show());
}

#[test]
fn tags() {
    for weft in carriers("weft_ib0") {
        ucx(weft.clone(), "tag_lat", "-n 500 -w 50");
        ucx(weft.clone(), "tag_bw", "-n 200 -w 20 -s 65536");
        // Above the threshold of the rendezvous protocol.
        ucx(weft, "tag_bw", "-n 50 -w 5 -s 1048576");
    }
}

#[test]
fn one_sided() {
    for weft in carriers("weft_ib0") {
        ucx(weft.clone(), "ucp_put_bw", "-n 200 -w 20 -s 65536");
        ucx(weft.clone(), "ucp_get", "-n 200 -w 20 -s 65536");
        ucx(weft, "ucp_put_lat", "-n 200 -w 20 -s 8");
    }
}

#[test]
fn atomics() {
    for test in ["ucp_fadd", "ucp_cswap", "ucp_swap", "ucp_add"] {
        ucx(Weft::on("weft_ib0"), test, "-n 200 -w 20 -s 8");
    }
}

#[test]
fn streams_and_active_messages() {
    ucx(Weft::on("weft_ib0"), "stream_bw", "-n 200 -w 20 -s 16384");
    ucx(Weft::on("weft_ib0"), "ucp_am_lat", "-n 200 -w 20 -s 64");
}
