//! `weft advise`: the machine's numbers, what it refuses, and how it ends. What the observer records is tested in tests/run.

use std::fs;
use std::process::{Command, Output};

use crate::common::weft;

fn advise() -> Command {
    let mut command = weft();
    for name in ["LD_PRELOAD", "WEFT_ADVISE", "WEFT_ADVISE_LIB"] {
        command.env_remove(name);
    }
    command.arg("advise");
    command
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A folder with a library that any program can be started with: it stands for the observer, and observes nothing.
fn no_observer() -> Option<tempfile::TempDir> {
    let places = ["/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/lib64"];
    let mut files = places.iter().map(|dir| format!("{dir}/libm.so.6"));
    let Some(file) = files.find(|file| fs::exists(file).is_ok_and(|there| there)) else {
        eprintln!("skipped: there is no libm.so.6");
        return None;
    };
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(file, dir.path().join("libweft-advise.so")).unwrap();
    Some(dir)
}

#[test]
fn a_machine_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.html");
    let output = advise()
        .args(["--json", "-", "--html"])
        .arg(&page)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", errors(&output));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let points = json["machine"]["points"].as_array().unwrap();
    for case in [
        "copy_warm",
        "copy_cold",
        "copy_absent",
        "register",
        "tcp",
        "rings",
        "both",
    ] {
        let of_case = points.iter().filter(|point| point["case"] == case);
        let times: Vec<f64> = of_case.filter_map(|point| point["us"].as_f64()).collect();
        assert!(!times.is_empty(), "{case}");
        assert!(times.iter().all(|us| *us > 0.0), "{case}: {times:?}");
    }
    // Sixteen megabytes take longer to copy than four kilobytes, on any machine.
    let copy = |bytes: u64| {
        let mut all = points.iter();
        let point = all.find(|p| p["case"] == "copy_warm" && p["bytes"] == bytes);
        point.and_then(|p| p["us"].as_f64()).unwrap()
    };
    assert!(copy(16 << 20) > copy(4096));
    assert!(json["advice"].as_array().unwrap().len() >= 4);
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("<svg") && page.contains("Copy or register"));
}

#[test]
fn the_program_keeps_its_output_and_its_exit_status() {
    let Some(lib) = no_observer() else { return };
    let output = advise()
        .arg("--lib")
        .arg(lib.path())
        .args(["--", "sh", "-c", "echo out; exit 7"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7), "{}", errors(&output));
    assert_eq!(output.stdout, b"out\n");
    let text = errors(&output);
    assert!(text.contains("The observer was not loaded"), "{text}");
    let killed = advise()
        .arg("--lib")
        .arg(lib.path())
        .args(["--", "sh", "-c", "kill -9 $$"])
        .output()
        .unwrap();
    assert_eq!(killed.status.code(), Some(128 + 9));
}

#[test]
fn a_program_that_does_not_end_is_ended() {
    let Some(lib) = no_observer() else { return };
    let output = advise()
        .args(["--seconds", "1", "--lib"])
        .arg(lib.path())
        .args(["--", "sleep", "600"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
}

#[test]
fn what_cannot_be_watched_is_refused() {
    let Some(lib) = no_observer() else { return };
    let code = |command: &mut Command| command.output().unwrap().status.code();
    let with = |rest: &[&str]| {
        let mut command = advise();
        command.arg("--lib").arg(lib.path()).args(rest);
        command
    };
    assert_eq!(code(&mut with(&["--", "no-such-program-here"])), Some(127));
    assert_eq!(code(&mut with(&["--seconds", "0", "--", "true"])), Some(2));
    assert_eq!(code(&mut with(&["--seconds", "3"])), Some(2));
    assert_eq!(
        code(&mut with(&["--json", "/no/such/dir/x", "--", "true"])),
        Some(1)
    );
    let empty = tempfile::tempdir().unwrap();
    let output = advise()
        .arg("--lib")
        .arg(empty.path())
        .args(["--", "true"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(errors(&output).contains("./x dist"), "{}", errors(&output));
    // A program without an interpreter: a header, and nothing that could run.
    let mut file = vec![0; 512];
    let machine: u16 = if cfg!(target_arch = "aarch64") {
        183
    } else {
        62
    };
    file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    file[18..20].copy_from_slice(&machine.to_le_bytes());
    let alone = lib.path().join("static");
    fs::write(&alone, file).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&alone, mode).unwrap();
    let output = with(&["--", alone.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(
        errors(&output).contains("statically"),
        "{}",
        errors(&output)
    );
}
