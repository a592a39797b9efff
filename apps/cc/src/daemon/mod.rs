//! The daemon on the master's host: the connection manager of section 5.3.6. It keeps the connections to workers, picks one for each job, retries on
//! another one, and limits the processes that run here.
//!
//! Each connection of a compilation has a thread, which handles one job at a time.

mod command;
mod files;
mod history;
mod job;
mod pool;
mod tree;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::getpriority_process;
use weft_sys::unix::{self, Name};
use weft_sys::{Interest, poll_fds};
use weft_verbs::Device;
use weft_verbs::tls::Tls;

use crate::Endpoint;
use crate::digest::Digests;
use crate::ipc::{Answer, Ask, JobStatus, Line, Status};
use crate::launch::Launch;
use crate::lock;
use pool::Pools;
pub use pool::{About, Refusal, probe};
/// For the command that starts the daemon: a daemon that holds make's pipes would keep their readers waiting.
pub use weft_sys::process::keep_files;

/// How often threads check whether a peer has ended.
const LOOK: Duration = Duration::from_millis(200);
/// How long a thread waits for another compilation.
const WITHOUT_WORK: Duration = Duration::from_secs(5);
/// Different reasons that are counted.
const MAX_REASONS: usize = 100;

/// The daemon's own key, and the workers that it accepts.
pub trait Keys: Send + Sync {
    /// Settings for a connection to this worker.
    ///
    /// # Errors
    /// Why there are none.
    fn tls(&self, worker: &Endpoint) -> Result<Tls, String>;
}

/// For tests and measurements: the same settings for every worker.
impl Keys for Tls {
    fn tls(&self, _: &Endpoint) -> Result<Tls, String> {
        Ok(self.clone())
    }
}

#[derive(Clone)]
pub struct Config {
    /// The socket for compilations.
    pub socket: PathBuf,
    pub keys: Arc<dyn Keys>,
    /// It ends after so long without a compilation.
    pub idle: Duration,
    /// Initial room for outputs of a job, in bytes. Only written pages take memory.
    pub room: u64,
    /// Room that a worker may ask for.
    pub most_room: u64,
    /// Compilers and preprocessors that run here at once.
    pub here: usize,
    /// A job that no worker has done by then is done here.
    pub patience: Duration,
}

impl Config {
    /// With this socket and these keys.
    pub fn new(socket: PathBuf, keys: Arc<dyn Keys>) -> Self {
        let processors = weft_sys::cpu_count();
        Self {
            socket,
            keys,
            idle: Duration::from_mins(10),
            room: 16 << 20,
            most_room: 1 << 30,
            here: processors + 1,
            patience: Duration::from_mins(20),
        }
    }
}

/// A job that is not over.
struct Running {
    source: String,
    worker: Option<Endpoint>,
    since: Instant,
}

#[derive(Default)]
struct State {
    pools: Pools,
    here: usize,
    next: u64,
    jobs: BTreeMap<u64, Running>,
    done: u64,
    again: u64,
    verified: (u64, u64),
    reasons: BTreeMap<String, u64>,
    history: history::List,
}

/// Compilations that threads are to do which have nothing to do.
#[derive(Default)]
struct Work {
    lines: VecDeque<OwnedFd>,
    waiting: usize,
}

struct Shared {
    config: Config,
    device: Device,
    digests: Digests,
    packed: job::Packed,
    system: files::System,
    searches: tree::Searches,
    state: Mutex<State>,
    changed: Condvar,
    work: Mutex<Work>,
    called: Condvar,
    clients: AtomicUsize,
    stop: AtomicBool,
    /// Threads without work are to end.
    over: AtomicBool,
    began: Instant,
    /// The daemon's root directory and mount namespace, which commands must share.
    place: command::Place,
    umask: u32,
}

