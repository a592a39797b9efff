//! clang and clang++: what a command leaves is what the compiler here leaves, by a worker or, for the reason that is named, by itself.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use crate::common::{Bed, config, worker};
use weft_cc::worker::{Accept, Config, sandbox};
use weft_cc::{Endpoint, find_program};

fn has_clang() -> bool {
    let there = find_program("clang").is_some() && find_program("make").is_some();
    if !there {
        eprintln!("skipped: there is no clang, or no make (Debian's packages clang and make)");
    }
    // A worker's clang must not find its own headers.
    let keeps = sandbox::level().files != sandbox::Files::Free;
    if !keeps {
        eprintln!("skipped: no Landlock");
    }
    there && keeps
}

type Left = (Option<i32>, Vec<(PathBuf, Vec<u8>)>, String);

/// A project, and commands for it.
struct Project {
    bed: Bed,
    vars: Vec<(String, String)>,
}

impl Project {
    fn new(workers: &[&Endpoint]) -> Self {
        let bed = Bed::new(1 << 20);
        let make = bed.project(1, workers, 0);
        let vars = make.get_envs().filter_map(|(name, value)| {
            let text = |text: &std::ffi::OsStr| text.to_str().unwrap().to_owned();
            Some((text(name), text(value?)))
        });
        let project = Self {
            vars: vars.collect(),
            bed,
        };
        for dir in ["out", "inc/deep", "sys", "other"] {
            std::fs::create_dir_all(project.bed.path(dir)).unwrap();
        }
        for (name, text) in [
            (
                "a.c",
                "#include \"h.h\"\n#include <in.h>\n#include <stdarg.h>\nint f(int a) { int unused; return a > 3 ? puts(NAME) : SQUARE(a) + deep(a); }\n",
            ),
            (
                "inc/in.h",
                "#pragma once\n#define NAME __FILE__\n#include \"deep/../deep/d.h\"\n",
            ),
            (
                "inc/deep/d.h",
                "#pragma once\nstatic inline int deep(int a) { return a * 7 + __LINE__; }\n",
            ),
            (
                "b.cc",
                "#include <map>\n#include <string>\n#include <in.h>\nnamespace { int hidden; }\nint g(std::map<std::string, int> &m) { hidden++; return m[\"x\"] + deep(2); }\n",
            ),
            (
                "has.c",
                "#if __has_include(<s.h>) && !__has_include(<t.h>)\nint here;\n#endif\n#include <limits.h>\nint m = INT_MAX;\n",
            ),
            ("sys/s.h", "int s;\n"),
            (
                "warn.c",
                "#warning one\n#include <sw.h>\nint f(int a) { unsigned u = 1; if (a = 3) return a < u; return \"x\"; }\n",
            ),
            ("sys/sw.h", "static int sw(void) { int y; return y; }\n"),
            ("bad.c", "int x = ;\n"),
            ("time.c", "const char *t = __DATE__ __TIME__;\n"),
            ("bin.c", "__asm__(\".data; .incbin \\\"h.h\\\"\"); int x;\n"),
            (
                "abs.c",
                "#include \"/usr/include/limits.h\"\nint x = INT_MAX;\n",
            ),
            (
                "once.c",
                "#include \"one.h\"\n#include \"same.h\"\nint x = ONE;\n",
            ),
            ("one.h", "#pragma once\nenum { ONE = 1 };\n"),
            ("up.c", "#include \"link/../two.h\"\nint x = TWO;\n"),
            ("other/two.h", "enum { TWO = 2 };\n"),
            ("two.h", "enum { TWO = 3 };\n"),
            (
                "both.c",
                "#include \"two.h\"\n#define TWO THREE\n#include \"link/../two.h\"\nint x = THREE;\n",
            ),
            ("blank dir.c", "int blank;\n"),
            ("san.c", "int f(int a, int b) { return a / b; }\n"),
            ("pre.h", "#include <stdio.h>\n"),
            ("pch.c", "int g(void) { return puts(\"y\"); }\n"),
            ("args", "-O2 '-DN=a b' -Iinc -c a.c -o out/a.o"),
            ("list", "fun:*\n"),
            ("wp.c", "#ifdef Q\nint q = Q;\n#else\nint none;\n#endif\n"),
            ("older.c", "#pragma GCC dependency \"h.h\"\nint x;\n"),
            (
                "pretty.cc",
                "template <class T> constexpr auto n() { return sizeof(__PRETTY_FUNCTION__); }\nauto l = [] {};\nunsigned a = n<decltype(l)>();\n",
            ),
            ("clang.cfg", "-DCFG\n"),
        ] {
            std::fs::write(project.bed.path(name), text).unwrap();
        }
        std::fs::create_dir(project.bed.path("other/sub")).unwrap();
        symlink("other/sub", project.bed.path("link")).unwrap();
        std::fs::hard_link(project.bed.path("one.h"), project.bed.path("same.h")).unwrap();
        project
    }

