//! libiw as programs get it: the exported names, the manual page, Hello iWARP, and a program that uses libibverbs too.

#[path = "../../libexs/tests/common/mod.rs"]
mod common;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use common::{dynamic, exported, good, is_of_the_system, root, text};

/// What `./x dist` makes of libiw and of the drop-in libraries, from a debug build.
fn dist(library: &'static str) -> &'static Path {
    static IW: OnceLock<tempfile::TempDir> = OnceLock::new();
    static VERBS: OnceLock<tempfile::TempDir> = OnceLock::new();
    let of = if library == "libiw" { &IW } else { &VERBS };
    of.get_or_init(|| common::lay_out(library)).path()
}

fn compile(source: &Path, libraries: &[&str]) -> PathBuf {
    let program = dist("libiw").join(source.file_stem().unwrap());
    let mut pkg_config = Command::new("pkg-config");
    pkg_config.env("PKG_CONFIG_PATH", dist("libiw").join("lib/pkgconfig"));
    let flags = text(&good(pkg_config.args(["--cflags", "--libs", "iw"])));
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]);
    cc.arg("-pthread").arg("-o").arg(&program).arg(source);
    good(cc.args(flags.split_whitespace()).args(libraries));
    program
}

fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", dist("libiw").join("lib"));
    command
}

#[test]
fn it_exports_what_the_header_declares_and_its_page_names_all() {
    let header = std::fs::read_to_string(root().join("include/iw.h")).unwrap();
    let calls = header.split("/* ---- calls").nth(1).unwrap();
    let declared: BTreeSet<&str> = calls
        .lines()
        .filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next())
        .collect();
    assert!(declared.len() >= 28, "{declared:?}");
    let library = dist("libiw").join("lib/libiw.so");
    let names = declared.iter().map(|name| format!("{name}@@IW_1.0"));
    assert_eq!(exported(&library), names.collect());
    let dynamic = dynamic(&library);
    assert_eq!(dynamic.soname, "libiw.so.0");
    let needed = dynamic.needed;
    assert!(
        needed.iter().all(|name| is_of_the_system(name)),
        "{needed:?}"
    );
    let page = dist("libiw").join("share/man/man7/iw.7");
    let page = std::fs::read_to_string(page).unwrap();
    for name in declared {
        assert!(page.contains(&format!("Fn {name}")), "iw(7): {name}");
    }
    for (compiler, language) in [("cc", "c"), ("c++", "c++")] {
        let mut compile = Command::new(compiler);
        compile.args(["-x", language, "-Wall", "-Wextra", "-pedantic", "-Werror"]);
        good(
            compile
                .arg("-fsyntax-only")
                .arg(root().join("include/iw.h")),
        );
    }
}

/// Over TCP, and in shared memory where both ends can.
#[test]
fn hello_iwarp_in_c() {
    let program = compile(&root().join("examples/iw/hello_iwarp.c"), &[]);
    for local in ["off", "auto"] {
        let mut server = command(&program);
        server.env("WEFT_LOCAL", local).arg("serve");
        let mut server = server.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(server.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("port ").unwrap().to_owned();
        let mut client = command(&program);
        client.env("WEFT_LOCAL", local).args(["connect", &port]);
        assert_eq!(text(&good(&mut client)), "read back \"Hello iWARP!\"\n");
        line.clear();
        out.read_to_string(&mut line).unwrap();
        assert!(server.wait().unwrap().success());
        assert_eq!(line, "the buffer holds \"Hello iWARP!\"\n");
    }
}

/// In one program with the drop-in libibverbs and librdmacm.
#[test]
fn it_mixes_with_libibverbs() {
    if !Path::new("/usr/include/rdma/rdma_cma.h").exists() {
        eprintln!("skipped: there are no headers of libibverbs and librdmacm");
        return;
    }
    let verbs = dist("verbs").join("lib");
    let search = format!("-L{}", verbs.display());
    let libraries = [&search, "-lrdmacm", "-libverbs"];
    let program = compile(&root().join("doors/libiw/tests/mixed.c"), &libraries);
    let path = format!(
        "{}:{}",
        dist("libiw").join("lib").display(),
        verbs.display()
    );
    for local in ["off", "auto"] {
        good(
            Command::new(&program)
                .env("LD_LIBRARY_PATH", &path)
                .env("WEFT_LOCAL", local),
        );
    }
}
