//! VLC's video on demand by RTP over UDP, as thesis fig. 6.3 has it: the server, and viewers that talk RTSP (RFC 2326) and count datagrams.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use weft_sys::process::end_with_us;

use crate::children::{Running, find, free_port};
use crate::error::{BenchError, Result};

/// Seconds of VLC's movie, and of the part of it that is encoded; the rest repeats it.
pub(super) const SECONDS: u32 = 120;
const ENCODED: u32 = 10;
/// VLC refuses to run as root, so root runs it as nobody.
const NOBODY: u32 = 65_534;
/// The path of VLC's movie. If VLC listens on a given address, it treats that as the beginning of the path, without a slash.
const PATH: &str = "127.0.0.1/movie";

/// Whether the necessary programs are installed.
pub(super) fn is_installed() -> bool {
    ["vlc", "ffmpeg"].iter().all(|name| find(name).is_some())
}

/// H.264 of this rate, made once: noise, so that the rate is kept.
pub(crate) fn movie(dir: &Path, rate: f64) -> Result<PathBuf> {
    let path = dir.join(format!("vlc-{rate}.ts"));
    if path.exists() {
        return Ok(path);
    }
    let part = dir.join("part.ts");
    let ffmpeg = |args: &[&str], out: &Path| {
        let mut command = Command::new("ffmpeg");
        command.args(["-v", "error", "-y"]).args(args).arg(out);
        let status = end_with_us(&mut command).stdin(Stdio::null()).status();
        let status = status.map_err(BenchError::system("start ffmpeg"))?;
        if status.success() {
            return Ok(());
        }
        Err(BenchError::PeerGone(format!("ffmpeg ended with {status}")))
    };
    let video = format!(
        "nullsrc=size=640x360:rate=24:duration={ENCODED},format=yuv420p,noise=alls=100:allf=t"
    );
    let bits = format!("{rate}M");
    let coder = "-c:v libx264 -preset ultrafast -g 24 -x264-params nal-hrd=cbr -f mpegts";
    let mut args = vec!["-f", "lavfi", "-i", &video, "-b:v", &bits];
    args.extend(["-minrate", &bits, "-maxrate", &bits, "-bufsize", &bits]);
    args.extend(coder.split(' '));
    ffmpeg(&args, &part)?;
    let (input, times) = (part.display().to_string(), SECONDS / ENCODED - 1);
    let loops = format!("-stream_loop {times} -i");
    let mut args: Vec<&str> = loops.split(' ').collect();
    args.extend([&input, "-c", "copy", "-f", "mpegts"]);
    ffmpeg(&args, &path)?;
    Ok(path)
}

