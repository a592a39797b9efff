//! Viewers: many in one process, each taking what its rate asks for, a part each quarter of a second.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weft_media::client::{self, Dial, Viewer};
use weft_media::wire::Request;
use weft_verbs::tls::{Identity, Tls};
use weft_verbs::{Device, LocalMode};

use super::MOVIE;
use super::film::{FPS, Film, next};
use super::rtp::{self, Rtp};
use super::server::{Kind, NAME, Served};
use crate::error::{BenchError, Result, stack};

/// Threads that the viewers share.
const THREADS: usize = 4;
/// The interval at which a viewer of HTTP reads its socket, which holds some seconds of film.
const TICK: Duration = Duration::from_millis(250);
/// The interval at which a viewer of weft fetches. It buffers that much itself.
const AHEAD: Duration = Duration::from_secs(1);
/// A fetch that completes this long after its time would have stopped the picture.
const LATE: Duration = Duration::from_secs(1);
/// The interval at which a viewer of datagrams reads its socket, which does not hold many.
const LOOK: Duration = Duration::from_millis(40);
const PATIENCE: Duration = Duration::from_secs(30);

/// The viewers and what they watch.
pub(super) struct Plan {
    pub(super) viewers: usize,
    /// What each watches.
    pub(super) film: Arc<Film>,
    /// Time between a viewer's jumps.
    pub(super) jump: Option<Duration>,
    /// Receive buffer of an HTTP player's socket; `None` for the system's, which grows.
    pub(super) buffer: Option<usize>,
}

/// How viewers of weft connect to a server.
struct Way {
    device: Device,
    dial: Dial,
}

impl Way {
    fn new(served: &Served) -> Result<Self> {
        let mode = match served.kind {
            Kind::Local => LocalMode::Require,
            _ => LocalMode::Off,
        };
        let device = Device::builder()
            .local(mode)
            .open()
            .map_err(stack("open the soft RNIC"))?;
        let tls = match served.kind {
            Kind::Tls => {
                let made = Identity::generate().and_then(Tls::new);
                Some(made.map_err(stack("make a key"))?)
            }
            _ => None,
        };
        let dial = Dial {
            read: client::READ,
            depth: client::DEPTH,
            ..Dial::new(served.addr, tls)
        };
        Ok(Self { device, dial })
    }

    fn open(&self) -> Result<Viewer> {
        Viewer::open(&self.device, &self.dial, &Request::Title(NAME.into()))
            .map_err(stack("connect a viewer"))
    }
}

/// An HTTP player: it requests one long answer and reads as much as it needs.
pub(super) struct Http {
    served: SocketAddr,
    buffer: Option<usize>,
    stream: BufReader<TcpStream>,
}

impl Http {
    /// A connection; it reads ahead at most `room` bytes.
    fn connect(addr: SocketAddr, buffer: Option<usize>, room: usize) -> std::io::Result<Self> {
        let stream = TcpStream::connect(addr)?;
        if let Some(bytes) = buffer {
            rustix::net::sockopt::set_socket_recv_buffer_size(&stream, bytes)?;
        }
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self {
            served: addr,
            buffer,
            stream: BufReader::with_capacity(room, stream),
        })
    }

    /// Connects and requests the movie from a position on.
    fn open(addr: SocketAddr, buffer: Option<usize>, from: u64) -> std::io::Result<Self> {
        let mut http = Self::connect(addr, buffer, 4096)?;
        http.ask(from, MOVIE)?;
        Ok(http)
    }

    /// Asks for a range, and reads the head of the answer.
    fn ask(&mut self, from: u64, to: u64) -> std::io::Result<()> {
        let text = format!(
            "GET /{NAME} HTTP/1.1\r\nHost: x\r\nRange: bytes={from}-{}\r\n\r\n",
            to - 1
        );
        self.stream.get_mut().write_all(text.as_bytes())?;
        let mut line = String::new();
        loop {
            line.clear();
            if self.stream.read_line(&mut line)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            if line == "\r\n" {
                return Ok(());
            }
        }
    }
}

enum Player {
    Weft(Box<Viewer>),
    Http(Http),
    Rtp(Rtp),
}

impl Player {
    /// Reads `len` bytes at a position, or the bytes that have arrived. Returns the number of bytes.
    fn take(&mut self, at: u64, len: usize, block: &mut Vec<u8>) -> Result<u64> {
        match self {
            Self::Rtp(rtp) => return rtp.take().map_err(BenchError::system("take datagrams")),
            Self::Weft(viewer) => {
                let mut range = viewer.range(at, at + len as u64);
                while let Some(piece) = range.next().map_err(stack("read"))? {
                    block.clear();
                    range.append(&piece, block).map_err(stack("read"))?;
                }
            }
            Self::Http(http) => {
                block.resize(len, 0);
                let read = http.stream.read_exact(block);
                read.map_err(BenchError::system("read an answer"))?;
            }
        }
        Ok(len as u64)
    }

