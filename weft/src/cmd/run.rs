//! `weft run`: unmodified sockets programs.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use weft_run::lend;
use weft_run::preload::{LIBRARIES, MALLOC_LIBRARIES};

use weft_cli::failure::Failure;
use weft_cli::places;
use weft_cli::start::{fail, refuse};
use weft_report::programs::find;
use weft_sys::elf::{self, Kind};

pub(crate) const LONG: &str = "\
Run an unmodified program for TCP or UDP sockets. Its TCP connections to other programs under `weft run`, on the same \
host, network namespace and user, go over to shared memory after their first messages; all others stay plain TCP, byte for byte. The two \
sides can be started in any order.

With `--hosts` on both sides, connections between hosts go over to SDP (see `weft help broker` for the keys). Without it they stay plain TCP.

The TCP connection stays open for addresses, options, the end of the stream and resets. If a socket \
is used in a way that shared memory does not support (urgent data, passed to another process or an executed program, \
io_uring...), its connection goes back to TCP; `--explain` and `weft stat` name the reason.

UDP: under the same conditions datagrams go through shared memory after the first few; multicast, broadcast, other hosts and other programs get plain UDP.

`--mode azsdp` returns from a large send before the peer has the bytes, and protects the memory meanwhile. It is opt-in, because a system call that this library does not intercept gets \
EFAULT from protected memory, and because the bytes of a killed program are lost: the peer then sees a reset.

Programs that make their own system calls (statically linked programs and Go programs) run on plain TCP, with a notice.";

const EXAMPLES: &str = "\
Examples:
  weft run -- redis-server --port 7000
  weft run --explain -- redis-benchmark -p 7000 -q -t get
  weft run --hosts --explain -- iperf3 -c other-host
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
    /// Print at the program's exit which connections went over to shared memory, and why others did not
    #[arg(long)]
    explain: bool,
    /// The folder of the preload library [default: the folder of the packages or of `./x dist`]
    #[arg(long, value_name = "DIR", env = "WEFT_RUN_LIB")]
    lib: Option<PathBuf>,
    /// The program and its arguments
    #[arg(
        value_name = "PROGRAM",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true
    )]
    command: Vec<OsString>,
}

/// Executes the program.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
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
    } else {
        let library = match library(args) {
            Ok(library) => library,
            Err(failure) => return Ok(fail(EXIT_OWN, &failure)),
        };
        let mut preload = library.clone().into_os_string();
        if args.azsdp_malloc {
            match malloc(&library) {
                Ok(file) => {
                    preload.push(":");
                    preload.push(file);
                }
                Err(failure) => return Ok(fail(EXIT_OWN, &failure)),
            }
        }
        if let Some(rest) = env::var_os("LD_PRELOAD").filter(|rest| !rest.is_empty()) {
            preload.push(":");
            preload.push(rest);
        }
        command.env("LD_PRELOAD", preload);
        command.env(lend::MODE, &args.mode);
        command.env(lend::ON_WRITE, &args.azsdp);
        if args.azsdp_shared {
            command.env(lend::SHARED, "trust");
        }
        command.env(lend::FROM, args.from.to_string());
        if args.hosts {
            if let Err(failure) = super::broker::ensure() {
                return Ok(fail(EXIT_OWN, &failure));
            }
            command.env(weft_run::hosts::ENV, "bsdp");
        }
        if args.explain {
            command.env("WEFT_RUN_EXPLAIN", "1");
        }
    }
    // Only a failure comes back.
    let error = command.exec();
    Ok(refuse(name, &error))
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

/// The reason why the library has no effect on the program, or may have none.
pub(crate) fn plain(program: &Path) -> Option<&'static str> {
    let interpreter = elf::open(program).and_then(|file| elf::interpreter(&file, Path::new("")));
    // The kernel takes no other rights from a script.
    let program = interpreter.as_deref().unwrap_or(program);
    if let Ok(about) = fs::metadata(program) {
        let mode = about.permissions().mode();
        let user = mode & 0o4000 != 0 && about.uid() != rustix::process::geteuid().as_raw();
        let group = mode & 0o2000 != 0 && about.gid() != rustix::process::getegid().as_raw();
        if user || group {
            return Some(
                "it runs with other rights (setuid or setgid), so the loader ignores LD_PRELOAD",
            );
        }
    }
    // An unreadable file may be executable.
    let file = elf::open(program)?;
    match elf::kind(&file).ok()? {
        Kind::Static => Some("it is linked statically, so no library is loaded into it"),
        Kind::Dynamic { .. } if elf::is_go(&file).unwrap_or(false) => {
            Some("it is a Go program, which makes its own system calls")
        }
        _ => elf::refuses_preload(&file).ok()?,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    fn scripts_are_what_they_lead_to() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let script = |name: &str, interpreter: &str| {
            let path = dir.join(name);
            fs::write(&path, format!("#!{}\n", dir.join(interpreter).display())).unwrap();
            path
        };
        // A program without a loader: the start of this one, without its segments.
        let mut start = fs::read("/proc/self/exe").unwrap();
        start[56..58].fill(0);
        fs::write(dir.join("static"), &start[..64]).unwrap();
        script("first", "static");
        let said = plain(&script("second", "first")).unwrap_or_default();
        assert!(said.contains("statically"), "{said}");
        mknodat(CWD, dir.join("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(plain(&script("of_fifo", "fifo")), None);
    }
}
