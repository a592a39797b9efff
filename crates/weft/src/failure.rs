//! Errors as the program shows them: one line that says what happened, one that says what to do.

use std::fmt;

use rustix::io::Errno;
use weft_bench::BenchError;

/// What to do where descriptors are short.
pub(crate) const MORE_DESCRIPTORS: &str = "raise the limit: `ulimit -n 4096` in the shell, LimitNOFILE= of a service, --ulimit nofile= of a container";

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

impl From<BenchError> for Failure {
    fn from(e: BenchError) -> Self {
        match e {
            BenchError::Usage(_) => {
                Failure::usage(e.to_string()).hint("`weft bench SUITE --help` lists the options")
            }
            BenchError::Output { .. } => Failure::failed(format!("cannot write {e}"))
                .hint("name a file in a directory that you can write to"),
            _ => Failure::failed(e.to_string())
                .hint("`weft doctor` says what this machine does not support"),
        }
    }
}

/// What to do about a refusal of the system, whatever was asked of it: it says more than the advice of the call that failed.
fn remedy(what: &str) -> Option<&'static str> {
    if what.ends_with("the address cannot be reached") {
        return Some(NO_WAY);
    }
    let (_, number) = what.rsplit_once("(os error ")?;
    let number = number.split_once(')')?.0.parse().ok()?;
    Some(match Errno::from_raw_os_error(number) {
        Errno::MFILE | Errno::NFILE => MORE_DESCRIPTORS,
        Errno::NOSPC | Errno::DQUOT => {
            "the disk is full: free some space, or name a place on another one"
        }
        Errno::ROFS => "the file system is read-only: name a place on another one",
        Errno::NOMEM => "memory is short, or limited (`ulimit -v`, the container's limit)",
        Errno::ADDRNOTAVAIL => {
            "the address is not this machine's: `ip address` lists those that are"
        }
        Errno::ADDRINUSE => {
            "another program listens there (`ss -ltnp` says which): choose another port, or end it"
        }
        Errno::NETUNREACH | Errno::NETDOWN => NO_WAY,
        _ => return None,
    })
}

/// Text without the numbers that `std` appends to errors of the system.
fn without_numbers(text: &str) -> String {
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
        f.write_str(&without_numbers(&self.what))?;
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
        assert!(told(Errno::ADDRINUSE).contains("another port"));
        assert!(told(Errno::NOENT).ends_with("try: choose a good name"));
        let nested = "the peer is gone (Broken pipe (os error 32)), or not (x (os error 2))";
        let plain = Failure::failed(nested).to_string();
        assert_eq!(plain, "the peer is gone (Broken pipe), or not (x)");
        let plain = Failure::failed("nothing to do").hint("do it").to_string();
        assert_eq!(plain, "nothing to do\n  try: do it");
    }
}
