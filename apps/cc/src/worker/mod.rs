//! The worker: accepts jobs of masters, one at a time on each connection, and drives them (fig. 5.9 of the thesis).

mod compile;
mod folder;
mod job;
mod pull;
mod remove;
pub mod sandbox;
mod session;
mod view;
mod watch;

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use weft_service::Entry;
use weft_session::acceptor::{self, Acceptor, LOOK};
use weft_verbs::Device;
use weft_verbs::any::cm;
use weft_verbs::tls::{PublicKey, Tls};

use crate::compiler_package::{Cache, Installed};
use crate::digest::{Digest, Digests};
use crate::lock;
use crate::options::{Family, Language};
use crate::wire::{End, PROTOCOL, Report, Verdict};

/// The keys that are admitted, in addition to processes of the worker's own user on its host.
pub type Admit = Arc<dyn Fn(&PublicKey) -> bool + Send + Sync>;

#[derive(Clone)]
pub struct Config {
    /// Address and port; port 0 takes a free one.
    pub bind: SocketAddr,
    /// Compilers at once.
    pub slots: u16,
    pub max_connections: usize,
    /// A compiler that takes longer is killed.
    pub time_limit: Duration,
    /// Bytes of memory that each process of a compiler may have, and all processes of a sent compiler together.
    pub memory: u64,
    /// Bytes that a source, or the outputs of a job, may have.
    pub size_limit: u64,
    /// The folder of the jobs' directories; a tmpfs is best.
    pub place: PathBuf,
    /// The key pair that masters know the worker by.
    pub tls: Tls,
    /// Connections are neither encrypted nor authenticated: masters show no keys. Beyond loopback only with `open`.
    pub plain: bool,
    /// The keys that are admitted.
    pub admit: Admit,
    /// Everybody is let in. Only with Landlock.
    pub open: bool,
    /// Also without Landlock masters of other users are let in: their sources can include any file that the worker's user can read.
    pub files_unprotected: bool,
    /// Compilers of masters are run here too. Not with `open`.
    pub accept: Option<Accept>,
    /// For measurements: a program that is run instead of each compiler, and can read the files in its folder.
    pub stand_in: Option<PathBuf>,
}

impl Config {
    /// On this address, with as many slots as there are processors, for this user alone.
    pub fn new(bind: SocketAddr, tls: Tls) -> Self {
        let slots = u16::try_from(weft_sys::cpu_count()).unwrap_or(u16::MAX);
        Self {
            bind,
            slots,
            max_connections: 256,
            time_limit: Duration::from_mins(10),
            memory: u64::MAX,
            size_limit: 1 << 30,
            place: place(),
            tls,
            plain: false,
            admit: Arc::new(|_| false),
            open: false,
            files_unprotected: false,
            accept: None,
            stand_in: None,
        }
    }

    /// Whether strangers could do harm, where compilers have these restrictions.
    fn check(&self, level: sandbox::Level) -> Result<(), Unsafe> {
        if self.accept.is_some() && self.open {
            return Err(Unsafe::CompilersOfStrangers);
        }
        let is_loopback = self.bind.ip().to_canonical().is_loopback();
        if self.plain && !self.open && !is_loopback {
            return Err(Unsafe::Plain);
        }
        if self.accept.is_some() && !level.is_complete() {
            return Err(Unsafe::Sandbox(level));
        }
        if level.files != sandbox::Files::Free {
            return Ok(());
        }
        if self.open {
            return Err(Unsafe::FilesOfStrangers);
        }
        if !self.files_unprotected && !is_loopback {
            return Err(Unsafe::Files);
        }
        Ok(())
    }

    /// What connections are encrypted with.
    fn encryption(&self) -> Option<Tls> {
        (!self.plain).then(|| self.tls.clone())
    }

    /// Whether a master with this key is let in, where compilers have these restrictions.
    fn admits(&self, key: &PublicKey, level: sandbox::Level) -> bool {
        let protected = level.files != sandbox::Files::Free || self.files_unprotected;
        protected && (self.admit)(key)
    }
}

