//! The machine's own RDMA devices: `weft doctor`, its report, and `weft stat`, with the drop-in libraries as the system's.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::{Listener, Output, names, noise, weft};
use crate::fs::Server;

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

/// A listener on the RNIC, in a folder of its own.
fn receiving(to: &Path, args: &[&str]) -> Listener {
    let args = [&["--device=weft0", "--plain"], args].concat();
    Listener::start_with(&mut weft_with_devices(), to, "127.0.0.1:0", &args)
}

fn sent(listener: &Listener, args: &[&str]) -> Output {
    let mut cp = weft_with_devices();
    cp.arg("cp").args(args);
    Output::of(cp.arg(listener.target("")))
}

#[test]
fn files_go_through_the_device_that_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    fs::create_dir(&to).unwrap();
    // A path that is too long for inline data, and files that go together.
    let deep = from.join("d".repeat(200)).join("e".repeat(200));
    fs::create_dir_all(&deep).unwrap();
    let mut wanted = vec![(deep.join("small"), noise(5000, 1))];
    wanted.push((from.join("large"), noise(64 << 20, 2)));
    wanted.extend((0..100).map(|i| (from.join(i.to_string()), noise(i * 100, i as u64))));
    for (path, bytes) in &wanted {
        fs::write(path, bytes).unwrap();
    }
    let mut listener = receiving(&to, &["--open", "--once"]);
    let from = from.to_str().unwrap();
    let out = sent(&listener, &["--device=weft0", "--plain", "-r", from]);
    out.ok();
    assert!(out.stdout.contains(" over an RNIC"), "{}", out.stdout);
    assert_eq!(listener.wait(), Some(0));
    for (path, bytes) in &wanted {
        let got = to.join(path.strip_prefix(dir.path()).unwrap());
        assert!(fs::read(&got).unwrap() == *bytes, "{}", got.display());
    }
}

#[test]
fn the_soft_rnic_and_another_one_send_to_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::write(&source, noise(5 << 20, 3)).unwrap();
    let (soft, rnic) = ("--device=soft", "--device=weft0");
    for (here, there) in [(soft, rnic), (rnic, soft)] {
        let to = dir.path().join(there);
        fs::create_dir(&to).unwrap();
        let args = [there, "--plain", "--open"];
        let mut listener = weft_with_devices();
        let listener = Listener::start_with(&mut listener, &to, "127.0.0.1:0", &args);
        sent(&listener, &[here, "--plain", source.to_str().unwrap()]).ok();
        assert!(fs::read(to.join("source")).unwrap() == noise(5 << 20, 3));
    }
}

#[test]
fn a_shared_key_is_proved_on_an_rnic_too() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    for key in ["key", "other"] {
        Output::of(weft().args(["cp", "--gen-key", &file(key)])).ok();
    }
    fs::write(file("data"), b"data").unwrap();
    let listener = receiving(&to, &["--key", &file("key")]);
    let send = |key: &str| {
        let args = [
            "--device=weft0",
            "--plain",
            "--key",
            &file(key),
            &file("data"),
        ];
        sent(&listener, &args)
    };
    let wrong = send("other");
    assert!(wrong.stderr.contains("the key is not"), "{}", wrong.stderr);
    assert_eq!(names(&to), [""; 0]);
    send("key").ok();
    assert_eq!(fs::read(to.join("data")).unwrap(), b"data");
}

#[test]
fn nothing_goes_unprotected_by_an_rnic_that_nobody_has_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().to_str().unwrap();
    let cases: [(&[&str], &str); 4] = [
        (
            &["--device=weft0", "--listen", at, "--open"],
            "the RNIC weft0 cannot encrypt",
        ),
        (
            &["--device=weft0", "--plain", "--listen", at],
            "on an RNIC senders cannot show their keys",
        ),
        (
            &["--device=weft0", "/etc/hostname", "127.0.0.1:9:"],
            "the RNIC weft0 cannot encrypt",
        ),
        (
            &["--device=none", "--plain", "/etc/hostname", "127.0.0.1:9:"],
            "there is no RDMA device none",
        ),
    ];
    for (args, words) in cases {
        let out = Output::of(weft_with_devices().arg("cp").args(args));
        assert!(out.stderr.contains(words), "{args:?}: {}", out.stderr);
    }
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

