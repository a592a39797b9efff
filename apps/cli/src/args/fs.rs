//! Options of `weft fs`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use super::{ClientKeys, ServerKeys, ViaArgs};
use weft_service::endpoint::parse_bind;
use weft_service::endpoint::port::FS as DEFAULT_PORT;
use weft_verbs::tls::PublicKey;

use crate::values::{at_least_one, size};

pub const LONG: &str = "\
Use the memory of other machines as files. A server has named buffers (and offers the files of a folder), and programs open them as

  /rdma/<host>:<port>/<name>[:<size>]

Reads become RDMA Reads, writes become RDMA Writes. On the server's own machine, programs of its user access the memory directly. There are three \
ways to use it: `weft fs run` for unmodified programs, `weft fs mount` for static programs, Go and mmap, and `ls`, `cat`, `put`, `get`, `rm`, `stat` for scripts.

A buffer takes memory at its first write. It is freed when the last program closes it; with `serve --keep` it stays until it is removed. TLS 1.3 with the keys of \
`weft key` encrypts and authenticates what leaves the machine, as for `weft cp`.";

pub const EXAMPLES: &str = "\
Examples:
  # offer memory and a folder to this user's programs on this machine
  weft fs serve --keep /srv/films
  # to other machines with keys in ~/.config/weft/authorized_keys
  weft fs serve --keep --bind 0.0.0.0 --quota 8G

  weft fs put data.bin /rdma/localhost:7474/data
  weft fs run -- cp /rdma/host:7474/data .
  weft fs mount /rdma/host:7474 /mnt";

/// Options of `weft fs`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Offer this machine's memory, and the files of a folder
    Serve(ServeArgs),
    /// Run an unmodified program that finds servers below /rdma
    Run(RunArgs),
    /// Mount a server as a file system, for programs that do not work with the preload library
    Mount(MountArgs),
    /// List a folder of a server
    #[command(visible_alias = "list")]
    Ls(ListArgs),
    /// Write buffers or files to standard output
    Cat(ManyArgs),
    /// Copy local files (`-`: standard input) to a server
    Put(PutArgs),
    /// Copy a buffer or file from a server (to `-`: standard output)
    Get(GetArgs),
    /// Remove buffers; programs that have them open can continue to use them
    Rm(ManyArgs),
    /// Show the attributes of a name
    Stat(ListArgs),
    /// Make folders
    Mkdir(ManyArgs),
    /// Set who may read and write buffers: their owner, the keys that they name, and others
    Chmod(ChmodArgs),
}

#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// Folder whose files clients can read, but not change
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Listen on this address; beyond loopback, clients need a known key, or give --open [default: 127.0.0.1:7474]
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = |text: &str| parse_bind(text, DEFAULT_PORT))]
    pub bind: Option<SocketAddr>,
    /// Memory for all buffers together, in bytes or with K, M, G [default: a quarter of this machine's]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub quota: Option<u64>,
    /// Keep buffers that no program has open, until they are removed
    #[arg(long)]
    pub keep: bool,
    /// Admit everybody who can reach the address
    #[arg(long)]
    pub open: bool,
    /// Clients at the same time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one())]
    pub max_clients: usize,
    #[command(flatten)]
    pub keys: ServerKeys,
    #[command(flatten)]
    pub via: ViaArgs,
}

#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// The preload library [default: that of the packages or of `./x dist`]
    #[arg(long, value_name = "FILE", env = "WEFT_FS_LIB")]
    pub lib: Option<PathBuf>,
    #[command(flatten)]
    pub keys: ClientKeys,
    /// The program and its arguments
    #[arg(
        value_name = "PROGRAM",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true
    )]
    pub command: Vec<OsString>,
}

#[derive(Debug, clap::Args)]
pub struct MountArgs {
    /// `/rdma/HOST:PORT`
    #[arg(value_name = "SOURCE")]
    pub source: PathBuf,
    /// An empty directory
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Allow access for all users of this machine (needs root, or `user_allow_other` in /etc/fuse.conf)
    #[arg(long)]
    pub others: bool,
    #[command(flatten)]
    pub common: Common,
}

/// Options of every client.
#[derive(Debug, clap::Args)]
pub struct Common {
    #[command(flatten)]
    pub keys: ClientKeys,
    #[command(flatten)]
    pub via: ViaArgs,
    /// Give up after this many seconds of silence of the server
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
}

#[derive(Debug, clap::Args)]
pub struct ListArgs {
    /// `/rdma/HOST:PORT[/NAME]`, also without `/rdma/`
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    /// Lists are always long: for those who are used to `ls -l`
    #[arg(short = 'l', hide = true)]
    _long: bool,
    /// Print one JSON object a line: name, kind, size, mtime, writable
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, clap::Args)]
pub struct ManyArgs {
    /// `/rdma/HOST:PORT/NAME`
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, clap::Args)]
pub struct ChmodArgs {
    /// Octal, as of chmod(1): 644 lets others read only, 664 named keys write too, 600 nobody but the owner
    #[arg(value_name = "MODE", value_parser = mode)]
    pub mode: u32,
    /// `/rdma/HOST:PORT/NAME`
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    /// Add a key to those that the second digit is for: `weft-ed25519 AAAA...`, as `weft key show` prints it
    #[arg(long = "name", value_name = "KEY")]
    pub named: Vec<PublicKey>,
    /// Take such a key out
    #[arg(long = "forget", value_name = "KEY")]
    pub forgotten: Vec<PublicKey>,
    #[command(flatten)]
    pub common: Common,
}

fn mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode @ 0..=0o777) => Ok(mode),
        _ => Err("three octal digits, as 644".to_owned()),
    }
}

#[derive(Debug, clap::Args)]
pub struct PutArgs {
    /// Local files, or `-`
    #[arg(value_name = "FILE", required = true)]
    pub sources: Vec<PathBuf>,
    /// `/rdma/HOST:PORT/NAME`, or a folder of the server
    #[arg(value_name = "PATH")]
    pub target: PathBuf,
    /// Append to the existing contents
    #[arg(long)]
    pub append: bool,
    /// No progress bar
    #[arg(long)]
    pub no_progress: bool,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, clap::Args)]
pub struct GetArgs {
    /// `/rdma/HOST:PORT/NAME`
    #[arg(value_name = "PATH")]
    pub source: PathBuf,
    /// A local file or directory, or `-`
    #[arg(value_name = "FILE", default_value = ".")]
    pub target: PathBuf,
    /// No progress bar
    #[arg(long)]
    pub no_progress: bool,
    #[command(flatten)]
    pub common: Common,
}

impl ListArgs {
    /// The paths with `/rdma/` before them.
    #[must_use]
    pub fn below_rdma(&self) -> Vec<PathBuf> {
        let below = |path| Path::new("/rdma").join(path);
        self.paths.iter().map(below).collect()
    }
}
