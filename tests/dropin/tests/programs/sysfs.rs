//! Programs that read the devices in `/sys` and `/dev` themselves.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use weft_dropin::{Done, Weft, have, libraries, say};

const BOTH: &str = "weft0,weft_ib0";
const CLASS: &str = "/sys/class/infiniband";
const PARENT: &str = "/sys/devices/pci7766:00/7766:00:01.0";

/// Checks that the output of a program has a line for each device whose port is up.
#[test]
fn ibstat_and_ibstatus() {
    if !have(&[
        ("ibstat", "infiniband-diags"),
        ("ibstatus", "infiniband-diags"),
    ]) {
        return;
    }
    // It omits iWARP, as it does with RNICs.
    let done = Weft::on(BOTH).run("ibstat");
    done.good()
        .says("CA 'weft_ib0'")
        .says("State: Active")
        .says("Physical state: LinkUp")
        .says("Rate: 100")
        .says("Link layer: Ethernet")
        .never_says("weft0");
    let done = Weft::on(BOTH).run("ibstatus");
    done.good()
        .says("Infiniband device 'weft0' port 1 status:")
        .says("Infiniband device 'weft_ib0' port 1 status:")
        .says("4: ACTIVE");
    let done = Weft::on("weft_ib0").run("ibstatus");
    done.good().says("'weft_ib0'").never_says("'weft0'");
}

/// libibverbs reports the devices equally with and without the tree, and as the tree does.
#[test]
fn the_tree_says_what_the_calls_say() {
    if !have(&[("ibv_devinfo", "ibverbs-utils")]) {
        return;
    }
    let with = Weft::on(BOTH).run("ibv_devinfo -v");
    let without = Weft::bare()
        .env("LD_LIBRARY_PATH", libraries())
        .env("WEFT_DEVICES", BOTH)
        .run("ibv_devinfo -v");
    assert_eq!(with.good().text, without.good().text);
    let guid = Weft::on(BOTH).run(&format!("cat {CLASS}/weft_ib0/node_guid"));
    // 0x0123:... there, without the prefix 0x here.
    with.says(guid.good().text.trim());
}

/// Reads and prints the tree, as scripts do.
const SCRIPT: &str = r#"
cd /sys/class/infiniband && pwd
for d in *; do echo "$d: $(cat $d/ports/1/state) $(cat $d/device/numa_node)"; done
echo glob /sys/class/infiniband/*/ports/1/gid_attrs/types/0
readlink -f weft_ib0 /sys/class/infiniband/weft_ib0/device
ls -l /sys/class/infiniband/ /dev/infiniband
find /sys/class/infiniband/weft_ib0/ -name lid
[ -c /dev/infiniband/uverbs0 ] && echo a device
[ -w /sys/class/infiniband/weft0/node_type ] || echo read only
cat /sys/class/infiniband_verbs/uverbs1/ibdev
ls /sys/class/infiniband/../net
"#;

#[test]
fn a_script_reads_globs_and_finds() {
    let done = Weft::on(BOTH).start_words(&["sh", "-c", SCRIPT]).end();
    done.good()
        .says("/sys/class/infiniband\n")
        .says("weft0: 4: ACTIVE")
        .says("weft_ib0: 4: ACTIVE")
        .says("glob /sys/class/infiniband/weft0/ports/1/gid_attrs/types/0 /sys/class/infiniband/weft_ib0/ports")
        .says(&format!("\n{PARENT}/infiniband/weft_ib0\n{PARENT}\n"))
        .says("-> ../../devices/pci7766:00/7766:00:01.0/infiniband/weft_ib0")
        .says("231, 192")
        .says("/sys/class/infiniband/weft_ib0/ports/1/lid\n")
        .says("a device\nread only\nweft_ib0\n")
        .says("\nlo\n")
        .never_says("weft-sysfs")
        .never_says("cannot");
}

#[test]
fn python_lists_and_resolves() {
    if !have(&[("/usr/bin/python3", "python3")]) {
        return;
    }
    let program = "import glob, os\n\
                   print(sorted(os.listdir('/sys/class/infiniband')))\n\
                   print(os.path.realpath('/sys/class/infiniband/weft_ib0/../..'))\n\
                   print(len(glob.glob('/sys/class/infiniband/*/node_guid')))\n\
                   os.chdir('/sys/class/infiniband/weft_ib0/ports')\n\
                   print(os.getcwd(), open('1/link_layer').read())\n";
    let done = Weft::on(BOTH).start_words(&["/usr/bin/python3", "-c", program]);
    done.end().good().says(&format!(
        "['weft0', 'weft_ib0']\n{PARENT}\n2\n{PARENT}/infiniband/weft_ib0/ports Ethernet\n"
    ));
}

/// Compiles `c/view.c`, with the checks that distributions compile with.
fn view(dir: &Path) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c/view.c");
    let program = dir.join("view");
    let output = Command::new("cc")
        .args(["-O2", "-Wall", "-D_FORTIFY_SOURCE=2", "-o"])
        .args([&program, &source])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    program.display().to_string()
}