/// Runs until it was idle for a while, or is told to stop.
///
/// # Errors
/// The errors of the socket: `AddrInUse` if a daemon runs already.
pub fn run(config: Config) -> io::Result<()> {
    let listener = unix::listen(Name::Path(&config.socket), 128)?;
    let device = Device::open().map_err(io::Error::other)?;
    let shared = Arc::new(Shared {
        config,
        device,
        digests: Digests::default(),
        packed: job::Packed::default(),
        system: files::System::default(),
        searches: tree::Searches::default(),
        state: Mutex::default(),
        changed: Condvar::new(),
        work: Mutex::default(),
        called: Condvar::new(),
        clients: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
        over: AtomicBool::new(false),
        began: Instant::now(),
        place: command::Place::of("self")?,
        umask: umask()?,
    });
    let mut idle_since = Instant::now();
    while !shared.stop.load(Ordering::SeqCst) {
        if shared.clients.load(Ordering::SeqCst) > 0 {
            idle_since = Instant::now();
        } else if idle_since.elapsed() > shared.config.idle {
            break;
        }
        if !poll_fds(
            &[(std::os::fd::AsFd::as_fd(&listener), Interest::READ)],
            Some(LOOK),
        )
        .is_ok_and(|ready| ready != 0)
        {
            continue;
        }
        loop {
            let fd = match unix::accept(&listener) {
                Ok(Some(fd)) => fd,
                Ok(None) => break,
                // Too few descriptors, mostly: some will be free again.
                Err(e) => {
                    tracing::warn!("cannot take a compilation: {e}");
                    thread::sleep(LOOK);
                    break;
                }
            };
            if !unix::peer_cred(&fd).is_ok_and(|cred| cred.is_same_user()) {
                continue;
            }
            idle_since = Instant::now();
            shared.clients.fetch_add(1, Ordering::SeqCst);
            if shared.employ(fd).is_err() {
                shared.clients.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
    if !shared.stop.load(Ordering::SeqCst) {
        let _ = std::fs::remove_file(&shared.config.socket);
    }
    // Those that it has already get their objects.
    let end = Instant::now() + shared.config.patience;
    while shared.clients.load(Ordering::SeqCst) > 0 && Instant::now() < end {
        thread::sleep(LOOK / 10);
    }
    let work = lock(&shared.work);
    shared.over.store(true, Ordering::SeqCst);
    shared.called.notify_all();
    drop(work);
    Ok(())
}

/// Of this process. To ask by umask(2) would change it for other threads.
fn umask() -> io::Result<u32> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let value = text.lines().find_map(|line| line.strip_prefix("Umask:"));
    let value = value.and_then(|value| u32::from_str_radix(value.trim(), 8).ok());
    value.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Leave to use this machine's processors.
struct Leave<'a>(&'a Shared);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).here -= 1;
        self.0.changed.notify_all();
    }
}

