//! Errors as the program shows them: one line that says what happened, one that says what to do.

use std::path::Path;
use std::{fmt, fs, io};

use rustix::io::Errno;
use weft_session::NoDevice;
use weft_verbs::settings::Wrong;

use weft_service::text::printable_lines;

/// What to do where descriptors are short.
pub const MORE_DESCRIPTORS: &str = "raise the limit: `ulimit -n 4096` in the shell, LimitNOFILE= of a service, --ulimit nofile= of a container";

const MEND: &str = "unset the variable of the environment that is named, or mend its value";

const NO_WAY: &str = "look at `ip link` and `ip route`; in a network namespace of its own the loopback interface too is down until `ip link set lo up`";

/// Exit codes of every subcommand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// All went well.
    Ok = 0,
    /// Something failed; nothing half-done is left under a final name.
    Failed = 1,
    /// The command line cannot be used as it is (also what clap returns).
    Usage = 2,
    /// The peer could not be reached or went away.
    Peer = 3,
    /// The peer answered and was refused or refuses: another protocol, version or key.
    Refused = 4,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Text of the exit codes for help and the man page.
pub const EXIT_CODES: &str = "\
Exit status:
  0  success
  1  failure (a message names it)
  2  wrong usage of the command line
  3  the peer could not be reached or ended the connection
  4  the peer speaks another protocol or version, or the key is wrong or missing";

/// What went wrong, what the user can do about it, and the exit code.
#[derive(Debug, Clone)]
pub struct Failure {
    exit: Exit,
    what: String,
    hint: String,
}

impl From<&NoDevice> for Failure {
    fn from(why: &NoDevice) -> Self {
        let failure = match why {
            NoDevice::CannotEncrypt(_) => Self::usage(why.to_string()),
            NoDevice::Unusable(..) | NoDevice::NoSoft(_) => Self::failed(why.to_string()),
        };
        failure.hint(why.hint())
    }
}

impl Failure {
    fn new(exit: Exit, what: impl Into<String>) -> Self {
        Self {
            exit,
            what: what.into(),
            hint: String::new(),
        }
    }

    /// Something failed.
    pub fn failed(what: impl Into<String>) -> Self {
        Self::new(Exit::Failed, what)
    }

    /// The command line cannot be used.
    pub fn usage(what: impl Into<String>) -> Self {
        Self::new(Exit::Usage, what)
    }

    /// The peer is not there.
    pub fn peer(what: impl Into<String>) -> Self {
        Self::new(Exit::Peer, what)
    }

    /// The peer is there and it will not do.
    pub fn refused(what: impl Into<String>) -> Self {
        Self::new(Exit::Refused, what)
    }

    /// An address that cannot be listened on; `how` says which option chooses another one.
    pub fn listen(on: &dyn fmt::Display, e: &dyn fmt::Display, how: &str) -> Self {
        let what = format!("cannot listen on {on}: {e}");
        let hint = match errno_in(&what) {
            Some(Errno::ADDRINUSE) => format!(
                "another program listens there (`ss -ltnp` says which): end it, or choose another port: {how}"
            ),
            Some(Errno::ACCESS | Errno::PERM) => {
                format!("ports below 1024 are for root: choose another one: {how}")
            }
            _ => how.to_owned(),
        };
        Self::failed(what).hint(hint)
    }

    /// A file that cannot be written.
    pub fn write(path: &Path, e: &io::Error) -> Self {
        Self::failed(format!("cannot write {}: {e}", path.display()))
            .hint("name a file in a directory that you can write to")
    }

    /// Adds what the user can do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }

    /// The exit code.
    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// What went wrong.
    pub fn what(&self) -> &str {
        &self.what
    }
}

impl From<Wrong> for Failure {
    fn from(wrong: Wrong) -> Self {
        Failure::usage(wrong.to_string()).hint(MEND)
    }
}

/// Whether a file can be written, which is better known before measurements than after. One that is there keeps its content until there is another one.
pub fn check_writable(path: &Path) -> Result<(), Failure> {
    let is_new = !path.exists();
    fs::File::options()
        .append(true)
        .create(true)
        .open(path)
        .map_err(|e| Failure::write(path, &e))?;
    if is_new {
        let _ = fs::remove_file(path);
    }
    Ok(())
}

/// Writes a file of results. Nothing half-done is left under a name that was free.
pub fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    let is_new = !path.exists();
    fs::write(path, text).map_err(|e| {
        if is_new {
            let _ = fs::remove_file(path);
        }
        Failure::write(path, &e)
    })
}

/// The error of the system that a text ends with.
fn errno_in(what: &str) -> Option<Errno> {
    let (_, number) = what.rsplit_once("(os error ")?;
    let number = number.split_once(')')?.0.parse().ok()?;
    Some(Errno::from_raw_os_error(number))
}

