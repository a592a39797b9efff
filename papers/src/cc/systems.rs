//! The compared distributed compilers: their workers, and the master's way of calling them.

use std::ffi::OsString;
use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::ValueEnum;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use weft_cc::find_program;
use weft_cc::ipc::{Answer, Ask, Line, Status};

use crate::children::{self, free_port, this_program};
use crate::error::{BenchError, Result};
use crate::patience::until;

/// A distributed compiler, and where its files are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum System {
    /// distcc, sources and objects on disk
    TcpDisk,
    /// distcc, sources and objects in memory
    TcpMemory,
    /// distcc-pump, in memory: workers preprocess, with headers that are sent along
    Pump,
    /// weft cc over TCP with TLS, in memory
    Rdma,
    /// The same with the daemon, which does the RDMA, on the workers' processors
    RdmaCore,
    /// weft cc --pull: workers preprocess, with headers that they read
    Pull,
}

impl System {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::TcpDisk => "distcc, disk",
            Self::TcpMemory => "distcc, memory",
            Self::Pump => "distcc-pump",
            Self::Rdma => "weft cc",
            Self::RdmaCore => "weft cc, RDMA elsewhere",
            Self::Pull => "weft cc --pull",
        }
    }

    /// The system of a result.
    pub(super) fn of(line: &serde_json::Value) -> Option<Self> {
        let mut all = Self::value_variants().iter().copied();
        all.find(|system| line["system"] == system.name())
    }

    pub(super) fn is_weft(self) -> bool {
        matches!(self, Self::Rdma | Self::RdmaCore | Self::Pull)
    }

    /// The systems whose programs are installed.
    pub(super) fn installed() -> Vec<Self> {
        let there = |name: &str| {
            let found = find_program(name).is_some();
            if !found {
                eprintln!("{name} is not installed here: its columns will be missing");
            }
            found
        };
        let distcc = there("distcc") && there("distccd");
        let pump = distcc && (pump() == PUMP[0] || there(PUMP[1]));
        let all = Self::value_variants().iter().copied();
        all.filter(|system| match system {
            Self::TcpDisk | Self::TcpMemory => distcc,
            Self::Pump => pump,
            _ => true,
        })
        .collect()
    }
}

/// Debian's name of pump, and its own.
const PUMP: [&str; 2] = ["distcc-pump", "pump"];

fn pump() -> &'static str {
    PUMP.into_iter()
        .find(|name| find_program(name).is_some())
        .unwrap_or(PUMP[1])
}

/// The processors of the master, and of all others.
#[derive(Clone, Copy)]
pub(super) struct Processors {
    master: CpuSet,
    others: CpuSet,
}

impl Processors {
    /// The first processor that this process may use, and the rest; one for both if there is only one.
    pub(super) fn find() -> Result<Self> {
        let failed = |e: nix::Error| BenchError::system("ask for processors")(e.into());
        let all = nix::sched::sched_getaffinity(Pid::from_raw(0)).map_err(failed)?;
        let mut numbers = (0..CpuSet::count()).filter(|&n| all.is_set(n).unwrap_or(false));
        let (mut master, mut others) = (CpuSet::new(), CpuSet::new());
        let first = numbers.next().unwrap_or(0);
        master.set(first).map_err(failed)?;
        others.set(first).map_err(failed)?;
        for (count, n) in numbers.enumerate() {
            others.set(n).map_err(failed)?;
            if count == 0 {
                others.unset(first).map_err(failed)?;
            }
        }
        Ok(Self { master, others })
    }

    /// Moves this thread, and the processes that it starts, to the master's processor.
    pub(super) fn as_master(&self) -> Result<()> {
        pin(&self.master)
    }

    fn as_others(&self) -> Result<()> {
        pin(&self.others)
    }
}

fn pin(set: &CpuSet) -> Result<()> {
    sched_setaffinity(Pid::from_raw(0), set)
        .map_err(|e| BenchError::system("choose a processor")(e.into()))
}

