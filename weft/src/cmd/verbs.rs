//! `weft verbs`: programs written for libibverbs and librdmacm, on the drop-in libraries.

use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use weft_verbs::faults::Script;
use weft_verbs::settings::{FAULTS, LOG, OF_VERBS};

use weft_cli::start::{EXIT_OWN, fail, refuse};
use weft_report::programs::find;
use weft_sys::elf::{self, Kind};

use super::view::{self, View};
use weft_cli::failure::Failure;
use weft_cli::places;

pub(crate) const LONG: &str = "\
Run an unmodified program for RDMA hardware: it loads weft's libibverbs and librdmacm. It sees two \
devices, without a kernel module and without root:

  weft0     an iWARP adapter (RNIC); programs connect with rdma_cm
  weft_ib0  for programs that support InfiniBand or RoCE only: they exchange a
            GID and a queue pair number themselves and call ibv_modify_qp. Its
            GIDs are the addresses of this host

The devices are also in /sys/class/infiniband, /sys/class/infiniband_verbs and /dev/infiniband. Go \
and static programs need --sysfs=namespace to see them there.

The peer has to run on weft too; for weft0 it may be an RNIC with iWARP or the kernel's siw, and for \
weft_ib0 with --wire roce an adapter with RoCE v2 or the kernel's rxe.";

const EXAMPLES: &str = "\
Examples:
  weft verbs -- rping -s -a 127.0.0.1 -C 10 -v
  weft verbs --devices weft_ib0 -- ibv_rc_pingpong -g 0 HOST
  weft verbs --devices weft_ib0 --wire roce -- ib_write_bw -x 0 HOST
  weft verbs -- ibstat weft_ib0
  weft verbs --sysfs=namespace -- busybox ls /sys/class/infiniband
  eval \"$(weft verbs --print-env)\"; pytest

Exit status: that of the program; 125 if weft fails, 126 if the program cannot be executed, 127 if it is not found.";

/// The library that every program of this kind loads.
const LIBRARY: &str = "libibverbs.so.1";
/// The connection manager's library.
const CM_LIBRARY: &str = "librdmacm.so.1";
/// weft's library has this version node, no other library does.
const MARK: &[u8] = b"WEFT_PRIVATE_1";

/// Options of `weft verbs`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// The folder of the drop-in libraries [default: the folder of the packages or of `./x dist`]
    #[arg(long, value_name = "DIR", env = "WEFT_VERBS_LIB")]
    lib: Option<PathBuf>,
    /// The devices that the program sees, in this order; `rdma_cm` takes the first [default: both, weft0 first]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = ["weft0", "weft_ib0"])]
    devices: Vec<String>,
    /// A fault script
    #[arg(long, value_name = "FILE")]
    faults: Option<PathBuf>,
    /// Log level of the libraries on stderr [default: warn]
    #[arg(long, value_name = "LEVEL", value_parser = ["off", "error", "warn", "info", "debug", "trace"])]
    log: Option<String>,
    /// Use of shared memory between processes of this host and user
    #[arg(long, value_name = "WHEN", value_parser = ["off", "auto", "require"])]
    local: Option<String>,
    /// What queue pairs of `weft_ib0` put on the wire: `roce` reaches adapters and the kernel's rxe, `auto` has shared memory with peers of this host besides [default: weft]
    #[arg(long, value_name = "WIRE", value_parser = ["weft", "roce", "auto"])]
    wire: Option<String>,
    /// How the program finds the devices in /sys and /dev
    #[arg(long, value_name = "HOW", value_enum, default_value_t = View::Preload)]
    sysfs: View,
    /// Only check whether the devices are in /sys
    #[arg(long, hide = true, conflicts_with = "command")]
    look: bool,
    /// Print the settings as shell commands instead of running a program
    #[arg(long, conflicts_with = "command")]
    print_env: bool,
    /// The program and its arguments
    #[arg(
        value_name = "PROGRAM",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required_unless_present_any = ["print_env", "look"]
    )]
    command: Vec<OsString>,
}

