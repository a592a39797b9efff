//! `weft media`.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use weft_media::SERVE_PORT;
use weft_media::door::{Config, Door};
use weft_media::server::Server;
use weft_media::shelf::Shelf;
use weft_service::endpoint::parse_bind;
use weft_verbs::Device;

use super::say;
use crate::failure::{Exit, Failure};
use crate::global::Global;

mod keys;
mod live;
mod play;
mod proxy;
mod url;

pub(crate) const LONG: &str = "\
Serve movies and live streams to viewers that fetch them by RDMA Reads, and watch them.

The server keeps each requested movie in memory and sends its address to the viewer. From then on the server's program does nothing: a viewer that pauses reads \
nothing, a viewer that seeks reads at another offset, and on one host the viewers copy the memory themselves. If a file is truncated or replaced, viewers \
that watch it are not affected.

TLS 1.3 with the keys of `weft key` encrypts and authenticates what leaves the machine, as for `weft cp`.";

const EXAMPLES: &str = "\
Examples:
  # serve this user's programs on this machine, list the titles, and watch one
  weft media serve /srv/movies
  weft media list localhost
  weft media play localhost/a.mp4 | mpv -
  weft media play --player 'ffplay -' localhost/a.mp4
  # serve the network: users in ~/.config/weft/authorized_keys
  weft media serve --bind 0.0.0.0 /srv/movies

  # a live stream, and watching it
  ffmpeg -re -i in.mp4 -c copy -f mp4 \\
    -movflags frag_keyframe+empty_moov+default_base_moof - | weft media live cam
  weft media play localhost:7476/cam | mpv -

  # a page for browsers on http://127.0.0.1:8473/
  weft media proxy localhost localhost:7476
  # for players of RTP: then `vlc rtp://@127.0.0.1:5004`
  weft media play --rtp 127.0.0.1:5004 localhost/a.ts";

/// Options of `weft media`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Serve the movies below a directory
    Serve(ServeArgs),
    /// Serve a live stream from standard input: fragmented MP4, or an MPEG transport stream
    Live(live::Args),
    /// Offer servers' titles to ordinary players and browsers: a page, HTTP with ranges, HLS
    Proxy(proxy::Args),
    /// Fetch a title to standard output, or to a player by a pipe
    Play(play::Args),
    /// List the titles of a server
    #[command(visible_alias = "ls")]
    List(play::ListArgs),
}

/// Runs a subcommand.
pub fn run(args: &Args, global: Global) -> Result<Exit, Failure> {
    match &args.command {
        Command::Serve(args) => serve(args, global),
        Command::Live(args) => live::run(args, global),
        Command::Proxy(args) => proxy::run(args, global),
        Command::Play(args) => play::run(args, global),
        Command::List(args) => play::list(args),
    }
}

#[derive(Debug, clap::Args)]
struct ServeArgs {
    /// The directory with the movies
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Listen on this address; beyond loopback, viewers need a known key, except with --open [default: 127.0.0.1:7475]
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = |text: &str| parse_bind(text, SERVE_PORT))]
    bind: Option<SocketAddr>,
    /// Memory for movies, in bytes or with K, M, G; movies without viewers are dropped for new ones [default: half of the available memory]
    #[arg(long, value_name = "SIZE", value_parser = super::size)]
    memory: Option<u64>,
    #[command(flatten)]
    door: DoorArgs,
}

/// Options of a listener.
#[derive(Debug, clap::Args)]
struct DoorArgs {
    /// Viewers at the same time
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    max_viewers: u32,
    /// A key pair of `weft key` [default: ~/.config/weft/key, created if missing]
    #[arg(long, value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Admit the owners of the public keys in FILE, one a line [default: `~/.config/weft/authorized_keys`]
    #[arg(long, value_name = "FILE", conflicts_with = "open")]
    authorized: Option<PathBuf>,
    /// Admit every viewer that can reach the address
    #[arg(long)]
    open: bool,
    /// Use neither encryption nor keys, on a loopback address, for comparison
    #[arg(long, hide = true)]
    plain: bool,
}

impl DoorArgs {
    /// Listens, and prints the address.
    fn open(
        &self,
        device: &Device,
        bind: SocketAddr,
        what: &str,
        global: Global,
    ) -> Result<Door, Failure> {
        let keys = keys::Listening::new(self, bind)?;
        super::raise_nofile();
        let config = Config {
            bind,
            tls: keys.tls()?,
            gate: Arc::new(keys.gate()),
            max_viewers: self.max_viewers as usize,
        };
        let door = Door::bind(device, config).map_err(|e| {
            Failure::listen(
                &bind,
                &e,
                "--bind ADDR:PORT chooses, port 0 takes a free one",
            )
        })?;
        if !global.quiet {
            say(format_args!("listening on {}, {what}", door.local_addr()));
            keys.say();
        }
        Ok(door)
    }
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
    let door = args.door.open(&device, bind, &what, global)?;
    let memory = args.memory.unwrap_or_else(half_of_memory);
    let server = Server::new(Shelf::new(&device, dir.into(), memory));
    door.run(&server);
    Err(Failure::failed("the listener has ended").hint("report this with the lines above"))
}

/// The time limit for a silent peer.
const PATIENCE: Duration = Duration::from_secs(30);
