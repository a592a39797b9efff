//! `weft run`: unmodified sockets programs.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use weft_run::lend;
use weft_run::peers;
use weft_run::preload::{LIBRARIES, MALLOC_LIBRARIES};
use weft_sys::settings::RUN_DATAGRAMS;

use super::plain::plain;
use super::service::{self, Service};
use weft_cli::failure::Failure;
use weft_cli::places;
use weft_cli::start::{fail, refuse};
use weft_report::programs::find;

pub(crate) const LONG: &str = "\
Run an unmodified program for TCP or UDP sockets. Its TCP connections to other programs under `weft run`, on the same \
host, network namespace and user (or of users that name each other with `--with`), go over to shared memory after their first messages; all others stay plain TCP, byte for byte. The two \
sides can be started in any order.

With `--hosts` on both sides, connections between hosts go over to SDP (see `weft help broker` for the keys). Without it they stay plain TCP.

The TCP connection stays open for addresses, options, the end of the stream and resets. If a socket \
is used in a way that shared memory does not support (urgent data, passed to another process or an executed program, \
io_uring...), its connection goes back to TCP; `--explain` and `weft stat` name the reason.

UDP: under the same conditions datagrams go through shared memory after the first few; multicast, broadcast, other hosts and other programs get plain UDP. \
With `--hosts --datagrams` on both sides, datagrams to another host go as Sends of datagram-iWARP, with a CRC; this is not faster.

`--mode azsdp` returns from a large send before the peer has the bytes, and protects the memory meanwhile. It is opt-in, because a system call that this library does not intercept gets \
EFAULT from protected memory, and because the bytes of a killed program are lost: the peer then sees a reset.

Programs that make their own system calls (statically linked programs and Go programs) run on plain TCP, with a notice.";

const EXAMPLES: &str = "\
Examples:
  weft run -- redis-server --port 7000
  weft run --explain -- redis-benchmark -p 7000 -q -t get
  weft run --hosts --explain -- iperf3 -c other-host
  weft run --with redis --explain -- redis-benchmark
  weft run --mode azsdp --azsdp copy -- iperf3 -c 127.0.0.1 -l 1M

Exit status: that of the program; 125 if weft fails, 126 if the program cannot be executed, 127 if it is not found.";

/// weft's library contains this text, no other library does.
const MARK: &[u8] = b"weft-run-ledger";
const EXIT_OWN: u8 = 125;

/// The smallest send that can be lent is a page.
fn at_least_a_page(text: &str) -> Result<u64, String> {
    let page = rustix::param::page_size() as u64;
    match weft_cli::values::size(text)? {
        size if size < page => Err(format!("write at least a page, {page}")),
        size => Ok(size),
    }
}

/// Options of `weft run`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// How large sends move on one host: `bsdp` buffers them in rings in shared memory; with `zsdp` the peer reads them from the program's memory while the send waits;
    /// with `azsdp` the send returns at once, and the memory is protected until the peer has read it; `auto` selects `zsdp` where this machine is faster with it, else
    /// `bsdp`. Between hosts it is always `bsdp`
    #[arg(long, value_name = "MODE", value_parser = ["auto", "bsdp", "zsdp", "azsdp"], default_value = "auto")]
    mode: String,
    /// Effect of a write to memory under way with `--mode azsdp`: wait until the peer has read it (`block`), or copy it (`copy`)
    #[arg(long, value_name = "HOW", value_parser = ["block", "copy"], default_value = "block")]
    azsdp: String,
    /// With `--mode azsdp`: lend also shared memory that other processes can map; none of them may write to it while it is sent
    #[arg(long)]
    azsdp_shared: bool,
    /// With `--mode azsdp`: give allocations of `--from` bytes and more pages of their own, so that such a buffer can be lent completely
    #[arg(long)]
    azsdp_malloc: bool,
    /// The smallest send that goes from the program's memory, at least a page
    #[arg(long, value_name = "BYTES", default_value_t = lend::FROM_BYTES as u64, value_parser = at_least_a_page)]
    from: u64,
    /// Carry connections to other hosts too; starts `weft broker` in the background if none runs
    #[arg(long)]
    hosts: bool,
    /// With `--hosts`: datagrams to programs of other hosts that have this option go as datagram-iWARP on the program's own socket
    #[arg(long, requires = "hosts")]
    datagrams: bool,
    /// Other users whose programs may share rings with this one, if they name its user too: names, numbers, `@GROUP` or `any`. They get rings only, whatever
    /// `--mode` says
    #[arg(
        long = "with",
        value_name = "USER|@GROUP|any",
        value_delimiter = ',',
        env = peers::ENV
    )]
    others: Vec<String>,
    /// Print at the program's exit which connections went over to shared memory, and why others did not
    #[arg(long)]
    explain: bool,
    /// The folder of the preload library [default: the folder of the packages or of `./x dist`]
    #[arg(long, value_name = "DIR", env = "WEFT_RUN_LIB")]
    lib: Option<PathBuf>,
    /// Run a systemd service under `weft run` from its next start on, with these options: show its drop-in and what of its sandbox is in the way, and write it
    #[arg(long, value_name = "UNIT", conflicts_with_all = ["command", "hosts"])]
    service: Option<String>,
    /// With `--service`: show the drop-in, and write nothing
    #[arg(long, conflicts_with = "remove")]
    print: bool,
    /// With `--service`: take the drop-in away
    #[arg(long)]
    remove: bool,
    /// For each of these services, or for all under `weft run`: whether its connections use rings, and why not
    #[arg(long, value_name = "UNIT", num_args = 0.., conflicts_with_all = ["command", "service"])]
    status: Option<Vec<String>>,
    /// The folder of the drop-ins of services
    #[arg(
        long,
        value_name = "DIR",
        default_value = "/etc/systemd/system",
        env = "WEFT_SYSTEMD_DIR"
    )]
    units: PathBuf,
    /// The program and its arguments
    #[arg(
        value_name = "PROGRAM",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required_unless_present_any = ["service", "status"]
    )]
    command: Vec<OsString>,
}

