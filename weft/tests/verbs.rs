//! `weft verbs`: what it sets, what it warns of, and how it ends. The libraries themselves are tested in tests/dropin.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Output, copy_program, weft};

/// A folder with two files that have the mark of our libraries, and nothing else of them.
struct Libraries(tempfile::TempDir);

impl Libraries {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["libibverbs.so.1", "librdmacm.so.1"] {
            fs::write(dir.path().join(name), b"\0WEFT_PRIVATE_1\0").unwrap();
        }
        Self(dir)
    }

    fn path(&self) -> PathBuf {
        self.0.path().canonicalize().unwrap()
    }

    fn verbs(&self) -> Command {
        let mut command = plain();
        command.arg("--lib").arg(self.path());
        command
    }
}

/// `weft verbs`, with nothing of the environment of this test.
fn plain() -> Command {
    let mut command = weft();
    for name in [
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "WEFT_VERBS_LIB",
        "WEFT_DEVICES",
        "WEFT_FAULTS",
        "WEFT_LOG",
        "WEFT_LOCAL",
        "WEFT_SYSFS",
    ] {
        command.env_remove(name);
    }
    command.arg("verbs");
    command
}

/// A file that can be executed, as far as its mode says.
fn executable(dir: &Path, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn the_program_finds_the_settings() {
    let libs = Libraries::new();
    let faults = libs.path().join("faults");
    fs::write(&faults, "").unwrap();
    let show = "echo $LD_LIBRARY_PATH,$WEFT_DEVICES,$WEFT_FAULTS,$WEFT_LOG,$WEFT_LOCAL,$0,$1";
    let out = Output::of(
        libs.verbs()
            .current_dir(libs.path())
            .args("--devices weft_ib0,weft0 --faults faults --log debug --local off".split(' '))
            .args(["--", "sh", "-c", show, "zero", "--one"]),
    );
    out.ok();
    let lib = libs.path();
    let (lib, faults) = (lib.display(), faults.display());
    assert_eq!(
        out.stdout,
        format!("{lib},weft_ib0,weft0,{faults},debug,off,zero,--one\n")
    );
    assert_eq!(out.stderr, "");
    // What was there stays, behind ours; what is not given is not set.
    let out = Output::of(
        libs.verbs()
            .env("LD_LIBRARY_PATH", "/a:/b")
            .env("WEFT_LOCAL", "require")
            .args(["sh", "-c", show]),
    );
    out.ok();
    assert_eq!(out.stdout, format!("{lib}:/a:/b,,,warn,require,sh,\n"));
}

/// An option takes precedence over its variable.
#[test]
fn a_variable_with_a_value_that_is_not_accepted_is_named() {
    let libs = Libraries::new();
    for (name, value, accepted) in [
        ("WEFT_DEVICES", "foo", "weft0 and weft_ib0"),
        ("WEFT_LOCAL", "foo", "off, auto or require"),
        ("WEFT_CRC", "maybe", "on or off"),
        ("WEFT_PEER_DEATH", "x", "silent or flush"),
    ] {
        let out = Output::of(libs.verbs().env(name, value).args(["--", "true"]));
        assert_eq!(out.code, 125, "{out:?}");
        let said = format!("{name}={value}: it has to be ");
        assert!(out.stderr.contains(&said), "{out:?}");
        assert!(out.stderr.contains(accepted), "{out:?}");
    }
    let mut told = libs.verbs();
    told.env("WEFT_LOCAL", "foo");
    Output::of(told.args(["--local", "off", "--", "true"])).ok();
    let out = Output::of(weft().env("WEFT_LOG", "loud").arg("hello"));
    assert_eq!(out.code, 2);
    assert!(out.stderr.contains("WEFT_LOG=loud"), "{out:?}");
}

#[test]
fn what_shows_the_devices_in_sys_is_loaded_first_where_it_is() {
    let libs = Libraries::new();
    let printed = |libs: &Path, before: &str| {
        let mut command = plain();
        command.arg("--lib").arg(libs).arg("--print-env");
        let out = Output::of(command.env("LD_PRELOAD", before));
        out.ok();
        let mut lines = out.stdout.lines().map(str::to_owned);
        lines.find(|line| line.contains("LD_PRELOAD"))
    };
    assert_eq!(printed(&libs.path(), ""), None);
    fs::write(libs.path().join("libweft-sysfs.so"), "").unwrap();
    let file = libs.path().join("libweft-sysfs.so");
    let line = printed(&libs.path(), "").unwrap();
    assert!(line.contains(&format!("{}'", file.display())), "{line}");
    let line = printed(&libs.path(), "/other.so").unwrap();
    assert!(
        line.contains(&format!("{}:/other.so", file.display())),
        "{line}"
    );
    // The loader takes a space for the end of a name.
    let odd = libs.path().join("a b");
    fs::create_dir(&odd).unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1", "libweft-sysfs.so"] {
        symlink(libs.path().join(name), odd.join(name)).unwrap();
    }
    let line = printed(&odd, "").unwrap();
    assert!(
        !line.contains(' ') || !line.contains("a b/libweft"),
        "{line}"
    );
    assert!(line.contains("libweft-sysfs.so"), "{line}");
}

