//! `weft run`: what it sets, what it runs plain, and how it ends. The library itself is tested in tests/run.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::weft;

/// A folder with a file that has the mark of our library, and nothing else of it.
fn library() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("libweft-run.so"), b"\0weft-run-ledger\0").unwrap();
    dir
}

/// `weft run`, with nothing of the environment of this test.
fn run(lib: &Path) -> Command {
    let mut command = weft();
    for name in [
        "LD_PRELOAD",
        "WEFT_RUN",
        "WEFT_RUN_LIB",
        "WEFT_RUN_EXPLAIN",
        "WEFT_RUN_HOSTS",
        "WEFT_RUN_DATAGRAMS",
        "WEFT_RUN_WITH",
    ] {
        command.env_remove(name);
    }
    command.arg("run").arg("--lib").arg(lib);
    command
}

fn executable(dir: &Path, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn frames_of_datagrams_need_hosts() {
    let lib = library();
    let output = run(lib.path())
        .args(["--datagrams", "--", "true"])
        .output()
        .unwrap();
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(2), "{out}{err}");
    assert!(err.contains("--hosts"), "{err}");
}

#[test]
fn the_program_gets_the_library_before_what_is_preloaded_already() {
    let lib = library();
    let file = lib.path().canonicalize().unwrap().join("libweft-run.so");
    let script = "echo $LD_PRELOAD; echo $WEFT_RUN $WEFT_RUN_EXPLAIN; exit 7";
    let output = run(lib.path())
        .args(["--explain", "--mode", "bsdp", "--", "sh", "-c", script])
        .env("LD_PRELOAD", "libother.so")
        .output()
        .unwrap();
    let (out, err) = texts(&output);
    let expected = format!("{}:libother.so\nbsdp 1\n", file.display());
    assert_eq!((out, output.status.code()), (expected, Some(7)), "{err}");
}

#[test]
fn the_library_of_azsdp_malloc_comes_behind_it() {
    let lib = library();
    let mut command = run(lib.path());
    let script = "echo $LD_PRELOAD; echo $WEFT_RUN $WEFT_RUN_SHARED";
    command.args(["--mode", "azsdp", "--azsdp-malloc", "--azsdp-shared"]);
    command.args(["--", "sh", "-c", script]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(texts(&output).1.contains("libweft-malloc.so"), "{output:?}");
    fs::write(lib.path().join("libweft-malloc.so"), b"").unwrap();
    let (out, err) = texts(&command.output().unwrap());
    let dir = lib.path().canonicalize().unwrap();
    let dir = dir.display();
    let expected = format!("{dir}/libweft-run.so:{dir}/libweft-malloc.so\nazsdp trust\n");
    assert_eq!(out, expected, "{err}");
}

#[test]
fn users_are_given_to_the_library_by_their_numbers() {
    let lib = library();
    let shown = |command: &mut Command| {
        let output = command
            .args(["--", "sh", "-c", "echo $WEFT_RUN_WITH"])
            .output();
        let output = output.unwrap();
        let (out, err) = texts(&output);
        (output.status.code(), out.trim().to_owned(), err)
    };
    for (option, variable, numbers) in [
        (Some("root,12345"), None, "0,12345"),
        (Some("any"), Some("7"), "any"),
        (None, Some("root"), "0"),
        (None, None, ""),
    ] {
        let mut command = run(lib.path());
        command.args(option.into_iter().flat_map(|users| ["--with", users]));
        command.envs(variable.map(|users| ("WEFT_RUN_WITH", users)));
        let (code, out, err) = shown(&mut command);
        assert_eq!((code, out.as_str()), (Some(0), numbers), "{err}");
    }
    let (code, _, err) = shown(run(lib.path()).args(["--with", "no-such-user-here"]));
    assert_eq!(code, Some(125));
    assert!(err.contains("no-such-user-here"), "{err}");
}

/// A folder of units with one of this text, and a `systemctl` that shows another one, `shown`.
fn units(text: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("echo.service"), text).unwrap();
    executable(
        dir.path(),
        "systemctl",
        "#!/bin/sh\ncase $3 in shown.service) printf 'LoadState=loaded\\nUser=joe\\nMainPID=1\\nPrivateNetwork=yes\\n';; *) exit 1;; esac\n",
    );
    dir
}

