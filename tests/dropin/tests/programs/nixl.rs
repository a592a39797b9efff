//! NIXL, from `PyPI`, which includes a UCX and a libibverbs: `LD_PRELOAD` puts ours before that one.

use weft_dropin::{Weft, libraries, say};

/// 64 MiB written and read, the bytes compared, by its UCX plugin over `weft_ib0` and over TCP, in one run.
///
/// The wheel is large, so this test runs by hand: `python3 -m venv DIR && DIR/bin/pip install --no-deps nixl-cu12 numpy`, and
/// `WEFT_NIXL=DIR/bin/python cargo test -p weft-dropin --test programs nixl -- --ignored`.
#[test]
#[ignore = "needs a wheel from PyPI"]
fn nixl() {
    let Some(python) = std::env::var_os("WEFT_NIXL") else {
        say("nixl skipped: WEFT_NIXL does not name a Python that has the wheel");
        return;
    };
    let python = python.to_str().expect("a path in UTF-8");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/nixl/transfer.py");
    let folder = libraries().display();
    let preload = format!("{folder}/libibverbs.so.1:{folder}/libweft-sysfs.so");
    let rdma = Weft::on("weft_ib0")
        .env("LD_PRELOAD", preload)
        .env("UCX_NET_DEVICES", "weft_ib0:1")
        .env("UCX_TLS", "rc_verbs,ud_verbs");
    let tcp = Weft::bare()
        .env("UCX_NET_DEVICES", "lo")
        .env("UCX_TLS", "tcp");
    let runs = [
        ("shared memory", rdma.clone()),
        ("weft over TCP", rdma.over_tcp()),
        ("UCX's own TCP", tcp),
    ];
    for (name, weft) in runs {
        let weft = weft.env("UCX_LOG_LEVEL", "info");
        let done = weft.run(&format!("{python} {script} 64"));
        done.good().says("all bytes right");
        if name != "UCX's own TCP" {
            done.says("rma(rc_verbs/weft_ib0:1)");
        }
        let rates = done.text.lines().find(|line| line.starts_with("nixl: "));
        say(&format!("{name}: {}", rates.unwrap_or_default()));
    }
}