#[test]
fn the_settings_are_printed_for_a_shell() {
    let libs = Libraries::new();
    let odd = libs.path().join("it's here");
    fs::create_dir(&odd).unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        symlink(libs.path().join(name), odd.join(name)).unwrap();
    }
    let line = format!(
        "eval \"$('{}' verbs --lib \"$1\" --devices weft0 --print-env)\"; echo \"$LD_LIBRARY_PATH,$WEFT_DEVICES\"",
        env!("CARGO_BIN_EXE_weft")
    );
    let mut shell = Command::new("sh");
    shell.env_remove("LD_LIBRARY_PATH");
    let out = Output::of(shell.args(["-c", &line, "sh"]).arg(&odd));
    out.ok();
    assert_eq!(out.stdout, format!("{},weft0\n", odd.display()));
}

#[test]
fn the_libraries_are_looked_for_and_known() {
    let libs = Libraries::new();
    // Beside the program, as in an unpacked release.
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("bin")).unwrap();
    let copy = home.path().join("bin/weft");
    copy_program(env!("CARGO_BIN_EXE_weft"), &copy);
    let run = || {
        let mut command = Command::new(&copy);
        command.env_remove("WEFT_VERBS_LIB").args(["verbs", "true"]);
        Output::of(&mut command)
    };
    let out = run();
    assert_eq!(out.code, 125);
    assert!(out.stderr.contains("./x dist"), "{}", out.stderr);
    symlink(libs.path(), home.path().join("lib")).unwrap();
    run().ok();
    // The distribution's libraries are not ours.
    fs::write(libs.path().join("librdmacm.so.1"), b"RDMACM_1.0").unwrap();
    assert_eq!(run().code, 125);
    // Packages have a folder of their own beside those.
    let packaged = Libraries::new();
    symlink(packaged.path(), libs.path().join("weft")).unwrap();
    run().ok();
    let out = Output::of(plain().env("WEFT_VERBS_LIB", libs.path()).arg("true"));
    assert_eq!(out.code, 125);
    assert!(out.stderr.contains("./x dist"), "{}", out.stderr);
}

#[test]
fn it_ends_as_the_program_or_as_env_does() {
    let libs = Libraries::new();
    let dir = tempfile::tempdir().unwrap();
    let code = |args: &[&str]| Output::of(libs.verbs().args(args)).code;
    assert_eq!(code(&["sh", "-c", "exit 42"]), 42);
    assert_eq!(code(&["no-such-program-anywhere"]), 127);
    assert_eq!(code(&["/no/such/program"]), 127);
    let file = dir.path().join("data");
    fs::write(&file, "").unwrap();
    assert_eq!(code(&[file.to_str().unwrap()]), 126);
    assert_eq!(code(&["/"]), 126);
    let out = Output::of(libs.verbs().env("PATH", dir.path()).arg("data"));
    assert_eq!(out.code, 126);
    assert_eq!(code(&["--faults", "/no/such/file", "true"]), 125);
    // A usage error is clap's.
    assert_eq!(code(&[]), 2);
    assert_eq!(code(&["--devices", "mlx5_0", "true"]), 2);
    assert_eq!(code(&["--local", "never", "true"]), 2);
}

