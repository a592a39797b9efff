//! A Linux guest with the kernel's siw driver and its tools, driven command by command.
//!
//! `tests/siw-vm/siw-vm` boots it under qemu. Its script connects back to us, runs each line that we send, and sends back
//! what it prints. When our side of that connection closes, the guest powers off. A second connection has a shell of its own: it says what a command that
//! does not end waits for, and kills it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest that a guest lives; emulated on a busy machine it is slow.
const LIFE: Duration = Duration::from_mins(30);
/// For a command that does nothing.
const STEP: Duration = Duration::from_mins(1);
/// Before the number and the status of a command that has ended.
const MARK: &str = "@@end";
/// The host's loopback, seen from the guest.
pub const HOST: &str = "10.0.2.2";
/// The guest's address, seen from itself.
pub const GUEST: &str = "10.0.2.15";

/// Print past the test harness, which swallows what passing tests print: a skipped test says why, and a test against
/// a peer what it saw.
pub fn say(text: &str) {
    // In one piece: tests run side by side.
    let _ = io::stderr().write_all(format!("interop: {text}\n").as_bytes());
}

fn tool() -> Command {
    let mut tool = Command::new("bash");
    tool.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../siw-vm/siw-vm"));
    tool
}

/// The guest's folder, as `siw-vm` chooses it.
pub fn folder() -> PathBuf {
    let var = |name| std::env::var_os(name).map(PathBuf::from);
    var("SIW_VM_DIR").unwrap_or_else(|| {
        let cache = var("XDG_CACHE_HOME")
            .or_else(|| var("HOME").map(|home| home.join(".cache")))
            .unwrap_or_else(|| "/root/.cache".into());
        cache.join("weft/siw-vm")
    })
}

/// Why there can be no guest here, or nothing.
fn hindrance() -> Option<String> {
    let set = |name| std::env::var(name).is_ok_and(|value| value == "1");
    if set("WEFT_NO_VM") {
        return Some("WEFT_NO_VM is set".into());
    }
    let what = if set("WEFT_NO_INSTALL") {
        "check"
    } else {
        "build"
    };
    match tool().arg(what).output() {
        Err(error) => Some(format!("cannot run siw-vm: {error}")),
        Ok(output) if output.status.success() => None,
        Ok(output) => {
            let text = [output.stdout, output.stderr].concat();
            let text = String::from_utf8_lossy(&text);
            Some(text.lines().last().unwrap_or("siw-vm failed").to_owned())
        }
    }
}

/// What a command did.
#[derive(Debug)]
pub struct Output {
    pub status: i32,
    /// What it printed, and the commands in the background meanwhile.
    pub text: String,
}

/// A shell in the guest that runs the lines that we send.
struct Shell {
    control: TcpStream,
    received: Receiver<String>,
    commands: u32,
}

/// Why a command has no end, and what it printed.
struct Unfinished {
    why: RecvTimeoutError,
    text: String,
}

impl Shell {
    fn accept(door: &TcpListener) -> Shell {
        let (control, _) = door.accept().expect("the guest's call");
        let answers = control.try_clone().expect("a descriptor");
        let (lines, received) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(answers).lines().map_while(Result::ok) {
                if lines.send(line).is_err() {
                    break;
                }
            }
        });
        Shell {
            control,
            received,
            commands: 0,
        }
    }

    fn start(&mut self, line: &str) -> Running {
        self.commands += 1;
        writeln!(self.control, "{line}").expect("the guest listens");
        Running {
            number: self.commands,
            line: line.to_owned(),
        }
    }

    fn finish(&self, running: &Running, limit: Duration) -> Result<Output, Unfinished> {
        let end = Instant::now() + limit;
        let mark = format!("{MARK} {} ", running.number);
        let mut text = String::new();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.received.recv_timeout(left) {
                Ok(line) => {
                    // A line of a command in the background may have begun before the mark.
                    if let Some((before, status)) = line.split_once(&mark) {
                        text.push_str(before);
                        let status = status.trim().parse().unwrap_or(-1);
                        return Ok(Output { status, text });
                    }
                    let _ = writeln!(text, "{line}");
                }
                Err(why) => return Err(Unfinished { why, text }),
            }
        }
    }
}

pub struct Guest {
    child: Child,
    shell: Shell,
    /// For looking at what [`Guest::shell`] runs.
    side: Shell,
    console: Option<JoinHandle<String>>,
}

