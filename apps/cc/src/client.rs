//! One compilation: passes the command to the daemon, which does it, or answers that it has to be done here.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::ipc::Line;
use crate::launch::{FROM, Launch, Next};

/// The variable that allows connections without TLS.
pub const PLAIN: &str = "WEFT_CC_PLAIN";
pub(crate) const HOSTS: &str = "WEFT_CC_HOSTS";
/// Set for the compilers that are started from here: one that is a script which calls `weft cc` again would wait for a place that it has itself.
pub(crate) const ACTIVE: &str = "WEFT_CC_ACTIVE";

/// Compiles: `name` is a compiler's; `set` are variables of the environment; `line` connects to the daemon. The status that this process is to end with. Where the
/// compiler is to run here, this process becomes it, and only a failure comes back.
///
/// # Errors
/// There is no such compiler, or it could not be started.
pub fn compile(
    name: &OsStr,
    args: &[OsString],
    set: &[(&str, OsString)],
    line: impl FnOnce() -> io::Result<Line>,
) -> io::Result<u8> {
    let here = |path: PathBuf, line: Option<Line>| {
        if let Some(line) = line {
            // The leave ends with the process.
            let _ = rustix::io::fcntl_setfd(&line.0, rustix::io::FdFlags::empty());
            std::mem::forget(line.0);
        }
        Err(Command::new(path).args(args).env(ACTIVE, "1").exec())
    };
    let alone = || {
        let not = not_compilers(std::env::var_os(FROM));
        let found = name.to_str().and_then(|name| {
            let path = std::env::var_os("PATH").unwrap_or_else(|| crate::PATH.into());
            crate::find_in(path, name, &not)
        });
        here(found.ok_or(io::ErrorKind::NotFound)?, None)
    };
    let given = set.iter().find(|(name, _)| *name == HOSTS);
    let hosts = given.map_or_else(|| std::env::var_os(HOSTS), |(_, hosts)| Some(hosts.clone()));
    if std::env::var_os(ACTIVE).is_some() || hosts.is_none_or(|hosts| hosts.is_empty()) {
        return alone();
    }
    let all = [&[name.to_owned()], args].concat();
    let asked = line().and_then(|line| {
        let launch = Launch::own(all, set)?;
        line.send_bytes(&launch.encode(), &[io::stderr().as_fd()])?;
        let (bytes, _) = line.receive_bytes()?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let next = Next::decode(&bytes).ok_or(io::ErrorKind::InvalidData)?;
        Ok((next, line))
    });
    match asked {
        Ok((Next::End(code), _)) => Ok(code),
        Ok((Next::Compiler { path, held }, line)) => here(path, held.then_some(line)),
        Err(e) => {
            tracing::info!("here: the daemon: {e}");
            alone()
        }
    }
}

/// Files that are no compilers, although links to them have the names of some: this program, and the launcher that it came from.
pub(crate) fn not_compilers(launcher: Option<OsString>) -> Vec<PathBuf> {
    let own = std::env::current_exe().ok();
    let all = own.into_iter().chain(launcher.map(PathBuf::from));
    all.filter_map(|path| path.canonicalize().ok()).collect()
}

/// Writes the launcher into a directory.
///
/// # Errors
/// Those of the file system; `Unsupported` where there is none for this kind of machine.
pub fn write_launcher(dir: &Path) -> io::Result<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    if weft_launcher::LAUNCHER.is_empty() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(weft_launcher::LAUNCHER)?;
    let mode = std::fs::Permissions::from_mode(0o755);
    file.as_file().set_permissions(mode)?;
    let path = dir.join(crate::launch::NAME);
    file.persist(&path)?;
    Ok(path)
}