/// The parameters for starting a system.
pub(super) struct Plan<'a> {
    /// A folder that everybody can read.
    pub(super) folder: &'a Path,
    /// The program that workers run in place of compilers.
    pub(super) stand_in: Option<&'a Path>,
    /// Workers.
    pub(super) count: u16,
    /// The processors to run on; `None`: any.
    pub(super) processors: Option<Processors>,
}

/// The running workers and other processes of a system. They end when this is dropped.
pub(super) struct Running {
    pub(super) system: System,
    /// The command in front of `gcc`.
    pub(super) command: Vec<OsString>,
    /// The environment of the command.
    pub(super) env: Vec<(OsString, OsString)>,
    /// The daemon of the master, if the system has one.
    pub(super) daemon: Option<i32>,
    socket: Option<PathBuf>,
    /// The file of distcc's log.
    log: PathBuf,
    children: Vec<children::Running>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.system == System::Pump {
            let envs = self.env.iter().map(|(name, value)| (name, value));
            let _ = Command::new(pump()).arg("--shutdown").envs(envs).output();
        }
    }
}

impl Running {
    /// Starts all processes, and waits until they answer.
    pub(super) fn start(system: System, plan: &Plan<'_>) -> Result<Self> {
        let mut running = Self {
            system,
            command: Vec::new(),
            env: Vec::new(),
            daemon: None,
            socket: None,
            log: plan.folder.join("distcc/log"),
            children: Vec::new(),
        };
        if let Some(processors) = &plan.processors {
            processors.as_others()?;
        }
        if system.is_weft() {
            running.start_weft(plan)?;
        } else {
            running.start_distcc(plan)?;
        }
        Ok(running)
    }

    fn set(&mut self, name: &str, value: impl Into<OsString>) {
        self.env.push((name.into(), value.into()));
    }

    fn start_weft(&mut self, plan: &Plan<'_>) -> Result<()> {
        let program = this_program()?;
        let mut workers = Command::new(&program);
        workers
            .args(["cc-part", "workers", "--count"])
            .arg(plan.count.to_string())
            .env("WEFT_LOCAL", "off")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(path) = plan.stand_in {
            workers.arg("--stand-in").arg(path);
        }
        let mut workers = children::Running::start(&mut workers, "start workers")?;
        let ports = workers.first_line();
        self.children.push(workers);
        let hosts: Vec<_> = ports
            .split_whitespace()
            .map(|port| format!("127.0.0.1:{port}"))
            .collect();
        if hosts.len() != usize::from(plan.count) {
            return Err(BenchError::PeerGone("the workers did not start".into()));
        }
        if let Some(processors) = plan
            .processors
            .as_ref()
            .filter(|_| self.system != System::RdmaCore)
        {
            processors.as_master()?;
        }
        let socket = plan.folder.join("socket");
        let _ = fs::remove_file(&socket);
        let mut daemon = Command::new(&program);
        daemon
            .args(["cc-part", "daemon", "--socket"])
            .arg(&socket)
            .env("WEFT_LOCAL", "off")
            .stdin(Stdio::null());
        let daemon = children::Running::start(&mut daemon, "start the daemon")?;
        self.daemon = i32::try_from(daemon.0.id()).ok();
        self.children.push(daemon);
        until("the daemon", || Line::connect(&socket).is_ok())?;
        self.set("WEFT_CC_HOSTS", hosts.join(","));
        self.set("WEFT_CC_SOCKET", &socket);
        let pull = if self.system == System::Pull {
            "1"
        } else {
            "0"
        };
        self.set("WEFT_CC_PULL", pull);
        self.socket = Some(socket);
        let launcher = weft_cc::client::write_launcher(plan.folder)
            .map_err(BenchError::system("write weft-cc"))?;
        self.command = vec![launcher.into(), "gcc".into()];
        Ok(())
    }

