//! `weft cc`: a distributed compiler.
#![forbid(unsafe_code)]

mod summary;

use std::ffi::OsString;
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};
use weft_cc::client::{PLAIN, compile, write_launcher};
use weft_cc::daemon::{self, Keys};
use weft_cc::ipc::{self, Answer, Ask, Line, Status, WorkerStatus};
use weft_cc::worker::{self, Unsafe, Worker};
use weft_cc::{DEFAULT_PORT, Endpoint, options};
use weft_report::terminal::in_locale;
use weft_verbs::tls::{Fingerprint, Tls};

use weft_cli::args::cc::{
    Args, CheckArgs, Command, DaemonArgs, LONG, LauncherArgs, StatusArgs, WorkerArgs,
};
use weft_cli::failure::{Exit, Failure};
use weft_cli::global::Global;
use weft_cli::identity::authorized::Authorized;
use weft_cli::identity::credentials::Credentials;
use weft_cli::identity::keypair;
use weft_cli::identity::reach::{self, Words};
use weft_cli::values::{carrier, raise_nofile};
use weft_cli::{say, tell, terminal};

fn main() -> ExitCode {
    compiler().unwrap_or_else(|| weft_cli::program::application("cc", LONG, run))
}

/// Runs the subcommand.
fn run(args: &Args, global: Global) -> Result<ExitCode, Failure> {
    match &args.command {
        Command::Worker(args) => work(args, global).map(Into::into),
        Command::Status(args) => status(args).map(Into::into),
        Command::Summary(args) => summary::run(args, &running()?).map(Into::into),
        Command::Check(check) => check_workers(args, check).map(Into::into),
        Command::Stop => stop().map(Into::into),
        Command::Daemon(args) => daemon(args).map(Into::into),
        Command::Launcher(args) => launcher(args).map(Into::into),
        Command::Compile(command) => {
            let pull = if args.pull { "1" } else { "0" };
            let mut set = vec![
                ("WEFT_CC_VERIFY", args.verify.to_string().into()),
                ("WEFT_CC_PULL", pull.into()),
                (PLAIN, if args.plain { "1" } else { "0" }.into()),
            ];
            set.extend(
                args.hosts
                    .as_ref()
                    .map(|hosts| ("WEFT_CC_HOSTS", hosts.into())),
            );
            Ok(wrapped(command, &set))
        }
    }
}

/// Compiles, if this program was started as `weft cc COMPILER` or by a link with a compiler's name. Building the parser of the command line
/// would take a fifth of the time that a compilation has here.
fn compiler() -> Option<ExitCode> {
    let mut args: Vec<OsString> = std::env::args_os().collect();
    let is_driver = |name: &OsString| name.to_str().is_some_and(options::is_driver);
    let name = Path::new(args.first()?).file_name()?.to_owned();
    if is_driver(&name) {
        args[0] = name;
    } else if args.get(1).is_some_and(is_driver)
        // Variables that the parser checks, or that need the following arguments.
        && ["WEFT_CC_VERIFY", "WEFT_LOG"]
            .iter()
            .all(|name| std::env::var_os(name).is_none())
    {
        args.remove(0);
    } else {
        return None;
    }
    Some(wrapped(&args, &[]))
}

/// Compiles as the compiler would, with these variables; reports its own failures as its own.
fn wrapped(command: &[OsString], set: &[(&str, OsString)]) -> ExitCode {
    let Some((name, args)) = command.split_first() else {
        tell!("weft cc: no compiler is named");
        return ExitCode::from(127);
    };
    match compile(name, args, set, line) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            if e.kind() == io::ErrorKind::NotFound {
                let path = std::env::var_os("PATH").unwrap_or_else(|| weft_cc::PATH.into());
                tell!("{}", weft_cc::no_compiler(Path::new(""), path, name));
            } else {
                tell!("weft cc: {}: {e}", name.display());
            }
            ExitCode::from(127)
        }
    }
}

/// Writes the launcher.
fn launcher(args: &LauncherArgs) -> Result<Exit, Failure> {
    let path = write_launcher(&args.dir).map_err(|e| {
        // Behind it stands the name of a temporary file, which nobody has asked for.
        let why = e.to_string();
        let why = why.split(" at path ").next().unwrap_or_default();
        Failure::failed(format!("cannot write to {}: {why}", args.dir.display()))
            .hint("name a directory that you can write to; there is one for x86-64 and aarch64")
    })?;
    say(path.display());
    Ok(Exit::Ok)
}

