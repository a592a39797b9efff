//! UCX and Open MPI across two hosts: here on our libraries, in the guest on the kernel's `rxe`.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use weft_dropin::{Running, Weft, have, libraries};
use weft_interop::guest::{GUEST, Guest, HOST, say};

use crate::{LIMIT, gid_of_guest, retry_program, ring, weft};

const LIB: &str = "/usr/lib/x86_64-linux-gnu";
const PORT: u16 = 13339;

/// The settings of UCX in the guest. UCX tells an IPv4 header from a routing header by the service level of the completion, as mlx5 sets it. rxe says 0 there,
/// so that UCX drops each datagram which came by IPv4 if it is to check the address.
fn settings(gid: &str) -> String {
    format!("UCX_IB_GID_INDEX={gid} UCX_NET_DEVICES=weft_ib0:1 UCX_UD_VERBS_ETH_DGID_CHECK=n")
}

pub(crate) fn stacks(guest: &mut Guest) {
    const MODULE: &str = "libuct_ib.so.0";
    let module = format!("{LIB}/ucx/{MODULE}");
    if !have(&[("ucx_perftest", "ucx-utils"), (&module, "libucx0")]) {
        return;
    }
    guest.put_linked(&["/usr/bin/ucx_perftest".into(), module.into()], LIMIT);
    guest.must("mkdir -p /dev/shm && mount -t tmpfs shm /dev/shm", LIMIT);
    let gid = gid_of_guest(guest);
    // The client of ucx_perftest tells its server the name of its device.
    guest.must("rdma dev set rxe0 name weft_ib0", LIMIT);
    let weft = weft()
        .env("UCX_IB_GID_INDEX", "0")
        .env("UCX_NET_DEVICES", "weft_ib0:1");
    ucx(guest, &weft, &gid);
    mpi(guest, &gid);
    guest.must("rdma dev set weft_ib0 name rxe0", LIMIT);
}

fn ucx(guest: &mut Guest, weft: &Weft, gid: &str) {
    let there = settings(gid);
    for line in [
        "-x rc_verbs -n 100 -t am_lat -D zcopy",
        "-x rc_verbs -n 20 -s 65536 -t put_bw -D zcopy",
        "-x rc_verbs -n 20 -s 65536 -t get -D zcopy",
        "-x ud_verbs -n 100 -s 8 -t am_lat -D short",
    ] {
        let line = format!("ucx_perftest -d weft_ib0:1 {line}");
        both_ways(guest, weft, &there, &line);
    }
    for (tls, line) in [
        ("rc_verbs,ud_verbs,self", "-n 100 -s 8 -t tag_lat"),
        ("rc_verbs,ud_verbs,self", "-n 20 -s 65536 -t tag_bw"),
        ("ud_verbs,self", "-n 100 -s 8 -t tag_lat"),
        ("ud_verbs,self", "-n 20 -s 20000 -t tag_bw"),
    ] {
        let weft = weft.clone().env("UCX_TLS", tls);
        let there = format!("{there} UCX_TLS={tls}");
        both_ways(guest, &weft, &there, &format!("ucx_perftest {line}"));
    }
}

/// One test of `ucx_perftest` in both roles.
fn both_ways(guest: &mut Guest, weft: &Weft, there: &str, line: &str) {
    let line = format!("{line} -p {PORT}");
    let in_guest = format!("{there} timeout 100 {line}");
    let here = weft.start(&line).listens(PORT);
    let done = guest.run(&format!("{in_guest} {HOST}"), LIMIT);
    if done.status != 0 || !done.text.contains("Final:") {
        let here = here.interrupt();
        panic!(
            "{line}, client in the guest: {}\n{}",
            done.text,
            here.show()
        );
    }
    here.end().good();
    let running = guest.start(&in_guest);
    let here = retry_program(weft, &format!("{line} {GUEST}"));
    let done = guest.finish(&running, LIMIT);
    assert!(
        done.status == 0,
        "{line}, server in the guest: {}\n{}",
        done.text,
        here.show()
    );
    here.good().says("Final:");
    say(&format!("{line}, with rxe and {there}: in both roles"));
}

