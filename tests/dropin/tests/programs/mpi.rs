//! MPI: Open MPI over libfabric, MPICH over UCX, with programs of ours (`mpi/*.c`): over connections, and over datagrams alone.

use std::path::Path;
use std::process::Command;

use weft_dropin::{Done, Weft, have};

use super::carriers;

pub(super) const OPEN_MPI: &[(&str, &str)] = &[
    ("mpirun.openmpi", "openmpi-bin"),
    ("mpicc.openmpi", "libopenmpi-dev"),
];
const MPICH: &[(&str, &str)] = &[("mpirun.mpich", "mpich"), ("mpicc.mpich", "libmpich-dev")];

/// Compiles a program of ours into a folder.
pub(super) fn compile(compiler: &str, name: &str, dir: &Path) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("mpi").join(name);
    let program = dir.join(name).with_extension("");
    let output = Command::new(compiler)
        .args(["-O2", "-o"])
        .args([&program, &source])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{compiler} {name}: {said}");
    program.display().to_string()
}

/// Checks the programs' own verdicts.
pub(super) fn hello(done: &Done) {
    done.good()
        .says("rank 0 of 2")
        .says("rank 1 of 2")
        .says("sum 3");
}

fn measured(done: &Done) {
    done.good().says("all data as sent");
    let table = done.table();
    assert!(table.len() > 8, "{}", done.show());
    for row in table {
        assert!(
            row.len() == 3 && row.iter().all(|n| *n > 0.0),
            "{}",
            done.show()
        );
    }
}

/// Both programs, started by `mpirun`.
fn both(compiler: &str, mpirun: &str, wefts: &[Weft]) {
    let dir = tempfile::tempdir().unwrap();
    let first = compile(compiler, "hello.c", dir.path());
    let second = compile(compiler, "pairs.c", dir.path());
    for weft in wefts {
        hello(&weft.run(&format!("{mpirun} {first}")));
        measured(&weft.run(&format!("{mpirun} {second}")));
    }
}

/// Open MPI's matching transport: `verbs;ofi_rxm`. (Its byte transport does not accept `ofi_rxm` over any provider.)
#[test]
fn open_mpi_on_libfabric() {
    if !have(OPEN_MPI) {
        return;
    }
    let mpirun = "mpirun.openmpi -np 2 --oversubscribe --mca pml cm --mca mtl ofi \
                  --mca mtl_ofi_provider_include verbs;ofi_rxm --mca btl ^openib,ofi";
    both("mpicc.openmpi", mpirun, &carriers("weft0").map(open_mpi));
}

/// With the setting of `weft mpi`, without which libfabric 1.17 never completes receives of 16 to 128 KiB after a matched probe.
#[test]
fn receives_after_a_matched_probe_complete() {
    if !have(OPEN_MPI) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = compile("mpicc.openmpi", "probed.c", dir.path());
    let mpirun = "mpirun.openmpi -np 2 --oversubscribe --mca pml cm --mca mtl ofi \
                  --mca mtl_ofi_provider_include verbs;ofi_rxm --mca btl ^openib,ofi";
    for weft in carriers("weft0").map(open_mpi) {
        let weft = weft.env("FI_OFI_RXM_SAR_LIMIT", "0");
        weft.run(&format!("{mpirun} {program}"))
            .good()
            .says("probed: all data as sent");
    }
}

pub(super) fn open_mpi(weft: Weft) -> Weft {
    weft.env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("OMPI_MCA_plm", "isolated")
}

/// Debian's MPICH is built on UCX, which does not support iWARP: the persona.
#[test]
fn mpich() {
    if !have(MPICH) {
        return;
    }
    let wefts = carriers("weft_ib0").map(super::ucx::reliable);
    both("mpicc.mpich", "mpirun.mpich -np 2", &wefts);
}