/// Starts VLC with a movie of this rate; it listens a while later.
pub(super) fn start(dir: &Path, rate: f64) -> Result<(Running, SocketAddr)> {
    let movie = movie(dir, rate)?;
    let system = BenchError::system("write VLC's settings");
    let settings = dir.join("vlm.conf");
    let text = format!(
        "new movie vod enabled\nsetup movie input file://{}\n",
        movie.display()
    );
    std::fs::write(&settings, text).map_err(system)?;
    let port = free_port()?;
    let mut command = Command::new("vlc");
    end_with_us(&mut command)
        .args(["-I", "dummy", "-q", "--vlm-conf"])
        .arg(settings)
        .args(["--rtsp-host", "127.0.0.1", "--rtsp-port"])
        .arg(port.to_string())
        .env("HOME", dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    if rustix::process::geteuid().is_root() {
        command.gid(NOBODY).uid(NOBODY);
    }
    let child = Running::start(&mut command, "start VLC")?;
    Ok((child, (Ipv4Addr::LOCALHOST, port).into()))
}

/// Whether the server has found its movie.
pub(super) fn answers(addr: SocketAddr) -> bool {
    let asked = TcpStream::connect(addr).map(|stream| {
        let mut talk = Talk::new(stream);
        talk.ask("DESCRIBE", PATH, "")
    });
    matches!(asked, Ok(Ok(_)))
}

/// An RTSP connection.
struct Talk {
    stream: BufReader<TcpStream>,
    count: u32,
}

impl Talk {
    fn new(stream: TcpStream) -> Self {
        let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
        Self {
            stream: BufReader::new(stream),
            count: 0,
        }
    }

    /// A request with further headers; the head of a good answer.
    fn ask(&mut self, method: &str, path: &str, headers: &str) -> std::io::Result<String> {
        self.count += 1;
        let text = format!(
            "{method} {path} RTSP/1.0\r\nCSeq: {}\r\n{headers}\r\n",
            self.count
        );
        self.stream.get_mut().write_all(text.as_bytes())?;
        let (mut head, mut body) = (String::new(), 0);
        loop {
            let from = head.len();
            if self.stream.read_line(&mut head)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let line = head[from..].trim_end().to_ascii_lowercase();
            if let Some(len) = line.strip_prefix("content-length:") {
                body = len.trim().parse().unwrap_or(0).min(1 << 16);
            }
            if line.is_empty() {
                break;
            }
        }
        self.stream.read_exact(&mut vec![0; body])?;
        if head.split(' ').nth(1) == Some("200") {
            return Ok(head);
        }
        let line = head.lines().next().unwrap_or_default();
        Err(std::io::Error::other(format!("{method}: {line}")))
    }
}

/// A viewer: it requests a start position and receives datagrams.
pub(super) struct Rtp {
    talk: Talk,
    session: String,
    socket: UdpSocket,
    sequence: Option<u16>,
    /// Datagrams that are missing.
    pub(super) lost: u64,
}

impl Rtp {
    /// Plays from this second of the movie on.
    pub(super) fn open(addr: SocketAddr, from: f64) -> std::io::Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.set_nonblocking(true)?;
        rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 1 << 20)?;
        let port = socket.local_addr()?.port();
        let mut talk = Talk::new(TcpStream::connect(addr)?);
        // The server's RTCP is not received: no socket has the second port.
        let transport = format!(
            "Transport: RTP/AVP;unicast;client_port={port}-{}\r\n",
            port.wrapping_add(1)
        );
        let head = talk.ask("SETUP", &format!("{PATH}/trackID=0"), &transport)?;
        let session = head.lines().find_map(|line| line.strip_prefix("Session: "));
        let session = session.and_then(|s| s.split(';').next());
        let mut viewer = Self {
            session: session.unwrap_or_default().to_owned(),
            talk,
            socket,
            sequence: None,
            lost: 0,
        };
        viewer.play(from)?;
        Ok(viewer)
    }

    /// Jumps to a second of the movie.
    pub(super) fn play(&mut self, from: f64) -> std::io::Result<()> {
        // The sequence numbers of the next datagrams do not continue from these.
        self.sequence = None;
        let headers = format!("Session: {}\r\nRange: npt={from:.3}-\r\n", self.session);
        self.talk.ask("PLAY", PATH, &headers).map(drop)
    }

    /// Receives the datagrams that have arrived. Returns their bytes.
    pub(super) fn take(&mut self) -> std::io::Result<u64> {
        let (mut bytes, mut datagram) = (0, [0; 2048]);
        loop {
            match self.socket.recv(&mut datagram) {
                Ok(len) if len >= 12 => {
                    bytes += len as u64;
                    let sequence = u16::from_be_bytes([datagram[2], datagram[3]]);
                    if let Some(before) = self.sequence {
                        let gap = sequence.wrapping_sub(before).wrapping_sub(1);
                        self.lost += u64::from(if gap < 1 << 15 { gap } else { 0 });
                    }
                    self.sequence = Some(sequence);
                }
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(bytes),
                // The answer of a port without a listener.
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => {}
                Err(e) => return Err(e),
            }
        }
    }
}

impl Drop for Rtp {
    fn drop(&mut self) {
        let headers = format!("Session: {}\r\n", self.session);
        let _ = self.talk.ask("TEARDOWN", PATH, &headers);
    }
}
