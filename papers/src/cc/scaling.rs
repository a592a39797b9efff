//! A number of virtual workers and a master on one processor: jobs a second, and their cost for the master.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::time::ClockId;
use nix::unistd::Pid;
use rustix::process::{WaitId, WaitIdOptions, waitid};
use serde_json::{Value, json};

use super::record::{Job, Recorded};
use super::systems::{Plan, Processors, Running, System};
use crate::error::{BenchError, Result, failed};
use crate::usage::{Whose, load_average, on_processor, told_cpu};

/// The measurements of one system with this number of workers. Times are the master's, in seconds.
pub(super) struct Point {
    pub(super) system: System,
    pub(super) workers: u16,
    /// Jobs a second, while there were enough of them.
    pub(super) rate: f64,
    /// Jobs whose CPU time was counted.
    pub(super) jobs: usize,
    /// CPU time of the commands, without what they start.
    pub(super) client: f64,
    /// CPU time of the processes that the commands and the daemon start: the preprocessor.
    pub(super) preprocess: f64,
    /// CPU time of the daemon.
    pub(super) daemon: f64,
    /// The share of the wall time in which these did not use the master's processor.
    pub(super) idle: f64,
    /// The share of the workers' time in which their compilers ran.
    pub(super) busy: f64,
    /// Jobs that fell back to another way than the system's own.
    pub(super) other: u64,
}

impl Point {
    /// CPU seconds for each job.
    pub(super) fn each(&self, cpu: f64) -> f64 {
        cpu / self.jobs.max(1) as f64
    }

    /// CPU seconds for each job, without the preprocessor.
    pub(super) fn own(&self) -> f64 {
        self.each(self.client + self.daemon)
    }

    pub(super) fn all(&self) -> f64 {
        self.each(self.client + self.daemon + self.preprocess)
    }

    /// Whether more than one job in ten fell back to another way than the system's own. The numbers then do not describe
    /// the system.
    pub(super) fn fell_back(&self) -> bool {
        10 * self.other > self.jobs as u64
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "bench": "cc", "figure": "5.10", "system": self.system.name(), "workers": self.workers, "jobs_per_s": self.rate, "jobs": self.jobs,
            "client_cpu_ms": self.each(self.client) * 1e3, "daemon_cpu_ms": self.each(self.daemon) * 1e3,
            "preprocess_cpu_ms": self.each(self.preprocess) * 1e3, "master_idle": self.idle, "workers_compile": self.busy,
            "other_way": self.other, "load": load_average(),
        })
    }
}

impl Point {
    /// Parses the output of [`Point::json`].
    pub(super) fn parse(line: &Value) -> Option<Self> {
        let number = |name: &str| line[name].as_f64();
        let jobs = line["jobs"].as_u64()? as usize;
        let all = |name: &str| Some(number(name)? / 1e3 * jobs.max(1) as f64);
        Some(Self {
            system: System::of(line)?,
            workers: line["workers"].as_u64()? as u16,
            rate: number("jobs_per_s")?,
            jobs,
            client: all("client_cpu_ms")?,
            preprocess: all("preprocess_cpu_ms")?,
            daemon: all("daemon_cpu_ms")?,
            idle: number("master_idle")?,
            busy: number("workers_compile")?,
            other: line["other_way"].as_u64()?,
        })
    }
}

/// CPU time of the children that this process has waited for, including their children.
fn waited_for() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)
        .map_err(|e| BenchError::system("ask for CPU time")(e.into()))?;
    let seconds =
        |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}

/// CPU time of another process, all its threads.
fn cpu_of(pid: Option<i32>) -> f64 {
    pid.and_then(|pid| ClockId::pid_cpu_clock_id(Pid::from_raw(pid)).ok())
        .and_then(|clock| clock.now().ok())
        .map_or(0.0, |time| {
            time.tv_sec() as f64 + time.tv_nsec() as f64 / 1e9
        })
}

/// Runs a command; the CPU time of its first thread, without its children's.
fn run(mut command: Command) -> Result<f64> {
    let mut child = command
        .stdin(Stdio::null())
        .spawn()
        .map_err(BenchError::system("start a compilation"))?;
    let pid = rustix::process::Pid::from_child(&child);
    while waitid(
        WaitId::Pid(pid),
        WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
    )
    .is_err_and(|e| e == rustix::io::Errno::INTR)
    {}
    // A zombie still has it.
    let own = on_processor(&PathBuf::from(format!("/proc/{}", child.id())));
    let status = child
        .wait()
        .map_err(BenchError::system("wait for a compilation"))?;
    if !status.success() {
        return Err(failed("a compilation", format!("{command:?}: {status}")));
    }
    own.map(|nanoseconds| nanoseconds as f64 / 1e9)
        .ok_or_else(|| BenchError::system("read schedstat")(std::io::ErrorKind::InvalidData.into()))
}

/// The result of a batch of jobs.
#[derive(Default)]
struct Batch {
    client: f64,
    compile: f64,
    ended: Vec<Instant>,
    failed: Option<BenchError>,
}

struct World<'a> {
    running: &'a Running,
    jobs: &'a [Job],
    tree: &'a Path,
    next: AtomicUsize,
}