/// `weft run` with these words and that folder. What it prints, and its status.
fn with_units(lib: &Path, units: &Path, words: &str) -> (String, Option<i32>) {
    let path = format!("{}:/usr/bin:/bin", units.display());
    let output = run(lib)
        .args(words.split_whitespace())
        .env("PATH", path)
        .env("WEFT_SYSTEMD_DIR", units)
        .output()
        .unwrap();
    let (out, err) = texts(&output);
    (out + &err, output.status.code())
}

#[test]
fn a_service_gets_a_drop_in_and_loses_it() {
    let lib = library();
    let unit = "[Service]\nUser=redis\nExecStart=/bin/sh -c true\nEnvironment=LD_PRELOAD=libother.so\nRestrictAddressFamilies=AF_INET AF_INET6\n";
    let units = units(unit);
    let file = units.path().join("echo.service.d/weft-run.conf");
    let library = lib.path().canonicalize().unwrap().join("libweft-run.so");
    let say = |words: &str| with_units(lib.path(), units.path(), words);
    let (text, code) = say("--service echo --with 12345,root --mode bsdp --print");
    assert_eq!(code, Some(0), "{text}");
    let preload = format!(
        "Environment=\"LD_PRELOAD={}:libother.so\"\n",
        library.display()
    );
    for expected in [
        preload.as_str(),
        "Environment=\"WEFT_RUN=bsdp\"\n",
        "Environment=\"WEFT_RUN_WITH=0,12345\"\n",
        "in the way: RestrictAddressFamilies=AF_INET AF_INET6: ",
        "`weft run --with redis`",
    ] {
        assert!(text.contains(expected), "no {expected} in {text}");
    }
    assert!(!file.exists());
    assert!(say("--status echo").0.contains("not under `weft run`"));
    let (text, code) = say("--service echo.service --with any");
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("systemctl restart echo.service"), "{text}");
    let written = fs::read_to_string(&file).unwrap();
    assert!(
        written.contains(&preload) && text.contains(&written),
        "{text}"
    );
    // Whoever can write to the library, or a folder on its path, runs code in the service.
    let warning = "can be changed by others than root";
    if fs::metadata(lib.path()).unwrap().uid() == 0 {
        assert!(!text.contains(warning), "{text}");
    }
    for path in [library.as_path(), lib.path()] {
        let before = fs::metadata(path).unwrap().permissions();
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
        let (text, _) = say("--service echo --print");
        assert!(text.contains(warning), "{text}");
        fs::set_permissions(path, before).unwrap();
    }
    // Once more, with other options.
    say("--service echo --explain");
    let again = fs::read_to_string(&file).unwrap();
    assert!(
        again.contains(&preload) && !again.contains("WITH"),
        "{again}"
    );
    for words in ["--status", "--status echo"] {
        let (text, _) = say(words);
        assert!(text.starts_with("echo.service: no process"), "{text}");
        assert!(text.contains("RestrictAddressFamilies"), "{text}");
    }
    assert_eq!(say("--service echo --remove").1, Some(0));
    assert!(!file.exists() && !file.parent().unwrap().exists());
    assert_eq!(say("--service echo --remove").1, Some(1));
}