/// Executes the program, or sets a service up.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    if let Some(units) = &args.status {
        return service::status(units, &args.units);
    }
    if let Some(unit) = &args.service {
        let service = Service::new(unit, &args.units)?;
        if args.remove {
            return service.remove();
        }
        let library = library(args)?;
        let (preload, users) = (preload(args, &library)?, users(args)?);
        let all = |before| variables(args, preload, before, users);
        return service.install(all, args.print);
    }
    if args.print || args.remove {
        return Err(Failure::usage("--print and --remove belong to --service"));
    }
    let Some((name, rest)) = args.command.split_first() else {
        return Err(Failure::usage("no program is named"));
    };
    let program = match find(name) {
        Ok(program) => program,
        Err(e) => return Ok(refuse(name, &e)),
    };
    let mut command = Command::new(&program);
    command.arg0(name).args(rest);
    if let Some(why) = plain(&program) {
        weft_cli::tell!(
            "weft: notice: {}: {why}; it runs on plain TCP",
            program.display()
        );
    } else if let Err(failure) = prepare(args, &mut command) {
        return Ok(fail(EXIT_OWN, &failure));
    }
    // Only a failure comes back.
    let error = command.exec();
    Ok(refuse(name, &error))
}

/// Sets the environment of a program, and starts the broker if it needs one.
fn prepare(args: &Args, command: &mut Command) -> Result<(), Failure> {
    let (preload, users) = (preload(args, &library(args)?)?, users(args)?);
    if args.hosts {
        super::broker::ensure()?;
        command.env(weft_run::hosts::ENV, "bsdp");
        if args.datagrams {
            command.env(RUN_DATAGRAMS.name, "on");
        }
    }
    let before = env::var_os("LD_PRELOAD").filter(|rest| !rest.is_empty());
    command.envs(variables(args, preload, before, users));
    Ok(())
}

/// The libraries to preload.
fn preload(args: &Args, library: &Path) -> Result<OsString, Failure> {
    let mut preload = library.as_os_str().to_owned();
    if args.azsdp_malloc {
        preload.push(":");
        preload.push(malloc(library)?);
    }
    Ok(preload)
}

/// The other users, by their numbers.
fn users(args: &Args) -> Result<Option<String>, Failure> {
    let names = Some(&args.others).filter(|names| !names.is_empty());
    names.map(|names| super::users::numbers(names)).transpose()
}

/// The variables by which the library learns of the options. The libraries come before those that are preloaded already.
fn variables(
    args: &Args,
    mut preload: OsString,
    before: Option<OsString>,
    users: Option<String>,
) -> Vec<(&'static str, OsString)> {
    if let Some(before) = before {
        preload.push(":");
        preload.push(before);
    }
    let mut variables = vec![
        ("LD_PRELOAD", preload),
        (lend::MODE, args.mode.clone().into()),
        (lend::ON_WRITE, args.azsdp.clone().into()),
        (lend::FROM, args.from.to_string().into()),
    ];
    if args.azsdp_shared {
        variables.push((lend::SHARED, "trust".into()));
    }
    variables.extend(users.map(|users| (peers::ENV, users.into())));
    if args.explain {
        variables.push(("WEFT_RUN_EXPLAIN", "1".into()));
    }
    variables
}

/// The preload library.
fn library(args: &Args) -> Result<PathBuf, Failure> {
    let file = if let Some(dir) = &args.lib {
        let found = dir.canonicalize().map_err(|e| {
            Failure::failed(format!("{}: {e}", dir.display()))
                .hint("name the folder with --lib or WEFT_RUN_LIB as `./x dist` makes it: target/dist/lib")
        })?;
        within(&found).ok_or_else(|| {
            Failure::failed(format!(
                "there is no {} of weft in {}",
                LIBRARIES[0],
                dir.display()
            ))
            .hint("`./x dist` builds it into target/dist/lib")
        })?
    } else {
        let places = places::preload_libraries()?;
        places
            .iter()
            .filter_map(|place| place.canonicalize().ok())
            .find_map(|dir| within(&dir))
            .ok_or_else(|| {
                Failure::failed(format!("{} is in none of {}", LIBRARIES[0], places::named(&places)))
                    .hint("install the package libweft-preload, run `./x dist` to build it, or name its folder with --lib or WEFT_RUN_LIB")
            })?
    };
    places::preloadable(file)
}

/// The library of `--azsdp-malloc`, in the folder of the other one.
fn malloc(library: &Path) -> Result<PathBuf, Failure> {
    let names = MALLOC_LIBRARIES
        .iter()
        .map(|name| library.with_file_name(name));
    names
        .into_iter()
        .find(|file| file.is_file())
        .ok_or_else(|| {
            Failure::failed(format!(
                "there is no {} beside {}",
                MALLOC_LIBRARIES[0],
                library.display()
            ))
            .hint("`./x dist` builds both; without --azsdp-malloc it is not needed")
        })
}

fn within(dir: &Path) -> Option<PathBuf> {
    LIBRARIES
        .iter()
        .map(|name| dir.join(name))
        .find(|file| fs::read(file).is_ok_and(|bytes| bytes.windows(MARK.len()).any(|w| w == MARK)))
}