    /// What is there afterwards, and is removed.
    fn left(&self) -> Vec<(PathBuf, Vec<u8>)> {
        const ENDS: &[&str] = &[
            "o", "dwo", "gcno", "s", "d", "bc", "ll", "i", "ii", "json", "pcm", "opt",
        ];
        let dirs = ["", "out"].map(|dir| std::fs::read_dir(self.bed.path(dir)).unwrap());
        let mut all: Vec<_> = dirs
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().path())
            .filter(|path| {
                let end = path.extension().and_then(|end| end.to_str());
                end.is_some_and(|end| ENDS.contains(&end))
            })
            .map(|path| (path.clone(), std::fs::read(&path).unwrap()))
            .collect();
        for (path, _) in &all {
            std::fs::remove_file(path).unwrap();
        }
        all.sort();
        all
    }

    fn run(&self, program: &[&str], line: &str) -> Left {
        let mut command = Command::new(program[0]);
        let line = line.replace("DIR", self.bed.dir.path().to_str().unwrap());
        command.args(&program[1..]).args(line.split(' '));
        let vars = self.vars.iter().map(|(name, value)| (name, value));
        // For `__TIME__`.
        command.envs(vars).env("SOURCE_DATE_EPOCH", "1000000000");
        let ended = command.current_dir(self.bed.dir.path()).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        (ended.status.code(), self.left(), said)
    }

    /// Compares a command with the compiler alone; `why` is the reason for a compilation here, or empty.
    fn compare(&self, compiler: &str, line: &str, why: &str) {
        let before = self.bed.status();
        let theirs = self.run(&["./weft-cc", compiler], line);
        let ours = self.run(&[compiler], line);
        let names = |left: &Left| -> Vec<_> {
            let sized = |(path, bytes): &(PathBuf, Vec<u8>)| (path.clone(), bytes.len());
            left.1.iter().map(sized).collect()
        };
        assert_eq!(theirs.2, ours.2, "{compiler} {line}");
        assert_eq!(
            (theirs.0, names(&theirs)),
            (ours.0, names(&ours)),
            "{compiler} {line}"
        );
        for ((path, theirs), (_, ours)) in theirs.1.iter().zip(&ours.1) {
            let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
            if path.extension().is_some_and(|end| end == "d") {
                assert_eq!(text(theirs), text(ours), "{compiler} {line}");
            }
            assert!(
                theirs == ours,
                "{compiler} {line}: {} differs",
                path.display()
            );
        }
        let after = self.bed.status();
        let here = |status: &weft_cc::ipc::Status| -> u64 {
            let counted = status
                .reasons
                .iter()
                .filter(|(reason, _)| reason.contains(why));
            counted.map(|(_, n)| n).sum()
        };
        let by_worker = after.done - before.done;
        if why.is_empty() {
            assert_eq!(
                (by_worker, here(&after)),
                (1, here(&before)),
                "{compiler} {line}: {after:?}"
            );
        } else {
            assert_eq!(
                (by_worker, here(&after)),
                (0, here(&before) + 1),
                "{compiler} {line}: {after:?}"
            );
        }
    }
}

const WORKER: &str = "";

