//! `weft cc`: a distributed compiler.

use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use comfy_table::{Table, presets};
use rustix::process::{Resource, Rlimit, setrlimit};
use weft_cc::client::{Compiled, Settings, compile};
use weft_cc::daemon::{self, Keys};
use weft_cc::ipc::{self, Answer, Ask, Line, Status};
use weft_cc::wire::{End, Verdict};
use weft_cc::worker::{self, Events, Worker};
use weft_cc::{DEFAULT_PORT, Endpoint, find_program, options};
use weft_fs::name::parse_size;
use weft_verbs::tls::{Fingerprint, Identity, Tls};

use super::cc_summary::SummaryArgs;
use super::say;
use crate::address::parse_bind;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::identity::authorized::Authorized;
use crate::identity::known::{Known, name_of};
use crate::identity::trust::{Trust, Verdict as Judged};
use crate::identity::{Folder, keypair};

pub(crate) const LONG: &str = "\
Compile C and C++ with gcc on other machines. `weft cc gcc ...` preprocesses here; a worker reads the text by RDMA Read, compiles it, and writes the object into \
this machine's memory by RDMA Write. The object is the one that the compiler here would have made, byte for byte: a worker with another compiler is not used. \
What cannot go out (linking, assembler, -march=native, plugins, coverage ...), and what fails elsewhere, is compiled here; `weft cc status` counts the reasons.

A daemon (`weft ccd`) that is started by itself keeps the connections. What leaves the machine is encrypted and authenticated by TLS 1.3 with the keys of \
`weft key`, as for `weft cp`. A worker runs compilers in a sandbox (Landlock, seccomp); give its keys to those alone whom you trust, and use only workers that \
you trust: a wrong object cannot be seen, only compared (--verify).";

const EXAMPLES: &str = "\
Examples:
  # on each machine that compiles for others
  weft cc worker --bind 0.0.0.0

  # here: name the workers, look at them, and say whether their keys are right
  export WEFT_CC_HOSTS=a,b:7477,[fd00::3]
  weft cc check
  make -j32 CC='weft cc gcc' CXX='weft cc g++'
  # who compiles what, what stayed here, and a picture of the last build
  weft cc status
  weft cc summary --html build.html

  # workers preprocess too, with headers that they read from here
  WEFT_CC_PULL=1 make -j32 CC='weft cc gcc'
  # the same in a smaller program, which starts faster
  make -j32 CC='weft-cc gcc'
  CCACHE_PREFIX=weft-cc make -j32 CC='ccache gcc'
  # a link with a compiler's name is `weft cc` with that compiler
  ln -s $(which weft-cc) ~/bin/gcc";

/// Options of `weft cc`.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = EXAMPLES,
    subcommand_value_name = "COMPILER ARGUMENTS... | COMMAND",
    subcommand_help_heading = "Commands"
)]
pub struct Args {
    /// Workers: HOST, HOST:PORT or [IPV6]:PORT, with commas between
    #[arg(long, value_name = "WORKERS", env = "WEFT_CC_HOSTS")]
    hosts: Option<String>,
    /// Compile so many percent of the objects here too, and compare
    #[arg(long, value_name = "PERCENT", env = "WEFT_CC_VERIFY", default_value = "0", value_parser = percent)]
    verify: u8,
    /// Workers preprocess too: they read headers by RDMA Read and keep them
    #[arg(long, env = "WEFT_CC_PULL", action = clap::ArgAction::SetTrue, value_parser = clap::builder::FalseyValueParser::new())]
    pull: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Compile for others
    Worker(WorkerArgs),
    /// Show workers, jobs, and why commands ran here
    Status(StatusArgs),
    /// Say what the last build did, and draw it: who compiled what, when, and what waited
    Summary(SummaryArgs),
    /// Connect to each worker, and ask whether unknown keys are theirs
    Check(CheckArgs),
    /// End the daemon
    Stop,
    /// `gcc`, `g++`, `cc`, `c++`, with their arguments
    #[command(external_subcommand)]
    Compile(Vec<OsString>),
}