#[test]
fn a_bad_script_of_faults_ends_it_before_the_program() {
    let libs = Libraries::new();
    let file = libs.path().join("faults");
    fs::write(&file, "send 5: delay 1ms\nsend 10: explode\n").unwrap();
    let started = |verbs: &mut Command| Output::of(verbs.args(["sh", "-c", "echo started"]));
    for verbs in [
        libs.verbs().arg("--faults").arg(&file),
        libs.verbs().env("WEFT_FAULTS", &file),
    ] {
        let out = started(verbs);
        assert_eq!((out.code, &*out.stdout), (125, ""));
        assert!(out.stderr.contains("faults: line 2: "), "{}", out.stderr);
    }
    assert_eq!(
        started(libs.verbs().env("WEFT_FAULTS", "/no/such")).code,
        125
    );
    started(libs.verbs().env("WEFT_FAULTS", "")).ok();
    fs::write(&file, "send 5: delay 1ms\n").unwrap();
    started(libs.verbs().env("WEFT_FAULTS", &file)).ok();
}

#[test]
fn programs_that_will_not_come_to_the_libraries_are_warned_of() {
    let libs = Libraries::new();
    let dir = tempfile::tempdir().unwrap();
    // Copies of a real program, changed in a way that keeps them from being run but not from being looked at.
    let real = fs::read("/bin/true").unwrap();
    let mut foreign = real.clone();
    foreign[18] ^= 0x40;
    let foreign = executable(dir.path(), "foreign", foreign);
    let out = Output::of(libs.verbs().arg(&foreign));
    assert!(out.stderr.contains("kind of machine"), "{}", out.stderr);

    let mut fixed = real.clone();
    let table = u64::from_le_bytes(real[32..40].try_into().unwrap()) as usize;
    for header in fixed[table..]
        .chunks_exact_mut(56)
        .take(usize::from(real[56]))
    {
        if header[0] == 3 {
            header[0] = 0;
        }
    }
    let fixed = executable(dir.path(), "fixed", fixed);
    let out = Output::of(libs.verbs().arg(&fixed));
    assert!(out.stderr.contains("statically"), "{}", out.stderr);

    let script = executable(dir.path(), "script", format!("#!{}\n", foreign.display()));
    let out = Output::of(libs.verbs().arg(&script));
    assert!(out.stderr.contains("kind of machine"), "{}", out.stderr);
    // A script of itself has an end.
    let own = dir.path().join("own");
    executable(dir.path(), "own", format!("#!{}\n", own.display()));
    assert_eq!(Output::of(libs.verbs().arg(&own)).code, 126);

    if rustix::process::geteuid().is_root() {
        let other = executable(dir.path(), "other", &real);
        std::os::unix::fs::chown(&other, Some(65534), Some(65534)).unwrap();
        fs::set_permissions(&other, fs::Permissions::from_mode(0o4755)).unwrap();
        let out = Output::of(libs.verbs().arg(&other));
        assert!(out.stderr.contains("setuid"), "{}", out.stderr);
    } else {
        println!("skipped: needs root, to make a setuid program of another user");
    }
}

#[test]
fn an_rpath_that_wins_is_warned_of() {
    let libs = Libraries::new();
    let dir = tempfile::tempdir().unwrap();
    let link = |name: &str, tags: &str| {
        let path = dir.path().join(name);
        let mut cc = Command::new("cc");
        cc.args(["-x", "c", "-", "-Wl,-rpath,$ORIGIN/own", tags, "-o"]);
        cc.arg(&path).stdin(std::process::Stdio::piped());
        let mut cc = cc.spawn().unwrap();
        let mut source = cc.stdin.take().unwrap();
        std::io::Write::write_all(&mut source, b"int main(void) { return 0; }").unwrap();
        drop(source);
        assert!(cc.wait().unwrap().success());
        path
    };
    let (old, new) = (
        link("old", "-Wl,--disable-new-dtags"),
        link("new", "-Wl,--enable-new-dtags"),
    );
    let warned = |program: &Path| {
        let out = Output::of(libs.verbs().arg(program));
        out.ok();
        out.stderr.contains("DT_RPATH")
    };
    assert!(!warned(&old), "there is nothing in its folder");
    fs::create_dir(dir.path().join("own")).unwrap();
    fs::write(dir.path().join("own/libibverbs.so.1"), "another").unwrap();
    assert!(warned(&old));
    assert!(!warned(&new), "the loader looks at DT_RUNPATH last");
}