/// Buffers of a server on one device, from a client on another.
#[test]
fn remote_memory_as_files_is_reached_through_the_device_that_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let bytes = noise(20_000_001, 5);
    fs::write(file("in"), &bytes).unwrap();
    fs::create_dir(file("offered")).unwrap();
    fs::write(file("offered/film"), noise(700_000, 1)).unwrap();
    for (here, there) in [("weft0", "weft0"), ("soft", "weft0"), ("weft0", "soft")] {
        let serve = ["--keep", "--plain", "--open", "--device", there];
        let offered = file("offered");
        let serve = [&serve[..], &[offered.as_str()]].concat();
        let server = Server::start_with(&mut weft_with_devices(), &serve);
        let run = |args: &[&str]| {
            let mut fs = weft_with_devices();
            fs.args(["-v", "fs"]).args(args);
            Output::of(fs.args(["--plain", "--device", here]))
        };
        let put = run(&["put", &file("in"), &server.path("data")]);
        put.ok();
        let words = match here {
            "soft" => "the soft RNIC carries",
            _ => "the RNIC weft0 carries",
        };
        assert!(put.stderr.contains(words), "{}", put.stderr);
        for (name, wanted) in [("data", &bytes), ("film", &noise(700_000, 1))] {
            run(&["get", &server.path(name), &file("out")]).ok();
            assert!(fs::read(file("out")).unwrap() == *wanted, "{here} {there}");
            fs::remove_file(file("out")).unwrap();
        }
        let listed = run(&["ls", &server.path("")]);
        listed.ok();
        assert!(listed.stdout.contains("20000001"), "{}", listed.stdout);
        // weft0 is an iWARP device, which has no atomics.
        let appended = run(&["put", "--append", &file("in"), &server.path("data")]);
        let words = "Operation not supported";
        assert!(appended.stderr.contains(words), "{}", appended.stderr);
    }
}

#[test]
fn nobody_offers_memory_unprotected_by_mistake() {
    let refused = |args: &[&str], words: &str, hint: &str| {
        let mut serve = weft_with_devices();
        let out = Output::of(serve.args(["fs", "serve"]).args(args));
        for words in [words, hint] {
            assert!(out.stderr.contains(words), "{args:?}: {}", out.stderr);
        }
        for other in ["cannot listen", "port 0 takes"] {
            assert!(!out.stderr.contains(other), "{args:?}: {}", out.stderr);
        }
    };
    refused(
        &["--device=weft0", "--open", "--bind=127.0.0.1:0"],
        "cannot encrypt what it sends",
        "add --plain on both sides",
    );
    refused(
        &["--device=weft0", "--plain", "--bind=127.0.0.1:0"],
        "clients cannot show their keys",
        "--open lets everybody in",
    );
    refused(
        &["--device=mlx5_9", "--plain", "--open", "--bind=127.0.0.1:0"],
        "no RDMA device mlx5_9",
        "`weft doctor`",
    );
    refused(
        &["--plain", "--authorized=/dev/null", "--bind=127.0.0.1:0"],
        "--authorized and --plain exclude each other",
        "--open lets everybody in",
    );
    refused(
        &["--plain", "--bind=0.0.0.0:0"],
        "without encryption no client can show its key",
        "--open lets everybody in",
    );
}

#[test]
fn a_server_without_encryption_has_no_key() {
    let config = tempfile::tempdir().unwrap();
    let mut weft = weft_with_devices();
    weft.env("XDG_CONFIG_HOME", config.path());
    let server = Server::start_with(&mut weft, &["--plain"]);
    let mut stat = weft_with_devices();
    let stat = stat.args(["fs", "ls", "--plain", &server.path("")]);
    Output::of(stat).ok();
    assert_eq!(server.said(), [""; 0]);
    assert!(fs::read_dir(config.path()).unwrap().next().is_none());
}