/// Why a worker is not started with its configuration.
#[derive(Debug, thiserror::Error)]
pub enum Unsafe {
    /// Both were asked for.
    #[error("compilers are taken only of masters that are known")]
    CompilersOfStrangers,
    /// What the kernel has.
    #[error(
        "compilers of masters run only in a complete sandbox: Landlock as of Linux 6.12 (files, truncation, signals) and seccomp; this kernel has {0}"
    )]
    Sandbox(sandbox::Level),
    /// Nobody could be let in.
    #[error(
        "without encryption no master can show its key, and the address can be reached from other machines"
    )]
    Plain,
    /// Everybody would be let in.
    #[error("without Landlock a source can include any file that this user can read")]
    FilesOfStrangers,
    /// Masters of other hosts would be.
    #[error(
        "without Landlock the sources of masters of other hosts can include any file that this user can read"
    )]
    Files,
}

/// The default folder of the jobs' directories: in memory if there is room, else the folder of temporary files.
pub fn place() -> PathBuf {
    let memory = Path::new("/dev/shm");
    let roomy = rustix::fs::statvfs(memory)
        .is_ok_and(|about| about.f_bavail.saturating_mul(about.f_frsize) >= 256 << 20);
    if roomy && tempfile::tempfile_in(memory).is_ok() {
        memory.into()
    } else {
        std::env::temp_dir()
    }
}

/// A compiler that jobs can have.
struct Environment {
    /// The beginning of its command.
    command: Vec<OsString>,
    digest: Digest,
    /// Its folder, if it is not one of the system's.
    tools: Option<PathBuf>,
    family: Family,
    /// It came from a master, and stays while this is there.
    sent: Option<Arc<Installed>>,
}

impl Environment {
    /// The files that it may access in a job.
    fn place(&self, shop: &compile::JobDir, view: Option<&Path>) -> sandbox::Place {
        sandbox::Place {
            dir: shop.path().to_owned(),
            view: view.map(Path::to_owned),
            tools: self.tools.clone(),
            alone: self.sent.is_some(),
        }
    }

    fn sent(digest: Digest, kept: Arc<Installed>) -> Self {
        Self {
            command: kept.command.clone(),
            digest,
            tools: Some(kept.dir.clone()),
            family: kept.family,
            sent: Some(kept),
        }
    }
}

/// Masters may send compilers, which are kept.
#[derive(Clone, Debug)]
pub struct Accept {
    /// Where; each worker makes a folder of its own there.
    pub folder: PathBuf,
    /// Bytes of all of them.
    pub most: u64,
}

struct Shared {
    config: Config,
    folder: folder::Folder,
    digests: Digests,
    compilers: Option<Cache>,
    store: Mutex<pull::Store>,
    /// The restrictions that the kernel supported at the start. A job with fewer does not run.
    level: sandbox::Level,
    drivers: Mutex<HashMap<String, Option<PathBuf>>>,
    running: Arc<AtomicUsize>,
    acceptor: Acceptor,
    jobs: AtomicU64,
    sent_compilers: AtomicU64,
}

/// A running worker. Dropping it ends its connections and jobs.
pub struct Worker {
    shared: Arc<Shared>,
    addr: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Listens, and works from threads of its own.
    ///
    /// # Errors
    /// [`Unsafe`], and those of listening and of starting threads.
    pub fn start(config: Config) -> io::Result<Self> {
        Self::start_with(config, sandbox::level())
    }