/// A connection to the daemon, which is started if it does not run.
fn line() -> io::Result<Line> {
    let socket = ipc::socket()?;
    if let Ok(line) = Line::connect(&socket) {
        return Ok(line);
    }
    // Of several that are started at once, one gets the socket, and the others end.
    let mut command = std::process::Command::new(std::env::current_exe()?);
    command
        .arg("daemon")
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

/// The credentials of a daemon, for any worker.
struct AllWorkers(Credentials);

impl AllWorkers {
    fn new(only: Vec<Fingerprint>) -> Result<Self, Failure> {
        Credentials::new(String::new(), None, only).map(Self)
    }
}

impl Keys for AllWorkers {
    fn tls(&self, worker: &Endpoint) -> Result<Tls, String> {
        let credentials = self.0.to(worker.to_string());
        credentials.tls().map_err(|e| e.what().to_owned())
    }
}

/// `weft ccd`.
fn daemon(args: &DaemonArgs) -> Result<Exit, Failure> {
    let socket = ipc::socket()
        .map_err(|e| Failure::failed(format!("no place for the daemon's socket: {e}")))?;
    let keys = Arc::new(AllWorkers::new(Vec::new())?);
    let config = daemon::Config {
        idle: Duration::from_secs(args.idle),
        ..daemon::Config::new(socket.clone(), keys)
    };
    // Each job takes a few descriptors.
    raise_nofile();
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
    let form = "export WEFT_CC_HOSTS=HOST:PORT,... or give --hosts";
    let all = weft_cc::workers(args.hosts.as_deref().unwrap_or_default())
        .map_err(|e| Failure::usage(e).hint(form))?;
    if all.is_empty() {
        return Err(Failure::usage("no worker is named").hint(form));
    }
    if args.plain && !check.peers.is_empty() {
        return Err(Failure::usage(
            "without encryption a worker shows no key: --peer and --plain exclude each other",
        )
        .hint("leave one of them away"));
    }
    let keys = AllWorkers::new(check.peers.clone())?;
    let mut bad = None;
    for worker in &all {
        match check_one(&keys, worker, args.plain) {
            Ok(about) => say(format_args!(
                "{worker}: {} slots, over {}",
                about.slots,
                carrier(about.transport)
            )),
            Err(failure) => {
                if let Some(earlier) = bad.replace(failure) {
                    tell!("weft: {earlier}");
                }
            }
        }
    }
    bad.map_or(Ok(Exit::Ok), Err)
}

fn check_one(keys: &AllWorkers, worker: &Endpoint, plain: bool) -> Result<daemon::About, Failure> {
    keys.0.to(worker.to_string()).connect(|| {
        let refusal = match daemon::probe(keys, worker, plain) {
            Ok(about) => return Ok(Ok(about)),
            Err(refusal) => refusal,
        };
        refusal.key.map(Err).ok_or_else(|| {
            Failure::peer(format!("{worker}: {}", refusal.why)).hint(format!(
                "check the address and that `weft cc worker --bind {worker}` runs there; a worker beyond this user's machine needs your public key (`weft key` prints it) in its authorized_keys"
            ))
        })
    })
}

/// The running daemon, if there is one.
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

/// The number of terminal columns that the status uses.
const COLUMNS: usize = 80;

/// The end of a name that is too long: the end distinguishes it from others.
fn cut(name: &str, width: usize) -> String {
    let len = name.chars().count();
    if len <= width {
        return name.into();
    }
    let end: String = name.chars().skip(len + 1 - width).collect();
    // One character in any locale: columns stay where they are.
    let gap = if in_locale("…") == "…" {
        '…'
    } else {
        '~'
    };
    format!("{gap}{end}")
}

fn show(status: &Status) {
    let here: u64 = status.reasons.iter().map(|(_, n)| n).sum();
    say(format_args!(
        "{} objects by workers, {here} commands here, {} again; running for {:.0} s",
        status.done, status.again, status.uptime
    ));
    if status.verified.0 > 0 {
        say(format_args!(
            "{} objects compared with ones from here, {} differed",
            status.verified.0, status.verified.1
        ));
    }
    if !status.workers.is_empty() {
        say(table(&status.workers));
    }
    for job in &status.jobs {
        let at = job
            .worker
            .as_ref()
            .map_or_else(|| "waits".into(), |worker| format!("on {worker}"));
        let before = format!("{:7.1} s  {}  ", job.age, cut(&at, 30));
        let left = COLUMNS - before.chars().count();
        say(format_args!("{before}{}", cut(&job.source, left)));
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
        say(terminal::wrapped(COLUMNS, 9, &format!("{n:7}  {reason}")));
    }
}

/// A line for each worker, and one for its last error.
fn table(workers: &[WorkerStatus]) -> String {
    let line = |cells: [&str; 9]| {
        let [
            name,
            over,
            jobs,
            done,
            lost,
            read,
            written,
            compiling,
            pressure,
        ] = cells;
        format!(
            "{name:<20} {over:<6} {jobs:>7} {done:>7} {lost:>4} {read:>8} {written:>8} {compiling:>8} {pressure:>4}"
        )
    };
    let mut lines = vec![line([
        "worker", "over", "jobs", "objects", "lost", "MiB in", "MiB out", "seconds", "psi%",
    ])];
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / 1_048_576.0);
    for worker in workers {
        let over = match worker.transport.as_str() {
            "" => "-",
            "local" => "memory",
            "tls" => "TLS",
            _ => "TCP",
        };
        lines.push(line([
            &cut(&worker.endpoint.to_string(), 20),
            over,
            &format!("{}/{}", worker.in_use, worker.slots),
            &worker.done.to_string(),
            &worker.lost.to_string(),
            &mib(worker.bytes.0),
            &mib(worker.bytes.1),
            &format!("{:.1}", worker.compiling),
            &format!("{:.0}", worker.pressure),
        ]));
        if !worker.trouble.is_empty() {
            lines.push(terminal::wrapped(
                COLUMNS,
                2,
                &format!("  {}", worker.trouble),
            ));
        }
    }
    lines.join("\n")
}

