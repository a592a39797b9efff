//! The MPIs of this machine, and our programs, compiled for them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::hosts::Hosts;
use crate::children;
use crate::error::{BenchError, Result, failed};

macro_rules! sources {
    ($($name:literal),*) => { &[$(($name, include_str!(concat!("programs/", $name)))),*] };
}

const KERNELS: &[(&str, &str)] = sources![
    "main.c", "ep.c", "is.c", "cg.c", "mg.c", "lu.c", "radix.c", "smg.c"
];
const OTHERS: &[(&str, &str)] = sources!["job.c", "memory.h", "kernels.h"];
/// Where Debian has hypre's headers. Its library is built for Open MPI.
const HYPRE: &str = "/usr/include/hypre";

/// An MPI that is installed.
pub(super) struct Mpi {
    pub(super) name: String,
    mpirun: PathBuf,
    mpicc: PathBuf,
    weft: PathBuf,
}

/// The programs that were compiled for an MPI.
pub(super) struct Programs {
    pub(super) exchange: PathBuf,
    pub(super) kernels: PathBuf,
    pub(super) smg: bool,
}

/// The requested MPIs, or those of Debian that are installed.
pub(super) fn find(asked: &[String]) -> Result<Vec<Mpi>> {
    let weft = children::weft()?;
    let either = ["openmpi".to_owned(), "mpich".to_owned()];
    let asked = if asked.is_empty() { &either } else { asked };
    let mut found = Vec::new();
    for name in asked {
        let tool = |tool: &str| {
            if name.contains('/') {
                Some(Path::new(name).join(tool)).filter(|file| file.exists())
            } else {
                // Debian has several MPIs side by side under these names.
                children::find(&format!("{tool}.{name}"))
            }
        };
        if let (Some(mpirun), Some(mpicc)) = (tool("mpirun"), tool("mpicc")) {
            found.push(Mpi {
                name: name.clone(),
                mpirun,
                mpicc,
                weft: weft.clone(),
            });
        } else {
            let hint = match name.as_str() {
                "openmpi" => " (Debian: openmpi-bin, libopenmpi-dev)",
                "mpich" => " (Debian: mpich, libmpich-dev)",
                _ => "",
            };
            eprintln!("weft: {name}: not measured: its mpirun or mpicc is not there{hint}");
        }
    }
    if found.is_empty() {
        return Err(failed("find an MPI", "none is installed"));
    }
    Ok(found)
}

impl Mpi {
    /// `weft mpi` with its options and this MPI's mpirun. The settings are for one host, for any user of the
    /// benchmark.
    pub(super) fn command(&self, into: &mut Command, local: &str, transport: &str) {
        into.arg(&self.weft);
        into.args(["mpi", "--local", local, "--transport", transport, "--"]);
        into.arg(&self.mpirun);
        for (name, value) in [
            ("WEFT_FI_ADDR", "127.0.0.1"),
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
            ("OMPI_MCA_plm", "isolated"),
            ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
            ("PRTE_MCA_plm", "ssh"),
            ("PRTE_MCA_plm_ssh_agent", "false"),
            ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
        ] {
            into.env(name, value);
        }
    }

    /// For a job on several hosts, behind its mpirun: the ranks take turns among them.
    pub(super) fn on(&self, into: &mut Command, hosts: &Hosts) {
        for name in ["WEFT_FI_ADDR", "OMPI_MCA_plm"] {
            into.env_remove(name);
        }
        into.env("OMPI_MCA_plm_rsh_agent", hosts.agent());
        into.env("PRTE_MCA_plm_ssh_agent", hosts.agent());
        into.env("HYDRA_LAUNCHER_EXEC", hosts.agent());
        if self.is_open_mpi() {
            into.args(["--map-by", "node", "--host"]);
            into.arg(hosts.addresses(":128"));
        } else {
            into.arg("-hosts").arg(hosts.addresses(""));
        }
    }

    fn is_open_mpi(&self) -> bool {
        let output = Command::new(&self.mpirun).arg("--version").output();
        let said = output.map(|output| output.stdout).unwrap_or_default();
        !String::from_utf8_lossy(&said).contains("HYDRA")
    }

    /// Whether it supports a transport.
    pub(super) fn has(&self, transport: &str) -> bool {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "60"]);
        self.command(&mut command, "auto", transport);
        let output = command.arg("--version").stdin(Stdio::null()).output();
        match output {
            Ok(output) if output.status.success() => true,
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                let first = said.lines().next().unwrap_or("weft mpi refuses");
                eprintln!("weft: {}: no {transport}: {first}", self.name);
                false
            }
            Err(_) => false,
        }
    }

    fn compile(&self, out: &Path, dir: &Path, sources: &[&str], more: &[&str]) -> Result<()> {
        let output = Command::new(&self.mpicc)
            .current_dir(dir)
            .args(["-O2", "-o"])
            .arg(out)
            .args(sources)
            .args(more)
            .output()
            .map_err(BenchError::system("start mpicc"))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(failed("compile a program", said))
    }
}

/// Compiles the programs into a folder.
pub(super) fn compile(mpi: &Mpi, dir: &Path) -> Result<Programs> {
    for (name, text) in KERNELS.iter().chain(OTHERS) {
        fs::write(dir.join(name), text).map_err(BenchError::system("write a file"))?;
    }
    let place = |what: &str| dir.join(format!("{what}.{}", mpi.name.replace('/', "-")));
    let mut programs = Programs {
        exchange: place("exchange"),
        kernels: place("kernels"),
        smg: mpi.name == "openmpi" && Path::new(HYPRE).is_dir(),
    };
    mpi.compile(&programs.exchange, dir, &["job.c"], &[])?;
    let kernels: Vec<&str> = KERNELS.iter().map(|(name, _)| *name).collect();
    let hypre = ["-DWITH_HYPRE", "-I", HYPRE, "-lHYPRE", "-lm"];
    programs.smg = programs.smg
        && mpi
            .compile(&programs.kernels, dir, &kernels, &hypre)
            .is_ok();
    if !programs.smg {
        mpi.compile(&programs.kernels, dir, &kernels, &["-lm"])?;
    }
    Ok(programs)
}
