//! `weft mpi`: an MPI job on weft, whichever MPI starts it.

mod hosts;
mod there;

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::ValueEnum;

use weft_cli::start::{self, EXIT_OWN};
use weft_report::programs;

use self::hosts::Host;
use super::verbs;
use weft_cli::failure::Failure;
use weft_verbs::settings;

pub(crate) const LONG: &str = "\
Run an MPI job on weft: set the environment by which Open MPI or MPICH finds weft, and execute mpirun. The MPI and the program stay unmodified.

Transports:
  rc     connections (RC): for Open MPI libfabric's verbs;ofi_rxm, for MPICH
         UCX's rc_verbs
  ud     datagrams only (UD), which libfabric or UCX makes reliable: for Open
         MPI libfabric's verbs;ofi_rxd, for MPICH UCX's ud_verbs
  weft   weft's own libfabric provider: small messages by datagrams, large
         ones by RDMA Write-Record, and connections to busy peers of this host
         (with WEFT_FI_RC=N of any host). Not with an MPICH on UCX only,
         such as Debian's
  tcp    the MPI's own TCP, without weft, for comparison
  auto   rc (the default); weft where only the loopback interface is there,
         except on UCX; weft with an MPICH on both UCX and libfabric,
         such as PyPI's: on UCX that MPICH (5.0.2) hangs in a receive from
         MPI_ANY_SOURCE, on every transport of UCX

Hosts: mpirun's own options name them (--host, -hosts, files), or --hosts, with which weft first checks that each has this weft and its libraries, and that TCP and UDP pass between any two. Ranks on other hosts get weft's variables. The libraries are in the same folder everywhere.

Variables that you have set stay unchanged; those that contradict the transport are named on stderr. Options given to mpirun (--mca, -genv) take precedence.";

const EXAMPLES: &str = "\
Examples:
  weft mpi -- mpirun -np 4 ./program
  weft mpi --transport weft --explain -- mpirun.openmpi -np 4 ./program
  weft mpi --hosts a:2,b:2 -- mpirun -np 4 ./program

Exit status: that of mpirun; 125 if weft fails, 126 if mpirun cannot be executed, 127 if it is not found.";

/// The provider of libfabric, in the folder of the drop-in libraries.
const PROVIDER: &str = "libweft-fi.so";

/// Options of `weft mpi`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// The transport of the messages
    #[arg(long, value_name = "NAME", default_value = "auto")]
    transport: Transport,
    /// Print on stderr the MPI that was found, and the variables that are set
    #[arg(long)]
    explain: bool,
    /// The folder of weft's libraries [default: the folder of the packages or of `./x dist`]
    #[arg(long, value_name = "DIR", env = "WEFT_VERBS_LIB")]
    lib: Option<PathBuf>,
    /// Log level of the libraries on stderr
    #[arg(long, value_name = "LEVEL", value_parser = ["off", "error", "warn", "info", "debug", "trace"])]
    log: Option<String>,
    /// Use of shared memory by connections (rc, weft) between processes of this host and user
    #[arg(long, value_name = "WHEN", value_parser = ["off", "auto", "require"])]
    local: Option<String>,
    /// The hosts of the job, with commas, each a name or NAME:SLOTS: they are checked, and mpirun gets the list
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    hosts: Vec<Host>,
    /// On another host: check what a job of this version of weft needs
    #[arg(long, value_name = "VERSION", hide = true, conflicts_with = "command")]
    there: Option<String>,
    /// mpirun or mpiexec, and its arguments
    #[arg(
        value_name = "MPIRUN",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required_unless_present = "there"
    )]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transport {
    Auto,
    Rc,
    Ud,
    Weft,
    Tcp,
}

impl Transport {
    /// The transport that `auto` selects for this MPI; `alone`: where there is only the loopback interface.
    fn settled(self, mpi: Mpi, alone: bool) -> Transport {
        match (self, mpi) {
            (Transport::Auto, Mpi::MpichBoth) => Transport::Weft,
            (Transport::Auto, Mpi::Open | Mpi::MpichOfi) if alone => Transport::Weft,
            (Transport::Auto, _) => Transport::Rc,
            (told, _) => told,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Rc => "rc",
            Transport::Ud => "ud",
            Transport::Weft => "weft",
            Transport::Tcp => "tcp",
        }
    }
}