#[derive(Debug, clap::Args)]
struct WorkerArgs {
    /// Listen on this address; on any but a loopback address only known keys are let in, or --open [default: 127.0.0.1:7477]
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = |text: &str| parse_bind(text, DEFAULT_PORT))]
    bind: Option<SocketAddr>,
    /// Compilers at once [default: as many as there are processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    slots: Option<u16>,
    /// Memory that each process of a compiler may have, in bytes or with K, M, G [default: this machine's over the slots, at least 1G]
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<u64>,
    /// A compiler that takes longer is ended
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    time: u64,
    /// Where jobs have their files [default: /dev/shm, or where temporary files are]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Let everybody in who can reach the address
    #[arg(long)]
    open: bool,
    /// Take compilers of masters that have another one than this machine, keep up to SIZE of them in ~/.cache/weft/compilers, and run them in the sandbox [SIZE: 2G]
    #[arg(long, value_name = "SIZE", num_args = 0..=1, require_equals = true, default_missing_value = "2G", value_parser = memory, conflicts_with = "open")]
    accept_compilers: Option<u64>,
    /// A key pair of `weft key` [default: ~/.config/weft/key, made if there is none]
    #[arg(long, value_name = "FILE", help_heading = "Keys")]
    identity: Option<PathBuf>,
    /// Let the owners of the public keys in FILE in, a line each [default: `~/.config/weft/authorized_keys`]
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "open",
        help_heading = "Keys"
    )]
    authorized: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct StatusArgs {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct CheckArgs {
    /// The worker's key has this fingerprint: no other will do, and nothing is asked (can be given several times)
    #[arg(long = "peer", value_name = "FINGERPRINT", help_heading = "Keys")]
    peers: Vec<Fingerprint>,
}

/// Options of `weft ccd`.
#[derive(Debug, clap::Args)]
pub struct DaemonArgs {
    /// End after so many seconds without a compilation
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    idle: u64,
}

fn percent(text: &str) -> Result<u8, String> {
    let number = text.strip_suffix('%').unwrap_or(text);
    number
        .parse()
        .ok()
        .filter(|&n| n <= 100)
        .ok_or_else(|| "write a number from 0 to 100".into())
}

fn memory(text: &str) -> Result<u64, String> {
    parse_size(text)
        .filter(|&size| size >= 64 << 20)
        .ok_or_else(|| "write a number of bytes of at least 64M, also with K, M, G or T".into())
}

/// Reads a list of workers.
fn workers(text: &str) -> Result<Vec<Endpoint>, String> {
    let mut all: Vec<Endpoint> = Vec::new();
    for word in text
        .split([',', ' ', '\t', '\n'])
        .filter(|word| !word.is_empty())
    {
        let endpoint = word.parse()?;
        if !all.contains(&endpoint) {
            all.push(endpoint);
        }
    }
    Ok(all)
}

/// Does what is asked.
pub fn run(args: &Args, global: Global) -> Result<ExitCode, Failure> {
    match &args.command {
        Command::Worker(args) => work(args, global).map(Into::into),
        Command::Status(args) => status(args).map(Into::into),
        Command::Summary(args) => super::cc_summary::run(args, &running()?).map(Into::into),
        Command::Check(check) => check_workers(args, check).map(Into::into),
        Command::Stop => stop().map(Into::into),
        Command::Compile(command) => Ok(wrapped(
            command,
            args.hosts.as_deref(),
            args.verify,
            args.pull,
        )),
    }
}

/// Where this program was started by a link with a compiler's name, or as `weft cc COMPILER`: compiles. To build the whole command line's parser would take a fifth of
/// the time that a compilation has here.
pub fn masquerade() -> Option<ExitCode> {
    let mut args: Vec<OsString> = std::env::args_os().collect();
    let is_driver = |name: &OsString| name.to_str().is_some_and(options::is_driver);
    let name = Path::new(args.first()?).file_name()?.to_owned();
    if is_driver(&name) {
        args[0] = name;
    } else if args.get(1)? == "cc"
        && args.get(2).is_some_and(is_driver)
        // Which the parser judges, or which need what comes after it.
        && ["WEFT_CC_VERIFY", "WEFT_LOG"]
            .iter()
            .all(|name| std::env::var_os(name).is_none())
    {
        args.drain(..2);
    } else {
        return None;
    }
    Some(by_environment(&args))
}

/// The program `weft-cc`: what comes after its name is a compiler and its arguments, or its own name is a compiler's.
pub fn alone() -> ExitCode {
    let mut args: Vec<OsString> = std::env::args_os().collect();
    let name = args.first().and_then(|path| Path::new(path).file_name());
    match name.map(ToOwned::to_owned) {
        Some(name) if name != ALONE && name.to_str().is_some_and(options::is_driver) => {
            args[0] = name;
        }
        _ => drop(args.drain(..args.len().min(1))),
    }
    by_environment(&args)
}

/// Compiles as the environment says.
fn by_environment(command: &[OsString]) -> ExitCode {
    let verify = std::env::var("WEFT_CC_VERIFY")
        .ok()
        .and_then(|text| percent(&text).ok())
        .unwrap_or(0);
    let pull = std::env::var("WEFT_CC_PULL").is_ok_and(|text| {
        !["", "0", "n", "no", "f", "false", "off"].contains(&text.to_ascii_lowercase().as_str())
    });
    wrapped(
        command,
        std::env::var("WEFT_CC_HOSTS").ok().as_deref(),
        verify,
        pull,
    )
}

/// Compiles, as the compiler would; its own failures are told as such.
fn wrapped(command: &[OsString], hosts: Option<&str>, verify: u8, pull: bool) -> ExitCode {
    let fail = |what: &dyn std::fmt::Display| {
        eprintln!("weft cc: {what}");
        ExitCode::from(127)
    };
    let Some((name, args)) = command.split_first() else {
        return fail(&"no compiler is named");
    };
    let own = std::env::current_exe()
        .and_then(|exe| exe.canonicalize())
        .ok();
    let Some(driver) = name
        .to_str()
        .and_then(|name| find_program(name, own.as_deref()))
    else {
        return fail(&format!(
            "{}: there is no such compiler in PATH, or it is this program\n  try: weft cc gcc -c FILE.c, or weft cc --help",
            name.display()
        ));
    };
    // A wrong list must not break a build.
    let workers = workers(hosts.unwrap_or_default()).unwrap_or_else(|e| {
        eprintln!("weft cc: WEFT_CC_HOSTS: {e}; compiling here");
        Vec::new()
    });
    let settings = Settings {
        workers,
        verify,
        pull,
        line: Box::new(line),
    };
    match compile(&driver, args, &settings) {
        Ok(Compiled::There(_)) => ExitCode::SUCCESS,
        Ok(Compiled::Here(status)) => {
            let code = status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
            ExitCode::from(u8::try_from(code).unwrap_or(1))
        }
        Err(e) => fail(&format!("{}: {e}", driver.display())),
    }
}

/// The program that compiles and can do nothing else; `weft` is beside it.
const ALONE: &str = "weft-cc";

/// A connection to the daemon, which is started if it is not there.
fn line() -> io::Result<Line> {
    let socket = ipc::socket()?;
    if let Ok(line) = Line::connect(&socket) {
        return Ok(line);
    }
    // Of several that are started at once, one gets the socket, and the others end.
    let mut own = std::env::current_exe()?;
    if own.file_name().is_some_and(|name| name == ALONE) {
        own.set_file_name("weft");
    }
    let mut command = std::process::Command::new(own);
    command
        .arg("ccd")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Ctrl-C is for the make.
        .process_group(0)
        .env_remove("MAKEFLAGS");
    let mut child = daemon::keep_files(&mut command).spawn()?;
    let mut end = Instant::now() + Duration::from_secs(20);
    let mut ended = None;
    loop {
        std::thread::sleep(Duration::from_millis(10));
        match Line::connect(&socket) {
            Ok(line) => return Ok(line),
            Err(e) if Instant::now() > end => {
                return Err(match ended {
                    Some(status) => io::Error::other(format!(
                        "`weft ccd` has ended ({status}); started by hand it says why"
                    )),
                    None => e,
                });
            }
            // The one that has the socket may not listen yet.
            Err(_) if ended.is_none() => {
                ended = child.try_wait()?;
                if ended.is_some() {
                    end = Instant::now() + Duration::from_secs(1);
                }
            }
            Err(_) => {}
        }
    }
}

/// The keys of a daemon: those that are known, and our own.
struct KnownKeys {
    identity: Identity,
    lasting: bool,
    known: Option<PathBuf>,
    only: Vec<Fingerprint>,
}

impl KnownKeys {
    fn new(only: Vec<Fingerprint>) -> Result<Self, Failure> {
        let own = keypair::own(None)?;
        let known = Folder::of_user().ok().map(|folder| folder.known_peers());
        Ok(Self {
            lasting: own.is_some(),
            identity: own.map_or_else(keypair::generate, Ok)?,
            known,
            only,
        })
    }

    fn trust(&self, worker: &Endpoint) -> Trust {
        let known = self.known.as_deref().map(Known::at);
        Trust::new(name_of(&worker.host, worker.port), known, self.only.clone())
    }
}

impl Keys for KnownKeys {
    fn tls(&self, worker: &Endpoint) -> Result<Tls, String> {
        let trust = self.trust(worker);
        let mut good = trust.good().map_err(|e| e.what().to_owned())?;
        if self.lasting && !trust.is_told() {
            // A worker of this user has the same key pair, and nobody else has it.
            good.push(self.identity.public_key().fingerprint());
        }
        Tls::new(self.identity.clone())
            .and_then(|tls| tls.allow(move |key| good.contains(&key.fingerprint())))
            .map_err(|e| e.to_string())
    }
}

/// `weft ccd`.
pub fn daemon(args: &DaemonArgs) -> Result<Exit, Failure> {
    let socket = ipc::socket()
        .map_err(|e| Failure::failed(format!("no place for the daemon's socket: {e}")))?;
    let keys = Arc::new(KnownKeys::new(Vec::new())?);
    let config = daemon::Config {
        idle: Duration::from_secs(args.idle),
        ..daemon::Config::new(socket.clone(), keys)
    };
    // Each job takes a few descriptors.
    super::raise_nofile();
    match daemon::run(config) {
        Ok(()) => Ok(Exit::Ok),
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => Err(Failure::failed(format!(
            "a daemon listens on {} already",
            socket.display()
        ))
        .hint("`weft cc stop` ends it")),
        Err(e) => Err(Failure::failed(format!("{}: {e}", socket.display()))
            .hint("WEFT_CC_SOCKET names another place")),
    }
}

fn check_workers(args: &Args, check: &CheckArgs) -> Result<Exit, Failure> {
    let all = workers(args.hosts.as_deref().unwrap_or_default()).map_err(Failure::usage)?;
    if all.is_empty() {
        return Err(Failure::usage("no worker is named")
            .hint("export WEFT_CC_HOSTS=HOST:PORT,... or give --hosts"));
    }
    let keys = KnownKeys::new(check.peers.clone())?;
    let mut bad = None;
    for worker in &all {
        match check_one(&keys, worker) {
            Ok(about) => say(format_args!(
                "{worker}: {} slots, over {}",
                about.slots,
                super::carrier(about.transport)
            )),
            Err(failure) => {
                if let Some(earlier) = bad.replace(failure) {
                    eprintln!("weft: {earlier}");
                }
            }
        }
    }
    bad.map_or(Ok(Exit::Ok), Err)
}

fn check_one(keys: &KnownKeys, worker: &Endpoint) -> Result<daemon::About, Failure> {
    let trust = keys.trust(worker);
    // The second time the key is known.
    for _ in 0..2 {
        let refusal = match daemon::probe(keys, worker) {
            Ok(about) => return Ok(about),
            Err(refusal) => refusal,
        };
        let Some(key) = refusal.key else {
            return Err(Failure::peer(format!("{worker}: {}", refusal.why)).hint(format!(
                "check the address and that `weft cc worker --bind {worker}` runs there; a worker beyond this user's machine needs your public key (`weft key` prints it) in its authorized_keys"
            )));
        };
        match trust.judge(&key)? {
            Judged::Known => {}
            Judged::Unknown => trust.ask(&key)?,
            Judged::Wrong(failure) => return Err(failure),
        }
    }
    Err(Failure::refused(format!(
        "{worker}: it shows another key each time"
    )))
}

/// The daemon that runs, if one does.
fn running() -> Result<Line, Failure> {
    let socket = ipc::socket()
        .map_err(|e| Failure::failed(format!("no place for the daemon's socket: {e}")))?;
    Line::connect(&socket).map_err(|_| {
        Failure::peer("no daemon of `weft cc` runs")
            .hint("the first compilation with WEFT_CC_HOSTS set starts it")
    })
}

fn stop() -> Result<Exit, Failure> {
    running()?
        .ask(&Ask::Stop, &[])
        .map_err(|e| Failure::peer(format!("the daemon does not answer: {e}")))?;
    Ok(Exit::Ok)
}

fn status(args: &StatusArgs) -> Result<Exit, Failure> {
    let told =
        |e: &dyn std::fmt::Display| Failure::peer(format!("the daemon does not answer: {e}"));
    let (Answer::Status(status), _) = running()?.ask(&Ask::Status, &[]).map_err(|e| told(&e))?
    else {
        return Err(told(&"something else came"));
    };
    if args.json {
        say(serde_json::to_string(&*status).map_err(|e| told(&e))?);
    } else {
        show(&status);
    }
    Ok(Exit::Ok)
}

/// A bar of up to `width` blocks.
fn bar(part: f64, width: usize) -> String {
    let eighths = (part.clamp(0.0, 1.0) * width as f64 * 8.0).round() as usize;
    let rest = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths % 8];
    "█".repeat(eighths / 8) + rest
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / 1_048_576.0)
}

