//! `weft-papers blast`.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use weft_report::size::parse_size;
use weft_report::terminal::{in_locale, reading_width, redraws};
use weft_service::endpoint::port::BLAST as DEFAULT_PORT;

use crate::children::{Running, this_program};
use crate::driver::Transport;
use crate::error::{BenchError, Result};
use crate::exs::{
    Amount, Client, Design, Kind, Lengths, Mode, Plan, Run, Server, Wait, describe, json_lines,
    report,
};
use crate::output::cannot_write;

/// The time limit for starting a server.
const START: Duration = Duration::from_secs(1);
/// The pause between two attempts.
const AGAIN: Duration = Duration::from_millis(20);
/// The time for which the server waits for a silent client.
const IDLE: Duration = Duration::from_mins(1);
/// The beginning of the server's line with its address.
const LISTENING: &str = "listening on ";
/// The time between two updates of the progress bar.
const DRAW_EVERY: Duration = Duration::from_millis(100);
/// Steps of a progress bar.
const STEPS: f64 = 1000.0;

pub(crate) const LONG: &str = "\
Send messages as fast as possible from a client to a server over extended sockets, and measure: the tool of the stream paper.

Throughput is the program's bytes divided by the time from the start of the first transfer to the end of the last. Each repetition has a \
connection of its own; means have their 95 % confidence interval. The client sends its options to the server, and the server reports its CPU \
time, so the client prints everything. Without --listen and ADDR both run on this host, as two processes.

The two sides agree over a small TCP connection to the given address; the server chooses a port for each measured connection. \
Every client that can reach a server can make it receive. Between hosts the \
measured connections use TLS with temporary keys, unless WEFT_TLS says otherwise on both sides.";

const EXAMPLES: &str = "\
Examples:
  # both ends here, over shared memory
  weft-papers blast
  # and over TCP
  weft-papers blast --transport tcp --no-crc --size 1M
  # a server for other machines
  weft-papers blast --listen=0.0.0.0
  weft-papers blast server --exponential 1M --outstanding-send 4 \\
    --outstanding-recv 8 --html blast.html
  weft-papers blast --kind seqpacket --design source --size 4K --messages 10000
  # every byte is compared
  weft-papers blast --mode indirect --verify";