/// An MPI, and the library that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mpi {
    Open,
    MpichUcx,
    MpichOfi,
    /// Built on both, like the wheel of `PyPI`: a variable selects one at run time.
    MpichBoth,
}

impl Mpi {
    fn name(self) -> &'static str {
        match self {
            Mpi::Open => "Open MPI, on libfabric (mtl/ofi)",
            Mpi::MpichUcx => "MPICH, on UCX (ch4:ucx)",
            Mpi::MpichOfi => "MPICH, on libfabric (ch4:ofi)",
            Mpi::MpichBoth => "MPICH, on UCX or libfabric (ch4:ucx,ofi)",
        }
    }

    /// Parses the output of `mpirun --version`.
    fn of(text: &str) -> Option<Mpi> {
        if text.contains("Open MPI") || text.contains("OpenRTE") || text.contains("open-mpi.org") {
            Some(Mpi::Open)
        } else if !text.contains("HYDRA") {
            None
        } else {
            // --with-device=ch4:ucx,ofi
            let (_, device) = text.split_once("ch4:")?;
            let end = device.find(|c: char| !c.is_ascii_alphanumeric() && c != ',');
            let mut modules = device[..end.unwrap_or(device.len())].split(',');
            match (
                modules.clone().any(|m| m == "ucx"),
                modules.any(|m| m == "ofi"),
            ) {
                (true, true) => Some(Mpi::MpichBoth),
                (true, false) => Some(Mpi::MpichUcx),
                (false, true) => Some(Mpi::MpichOfi),
                (false, false) => None,
            }
        }
    }

    /// The variables for a transport. `None`: this MPI does not support it.
    fn variables(self, transport: Transport) -> Option<Vec<(&'static str, &'static str)>> {
        let on_libfabric = |provider| {
            vec![
                ("OMPI_MCA_pml", "cm"),
                ("OMPI_MCA_mtl", "ofi"),
                ("OMPI_MCA_mtl_ofi_provider_include", provider),
                ("OMPI_MCA_btl", "^openib,ofi"),
            ]
        };
        let on_ucx = |transports| vec![("UCX_TLS", transports), ("UCX_NET_DEVICES", "weft_ib0:1")];
        // ofi_rxd retransmits packets that are not acknowledged within a millisecond, and acknowledges once a window: the default one, 128 packets,
        // takes longer.
        let in_short_windows = |mut variables: Vec<_>| {
            variables.push(("FI_OFI_RXD_MAX_UNACKED", "32"));
            variables
        };
        // libfabric's ofi_rxm (seen with 1.17) loses messages of 16 to 128 KiB that it sends in segments and that the receiver claims after a
        // matched probe (MPI_Mprobe, MPI_Mrecv): the receive never completes. Without segments such messages go by rendezvous.
        let without_segments = |mut variables: Vec<_>| {
            variables.push(("FI_OFI_RXM_SAR_LIMIT", "0"));
            variables
        };
        // Ranks of one host use the transport as well, not MPICH's own shared memory.
        let mpich_on_libfabric =
            |provider| vec![("FI_PROVIDER", provider), ("MPIR_CVAR_NOLOCAL", "1")];
        let mut variables = match (self, transport) {
            (Mpi::Open, Transport::Auto | Transport::Rc) => {
                without_segments(on_libfabric("verbs;ofi_rxm"))
            }
            (Mpi::Open, Transport::Ud) => in_short_windows(on_libfabric("verbs;ofi_rxd")),
            (Mpi::Open, Transport::Weft) => on_libfabric("weft"),
            (Mpi::Open, Transport::Tcp) => {
                vec![("OMPI_MCA_pml", "ob1"), ("OMPI_MCA_btl", "tcp,self")]
            }
            (Mpi::MpichUcx | Mpi::MpichBoth, Transport::Auto | Transport::Rc) => {
                on_ucx("rc_verbs,ud_verbs,self")
            }
            (Mpi::MpichUcx | Mpi::MpichBoth, Transport::Ud) => on_ucx("ud_verbs,self"),
            (Mpi::MpichUcx, Transport::Tcp) => vec![("UCX_TLS", "tcp,self")],
            (Mpi::MpichUcx, Transport::Weft) => return None,
            (Mpi::MpichOfi, Transport::Auto | Transport::Rc) => {
                without_segments(mpich_on_libfabric("verbs;ofi_rxm"))
            }
            (Mpi::MpichOfi, Transport::Ud) => in_short_windows(mpich_on_libfabric("verbs;ofi_rxd")),
            (Mpi::MpichOfi | Mpi::MpichBoth, Transport::Weft) => mpich_on_libfabric("weft"),
            (Mpi::MpichOfi, Transport::Tcp) => mpich_on_libfabric("tcp;ofi_rxm"),
            (Mpi::MpichBoth, Transport::Tcp) => mpich_on_libfabric("tcp"),
        };
        if self == Mpi::MpichBoth {
            let on_libfabric = matches!(transport, Transport::Weft | Transport::Tcp);
            variables.push((
                "MPIR_CVAR_CH4_NETMOD",
                if on_libfabric { "ofi" } else { "ucx" },
            ));
            if !on_libfabric {
                variables.push(("MPIR_CVAR_NOLOCAL", "1"));
            }
        }
        Some(variables)
    }

    /// The options by which its mpirun takes the list of `--hosts`.
    fn naming(self, hosts: &[Host]) -> Vec<OsString> {
        let option = if self == Mpi::Open {
            "--host"
        } else {
            "-hosts"
        };
        let list = (!hosts.is_empty()).then(|| [option.into(), hosts::list(hosts)]);
        list.into_iter().flatten().collect()
    }

    /// The program that it starts on another host in place of ssh, as its options or its variables say.
    fn agent(self, arguments: &[OsString], theirs: impl Fn(&str) -> Option<String>) -> Vec<String> {
        let (options, names): (&[&str], &[&str]) = if self == Mpi::Open {
            (
                &["plm_rsh_agent", "plm_ssh_agent"],
                &["OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"],
            )
        } else {
            (
                &["-launcher-exec", "-bootstrap-exec"],
                &["HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP_EXEC"],
            )
        };
        let mut pairs = arguments.windows(2);
        let told = pairs.find(|pair| options.iter().any(|option| pair[0] == *option));
        let told = told.map(|pair| pair[1].to_string_lossy().into_owned());
        let set = || names.iter().find_map(|name| theirs(name));
        let agent = told.or_else(set).unwrap_or_default();
        // Open MPI takes the first of those that a colon divides and that exist.
        let first = agent.split(" : ").next().unwrap_or_default();
        let words: Vec<String> = first.split_whitespace().map(str::to_owned).collect();
        if words.is_empty() {
            vec!["ssh".to_owned()]
        } else {
            words
        }
    }

    /// The devices that programs see. UCX refuses iWARP, and only the other device has datagrams.
    fn devices(self, transport: Transport) -> &'static str {
        match (self, transport) {
            (Mpi::MpichUcx | Mpi::MpichBoth, _) | (_, Transport::Ud) => "weft_ib0",
            _ => "weft0",
        }
    }
}

