//! Programs: started, listened to, ended.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::libraries;
use crate::net::{hearing, listening};
use crate::table::Ran;

/// The time limit of a program; a busy machine is slow.
const LIMIT: Duration = Duration::from_secs(90);
/// The status of timeout(1) when it had to end the program.
const TIMED_OUT: i32 = 124;
/// The polling interval for changes that are not announced.
const LOOK: Duration = Duration::from_millis(3);

/// The environment in which programs run.
#[derive(Debug, Clone)]
pub struct Weft {
    env: Vec<(OsString, OsString)>,
    dir: Option<PathBuf>,
    limit: Duration,
}

impl Weft {
    /// With these devices (`WEFT_DEVICES`), in shared memory where possible; otherwise as `weft verbs` sets it.
    pub fn on(devices: &str) -> Self {
        Self::bare()
            .env("LD_LIBRARY_PATH", libraries())
            .env("LD_PRELOAD", libraries().join("libweft-sysfs.so"))
            .env("WEFT_SYSFS", libraries().with_file_name("sysfs"))
            .env("WEFT_DEVICES", devices)
    }

    /// Without weft.
    pub fn bare() -> Self {
        Self {
            env: Vec::new(),
            dir: None,
            limit: LIMIT,
        }
    }

    /// Always over TCP.
    #[must_use]
    pub fn over_tcp(self) -> Self {
        self.env("WEFT_LOCAL", "off")
    }

    /// With this environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    #[must_use]
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = Some(dir.into());
        self
    }

    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Starts a command line: words with blanks between them, the first is the program.
    ///
    /// # Panics
    /// When there is no such program.
    pub fn start(&self, line: &str) -> Running {
        self.start_words(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Starts a program with its arguments.
    ///
    /// # Panics
    /// When there is no such program.
    pub fn start_words(&self, words: &[&str]) -> Running {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let mark = mark();
        // timeout(1) ends it even if this process dies first.
        let mut command = Command::new("timeout");
        command
            .args(["-k", "2", &self.limit.as_secs().to_string()])
            .args(words)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env(MARK, &mark)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(writer.try_clone().expect("a descriptor"))
            .stderr(writer);
        // Files that a program leaves, such as the backtrace of a crash, must not be in the source.
        command.current_dir(self.dir.clone().unwrap_or_else(std::env::temp_dir));
        let child = command.spawn().expect("timeout(1)");
        // It holds the other end of the pipe.
        drop(command);
        let said = Arc::new(Said::default());
        let listener = std::thread::spawn({
            let said = Arc::clone(&said);
            move || {
                let mut reader = BufReader::new(reader);
                let mut line = Vec::new();
                while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                    said.text().push_str(&String::from_utf8_lossy(&line));
                    said.more.notify_all();
                    line.clear();
                }
            }
        });
        let mut shown = String::new();
        for (name, value) in &self.env {
            let _ = write!(shown, "{}={} ", name.display(), value.display());
        }
        shown.push_str(&words.join(" "));
        let value = |name: &str| {
            let set = self.env.iter().rev().find(|(set, _)| set == name);
            set.map(|(_, value)| value.to_string_lossy().into_owned())
        };
        Running {
            ran: Ran::of(words, &value),
            shown,
            mark,
            child,
            status: None,
            said,
            listener: Some(listener),
            end: Instant::now() + self.limit + Duration::from_secs(5),
        }
    }

    /// Runs a command line and waits for its end.
    ///
    /// # Panics
    /// When there is no such program, or it does not end.
    pub fn run(&self, line: &str) -> Done {
        self.start(line).end()
    }
}

/// Set in the environment of a program and of all processes that it starts.
const MARK: &str = "WEFT_TEST_PROGRAM";

/// A mark of one program, unique at this time.
fn mark() -> String {
    static PROGRAMS: AtomicU32 = AtomicU32::new(0);
    let number = PROGRAMS.fetch_add(1, Ordering::Relaxed);
    format!("{}.{number}", std::process::id())
}

/// All processes of the system.
fn processes() -> impl Iterator<Item = Pid> {
    let entries = std::fs::read_dir("/proc").expect("/proc");
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter_map(Pid::from_raw)
}

#[derive(Default)]
struct Said {
    text: Mutex<String>,
    more: Condvar,
}