/// Options of `weft-papers blast`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// The server's HOST[:PORT]; IPv6 addresses in brackets
    #[arg(value_name = "ADDR")]
    server: Option<String>,
    /// Be the server, on this address or the default [default: 127.0.0.1:7473]
    #[arg(long, value_name = "ADDR", num_args = 0..=1, default_missing_value = "127.0.0.1", conflicts_with = "server")]
    listen: Option<String>,
    /// Serve one client, then end
    #[arg(long, requires = "listen")]
    once: bool,
    /// Length of each message
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = parse_size, help_heading = "Messages")]
    size: u64,
    /// Choose lengths from an exponential distribution with this mean
    #[arg(long, value_name = "MEAN", value_parser = parse_size, conflicts_with = "size", help_heading = "Messages")]
    exponential: Option<u64>,
    /// Maximum length of the distribution
    #[arg(long, value_name = "SIZE", default_value = "4M", value_parser = parse_size, help_heading = "Messages")]
    max: u64,
    /// Seed of lengths and contents
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Messages")]
    seed: u64,
    /// End a repetition after this many messages
    #[arg(long, value_name = "N", conflicts_with_all = ["bytes", "time"], help_heading = "Messages")]
    messages: Option<u64>,
    /// ... or with the message that completes this many bytes
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "time", help_heading = "Messages")]
    bytes: Option<u64>,
    /// ... or after this many seconds [default: 1]
    #[arg(long, value_name = "SECONDS", help_heading = "Messages")]
    time: Option<f64>,
    /// Bytes to send before the clock starts; only the statistics count them
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size, help_heading = "Messages")]
    warm_up: u64,
    /// Compare every byte that arrives; this distorts the times
    #[arg(long, help_heading = "Messages")]
    verify: bool,
    /// Sends outstanding at the client
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8,
        help_heading = "Operations"
    )]
    outstanding_send: u32,
    /// Receives outstanding at the server, each of the maximum message length
    #[arg(
        long,
        value_name = "N",
        default_value_t = 16,
        help_heading = "Operations"
    )]
    outstanding_recv: u32,
    /// Complete receives only when they are full
    #[arg(long, help_heading = "Operations")]
    waitall: bool,
    /// Use the library's registered memory (yes), or ordinary memory that it must register (no)
    #[arg(long, value_name = "yes|no", default_value = "yes", value_parser = parse_yes, action = clap::ArgAction::Set, help_heading = "Operations")]
    registered: bool,
    /// How both sides wait for events: by polling or by sleeping
    #[arg(long, value_enum, default_value_t = Wait::Notify, hide_possible_values = false, help_heading = "Operations")]
    wait: Wait,
    /// How a stream moves its bytes
    #[arg(long, value_enum, default_value_t = Mode::Dynamic, help_heading = "Connection")]
    mode: Mode,
    /// Bytes or messages
    #[arg(long, value_enum, default_value_t = Kind::Stream, help_heading = "Connection")]
    kind: Kind,
    /// How sequenced packets are moved
    #[arg(long, value_enum, default_value_t = Design::Advert, help_heading = "Connection")]
    design: Design,
    /// Send data of up to this many bytes within the message that announces it; 0: never
    #[arg(long, value_name = "SIZE", default_value = "256", value_parser = parse_small_size, help_heading = "Connection")]
    small: u32,
    /// Leave small data where it arrived
    #[arg(long, help_heading = "Connection")]
    in_place: bool,
    /// Size of the intermediate buffer of either side
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = parse_small_size, help_heading = "Connection")]
    buffer: u32,
    /// Control messages that either side can receive: the peer's credits
    #[arg(
        long,
        value_name = "N",
        default_value_t = 256,
        help_heading = "Connection"
    )]
    credits: u32,
    /// Transport of the connection [default: shared memory if both sides support it]
    #[arg(long, value_enum, help_heading = "Connection")]
    transport: Option<Transport>,
    /// No CRC over TCP
    #[arg(long, help_heading = "Connection")]
    no_crc: bool,
    /// Number of repetitions
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000), help_heading = "Results")]
    repetitions: u32,
    /// Write every repetition and the means as JSON, one object a line
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    json: Option<PathBuf>,
    /// Write tables and plots as one self-contained page
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    html: Option<PathBuf>,
}

fn parse_yes(text: &str) -> std::result::Result<bool, String> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("write yes or no".to_owned()),
    }
}

fn parse_small_size(text: &str) -> std::result::Result<u32, String> {
    let size = parse_size(text).map_err(|e| e.to_string())?;
    u32::try_from(size).map_err(|_| format!("'{text}' is too large"))
}

impl Args {
    fn plan(&self) -> Plan {
        let lengths = match self.exponential {
            Some(mean) => Lengths::Exponential {
                mean,
                max: self.max,
                seed: self.seed,
            },
            None => Lengths::Fixed(self.size),
        };
        let amount = match (self.messages, self.bytes) {
            (Some(messages), _) => Amount::Messages(messages),
            (None, Some(bytes)) => Amount::Bytes(bytes),
            (None, None) => Amount::Seconds(self.time.unwrap_or(1.0)),
        };
        Plan {
            transport: self.transport,
            kind: self.kind,
            mode: self.mode,
            design: self.design,
            lengths,
            amount,
            warm_up: self.warm_up,
            sends: self.outstanding_send,
            receives: self.outstanding_recv,
            waitall: self.waitall,
            registered: self.registered,
            small: self.small,
            in_place: self.in_place,
            buffer: self.buffer,
            credits: self.credits,
            wait: self.wait,
            crc: !self.no_crc,
            verify: self.verify.then_some(self.seed),
        }
    }
}