/// Open MPI runs as root if both are 1.
const ALLOW_ROOT: [&str; 2] = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"];

/// Whether only the loopback interface has addresses, by the kernel's lists of IPv4 routes and IPv6 addresses.
fn is_alone(routes: &str, addresses: &str) -> bool {
    let of_routes = routes.lines().skip(1);
    let v4 = of_routes.filter_map(|line| line.split_whitespace().next());
    let of_addresses = addresses.lines();
    let v6 = of_addresses.filter_map(|line| line.split_whitespace().last());
    v4.chain(v6).all(|interface| interface == "lo")
}

/// Executes mpirun.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    if let Some(version) = &args.there {
        return there::run(version, || needed(args, args.transport).map(drop));
    }
    let Some((name, rest)) = args.command.split_first() else {
        return Err(Failure::usage("no mpirun is named"));
    };
    let program = match programs::find(name) {
        Ok(program) => program,
        Err(e)
            if e.kind() == io::ErrorKind::NotFound
                && !name.as_encoded_bytes().starts_with(b"-") =>
        {
            let failure = Failure::failed(format!("cannot run {}: no such program", name.display()))
                .hint("install an MPI (Debian: openmpi-bin or mpich), or name the file of its mpirun after `--`");
            return Ok(start::fail(start::EXIT_NOT_FOUND, &failure));
        }
        Err(e) => return Ok(start::refuse(name, &e)),
    };
    let mpi = match found(&program) {
        Ok(mpi) => mpi,
        Err(failure) => return Ok(start::fail(EXIT_OWN, &failure)),
    };
    let list = |name| fs::read_to_string(Path::new("/proc/self/net").join(name)).ok();
    // Without /proc nothing is known.
    let alone = list("route")
        .is_some_and(|routes| is_alone(&routes, &list("if_inet6").unwrap_or_default()));
    let transport = args.transport.settled(mpi, alone);
    if alone && matches!(mpi, Mpi::Open | Mpi::MpichOfi) {
        let only = "only the loopback interface has addresses, and libfabric's verbs provider leaves it out";
        match (args.transport, transport) {
            (Transport::Auto, _) => weft_cli::tell!("weft: notice: {only}: transport weft"),
            (_, Transport::Rc) => {
                weft_cli::tell!(
                    "weft: warning: {only}: use --transport weft, or bring another interface up"
                );
            }
            _ => {}
        }
    }
    if mpi == Mpi::Open
        && rustix::process::geteuid().is_root()
        && ALLOW_ROOT.iter().any(|name| env::var_os(name).is_none())
        && !rest.iter().any(|word| word == "--allow-run-as-root")
    {
        weft_cli::tell!(
            "weft: notice: Open MPI does not run as root unless {}=1 and {}=1 are set, or --allow-run-as-root follows mpirun",
            ALLOW_ROOT[0],
            ALLOW_ROOT[1]
        );
    }
    let settings = match settings(args, mpi, transport, alone) {
        Ok(settings) => settings,
        Err(failure) => return Ok(start::fail(EXIT_OWN, &failure)),
    };
    if mpi == Mpi::MpichBoth && matches!(transport, Transport::Rc | Transport::Ud) {
        weft_cli::tell!(
            "weft: warning: MPICH 5.0.2 on UCX, its own TCP too, waits for ever in receives from MPI_ANY_SOURCE; the transport weft is not on UCX"
        );
    }
    let (set, kept) = settle(settings, |name| env::var_os(name));
    for (name, ours, theirs) in &kept {
        weft_cli::tell!(
            "weft: warning: {name} stays {}; the transport {} has {}",
            theirs.display(),
            transport.name(),
            ours.display()
        );
    }
    if let Err(failure) = checked(args, mpi, rest, transport) {
        return Ok(start::fail(EXIT_OWN, &failure));
    }
    if args.explain {
        eprint!("{}", explanation(&program, mpi, transport, &set));
    }
    // Only a failure comes back.
    let error = Command::new(&program)
        .arg0(name)
        .args(mpi.naming(&args.hosts))
        .args(forwarding(
            mpi,
            rest,
            &told(&set, &kept, |name| env::var_os(name)),
            env::var_os(ENV_LIST).is_some(),
        ))
        .args(rest)
        .envs(set)
        .exec();
    Ok(start::refuse(name, &error))
}

