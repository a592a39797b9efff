//! Options of `weft media`.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::{ClientKeys, ServerKeys};
use weft_service::endpoint::parse_bind;
use weft_service::endpoint::port::{HTTP as HTTP_PORT, LIVE as LIVE_PORT, MEDIA as SERVE_PORT};

use crate::values::{bytes, size};

/// The usual port of RTP.
const RTP_PORT: u16 = 5004;

pub const LONG: &str = "\
Serve movies and live streams to viewers that fetch them by RDMA Reads, and watch them.

The server keeps each requested movie in memory and sends its address to the viewer. From then on the server's program does nothing: a viewer that pauses reads \
nothing, a viewer that seeks reads at another offset, and on one host the viewers copy the memory themselves. If a file is truncated or replaced, viewers \
that watch it are not affected. A movie that the memory has no room for is read in blocks while it is watched; its file must stay as it is.

TLS 1.3 with the keys of `weft key` encrypts and authenticates what leaves the machine, as for `weft cp`.";

pub const EXAMPLES: &str = "\
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
    pub command: Command,
}

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Serve the movies below a directory
    Serve(ServeArgs),
    /// Serve a live stream from standard input: fragmented MP4, or an MPEG transport stream
    Live(LiveArgs),
    /// Offer servers' titles to ordinary players and browsers: a page, HTTP with ranges, HLS
    Proxy(ProxyArgs),
    /// Fetch a title to standard output, or to a player by a pipe
    Play(PlayArgs),
    /// List the titles of a server
    #[command(visible_alias = "ls")]
    List(ListArgs),
}

#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// The directory with the movies
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Listen on this address; beyond loopback, viewers need a known key, except with --open [default: 127.0.0.1:7475]
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = |text: &str| parse_bind(text, SERVE_PORT))]
    pub bind: Option<SocketAddr>,
    /// Memory for movies, in bytes or with K, M, G; movies without viewers are dropped for new ones, and what does not fit is served in blocks [default: half of the available memory]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<u64>,
    #[command(flatten)]
    pub listen: ListenArgs,
}

/// Options of a listener.
#[derive(Debug, clap::Args)]
pub struct ListenArgs {
    /// Viewers at the same time
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub max_viewers: u32,
    #[command(flatten)]
    pub keys: ServerKeys,
    /// Admit every viewer that can reach the address
    #[arg(long)]
    pub open: bool,
    /// Use neither encryption nor keys, on a loopback address, for comparison
    #[arg(long, hide = true)]
    pub plain: bool,
}

/// Options of `weft media live`.
#[derive(Debug, clap::Args)]
pub struct LiveArgs {
    /// The name of the stream
    pub name: String,
    /// Listen on this address; beyond loopback, viewers need a known key, except with --open [default: 127.0.0.1:7476]
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = |text: &str| parse_bind(text, LIVE_PORT))]
    pub bind: Option<SocketAddr>,
    /// Memory for fragments, in bytes or with K, M, G; a viewer that falls further behind skips fragments
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "64M")]
    pub ring: u64,
    /// At the end of the input, wait this many seconds for viewers to fetch the rest
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub linger: u64,
    #[command(flatten)]
    pub listen: ListenArgs,
}

/// Options of `weft media proxy`.
#[derive(Debug, clap::Args)]
pub struct ProxyArgs {
    /// The servers: HOST[:PORT], of files and of live streams
    #[arg(required = true, value_name = "SERVER[:PORT]")]
    pub servers: Vec<String>,
    /// Listen for browsers and players on this address [default: 127.0.0.1:8473]
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = |text: &str| parse_bind(text, HTTP_PORT))]
    pub http: Option<SocketAddr>,
    /// Admit every user that can reach the address: HTTP has no keys
    #[arg(long)]
    pub open: bool,
    #[command(flatten)]
    pub dial: DialArgs,
}

/// Options of `weft media play`.
#[derive(Debug, clap::Args)]
pub struct PlayArgs {
    /// The title: HOST[:PORT]/NAME, optionally with weft:// before it
    pub url: String,
    /// Start this shell command with the title on its standard input; after a bare program name, such as mpv, vlc or ffplay, `-` is added
    #[arg(long, value_name = "COMMAND")]
    pub player: Option<String>,
    /// Begin at this byte
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = bytes)]
    pub from: u64,
    /// Fetch this many bytes
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub length: Option<u64>,
    /// Begin a live stream with the oldest fragment in the ring, not with the newest key frame
    #[arg(long)]
    pub oldest: bool,
    /// Retry for this many seconds while a live stream's server cannot be reached
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub retry: u64,
    /// Send the title, an MPEG transport stream, by RTP to this address, paced by the stream's clock
    #[arg(long, value_name = "ADDR[:PORT]", conflicts_with = "player", value_parser = |text: &str| parse_bind(text, RTP_PORT))]
    pub rtp: Option<SocketAddr>,
    #[command(flatten)]
    pub dial: DialArgs,
}

/// Options of `weft media list`.
#[derive(Debug, clap::Args)]
pub struct ListArgs {
    /// The server: HOST[:PORT]
    pub server: String,
    /// Print the list as a JSON array: name, size, modified, picture, live
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub dial: DialArgs,
}

/// Options of a client.
#[derive(Debug, Clone, clap::Args)]
pub struct DialArgs {
    #[command(flatten)]
    pub keys: ClientKeys,
    /// Use neither encryption nor keys, on a loopback address, for comparison
    #[arg(long, hide = true)]
    pub plain: bool,
    /// Bytes of each Read
    #[arg(long, value_name = "BYTES", default_value_t = 128 << 10, value_parser = clap::value_parser!(u32).range(8192..=4 << 20), hide_short_help = true)]
    pub read: u32,
    /// Reads outstanding at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=16), hide_short_help = true)]
    pub depth: u16,
}
