//! Which options can be sent to a worker, which cannot, and the reasons.

use super::*;

fn args(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

fn here(line: &str) -> String {
    parse(Path::new(""), &args(line)).expect_err(line).reason
}

#[test]
fn an_assembler_may_be_told_its_processor() {
    let job = |line: &str| parse(Path::new(""), &args(line)).map(|plan| plan.job);
    let line = "-Wa,-mtune=generic32,--noexecstack -Wa,--gdwarf-5 -c";
    assert_eq!(job(&format!("{line} a.c")).unwrap().join(" "), line);
    for bad in [
        "-Wa,-mtune=x,-al=y",
        "-Wa,-m/etc/x",
        "-Wa,-msyntax@f",
        "-Wa,-MD,x",
    ] {
        assert!(
            here(&format!("{bad} -c a.c")).contains("assembler"),
            "{bad}"
        );
    }
}

#[test]
fn a_plain_compilation_goes_out() {
    let plan = parse(
        Path::new(""),
        &args("-O2 -g -Wall -DA=1 -I inc -isystem x -MD -c d/a.c -o out/a.o -lm"),
    )
    .unwrap();
    assert_eq!(plan.job, ["-O2", "-g", "-Wall", "-c"]);
    assert_eq!(
        (plan.source, plan.output),
        ("d/a.c".into(), PathBuf::from("out/a.o"))
    );
    assert_eq!(
        plan.preprocess,
        args(
            "-O2 -g -Wall -DA=1 -I inc -isystem x -MD d/a.c -E -fdirectives-only -MF out/a.d -MQ out/a.o"
        )
    );
    check_job(Family::Gcc, &plan.job).unwrap();
}

#[test]
fn names_follow_from_the_source() {
    let plan = parse(Path::new(""), &args("-S d/a.cc")).unwrap();
    assert_eq!((plan.output, plan.language), ("a.s".into(), Language::Cxx));
    let plan = parse(
        Path::new(""),
        &args("-c -x c d/a.in -oz.o -MMD -MF z.dep -MT t"),
    )
    .unwrap();
    assert_eq!(plan.output, Path::new("z.o"));
    assert_eq!(plan.preprocess.iter().filter(|a| *a == "-MF").count(), 1);
    assert!(!plan.preprocess.iter().any(|a| a == "-MQ"));
}

#[test]
fn what_cannot_go_out_says_why() {
    for (line, why) in [
        ("a.c -o a", "linking"),
        ("-c a.c b.c", "several sources"),
        ("-c -march=native a.c", "native"),
        ("-c -fplugin=./x.so a.c", "plugin"),
        ("-c --coverage -gsplit-dwarf a.c", "coverage"),
        ("-S --coverage a.c", "further outputs"),
        ("-c -gsplit-dwarf a.c -o ../a.o", "below"),
        ("-c -fprofile-use a.c", "coverage"),
        ("-c a.S", "assembler"),
        ("-c x.h", "header"),
        ("-E a.c", "several steps"),
        ("-c -M a.c", "preprocessing"),
        ("-c -", "standard input"),
        ("-c a.c -Wa,-adhln=x", "assembler"),
        ("-c a.c -wrapper gdb", "does not know"),
        ("-c a.c -specs=x", "does not know"),
        ("-c a.c -save-temps", "does not know"),
        ("-c -g3 a.c", "macros"),
        ("-c -Werror=pedantic a.c", "pedantic"),
        ("-c -Wpedantic -Werror a.c", "pedantic"),
        ("-c -Werror -pedantic a.c", "pedantic"),
        ("-S -fverbose-asm a.c", "verbose-asm"),
        ("-c -finput-charset=latin1 a.c", "charset"),
        ("-c conftest.c", "configure"),
        ("-c a.c -o /dev/null", "regular"),
        ("-c -S a.c", "together"),
        ("-c -x ada a.c", "language"),
        ("-c -frandom-seed=/etc/x a.c", "names files"),
    ] {
        assert!(here(line).contains(why), "{line}: {}", here(line));
    }
    assert!(
        parse(Path::new(""), &args("-c -save-temps a.c"))
            .unwrap_err()
            .compiles
    );
    assert!(
        !parse(Path::new(""), &args("a.o -o a"))
            .unwrap_err()
            .compiles
    );
}

#[test]
fn both_compilers_keep_what_is_of_this_machine() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = Some(dir.path().join("fifo"));
    let made = std::process::Command::new("mkfifo").args(&fifo).status();
    assert!(made.unwrap().success());
    for family in [Family::Gcc, Family::Clang] {
        let of = |line: &str| parse_as(family, dir.path(), &args(line));
        for (line, why) in [
            ("-c a.c -MD -MF /dev/null", "regular"),
            ("-c a.c -MD -MF fifo", "regular"),
            ("-c a.c -MD -MF-", "regular"),
            ("-c a.c -MMD -MF -", "regular"),
            ("-c a.c -Wp,-MMD,fifo", "regular"),
            ("-c a.c -MD -MMD", "together"),
            ("-c a.c -MMD -MD", "together"),
            ("-c a.c -DSTAMP=__TIME__", "__TIME__"),
            ("-c a.c -D STAMP=__DATE__", "__DATE__"),
            ("-c a.c -Wp,-DSTAMP=__TIMESTAMP__", "__TIMESTAMP__"),
        ] {
            let reason = of(line).expect_err(line).reason;
            assert!(reason.contains(why), "{family:?} {line}: {reason}");
        }
        for (line, explicit) in [
            ("-c a.c -MMD -MMD -MF a.d", false),
            ("-x c -c a.c", true),
            ("-c a.c -x c", false),
        ] {
            assert_eq!(of(line).expect(line).explicit, explicit, "{line}");
        }
    }
    assert!(is_cxx("g++") && is_cxx("clang++-14") && is_cxx("x86_64-linux-gnu-g++-12.1"));
    assert!(!is_cxx("gcc-12") && !is_cxx("clang"));
}