/// `verify.c` reports the number of ranks and whether each byte arrived as it was sent.
pub(super) fn verified(weft: &Weft, mpirun: &str, program: &str, ranks: u32, arguments: &str) {
    let done = weft.run(&format!("{mpirun} -np {ranks} {program} {arguments}"));
    done.good()
        .says(&format!("all data as sent: {ranks} ranks"))
        .never_says("DATA DIFFERS");
}

/// libfabric's `ofi_rxd` makes datagrams reliable. The sizes exceed its segments and its window.
#[test]
fn open_mpi_on_datagrams_alone() {
    if !have(OPEN_MPI) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = compile("mpicc.openmpi", "verify.c", dir.path());
    let weft = open_mpi(Weft::on("weft_ib0"));
    let mpirun = "mpirun.openmpi --oversubscribe --mca pml cm --mca mtl ofi \
                  --mca mtl_ofi_provider_include verbs;ofi_rxd --mca btl ^openib,ofi";
    verified(&weft, mpirun, &program, 2, "1048576 1");
    verified(&weft, mpirun, &program, 8, "65536 1");
}

/// UCX makes datagrams reliable with its own acknowledgements; no connection is made.
#[test]
fn mpich_on_datagrams_alone() {
    if !have(MPICH) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = compile("mpicc.mpich", "verify.c", dir.path());
    let weft = Weft::on("weft_ib0")
        .env("UCX_TLS", "ud_verbs,self")
        .env("UCX_NET_DEVICES", "weft_ib0:1");
    verified(&weft, "mpirun.mpich", &program, 2, "1048576 1");
    verified(&weft, "mpirun.mpich", &program, 8, "65536 1");
}

/// Open MPI on weft's own provider: small messages by datagrams, large ones by RDMA Write-Record; and with losses.
#[test]
fn open_mpi_on_the_provider() {
    if !have(OPEN_MPI) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = compile("mpicc.openmpi", "verify.c", dir.path());
    let weft = open_mpi(super::fabric::provider());
    let mpirun = "mpirun.openmpi --oversubscribe --mca pml cm --mca mtl ofi \
                  --mca mtl_ofi_provider_include weft --mca btl ^openib,ofi";
    verified(&weft, mpirun, &program, 2, "1048576 1");
    verified(&weft, mpirun, &program, 8, "65536 1");
    let lossy = weft.clone().env("WEFT_FI_DROP", "1");
    verified(&lossy, mpirun, &program, 4, "262144 1");
    // Datagrams alone; then also a few connections over TCP, while datagrams are lost.
    let datagrams = weft.clone().env("WEFT_LOCAL", "off");
    verified(&datagrams, mpirun, &program, 4, "262144 1");
    let hybrid = datagrams.env("WEFT_FI_RC", "2").env("WEFT_FI_DROP", "1");
    verified(&hybrid, mpirun, &program, 5, "262144 1");
    let pairs = compile("mpicc.openmpi", "pairs.c", dir.path());
    measured(&weft.run(&format!("{mpirun} -np 2 {pairs}")));
}

/// A killed rank ends the job; no rank waits for it for ever.
#[test]
fn a_rank_that_is_killed_ends_the_job() {
    if !have(OPEN_MPI) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = compile("mpicc.openmpi", "verify.c", dir.path());
    let weft = open_mpi(super::fabric::provider());
    let script = dir.path().join("rank.sh");
    // The last rank has gone; the others wait for it.
    let text = format!(
        "if [ \"$OMPI_COMM_WORLD_RANK\" = 2 ]; then {program} 65536 100000 & sleep 1; kill -9 $!; wait $!; else exec {program} 65536 100000; fi\n"
    );
    std::fs::write(&script, text).unwrap();
    let mpirun = "mpirun.openmpi --oversubscribe --mca pml cm --mca mtl ofi \
                  --mca mtl_ofi_provider_include weft --mca btl ^openib,ofi -np 3";
    let done = weft.run(&format!("{mpirun} sh {}", script.display()));
    assert!(!done.is_good(), "{}", done.show());
    // timeout(1) would have returned 124.
    assert_ne!(done.code(), 124, "{}", done.show());
    done.never_says("all data as sent");
}
