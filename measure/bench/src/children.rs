//! Programs that suites start on this host: they end with their handles.

use crate::error::{BenchError, Result};
use crate::usage;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use weft_report::programs;

/// A process that does not outlive its handle.
pub struct Running(pub Child);

impl Running {
    pub fn start(command: &mut Command, what: &'static str) -> Result<Self> {
        let child = command.spawn();
        child.map(Self).map_err(BenchError::system(what))
    }

    /// The first line of its output, or an empty string. The rest of the output is read and discarded.
    pub fn first_line(&mut self) -> String {
        let mut line = String::new();
        if let Some(out) = self.0.stdout.take() {
            let mut out = BufReader::new(out);
            let _ = out.read_line(&mut line);
            std::thread::spawn(move || io::copy(&mut out, &mut io::sink()));
        }
        line.trim_end().to_owned()
    }
}

/// The machine's load, with the loops that run beside a measurement as long as this lives.
pub struct Load {
    _loops: Vec<Running>,
    /// In words, for reports.
    pub text: String,
}

impl Load {
    pub fn start(loops: u32, nice: i32) -> Result<Self> {
        let mut before = usage::load_average();
        if let Some(notice) = weft_report::crowding() {
            before = format!("{before} ({notice})");
        }
        let start = |_| {
            let mut command = Command::new("nice");
            command.args(["-n", &nice.to_string(), "sh", "-c", "while :; do :; done"]);
            Running::start(
                weft_sys::process::end_with_us(&mut command),
                "start a busy loop",
            )
        };
        let running: Vec<Running> = (0..loops).map(start).collect::<Result<_>>()?;
        let text = match loops {
            0 => before,
            n => format!("{before}, and beside it {n} busy loops of niceness {nice}"),
        };
        Ok(Self {
            _loops: running,
            text,
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that is spoken to in JSON lines over its standard input and output.
pub struct Talk {
    to: BufWriter<ChildStdin>,
    from: BufReader<ChildStdout>,
    _child: Running,
}

impl Talk {
    /// Starts it through `spawn`, for example in another namespace.
    pub fn start(
        command: &mut Command,
        spawn: impl FnOnce(&mut Command) -> io::Result<Child>,
    ) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = spawn(command).map_err(BenchError::system("start the peer process"))?;
        let mut child = Running(child);
        let (Some(to), Some(from)) = (child.0.stdin.take(), child.0.stdout.take()) else {
            return Err(BenchError::PeerGone("no pipes".to_owned()));
        };
        Ok(Self {
            to: BufWriter::new(to),
            from: BufReader::new(from),
            _child: child,
        })
    }

    pub fn say(&mut self, message: &impl Serialize) -> Result<()> {
        write_line(&mut self.to, message)
    }

    pub fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        let line = read_line(&mut self.from)?;
        line.ok_or_else(|| BenchError::PeerGone("it ended".to_owned()))
    }
}

pub fn write_line(to: &mut impl Write, message: &impl Serialize) -> Result<()> {
    serde_json::to_writer(&mut *to, message)
        .map_err(io::Error::from)
        .and_then(|()| to.write_all(b"\n"))
        .and_then(|()| to.flush())
        .map_err(|error| BenchError::PeerGone(error.to_string()))
}

/// The message in the next line; `None` at the end.
pub fn read_line<T: DeserializeOwned>(from: &mut impl BufRead) -> Result<Option<T>> {
    let gone = |error: io::Error| BenchError::PeerGone(error.to_string());
    let mut line = String::new();
    if from.read_line(&mut line).map_err(gone)? == 0 {
        return Ok(None);
    }
    serde_json::from_str(&line).map_err(|error| gone(error.into()))
}

/// The file of this program.
pub fn this_program() -> Result<PathBuf> {
    std::env::current_exe().map_err(BenchError::system("find this program's file"))
}

/// The program `weft`, which brings its libraries, servers and subcommands.
pub fn weft() -> Result<PathBuf> {
    programs::of_weft("weft").ok_or_else(|| {
        BenchError::Usage("weft is neither beside this program nor on PATH".to_owned())
    })
}

/// The file of a program: on the path, or where Debian keeps servers.
pub fn find(name: &str) -> Option<PathBuf> {
    let more = ["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from);
    let folders = programs::on_path().into_iter().chain(more);
    programs::search(name.as_ref(), folders, programs::is_program).ok()
}

/// A port without a listener at the moment. It will most likely still be free when the program that gets it binds it.
pub fn free_port() -> Result<u16> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr());
    port.map(|addr| addr.port())
        .map_err(BenchError::system("find a free port"))
}

/// Whether a process listens on the port, or has a UDP socket there. The check does not connect: some servers serve one client and
/// exit.
pub fn listening(port: u16) -> bool {
    let local = format!(":{port:04X}");
    // 0A: the state LISTEN; 07: that of a UDP socket that is not connected.
    let tables = [("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")];
    tables.iter().any(|(table, state)| {
        let file = Path::new("/proc/net").join(table);
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().any(|line| {
            let mut words = line.split_whitespace().skip(1);
            let is_port = |addr: Option<&str>| addr.is_some_and(|addr| addr.ends_with(&local));
            let (here, there) = (is_port(words.next()), is_port(words.next()));
            let now = words.next();
            // 01: a connected socket.
            here && now == Some(*state) || there && now == Some("01") && table.starts_with("udp")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_seen_without_being_connected_to() {
        let socket = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        assert!(listening(port));
        let near = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        assert!(!listening(near.local_addr().unwrap().port()));
        drop((socket, near));
        assert!(!listening(port));
        let sender = std::net::UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        sender.connect(("127.0.0.1", port)).unwrap();
        assert!(listening(port));
        drop(sender);
        assert!(!listening(port));
    }
}
