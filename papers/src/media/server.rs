//! The compared servers, each a separate process, and the resources that they use.

use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use weft_sys::process::end_with_us;

use super::rtp;
use crate::children::{Running, find, free_port, this_program, weft};
use crate::error::{BenchError, Result};
use crate::named::named;
use crate::usage::{self, Whose};

/// The movie's name.
pub(super) const NAME: &str = "movie.mp4";
const START: Duration = Duration::from_secs(20);

named! {
    /// A server.
    pub enum Kind {
        /// `weft media serve`, viewers of the same host in shared memory: they copy for themselves, as an RNIC would
        Local = "weft-local",
        /// `weft media serve` over TCP, in the clear, as HTTP is
        Tcp = "weft-tcp",
        /// `weft media serve` over TCP by TLS 1.3
        Tls = "weft-tls",
        /// nginx with sendfile, one worker
        Sendfile = "nginx-sendfile",
        /// nginx with read and write, one worker
        ReadWrite = "nginx-rw",
        /// A plain HTTP server in Rust: a thread for each connection, read and write
        Plain = "http-rust",
        /// VLC's video on demand: RTP over UDP
        Vlc = "vlc-rtp",
    }
}

impl Kind {
    pub(super) fn is_weft(self) -> bool {
        matches!(self, Self::Local | Self::Tcp | Self::Tls)
    }

    /// All servers; nginx and VLC only if they are installed.
    pub(super) fn installed() -> Vec<Self> {
        let (nginx, vlc) = (find("nginx").is_some(), rtp::is_installed());
        if !nginx {
            eprintln!("nginx is not installed here: its lines will be missing");
        }
        if !vlc {
            eprintln!("VLC and ffmpeg are not both installed here: RTP's line will be missing");
        }
        let all = Self::value_variants().iter().copied();
        all.filter(|kind| match kind {
            Self::Sendfile | Self::ReadWrite => nginx,
            Self::Vlc => vlc,
            _ => true,
        })
        .collect()
    }
}

/// The resources that a process has used so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    /// Seconds of CPU.
    pub(super) cpu: f64,
    /// Context switches, of both kinds.
    pub(super) switches: u64,
}

/// A running server, killed on drop.
pub(super) struct Served {
    pub(super) kind: Kind,
    pub(super) addr: SocketAddr,
    child: Running,
    _config: Option<Config>,
}

/// nginx's folder, removed on drop.
struct Config(std::path::PathBuf);