#[test]
fn a_unit_is_as_systemd_shows_it() {
    let (lib, units) = (library(), units(""));
    let (text, code) = with_units(lib.path(), units.path(), "--service shown --print");
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("in the way: PrivateNetwork=yes"), "{text}");
    assert!(text.contains("--with joe"), "{text}");
    let (text, _) = with_units(lib.path(), units.path(), "--service echo --print");
    assert!(text.contains("USER is root, unless"), "{text}");
    // A dot is part of the name, unless a kind of unit follows.
    for name in ["php8.2-fpm", "redis@6.2", "redis@6.2.service"] {
        let whole = format!("{}.service", name.trim_end_matches(".service"));
        fs::write(units.path().join(&whole), "[Service]\n").unwrap();
        let words = format!("--service {name} --print");
        let (text, code) = with_units(lib.path(), units.path(), &words);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains(&whole), "{text}");
    }
    for words in [
        "--service no-such-unit-here --print",
        "--service ../echo --print",
        "--service echo.socket --print",
        "--service shown --print -- true",
        "--print -- true",
    ] {
        let (text, code) = with_units(lib.path(), units.path(), words);
        assert!(code != Some(0), "{words}: {text}");
    }
}

#[test]
fn what_cannot_be_run_has_the_exit_status_of_env() {
    let lib = library();
    let code = |command: &mut Command| command.output().unwrap().status.code();
    assert_eq!(
        code(run(lib.path()).args(["--", "no-such-program-here"])),
        Some(127)
    );
    let plain = lib.path().join("plain");
    fs::write(&plain, "x").unwrap();
    assert_eq!(code(run(lib.path()).arg("--").arg(&plain)), Some(126));
    let empty = tempfile::tempdir().unwrap();
    let output = run(empty.path()).args(["--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(texts(&output).1.contains("libweft-run.so"), "{output:?}");
}

#[test]
fn static_and_go_programs_are_told_and_run_plain() {
    let lib = library();
    // A header of this machine without an interpreter, and one with, and Go's note. Neither can run.
    let machine: u16 = if cfg!(target_arch = "aarch64") {
        183
    } else {
        62
    };
    let mut file = vec![0; 512];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01");
    put(18, &machine.to_le_bytes());
    put(32, &64_u64.to_le_bytes());
    put(54, &56_u16.to_le_bytes());
    put(56, &2_u16.to_le_bytes());
    put(64, &4_u32.to_le_bytes());
    put(64 + 8, &300_u64.to_le_bytes());
    put(64 + 32, &16_u64.to_le_bytes());
    put(300, &[4, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0]);
    put(312, b"Go\0\0");
    let alone = executable(lib.path(), "static", &file);
    file[64 + 56..64 + 60].copy_from_slice(&3_u32.to_le_bytes());
    let go = executable(lib.path(), "go", &file);
    for (program, why) in [(alone, "statically"), (go, "Go program")] {
        // What the kernel refuses is given to a shell, as execvp(3) does: whatever that makes of it stays in the folder.
        let output = run(lib.path())
            .current_dir(lib.path())
            .arg("--")
            .arg(&program)
            .output()
            .unwrap();
        let (_, err) = texts(&output);
        assert!(err.contains(why) && err.contains("plain TCP"), "{err}");
    }
    // A script is its interpreter.
    let script = executable(lib.path(), "script", "#!/bin/sh\necho \"<$WEFT_RUN>\"\n");
    let output = run(lib.path()).arg("--").arg(&script).output().unwrap();
    assert_eq!(texts(&output).0, "<auto>\n");
}

#[test]
fn musl_and_address_sanitizer_programs_run_plain() {
    let (dir, lib) = (tempfile::tempdir().unwrap(), library());
    let source = executable(
        dir.path(),
        "hello.c",
        "int puts(const char *); int main(void) { puts(\"hi\"); }",
    );
    for (compiler, option, why) in [
        ("musl-gcc", "-O1", "linked with musl"),
        ("gcc", "-fsanitize=address", "AddressSanitizer"),
    ] {
        let program = dir.path().join(compiler);
        let built = Command::new(compiler)
            .args([option, "-w", "-o"])
            .args([&program, &source])
            .output();
        if !built.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: no {compiler} {option}");
            continue;
        }
        let output = run(lib.path()).arg("--").arg(&program).output().unwrap();
        let (out, err) = texts(&output);
        assert!(output.status.success(), "{err}");
        assert_eq!(out, "hi\n");
        assert!(err.contains(why), "{err}");
    }
}
