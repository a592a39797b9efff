//! Mooncake's transfer engine, from `PyPI`.

use weft_dropin::{Weft, say};

/// 64 MiB written and read, verified, over its protocol `rdma` on `weft_ib0` and over its own TCP, in one run.
///
/// The wheel is large and needs its own Python, so this test runs by hand: `python3 -m venv DIR && DIR/bin/pip install mooncake-transfer-engine-non-cuda
/// numpy`,
/// and `WEFT_MOONCAKE=DIR/bin/python cargo test -p weft-dropin --test programs mooncake -- --ignored`.
#[test]
#[ignore = "needs a wheel from PyPI"]
fn mooncake() {
    let Some(python) = std::env::var_os("WEFT_MOONCAKE") else {
        say("mooncake skipped: WEFT_MOONCAKE does not name a Python that has the wheel");
        return;
    };
    let python = python.to_str().expect("a path in UTF-8");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/mooncake/transfer.py");
    let rdma = Weft::on("weft_ib0");
    let runs = [
        ("rdma in shared memory", rdma.clone(), "rdma weft_ib0"),
        ("rdma over TCP", rdma.over_tcp(), "rdma weft_ib0"),
        ("its own TCP", Weft::bare(), "tcp"),
    ];
    for (name, weft, arguments) in runs {
        let done = weft.run(&format!("{python} {script} {arguments}"));
        let rates = done.good().text.lines().find(|l| l.starts_with("write "));
        let rates = rates.unwrap_or_else(|| panic!("no rates in {}", done.show()));
        say(&format!("mooncake, {name}, MiB/s: {rates}"));
    }
}