impl Shared {
    /// Waits for leave; `None`: the compilation has ended.
    fn leave(&self, line: &Line) -> Option<Leave<'_>> {
        let mut state = lock(&self.state);
        while state.here >= self.config.here {
            let waited = self.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if line.stirs() {
                return None;
            }
        }
        state.here += 1;
        Some(Leave(self))
    }

    fn note(&self, reason: &str) {
        let mut state = lock(&self.state);
        let known = state.reasons.contains_key(reason) || state.reasons.len() < MAX_REASONS;
        *state
            .reasons
            .entry(if known { reason } else { "other reasons" }.into())
            .or_default() += 1;
    }

    /// Seconds since the start.
    fn now(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Passes a compilation to a waiting thread, or to a new one: starting a thread for each would cost a tenth of the job's cost here.
    fn employ(self: &Arc<Self>, fd: OwnedFd) -> io::Result<()> {
        let mut work = lock(&self.work);
        if work.waiting > work.lines.len() {
            work.lines.push_back(fd);
            self.called.notify_one();
            return Ok(());
        }
        drop(work);
        let shared = Arc::clone(self);
        let thread = thread::Builder::new().name("weft-ccd-client".into());
        thread.spawn(move || shared.clients(fd))?;
        Ok(())
    }

    /// One compilation after the other, until none comes for a while.
    fn clients(&self, first: OwnedFd) {
        let nice = getpriority_process(None);
        let mut next = Some(first);
        while let Some(fd) = next {
            if let Err(e) = self.serve(&Line(fd)) {
                tracing::debug!("a compilation: {e}");
            }
            self.clients.fetch_sub(1, Ordering::SeqCst);
            // A thread that has become nicer for its command stays so.
            if getpriority_process(None) != nice {
                return;
            }
            let mut work = lock(&self.work);
            work.waiting += 1;
            let none = |work: &mut Work| work.lines.is_empty() && !self.over.load(Ordering::SeqCst);
            let waited = self.called.wait_timeout_while(work, WITHOUT_WORK, none);
            work = waited.unwrap_or_else(PoisonError::into_inner).0;
            work.waiting -= 1;
            next = work.lines.pop_front();
        }
    }

    fn serve(&self, line: &Line) -> io::Result<()> {
        let mut trail = history::CompileRecord::new(self);
        let done = self.answer(line, &mut trail);
        trail.left();
        done
    }

    fn answer<'a>(&'a self, line: &Line, trail: &mut history::CompileRecord<'a>) -> io::Result<()> {
        // The leave of a command that becomes a compiler, until it ends.
        let mut held = None;
        while let Some((bytes, fd)) = line.receive_bytes()? {
            drop(held.take());
            trail.left();
            if bytes.first() == Some(&0) {
                let launch = Launch::decode(&bytes).zip(fd);
                let (launch, stderr) = launch.ok_or(io::ErrorKind::InvalidData)?;
                let Some((next, leave)) = self.command(&launch, stderr, line, trail) else {
                    return Ok(());
                };
                held = leave;
                line.send_bytes(&next.encode(), &[])?;
                continue;
            }
            match serde_json::from_slice::<Ask>(&bytes)? {
                Ask::Job(job) => match self.job(&job, fd.as_ref(), line, trail) {
                    job::Outcome::Done {
                        outputs,
                        room,
                        worker,
                    } => {
                        line.send(
                            &Answer::Done { outputs, worker },
                            &[std::os::fd::AsFd::as_fd(&room)],
                        )?;
                    }
                    job::Outcome::Here(reason) | job::Outcome::Preprocess(reason) => {
                        self.note(&reason);
                        line.send(&Answer::Here(reason), &[])?;
                    }
                    job::Outcome::Cancelled => return Ok(()),
                },
                Ask::Status => line.send(&Answer::Status(Box::new(self.status())), &[])?,
                Ask::Past(from) => {
                    let (from, past) = lock(&self.state).history.page(from);
                    line.send(&Answer::Past { from, past }, &[])?;
                }
                Ask::Stop => {
                    // At once, so that another one can take its place.
                    let _ = std::fs::remove_file(&self.config.socket);
                    self.stop.store(true, Ordering::SeqCst);
                    line.send(&Answer::Go, &[])?;
                }
            }
        }
        Ok(())
    }

    fn status(&self) -> Status {
        let state = lock(&self.state);
        let mut reasons: Vec<_> = state
            .reasons
            .iter()
            .map(|(reason, &n)| (reason.clone(), n))
            .collect();
        reasons.sort_by_key(|&(_, n)| std::cmp::Reverse(n));
        let jobs = state.jobs.values().map(|job| JobStatus {
            source: job.source.clone(),
            worker: job.worker.clone(),
            age: job.since.elapsed().as_secs_f64(),
        });
        let mut status = Status {
            uptime: self.began.elapsed().as_secs_f64(),
            workers: state.pools.status(),
            jobs: jobs.collect(),
            here: state.here,
            done: state.done,
            again: state.again,
            verified: state.verified,
            reasons,
        };
        drop(state);
        status.fit();
        status
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    #[test]
    fn a_daemon_has_none_of_the_makes_files() {
        // Without CLOEXEC, as a make's pipes.
        let file = rustix::io::dup(std::io::stderr()).unwrap();
        let has = |keep: bool| {
            let mut command = std::process::Command::new("sh");
            command
                .arg("-c")
                .arg(format!("[ -e /proc/self/fd/{} ]", file.as_raw_fd()));
            if keep {
                super::keep_files(&mut command);
            }
            command.status().unwrap().success()
        };
        assert!(has(false));
        assert!(!has(true));
    }
}
