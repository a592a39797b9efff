//! The servers that are compared, each a process of its own, and what they use.

use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use weft_sys::process::end_with_us;

use super::rtp;
use crate::error::{BenchError, Result};

/// The movie's name.
pub(super) const NAME: &str = "movie.mp4";
const START: Duration = Duration::from_secs(20);

/// A server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// `weft media serve`, viewers of the same host in shared memory: they copy for themselves, as an RNIC would
    #[value(name = "weft-local")]
    Local,
    /// `weft media serve` over TCP, in the clear, as HTTP is
    #[value(name = "weft-tcp")]
    Tcp,
    /// `weft media serve` over TCP by TLS 1.3
    #[value(name = "weft-tls")]
    Tls,
    /// nginx with sendfile, one worker
    #[value(name = "nginx-sendfile")]
    Sendfile,
    /// nginx with read and write, one worker
    #[value(name = "nginx-rw")]
    ReadWrite,
    /// A plain HTTP server in Rust: a thread for each connection, read and write
    #[value(name = "http-rust")]
    Plain,
    /// VLC's video on demand: RTP over UDP
    #[value(name = "vlc-rtp")]
    Vlc,
}

impl Kind {
    /// Its name in tables and options.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Local => "weft-local",
            Self::Tcp => "weft-tcp",
            Self::Tls => "weft-tls",
            Self::Sendfile => "nginx-sendfile",
            Self::ReadWrite => "nginx-rw",
            Self::Plain => "http-rust",
            Self::Vlc => "vlc-rtp",
        }
    }

    pub(super) fn is_weft(self) -> bool {
        matches!(self, Self::Local | Self::Tcp | Self::Tls)
    }

    /// All of them; those of nginx and VLC only where these are installed.
    pub(super) fn installed() -> Vec<Self> {
        let (nginx, vlc) = (nginx().is_some(), rtp::is_installed());
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

fn nginx() -> Option<&'static str> {
    ["/usr/sbin/nginx", "/usr/bin/nginx", "/usr/local/sbin/nginx"]
        .into_iter()
        .find(|path| Path::new(path).is_file())
}

/// What a process has used so far.
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
    child: Child,
    _config: Option<Config>,
}

/// nginx's folder, removed on drop.
struct Config(std::path::PathBuf);

impl Drop for Config {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn this_program() -> Result<Command> {
    let program =
        std::env::current_exe().map_err(BenchError::system("find this program's file"))?;
    Ok(Command::new(program))
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
        let mut command = this_program()?;
        if kind == Kind::Plain {
            command.args(["bench", "media-http"]).arg(dir.join(NAME));
        } else {
            command.args(["media", "serve", "--open", "--bind", "127.0.0.1:0"]);
            if kind != Kind::Tls {
                command.arg("--plain");
            }
            // Its viewers say whether they go by shared memory.
            command.arg(dir);
        }
        let mut child = end_with_us(&mut command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(BenchError::system("start a server"))?;
        let stdout = child.stdout.take();
        let mut lines = stdout.map(|out| BufReader::new(out).lines());
        let line = lines
            .as_mut()
            .and_then(|l| l.next()?.ok())
            .unwrap_or_default();
        let addr = line
            .strip_prefix("listening on ")
            .and_then(|rest| rest.split(',').next()?.parse().ok());
        let Some(addr) = addr else {
            let _ = child.kill();
            let _ = child.wait();
            return Err(BenchError::PeerGone(format!("the server said: {line}")));
        };
        std::thread::spawn(move || lines.map(Iterator::count));
        Ok(Self {
            kind,
            addr,
            child,
            _config: None,
        })
    }

    fn start_nginx(kind: Kind, dir: &Path) -> Result<Self> {
        let program = nginx().ok_or_else(|| {
            BenchError::Usage(
                "nginx is not installed: apt-get install nginx-light, or leave it out of --server"
                    .into(),
            )
        })?;
        let system = BenchError::system("write nginx's settings");
        // Free now; nobody else here takes it before nginx does, most likely.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|l| l.local_addr())
            .map_err(BenchError::system("find a free port"))?
            .port();
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
        let child = end_with_us(&mut Command::new(program))
            .arg("-c")
            .arg(folder.join("conf"))
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(BenchError::system("start nginx"))?;
        let served = Self {
            kind,
            addr: (Ipv4Addr::LOCALHOST, port).into(),
            child,
            _config: Some(config),
        };
        let said = || fs::read_to_string(folder.join("error")).unwrap_or_default();
        served.wait(|| TcpStream::connect(served.addr).is_ok(), said)?;
        Ok(served)
    }

    /// Waits until it answers; otherwise fails with what it has said.
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

    /// What it has used so far. The kernel forgets the switches of threads that have ended, and tells the CPU time of those in
    /// hundredths of a second only: so that of servers whose threads come and go.
    pub(super) fn usage(&self) -> Result<Usage> {
        let process = format!("/proc/{}", self.child.id());
        let read = || -> std::io::Result<Usage> {
            let mut usage = Usage::default();
            let mut nanoseconds = 0;
            for task in fs::read_dir(format!("{process}/task"))? {
                let task = task?.path();
                // A thread may end meanwhile.
                let text = fs::read_to_string(task.join("schedstat")).unwrap_or_default();
                let spent = text.split(' ').next().and_then(|t| t.parse::<u64>().ok());
                nanoseconds += spent.unwrap_or(0);
                let text = fs::read_to_string(task.join("status")).unwrap_or_default();
                usage.switches += text
                    .lines()
                    .filter_map(|l| l.split_once("voluntary_ctxt_switches:"))
                    .filter_map(|(_, n)| n.trim().parse::<u64>().ok())
                    .sum::<u64>();
            }
            usage.cpu = nanoseconds as f64 / 1e9;
            if matches!(self.kind, Kind::Plain | Kind::Vlc) {
                let text = fs::read_to_string(format!("{process}/stat"))?;
                let fields = text.rsplit(')').next().unwrap_or_default();
                // utime and stime: the 14th and 15th of all.
                let ticks = fields.split_whitespace().skip(11).take(2);
                usage.cpu = ticks.filter_map(|t| t.parse::<f64>().ok()).sum::<f64>() / 100.0;
            }
            Ok(usage)
        };
        read().map_err(BenchError::system("read what a server has used"))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The plain HTTP server: `GET` of one file, with a range, a thread for each connection. For ever.
///
/// # Errors
/// [`BenchError::System`] when it cannot listen.
pub fn serve_plain_http(file: &Path) -> Result<()> {
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