/// Executes the program, or prints the settings.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    if args.look {
        return Ok(ExitCode::from(u8::from(!Path::new(view::LOOK).is_dir())));
    }
    if args.print_env && args.sysfs == View::Namespace {
        return Err(Failure::usage(
            "--print-env cannot print a namespace: start the shell in it, as in `weft verbs --sysfs=namespace -- bash`",
        ));
    }
    let program = match args.command.first().map(|name| (name, find(name))) {
        Some((name, Err(e))) => return Ok(refuse(name, &e)),
        Some((_, Ok(program))) => program,
        None => PathBuf::new(),
    };
    let (lib, mut settings) = match libraries(args.lib.as_deref())
        .and_then(|lib| settings(args, &lib).map(|settings| (lib, settings)))
    {
        Ok(found) => found,
        Err(failure) => return Ok(fail(EXIT_OWN, &failure)),
    };
    if args.print_env {
        let mut text = String::new();
        for (name, value) in &settings {
            let value = value.to_string_lossy().replace('\'', r"'\''");
            let _ = writeln!(text, "export {name}='{value}'");
        }
        weft_cli::say(text.trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let Some((name, rest)) = args.command.split_first() else {
        return Err(Failure::usage("no program is named"));
    };
    // Warnings say what no error number can.
    if args.log.is_none() && LOG.read()?.is_none() {
        settings.push((LOG.name, "warn".into()));
    }
    for warning in warnings(&program) {
        weft_cli::tell!("weft: warning: {}: {warning}", program.display());
    }
    match args.sysfs {
        View::Preload => settings.extend(view::folder().map(|dir| (view::SETTING, dir.into()))),
        View::Namespace => {
            if let Err(failure) = view::enter(&lib, &settings) {
                return Ok(fail(EXIT_OWN, &failure));
            }
        }
        View::Off => {}
    }
    // Only a failure comes back.
    let error = Command::new(&program)
        .arg0(name)
        .args(rest)
        .envs(settings)
        .exec();
    Ok(refuse(name, &error))
}

/// The folder with weft's libraries.
pub(super) fn libraries(named: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(dir) = named {
        let dir = dir.canonicalize().map_err(|e| {
            Failure::failed(format!("{}: {e}", dir.display()))
                .hint("name the folder with --lib or WEFT_VERBS_LIB as `./x dist` makes it: target/dist/lib")
        })?;
        return if is_ours(&dir) {
            Ok(dir)
        } else {
            Err(Failure::failed(format!(
                "there is no {LIBRARY} of weft in {}",
                dir.display()
            ))
            .hint("`./x dist` builds the libraries into target/dist/lib"))
        };
    }
    let places = places::libraries()?;
    let found = places.iter().filter_map(|place| place.canonicalize().ok());
    found.into_iter().find(|dir| is_ours(dir)).ok_or_else(|| {
        Failure::failed(format!(
            "the drop-in libraries are in none of {}",
            places::named(&places)
        ))
        .hint("install the package weft-verbs, run `./x dist` to build them, or name their folder with --lib or WEFT_VERBS_LIB")
    })
}

/// Whether the libraries in this folder are weft's and not the distribution's.
fn is_ours(dir: &Path) -> bool {
    let marked = |name| {
        fs::read(dir.join(name)).is_ok_and(|file| file.windows(MARK.len()).any(|w| w == MARK))
    };
    marked(LIBRARY) && marked(CM_LIBRARY)
}

/// The environment of a program, for other subcommands that start programs on these libraries.
pub(super) fn environment(
    lib: Option<PathBuf>,
    device: &str,
    log: Option<String>,
    local: Option<String>,
) -> Result<Vec<(&'static str, OsString)>, Failure> {
    let args = Args {
        lib,
        devices: vec![device.to_owned()],
        faults: None,
        log,
        local,
        wire: None,
        sysfs: View::Preload,
        look: false,
        print_env: false,
        command: Vec::new(),
    };
    settings(&args, &libraries(args.lib.as_deref())?)
}

/// The environment of the program.
fn settings(args: &Args, lib: &Path) -> Result<Vec<(&'static str, OsString)>, Failure> {
    let mut path = lib.as_os_str().to_owned();
    if path.as_bytes().contains(&b':') {
        return Err(Failure::failed(format!(
            "the name of {} has a colon, which ends a folder in LD_LIBRARY_PATH",
            lib.display()
        )));
    }
    if let Some(rest) = env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
        path.push(":");
        path.push(rest);
    }
    let mut settings = vec![("LD_LIBRARY_PATH", path)];
    let library = lib.join(view::LIBRARY);
    if args.sysfs == View::Preload && library.exists() {
        // A name with a space would be two; without its folder it is found too, only not by programs with other rights.
        let mut preload = if library.as_os_str().as_bytes().contains(&b' ') {
            view::LIBRARY.into()
        } else {
            library.into_os_string()
        };
        if let Some(rest) = env::var_os("LD_PRELOAD").filter(|rest| !rest.is_empty()) {
            preload.push(":");
            preload.push(rest);
        }
        settings.push(("LD_PRELOAD", preload));
    }
    if !args.devices.is_empty() {
        settings.push(("WEFT_DEVICES", args.devices.join(",").into()));
    }
    if let Some(file) = args.faults.clone().or_else(|| FAULTS.path()) {
        settings.push((FAULTS.0, script(&file)?.into()));
    }
    let texts = [
        ("WEFT_LOG", &args.log),
        ("WEFT_LOCAL", &args.local),
        ("WEFT_IB_WIRE", &args.wire),
    ];
    settings.extend(
        texts
            .into_iter()
            .filter_map(|(n, v)| Some((n, v.clone()?.into()))),
    );
    // The library would say it too, once the program opens a device.
    for inherited in OF_VERBS {
        if settings.iter().all(|(name, _)| *name != inherited.name) {
            inherited.read()?;
        }
    }
    Ok(settings)
}