impl Guest {
    /// Boot it, with these `(host port, guest port)` forwarded, and wait until it takes commands.
    ///
    /// # Errors
    /// Why there is none: that a guest cannot be had here. A guest that does not come up is a panic, not a reason to
    /// skip.
    ///
    /// # Panics
    /// When it does not boot.
    pub fn boot(forwards: &[(u16, u16)]) -> Result<Guest, String> {
        let forwards = forwards
            .iter()
            .flat_map(|(host, guest)| ["-p".to_owned(), format!("{host}:{guest}")]);
        Guest::boot_with("127.0.0.1", forwards.collect())
    }

    /// As [`Guest::boot`], on this tap device, which has the address [`HOST`].
    ///
    /// # Errors
    /// As for [`Guest::boot`].
    ///
    /// # Panics
    /// As for [`Guest::boot`].
    pub fn boot_on(tap: &str) -> Result<Guest, String> {
        Guest::boot_with(HOST, vec!["-i".to_owned(), tap.to_owned()])
    }

    /// `ours` is the address that the guest sees as [`HOST`].
    fn boot_with(ours: &str, options: Vec<String>) -> Result<Guest, String> {
        if let Some(why) = hindrance() {
            return Err(why);
        }
        let begun = Instant::now();
        let doors = [(); 2].map(|()| TcpListener::bind((ours, 0)).expect("a listening socket"));
        let addrs = [&doors[0], &doors[1]].map(|door| door.local_addr().expect("its address"));
        let script = tempfile::NamedTempFile::new().expect("a temporary file");
        // On a busy machine the guest's question for our hardware address has no answer in time, and a connection would not be tried again.
        let first = if ours == HOST {
            format!("until ping -c 1 -W 2 {HOST} >/dev/null 2>&1; do sleep 1; done\n")
        } else {
            String::new()
        };
        let text = format!(
            "shell() {{ mkfifo /tmp/$1-lines /tmp/$1-answers; n=0\n\
             while read -r line; do\n\
             n=$((n+1)); eval \"$line\" </dev/null; echo \"{MARK} $n $?\"\n\
             done </tmp/$1-lines >/tmp/$1-answers 2>&1 &\n\
             echo $! >/tmp/$1-pid\n\
             nc {HOST} $2 >/tmp/$1-lines </tmp/$1-answers; }}\n\
             cat >/tmp/stuck.sh <<'END'\n{}END\n\
             {}shell side {} & shell main {}\n",
            include_str!("stuck.sh"),
            first,
            addrs[1].port(),
            addrs[0].port(),
        );
        std::fs::write(script.path(), text).expect("a written script");
        let mut run = tool();
        run.arg("run").args(options);
        run.args(["-t", &LIFE.as_secs().to_string()])
            .arg(script.path());
        let mut child = run
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("siw-vm runs");
        let console = child.stdout.take().expect("its console");
        let console = std::thread::spawn(move || {
            let text = io::read_to_string(console).unwrap_or_default();
            // The guest is gone: if it never called, end the wait for its calls.
            for addr in addrs {
                let _ = TcpStream::connect(addr);
            }
            text
        });
        let [shell, side] = [&doors[0], &doors[1]].map(Shell::accept);
        let mut guest = Guest {
            child,
            shell,
            side,
            console: Some(console),
        };
        let answer = guest.run("true", STEP);
        assert!(answer.status == 0, "the guest takes no commands");
        drop(script);
        say(&format!("the guest is up after {:.1?}", begun.elapsed()));
        Ok(guest)
    }

    /// Send a command line without waiting for its end.
    pub fn start(&mut self, line: &str) -> Running {
        self.shell.start(line)
    }

    /// Wait for the end of a command, `limit` at most.
    ///
    /// # Panics
    /// When it does not end in time, or the guest dies. What it waited for is said, and everything that the shell has started is killed, so that the next
    /// command can run.
    pub fn finish(&mut self, running: &Running, limit: Duration) -> Output {
        let Unfinished { why, text } = match self.shell.finish(running, limit) {
            Ok(output) => return output,
            Err(unfinished) => unfinished,
        };
        let line = &running.line;
        match why {
            RecvTimeoutError::Timeout => panic!(
                "no end of `{line}` in {limit:?}; so far:\n{text}\nits threads:\n{}",
                self.kill_and_tell(running)
            ),
            RecvTimeoutError::Disconnected => panic!(
                "the guest died in `{line}`:\n{text}\nits console:\n{}",
                self.end()
            ),
        }
    }

