//! `weft mpi`: what it sets for which MPI. Jobs on the libraries themselves are tested in tests/dropin.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Output, weft};

/// A folder with files that have the mark of our libraries, and an `mpirun` that says what it is and else prints its environment.
struct Place(tempfile::TempDir);

impl Place {
    fn new(version: &str) -> Place {
        let dir = tempfile::tempdir().unwrap();
        for name in ["libibverbs.so.1", "librdmacm.so.1", "libweft-fi.so"] {
            fs::write(dir.path().join(name), b"\0WEFT_PRIVATE_1\0").unwrap();
        }
        let mpirun = dir.path().join("mpirun");
        let text = format!(
            "#!/bin/sh\nif [ \"$1\" = --version ]; then echo '{version}'; else echo \"arguments: $*\"; env; fi\n"
        );
        fs::write(&mpirun, text).unwrap();
        fs::set_permissions(&mpirun, fs::Permissions::from_mode(0o755)).unwrap();
        Place(dir)
    }

    fn path(&self) -> PathBuf {
        self.0.path().canonicalize().unwrap()
    }

    fn command(&self, transport: &str) -> Command {
        let mut command = weft();
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if ["WEFT_", "OMPI_", "UCX_", "FI_", "LD_"]
                .iter()
                .any(|start| name.starts_with(start))
            {
                command.env_remove(name);
            }
        }
        command.args(["mpi", "--transport", transport, "--explain", "--lib"]);
        command.arg(self.path()).arg("--").arg(self.mpirun());
        command
    }

    fn mpirun(&self) -> PathBuf {
        self.path().join("mpirun")
    }
}

fn has(out: &Output, line: &str) {
    assert!(
        out.stdout.lines().any(|l| l == line),
        "{line}: {}",
        out.stdout
    );
}

fn lib(place: &Path) -> String {
    place.display().to_string()
}

const OPEN_MPI: &str = "mpirun (Open MPI) 4.1.4";
const MPICH: &str = "HYDRA build details: --with-device=ch4:ucx";

#[test]
fn open_mpi_gets_what_each_transport_needs() {
    let place = Place::new(OPEN_MPI);
    let path = lib(&place.path());
    let out = Output::of(place.command("rc").args(["-np", "2"]));
    out.ok();
    has(&out, "OMPI_MCA_mtl_ofi_provider_include=verbs;ofi_rxm");
    has(&out, "FI_OFI_RXM_SAR_LIMIT=0");
    has(&out, "WEFT_DEVICES=weft0");
    has(&out, &format!("LD_LIBRARY_PATH={path}"));
    // Ranks on other hosts get it too.
    has(
        &out,
        "arguments: -x LD_LIBRARY_PATH -x WEFT_DEVICES -x FI_OFI_RXM_SAR_LIMIT -np 2",
    );
    assert!(out.stderr.contains("is Open MPI"), "{}", out.stderr);
    assert!(out.stderr.contains("OMPI_MCA_pml=cm"), "{}", out.stderr);

    let out = Output::of(&mut place.command("ud"));
    has(&out, "OMPI_MCA_mtl_ofi_provider_include=verbs;ofi_rxd");
    has(&out, "WEFT_DEVICES=weft_ib0");

    let out = Output::of(&mut place.command("weft"));
    has(&out, "OMPI_MCA_mtl_ofi_provider_include=weft");
    has(&out, &format!("FI_PROVIDER_PATH={path}"));
    assert!(!out.stdout.contains("LD_LIBRARY_PATH"), "{}", out.stdout);
    assert!(!out.stdout.contains("WEFT_LOCAL"), "{}", out.stdout);
    let mut command = weft();
    command.args(["mpi", "--transport", "weft", "--local", "off", "--lib"]);
    let out = Output::of(command.arg(place.path()).arg("--").arg(place.mpirun()));
    has(&out, "WEFT_LOCAL=off");

    let out = Output::of(&mut place.command("tcp"));
    has(&out, "OMPI_MCA_btl=tcp,self");
    assert!(!out.stdout.contains("WEFT_"), "{}", out.stdout);
}

#[test]
fn mpich_gets_what_it_can_use() {
    let place = Place::new(MPICH);
    let out = Output::of(&mut place.command("auto"));
    out.ok();
    has(&out, "UCX_TLS=rc_verbs,ud_verbs,self");
    has(&out, "WEFT_DEVICES=weft_ib0");
    let out = Output::of(place.command("ud").env("UCX_TLS", "all"));
    out.ok();
    has(&out, "UCX_TLS=all");
    assert!(out.stderr.contains("UCX_TLS stays all"), "{}", out.stderr);
    let out = Output::of(&mut place.command("weft"));
    assert_eq!(out.code, 125, "{}", out.stderr);
    assert!(out.stderr.contains("--transport ud"), "{}", out.stderr);
}

/// The wheel of `PyPI` is built on both.
#[test]
fn an_mpich_on_both_is_told_which() {
    let place = Place::new("HYDRA build details: --with-device=ch4:ucx,ofi");
    let out = Output::of(&mut place.command("weft"));
    out.ok();
    has(&out, "MPIR_CVAR_CH4_NETMOD=ofi");
    has(&out, "FI_PROVIDER=weft");
    has(&out, "MPIR_CVAR_NOLOCAL=1");
    let out = Output::of(&mut place.command("rc"));
    out.ok();
    has(&out, "MPIR_CVAR_CH4_NETMOD=ucx");
    has(&out, "UCX_TLS=rc_verbs,ud_verbs,self");
    let out = Output::of(&mut place.command("tcp"));
    has(&out, "FI_PROVIDER=tcp");
}

#[test]
fn what_cannot_be_is_said() {
    let place = Place::new("something else");
    let out = Output::of(&mut place.command("rc"));
    assert_eq!(out.code, 125, "{}", out.stderr);
    assert!(out.stderr.contains("something else"), "{}", out.stderr);
    let out = Output::of(weft().args(["mpi", "--", "there-is-no-such-mpirun"]));
    assert_eq!(out.code, 127, "{}", out.stderr);
    let out = Output::of(weft().args(["mpi", "--transport", "pigeon", "--", "mpirun"]));
    assert_eq!(out.code, 2, "{}", out.stderr);
    let place = Place::new(OPEN_MPI);
    fs::remove_file(place.path().join("libweft-fi.so")).unwrap();
    let out = Output::of(&mut place.command("weft"));
    assert_eq!(out.code, 125, "{}", out.stderr);
    assert!(out.stderr.contains("libweft-fi.so"), "{}", out.stderr);
}