/// The path of a valid fault script, made absolute because the program may run in another folder.
fn script(file: &Path) -> Result<PathBuf, Failure> {
    let wrong = |what: String| Failure::failed(format!("{}: {what}", file.display()));
    let text = fs::read_to_string(file).map_err(|e| {
        wrong(e.to_string())
            .hint("--faults or WEFT_FAULTS names the script: check its name and its permissions")
    })?;
    Script::parse(&text).map_err(|mistake| {
        wrong(mistake.to_string()).hint("docs/verbs.md says what a script of faults may say")
    })?;
    file.canonicalize().map_err(|e| wrong(e.to_string()))
}

/// The reason why the program does not use weft's libraries, or may not.
fn warnings(program: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Ok(about) = fs::metadata(program) {
        let mode = about.permissions().mode();
        let user = mode & 0o4000 != 0 && about.uid() != rustix::process::geteuid().as_raw();
        let group = mode & 0o2000 != 0 && about.gid() != rustix::process::getegid().as_raw();
        if user || group {
            warnings.push(
                "it runs with other rights (setuid or setgid), so the loader ignores LD_LIBRARY_PATH; run it as the user that it becomes"
                    .into(),
            );
        }
    }
    // An unreadable file may be executable.
    let Some(file) = elf::open(program) else {
        return warnings;
    };
    match elf::kind(&file) {
        Ok(Kind::Static) => {
            warnings.push("it is linked statically: no library of ours is loaded".into());
        }
        Ok(Kind::Foreign) => warnings.push(
            "it is for another kind of machine than the libraries: they are not loaded".into(),
        ),
        Ok(Kind::Dynamic { rpath: Some(rpath) }) => {
            let home = program.canonicalize().ok();
            let origin = home.as_deref().and_then(Path::parent);
            let folder = env::split_paths(&rpath)
                .map(|dir| expand(&dir, origin))
                .find(|dir| [LIBRARY, CM_LIBRARY].iter().any(|n| dir.join(n).exists()));
            if let Some(folder) = folder.filter(|folder| !is_ours(folder)) {
                warnings.push(format!(
                    "its DT_RPATH comes before LD_LIBRARY_PATH, and {} has an RDMA library; `patchelf --remove-rpath` or LD_PRELOAD help",
                    folder.display()
                ));
            }
        }
        Ok(Kind::Script(_)) => {
            if let Some(interpreter) = elf::interpreter(&file, Path::new("")) {
                let of = interpreter.display().to_string();
                let texts = self::warnings(&interpreter);
                warnings.extend(texts.into_iter().map(|text| format!("by {of}: {text}")));
            }
        }
        _ => {}
    }
    warnings
}

/// A folder of a path list, with the program's own folder substituted.
fn expand(dir: &Path, origin: Option<&Path>) -> PathBuf {
    let Some(origin) = origin else {
        return dir.to_owned();
    };
    let mut out = Vec::new();
    let mut rest = dir.as_os_str().as_bytes();
    while let Some(&first) = rest.first() {
        let variable = [&b"${ORIGIN}"[..], b"$ORIGIN"];
        if let Some(after) = variable.iter().find_map(|name| rest.strip_prefix(*name)) {
            out.extend_from_slice(origin.as_os_str().as_bytes());
            rest = after;
        } else {
            out.push(first);
            rest = &rest[1..];
        }
    }
    OsString::from_vec(out).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origin_is_put_in() {
        let origin = Some(Path::new("/opt/x"));
        let expanded = |dir| expand(Path::new(dir), origin);
        assert_eq!(expanded("$ORIGIN/../lib"), Path::new("/opt/x/../lib"));
        assert_eq!(expanded("${ORIGIN}/lib"), Path::new("/opt/x/lib"));
        assert_eq!(expanded("/usr/lib"), Path::new("/usr/lib"));
        assert_eq!(expand(Path::new("$ORIGIN"), None), Path::new("$ORIGIN"));
    }
}
