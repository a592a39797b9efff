//! Errors as the program shows them: one line that says what happened, one that says what to do.

use std::fmt;

use weft_bench::BenchError;

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
  0  all went well
  1  something failed (messages say what)
  2  the command line cannot be used as it is
  3  the peer could not be reached or went away
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
            _ => Failure::failed(e.to_string()).hint("`weft doctor` tells what this machine lacks"),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if !self.hint.is_empty() {
            write!(f, "\n  try: {}", self.hint)?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}
