//! The machine's own RDMA devices: `weft doctor`, its report, and `weft stat`, with the drop-in libraries as the system's.

use std::process::Command;

use crate::common::{Output, weft};

/// The program, for which the drop-in libraries are the system's.
fn weft_with_devices() -> Command {
    let mut weft = weft();
    weft.env("WEFT_NIC_LIB", weft_dropin::libraries());
    weft
}

#[test]
fn hello_runs_on_the_device_that_is_named() {
    for way in ["--device=weft0", "WEFT_DEVICE"] {
        let mut hello = weft_with_devices();
        match way {
            "WEFT_DEVICE" => hello.arg("hello").env(way, "weft0"),
            option => hello.args(["hello", option]),
        };
        let out = Output::of(&mut hello);
        out.ok();
        for words in [
            "initiator: connected over an RNIC (weft0)",
            "responder: connected over an RNIC (weft0)",
            "initiator: read back \"Hello iWARP!\", as written",
        ] {
            assert!(out.stdout.contains(words), "{}", out.stdout);
        }
    }
    let out = Output::of(weft_with_devices().args(["hello", "--device", "mlx5_9"]));
    let words = "no RDMA device mlx5_9";
    assert!(out.stderr.contains(words), "{}", out.stderr);
    let tls = Output::of(
        weft_with_devices()
            .args(["hello", "--device=weft0"])
            .env("WEFT_TLS", "on"),
    );
    let words = "the RNIC weft0 cannot carry TLS";
    assert!(tls.stderr.contains(words), "{}", tls.stderr);
}

/// The lines of the report on a device, with what came of each operation.
fn outcomes<'a>(report: &'a str, device: &str) -> Vec<(&'a str, &'a str)> {
    let lines = report
        .lines()
        .skip_while(|line| !line.starts_with(&format!("{device}: ")));
    let lines = lines.take_while(|line| !line.is_empty());
    let lines = lines
        .filter(|line| line.starts_with("  ") && line.len() > 29 && line.as_bytes()[28] == b' ');
    lines
        .map(|line| (line[2..28].trim(), line[29..].trim()))
        .collect()
}

#[test]
fn every_operation_works_on_both_devices_of_the_drop_in_libraries() {
    let out = Output::of(weft_with_devices().args(["doctor", "--report"]));
    out.ok();
    let ib = outcomes(&out.stdout, "weft_ib0");
    assert_eq!(ib.len(), 14, "{}", out.stdout);
    // With both devices shown, rdma_cm takes an address for the first one.
    let by_cm = ib[0].1 == "ok" || ib[0].1.starts_with("not tried: ");
    assert!(by_cm, "{}", out.stdout);
    for (operation, outcome) in &ib[1..] {
        assert_eq!(*outcome, "ok", "{operation}: {}", out.stdout);
    }
    let iwarp = outcomes(&out.stdout, "weft0");
    assert_eq!(iwarp.len(), 14, "{}", out.stdout);
    for (operation, outcome) in iwarp {
        let wanted = match operation {
            "datagrams (UD)" | "datagrams with immediate" => "not supported by the device",
            _ => "ok",
        };
        assert_eq!(outcome, wanted, "{operation}: {}", out.stdout);
    }
    assert!(out.stdout.contains("libibverbs: /"), "{}", out.stdout);
}

#[test]
fn rdma_cm_connects_on_infiniband_too() {
    let mut report = weft_with_devices();
    report.env("WEFT_DEVICES", "weft_ib0");
    let out = Output::of(report.args(["doctor", "--report"]));
    out.ok();
    let ib = outcomes(&out.stdout, "weft_ib0");
    assert_eq!(
        ib.first(),
        Some(&("connection by rdma_cm", "ok")),
        "{}",
        out.stdout
    );
}

#[test]
fn doctor_and_stat_list_the_devices() {
    let out = Output::of(weft_with_devices().args(["doctor", "--json"]));
    out.ok();
    for words in [
        "weft0: iWARP, port 1 ACTIVE",
        "weft_ib0: RoCE, port 1 ACTIVE",
    ] {
        assert!(out.stdout.contains(words), "{}", out.stdout);
    }
    let out = Output::of(weft_with_devices().arg("stat"));
    out.ok();
    assert!(out.stdout.contains("weft_ib0"), "{}", out.stdout);
    let out = Output::of(weft_with_devices().args(["stat", "--json"]));
    out.ok();
    let objects = out
        .stdout
        .lines()
        .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    let rnic = objects.into_iter().find(|object| object["rnic"] == "weft0");
    let rnic = rnic.expect("the device");
    assert_eq!(
        (&rnic["state"], &rnic["port"]),
        (&"ACTIVE".into(), &1.into())
    );
    assert!(rnic["unusable"].is_null(), "{rnic}");
}

#[test]
fn our_own_libraries_are_not_taken_for_the_systems() {
    let mut doctor = weft();
    doctor.env("LD_LIBRARY_PATH", weft_dropin::libraries());
    let out = Output::of(doctor.args(["doctor", "--report"]));
    assert_eq!(out.code, 1);
    assert!(out.stdout.contains("is weft's own"), "{}", out.stdout);
    assert!(!out.stdout.contains("weft0"), "{}", out.stdout);
    // It is no fault of the machine, and no lack.
    let mut doctor = weft();
    doctor.env("LD_LIBRARY_PATH", weft_dropin::libraries());
    let out = Output::of(doctor.args(["doctor", "--json"]));
    out.ok();
    assert!(
        out.stdout.contains("none but weft's own, in software"),
        "{}",
        out.stdout
    );
}

#[test]
fn a_folder_without_libraries_is_named() {
    let out = Output::of(
        weft()
            .env("WEFT_NIC_LIB", "/nowhere/at/all")
            .args(["doctor", "--report"]),
    );
    assert_eq!(out.code, 1);
    let stdout = out.stdout;
    assert!(
        stdout.contains("/nowhere/at/all/libibverbs.so.1"),
        "{stdout}"
    );
    assert!(stdout.contains("rdma-core"), "{stdout}");
}