/// The same, unless the text says what to do: an RNIC's error names the limit of locked memory, and the bytes that are needed.
fn errno_without_remedy(what: &str) -> Option<Errno> {
    errno_in(what).filter(|_| !what.contains("ulimit -l"))
}

/// What to do where the system lacks something, or a variable of the environment is wrong: that says more than what was tried.
pub fn shortage(what: &str) -> Option<&'static str> {
    if what.ends_with("the address cannot be reached") {
        return Some(NO_WAY);
    }
    if ["WEFT_TLS_KEY:", "WEFT_TLS_PEERS:", ": it has to be "]
        .iter()
        .any(|words| what.contains(words))
    {
        return Some(MEND);
    }
    Some(match errno_without_remedy(what)? {
        Errno::MFILE | Errno::NFILE => MORE_DESCRIPTORS,
        Errno::NOMEM => "memory is short, or limited (`ulimit -v`, the container's limit)",
        Errno::AGAIN => {
            "raise the limit of processes and threads (`ulimit -u`, the container's pids limit)"
        }
        Errno::NOSPC | Errno::DQUOT => {
            "the disk is full: free some space, or name a place on another one"
        }
        Errno::NETUNREACH | Errno::NETDOWN | Errno::HOSTUNREACH => NO_WAY,
        _ => return None,
    })
}

/// What to do about a refusal of the system, whatever was asked of it.
fn remedy(what: &str) -> Option<&'static str> {
    if let Some(known) = shortage(what) {
        return Some(known);
    }
    Some(match errno_without_remedy(what)? {
        Errno::ROFS => "the file system is read-only: name a place on another one",
        Errno::ADDRNOTAVAIL => {
            "the address is not this machine's: `ip address` lists those that are"
        }
        Errno::AFNOSUPPORT => {
            "this machine has no addresses of that kind (IPv6 may be off): use one of the other kind"
        }
        Errno::INVAL if what.contains("fe80:") => {
            "an address of one link needs the interface that leads there, as in fe80::1%eth0"
        }
        Errno::NAMETOOLONG => "choose a shorter name",
        Errno::ISDIR => "name a file; this is a directory",
        Errno::NOTDIR => "name a directory; this is a file, or goes through one",
        Errno::LOOP => "symbolic links lead in a circle there: name the file itself",
        Errno::NOEXEC => {
            "it is neither a program of this machine nor a script that begins with #!: see `file`"
        }
        _ => return None,
    })
}

/// Text without the numbers that `std` appends to errors of the system.
pub fn without_numbers(text: &str) -> String {
    let mut pieces = text.split(" (os error ");
    let mut plain = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let rest = piece.trim_start_matches(|c: char| c.is_ascii_digit());
        plain.push_str(rest.strip_prefix(')').unwrap_or(rest));
    }
    plain
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Names of files and words of peers may hold anything.
        f.write_str(&printable_lines(without_numbers(&self.what).as_bytes()))?;
        let hint = remedy(&self.what).unwrap_or(&self.hint);
        if !hint.is_empty() {
            write!(f, "\n  try: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_comes_from_the_error_number() {
        let told = |errno: Errno| {
            let error = std::io::Error::from(errno);
            Failure::failed(format!("cannot listen: {error}"))
                .hint("choose a good name")
                .to_string()
        };
        assert!(told(Errno::MFILE).contains("ulimit -n"));
        assert!(told(Errno::NOSPC).contains("free some space"));
        assert!(told(Errno::ADDRNOTAVAIL).contains("ip address"));
        assert!(told(Errno::AGAIN).contains("ulimit -u"));
        assert!(told(Errno::NOENT).ends_with("try: choose a good name"));
        let bind = |errno: Errno| {
            let error = std::io::Error::from(errno);
            Failure::listen(&"[fe80::1]:80", &error, "--bind ADDR:PORT").to_string()
        };
        assert!(bind(Errno::ADDRINUSE).ends_with("--bind ADDR:PORT"));
        assert!(bind(Errno::ACCESS).contains("1024"));
        assert!(bind(Errno::INVAL).contains("fe80::1%eth0"));
        let locked =
            "ibv_reg_mr: Cannot allocate memory (os error 12): raise the limit (`ulimit -l`)";
        let locked = Failure::failed(locked).hint("look").to_string();
        assert!(locked.ends_with("try: look"), "{locked}");
        let line = Failure::failed("\u{1b}[31mred\rname\n  second").to_string();
        assert_eq!(line, "\\u{1b}[31mred\\rname\n  second");
        let full = write_file(Path::new("/dev/full"), "text").unwrap_err();
        assert!(full.to_string().contains("free some space"), "{full}");
        let nested = "the peer is gone (Broken pipe (os error 32)), or not (x (os error 2))";
        let plain = Failure::failed(nested).to_string();
        assert_eq!(plain, "the peer is gone (Broken pipe), or not (x)");
        let plain = Failure::failed("nothing to do").hint("do it").to_string();
        assert_eq!(plain, "nothing to do\n  try: do it");
    }
}
