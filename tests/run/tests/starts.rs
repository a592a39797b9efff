//! Programs that cannot load the library are started without it, in each way in which a program under weft can start them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use weft_run_tests::{compiled, have, library, weft};

const WAYS: [&str; 20] = [
    "execve",
    "execv",
    "execvp",
    "execvpe",
    "execl",
    "execlp",
    "execle",
    "fexecve",
    "execveat",
    "by_number",
    "at_by_number",
    "posix_spawn",
    "posix_spawnp",
    "system",
    "popen",
    "vfork",
    "from_folder",
    "from_opened_folder",
    "named_twice",
    "named_last",
];

const TELLS: &str = r#"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
extern char **environ;
int main(int n, char **words) {
    int has = 0;
    for (char **one = environ; *one; one++)
        has |= !strncmp(*one, "LD_PRELOAD=", 11) && strstr(*one, "weft");
    printf("%s", has ? "with" : "without");
    for (int at = 1; at < n; at++) printf(" %s", words[at]);
    return puts("") < 0;
}
"#;

/// Starts the program in every way; its line has to be `what` and the arguments.
fn starts(starter: &Path, dir: &Path, name: &str, what: &str) {
    let path = std::env::var("PATH").unwrap_or_default();
    let side = weft().env("PATH", format!("{}:{path}", dir.display()));
    for way in WAYS {
        let program = dir.join(name).display().to_string();
        let done = side.run(&format!("{} {way} {program} {name}", starter.display()));
        done.good();
        let mut lines = done.text.lines();
        let line = format!("{what} 1 2 3 4 5 6 7 8");
        assert!(lines.any(|it| it == line), "{way} {name}\n{}", done.show());
    }
}

fn script(dir: &Path, name: &str, interpreter: &str) {
    let path = dir.join(name);
    fs::write(&path, format!("#!{interpreter}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn programs_that_cannot_load_the_library() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(starter) = compiled("starts", &dir.display().to_string()) else {
        return;
    };
    let source = dir.join("tells.c");
    fs::write(&source, TELLS).unwrap();
    for (name, compiler, option, what) in [
        ("glibc", "cc", "-O1", "with"),
        ("musl", "musl-gcc", "-O1", "without"),
        ("asan", "gcc", "-fsanitize=address", "without"),
    ] {
        let built = Command::new(compiler)
            .args([option, "-o"])
            .args([&dir.join(name), &source])
            .output();
        if !built.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: no {compiler} {option}");
            continue;
        }
        starts(&starter, dir, name, what);
    }
    // A script is what its interpreter is, over several steps.
    if dir.join("musl").exists() {
        script(dir, "first", &dir.join("musl").display().to_string());
        script(dir, "second", &dir.join("first").display().to_string());
        let line = format!(
            "{} execve {} second",
            starter.display(),
            dir.join("second").display()
        );
        let done = weft().run(&line);
        done.good();
        assert!(done.text.contains("without "), "{}", done.show());
    }
}

/// What else is in `LD_PRELOAD` stays there.
#[test]
fn other_libraries_stay() {
    if !have(&[("musl-gcc", "musl-tools")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let at = |name: &str| dir.join(name).display().to_string();
    fs::write(at("shows.c"), "#include <stdio.h>\n#include <stdlib.h>\nint main(void) { return puts(getenv(\"LD_PRELOAD\")) < 0; }").unwrap();
    let args = ["-o".into(), at("shows"), at("shows.c")];
    assert!(
        Command::new("musl-gcc")
            .args(args)
            .status()
            .unwrap()
            .success()
    );
    // The loader of the one C library opens it, and the other one's reads it.
    fs::write(at("other.c"), "int of_other_library;").unwrap();
    let args = [
        "-shared".into(),
        "-nostdlib".into(),
        "-o".into(),
        at("other.so"),
        at("other.c"),
    ];
    assert!(Command::new("gcc").args(args).status().unwrap().success());
    let both = format!("{}:{}", library().display(), at("other.so"));
    let done = weft()
        .env("LD_PRELOAD", both)
        .run(&format!("/usr/bin/env {}", at("shows")));
    done.good();
    assert!(
        done.text.lines().any(|line| line == at("other.so")),
        "{}",
        done.show()
    );
}
