//! The compose file and the pod of examples/containers, as an engine of containers would run them.

use std::path::Path;
use std::process::Command;

use crate::common::Output;

/// Both programs say that their eight connections are on rings.
fn run(file: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let tools = "exec 2>&1; ip -V && bwrap --version && redis-server --version && redis-benchmark --version && python3 -c 'import yaml'";
    let tools = Output::of(Command::new("sh").args(["-c", tools]));
    if tools.code != 0 || !rustix::process::geteuid().is_root() {
        println!("skipped: needs root, iproute2, bubblewrap, redis and python3-yaml: {tools:?}");
        return;
    }
    let weft = Path::new(env!("CARGO_BIN_EXE_weft"));
    let done = Output::of(
        Command::new("python3")
            .arg(root.join("weft/tests/stage.py"))
            .arg(root.join("examples/containers").join(file))
            .arg(weft.parent().unwrap())
            .arg(weft_dropin::built("run", "run")),
    );
    assert_eq!(done.code, 0, "{done:?}");
    let over = done
        .stdout
        .matches(", 8 went over to shared memory, 0 of them back")
        .count();
    assert_eq!(over, 2, "{}", done.stdout);
}

#[test]
fn the_containers_of_the_compose_file_share_rings() {
    run("compose.yaml");
}

#[test]
fn the_containers_of_the_pod_share_rings() {
    run("pod.yaml");
}