#[test]
fn command_files_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, "-O2 '-DX=a b'\n\"-DY=\\\"q\\\"\" -c a.c").unwrap();
    let at = OsString::from(format!("@{}", path.display()));
    let plan = parse(Path::new(""), std::slice::from_ref(&at)).unwrap();
    assert_eq!(
        plan.preprocess[..3],
        ["-O2", "-DX=a b", "-DY=\"q\""].map(OsString::from)
    );
    std::fs::write(&path, at.as_bytes()).unwrap();
    assert!(
        parse(Path::new(""), &[at])
            .unwrap_err()
            .reason
            .contains("too deep")
    );
    assert!(parse(Path::new(""), &args("-c @nowhere")).is_err());
}

#[test]
fn a_worker_takes_no_paths() {
    for bad in [
        "-fplugin=x",
        "-I/etc",
        "-include",
        "/etc/passwd",
        "@x",
        "-o",
        "-B.",
        "-Wa,@x",
        "-fdump-tree-all=/x",
        "-DX",
        "-wrapper",
        "-specs=a",
        "-Wp,-MD,x",
    ] {
        check_job(Family::Gcc, &["-c".into(), bad.into()]).expect_err(bad);
    }
    check_job(Family::Gcc, &["-O2".into()]).unwrap_err();
    check_job(
        Family::Gcc,
        &[
            "-c".into(),
            "-fdebug-prefix-map=/a=/b".into(),
            "-m32".into(),
        ],
    )
    .unwrap();
}

#[test]
fn drivers_are_known_by_name() {
    for good in [
        "gcc",
        "cc",
        "g++-12",
        "x86_64-linux-gnu-gcc-12",
        "c++",
        "gcc-4.9",
        "clang",
        "clang++",
        "clang-14",
        "clang++-14",
    ] {
        assert!(is_driver(good), "{good}");
    }
    for bad in [
        "x86_64-linux-gnu-clang",
        "clang-format",
        "clangd",
        "../gcc",
        "gcc;x",
        "distcc",
        "",
        "-gcc",
        "sh",
    ] {
        assert!(!is_driver(bad), "{bad}");
    }
}

#[test]
fn built_in_definitions_are_found() {
    let text = b"# 0 \"a.c\"\n# 0 \"<built-in>\"\n#define A 1\n# 0 \"<built-in>\"\n#define B 2\n\n# 0 \"<command-line>\"\n#define C 1\n";
    let mut rest = text.to_vec();
    rest.drain(built_in(text));
    assert_eq!(rest, b"# 0 \"a.c\"\n# 0 \"<command-line>\"\n#define C 1\n");
    for text in [
        &b""[..],
        b"# 0 \"<built-in>\"\n",
        b"# 0 \"<built-in>\"\nint x;\n# 1 \"a\"\n",
        b"\"<built-in>\"",
    ] {
        assert!(built_in(text).is_empty());
    }
}

#[test]
fn lto_needs_a_seed_to_be_compared() {
    let of = |line: &str| is_repeatable(&line.split(' ').map(String::from).collect::<Vec<_>>());
    assert!(of("-O2 -c") && !of("-flto=4 -frandom-seed=1 -c"));
    assert!(!of("-O2 -flto -c") && !of("-flto=4 -c"));
}

#[test]
fn the_last_map_that_fits_counts() {
    let args = [
        "-fdebug-prefix-map=/a=/x".into(),
        "-ffile-prefix-map=/a/b=y".into(),
    ];
    assert_eq!(map_path(&args, "/a/b/c"), "y/c");
    assert_eq!(map_path(&args, "/a/c"), "/x/c");
    assert_eq!(map_path(&args, "/z"), "/z");
}

#[test]
fn comments_do_not_keep_a_text_here() {
    let asm = "asm(\".include <x>\");";
    for (text, stay) in [
        (format!("{asm}\n"), true),
        (format!("/* {asm} */ int x;\n"), false),
        (format!("int x; // don't {asm}\nchar *q = \"/*\";\n"), false),
        (format!("// a \\\n {asm}\nint x;\n"), false),
        (format!("char *p = \"/*\"; {asm} char *q = \"*/\";\n"), true),
        (format!("char c = '\"', d = '\\''; /* \" */ {asm}\n"), true),
        (format!("char *p = \"\\\"/*\"; {asm} /* x */\n"), true),
        (format!("/* a */ {asm} /* b */\n"), true),
        // Not clear enough.
        (format!("char *p = R\"(\")\"; /* {asm} */\n"), true),
        (format!("#define X don't\n/* {asm} */\n"), true),
        (format!("/* {asm}"), true),
    ] {
        assert_eq!(stays_in_code(text.as_bytes()).is_some(), stay, "{text}");
    }
}

#[test]
fn text_that_reads_files_stays() {
    assert!(stays(b"asm(\".incbin \\\"x\\\"\");").is_some());
    assert!(stays(b"char *t = __TIME__;").is_some());
    assert!(stays(b"int p; x.y = __LINE__; # 1 \"a\"").is_none());
    let longest = STAYS.iter().map(|(word, _)| word.len()).max();
    assert_eq!(longest, Some(STAYS_OVERLAP + 1));
}