/// Asks an mpirun for its version.
fn found(program: &Path) -> Result<Mpi, Failure> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Failure::failed(format!("cannot run {} --version: {e}", program.display())))?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Mpi::of(&text).ok_or_else(|| {
        let first = text.lines().next().unwrap_or("nothing");
        Failure::failed(format!(
            "{} is neither Open MPI's mpirun nor that of an MPICH on UCX or libfabric; `--version` says: {first}",
            program.display()
        ))
        .hint("name mpirun itself after `--`, not a script or a scheduler's starter; for other MPIs see `weft verbs`")
    })
}

/// All variables that the transport needs.
fn settings(
    args: &Args,
    mpi: Mpi,
    transport: Transport,
    alone: bool,
) -> Result<Vec<(&'static str, OsString)>, Failure> {
    let Some(mut variables) = mpi.variables(transport) else {
        return Err(
            Failure::failed(format!("{} cannot use a provider of libfabric", mpi.name()))
                .hint("use --transport ud, or Open MPI, or an MPICH that is built with ch4:ofi"),
        );
    };
    if alone && transport == Transport::Tcp && mpi == Mpi::Open {
        // Open MPI leaves it out, too, unless it is named.
        variables.push(("OMPI_MCA_btl_tcp_if_include", "lo"));
    }
    let mut settings: Vec<(&str, OsString)> = Vec::new();
    match transport {
        Transport::Tcp => {}
        Transport::Weft => {
            let lib = needed(args, transport)?;
            settings.push(("FI_PROVIDER_PATH", lib.into_os_string()));
            if let Some(level) = &args.log {
                settings.push(("WEFT_LOG", level.into()));
            }
            if let Some(when) = &args.local {
                settings.push(("WEFT_LOCAL", when.into()));
            }
        }
        Transport::Auto | Transport::Rc | Transport::Ud => {
            let devices = mpi.devices(transport);
            settings = verbs::environment(
                args.lib.clone(),
                devices,
                args.log.clone(),
                args.local.clone(),
            )?;
        }
    }
    settings.extend(variables.into_iter().map(|(n, v)| (n, v.into())));
    Ok(settings)
}