    fn start_with(config: Config, level: sandbox::Level) -> io::Result<Self> {
        config.check(level).map_err(io::Error::other)?;
        let compilers = config
            .accept
            .as_ref()
            .map(|accept| {
                Cache::open(&accept.folder, accept.most).map_err(|e| {
                    io::Error::new(e.kind(), format!("{}: {e}", accept.folder.display()))
                })
            })
            .transpose()?;
        let folder = folder::Folder::new(&config.place)
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", config.place.display())))?;
        let device = Device::open().map_err(io::Error::other)?.into();
        let listener = cm::Listener::bind(
            &device,
            config.bind,
            64,
            &PROTOCOL.param(config.encryption(), Vec::new()),
        )?;
        let addr = listener.local_addr();
        let acceptor = Acceptor::new(PROTOCOL, config.max_connections, "too many connections");
        let shared = Arc::new(Shared {
            config,
            folder,
            digests: Digests::default(),
            compilers,
            store: Mutex::default(),
            level,
            drivers: Mutex::default(),
            running: Arc::default(),
            acceptor,
            jobs: AtomicU64::new(0),
            sent_compilers: AtomicU64::new(0),
        });
        // One cycle of the thread of a connection is one job.
        let thread = Acceptor::listen(&shared, listener, "weft-cc")?;
        Ok(Self {
            shared,
            addr,
            thread: Some(thread),
        })
    }

    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Jobs whose outputs were delivered.
    pub fn jobs(&self) -> u64 {
        self.shared.jobs.load(Ordering::SeqCst)
    }

    /// Compilers that masters sent, and that were installed.
    pub fn sent_compilers(&self) -> u64 {
        self.shared.sent_compilers.load(Ordering::SeqCst)
    }

    /// Compilers that run now.
    pub fn running(&self) -> usize {
        self.shared.running.load(Ordering::SeqCst)
    }

    /// Works for ever.
    pub fn wait(mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.acceptor.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.shared.acceptor.join();
    }
}

/// Hundredths of a percent of the last ten seconds in which something waited for a processor; 0 where the kernel does not say.
pub(crate) fn pressure() -> u16 {
    (weft_sys::cpu_pressure().unwrap_or(0.0) * 100.0).clamp(0.0, 10_000.0) as u16
}

impl acceptor::Server for Shared {
    fn acceptor(&self) -> &Acceptor {
        &self.acceptor
    }

    fn judge(&self, request: &cm::Request) -> Result<bool, String> {
        if self.config.open {
            return Ok(true);
        }
        acceptor::judge(request.soft(), |key| self.config.admits(key, self.level))
    }

    fn session(&self, request: cm::Request, entry: Entry, peer: SocketAddr) -> Result<(), String> {
        let refusal = Report::End(End::new(0, Verdict::Refused, "stranger")).encode();
        let (tls, slots) = (self.config.encryption(), self.config.slots);
        let accepted = self.acceptor.accept(tls, (request, entry), slots, &refusal);
        let (link, _place) = accepted?;
        let why = session::Session::new(self, link, peer).run();
        tracing::info!("{peer}: gone: {why}");
        Ok(())
    }
}

impl Shared {
    fn over(&self) -> bool {
        self.acceptor.is_closed()
    }

    /// The kernel's limits for the processes of a job.
    fn limits(&self, compiler: &Environment) -> compile::Limits {
        compile::Limits {
            memory: self.config.memory,
            size: self.config.size_limit,
            processes: (compiler.sent.is_some() && self.level.spaces).then_some(watch::PROCESSES),
        }
    }

    /// Bytes of a job's files that are read into memory here. A few copies of them exist at a time, which together are to be no more than
    /// a process of the job may have.
    fn room(&self) -> u64 {
        self.config.size_limit.min(self.config.memory / 4)
    }

    fn free(&self) -> u16 {
        let running = self.running.load(Ordering::SeqCst);
        usize::from(self.config.slots).saturating_sub(running) as u16
    }