/// A rank of Open MPI here, and one in the guest. `mpirun` starts its daemon there by an agent in place of ssh: it leaves the command for us.
fn mpi(guest: &mut Guest, gid: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(program) = ring(folder.path()) else {
        return;
    };
    if !have(&[("/usr/bin/orted", "openmpi-bin")]) {
        return;
    }
    let (agent, command) = (folder.path().join("agent"), folder.path().join("command"));
    let (agent, asked) = (agent.display().to_string(), command.display());
    let script =
        format!("#!/bin/sh\nshift\necho \"$*\" >{asked}.part && mv {asked}.part {asked}\n");
    std::fs::write(&agent, script).expect("a script");
    Weft::bare().run(&format!("chmod +x {agent}")).good();
    let mut files = components();
    // The daemon looks for the agent too, and does not use it.
    files.extend(["/usr/bin/orted", &program, &agent].map(PathBuf::from));
    guest.put_linked(&files, LIMIT);
    guest.must(
        "hostname guest && echo root:x:0:0:root:/:/bin/sh >/etc/passwd",
        LIMIT,
    );

    let tls = "UCX_TLS=rc_verbs,ud_verbs,self";
    let (lib, sysfs) = (libraries(), libraries().with_file_name("sysfs"));
    let line = format!(
        "mpirun.openmpi --mca plm rsh --mca plm_rsh_no_tree_spawn 1 --mca plm_rsh_agent {agent} --mca oob tcp --mca oob_tcp_if_include 10.0.2.0/24 --mca osc ^ucx,rdma,sm \
         --mca pml ucx --mca pml_ucx_tls any --mca pml_ucx_devices any --mca btl self \
         -n 1 --host localhost env {tls} UCX_IB_GID_INDEX=0 UCX_NET_DEVICES=weft_ib0:1 LD_LIBRARY_PATH={} LD_PRELOAD={} WEFT_SYSFS={} \
         WEFT_DEVICES=weft_ib0 WEFT_IB_WIRE=roce WEFT_LOG=warn {program} : \
         -n 1 --host {GUEST} env {tls} {} {program}",
        lib.display(),
        lib.join("libweft-sysfs.so").display(),
        sysfs.display(),
        settings(gid),
    );
    let mut here = Weft::bare()
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .limit(LIMIT)
        .start(&line);
    let daemon = wait_for(&command, &mut here);
    let running = guest.start(&format!("HOME=/tmp timeout 100 {daemon}"));
    let here = here.end();
    let there = guest.finish(&running, LIMIT);
    assert!(here.is_good(), "{}\n{}", here.show(), there.text);
    here.says("2 ranks, all bytes right");
    say("Open MPI with a rank here and one in the guest");
}

/// What the agent was asked to run.
fn wait_for(command: &Path, mpirun: &mut Running) -> String {
    loop {
        if let Ok(text) = std::fs::read_to_string(command) {
            return text.trim().to_owned();
        }
        assert!(mpirun.is_running(), "mpirun ended: {}", mpirun.text());
        thread::sleep(Duration::from_millis(20));
    }
}

/// The components of Open MPI and its PMI, but for those that a fabric or files need.
fn components() -> Vec<PathBuf> {
    const NOT: [&str; 8] = [
        "_ofi", "psm", "usnic", "openib", "_io_", "_fcoll_", "_fs_", "sharedfp",
    ];
    let folders = ["openmpi/lib/openmpi3", "pmix2/lib/pmix"];
    let files = folders
        .iter()
        .filter_map(|folder| std::fs::read_dir(format!("{LIB}/{folder}")).ok())
        .flat_map(|entries| entries.flatten().map(|entry| entry.path()));
    let wanted = |path: &PathBuf| {
        let name = path.display().to_string();
        name.contains("mca_")
            && name.split('.').next_back() == Some("so")
            && !NOT.iter().any(|not| name.contains(not))
    };
    files.filter(wanted).collect()
}
