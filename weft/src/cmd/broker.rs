//! `weft broker`: carries connections of `weft run --hosts` to other hosts.

use std::env;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use weft_hosts::{Broker, Config};
use weft_run::hosts::{self, PORT};
use weft_service::endpoint::parse_bind;
use weft_verbs::tls::Tls;
use weft_verbs::{Device, LocalMode};

use weft_cli::args::ServerKeys;
use weft_cli::failure::{Exit, Failure};
use weft_cli::global::Global;
use weft_cli::identity::authorized::Authorized;
use weft_cli::identity::keypair;
use weft_cli::say;

pub(crate) const LONG: &str = "\
Carry TCP connections of programs under `weft run --hosts` to other hosts, by SDP over iWARP. One broker serves the programs of one user in one network \
namespace. `weft run --hosts` starts one with the defaults if none runs; that one ends after a minute without work. Start a broker by hand to choose its address, keys or port.

Brokers of two hosts use TLS 1.3 with the keys of `weft key`. A broker accepts and dials only brokers with its own key (the same key pair on both \
hosts), or with a key in ~/.config/weft/authorized_keys. So add the key of each host to the other host's file.

Without a broker on the peer's host, connections stay plain TCP, and this broker does not dial that host again for a minute.";

const EXAMPLES: &str = "\
Examples:
  # print the key, for the authorized_keys of the other host
  weft key
  # serve until stopped, on port 7479 of all addresses
  weft broker
  weft run --hosts -- redis-server --bind 0.0.0.0 --protected-mode no";

/// The time limit for a broker in the background to listen.
const START: Duration = Duration::from_secs(5);
/// A broker in the background ends after this time without work.
const IDLE: &str = "60";

/// Options of `weft broker`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// Address for brokers of other hosts (can be given several times) [default: port 7479 of all addresses]
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = |text: &str| parse_bind(text, PORT))]
    bind: Vec<SocketAddr>,
    /// Only dial other brokers: carry connections to servers on other hosts, not those to servers here
    #[arg(long, conflicts_with = "bind")]
    dial_only: bool,
    /// The port that brokers of other hosts listen on
    #[arg(long, value_name = "PORT", default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Addresses are translated between the hosts (NAT): accept a connection whose addresses differ from those that the other broker names, if it
    /// is the only one with the same first bytes. Connections with equal first bytes can be confused, which mixes their bytes
    #[arg(long)]
    nat: bool,
    /// End after this many seconds without a connection [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    idle: Option<u64>,
    /// Go to the background after the broker listens
    #[arg(long)]
    detach: bool,
    #[command(flatten)]
    keys: ServerKeys,
    /// Accept every key: connections are encrypted, but not authenticated
    #[arg(long, help_heading = "Keys")]
    open: bool,
    /// No TLS, for a trusted network. Give it on both hosts
    #[arg(long, conflicts_with_all = ["open", "identity", "authorized"], help_heading = "Keys")]
    no_tls: bool,
}