    fn start_distcc(&mut self, plan: &Plan<'_>) -> Result<()> {
        let state = plan.folder.join("distcc");
        let temporary = if self.system == System::TcpDisk {
            std::env::temp_dir()
        } else {
            PathBuf::from("/dev/shm")
        };
        let _ = fs::remove_dir_all(&state);
        fs::create_dir(&state).map_err(BenchError::system("make a folder"))?;
        let mut path = OsString::new();
        if let Some(dir) = plan.stand_in.and_then(Path::parent) {
            path.push(dir);
            path.push(":");
        }
        path.push("/usr/local/bin:/usr/bin:/bin");
        let mut hosts = Vec::new();
        for _ in 0..plan.count {
            let port = free_port()?;
            let options = "--no-detach --daemon --listen 127.0.0.1 --allow 127.0.0.1 --jobs 1 --log-level error --log-stderr --port";
            let mut worker = Command::new("distccd");
            worker
                .args(options.split(' '))
                .arg(port.to_string())
                .env("PATH", &path)
                .env("TMPDIR", "/dev/shm")
                .stdin(Stdio::null())
                .stderr(Stdio::null());
            let worker = children::Running::start(&mut worker, "start distccd")?;
            self.children.push(worker);
            until("distccd", || {
                TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
            })?;
            // Two for each, so that one waits at the worker while the other is compiled.
            let more = if self.system == System::Pump {
                ",cpp,lzo"
            } else {
                ""
            };
            hosts.push(format!("127.0.0.1:{port}/2{more}"));
        }
        self.set("DISTCC_HOSTS", hosts.join(" "));
        self.set("DISTCC_DIR", &state);
        self.set("DISTCC_LOG", self.log.clone());
        self.set("TMPDIR", temporary);
        // Otherwise distcc asks workers for gcc by its full name, but their stand-in has the short name.
        self.set("DISTCC_NO_REWRITE_CROSS", "1");
        // A job that is not sent out is an error, so that no job is compiled here unnoticed.
        self.set("DISTCC_FALLBACK", "0");
        if self.system == System::Pump {
            self.start_pump(plan)?;
        }
        self.command = vec!["distcc".into(), "gcc".into()];
        Ok(())
    }

    /// The include server is one of the master's processes.
    fn start_pump(&mut self, plan: &Plan<'_>) -> Result<()> {
        if let Some(processors) = &plan.processors {
            processors.as_master()?;
        }
        let envs = self.env.iter().map(|(name, value)| (name, value));
        let told = Command::new(pump())
            .arg("--startup")
            .envs(envs)
            .stderr(Stdio::null())
            .output()
            .map_err(BenchError::system("start distcc-pump"))?;
        let told = String::from_utf8_lossy(&told.stdout).into_owned();
        let mut set = 0;
        for (name, value) in told
            .lines()
            .filter_map(|line| line.strip_prefix("export "))
            .filter_map(|line| line.split_once('='))
        {
            let value = value.trim_matches(['\'', '"']);
            if name == "INCLUDE_SERVER_PID" {
                self.daemon = value.parse().ok();
            }
            set += usize::from(name.starts_with("INCLUDE_SERVER"));
            if name != "PATH" {
                self.set(name, value);
            }
        }
        if set == 0 {
            return Err(BenchError::PeerGone(format!("pump --startup said: {told}")));
        }
        Ok(())
    }

    /// Jobs until now that fell back to another way than the system's own: `weft cc` counts them, and pump logs that it
    /// preprocesses itself.
    pub(super) fn other_way(&self) -> u64 {
        if self.system == System::Pump {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            return log.matches("preprocessing locally").count() as u64;
        }
        let status = self.status();
        status.map_or(0, |status| status.reasons.iter().map(|(_, n)| n).sum())
    }

    /// The status of the daemon of `weft cc`.
    fn status(&self) -> Option<Status> {
        let line = Line::connect(self.socket.as_deref()?).ok()?;
        match line.ask(&Ask::Status, &[]).ok()?.0 {
            Answer::Status(status) => Some(*status),
            _ => None,
        }
    }
}