    /// Our own compiler of this name, and its digest.
    fn environment(&self, driver: &str, language: Language) -> Result<Environment, String> {
        let Some(family) = Family::of(driver) else {
            return Err(format!("`{driver}` is no compiler that workers start"));
        };
        let path = {
            let mut drivers = lock(&self.drivers);
            // Names come from masters.
            if drivers.len() > 256 {
                drivers.clear();
            }
            let path = std::env::var_os("PATH").unwrap_or_else(|| crate::PATH.into());
            let not = crate::client::not_compilers(None);
            drivers
                .entry(driver.into())
                .or_insert_with(|| crate::find_in(path, driver, &not))
                .clone()
        };
        let Some(path) = path else {
            lock(&self.drivers).remove(driver);
            return Err(format!("there is no `{driver}` here"));
        };
        let digest = self.digests.of(&path, language, crate::PATH)?;
        let stand_in = self.config.stand_in.as_ref();
        Ok(Environment {
            command: vec![stand_in.unwrap_or(&path).into()],
            digest,
            family,
            sent: None,
            tools: stand_in.and_then(|path| path.parent().map(Path::to_owned)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandbox::{Files, Level};
    use weft_verbs::tls::Identity;

    fn config() -> Config {
        let tls = Tls::new(Identity::generate().unwrap()).unwrap();
        Config::new("127.0.0.1:0".parse().unwrap(), tls)
    }

    /// With all but this version of Landlock.
    fn level(abi: u32) -> Level {
        Level {
            files: Files::of(abi),
            calls: true,
            spaces: true,
        }
    }

    fn start(config: Config, level: Level) -> Result<(), String> {
        let worker = Worker::start_with(config, level);
        worker.map(drop).map_err(|e| e.to_string())
    }

    #[test]
    fn compilers_are_accepted_only_with_the_sixth_landlock() {
        let folder = tempfile::tempdir().unwrap();
        for abi in 0..9 {
            let config = Config {
                accept: Some(Accept {
                    folder: folder.path().into(),
                    most: 1 << 30,
                }),
                ..config()
            };
            let started = start(config, level(abi));
            assert_eq!(started.is_ok(), abi >= 6, "{abi}: {started:?}");
            let of_the_sandbox = |why: &String| why.contains("complete sandbox");
            assert!(started.as_ref().err().is_none_or(of_the_sandbox));
        }
    }

    #[test]
    fn a_plain_worker_beyond_this_machine_is_open_or_none() {
        for (bind, open, good) in [
            ("127.0.0.1:0", false, true),
            ("[::1]:0", false, true),
            ("0.0.0.0:0", false, false),
            ("[::]:0", false, false),
            ("0.0.0.0:0", true, true),
        ] {
            let config = Config {
                bind: bind.parse().unwrap(),
                open,
                plain: true,
                ..config()
            };
            let started = start(config, level(9));
            assert_eq!(started.is_ok(), good, "{bind} {open}: {started:?}");
            let of_keys = |why: &String| why.contains("can show its key");
            assert!(started.as_ref().err().is_none_or(of_keys));
        }
        // Nor does it take compilers of strangers.
        let folder = tempfile::tempdir().unwrap();
        let config = Config {
            open: true,
            plain: true,
            accept: Some(Accept {
                folder: folder.path().into(),
                most: 1 << 30,
            }),
            ..config()
        };
        assert!(
            start(config, level(9))
                .unwrap_err()
                .contains("masters that are known")
        );
    }

    #[test]
    fn without_landlock_only_the_own_user_is_served_unless_told_otherwise() {
        let key = Identity::generate().unwrap().public_key();
        let ways = |abi, files_unprotected| {
            let known = Config {
                admit: Arc::new(|_| true),
                files_unprotected,
                ..config()
            };
            let admitted = known.admits(&key, level(abi));
            let far = Config {
                bind: "0.0.0.0:0".parse().unwrap(),
                ..known.clone()
            };
            let open = Config {
                open: true,
                ..config()
            };
            let far = start(far, level(abi)).is_ok();
            (admitted, far, start(open, level(abi)).is_ok())
        };
        assert_eq!(ways(1, false), (true, true, true));
        assert_eq!(ways(0, false), (false, false, false));
        assert_eq!(ways(0, true), (true, true, false));
        start(config(), level(0)).unwrap();
    }
}