fn show(status: &Status) {
    let here: u64 = status.reasons.iter().map(|(_, n)| n).sum();
    say(format_args!(
        "{} objects by workers, {here} commands here, {} tried again; the daemon runs for {:.0} s",
        status.done, status.again, status.uptime
    ));
    if status.verified.0 > 0 {
        say(format_args!(
            "{} objects compared with ones from here, {} differed",
            status.verified.0, status.verified.1
        ));
    }
    if !status.workers.is_empty() {
        let most = status
            .workers
            .iter()
            .map(|worker| worker.done)
            .max()
            .unwrap_or(0)
            .max(1);
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        table.set_header([
            "worker",
            "over",
            "slots",
            "in use",
            "objects",
            "",
            "lost",
            "read",
            "written",
            "compiling",
            "pressure",
            "",
        ]);
        for worker in &status.workers {
            let transport = if worker.transport.is_empty() {
                "-"
            } else {
                super::carrier(&worker.transport)
            };
            table.add_row([
                worker.endpoint.to_string(),
                transport.into(),
                worker.slots.to_string(),
                worker.in_use.to_string(),
                worker.done.to_string(),
                bar(worker.done as f64 / most as f64, 20),
                worker.lost.to_string(),
                mib(worker.bytes.0),
                mib(worker.bytes.1),
                format!("{:.1} s", worker.compiling),
                format!("{:.0} %", worker.pressure),
                worker.trouble.clone(),
            ]);
        }
        say(table);
    }
    for job in &status.jobs {
        let at = job
            .worker
            .as_ref()
            .map_or_else(|| "waits".into(), |worker| format!("on {worker}"));
        say(format_args!("{:7.1} s  {at}  {}", job.age, job.source));
    }
    if status.here > 0 {
        say(format_args!(
            "{} compilers and preprocessors run here",
            status.here
        ));
    }
    if !status.reasons.is_empty() {
        say("here, because:");
    }
    for (reason, n) in &status.reasons {
        say(format_args!("{n:7}  {reason}"));
    }
}

