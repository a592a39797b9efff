//! The environment of the programs: a folder, ports, servers that end with their guard, and clients under a time
//! limit.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::children::{listening, this_program, weft};
use crate::error::{BenchError, Result, failed};
use crate::usage::process_cpu;

/// Seconds that a client may take beyond its own measurement.
const LIMIT: u32 = 60;
/// The time within which a server must listen.
const PATIENCE: Duration = Duration::from_secs(30);

/// The transport of a measured connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stack {
    /// Both sides without weft.
    Plain,
    /// Both sides under `weft run`.
    Weft,
    /// The client under `weft run`, the server without it.
    OneSide,
    /// Both sides without weft, over the program's own Unix socket.
    Unix,
}

impl Stack {
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain TCP",
            Self::Weft => "weft run",
            Self::OneSide => "weft run, one side",
            Self::Unix => "Unix socket",
        }
    }

    /// The name in records.
    pub fn short(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Weft => "weft-run",
            Self::OneSide => "weft-run-one-side",
            Self::Unix => "unix",
        }
    }

    fn client_has_weft(self) -> bool {
        matches!(self, Self::Weft | Self::OneSide)
    }

    fn server_has_weft(self) -> bool {
        self == Self::Weft
    }
}

/// Another user than root, for servers that refuse to be root's.
#[derive(Clone, Copy, Debug)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
}

/// The folder and this program.
pub struct World {
    dir: tempfile::TempDir,
    weft: PathBuf,
    /// This program, whose parts are peers.
    this: PathBuf,
    lib: Option<PathBuf>,
    pub seconds: u32,
}

/// The output of a client, and the number of its connections that went over to shared memory.
pub struct Said {
    pub text: String,
    pub over: u32,
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The number of connections that programs report as switched, including those of their children.
fn switched(text: &str) -> u32 {
    let counts = text.lines().filter_map(|line| {
        let (before, _) = line.split_once(" went over to shared memory")?;
        before.rsplit(' ').next()?.parse::<u32>().ok()
    });
    counts.sum()
}

impl World {
    pub fn new(lib: Option<&Path>, seconds: u32) -> Result<Self> {
        let dir = tempfile::tempdir().map_err(BenchError::system("make a folder"))?;
        // Servers that run as another user go through it.
        rustix::fs::chmod(dir.path(), rustix::fs::Mode::from_raw_mode(0o755))
            .map_err(|e| BenchError::system("open the folder to other users")(e.into()))?;
        let world = Self {
            dir,
            weft: weft()?,
            this: this_program()?,
            lib: lib.map(Path::to_owned),
            seconds,
        };
        // An error that would fail every measurement is reported now.
        world.finish(world.command(true, &["true"]), None)?;
        Ok(world)
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A new folder inside.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let dir = self.dir.path().join(name);
        fs::create_dir_all(&dir).map_err(BenchError::system("make a folder"))?;
        Ok(dir)
    }

    /// The command line of one of our peers: `weft-bench run-part WORDS`.
    pub fn part(&self, words: &str) -> String {
        format!("{} run-part {words}", self.this.display())
    }

    fn command(&self, has_weft: bool, words: &[&str]) -> Vec<std::ffi::OsString> {
        let mut line = Vec::new();
        if has_weft {
            line.push(self.weft.clone().into_os_string());
            line.extend(["run", "--explain"].map(Into::into));
            if let Some(lib) = &self.lib {
                line.extend(["--lib".into(), lib.clone().into_os_string()]);
            }
            line.push("--".into());
        }
        line.extend(words.iter().map(Into::into));
        line
    }

    fn spawn(
        line: &[std::ffi::OsString],
        user: Option<User>,
        log: Option<&Path>,
    ) -> Result<Command> {
        let (first, rest) = line
            .split_first()
            .ok_or_else(|| failed("start", "nothing"))?;
        let mut command = Command::new(first);
        command.args(rest).stdin(Stdio::null());
        // The parts that the user's environment would change.
        command.env_remove("LD_PRELOAD").env("LC_ALL", "C.UTF-8");
        for name in ["PGHOST", "PGPORT", "PGUSER", "PGDATABASE", "PGSSLMODE"] {
            command.env_remove(name);
        }
        if let Some(user) = user {
            command.uid(user.uid).gid(user.gid);
        }
        if let Some(log) = log {
            let file = fs::File::create(log).map_err(BenchError::system("make a log"))?;
            let again = file.try_clone().map_err(BenchError::system("make a log"))?;
            command.stdout(file).stderr(again);
        }
        Ok(command)
    }

    /// Runs a client to its end. Words are separated by spaces.
    pub fn client(&self, stack: Stack, words: &str, user: Option<User>) -> Result<Said> {
        let words: Vec<&str> = words.split_whitespace().collect();
        self.finish(self.command(stack.client_has_weft(), &words), user)
    }

