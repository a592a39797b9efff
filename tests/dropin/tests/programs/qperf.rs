//! qperf: queue pairs joined by `rdma_cm` (`-cm 1`), because without it qperf uses LIDs and no GIDs.

use weft_dropin::{Weft, free_port, have};

use super::carriers;

/// The tests of sockets and RDMA that report a result, and the beginning of that line.
const TESTS: &[(&str, &str)] = &[
    ("rc_lat", "latency"),
    ("rc_bw", "bw"),
    ("rc_rdma_write_lat", "latency"),
    ("rc_rdma_write_bw", "bw"),
    ("rc_rdma_read_lat", "latency"),
    ("rc_rdma_read_bw", "bw"),
    ("rc_compare_swap_mr", "msg_rate"),
    ("rc_fetch_add_mr", "msg_rate"),
    ("ver_rc_compare_swap", "msg_rate"),
    ("ver_rc_fetch_add", "msg_rate"),
];

const BOTH_WAYS: (&str, &str) = ("rc_bi_bw", "bw");

fn qperf(weft: &Weft) {
    let port = free_port();
    let _server = weft.start(&format!("qperf -lp {port}")).listens(port);
    let tests = TESTS.iter().chain([&BOTH_WAYS]);
    for (test, measured) in tests {
        let done = weft.run(&format!("qperf 127.0.0.1 -lp {port} -t 1 -cm 1 {test}"));
        done.good();
        done.says(&format!("{measured} "))
            .never_says("failed")
            .never_says("error");
    }
}

#[test]
fn qperf_on_weft0() {
    if have(&[("qperf", "qperf")]) {
        // Over TCP the clients of rc_bw and rc_bi_bw close after messages for which no receive is posted.
        for weft in &carriers("weft0") {
            qperf(weft);
        }
    }
}

#[test]
fn qperf_on_weft_ib0() {
    if have(&[("qperf", "qperf")]) {
        for weft in &carriers("weft_ib0") {
            qperf(weft);
        }
    }
}