    fn jump(&mut self, at: u64) -> Result<()> {
        let jumped = match self {
            Self::Weft(_) => Ok(()),
            // The rest of the long answer is still in flight, so the new position needs another connection.
            Self::Http(http) => Http::open(http.served, http.buffer, at).map(|new| *http = new),
            Self::Rtp(rtp) => rtp.play(seconds(at)),
        };
        jumped.map_err(BenchError::system("jump"))
    }

    /// Datagrams that have been lost.
    fn lost(&self) -> u64 {
        if let Self::Rtp(rtp) = self {
            rtp.lost
        } else {
            0
        }
    }
}

/// The second of VLC's movie at a position. Positions cover the first half; the second half is left to be watched.
fn seconds(at: u64) -> f64 {
    at as f64 / MOVIE as f64 * f64::from(rtp::SECONDS) / 2.0
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Delays count only while this is set.
    counts: AtomicBool,
    bytes: AtomicU64,
    /// Frames that viewers have fetched.
    frames: AtomicU64,
    late: AtomicU64,
    starved: AtomicU64,
    trouble: Mutex<Option<String>>,
}

/// Running viewers; dropping it ends them.
pub(super) struct Crowd {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Seat {
    player: Player,
    /// The next frame.
    frame: u64,
    due: Instant,
    jump: Option<Instant>,
    random: u64,
    /// Its picture has stopped.
    starved: bool,
    lost: u64,
}

impl Crowd {
    /// Connects all viewers; they begin at different times and places.
    pub(super) fn start(served: &Served, plan: &Plan) -> Result<Self> {
        let mut way = if served.kind.is_weft() {
            Some(Way::new(served)?)
        } else {
            None
        };
        let tick = match served.kind {
            Kind::Vlc => LOOK,
            kind if kind.is_weft() => AHEAD,
            _ => TICK,
        };
        let film = &plan.film;
        let count = frames(tick);
        if let Some(way) = &mut way {
            // A viewer fetches with one Read at a time, so that a fetch wakes the server once.
            (way.dial.read, way.dial.depth) = (film.most(count) as u32, 1);
        }
        let mut rows: Vec<Vec<Seat>> = (0..THREADS).map(|_| Vec::new()).collect();
        let begin = Instant::now();
        for index in 0..plan.viewers {
            let mut random = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let frame = next(&mut random) % (film.frames() / 2).max(1);
            let at = film.at(frame);
            let connect = BenchError::system("connect a viewer");
            let player = match &way {
                Some(way) => Player::Weft(Box::new(way.open()?)),
                None if served.kind == Kind::Vlc => {
                    Player::Rtp(Rtp::open(served.addr, seconds(at)).map_err(connect)?)
                }
                None => Player::Http(Http::open(served.addr, plan.buffer, at).map_err(connect)?),
            };
            let offset = tick * (index as u32 % 64) / 64;
            rows[index % THREADS].push(Seat {
                player,
                frame,
                due: begin + offset,
                jump: plan
                    .jump
                    .map(|each| begin + each.mul_f64((next(&mut random) % 1000) as f64 / 1000.0)),
                random,
                starved: false,
                lost: 0,
            });
        }
        let shared = Arc::new(Shared::default());
        let each = plan.jump;
        let threads = rows
            .into_iter()
            .map(|row| {
                let (shared, film) = (Arc::clone(&shared), Arc::clone(film));
                std::thread::spawn(move || {
                    if let Err(e) = watch(row, &film, tick, each, &shared) {
                        let mut trouble = shared
                            .trouble
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner);
                        *trouble = Some(e.to_string());
                    }
                })
            })
            .collect();
        Ok(Self { shared, threads })
    }

    /// Starts counting late fetches. Returns the bytes received so far.
    pub(super) fn begin(&self) -> u64 {
        self.shared.counts.store(true, Ordering::Relaxed);
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// Seconds of film that all viewers have fetched so far.
    pub(super) fn film_seconds(&self) -> f64 {
        self.shared.frames.load(Ordering::Relaxed) as f64 / FPS as f64
    }

    /// Bytes received so far, late fetches (for datagrams: lost ones), and viewers whose picture has stopped.
    pub(super) fn counted(&self) -> (u64, u64, u64) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let shared = &self.shared;
        (get(&shared.bytes), get(&shared.late), get(&shared.starved))
    }

