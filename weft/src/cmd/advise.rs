//! `weft advise`: the cost of copies and registrations on this machine, and the part of weft that fits a program.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::signal::{self, SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use weft_advise::machine::Machine;
use weft_advise::record::{self, Count, Record};
use weft_costs::{Effort, STEPS, advice, sections as costs};
use weft_report::terminal;
use weft_report::{Report, Section, machine as about_machine};

use super::plain::plain;
use crate::advise::{Findings, sections};
use weft_cli::failure::{Failure, check_writable, write_file};
use weft_cli::places;
use weft_cli::start::{fail, refuse};
use weft_report::programs::find;

pub(crate) const LONG: &str = "\
Without a program: measure on this machine the cost of copies, registrations and pinned pages (resident or not, small and huge pages), of \
registrations on several threads, and of transfers during computation; then advise which buffers to copy and which to register. This takes some seconds.

With a program: run it, count its socket calls (sizes, reused buffers, resident pages, waits, connections to this host and others), and advise \
which part of weft fits each of its processes, the expected gain, and what to change first. The program behaves as usual; each call \
takes up to about a microsecond longer, which is measured and printed. The advice goes to standard error, so that it does not mix with the program's output.

Not seen: programs that make their own system calls (statically linked programs, Go programs, io_uring), set-uid programs, and a program's accesses \
to its memory between calls.";

const EXAMPLES: &str = "\
Examples:
  weft advise --html machine.html
  weft advise -- iperf3 -c 127.0.0.1 -l 128K -t 2
  weft advise --seconds 30 --json advice.json -- redis-server --port 7000

Exit status: without a program as for every subcommand. With a program, the program's, or 128 plus the signal's number; 0 after --seconds; 125 if weft \
fails, 126 if the program cannot be executed, 127 if it is not found.";

const LIBRARY: &str = "libweft-advise.so";
/// The file name that cargo gives the library.
const CARGO_LIBRARY: &str = "libweft_advise_preload.so";
const EXIT_OWN: u8 = 125;
/// `SI_KERNEL`: the kernel sent the signal.
const BY_KERNEL: i32 = 0x80;
/// The time between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(10);

/// Options of `weft advise`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// End the program with SIGTERM after this time [default: wait until it ends]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=86_400), requires = "command")]
    seconds: Option<u32>,
    /// Write all measurements and observations as one JSON object (`-`: to standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write tables and pictures as one self-contained page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Do not measure the machine, and compute no gain
    #[arg(long, requires = "command")]
    no_machine: bool,
    /// The folder of the observer's library [default: the folder of the packages or of `./x dist`]
    #[arg(long, value_name = "DIR", env = "WEFT_ADVISE_LIB")]
    lib: Option<PathBuf>,
    /// The program and its arguments
    #[arg(
        value_name = "PROGRAM",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<OsString>,
}

/// Measures, watches and advises.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    // Files that cannot be written are better known before than after.
    for path in [&args.json, &args.html].into_iter().flatten() {
        if path != Path::new("-") {
            check_writable(path)?;
        }
    }
    let Some((name, rest)) = args.command.split_first() else {
        let machine = measure()?;
        deliver(args, &Record::default(), Some(&machine))?;
        return Ok(ExitCode::SUCCESS);
    };
    let program = match find(name) {
        Ok(program) => program,
        Err(e) => return Ok(refuse(name, &e)),
    };
    if let Some(why) = plain(&program) {
        let failure = Failure::failed(format!("{}: {why}; its calls cannot be seen", program.display()))
            .hint("`weft advise` without a program measures the machine; a dynamically linked build of the program can be watched");
        return Ok(fail(EXIT_OWN, &failure));
    }
    let library = match library(args.lib.as_deref()) {
        Ok(library) => library,
        Err(failure) => return Ok(fail(EXIT_OWN, &failure)),
    };
    let file = shared().map_err(|e| {
        Failure::failed(format!("cannot make the record's file: {e}"))
            .hint("make /dev/shm or the folder in TMPDIR writable")
    })?;
    let mut preload = library.into_os_string();
    if let Some(more) = std::env::var_os("LD_PRELOAD").filter(|more| !more.is_empty()) {
        preload.push(":");
        preload.push(more);
    }
    let child = Command::new(&program)
        .arg0(name)
        .args(rest)
        .env("LD_PRELOAD", preload)
        .env(record::ENVIRONMENT, file.path())
        .spawn();
    let child = match child {
        Ok(child) => child,
        Err(e) => return Ok(refuse(name, &e)),
    };
    let limit = args.seconds.map(|n| Duration::from_secs(n.into()));
    let ended = watch(child, limit, file.path())
        .map_err(|e| Failure::failed(format!("cannot watch the program: {e}")))?;
    let record = read(file.path())
        .ok_or_else(|| Failure::failed("the program has damaged the record of its calls"))?;
    let machine = if args.no_machine || record.processes.is_empty() {
        None
    } else {
        Some(measure()?)
    };
    deliver(args, &record, machine.as_ref())?;
    Ok(ended)
}

