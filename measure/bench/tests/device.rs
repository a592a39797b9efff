//! `weft bench verbs --device`: weft's own drop-in libraries are in the place of the machine's.

use std::process::Command;

#[test]
fn the_rnic_of_the_machine_is_measured_beside_perftest() {
    let weft = |device: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weft-bench"));
        command
            .args(["verbs", "--device", device, "--runs", "2"])
            .args(["--seconds", "0.005", "--size", "64,5000"])
            .env("WEFT_NIC_LIB", weft_dropin::libraries())
            .env_remove("WEFT_DEVICE");
        let done = command.output().expect("weft-bench runs");
        let text = [done.stdout, done.stderr].concat();
        (
            done.status.code(),
            String::from_utf8_lossy(&text).into_owned(),
        )
    };
    let (code, text) = weft("weft0");
    // Without perftest its column is empty.
    assert_eq!(code, Some(0), "{text}");
    for operation in ["send", "write", "read"] {
        let rows = text
            .lines()
            .filter(|line| line.trim_start().starts_with(operation) && line.contains(" ("));
        assert_eq!(rows.count(), 4, "{operation}: {text}");
    }
    let (code, text) = weft("none0");
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("there is no RDMA device none0"), "{text}");
}