    /// Checks that all viewers are still watching.
    pub(super) fn check(&self) -> Result<()> {
        let trouble = self
            .shared
            .trouble
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        trouble
            .clone()
            .map_or(Ok(()), |why| Err(stack("watch")(why)))
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Frames of a tick.
fn frames(tick: Duration) -> u64 {
    ((tick.as_secs_f64() * FPS as f64).round() as u64).max(1)
}

fn watch(
    mut row: Vec<Seat>,
    film: &Film,
    tick: Duration,
    each: Option<Duration>,
    shared: &Shared,
) -> Result<()> {
    let mut block = Vec::new();
    let count = frames(tick);
    // Viewers that fell behind schedule while connecting begin now.
    let now = Instant::now();
    for (index, seat) in row.iter_mut().enumerate() {
        seat.due = now + tick * (index as u32 % 64) / 64;
    }
    row.sort_by_key(|seat| seat.due);
    while !shared.stop.load(Ordering::Relaxed) {
        for seat in &mut row {
            let now = Instant::now();
            if let Some(wait) = seat.due.checked_duration_since(now) {
                std::thread::sleep(wait);
            }
            if seat.jump.is_some_and(|at| at <= now) {
                let last = film.frames().saturating_sub(8 * count).max(1);
                seat.frame = next(&mut seat.random) % last;
                seat.player.jump(film.at(seat.frame))?;
                seat.jump = each.map(|each| now + each);
            }
            if seat.frame + count > film.frames() {
                seat.frame = 0;
                seat.player.jump(0)?;
            }
            let part = film.len(seat.frame, count);
            let got = seat
                .player
                .take(film.at(seat.frame), part as usize, &mut block)?;
            seat.frame += count;
            shared.frames.fetch_add(count, Ordering::Relaxed);
            shared.bytes.fetch_add(got, Ordering::Relaxed);
            seat.judge(shared);
            seat.due += tick;
        }
        if row.is_empty() {
            std::thread::sleep(TICK);
        }
    }
    Ok(())
}

impl Seat {
    /// Records whether the current fetch was in time.
    fn judge(&mut self, shared: &Shared) {
        let lost = self.player.lost();
        let late = lost - self.lost + u64::from(self.due.elapsed() > LATE);
        self.lost = lost;
        if late > 0 && shared.counts.load(Ordering::Relaxed) {
            shared.late.fetch_add(late, Ordering::Relaxed);
            shared
                .starved
                .fetch_add(u64::from(!self.starved), Ordering::Relaxed);
            self.starved = true;
        }
    }
}

/// A viewer that only jumps.
pub(super) enum Seeker {
    Weft(Box<Viewer>),
    Http(Box<Http>),
}

impl Seeker {
    pub(super) fn open(served: &Served) -> Result<Self> {
        if served.kind.is_weft() {
            return Ok(Self::Weft(Box::new(Way::new(served)?.open()?)));
        }
        let http = Http::connect(served.addr, None, 64 << 10);
        Ok(Self::Http(Box::new(
            http.map_err(BenchError::system("connect"))?,
        )))
    }

    /// The time from the request to the first 8 KiB, on an established connection.
    pub(super) fn seek(&mut self, at: u64) -> Result<Duration> {
        const FIRST: usize = 8 << 10;
        let began = Instant::now();
        match self {
            Self::Weft(viewer) => {
                let got = viewer.fetch(at, FIRST);
                got.map_err(stack("seek"))?;
            }
            Self::Http(http) => http
                .ask(at, at + FIRST as u64)
                .and_then(|()| http.stream.read_exact(&mut [0; FIRST]))
                .map_err(BenchError::system("seek"))?,
        }
        Ok(began.elapsed())
    }
}

/// Reads the movie this many times, as fast as possible. Returns the bytes.
pub(super) fn gulp(served: &Served, times: u64) -> Result<u64> {
    if served.kind.is_weft() {
        let mut viewer = Way::new(served)?.open()?;
        for _ in 0..times {
            let mut range = viewer.range(0, MOVIE);
            while range.next().map_err(stack("read"))?.is_some() {}
        }
    } else {
        let mut block = vec![0; 1 << 20];
        for _ in 0..times {
            let mut talk = || {
                let mut http = Http::open(served.addr, None, 0)?;
                let mut left = MOVIE as usize;
                while left > 0 {
                    let now = left.min(block.len());
                    http.stream.read_exact(&mut block[..now])?;
                    left -= now;
                }
                Ok(())
            };
            talk().map_err(BenchError::system("read an answer"))?;
        }
    }
    Ok(times * MOVIE)
}

/// Connected viewers that watch nothing.
pub(super) fn idle(served: &Served, count: usize) -> Result<Vec<Viewer>> {
    let mut way = Way::new(served)?;
    (way.dial.read, way.dial.depth) = (8192, 1);
    (0..count).map(|_| way.open()).collect()
}