#[test]
fn clang_leaves_the_same() {
    if !has_clang() {
        return;
    }
    let (_a, a) = worker(config());
    let project = Project::new(&[&a]);
    for line in [
        "-Iinc -c a.c",
        "-Iinc -O2 -g -Wall -Wextra -c a.c -o out/a.o",
        "-IDIR/inc -O2 -g -Weverything -c DIR/a.c -o DIR/out/a.o",
        "-Iinc -g -gdwarf-4 -fPIC -c a.c -MD",
        "-Iinc -g3 -gz -c a.c -MMD -MP -o out/a.o",
        "-IDIR/inc -g -c a.c -MMD -MF out/x.d -MT t -MT u:v -MQ $w",
        "-Iinc -g1 -c a.c -Wp,-MD,out/y.d -Wp,-DX=1",
        "-Iinc -gline-tables-only -c a.c -Wp,-MMD,out/y.d",
        "-isystem inc -g -c a.c -MMD",
        "-Iinc -c a.c -MD -MF out/long.d -MT one_target_of_a_rather_long_name -MT another_target_of_a_rather_long_name",
        "-iquote inc -idirafter inc -isystem sys -g -c a.c",
        "-Iinc -g -fdebug-prefix-map=DIR=. -c a.c",
        "-IDIR/inc -g -ffile-prefix-map=DIR/inc=/i -ffile-prefix-map=DIR=/d -c DIR/a.c",
        "-IDIR/inc -g -fmacro-prefix-map=DIR=/d -c DIR/a.c",
        "-Iinc -O2 -S a.c -o out/a.s",
        "-Iinc -g -S a.c -MD",
        "-Iinc -O2 -flto -c a.c",
        "-Iinc -O2 -flto=thin -g -c a.c",
        "-Iinc --target=aarch64-linux-gnu -ffreestanding -nostdinc -c san.c",
        "-Iinc -target i686-linux-gnu -c san.c",
        "-Iinc -m32 -c san.c",
        "-Iinc -Wa,--noexecstack -c a.c",
        "-Iinc -fcolor-diagnostics -Wall -c a.c",
        "-pipe -pthread -ansi -w -c san.c",
        "-Iinc -D N=1 -U M -include h.h -c a.c",
        "-Iinc -fshort-enums -fno-strict-aliasing -fvisibility=hidden -fno-builtin-puts -mno-avx -c a.c",
        "-x c -Iinc -c a.c",
        "-isystem sys -Wall -Wextra -c warn.c",
        "-isystem sys -Wall -fdiagnostics-color=always -c warn.c",
        "-Isys -c has.c",
        "-c once.c -MD",
        "-g -c up.c -MD",
        "@args",
        "-Wp,-DQ=1 -UQ -c wp.c",
        "-Wp,-UQ -DQ=3 -c wp.c",
        "-Wp,-DQ=2 -DQ=3 -w -c wp.c",
        "-Iinc -shared -c a.c",
        "-Iinc/deep/.. -Imissing -g -c a.c",
        "-Iinc -rdynamic -c a.c",
    ] {
        let why = if line.contains("-shared") || line.contains("-rdynamic") {
            "does not know"
        } else {
            WORKER
        };
        project.compare("clang", line, why);
    }
    for line in [
        "-Iinc -g -O2 -std=c++17 -c b.cc -MD",
        "-IDIR/inc -g -fno-exceptions -fno-rtti -c DIR/b.cc -MMD -MP",
        "-Iinc -stdlib=libstdc++ -Wall -c b.cc",
        "-Iinc -fvisibility-inlines-hidden -O3 -fno-omit-frame-pointer -c b.cc -o out/b.o",
        "-x c++ -Iinc -c a.c -Wno-everything",
        "-std=c++17 -c pretty.cc",
    ] {
        project.compare("clang++", line, WORKER);
    }
}

