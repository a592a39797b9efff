//! Compiles the launcher, a program without libraries, which the library embeds as bytes.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=program/main.rs");
    println!("cargo::rerun-if-changed=build.rs");
    let var = |name| std::env::var(name).unwrap_or_default();
    let out = Path::new(&var("OUT_DIR")).join("weft-cc");
    // Elsewhere `weft cc` does the same in a longer time.
    let known = var("CARGO_CFG_TARGET_OS") == "linux"
        && ["x86_64", "aarch64"].contains(&var("CARGO_CFG_TARGET_ARCH").as_str());
    if !known {
        std::fs::write(out, []).expect("an empty launcher");
        return;
    }
    let mut command = Command::new(var("RUSTC"));
    if let Ok(linker) = std::env::var("RUSTC_LINKER") {
        command.arg(format!("-Clinker={linker}"));
    }
    command
        .args([
            "--edition=2024",
            "--crate-type=bin",
            "--crate-name=weft_cc",
            "--target",
            &var("TARGET"),
        ])
        .args([
            "-Cpanic=abort",
            "-Copt-level=s",
            "-Crelocation-model=static",
            "-Cstrip=symbols",
            "-Dwarnings",
        ])
        .args(
            [
                "nostartfiles",
                "nostdlib",
                "static",
                "Wl,--build-id=none",
                "Wl,-z,norelro",
            ]
            .map(|arg| format!("-Clink-arg=-{arg}")),
        )
        .arg("-o")
        .arg(out)
        .arg("program/main.rs");
    let status = command.status().expect("rustc");
    assert!(status.success(), "the launcher does not compile");
}
