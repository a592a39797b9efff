//! Options of `weft cc`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use weft_service::endpoint::parse_bind;
use weft_service::endpoint::port::CC as DEFAULT_PORT;
use weft_verbs::tls::Fingerprint;

use super::ServerKeys;
use crate::values::size;

pub const LONG: &str = "\
Compile C and C++ with gcc or clang on other machines. `weft cc gcc ...` preprocesses here; a worker reads the text (for clang the source and its headers) by RDMA \
Read, compiles it, and writes the object into this machine's memory by RDMA Write. The object equals that of the compiler here, byte for byte: a worker with another compiler is not used. \
Sources that cannot be sent (linking, assembler, -march=native, plugins, ...), and those that fail on workers, are compiled here; `weft cc status` counts the reasons.

A daemon (`weft ccd`), which is started automatically, keeps the connections. TLS 1.3 with the keys of `weft key` encrypts and authenticates what leaves the machine, \
as for `weft cp`. A worker runs compilers in a sandbox (Landlock, seccomp). A worker should admit only masters that it trusts, and a master should use only workers that \
it trusts: a wrong object is not detected, unless --verify compares it.";

pub const EXAMPLES: &str = "\
Examples:
  # on each worker
  weft cc worker --bind 0.0.0.0

  # here: name the workers, check them, and confirm their keys
  export WEFT_CC_HOSTS=a,b:7477,[fd00::3]
  weft cc check
  make -j32 CC='weft cc gcc' CXX='weft cc g++'
  # the jobs of each worker and of this machine, and a picture of the last build
  weft cc status
  weft cc summary --html build.html

  # workers preprocess too, and read the headers from here
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
    /// Workers: HOST, HOST:PORT or [IPV6]:PORT, separated by commas
    #[arg(long, global = true, value_name = "WORKERS", env = "WEFT_CC_HOSTS")]
    pub hosts: Option<String>,
    /// Compile this percentage of the objects here too, and compare
    #[arg(long, value_name = "PERCENT", env = "WEFT_CC_VERIFY", default_value = "0", value_parser = percent)]
    pub verify: u8,
    /// Let workers preprocess too: they read headers by RDMA Read and cache them
    #[arg(long, env = "WEFT_CC_PULL", action = clap::ArgAction::SetTrue, value_parser = clap::builder::FalseyValueParser::new())]
    pub pull: bool,
    /// Use workers that were started with --plain: without TLS. Who reads the network reads the sources; who writes to it writes your objects
    #[arg(long, env = "WEFT_CC_PLAIN", action = clap::ArgAction::SetTrue, value_parser = clap::builder::FalseyValueParser::new())]
    pub plain: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Compile for other machines
    Worker(WorkerArgs),
    /// Show workers, jobs, and the reasons for compilations here
    Status(StatusArgs),
    /// Describe the last build: the work of each worker, the times, the waits; optionally as a picture
    Summary(SummaryArgs),
    /// Connect to each worker, and ask whether an unknown key is right
    Check(CheckArgs),
    /// End the daemon
    Stop,
    /// Write `weft-cc` into a directory: it does the same as `weft cc`, and starts in a fraction of the time
    Launcher(LauncherArgs),
    /// The daemon with the connections to the workers (started automatically)
    #[command(hide = true)]
    Daemon(DaemonArgs),
    /// `gcc`, `g++`, `cc`, `c++`, `clang`, `clang++`, with their arguments
    #[command(external_subcommand)]
    Compile(Vec<OsString>),
}

#[derive(Debug, clap::Args)]
pub struct WorkerArgs {
    /// Listen on this address; on an address other than loopback only known keys are admitted, except with --open [default: 127.0.0.1:7477]
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = |text: &str| parse_bind(text, DEFAULT_PORT))]
    pub bind: Option<SocketAddr>,
    /// Maximum number of compilers at a time [default: the number of processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub slots: Option<u16>,
    /// Memory limit of each process of a compiler, and of all processes of a sent one together, in bytes or with K, M, G [default: this
    /// machine's memory divided by the slots, at least 1G]
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub memory: Option<u64>,
    /// Time limit of a compiler
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub time: u64,
    /// Directory of the jobs' files [default: /dev/shm, or the directory of temporary files]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Admit everybody who can reach the address
    #[arg(long)]
    pub open: bool,
    /// Without encryption and keys, for masters with --plain, on networks that are trusted: who reads one reads the sources, who writes to it writes
    /// the objects. Beyond loopback only with --open
    #[arg(long)]
    pub plain: bool,
    /// Admit masters of other hosts also where the kernel has no Landlock: their sources can include any file that you can read
    #[arg(long, conflicts_with = "open")]
    pub without_landlock: bool,
    /// Accept compilers of masters that differ from this machine's, keep up to SIZE of them in ~/.cache/weft/compilers, and run them in the sandbox [SIZE: 2G]
    #[arg(long, value_name = "SIZE", num_args = 0..=1, require_equals = true, default_missing_value = "2G", value_parser = memory, conflicts_with = "open")]
    pub accept_compilers: Option<u64>,
    #[command(flatten)]
    pub keys: ServerKeys,
}

#[derive(Debug, clap::Args)]
pub struct LauncherArgs {
    /// A directory that contains `weft` too, or from which `weft` is found in PATH
    pub dir: PathBuf,
}

#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Accept only a worker key with this fingerprint, and ask nothing (can be given several times)
    #[arg(long = "peer", value_name = "FINGERPRINT", help_heading = "Keys")]
    pub peers: Vec<Fingerprint>,
}

/// Options of `weft ccd`.
#[derive(Debug, clap::Args)]
pub struct DaemonArgs {
    /// End after this many seconds without a compilation
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub idle: u64,
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
    let size = size(text)?;
    if size < 64 << 20 {
        return Err("at least 64M are needed".to_owned());
    }
    Ok(size)
}

#[derive(Debug, clap::Args)]
pub struct SummaryArgs {
    /// Write a picture, on a page of its own
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Everything that the daemon remembers, including earlier builds
    #[arg(long)]
    pub all: bool,
    /// One JSON object a line for each compilation
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_options() {
        assert_eq!((percent("10%"), percent("0")), (Ok(10), Ok(0)));
        assert!(percent("101").is_err() && memory("1M").is_err());
    }
}