#[test]
fn what_a_worker_of_clang_has_not_is_compiled_here() {
    if !has_clang() {
        return;
    }
    let (_a, a) = worker(config());
    let project = Project::new(&[&a]);
    let mut header = Command::new("clang");
    let header = header
        .args(["-x", "c-header", "pre.h", "-o", "pre.h.pch"])
        .current_dir(project.bed.dir.path());
    assert!(header.status().unwrap().success());
    for (line, why) in [
        ("-Iinc -c a.c -working-directory out", "does not know"),
        ("-Iinc -emit-llvm -c a.c", "does not know"),
        ("-Iinc -save-temps -c a.c", "does not know"),
        ("--config ./clang.cfg -Iinc -c a.c", "does not know"),
        (
            "-resource-dir /usr/lib/llvm-none -Iinc -c san.c",
            "does not know",
        ),
        ("--gcc-toolchain=/usr -Iinc -c a.c", "names files"),
        ("-Xclang -DX -Iinc -c a.c", "does not know"),
        ("-mllvm -stats -c san.c", "does not know"),
        ("-Xclang -load -Xclang ./none.so -c a.c", "does not know"),
        ("-fplugin=./none.so -c a.c", "plugin"),
        ("-fpass-plugin=./none.so -c a.c", "plugin"),
        (
            "-fmodules -fmodules-cache-path=DIR/out -Iinc -c san.c",
            "modules",
        ),
        ("-include pre.h -c pch.c", "precompiled"),
        ("-include-pch pre.h.pch -c pch.c", "does not know"),
        ("-fprofile-use=none.profdata -c a.c", "profiling"),
        (
            "-fprofile-instr-generate -fcoverage-mapping -c san.c",
            "profiling",
        ),
        ("--coverage -c san.c", "profiling"),
        ("-fsanitize=undefined -c san.c", "sanitizer"),
        (
            "-fsanitize=address -fsanitize-ignorelist=list -c san.c",
            "sanitizer",
        ),
        ("-fno-integrated-as -c san.c", "does not know"),
        ("-fembed-bitcode -c san.c", "does not know"),
        ("-frecord-command-line -c san.c", "does not know"),
        ("-ftime-trace -c none.c", "does not know"),
        ("-gsplit-dwarf -g -c san.c", "does not know"),
        ("-O2 -fsave-optimization-record -c none.c", "does not know"),
        ("-march=native -c san.c", "native"),
        ("-c san.c -lm", "does not know"),
        ("-c san.c -Wl,-s", "does not know"),
        ("-Iinc -flto -c DIR/a.c", "whole path"),
        ("-IDIR/inc -flto -c a.c", "whole path"),
        ("-isystem DIR/inc -flto=thin -c a.c", "whole path"),
        ("-x c++ -std=c++17 -c DIR/pretty.cc", "__PRETTY_FUNCTION__"),
        ("-fopenmp -c san.c", "does not know"),
        ("-fmessage-length=40 -c san.c", "does not know"),
        ("-trigraphs -fno-trigraphs -c san.c", "does not know"),
        ("-ffile-prefix-map==/x -c san.c", "names files"),
        ("-c older.c", "dependency"),
        ("-c san.c -MF x.d", "without -MD"),
        ("-stdlib=libc++ -c san.c", "-stdlib= for C"),
        ("-imacros h.h -c san.c", "do not take"),
        ("-isysroot / -c san.c", "do not take"),
        ("-c bad.c", "failed on a worker"),
        ("-c none.c", "preprocessing failed"),
        ("-c bin.c", ".incbin"),
        ("-c abs.c", "worker"),
        ("-c both.c", "symbolic link"),
        ("-E san.c -o out/x.i", "several steps"),
    ] {
        project.compare("clang", line, why);
    }
    let seen = project.bed.path("inc/in.h");
    let text = format!(
        "#if __has_include(\"{}\")\nint here;\n#endif\n",
        seen.display()
    );
    std::fs::write(project.bed.path("far.c"), text).unwrap();
    project.compare("clang", "-c far.c -MMD", "worker");
    for driver in ["clang++", "g++"] {
        if find_program(driver).is_some() {
            project.compare(driver, "-w -c san.c", "compiles C as C++");
        }
    }
    for line in ["-ftime-report -c san.c", "-### -c san.c", "-c time.c"] {
        // What they say is never the same.
        let before = project.bed.status().done;
        let theirs = project.run(&["./weft-cc", "clang"], line);
        assert_eq!(theirs.0, Some(0), "{line}: {theirs:?}");
        assert_eq!(project.bed.status().done, before, "{line}");
    }
}