/// Serves, or measures and prints.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if let Some(listen) = &args.listen {
        return serve(resolve(listen)?, args.once);
    }
    let plan = args.plan();
    plan.check()?;
    // Files that cannot be written are better known before the measurements than after.
    for path in [&args.json, &args.html].into_iter().flatten() {
        let file = fs::File::options().append(true).create(true).open(path);
        file.map_err(|error| cannot_write(path, error))?;
    }
    let (_server, addr) = match &args.server {
        Some(server) => (None, resolve(server)?),
        None => start_server().map(|(server, addr)| (Some(server), addr))?,
    };
    let mut client = connect(addr)?;
    let bar = progress();
    let mut runs: Vec<Run> = Vec::new();
    for repetition in 1..=args.repetitions {
        bar.reset();
        bar.set_prefix(format!("{repetition}/{}", args.repetitions));
        let mut next = DRAW_EVERY;
        let result = client.run(&plan, &mut |messages, bytes, elapsed| {
            // Drawing must not slow down the measurement.
            if elapsed >= next {
                next = elapsed + DRAW_EVERY;
                bar.set_position((plan.amount.share(messages, bytes, elapsed) * STEPS) as u64);
                let gigabits = bytes as f64 * 8e-9 / elapsed.as_secs_f64();
                bar.set_message(format!("{messages} messages, {gigabits:.2} Gb/s"));
            }
        });
        match result {
            Ok(run) => runs.push(run),
            Err(error) => {
                bar.finish_and_clear();
                // Earlier measurements are not lost.
                if !runs.is_empty() {
                    print(&plan, &runs);
                }
                return Err(error);
            }
        }
        // Each time, so that it exists when the program is interrupted.
        if let Some(path) = &args.json {
            let lines = json_lines(&plan, &runs).map_err(io::Error::from);
            write(path, &lines.map_err(|error| cannot_write(path, error))?)?;
        }
        if let Some(path) = &args.html {
            write(path, &report(&plan, &runs).to_html())?;
        }
    }
    bar.finish_and_clear();
    print(&plan, &runs);
    Ok(ExitCode::SUCCESS)
}

fn print(plan: &Plan, runs: &[Run]) {
    let text = report(plan, runs).to_text(Some(reading_width(&io::stdout())));
    println!("{}", in_locale(&text));
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|error| cannot_write(path, error))
}

/// The first address of `HOST[:PORT]`.
fn resolve(text: &str) -> Result<SocketAddr> {
    let alone = text.trim_start_matches('[').trim_end_matches(']');
    if let Ok(addr) = alone.parse::<IpAddr>() {
        return Ok(SocketAddr::new(addr, DEFAULT_PORT));
    }
    let found = if text.contains(':') {
        text.to_socket_addrs()
    } else {
        (text, DEFAULT_PORT).to_socket_addrs()
    };
    let addr = found.ok().and_then(|mut all| all.next());
    addr.ok_or_else(|| BenchError::Usage(format!("there is no address `{text}`")))
}

fn serve(addr: SocketAddr, once: bool) -> Result<ExitCode> {
    let mut server = Server::listen(addr)?;
    println!("{LISTENING}{}", server.local_addr()?);
    loop {
        let served = server.serve(Some(IDLE), |from, plan| {
            eprintln!("{from}: {}", describe(plan));
        });
        match served {
            Err(error) if once => return Err(error),
            // The next client may fare better.
            Err(error) => eprintln!("weft-papers: {error}"),
            Ok(()) if once => return Ok(ExitCode::SUCCESS),
            Ok(()) => {}
        }
    }
}

/// A server that this process starts, and that ends with it.
fn start_server() -> Result<(Running, SocketAddr)> {
    let mut command = Command::new(this_program()?);
    command
        .args(["blast", "--listen=127.0.0.1:0", "--once"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut server = Running::start(&mut command, "start the server")?;
    let mut line = String::new();
    if let Some(stdout) = server.0.stdout.take() {
        let _ = BufReader::new(stdout).read_line(&mut line);
    }
    let addr = line.trim_end().strip_prefix(LISTENING);
    let addr = addr.and_then(|addr| addr.parse().ok());
    let silent = || BenchError::PeerGone("it did not say where it listens".to_owned());
    Ok((server, addr.ok_or_else(silent)?))
}

/// Connects. Retries for a moment, because a server that was just started may not listen yet.
fn connect(addr: SocketAddr) -> Result<Client> {
    let began = Instant::now();
    loop {
        match Client::connect(addr) {
            Err(BenchError::Unreachable(_, e))
                if e.kind() == io::ErrorKind::ConnectionRefused && began.elapsed() < START =>
            {
                std::thread::sleep(AGAIN);
            }
            result => return result,
        }
    }
}

fn progress() -> ProgressBar {
    if !redraws(&io::stderr()) {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(STEPS as u64).with_finish(ProgressFinish::AndClear);
    if let Ok(style) = ProgressStyle::with_template("{prefix} {bar:30} {elapsed} {msg}") {
        bar.set_style(style);
    }
    bar
}