/// Serves, or makes sure that a broker runs.
pub fn run(args: &Args, global: Global) -> Result<ExitCode, Failure> {
    if args.detach {
        detach(&env::args_os().skip(1).collect::<Vec<_>>())?;
        return Ok(Exit::Ok.into());
    }
    weft_cli::values::raise_nofile();
    let mut builder = Device::builder().local(LocalMode::Off);
    if !args.no_tls {
        builder = builder.tls(tls(args)?);
    }
    let device = builder.open().map_err(|e| {
        Failure::failed(format!("cannot open an RNIC: {e}"))
            .hint("`weft doctor` says what this machine does not support")
    })?;
    let start = |bind| {
        Broker::start(Config {
            device: device.clone(),
            bind,
            port: args.port,
            nat: args.nat,
            idle: args.idle.map(Duration::from_secs),
        })
    };
    // A listener for IPv6 takes no IPv4.
    let any: [SocketAddr; 2] = [
        (Ipv6Addr::UNSPECIFIED, PORT).into(),
        (Ipv4Addr::UNSPECIFIED, PORT).into(),
    ];
    let started = match args.bind.as_slice() {
        _ if args.dial_only => start(Vec::new()),
        [] => start(any.into()).or_else(|e| match e.raw_os_error() {
            // EAFNOSUPPORT, EADDRNOTAVAIL: no IPv6 here.
            Some(97 | 99) => start(vec![any[1]]),
            _ => Err(e),
        }),
        addrs => start(addrs.into()),
    };
    let broker = started.map_err(|e| {
        if hosts::is_there() {
            return Failure::failed("this user has a broker in this network namespace already")
                .hint("end it first to change its settings");
        }
        Failure::failed(format!("cannot listen for other brokers: {e}")).hint(
            "another user's broker may have the port: --bind ADDR:PORT chooses another one, --dial-only needs none",
        )
    })?;
    if !global.quiet {
        for addr in broker.local_addrs() {
            say(format_args!("broker on {addr}"));
        }
        if args.dial_only {
            say("broker that only dials");
        }
    }
    broker
        .run()
        .map_err(|e| Failure::failed(format!("cannot wait for programs: {e}")))?;
    Ok(Exit::Ok.into())
}

/// The broker's own key, and the keys that it accepts.
fn tls(args: &Args) -> Result<Tls, Failure> {
    let path = keypair::file_of(args.keys.identity.as_deref())?;
    let (identity, _) = keypair::read_or_make(&path)?;
    let unusable = |e: weft_verbs::tls::TlsError| keypair::unusable(&e);
    let own = identity.public_key().fingerprint();
    let tls = Tls::new(identity).map_err(unusable)?;
    if args.open {
        return Ok(tls);
    }
    let authorized = Authorized::named_or_usual(args.keys.authorized.as_deref());
    // Read here, so that errors are reported at once.
    if let Some(authorized) = &authorized {
        authorized.keys()?;
    }
    tls.allow(move |key| {
        let key = key.fingerprint();
        key == own
            || authorized
                .as_ref()
                .is_some_and(|authorized| authorized.admits(&key))
    })
    .map_err(unusable)
}

/// Starts this program again with the same arguments except `--detach`, and returns when the broker listens.
fn detach(arguments: &[std::ffi::OsString]) -> Result<(), Failure> {
    let unable = |what: String| Failure::failed(format!("cannot start the broker: {what}"));
    let program = env::current_exe().map_err(|e| unable(e.to_string()))?;
    let mut child = Command::new(program)
        .args(arguments.iter().filter(|arg| *arg != "--detach"))
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(|e| unable(e.to_string()))?;
    let until = Instant::now() + START;
    loop {
        if hosts::is_there() {
            return Ok(());
        }
        if let Ok(Some(status)) = child.try_wait() {
            // Another one may have been quicker.
            return if hosts::is_there() {
                Ok(())
            } else {
                Err(unable(format!("it ended ({status})"))
                    .hint("start `weft broker` by hand to see why"))
            };
        }
        if Instant::now() >= until {
            return Err(unable(format!(
                "it does not listen after {} s",
                START.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Makes sure that this user has a broker here. A process in between starts it, so that it is no child of the program that this process
/// will execute.
pub(crate) fn ensure() -> Result<(), Failure> {
    if hosts::is_there() {
        return Ok(());
    }
    let unable = |what: String| {
        Failure::failed(format!("no broker for other hosts: {what}")).hint(
            "start `weft broker` by hand to see why, or leave --hosts out: connections to other hosts stay on TCP",
        )
    };
    let program = env::current_exe().map_err(|e| unable(e.to_string()))?;
    let attempt = |more: &[&str]| {
        Command::new(&program)
            .args(["broker", "--detach", "--quiet", "--idle", IDLE])
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .map_err(|e| unable(e.to_string()))
    };
    // Another user may have the port.
    if attempt(&[])?.success() || attempt(&["--dial-only"])?.success() {
        // It stays as long as we live, once we have come ourselves.
        hosts::is_there();
        return Ok(());
    }
    Err(unable("it does not start".into()))
}