#[test]
fn a_worker_without_clang_takes_the_masters() {
    if !has_clang() {
        return;
    }
    let level = sandbox::level();
    if !level.is_complete() {
        return eprintln!("skipped: sent compilers need a complete sandbox; here is {level}");
    }
    let folder = tempfile::tempdir().unwrap();
    let (accepts, a) = worker(Config {
        accept: Some(Accept {
            folder: folder.path().into(),
            most: 2 << 30,
        }),
        ..config()
    });
    let (without, b) = worker(config());
    let mut project = Project::new(&[&a]);
    // Names that the worker does not know.
    std::fs::create_dir(project.bed.path("bin")).unwrap();
    for (name, of) in [("clang-77", "clang"), ("clang++-77", "clang++")] {
        let real = find_program(of).unwrap();
        symlink(real, project.bed.path("bin").join(name)).unwrap();
    }
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{path}", project.bed.path("bin").display());
    project.vars.push(("PATH".into(), path));
    let clang = project.bed.path("bin/clang-77");
    let clang = clang.to_str().unwrap();
    let cxx = project.bed.path("bin/clang++-77");
    let cxx = cxx.to_str().unwrap();
    project.compare(clang, "-Iinc -O2 -g -Wall -c a.c -MD", WORKER);
    project.compare(clang, "-IDIR/inc -fPIC -c DIR/a.c -o out/a.o", WORKER);
    assert_eq!(accepts.sent_compilers(), 1);
    project.compare(cxx, "-Iinc -O1 -g -c b.cc", WORKER);
    // The same program does both.
    assert_eq!(accepts.sent_compilers(), 1);
    // A worker that takes none.
    let hosts = project
        .vars
        .iter_mut()
        .find(|(name, _)| name == "WEFT_CC_HOSTS");
    hosts.unwrap().1 = b.to_string();
    project.compare(clang, "-Iinc -c a.c", "there is no `clang-77` here");
    assert_eq!(without.jobs(), 0);
}

#[test]
fn a_clang_that_starts_another_one_compiles_here() {
    if !has_clang() {
        return;
    }
    let (_a, a) = worker(config());
    let project = Project::new(&[&a]);
    let script = project.bed.path("clang");
    std::fs::write(&script, "#!/bin/sh\nexec /usr/bin/clang \"$@\"\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, mode).unwrap();
    project.compare("./clang", "-c san.c", "starts another program");
    // A program under the compiler's name that starts it, as ccache does.
    let wrap = project.bed.path("wrap");
    std::fs::create_dir(&wrap).unwrap();
    let real = find_program("clang").unwrap();
    let code = format!(
        "#include <unistd.h>\nint main(int n, char **v) {{ return execv(\"{}\", v), n; }}\n",
        real.display()
    );
    std::fs::write(wrap.join("w.c"), code).unwrap();
    let mut made = Command::new(&real);
    made.args(["w.c", "-o", "clang"]).current_dir(&wrap);
    assert!(made.status().unwrap().success());
    project.compare(
        wrap.join("clang").to_str().unwrap(),
        "-c san.c",
        "is no clang",
    );
}

#[test]
fn variables_of_clang_keep_a_command_here() {
    if !has_clang() {
        return;
    }
    let (_a, a) = worker(config());
    let mut project = Project::new(&[&a]);
    for (name, value) in [
        ("CPATH", "sys"),
        ("CCC_OVERRIDE_OPTIONS", "+-O3"),
        ("C_INCLUDE_PATH", "sys"),
        ("SDKROOT", "/"),
        ("MACOSX_DEPLOYMENT_TARGET", "10.9"),
    ] {
        project.vars.push((name.into(), value.into()));
        project.compare("clang", "-c san.c", &format!("{name} is set"));
        project.vars.pop();
    }
}
