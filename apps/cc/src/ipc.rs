//! The messages between a compilation and the daemon of its host: JSON in the messages of a Unix socket, memory files as descriptors.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use weft_sys::unix::{self, Name};
use weft_sys::{Interest, poll_fds};

use crate::Endpoint;
use crate::options::Language;
use crate::wire::{Output, Tree};

/// The path of the daemon's socket, instead of the user's own directory.
pub const SOCKET: &str = "WEFT_CC_SOCKET";
/// The longest message in bytes.
const MAX_MESSAGE: usize = 200 << 10;

/// Requests to the daemon, other than commands ([`crate::client::compile`]).
#[derive(Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Compile a preprocessed text, which is passed as a memory file.
    Job(Box<JobAsk>),
    /// Everything that there is to know.
    Status,
    /// The records of finished compilations, from this number on.
    Past(u64),
    /// End when it is idle.
    Stop,
}

/// A job for some worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobAsk {
    /// The workers to use.
    pub workers: Vec<Endpoint>,
    /// The compiler here.
    pub driver: PathBuf,
    pub name: String,
    /// The search path of programs: `PATH`.
    pub path: String,
    /// Of the source.
    pub language: Language,
    /// For debug information.
    pub cwd: String,
    /// The source as it was named.
    pub source: String,
    /// Of diagnostics.
    pub locale: String,
    /// Options.
    pub args: Vec<String>,
    /// The prefix of the names of further outputs; empty without any.
    pub beside: String,
    /// The offset of the source in its file.
    pub at: u64,
    /// Bytes of the source.
    pub len: u64,
    /// The worker preprocesses too, and no source is passed.
    pub pull: Option<PullAsk>,
    /// What is passed are the files of the source.
    pub tree: Option<Tree>,
    /// Without TLS, to workers that take that.
    pub plain: bool,
}

/// The options of a job of clang.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TreeAsk {
    /// Options of the preprocessor, each value apart.
    pub cpp: Vec<String>,
    /// Options that decide which directories the compiler searches by itself.
    pub search: Vec<String>,
}

/// The data of a job whose source the worker preprocesses.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PullAsk {
    /// Options of the preprocessor: one argument each, values apart.
    pub cpp: Vec<String>,
    /// Options that decide which directories the compiler searches by itself.
    pub search: Vec<String>,
    /// Files and directories that the worker may read, absolute.
    pub roots: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    Go,
    /// The outputs are in the passed memory file.
    Done {
        /// What, where, how long.
        outputs: Vec<(Output, u64, u64)>,
        worker: Endpoint,
    },
    /// No worker does it; why.
    Here(String),
    Status(Box<Status>),
    /// The first ones of those that were asked for; none: there are no more.
    Past {
        /// The number of the first.
        from: u64,
        /// In the order of their ends.
        past: Vec<Past>,
    },
}

/// A compilation that is over. Times are seconds since the daemon was started.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Past {
    /// Its source; empty where it ran here without the daemon knowing it.
    pub source: String,
    /// The worker; `None`: this machine.
    pub worker: Option<Endpoint>,
    /// When its preprocessor ran here, if it did.
    pub preprocessed: Option<(f64, f64)>,
    /// When it was handed over, or asked for leave to run here.
    pub asked: f64,
    /// When the worker, or leave, was there.
    pub began: f64,
    /// When it was over.
    pub ended: f64,
    /// Seconds until the worker had the source, and of its compiler.
    pub worker_times: (f64, f64),
    /// Bytes of the source, and of the outputs.
    pub bytes: (u64, u64),
    /// Why it ran here.
    pub reason: String,
}

/// Those that fit into a message.
pub(crate) const MAX_PAST: usize = 60;

/// The state of the daemon.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// Seconds since it was started.
    pub uptime: f64,
    pub workers: Vec<WorkerStatus>,
    /// Jobs that are not over.
    pub jobs: Vec<JobStatus>,
    /// Compilations here that are not over, preprocessing among them.
    pub here: usize,
    /// Jobs that workers did.
    pub done: u64,
    /// Jobs that were tried again.
    pub again: u64,
    /// Outputs that were compared, and those that differed.
    pub verified: (u64, u64),
    /// Why commands ran here, and how many.
    pub reasons: Vec<(String, u64)>,
}

