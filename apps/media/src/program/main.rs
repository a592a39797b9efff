//! `weft media`: movies and live streams.
#![forbid(unsafe_code)]

mod keys;
mod live;
mod play;
mod proxy;
mod url;

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use weft_cli::args::media::{Args, Command, LONG, ListenArgs, ServeArgs};
use weft_cli::failure::{Exit, Failure};
use weft_cli::global::Global;
use weft_cli::say;
use weft_cli::values::raise_nofile;
use weft_media::SERVE_PORT;
use weft_media::server::Server;
use weft_media::shelf::Shelf;
use weft_media::viewers::{Config, ViewerListener};
use weft_verbs::Device;

fn main() -> ExitCode {
    weft_cli::program::application("media", LONG, run)
}

/// Runs a subcommand.
fn run(args: &Args, global: Global) -> Result<ExitCode, Failure> {
    match &args.command {
        Command::Serve(args) => serve(args, global),
        Command::Live(args) => live::run(args, global),
        Command::Proxy(args) => proxy::run(args, global),
        Command::Play(args) => play::run(args, global),
        Command::List(args) => play::list(args),
    }
    .map(Into::into)
}

/// Listens, and prints the address.
fn open(
    args: &ListenArgs,
    device: &Device,
    bind: SocketAddr,
    what: &str,
    global: Global,
) -> Result<ViewerListener, Failure> {
    let keys = keys::Listening::new(args, bind)?;
    raise_nofile();
    let config = Config {
        bind,
        tls: keys.tls()?,
        gate: Arc::new(keys.gate()),
        max_viewers: args.max_viewers as usize,
    };
    let listener = ViewerListener::bind(device, config).map_err(|e| {
        Failure::listen(
            &bind,
            &e,
            "--bind ADDR:PORT chooses, port 0 takes a free one",
        )
    })?;
    if !global.quiet {
        say(format_args!(
            "listening on {}, {what}",
            listener.local_addr()
        ));
        keys.say();
    }
    Ok(listener)
}

fn open_device() -> Result<Device, Failure> {
    Device::open().map_err(|e| {
        Failure::failed(format!("cannot open the soft RNIC: {e}"))
            .hint("`weft doctor` says what this machine does not support")
    })
}

/// Half of the memory that the kernel reports as available; 1 GiB without a report.
fn half_of_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.map_or(1 << 30, |kib| kib.saturating_mul(512))
}

fn open_dir(dir: &Path) -> Result<File, Failure> {
    let bad = |why: String| {
        Failure::failed(format!("cannot serve {}: {why}", dir.display()))
            .hint("name a directory that exists and that you can read")
    };
    let file = File::open(dir).map_err(|e| bad(e.to_string()))?;
    match file.metadata() {
        Ok(meta) if meta.is_dir() => Ok(file),
        Ok(_) => Err(bad("it is not a directory".into())),
        Err(e) => Err(bad(e.to_string())),
    }
}

fn serve(args: &ServeArgs, global: Global) -> Result<Exit, Failure> {
    let dir = open_dir(&args.dir)?;
    let bind = args
        .bind
        .unwrap_or((Ipv4Addr::LOCALHOST, SERVE_PORT).into());
    let device = open_device()?;
    let what = format!("movies are in {}", args.dir.display());
    let listener = open(&args.listen, &device, bind, &what, global)?;
    let memory = args.memory.unwrap_or_else(half_of_memory);
    let server = Server::new(Shelf::new(&device, dir.into(), memory));
    listener.run(&server);
    Err(Failure::failed("the listener has ended").hint("report this with the lines above"))
}

/// The time limit for a silent peer.
const PATIENCE: Duration = Duration::from_secs(30);
