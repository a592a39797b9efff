//! libibverbs and librdmacm as programs get them: names, versions, the loader's information; and programs that load with them.

use crate::common;
#[path = "releases/mod.rs"]
mod releases;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::common::{dynamic, exported, good, is_of_the_system, root, text};

const LIBRARIES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];
/// The version of the private interface between our two libraries.
const BETWEEN: &str = "@@WEFT_PRIVATE_1";

/// The folder of the libraries that `./x dist` makes, from a debug build, made once.
fn lib() -> PathBuf {
    static DIST: OnceLock<tempfile::TempDir> = OnceLock::new();
    let dist = DIST.get_or_init(|| common::lay_out("verbs"));
    dist.path().join("lib").canonicalize().unwrap()
}

/// The version of the calls in `<infiniband/weft_dgram.h>`.
const OWN: &str = "@@WEFT_DGRAM_1";

/// The names that a library exports to programs that do not use weft's own calls.
fn public(library: &Path) -> BTreeSet<String> {
    let names = exported(library).into_iter();
    names
        .filter(|name| !name.ends_with(BETWEEN) && !name.ends_with(OWN))
        .collect()
}

/// Without the mark of the version that new programs are linked to.
fn plain(names: &BTreeSet<String>) -> BTreeSet<String> {
    names.iter().map(|name| name.replace("@@", "@")).collect()
}

/// The place of the system's library or program of this name.
fn of_the_system(name: &str) -> Option<PathBuf> {
    let folders = ["/usr/lib", "/usr/lib64", "/usr/bin", "/usr/sbin"].map(PathBuf::from);
    let folders = folders.into_iter();
    let triple = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    folders
        .chain([triple.into()])
        .map(|folder| folder.join(name))
        .find(|path| path.exists())
}

/// The next release appears as a difference: `releases` describes how to add its names to the table.
#[test]
fn the_names_and_versions_are_those_of_the_known_releases_and_no_others() {
    for library in LIBRARIES {
        // We choose the version of a name that new programs are linked to.
        let ours = plain(&public(&lib().join(library)));
        let theirs: BTreeSet<String> = releases::table()
            .into_iter()
            .filter(|row| row.library == library)
            .map(|row| row.name)
            .collect();
        let missing: Vec<_> = theirs.difference(&ours).collect();
        assert!(missing.is_empty(), "{library} lacks {missing:?}");
        // The private interface between libibverbs and the drivers of one release exists for those of the others too.
        let drivers: BTreeSet<&str> = theirs
            .iter()
            .filter_map(|name| Some(name.split_once("@IBVERBS_PRIVATE_")?.0))
            .collect();
        let for_drivers = |name: &str| {
            name.split_once("@IBVERBS_PRIVATE_")
                .is_some_and(|(name, version)| {
                    drivers.contains(name) || name == format!("verbs_register_driver_{version}")
                })
        };
        let more: Vec<_> = ours
            .difference(&theirs)
            .filter(|name| !for_drivers(name))
            .collect();
        assert!(more.is_empty(), "{library} has {more:?}");
    }
}

/// The table agrees with the system's own libraries.
#[test]
fn the_table_of_releases_knows_the_release_that_is_installed() {
    for library in LIBRARIES {
        let Some(theirs) = of_the_system(library) else {
            eprintln!("skipped: there is no {library} to compare with");
            continue;
        };
        let release = releases::of(&theirs.canonicalize().unwrap()).unwrap();
        let known: BTreeSet<String> = releases::table()
            .into_iter()
            .filter(|row| row.library == library && row.is_in(&release))
            .map(|row| row.name)
            .collect();
        assert_eq!(
            plain(&public(&theirs)),
            known,
            "{library} of rdma-core {release}: see tests/releases/mod.rs"
        );
    }
}

/// The library that shows the devices in `/sys` and `/dev`.
const SYSFS: &str = "libweft-sysfs.so";
const TREE: &str = "weft_sysfs_tree";

#[test]
fn what_is_between_the_libraries_is_what_the_others_jump_to_or_call() {
    let between: BTreeSet<String> = exported(&lib().join(LIBRARIES[0]))
        .iter()
        .filter_map(|name| name.strip_suffix(BETWEEN))
        .map(str::to_owned)
        .collect();
    let names = exported(&lib().join(LIBRARIES[1])).into_iter();
    let twins = names.filter_map(|name| Some(format!("weft_cm_{}", name.split_once('@')?.0)));
    let called = twins.chain([TREE.to_owned()]);
    assert_eq!(between, called.collect());
}