impl World<'_> {
    fn one(&self, job: &Job, output: &Path) -> Result<f64> {
        let (program, before) = self
            .running
            .command
            .split_first()
            .ok_or_else(|| BenchError::Usage("no command".into()))?;
        let log = || {
            let file = fs::File::options()
                .create(true)
                .append(true)
                .open(output.with_extension("log"));
            file.map_err(BenchError::system("write what compilers say"))
        };
        let mut command = Command::new(program);
        command
            .args(before)
            .args(&job.args)
            .arg("-o")
            .arg(output)
            .current_dir(self.tree.join(&job.dir))
            .envs(self.running.env.iter().map(|(name, value)| (name, value)))
            .stdout(log()?)
            .stderr(log()?);
        run(command)
    }

    /// Runs jobs, `at_once` in parallel, until `enough` returns true for the number of started jobs; compares their
    /// objects if `check`.
    fn batch(
        &self,
        at_once: usize,
        check: bool,
        enough: impl Fn(usize) -> bool + Sync,
    ) -> Result<Batch> {
        let (batch, begun) = (Mutex::new(Batch::default()), AtomicUsize::new(0));
        let work = |thread: usize| -> Result<()> {
            let output = self.tree.join(format!(".weft-bench-{thread}.o"));
            while !enough(begun.fetch_add(1, Ordering::SeqCst)) {
                let index = self.next.fetch_add(1, Ordering::SeqCst) % self.jobs.len();
                let job = &self.jobs[index];
                let own = self.one(job, &output)?;
                let read = |file| fs::read(file).map_err(BenchError::system("read an object"));
                if check && read(&output)? != read(&job.object)? {
                    return Err(BenchError::Contents(0));
                }
                let mut batch = batch.lock().unwrap_or_else(PoisonError::into_inner);
                batch.client += own;
                batch.compile += job.compile;
                batch.ended.push(Instant::now());
                if batch.failed.is_some() {
                    break;
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            for thread in 0..at_once {
                let (work, batch) = (&work, &batch);
                scope.spawn(move || {
                    if let Err(e) = work(thread) {
                        let mut batch = batch.lock().unwrap_or_else(PoisonError::into_inner);
                        batch.failed.get_or_insert(e);
                    }
                });
            }
        });
        let batch = batch.into_inner().unwrap_or_else(PoisonError::into_inner);
        match batch.failed {
            Some(e) => Err(e),
            None => Ok(batch),
        }
    }
}

/// Measures one point, after jobs that are not counted: connections, headers that workers keep, caches.
pub(super) fn measure(
    system: System,
    workers: u16,
    recorded: &Recorded,
    tree: &Path,
    folder: &Path,
    processors: Processors,
    seconds: f64,
) -> Result<Point> {
    let plan = Plan {
        folder,
        stand_in: Some(&recorded.stand_in),
        count: workers,
        processors: Some(processors),
    };
    let running = Running::start(system, &plan)?;
    processors.as_master()?;
    let world = World {
        running: &running,
        jobs: &recorded.jobs,
        tree,
        next: AtomicUsize::new(0),
    };
    // The number that distcc's manual recommends: some jobs wait while others compile.
    let at_once = 2 * usize::from(workers);
    let first = if system == System::Pull || system == System::Pump {
        4 * at_once
    } else {
        at_once
    };
    world.batch(at_once, true, |begun| begun >= first)?;
    // The preprocessor is a child of the command or of the daemon.
    let started = || -> Result<(f64, f64)> {
        {
            let of_daemon = running.daemon.and_then(|pid| u32::try_from(pid).ok());
            let told = of_daemon.map_or(0.0, |pid| told_cpu(pid, Whose::Children));
            Ok((waited_for()?, told))
        }
    };
    let (before, daemon) = (started()?, cpu_of(running.daemon));
    let had = running.other_way();
    let began = Instant::now();
    let end = began + Duration::from_secs_f64(seconds);
    let batch = world.batch(at_once, false, |_| Instant::now() >= end)?;
    let wall = began.elapsed().as_secs_f64();
    let after = started()?;
    let total = after.0 - before.0 + after.1 - before.1;
    let daemon = cpu_of(running.daemon) - daemon;
    let in_time = batch.ended.iter().filter(|at| **at <= end).count();
    let rate = in_time as f64 / seconds;
    let jobs = batch.ended.len();
    Ok(Point {
        system,
        workers,
        rate,
        jobs,
        client: batch.client,
        preprocess: (total - batch.client).max(0.0),
        daemon,
        idle: (1.0 - (total + daemon) / wall).clamp(0.0, 1.0),
        busy: batch.compile / jobs.max(1) as f64 * rate / f64::from(workers),
        other: running.other_way().saturating_sub(had),
    })
}

/// Seconds of a make with this system and two workers on this machine that really compile.
pub(super) fn build(system: System, tree: &Path, make: &[String], folder: &Path) -> Result<f64> {
    let plan = Plan {
        folder,
        stand_in: None,
        count: 2,
        processors: None,
    };
    let running = Running::start(system, &plan)?;
    let command: Vec<_> = running
        .command
        .iter()
        .map(|word| word.to_string_lossy())
        .collect();
    let env: Vec<(OsString, OsString)> = running.env.clone();
    let began = Instant::now();
    super::make(tree, make, &command.join(" "), 4, &env)?;
    Ok(began.elapsed().as_secs_f64())
}

/// A copy of a tree.
pub(super) fn copy(from: &Path, to: PathBuf) -> Result<PathBuf> {
    let done = Command::new("cp")
        .arg("-a")
        .arg(from)
        .arg(&to)
        .status()
        .map_err(BenchError::system("copy the tree"))?;
    if done.success() {
        Ok(to)
    } else {
        Err(BenchError::Usage(format!("cannot copy {}", from.display())))
    }
}