impl Drop for Config {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The address in the first line of the output of one of our servers.
pub(super) fn listens_at(line: &str) -> Result<SocketAddr> {
    let addr = line.strip_prefix("listening on ");
    addr.and_then(|rest| rest.split(',').next()?.parse().ok())
        .ok_or_else(|| BenchError::PeerGone(format!("the server said: {line}")))
}

impl Served {
    /// Starts it before the files of `dir`, and waits until it answers. VLC's rate is that of its movie.
    pub(super) fn start(kind: Kind, dir: &Path, rate: f64) -> Result<Self> {
        if kind == Kind::Vlc {
            let (child, addr) = rtp::start(dir, rate)?;
            let served = Self {
                kind,
                addr,
                child,
                _config: None,
            };
            served.wait(|| rtp::answers(addr), || "VLC has no movie".into())?;
            return Ok(served);
        }
        if !kind.is_weft() && kind != Kind::Plain {
            return Self::start_nginx(kind, dir);
        }
        let is_plain = kind == Kind::Plain;
        let mut command = Command::new(if is_plain { this_program()? } else { weft()? });
        if is_plain {
            command.arg("media-http").arg(dir.join(NAME));
        } else {
            command.args(["media", "serve", "--open", "--bind", "127.0.0.1:0"]);
            if kind != Kind::Tls {
                command.arg("--plain");
            }
            // Its viewers choose whether they use shared memory.
            command.arg(dir);
        }
        end_with_us(&mut command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = Running::start(&mut command, "start a server")?;
        Ok(Self {
            kind,
            addr: listens_at(&child.first_line())?,
            child,
            _config: None,
        })
    }

    fn start_nginx(kind: Kind, dir: &Path) -> Result<Self> {
        let program = find("nginx").ok_or_else(|| {
            BenchError::Usage(
                "nginx is not installed: apt-get install nginx-light, or leave it out of --server"
                    .into(),
            )
        })?;
        let system = BenchError::system("write nginx's settings");
        let port = free_port()?;
        let folder = dir.join(format!("nginx-{port}"));
        let on = if kind == Kind::Sendfile { "on" } else { "off" };
        let text = format!(
            "daemon off; master_process off; worker_processes 1; pid {f}/pid; error_log {f}/error;\nworker_rlimit_nofile 8192;\n\
             events {{ worker_connections 4096; }}\nhttp {{ access_log off; sendfile {on}; tcp_nopush on; keepalive_requests 1000000; keepalive_timeout 600; send_timeout 600;\n\
             client_body_temp_path {f}/a; proxy_temp_path {f}/b; fastcgi_temp_path {f}/c; uwsgi_temp_path {f}/d; scgi_temp_path {f}/e;\n\
             server {{ listen 127.0.0.1:{port} backlog=4096; root {}; }} }}\n",
            dir.display(),
            f = folder.display()
        );
        fs::create_dir(&folder)
            .and_then(|()| fs::write(folder.join("conf"), text))
            .map_err(system)?;
        let config = Config(folder.clone());
        let mut command = Command::new(program);
        end_with_us(&mut command)
            .arg("-c")
            .arg(folder.join("conf"))
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        let served = Self {
            kind,
            addr: (Ipv4Addr::LOCALHOST, port).into(),
            child: Running::start(&mut command, "start nginx")?,
            _config: Some(config),
        };
        let said = || fs::read_to_string(folder.join("error")).unwrap_or_default();
        served.wait(|| TcpStream::connect(served.addr).is_ok(), said)?;
        Ok(served)
    }

    /// Waits until the server answers; otherwise fails with its output.
    fn wait(&self, answers: impl Fn() -> bool, said: impl Fn() -> String) -> Result<()> {
        let began = Instant::now();
        while !answers() {
            if began.elapsed() > START {
                let name = self.kind.name();
                let text = format!("{name} does not answer: {}", said());
                return Err(BenchError::PeerGone(text));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The resources used so far. The kernel forgets the switches of threads that have ended, and reports their CPU time only
    /// in hundredths of a second. That affects servers whose threads come and go.
    pub(super) fn usage(&self) -> Result<Usage> {
        let process = format!("/proc/{}", self.child.0.id());
        let read = || -> std::io::Result<Usage> {
            let mut usage = Usage {
                cpu: usage::process_cpu(self.child.0.id()),
                switches: 0,
            };
            for task in fs::read_dir(format!("{process}/task"))? {
                let task = task?.path();
                // A thread may end meanwhile.
                let text = fs::read_to_string(task.join("status")).unwrap_or_default();
                usage.switches += text
                    .lines()
                    .filter_map(|l| l.split_once("voluntary_ctxt_switches:"))
                    .filter_map(|(_, n)| n.trim().parse::<u64>().ok())
                    .sum::<u64>();
            }
            if matches!(self.kind, Kind::Plain | Kind::Vlc) {
                usage.cpu = usage::told_cpu(self.child.0.id(), Whose::Its);
            }
            Ok(usage)
        };
        read().map_err(BenchError::system("read what a server has used"))
    }
}

/// The plain HTTP server: `GET` of one file, with a range, a thread for each connection. For ever.
///
/// # Errors
/// [`BenchError::System`] when it cannot listen.
pub(crate) fn serve_plain_http(file: &Path) -> Result<()> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(BenchError::system("listen"))?;
    let addr = listener
        .local_addr()
        .map_err(BenchError::system("listen"))?;
    println!("listening on {addr},");
    for stream in listener.incoming().map_while(std::result::Result::ok) {
        let file = file.to_owned();
        std::thread::spawn(move || answer(&stream, &file));
    }
    Ok(())
}

fn answer(stream: &TcpStream, file: &Path) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut file = fs::File::open(file)?;
    let len = file.metadata()?.len();
    let mut reader = BufReader::new(stream);
    let mut block = vec![0; 64 << 10];
    loop {
        let (mut from, mut to, mut line) = (0, len, String::new());
        loop {
            line.clear();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if let Some(range) = line.strip_prefix("Range: bytes=") {
                let (first, last) = range.trim().split_once('-').unwrap_or_default();
                from = first.parse().unwrap_or(0).min(len);
                to = last
                    .parse::<u64>()
                    .map_or(len, |last| last.saturating_add(1).clamp(from, len));
            }
            if line == "\r\n" {
                break;
            }
        }
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\n\r\n",
            to - from
        );
        (&*stream).write_all(head.as_bytes())?;
        file.seek(SeekFrom::Start(from))?;
        while from < to {
            let now = block.len().min((to - from) as usize);
            let n = file.read(&mut block[..now])?;
            if n == 0 {
                return Ok(());
            }
            (&*stream).write_all(&block[..n])?;
            from += n as u64;
        }
    }
}