#[test]
fn calls_that_open_files_by_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let done = Weft::on(BOTH).run(&view(dir.path()));
    let types = "ports/1/gid_attrs/types/0";
    assert_eq!(
        done.good().text,
        format!(
            "glob 0 {CLASS}/weft0/{types} {CLASS}/weft_ib0/{types}\nglob none 1\nnftw 0 1 0\nftw 0 1 0\nscandir 4 weft_ib0\n\
             realpath {PARENT}\nrealpath dev /dev/infiniband/uverbs0\ncanonicalize {PARENT}\nrealpath none 1\n\
             readlink ../../devices/pci7766:00/7766:00:01.0/infiniband/weft_ib0\nreadlink fd {PARENT}/infiniband/weft_ib0/ports\n\
             openat 10 4: ACTIVE\nstat dev 0 1 231:193\nstatx dev 0 1 231:193\naccess dev 0\naccess sys 1\nfopen w 1\ninotify -1\n\
             others 0 -1\nchdir 0 {CLASS}\ngetcwd small 1\n"
        )
    );
}

/// `weft`, if cargo has built it next to this test.
fn weft() -> Option<PathBuf> {
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("weft");
    if !program.exists() {
        say(
            "the tests of `weft verbs --sysfs` skipped: there is no weft program (cargo build -p weft)",
        );
        return None;
    }
    Some(program)
}

fn verbs(program: &Path, words: &[&str]) -> Done {
    let program = program.display().to_string();
    let words = [&[&*program, "verbs"], words].concat();
    Weft::bare()
        .env("WEFT_VERBS_LIB", libraries())
        .start_words(&words)
        .end()
}

#[test]
fn static_programs_find_the_devices_in_a_namespace() {
    let Some(weft) = weft() else { return };
    if !have(&[("busybox", "busybox-static")]) {
        return;
    }
    let script = "ls /sys/class/infiniband; busybox readlink -f /sys/class/infiniband/weft_ib0/../..\n\
                  busybox cat /sys/class/infiniband_verbs/uverbs1/ibdev; [ -c /dev/infiniband/uverbs0 ] && echo a device\n\
                  busybox ls /sys/class/net /sys/class/net/lo/mtu; : >/dev/null && echo null\n\
                  busybox grep -c infiniband /proc/self/mountinfo; echo no > /sys/class/infiniband/weft0/node_desc\n";
    let done = verbs(
        &weft,
        &["--sysfs=namespace", "--", "busybox", "sh", "-c", script],
    );
    if done.code() == 125 && done.text.contains("no mount namespace") {
        say("a namespace: skipped, the kernel does not allow one here");
        return;
    }
    done.says("weft0\nweft_ib0\n")
        .says(&format!("{PARENT}\nweft_ib0\na device\n"))
        .says("/sys/class/net/lo/mtu\n")
        .says("\nnull\n")
        .says("ead-only file system")
        .works();
    // The machine itself has none of it.
    assert!(!Path::new(PARENT).exists());
}

/// Go's programs are static, without a C library that could redirect paths.
#[test]
fn a_go_program_finds_the_devices_in_a_namespace() {
    let Some(weft) = weft() else { return };
    if !have(&[("go", "golang-go")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("devices");
    let output = Command::new("go")
        .args(["build", "-o"])
        .arg(&program)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/go/devices.go"))
        .env("CGO_ENABLED", "0")
        .env("GO111MODULE", "off")
        .env("GOFLAGS", "")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let program = program.display().to_string();
    let done = verbs(&weft, &["--sysfs=namespace", "--", &program]);
    if done.code() == 125 && done.text.contains("no mount namespace") {
        say("a namespace: skipped, the kernel does not allow one here");
        return;
    }
    let first = PARENT.replace("01.0", "00.0");
    done.good()
        .says(&format!("weft0 4: ACTIVE {first}\n"))
        .says(&format!("weft_ib0 4: ACTIVE {PARENT}\n"))
        .says("\ntrue\n");
    // With the preload library alone it does not see them, as the page says.
    let done = verbs(&weft, &["--", &program]);
    done.never_says("weft_ib0");
}

#[test]
fn the_files_go_with_the_program() {
    let Some(weft) = weft() else { return };
    let words = [
        "--",
        "sh",
        "-c",
        "cat /sys/class/infiniband/*/node_type; ls -d $WEFT_SYSFS/*; echo $WEFT_SYSFS",
    ];
    let done = verbs(&weft, &words);
    done.good().says("4: RNIC\n1: CA\n").says("/weft-sysfs-");
    let folder = done.text.lines().last().unwrap();
    assert!(
        folder.starts_with('/') && !Path::new(folder).exists(),
        "{folder}"
    );
    let done = verbs(
        &weft,
        &["--sysfs=off", "--", "sh", "-c", "echo ${WEFT_SYSFS-none}"],
    );
    done.good().says("none\n");
}

/// The table of settings in docs/verbs.md has the options that the program has, with their variables.
#[test]
fn the_page_has_the_options_of_weft_verbs() {
    let Some(weft) = weft() else { return };
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/verbs.md");
    let page = std::fs::read_to_string(page).unwrap();
    let said: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `--")?.split_once(' '))
        // `--sysfs` has a separate table.
        .filter(|(option, _)| !option.contains('`'))
        .map(|(option, _)| option.to_owned())
        .collect();
    let help = Weft::bare().start_words(&[&weft.display().to_string(), "verbs", "--help"]);
    let help = help.end();
    let options: BTreeSet<String> = help
        .good()
        .text
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("--")?.split_once(" <"))
        .map(|(option, _)| option.to_owned())
        .collect();
    assert_eq!(said, options, "{}", help.show());
}