#[test]
fn every_name_that_debians_programs_need_is_there() {
    let list = root().join("../shared/abi/symbols-needed-debian12.txt");
    let Ok(list) = std::fs::read_to_string(&list) else {
        eprintln!("skipped: there is no list of what Debian's programs need beside the tree");
        return;
    };
    let ours: BTreeSet<String> = LIBRARIES
        .iter()
        .flat_map(|library| public(&lib().join(library)))
        .map(|name| name.replace("@@", "@"))
        .collect();
    let mut compared = 0;
    for line in list.lines() {
        if let Some((version, name)) = line.split_once(' ')
            && ["IBVERBS_", "RDMACM_"]
                .iter()
                .any(|node| version.starts_with(node))
        {
            assert!(ours.contains(&format!("{name}@{version}")), "{line}");
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared}");
}

#[test]
fn the_loader_is_told_what_debians_libraries_tell_it() {
    let verbs = dynamic(&lib().join(LIBRARIES[0]));
    assert_eq!(verbs.soname, LIBRARIES[0]);
    assert!(
        verbs.needed.iter().all(|library| is_of_the_system(library)),
        "{:?}",
        verbs.needed
    );
    assert_eq!(verbs.runpath, None);
    let jumps = dynamic(&lib().join(LIBRARIES[1]));
    assert_eq!(jumps.soname, LIBRARIES[1]);
    assert_eq!(jumps.needed, [LIBRARIES[0]]);
    assert_eq!(jumps.runpath.as_deref(), Some("$ORIGIN"));
    // Every program loads it, and few use the devices: only those load libibverbs.
    let needed = text(&good(Command::new("ldd").arg(lib().join(SYSFS))));
    assert!(!needed.contains(LIBRARIES[0]), "{needed}");
}

/// Programs and drivers of Debian, linked with one of the libraries.
const LINKED: &[&str] = &[
    "ibv_devices",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ib_write_bw",
    "ib_send_lat",
    "rping",
    "ucmatose",
    "rstream",
    "rcopy",
    "cmtime",
    "libfabric.so.1",
    "libmlx4.so.1",
    "libmlx5.so.1",
    "libefa.so.1",
    "ucx/libuct_ib.so.0",
    "ucx/libuct_rdmacm.so.0",
];

/// `ldd -r` resolves all names, functions too, as the loader does with `LD_BIND_NOW`.
#[test]
fn every_name_of_debians_programs_is_found_in_our_libraries() {
    let ours = lib().display().to_string();
    for name in LINKED {
        let Some(path) = of_the_system(name) else {
            eprintln!("skipped: there is no {name}");
            continue;
        };
        let output = good(
            Command::new("ldd")
                .env("LD_LIBRARY_PATH", &ours)
                .arg("-r")
                .arg(path),
        );
        let shown = text(&output) + &String::from_utf8_lossy(&output.stderr);
        assert!(
            shown.contains(&format!("libibverbs.so.1 => {ours}")),
            "{name}: {shown}"
        );
        for complaint in ["undefined symbol", "not found", "not defined"] {
            assert!(!shown.contains(complaint), "{name}: {shown}");
        }
    }
}

#[test]
fn programs_run_on_them() {
    let programs: [&[&str]; 5] = [
        &["ib_write_bw", "--version"],
        &["fi_info", "--version"],
        &["ucx_info", "-v"],
        &["rping", "-h"],
        &[
            "/usr/bin/python3",
            "-c",
            "import pyverbs.device, pyverbs.qp, pyverbs.cmid",
        ],
    ];
    for program in programs {
        if of_the_system(program[0]).is_none() {
            eprintln!("skipped: there is no {}", program[0]);
            continue;
        }
        let output = Command::new(program[0])
            .args(&program[1..])
            .env("LD_LIBRARY_PATH", lib())
            .env("LD_BIND_NOW", "1")
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        if errors.contains("No module named 'pyverbs'") {
            eprintln!("skipped: there is no pyverbs");
            continue;
        }
        // 127 is the loader's status; the status of a program for its version or help is its own.
        assert!(
            output.status.code().is_some_and(|code| code < 126),
            "{program:?}: {errors}"
        );
        assert!(
            !errors.contains("ImportError") && !errors.contains("symbol"),
            "{program:?}: {errors}"
        );
    }
}

/// Without root, and without a file in /dev/infiniband.
#[test]
fn ucx_finds_the_file_of_the_persona_in_dev() {
    if of_the_system("ucx_info").is_none() {
        eprintln!("skipped: there is no ucx_info");
        return;
    }
    let shown = text(&good(
        Command::new("ucx_info")
            .arg("-d")
            .env("LD_LIBRARY_PATH", lib())
            .env("LD_PRELOAD", lib().join(SYSFS)),
    ));
    let mut lines = shown
        .lines()
        .skip_while(|line| !line.contains("Transport: rc_verbs"));
    lines.next().expect("a reliable transport");
    let device = lines.next().unwrap();
    assert!(device.contains("Device: weft_ib0:1"), "{device}");
}

/// Compiles a program as its author does, runs it on our libraries, and returns its output.
fn said_by(source_text: &str, package: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("program.c"), dir.path().join("program"));
    std::fs::write(&source, source_text).unwrap();
    let flags = text(&good(
        Command::new("pkg-config")
            .env("PKG_CONFIG_PATH", lib().join("pkgconfig"))
            .args(["--cflags", "--libs", package]),
    ));
    assert!(flags.contains("-libverbs"), "{flags}");
    good(
        Command::new("cc")
            .args(["-Wall", "-Werror", "-o"])
            .arg(&program)
            .arg(&source)
            .args(flags.split_whitespace())
            .arg("-ldl"),
    );
    text(&good(Command::new(&program).env("LD_LIBRARY_PATH", lib())))
}

#[test]
fn a_program_is_built_with_pkg_config() {
    let said = said_by(
        "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n#include <stdio.h>\nint main(void) {\n\
         puts(ibv_wc_status_str(IBV_WC_REM_ACCESS_ERR));\nputs(rdma_event_str(RDMA_CM_EVENT_REJECTED));\nreturn 0;\n}\n",
        "librdmacm",
    );
    assert_eq!(said, "remote access error\nRDMA_CM_EVENT_REJECTED\n");
}

/// libfabric and UCX ask the drivers' libraries about every device.
#[test]
fn no_driver_takes_a_device_for_its_own() {
    if ["libmlx5.so.1", "libefa.so.1"]
        .iter()
        .any(|driver| of_the_system(driver).is_none())
    {
        eprintln!("skipped: there is no libmlx5 or libefa");
        return;
    }
    let said = said_by(include_str!("drivers.c"), "libibverbs");
    let devices: Vec<&str> = said.lines().collect();
    assert_eq!(devices, ["weft0: nobody's", "weft_ib0: nobody's"]);
}