    /// Kills what the shell has started; returns what each thread of it waited for.
    fn kill_and_tell(&mut self, running: &Running) -> String {
        let look = self.side.start("sh /tmp/stuck.sh $(cat /tmp/main-pid)");
        let mut told = match self.side.finish(&look, STEP) {
            Ok(output) => output.text,
            Err(unfinished) => unfinished.text + "the guest does not say more",
        };
        if self.shell.finish(running, STEP).is_err() {
            told += "It cannot be killed.";
        }
        told
    }

    /// Run a command line: `limit` at most, then it is killed.
    ///
    /// # Panics
    /// When the guest does not answer or dies.
    pub fn run(&mut self, line: &str, limit: Duration) -> Output {
        let running = self.start(line);
        self.finish(&running, limit)
    }

    /// As [`Guest::run`], for commands that must succeed.
    ///
    /// # Panics
    /// When the command fails.
    pub fn must(&mut self, line: &str, limit: Duration) -> String {
        let output = self.run(line, limit);
        assert_eq!(output.status, 0, "`{line}` failed:\n{}", output.text);
        output.text
    }

    /// Copy a file of ours to this place in the guest.
    ///
    /// # Panics
    /// When the file cannot be read, or has not come over within `limit`.
    pub fn put(&mut self, file: &Path, to: &str, limit: Duration) {
        let bytes = std::fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        // On a tap device the guest calls this address; else its emulator calls loopback for it.
        let door = TcpListener::bind((HOST, 0)).or_else(|_| TcpListener::bind("127.0.0.1:0"));
        let door = door.expect("a listening socket");
        let port = door.local_addr().expect("its address").port();
        let running = self.start(&format!(
            "nc {HOST} {port} >{to} && [ $(wc -c <{to}) = {} ]",
            bytes.len()
        ));
        std::thread::spawn(move || {
            let (mut taker, _) = door.accept().expect("the guest's call");
            let _ = taker.write_all(&bytes);
        });
        let output = self.finish(&running, limit);
        assert_eq!(output.status, 0, "{}: {}", file.display(), output.text);
    }
}

impl Guest {
    /// Copy programs and libraries of ours to their own places in the guest, with the libraries that they are linked with.
    ///
    /// # Panics
    /// When a file cannot be read, or they have not come over within `limit`.
    pub fn put_linked(&mut self, files: &[PathBuf], limit: Duration) {
        let linked = Command::new("ldd").args(files).output().expect("ldd");
        let linked = String::from_utf8_lossy(&linked.stdout).into_owned();
        let mut all: BTreeSet<_> = files.iter().map(PathBuf::as_path).collect();
        all.extend(linked.lines().filter_map(|line| {
            // `NAME => PATH (ADDRESS)`, the dynamic loader without a name.
            let path = line.split_once("=> ").map_or(line, |(_, path)| path);
            let path = Path::new(path.trim().split(' ').next()?);
            (path.is_absolute() && path.is_file()).then_some(path)
        }));
        let archive = tempfile::NamedTempFile::new().expect("a temporary file");
        let mut tar = Command::new("tar");
        tar.args(["--dereference", "--hard-dereference", "-cPf"])
            .arg(archive.path())
            .args(all);
        let packed = tar.output().expect("tar");
        let why = String::from_utf8_lossy(&packed.stderr);
        assert!(packed.status.success(), "tar: {why}");
        self.put(archive.path(), "/tmp/linked.tar", limit);
        let unpack = "tar -xf /tmp/linked.tar -C / && rm /tmp/linked.tar";
        self.must(unpack, limit);
    }

    /// Have it power off; returns its console.
    fn end(&mut self) -> String {
        for shell in [&self.side, &self.shell] {
            let _ = shell.control.shutdown(Shutdown::Both);
        }
        let _ = self.child.wait();
        let console = self.console.take().map(JoinHandle::join);
        console.and_then(Result::ok).unwrap_or_default()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.end();
    }
}

/// A command that the guest runs.
pub struct Running {
    number: u32,
    line: String,
}