impl Said {
    fn text(&self) -> MutexGuard<'_, String> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running program. Dropping this kills it and all processes that it started.
pub struct Running {
    ran: Option<Ran>,
    shown: String,
    mark: String,
    child: Child,
    status: Option<ExitStatus>,
    said: Arc<Said>,
    listener: Option<JoinHandle<()>>,
    end: Instant,
}

impl Running {
    /// Its output so far.
    pub fn text(&self) -> String {
        self.said.text().clone()
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        !self.ended()
    }

    /// Waits until it, or a process that it started, listens on a port.
    ///
    /// # Panics
    /// When it ends earlier.
    #[must_use]
    pub fn listens(self, port: u16) -> Self {
        self.until(|| listening(port), port)
    }

    /// Waits until `sockets` sockets have this UDP port.
    ///
    /// # Panics
    /// When it ends earlier.
    #[must_use]
    pub fn hears(self, port: u16, sockets: usize) -> Self {
        self.until(|| hearing(port) >= sockets, port)
    }

    fn until(mut self, there: impl Fn() -> bool, port: u16) -> Self {
        while !there() {
            assert!(
                !self.ended(),
                "`{}` ended and nobody listens on port {port}:\n{}",
                self.shown,
                self.text()
            );
            std::thread::sleep(LOOK);
        }
        self
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it does not end after it was killed.
    pub fn end(mut self) -> Done {
        while !self.ended() {
            std::thread::sleep(LOOK);
        }
        self.done()
    }

    /// Interrupts it as a user does with Ctrl-C; for servers that run for ever. Each process of the group gets the signal once: timeout(1) would forward its
    /// signal, and a program that gets a second one while it ends skips its final work.
    pub fn interrupt(self) -> Done {
        self.tell(Signal::INT)
    }

    /// Ends a server that ignores Ctrl-C, such as dnsmasq.
    pub fn terminate(self) -> Done {
        self.tell(Signal::TERM)
    }

    fn tell(self, signal: Signal) -> Done {
        for process in self.members() {
            let _ = kill_process(process, signal);
        }
        self.end()
    }

    /// The processes of its group, without timeout(1).
    fn members(&self) -> Vec<Pid> {
        let group = self.child.id();
        let is_member = |pid: &Pid| {
            let pid = pid.as_raw_nonzero().get().cast_unsigned();
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // State, parent and group follow the name, which can contain any bytes.
            let (_, rest) = stat.rsplit_once(')')?;
            Some(pid != group && rest.split_whitespace().nth(2)?.parse() == Ok(group))
        };
        processes()
            .filter(|pid| is_member(pid).unwrap_or(false))
            .collect()
    }

    /// Kills it and all processes that it started.
    pub fn kill(self) -> Done {
        self.signal(Signal::KILL);
        self.end()
    }

    /// Stops it and the processes that it started, until [`Running::go_on`].
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Ends a [`Running::pause`].
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills the processes that it started in other sessions, such as fio's jobs.
    fn kill_marked(&self) {
        let mark = format!("{MARK}={}", self.mark);
        let has_mark = |pid: &Pid| {
            let environment = std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero()));
            let environment = environment.unwrap_or_default();
            environment.split(|b| *b == 0).any(|e| e == mark.as_bytes())
        };
        for process in processes().filter(has_mark) {
            let _ = kill_process(process, Signal::KILL);
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, signal);
        }
    }

    /// True if it has ended.
    fn ended(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("a child of ours");
        }
        assert!(
            self.status.is_some() || Instant::now() < self.end,
            "`{}` does not end:\n{}",
            self.shown,
            self.text()
        );
        self.status.is_some()
    }

    fn done(mut self) -> Done {
        // A process that it left behind may hold the pipe.
        self.signal(Signal::KILL);
        self.kill_marked();
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
        Done {
            ran: self.ran.take(),
            shown: std::mem::take(&mut self.shown),
            status: self.status.expect("it has ended"),
            text: self.text(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        self.kill_marked();
        let _ = self.child.wait();
    }
}

/// A program that has ended.
#[derive(Debug, Clone)]
pub struct Done {
    /// Its entry in the table of docs/verbs-reference.md.
    ran: Option<Ran>,
    shown: String,
    status: ExitStatus,
    /// Its output, stdout and stderr interleaved.
    pub text: String,
}

impl Done {
    /// True if its exit status is 0.
    pub fn is_good(&self) -> bool {
        self.status.success()
    }

    /// Its exit status, or 128 plus the signal, as in shells.
    pub fn code(&self) -> i32 {
        self.status
            .code()
            .unwrap_or_else(|| 128 + self.status.signal().unwrap_or(0))
    }

    /// Checks that its exit status is 0.
    ///
    /// # Panics
    /// When it is not.
    #[track_caller]
    pub fn good(&self) -> &Self {
        assert!(self.is_good(), "{}", self.show());
        self.works()
    }

    /// Marks its work as done, whatever its exit status is: the table in docs/verbs-reference.md must say so.
    ///
    /// # Panics
    /// When it does not.
    #[track_caller]
    pub fn works(&self) -> &Self {
        if let Some(ran) = &self.ran {
            ran.note();
        }
        self
    }

    /// Checks that a line contains this text.
    ///
    /// # Panics
    /// When there is none.
    #[track_caller]
    pub fn says(&self, text: &str) -> &Self {
        assert!(self.text.contains(text), "no {text:?} in\n{}", self.show());
        self
    }

    /// Checks that no line contains this text.
    ///
    /// # Panics
    /// When there is one.
    #[track_caller]
    pub fn never_says(&self, text: &str) -> &Self {
        assert!(!self.text.contains(text), "{text:?} in\n{}", self.show());
        self
    }

    /// The lines that contain only numbers, such as perftest's results.
    pub fn table(&self) -> Vec<Vec<f64>> {
        let numbers = |line: &str| {
            let words = line.split_whitespace().map(str::parse);
            words.collect::<Result<Vec<f64>, _>>().ok()
        };
        let rows = self.text.lines().filter_map(numbers);
        rows.filter(|row| !row.is_empty()).collect()
    }

    /// Command line, end and output.
    pub fn show(&self) -> String {
        let end = match self.status.code() {
            Some(TIMED_OUT) => "did not end in time".to_owned(),
            _ => self.status.to_string(),
        };
        format!("`{}`: {end}\n{}", self.shown, self.text)
    }
}

/// Runs a server and, when it listens on `port`, a client, and waits until both have ended well.
///
/// # Panics
/// When one of them fails, with the output of both.
#[track_caller]
pub fn pair(weft: &Weft, port: u16, server: &str, client: &str) -> (Done, Done) {
    both_good(meet(weft, weft.start(server).listens(port), client))
}

/// As [`pair`], where the server listens for datagrams.
///
/// # Panics
/// When either fails.
pub fn datagram_pair(weft: &Weft, port: u16, server: &str, client: &str) -> (Done, Done) {
    both_good(meet(weft, weft.start(server).hears(port, 1), client))
}

fn meet(weft: &Weft, server: Running, client: &str) -> (Done, Done) {
    let client = weft.run(client);
    let server = if client.is_good() {
        server.end()
    } else {
        server.kill()
    };
    (server, client)
}

#[track_caller]
fn both_good((server, client): (Done, Done)) -> (Done, Done) {
    assert!(
        client.is_good() && server.is_good(),
        "client {}\nserver {}",
        client.show(),
        server.show()
    );
    server.works();
    client.works();
    (server, client)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::free_port;

    fn plain() -> Weft {
        Weft {
            env: Vec::new(),
            dir: None,
            limit: LIMIT,
        }
    }

    #[test]
    fn end_and_output_are_told() {
        let done = plain().start_words(&["sh", "-c", "echo one; echo two >&2; exit 7"]);
        let done = done.end();
        assert_eq!(done.code(), 7);
        done.says("one").says("two").never_says("three");
        assert!(done.show().contains("exit status: 7"), "{}", done.show());
        let done = plain().start_words(&["sh", "-c", "kill -SEGV $$"]).end();
        assert!(!done.is_good());
        assert!(done.show().contains("signal: 11"), "{}", done.show());
        assert_eq!(plain().env("A", "b").run("printenv A").good().text, "b\n");
    }

    #[test]
    fn tables_are_read() {
        let done =
            plain().start_words(&["printf", "-- \\n #bytes\\n 2  1000 3.5\\n\\n x 1\\n4\\n"]);
        assert_eq!(done.end().table(), [vec![2.0, 1000.0, 3.5], vec![4.0]]);
    }

    #[test]
    fn what_hangs_is_ended_with_its_children() {
        let short = plain().limit(Duration::from_secs(1));
        let done = short
            .start_words(&["sh", "-c", "sleep 60 & sleep 60"])
            .end();
        assert!(done.show().contains("did not end in time"));
        let running = plain().start_words(&["sh", "-c", "echo up; sleep 60 & sleep 60"]);
        drop(running);
    }

    #[test]
    #[should_panic(expected = "nobody listens")]
    fn a_server_that_dies_is_told_of() {
        let _ = plain().start("true").listens(free_port());
    }
}