/// What a worker logs.
struct Lines;

impl Events for Lines {
    fn connected(&self, peer: SocketAddr, transport: &str) {
        tracing::info!("{peer}: connected over {}", super::carrier(transport));
    }

    fn refused(&self, peer: SocketAddr, why: &str) {
        tracing::warn!("{peer}: turned away: {why}");
    }

    fn compiler(&self, peer: SocketAddr, len: u64) {
        tracing::info!("{peer}: its compiler came, {} packed", mib(len));
    }

    fn job(&self, peer: SocketAddr, name: &str, end: &End, after: Duration) {
        let name = name.escape_debug();
        if end.verdict == Verdict::Done {
            tracing::info!("{peer}: {name}: {:.2} s", after.as_secs_f64());
        } else {
            tracing::info!("{peer}: {name}: {:?}: {}", end.verdict, end.reason);
        }
    }

    fn finished(&self, peer: SocketAddr, why: &str) {
        tracing::info!("{peer}: gone: {why}");
    }
}

fn work(args: &WorkerArgs, global: Global) -> Result<Exit, Failure> {
    let bind = args
        .bind
        .unwrap_or((Ipv4Addr::LOCALHOST, DEFAULT_PORT).into());
    let path = match &args.identity {
        Some(path) => path.clone(),
        None => Folder::of_user()?.key(),
    };
    let authorized = match &args.authorized {
        Some(path) => Some(Authorized::at(path)),
        None => Folder::of_user()
            .ok()
            .map(|folder| Authorized::at(&folder.authorized_keys())),
    };
    let known = authorized
        .as_ref()
        .map_or(Ok(0), |authorized| authorized.keys().map(|keys| keys.len()))?;
    if !bind.ip().is_loopback() && known == 0 && !args.open {
        return Err(Failure::usage(format!("{bind} can be reached from other machines, and no key there may compile here yet"))
            .hint("put the masters' public keys (`weft key` prints them) into ~/.config/weft/authorized_keys; --open lets everybody in"));
    }
    let (identity, made) = keypair::read_or_make(&path)?;
    let fingerprint = identity.public_key().fingerprint();
    let tls = Tls::new(identity).map_err(|e| {
        Failure::failed(format!("cannot use the key pair: {e}"))
            .hint("make another one with `weft key`")
    })?;
    let mut config = worker::Config::new(bind, tls);
    config.slots = args.slots.unwrap_or(config.slots);
    config.time_limit = Duration::from_secs(args.time);
    config.open = args.open;
    config.accept = args
        .accept_compilers
        .map(|most| {
            let home = |name: &str| std::env::var_os(name).map(PathBuf::from);
            let cache = home("XDG_CACHE_HOME").or_else(|| Some(home("HOME")?.join(".cache")));
            let cache =
                cache.ok_or_else(|| Failure::usage("there is no home directory for compilers"))?;
            Ok::<_, Failure>(worker::Accept {
                folder: cache.join("weft/compilers"),
                most,
            })
        })
        .transpose()?;
    config.admit = Arc::new(move |key| {
        authorized.as_ref().is_some_and(|authorized| {
            authorized
                .keys()
                .inspect_err(|e| tracing::error!("nobody's key counts: {e}"))
                .is_ok_and(|keys| keys.contains(&key.fingerprint()))
        })
    });
    if let Some(dir) = &args.dir {
        let unable = |e: &dyn std::fmt::Display| {
            Failure::usage(format!("{}: {e}", dir.display()))
                .hint("name a directory that you can write to")
        };
        let dir = dir.canonicalize().map_err(|e| unable(&e))?;
        if !dir.is_dir() {
            return Err(unable(&"it is no directory"));
        }
        config.place = dir;
    }
    let info = rustix::system::sysinfo();
    let share =
        (info.totalram as u64).saturating_mul(info.mem_unit.into()) / u64::from(config.slots);
    config.memory = args.memory.unwrap_or(share.max(1 << 30));
    // Of this process and its compilers.
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none)
        .map_err(|e| Failure::failed(format!("cannot forbid core files: {e}")))?;
    let (slots, place) = (config.slots, config.place.clone());
    let worker = Worker::start(config, Arc::new(Lines)).map_err(|e| {
        Failure::failed(format!("cannot listen on {bind}: {e}")).hint(
            "another program may use the port; --bind ADDR:PORT chooses, port 0 takes a free one",
        )
    })?;
    if !global.quiet {
        say(format_args!(
            "compiling on {} with {slots} slots, in {}",
            worker.local_addr(),
            place.display()
        ));
        say(format_args!(
            "compilers are restricted by {}",
            worker::sandbox::level()
        ));
        if made {
            say(format_args!("made a key pair in {}", path.display()));
        }
        say(format_args!(
            "the key of this worker is {fingerprint}; `weft cc check` elsewhere asks to compare it"
        ));
    }
    worker.wait();
    Err(Failure::failed("the listening thread has ended"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_workers() {
        let all = workers("a, b:1,[::1]:2 a").unwrap();
        assert_eq!(
            all.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["a:7477", "b:1", "[::1]:2"]
        );
        assert!(workers("a,b:x").is_err());
        assert!(workers("").unwrap().is_empty());
        assert_eq!((percent("10%"), percent("0")), (Ok(10), Ok(0)));
        assert!(percent("101").is_err() && memory("1M").is_err());
        assert_eq!(bar(0.5, 4), "██");
    }
}