/// The folder of the libraries, which has those that the transport needs.
fn needed(args: &Args, transport: Transport) -> Result<PathBuf, Failure> {
    let lib = verbs::libraries(args.lib.as_deref())?;
    if transport == Transport::Weft && !lib.join(PROVIDER).exists() {
        let what = format!("there is no {PROVIDER} in {}", lib.display());
        return Err(
            Failure::failed(what).hint("the package weft-verbs has it, and `./x dist` builds it")
        );
    }
    Ok(lib)
}

/// Checks the hosts that `--hosts` names.
fn checked(
    args: &Args,
    mpi: Mpi,
    arguments: &[OsString],
    transport: Transport,
) -> Result<(), Failure> {
    // Plain TCP needs nothing of weft there.
    if args.hosts.is_empty() || transport == Transport::Tcp {
        return Ok(());
    }
    let needs = hosts::Needs {
        transport: transport.name(),
        lib: &needed(args, transport)?,
        agent: mpi.agent(arguments, |name| env::var(name).ok()),
    };
    hosts::check(&args.hosts, &needs)
}

type Setting = (&'static str, OsString);

/// What ranks on other hosts are told: what is set, what the user has in its place, and the user's settings of weft, without an address that only this host has.
fn told(
    set: &[Setting],
    kept: &[(&'static str, OsString, OsString)],
    theirs: impl Fn(&str) -> Option<OsString>,
) -> Vec<Setting> {
    let mut told = set.to_vec();
    told.extend(kept.iter().map(|(name, _, value)| (*name, value.clone())));
    let of_weft = settings::OF_VERBS.iter().chain(&settings::OF_FI);
    let names = of_weft.map(|setting| setting.name);
    for name in names.chain(settings::FILES.map(|file| file.0)) {
        let value = theirs(name).filter(|value| !value.is_empty());
        let only_here = |value: &OsString| {
            name == settings::FI_ADDR.name && !value.as_encoded_bytes().contains(&b'/')
        };
        if told.iter().all(|(there, _)| *there != name)
            && let Some(value) = value.filter(|value| !only_here(value))
        {
            told.push((name, value));
        }
    }
    told
}

/// The variables to set, and those that keep the user's value although it differs from ours. Search paths contain the user's part already.
fn settle(
    settings: Vec<Setting>,
    theirs: impl Fn(&str) -> Option<OsString>,
) -> (Vec<Setting>, Vec<(&'static str, OsString, OsString)>) {
    let (mut set, mut kept) = (Vec::new(), Vec::new());
    for (name, ours) in settings {
        match theirs(name).filter(|value| !value.is_empty() && *value != ours) {
            Some(value) if !name.starts_with("LD_") => kept.push((name, ours, value)),
            _ => set.push((name, ours)),
        }
    }
    (set, kept)
}

/// Open MPI's own list of variables for ranks on other hosts. It accepts that or `-x`, not both.
const ENV_LIST: &str = "OMPI_MCA_mca_base_env_list";

/// Open MPI passes its own variables to ranks on other hosts, and others only on request; MPICH passes all, unless it is told which. Returns the options for
/// mpirun, which come before the user's.
fn forwarding(mpi: Mpi, arguments: &[OsString], set: &[Setting], listed: bool) -> Vec<OsString> {
    if mpi != Mpi::Open {
        let limits = ["-genvnone", "-genvlist", "-envnone", "-envlist"];
        let limited = arguments
            .iter()
            .any(|word| limits.iter().any(|limit| word == limit));
        let set = set.iter().filter(|_| limited);
        return set
            .flat_map(|(name, value)| ["-genv".into(), (*name).into(), value.clone()])
            .collect();
    }
    // The program's arguments may have the word too, but not behind this option.
    let options = ["--mca", "-mca", "--gmca", "-gmca"];
    let listed = listed
        || arguments.windows(2).any(|pair| {
            options.iter().any(|option| pair[0] == *option) && pair[1] == "mca_base_env_list"
        });
    if listed {
        return Vec::new();
    }
    // Version 4 takes the last `-x` of a name, version 5 the first: only the user's own.
    let theirs: Vec<_> = arguments
        .windows(2)
        .filter(|pair| pair[0] == "-x")
        .map(|pair| pair[1].to_string_lossy())
        .collect();
    let is_theirs = |name: &str| {
        let mut names = theirs.iter().filter_map(|given| given.split('=').next());
        names.any(|given| given == name)
    };
    let names = set.iter().map(|(name, _)| *name);
    let others = names.filter(|name| !name.starts_with("OMPI_") && !is_theirs(name));
    others.flat_map(|name| ["-x".into(), name.into()]).collect()
}

fn explanation(program: &Path, mpi: Mpi, transport: Transport, set: &[Setting]) -> String {
    let mut text = format!(
        "weft: {} is {}; transport {}\n",
        program.display(),
        mpi.name(),
        transport.name()
    );
    for (name, value) in set {
        let _ = writeln!(text, "weft:   {name}={}", value.display());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpis_are_known_by_what_they_say() {
        let of = Mpi::of;
        assert_eq!(of("mpirun (Open MPI) 5.0.3\n"), Some(Mpi::Open));
        assert_eq!(of("mpirun.openmpi (OpenRTE) 4.1.4\n"), Some(Mpi::Open));
        let hydra = |device| format!("HYDRA build details:\n '--with-device={device}'\n");
        assert_eq!(of(&hydra("ch4:ucx")), Some(Mpi::MpichUcx));
        assert_eq!(of(&hydra("ch4:ofi")), Some(Mpi::MpichOfi));
        assert_eq!(of(&hydra("ch4:ucx,ofi")), Some(Mpi::MpichBoth));
        assert_eq!(of(&hydra("ch3:nemesis")), None);
        assert_eq!(of("env (GNU coreutils) 9.1"), None);
    }

    #[test]
    fn auto_is_what_this_mpi_gets_through_with() {
        let auto = Transport::Auto;
        assert_eq!(auto.settled(Mpi::Open, false), Transport::Rc);
        assert_eq!(auto.settled(Mpi::MpichUcx, true), Transport::Rc);
        assert_eq!(auto.settled(Mpi::MpichBoth, false), Transport::Weft);
        assert_eq!(Transport::Ud.settled(Mpi::MpichBoth, true), Transport::Ud);
        // libfabric's verbs provider does not use the loopback interface.
        assert_eq!(auto.settled(Mpi::Open, true), Transport::Weft);
        let routes = "Iface\tDestination\n";
        let v6 = "00000000000000000000000000000001 01 80 10 80       lo\n";
        assert!(is_alone(routes, v6) && is_alone(routes, ""));
        assert!(!is_alone(&format!("{routes}eth0\t00000000\n"), v6));
        assert!(!is_alone(routes, &v6.replace("lo", "eth0")));
    }

    #[test]
    fn ranks_on_other_hosts_are_told() {
        let set = [
            ("OMPI_MCA_pml", OsString::from("cm")),
            ("FI_PROVIDER_PATH", "/lib".into()),
        ];
        let of = |mpi, arguments: &[&str], listed| {
            let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
            forwarding(mpi, &arguments, &set, listed)
        };
        let ours = ["-x", "FI_PROVIDER_PATH"];
        assert_eq!(of(Mpi::Open, &["-np", "2", "a.out"], false), ours);
        // The user's own -x, and one that is the program's.
        assert_eq!(of(Mpi::Open, &["-x", "HOME", "a.out", "-x"], false), ours);
        // One of weft's variables, with the user's value.
        let own = ["-x", "FI_PROVIDER_PATH=/mine", "a.out"];
        assert!(of(Mpi::Open, &own, false).is_empty());
        let list = ["--mca", "mca_base_env_list", "HOME", "a.out"];
        assert!(of(Mpi::Open, &list, false).is_empty());
        // The program's own words.
        let words = ["a.out", "mca_base_env_list", "x"];
        assert_eq!(of(Mpi::Open, &words, false), ours);
        assert!(of(Mpi::Open, &["a.out"], true).is_empty());
        assert!(of(Mpi::MpichBoth, &["a.out"], false).is_empty());
        // MPICH passes all by itself, until it is told not to.
        assert_eq!(
            of(Mpi::MpichUcx, &["-genvnone", "a.out"], false),
            [
                "-genv",
                "OMPI_MCA_pml",
                "cm",
                "-genv",
                "FI_PROVIDER_PATH",
                "/lib"
            ]
        );
    }

    #[test]
    fn other_hosts_get_the_users_settings_but_no_address_of_this_one() {
        let set = [("WEFT_DEVICES", OsString::from("weft0"))];
        let kept = [("FI_PROVIDER", "weft".into(), "tcp".into())];
        let of = |addr: &str| {
            told(&set, &kept, |name| match name {
                "WEFT_FI_RC" => Some("3".into()),
                "WEFT_FI_ADDR" => Some(addr.into()),
                "WEFT_DEVICES" => Some("weft0".into()),
                "WEFT_LOG" => Some("".into()),
                _ => None,
            })
        };
        let mut all = vec![
            ("WEFT_DEVICES", OsString::from("weft0")),
            ("FI_PROVIDER", "tcp".into()),
            ("WEFT_FI_RC", "3".into()),
        ];
        let sorted = |mut list: Vec<Setting>| {
            list.sort();
            list
        };
        assert_eq!(sorted(of("10.0.0.1")), sorted(all.clone()));
        all.push(("WEFT_FI_ADDR", "10.0.0.0/8".into()));
        assert_eq!(sorted(of("10.0.0.0/8")), sorted(all));
    }

    #[test]
    fn the_agent_is_the_one_of_the_mpi() {
        let of = |mpi: Mpi, arguments: &[&str], set: Option<(&str, &str)>| {
            let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
            let set = |name: &str| set.filter(|set| set.0 == name).map(|set| set.1.to_owned());
            mpi.agent(&arguments, set)
        };
        assert_eq!(of(Mpi::Open, &["-np", "2"], None), ["ssh"]);
        let set = Some(("OMPI_MCA_plm_rsh_agent", "ssh -p 2 : rsh"));
        assert_eq!(of(Mpi::Open, &[], set), ["ssh", "-p", "2"]);
        assert_eq!(of(Mpi::MpichUcx, &[], set), ["ssh"]);
        let told = ["--mca", "plm_rsh_agent", "/my/agent"];
        assert_eq!(of(Mpi::Open, &told, set), ["/my/agent"]);
        let told = ["-launcher-exec", "/my/agent"];
        assert_eq!(of(Mpi::MpichBoth, &told, None), ["/my/agent"]);
    }

    #[test]
    fn what_the_user_has_set_stays() {
        let ours = vec![
            ("UCX_TLS", OsString::from("ud_verbs,self")),
            ("LD_PRELOAD", "ours:theirs".into()),
            ("WEFT_DEVICES", "weft_ib0".into()),
        ];
        let theirs = |name: &str| match name {
            "UCX_TLS" => Some("tcp".into()),
            "LD_PRELOAD" => Some("theirs".into()),
            _ => None,
        };
        let (set, kept) = settle(ours, theirs);
        assert_eq!(
            set,
            [
                ("LD_PRELOAD", "ours:theirs".into()),
                ("WEFT_DEVICES", "weft_ib0".into())
            ]
        );
        assert_eq!(kept, [("UCX_TLS", "ud_verbs,self".into(), "tcp".into())]);
    }
}