fn work(args: &WorkerArgs, global: Global) -> Result<Exit, Failure> {
    let bind = args
        .bind
        .unwrap_or((Ipv4Addr::LOCALHOST, DEFAULT_PORT).into());
    let path = keypair::file_of(args.keys.identity.as_deref())?;
    let authorized = Authorized::named_or_usual(args.keys.authorized.as_deref());
    let words = Words {
        peers: "masters",
        may: "compile here",
        or: "",
    };
    let (identity, made) = if args.plain {
        if args.keys.authorized.is_some() {
            return Err(Failure::usage(
                "without encryption a master shows no key: --authorized and --plain exclude each other",
            )
            .hint("leave one of them away"));
        }
        if args.keys.identity.is_some() {
            return Err(Failure::usage(
                "without encryption a worker shows no key: --identity and --plain exclude each other",
            )
            .hint("leave one of them away"));
        }
        (keypair::generate()?, false)
    } else {
        reach::check(bind, authorized.as_ref(), args.open, words)?;
        keypair::read_or_make(&path)?
    };
    let fingerprint = identity.public_key().fingerprint();
    let tls = Tls::new(identity).map_err(|e| keypair::unusable(&e))?;
    let mut config = worker::Config::new(bind, tls);
    config.slots = args.slots.unwrap_or(config.slots);
    config.time_limit = Duration::from_secs(args.time);
    config.open = args.open;
    config.plain = args.plain;
    config.files_unprotected = args.without_landlock;
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
        authorized
            .as_ref()
            .is_some_and(|authorized| authorized.admits(&key.fingerprint()))
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
    let worker =
        Worker::start(config).map_err(|e| match e.get_ref().and_then(|e| e.downcast_ref()) {
            Some(why) => Failure::failed(format!("{bind}: {why}")).hint(mend(why)),
            None => Failure::listen(
                &bind,
                &e,
                "--bind ADDR:PORT chooses, port 0 takes a free one",
            ),
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
        if args.plain {
            say(
                "connections are not encrypted: who reads the network reads the sources, and who writes to it writes the objects",
            );
        } else {
            say(format_args!(
                "the key of this worker is {fingerprint}; `weft cc check` elsewhere asks to compare it"
            ));
        }
    }
    worker.wait();
    Err(Failure::failed("the listening thread has ended"))
}

/// What can be done about it.
fn mend(why: &Unsafe) -> &'static str {
    match why {
        Unsafe::CompilersOfStrangers => "leave out --open",
        Unsafe::Plain => {
            "leave out --plain, or add --open, with which everybody who reaches the address can compile here"
        }
        Unsafe::Sandbox(_) => "leave out --accept-compilers, or use such a kernel",
        Unsafe::FilesOfStrangers => {
            "use a kernel with Landlock (Linux 5.13, `landlock` in the parameter lsm=), or instead of --open authorise the masters' keys and add --without-landlock"
        }
        Unsafe::Files => {
            "use a kernel with Landlock (Linux 5.13, `landlock` in the parameter lsm=); if the masters may read your files, add --without-landlock"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_fits_80_columns() {
        let worker = |host: &str| WorkerStatus {
            endpoint: Endpoint {
                host: host.into(),
                port: 65_535,
            },
            transport: "local".into(),
            slots: 128,
            in_use: 128,
            done: 123_456,
            lost: 1000,
            bytes: (123_456 << 20, 123_456 << 20),
            compiling: 123_456.7,
            pressure: 100.0,
            trouble: "a reason that is as long as reasons are allowed to be ".repeat(4),
        };
        let text = table(&[
            worker("::1"),
            worker("compile-for-others.far.away.example.org"),
        ]);
        assert_eq!(text.lines().count(), 9, "{text}");
        assert!(text.contains(".example.org:65535") && text.contains("128/128"));
        for line in text.lines() {
            assert!(line.chars().count() <= COLUMNS, "{line}");
        }
        assert_eq!(cut("ab/cde.c", 5), "…de.c");
    }
}