fn measure() -> Result<Machine, Failure> {
    if let Some(notice) = weft_report::crowding() {
        eprintln!("weft: notice: {notice}");
    }
    let bar = weft_report::terminal::redraws(&std::io::stderr())
        .then(|| indicatif::ProgressBar::new(STEPS));
    let measured = weft_costs::measure(&Effort::brief(), |what| {
        if let Some(bar) = &bar {
            bar.set_message(what.to_owned());
            bar.inc(1);
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    measured.map_err(|e| {
        Failure::failed(format!("cannot measure this machine: {e}"))
            .hint("`weft doctor` says what this machine does not support")
    })
}

/// Prints the advice, and writes the files.
fn deliver(args: &Args, record: &Record, machine: Option<&Machine>) -> Result<(), Failure> {
    let watched = !args.command.is_empty();
    let mut report = Report::new(if watched {
        "weft advise"
    } else {
        "weft advise: this machine"
    });
    report.intro.push(format!("{}.", about_machine()));
    if watched {
        report.sections.extend(sections(record, machine));
    }
    if let Some(machine) = machine {
        report.intro.extend(advice(machine));
        // With a program, the machine is in the page and in the JSON; on the terminal it would hide the advice.
        let mut page = report.clone();
        page.sections.extend(costs(machine));
        if !watched {
            report = page.clone();
        }
        html(args, &page)?;
    } else {
        html(args, &report)?;
    }
    if record.processes.is_empty() && watched {
        report.sections.push(nothing_seen(record));
    }
    if watched || args.json.as_deref() == Some(Path::new("-")) {
        let text = report.to_text(Some(terminal::reading_width(&std::io::stderr())));
        let _ = writeln!(std::io::stderr(), "\n{}", terminal::in_locale(&text));
    } else {
        let text = report.to_text(Some(terminal::reading_width(&std::io::stdout())));
        weft_cli::say(terminal::in_locale(&text));
    }
    if let Some(path) = &args.json {
        let findings = Findings::new(record, machine);
        let text = serde_json::to_string_pretty(&findings)
            .map_err(|e| Failure::failed(format!("cannot write JSON: {e}")))?;
        if path == Path::new("-") {
            weft_cli::say(text);
        } else {
            write_file(path, &(text + "\n"))?;
        }
    }
    Ok(())
}

fn nothing_seen(record: &Record) -> Section {
    let why = if record.images == 0 {
        "The observer was not loaded: the program's libraries are those of another C library, or it removed LD_PRELOAD."
    } else {
        "The program made no socket calls through the C library while it was watched. Advice: nothing: leave it as it is."
    };
    let table = weft_report::Table::new(&["programs started", "forks"])
        .row([record.images.to_string(), record.forks.to_string()]);
    Section::new("No socket calls").text(why).table(table)
}

fn html(args: &Args, report: &Report) -> Result<(), Failure> {
    let Some(path) = &args.html else {
        return Ok(());
    };
    write_file(path, &report.to_html())
}

/// The file that the program's processes and this one share; removed with the value.
fn shared() -> std::io::Result<tempfile::NamedTempFile> {
    let name = || {
        let mut builder = tempfile::Builder::new();
        builder.prefix("weft-advise-");
        builder
    };
    let mut file = name()
        .tempfile_in("/dev/shm")
        .or_else(|_| name().tempfile())?;
    file.as_file().set_len(record::TABLE_BYTES as u64)?;
    file.write_all(&record::beginning())?;
    Ok(file)
}

fn read(path: &Path) -> Option<Record> {
    // With its original length, whatever the program has done to it.
    let file = fs::File::open(path).ok()?;
    let mut bytes = Vec::new();
    let limit = record::TABLE_BYTES as u64;
    std::io::Read::read_to_end(&mut std::io::Read::take(file, limit), &mut bytes).ok()?;
    record::read(&bytes)
}

/// The processes of the record, except one, that still run.
fn still_running(path: &Path, but: u64) -> Vec<u64> {
    let Some(record) = read(path) else {
        return Vec::new();
    };
    let pids = record.processes.iter().filter(|p| p.get(Count::Ended) == 0);
    pids.map(|p| p.get(Count::Pid))
        .filter(|pid| *pid != but && Path::new(&format!("/proc/{pid}")).exists())
        .collect()
}

/// Waits for the program's end, or ends it at the limit. Ctrl-C ends the program, but not the advice.
fn watch(mut child: Child, limit: Option<Duration>, path: &Path) -> std::io::Result<ExitCode> {
    let mut signals = SigSet::empty();
    for each in [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGCHLD,
    ] {
        signals.add(each);
    }
    // The child has been started: signals blocked here are not blocked there.
    signals.thread_block()?;
    let arriving = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let pid = Pid::from_raw(child.id().cast_signed());
    let began = Instant::now();
    let mut stopped = None;
    let mut status = None;
    let mut killed = false;
    loop {
        if status.is_none() {
            status = child.try_wait()?;
        }
        let left = limit.map(|limit| limit.saturating_sub(began.elapsed()));
        if let Some(status) = status {
            // Processes that the program has left behind are watched for the requested time.
            let others = still_running(path, child.id().into());
            if stopped.is_some() || others.is_empty() || left.is_none_or(|left| left.is_zero()) {
                for pid in others {
                    weft_cli::tell!(
                        "weft: notice: process {pid} of the program still runs, and is not watched any more"
                    );
                }
                unblock(&arriving, &signals)?;
                return Ok(if stopped == Some(true) {
                    ExitCode::SUCCESS
                } else {
                    code(status)
                });
            }
        } else if left.is_some_and(|left| left.is_zero()) && stopped.is_none() {
            stopped = Some(true);
            signal::kill(pid, Signal::SIGTERM)?;
        }
        let too_long = limit.is_some_and(|limit| began.elapsed() > limit + GRACE);
        if status.is_none() && too_long && !killed {
            killed = true;
            weft_cli::tell!(
                "weft: notice: the program has not ended {} s after SIGTERM, and is killed",
                GRACE.as_secs()
            );
            child.kill()?;
        }
        let pause = match (left, status.is_some()) {
            (Some(left), false) if !left.is_zero() => left,
            (None, false) => Duration::from_hours(1),
            _ => Duration::from_millis(200),
        };
        let time = Timespec::try_from(pause).map_err(std::io::Error::other)?;
        let mut fds = [PollFd::new(&arriving, PollFlags::IN)];
        match poll(&mut fds, Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        while let Some(info) = arriving.read_signal()? {
            let Ok(signal) = Signal::try_from(info.ssi_signo.cast_signed()) else {
                continue;
            };
            // The terminal's own Ctrl-C reaches the program without us.
            let from_terminal = info.ssi_code == BY_KERNEL;
            if signal != Signal::SIGCHLD {
                stopped = stopped.or(Some(false));
                if status.is_none() && !from_terminal {
                    signal::kill(pid, signal)?;
                }
            }
        }
    }
}

/// Consumes the signals that have arrived, so that unblocking them does not end this process.
fn unblock(arriving: &SignalFd, signals: &SigSet) -> std::io::Result<()> {
    while arriving.read_signal()?.is_some() {}
    signals.thread_unblock()?;
    Ok(())
}

fn code(status: ExitStatus) -> ExitCode {
    let number = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(number.and_then(|n| u8::try_from(n).ok()).unwrap_or(1))
}

/// The observer's library.
fn library(dir: Option<&Path>) -> Result<PathBuf, Failure> {
    let places = if let Some(dir) = dir {
        vec![dir.to_owned()]
    } else {
        places::preload_libraries()?
    };
    let files = places
        .iter()
        .flat_map(|dir| [LIBRARY, CARGO_LIBRARY].map(|name| dir.join(name)));
    let Some(file) = files.into_iter().find_map(|file| file.canonicalize().ok()) else {
        return Err(
            Failure::failed(format!("{LIBRARY} is in none of {}", places::named(&places))).hint(
                "install the package libweft-preload, run `./x dist` to build it, or name its folder with --lib or WEFT_ADVISE_LIB",
            ),
        );
    };
    places::preloadable(file)
}