    /// Runs a client to its end, and passes on each line of its output at once.
    pub fn watch(
        &self,
        stack: Stack,
        words: &str,
        user: Option<User>,
        mut line: impl FnMut(&str),
    ) -> Result<()> {
        let words: Vec<&str> = words.split_whitespace().collect();
        let mut command = self.limited(self.command(stack.client_has_weft(), &words), user)?;
        let (reader, writer) = std::io::pipe().map_err(BenchError::system("make a pipe"))?;
        let again = writer.try_clone();
        command
            .stdout(writer)
            .stderr(again.map_err(BenchError::system("make a pipe"))?);
        let child = command.spawn();
        let mut child = child.map_err(BenchError::system("start timeout(1)"))?;
        // `command` holds this process's copies of the pipe until it is dropped.
        drop(command);
        let mut last = String::new();
        for text in BufReader::new(reader)
            .split(b'\n')
            .map_while(io::Result::ok)
        {
            last = String::from_utf8_lossy(&text).into_owned();
            line(&last);
        }
        let status = child.wait();
        let status = status.map_err(BenchError::system("wait for a client"))?;
        if status.success() {
            return Ok(());
        }
        Err(failed("run a client", format!("{status}: {last}")))
    }

    /// Runs a helper without weft to its end.
    pub fn plainly(&self, words: &str, user: Option<User>) -> Result<Said> {
        self.client(Stack::Plain, words, user)
    }

    /// A client that ends in time.
    fn limited(&self, line: Vec<std::ffi::OsString>, user: Option<User>) -> Result<Command> {
        let limit = (LIMIT + self.seconds).to_string();
        let mut limited: Vec<std::ffi::OsString> =
            ["timeout", "-k", "5", &limit].map(Into::into).to_vec();
        limited.extend(line);
        let mut command = Self::spawn(&limited, user, None)?;
        command.current_dir(self.dir());
        Ok(command)
    }

    fn finish(&self, line: Vec<std::ffi::OsString>, user: Option<User>) -> Result<Said> {
        let output = self
            .limited(line, user)?
            .output()
            .map_err(BenchError::system("start timeout(1)"))?;
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            let all = format!("{text}\n{errors}");
            // The output of `--explain` follows the program's own output.
            let ours = |line: &&str| line.starts_with("weft run:") || line.starts_with("  ");
            let last = all
                .lines()
                .rfind(|line| !line.trim().is_empty() && !ours(line));
            let why = format!("{}: {}", output.status, last.unwrap_or("it says nothing"));
            return Err(failed("run a client", why));
        }
        let over = switched(&errors);
        text.push_str(&errors);
        Ok(Said { text, over })
    }

    /// Starts a server, and waits until it listens.
    pub fn server(
        &self,
        stack: Stack,
        words: &str,
        port: u16,
        user: Option<User>,
    ) -> Result<Server> {
        let words: Vec<&str> = words.split_whitespace().collect();
        let line = self.command(stack.server_has_weft(), &words);
        let log = self.dir().join(format!("log-{port}"));
        let child = Self::spawn(&line, user, Some(&log))?
            .current_dir(self.dir())
            .process_group(0)
            .spawn()
            .map_err(BenchError::system("start a server"))?;
        let mut server = Server { child };
        let began = Instant::now();
        while !listening(port) {
            let ended = server.child.try_wait().ok().flatten();
            if ended.is_some() || began.elapsed() > PATIENCE {
                let said = fs::read_to_string(&log).unwrap_or_default();
                let last = said.lines().rfind(|line| !line.trim().is_empty());
                return Err(failed("start a server", last.unwrap_or("it says nothing")));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }
}

/// A server; it ends with this.
pub struct Server {
    child: Child,
}

impl Server {
    fn pid(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }
}

/// Seconds of CPU that a process and its children have used so far, those that have ended not counted.
pub fn tree_cpu(pid: u32) -> f64 {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    let all = children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok());
    all.chain([pid]).map(process_cpu).sum()
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(pid) = self.pid() else { return };
        // For Postgres, INT means a fast and orderly shutdown; the others end by it too.
        let _ = kill_process(pid, Signal::INT);
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(5) {
            if self.child.try_wait().ok().flatten().is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // Kills the rest of its group.
        let _ = kill_process_group(pid, Signal::KILL);
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_went_over_are_counted() {
        let text = "weft run: process 7: 3 TCP connections seen, 2 went over to shared memory, 0 came back\n  127.0.0.1\n\
                    weft run: process 8: 1 TCP connections seen, 1 went over to shared memory, 0 came back";
        assert_eq!(switched(text), 3);
        assert_eq!(switched("nothing"), 0);
    }
}