impl Status {
    /// Leaves out what counts least until it fits into a message.
    pub(crate) fn fit(&mut self) {
        // The answer's own name comes on top.
        let fits = |status: &Self| {
            serde_json::to_vec(status).is_ok_and(|bytes| bytes.len() + 64 <= MAX_MESSAGE)
        };
        while !fits(self) {
            let gone = self.reasons.pop().is_some()
                || self.jobs.pop().is_some()
                || self.workers.pop().is_some();
            if !gone {
                break;
            }
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub struct WorkerStatus {
    pub endpoint: Endpoint,
    /// `local`, `tls`, `tcp`; empty before the first connection.
    pub transport: String,
    /// Jobs at once; 0 before the first connection.
    pub slots: u16,
    /// Jobs now.
    pub in_use: usize,
    /// Jobs that it did.
    pub done: u64,
    /// Jobs that failed on the way.
    pub lost: u64,
    /// Bytes of sources, and of outputs.
    pub bytes: (u64, u64),
    /// Seconds that its compilers ran.
    pub compiling: f64,
    /// Percent of the time in which a task waited for its processors, according to its last report.
    pub pressure: f64,
    /// Why it gets no jobs now; empty: it does.
    pub trouble: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobStatus {
    pub source: String,
    /// Its worker; `None`: it waits.
    pub worker: Option<Endpoint>,
    /// Seconds.
    pub age: f64,
}

/// The path of the daemon's socket.
///
/// # Errors
/// A directory that belongs to another user, or that others can write.
pub fn socket() -> io::Result<PathBuf> {
    if let Some(path) = std::env::var_os(SOCKET).filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    let uid = rustix::process::geteuid().as_raw();
    let dir = match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_dir()) {
        Some(dir) => Path::new(&dir).join("weft-cc"),
        None => std::env::temp_dir().join(format!("weft-cc-{uid}")),
    };
    match std::fs::DirBuilder::new().mode(0o700).create(&dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    // Other users could offer a daemon of theirs.
    let about = dir.symlink_metadata()?;
    if !about.is_dir() || about.uid() != uid || about.mode() & 0o022 != 0 {
        let why = format!("{} is not this user's alone", dir.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(dir.join("socket"))
}

/// Lends a buffer that the thread keeps, with its old contents: its pages need not be requested from the kernel again.
pub(crate) fn with_scratch<T>(len: usize, with: impl FnOnce(&mut [u8]) -> T) -> T {
    thread_local!(static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) });
    let mut scratch = SCRATCH.take();
    scratch.resize(len.max(scratch.len()), 0);
    let done = with(&mut scratch[..len]);
    SCRATCH.set(scratch);
    done
}

/// A connection between the two.
pub struct Line(pub(crate) OwnedFd);

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Line {
    /// Connects to the daemon.
    ///
    /// # Errors
    /// As `connect(2)`; `PermissionDenied` for a daemon of another user.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            match unix::connect(Name::Path(path)) {
                // Its backlog is full.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(e) => return Err(e),
                Ok(fd) if unix::peer_cred(&fd)?.is_same_user() => return Ok(Self(fd)),
                Ok(_) => return Err(io::ErrorKind::PermissionDenied.into()),
            }
        }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// Those of the socket; `InvalidInput` for one that is too long.
    pub fn send(&self, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_bytes(&serde_json::to_vec(message)?, fds)
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if bytes.len() > MAX_MESSAGE {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        loop {
            match unix::send_with_fds(&self.0, bytes, fds) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    poll_fds(&[(self.as_fd(), Interest::WRITE)], None)?;
                }
                done => return done,
            }
        }
    }

    /// Waits for a message, and at most one descriptor. `None`: the other side has closed.
    ///
    /// # Errors
    /// The errors of the socket; `InvalidData` for an invalid message.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Option<OwnedFd>)>> {
        let received = self.receive_bytes()?;
        let parse = |(bytes, fd): (Vec<u8>, _)| Ok((serde_json::from_slice(&bytes)?, fd));
        received.map(parse).transpose()
    }

    pub(crate) fn receive_bytes(&self) -> io::Result<Option<(Vec<u8>, Option<OwnedFd>)>> {
        loop {
            let received = with_scratch(MAX_MESSAGE + 1, |into| {
                let (len, mut fds) = unix::recv_with_fds(&self.0, into, 1)?.unzip();
                let bytes = len.map(|len| into[..len].to_vec());
                io::Result::Ok(bytes.zip(Some(fds.as_mut().and_then(Vec::pop))))
            });
            match received {
                Ok(received) => return Ok(received),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    match poll_fds(&[(self.as_fd(), Interest::READ)], None) {
                        Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
                        _ => {}
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(e) => return Err(e),
            }
        }
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// As [`Line::send`] and [`Line::receive`]; `UnexpectedEof` when the daemon is gone.
    pub fn ask(&self, ask: &Ask, fds: &[BorrowedFd<'_>]) -> io::Result<(Answer, Option<OwnedFd>)> {
        self.send(ask, fds)?;
        self.receive()?
            .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Whether the other side is gone, or says something.
    pub(crate) fn stirs(&self) -> bool {
        poll_fds(&[(self.as_fd(), Interest::READ)], Some(Duration::ZERO))
            .is_ok_and(|ready| ready != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_fits_into_a_message() {
        let mut status = Status {
            reasons: (0..100)
                .map(|n| (format!("{n}{}", "x".repeat(4000)), 100 - n))
                .collect(),
            ..Status::default()
        };
        status.fit();
        assert!((1..100).contains(&status.reasons.len()));
        assert!(status.reasons[0].0.starts_with("0x"));
        let bytes = serde_json::to_vec(&Answer::Status(Box::new(status))).unwrap();
        assert!(bytes.len() <= MAX_MESSAGE);
    }
}
