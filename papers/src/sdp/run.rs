//! Runs a plan, at either end.

use super::plan::{Plan, Row, Shape};
use crate::driver::{Transport, open_device, tcp_prepare};
use crate::error::{BenchError, Result, stack};
use crate::patience::PATIENCE;
use crate::process::{Peer, Reply, Task, unexpected};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use weft_sdp::{Listener, Options, RecvFlags, Sink, Source, Stream};
use weft_verbs::cm::LinkOptions;
use weft_verbs::{Device, RawMemory, protect};

/// Length of the acknowledgement at the end of a run.
const ACK: usize = 1;
/// Sends of at least this many bytes go without a copy, if the row has such sends: the least size with a whole
/// page.
const ZERO_COPY: usize = 4096;

/// The devices of a process for its sessions.
#[derive(Default)]
pub(crate) struct Devices {
    open: Vec<(Transport, Device)>,
    /// Memory of sessions that are over: it is never freed, and used again.
    spare: Vec<RawMemory>,
}

impl Devices {
    fn get(&mut self, transport: Transport) -> Result<Device> {
        if let Some((_, device)) = self.open.iter().find(|(of, _)| *of == transport) {
            return Ok(device.clone());
        }
        let device = open_device(transport)?;
        self.open.push((transport, device.clone()));
        Ok(device)
    }

    /// Resident memory that begins at a page.
    fn memory(&mut self, len: usize) -> Result<RawMemory> {
        let fits = |memory: &RawMemory| memory.len() == len;
        if let Some(at) = self.spare.iter().position(fits) {
            return Ok(self.spare.swap_remove(at));
        }
        let page = protect::page_size();
        let all = RawMemory::leak(vec![0x5a; len.next_multiple_of(page) + page]);
        let off = all.as_ptr().align_offset(page);
        all.slice(off, len).map_err(stack("allocate memory"))
    }
}

/// One connection.
enum Link {
    Sdp(Stream),
    /// The plain socket, with a buffer of the program's.
    Tcp(TcpStream, Mutex<Vec<u8>>),
}

impl Link {
    fn send(&self, memory: &RawMemory) -> Result<()> {
        match self {
            Link::Sdp(stream) => {
                let mut done = 0;
                while done < memory.len() {
                    let rest = rest(memory, done)?;
                    let sent = stream.send(&[Source::Raw(&rest)], false);
                    done += sent.map_err(stack("send"))?;
                }
                Ok(())
            }
            Link::Tcp(stream, buffer) => (&*stream)
                .write_all(&room(buffer, memory)[..memory.len()])
                .map_err(BenchError::system("send")),
        }
    }

    fn receive(&self, memory: &RawMemory) -> Result<()> {
        match self {
            Link::Sdp(stream) => {
                let mut done = 0;
                while done < memory.len() {
                    let rest = rest(memory, done)?;
                    let got = stream.recv(&mut [Sink::Raw(&rest)], RecvFlags::WAITALL);
                    match got.map_err(stack("receive"))? {
                        0 => return Err(BenchError::PeerGone("connection closed".to_owned())),
                        some => done += some,
                    }
                }
                Ok(())
            }
            Link::Tcp(stream, buffer) => (&*stream)
                .read_exact(&mut room(buffer, memory)[..memory.len()])
                .map_err(BenchError::system("receive")),
        }
    }

    /// The program writes to memory that it has sent.
    fn write_pattern(&self, memory: &RawMemory, byte: u8) -> Result<()> {
        let page = protect::page_size();
        match self {
            Link::Sdp(_) => (0..memory.len())
                .step_by(page)
                .try_for_each(|off| memory.write(off, &[byte]))
                .map_err(stack("write")),
            Link::Tcp(_, buffer) => {
                lock(buffer)
                    .iter_mut()
                    .step_by(page)
                    .for_each(|at| *at = byte);
                Ok(())
            }
        }
    }
}

fn lock(buffer: &Mutex<Vec<u8>>) -> MutexGuard<'_, Vec<u8>> {
    buffer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The program's buffer, at least as long as the memory.
fn room<'a>(buffer: &'a Mutex<Vec<u8>>, memory: &RawMemory) -> MutexGuard<'a, Vec<u8>> {
    let mut buffer = lock(buffer);
    let len = memory.len().max(buffer.len());
    buffer.resize(len, 0x5a);
    buffer
}

fn rest(memory: &RawMemory, done: usize) -> Result<RawMemory> {
    memory
        .slice(done, memory.len() - done)
        .map_err(stack("use memory"))
}

fn tcp(stream: TcpStream) -> Result<Link> {
    tcp_prepare(&stream)?;
    Ok(Link::Tcp(stream, Mutex::default()))
}

fn options(row: Row) -> Options {
    Options {
        link: LinkOptions {
            // Plain TCP has none either.
            crc: false,
            ..LinkOptions::default()
        },
        mode: row.mode().unwrap_or_default(),
        zero_copy: ZERO_COPY,
        // As in the paper: the threshold is never reached.
        fault_limit: u32::MAX,
        ..Options::default()
    }
}

/// A connection with its memory.
struct Lane {
    link: Link,
    memory: RawMemory,
    ack: RawMemory,
}

/// The connections of a plan, at one end.
pub(crate) struct Session {
    plan: Plan,
    lanes: Vec<Lane>,
}

impl Session {
    /// At the peer: listens, reports the address, and accepts.
    pub(crate) fn accept(
        devices: &mut Devices,
        plan: &Plan,
        tell: impl FnOnce(SocketAddr) -> Result<()>,
    ) -> Result<Session> {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let mut links = Vec::new();
        if plan.row == Row::Tcp {
            let listener = TcpListener::bind(any).map_err(BenchError::system("listen"))?;
            tell(
                listener
                    .local_addr()
                    .map_err(BenchError::system("listen"))?,
            )?;
            for _ in 0..plan.connections {
                let (stream, _) = listener.accept().map_err(BenchError::system("accept"))?;
                links.push(tcp(stream)?);
            }
        } else {
            let device = devices.get(plan.transport)?;
            let listener = Listener::bind(&device, any, plan.connections, &options(plan.row))
                .map_err(stack("listen"))?;
            tell(listener.local_addr())?;
            for _ in 0..plan.connections {
                let stream = listener.accept(Some(PATIENCE)).map_err(stack("accept"))?;
                links.push(Link::Sdp(stream));
            }
        }
        Self::with(devices, plan, links)
    }

    /// At this end.
    pub(crate) fn connect(devices: &mut Devices, plan: &Plan, addr: SocketAddr) -> Result<Session> {
        let mut links = Vec::new();
        for _ in 0..plan.connections {
            links.push(if plan.row == Row::Tcp {
                tcp(TcpStream::connect(addr).map_err(BenchError::system("connect"))?)?
            } else {
                let device = devices.get(plan.transport)?;
                let stream = Stream::connect(&device, addr, &options(plan.row), Some(PATIENCE));
                Link::Sdp(stream.map_err(stack("connect"))?)
            });
        }
        Self::with(devices, plan, links)
    }

    fn with(devices: &mut Devices, plan: &Plan, links: Vec<Link>) -> Result<Session> {
        let len = usize::try_from(plan.bytes)
            .map_err(|_| BenchError::Usage("the size is too large".to_owned()))?;
        let lane = |link: Link| {
            Ok(Lane {
                link,
                memory: devices.memory(len)?,
                ack: devices.memory(ACK)?,
            })
        };
        Ok(Session {
            plan: *plan,
            lanes: links.into_iter().map(lane).collect::<Result<_>>()?,
        })
    }

    /// Close, and keep the memory.
    pub(crate) fn close(self, devices: &mut Devices) {
        for lane in self.lanes {
            drop(lane.link);
            protect::settle(lane.memory.as_ptr(), lane.memory.len());
            devices.spare.extend([lane.memory, lane.ack]);
        }
    }

    /// This end's part of `count` sends on each connection. Ends when the far end has received all data.
    pub(crate) fn drive(&self, count: u64) -> Result<()> {
        let first = &self.lanes[0];
        match self.plan.shape {
            Shape::PingPong => first.pings(count),
            Shape::Out => first.stream(&self.plan, count),
            Shape::Threads => self.threads(|lane| lane.stream(&self.plan, count)),
            Shape::HotSpot => self.in_turn(count, |lane| {
                lane.link.receive(&lane.memory)?;
                lane.link.send(&lane.memory)
            }),
            Shape::FanIn => {
                self.in_turn(count, |lane| lane.link.receive(&lane.memory))?;
                self.in_turn(1, |lane| lane.link.send(&lane.ack))
            }
            Shape::FanOut => {
                self.in_turn(count, |lane| lane.link.send(&lane.memory))?;
                self.in_turn(1, |lane| lane.link.receive(&lane.ack))
            }
        }
    }

    /// The peer's part.
    pub(crate) fn serve(&self, count: u64) -> Result<()> {
        let first = &self.lanes[0];
        match self.plan.shape {
            Shape::PingPong => first.pongs(count),
            Shape::Out => first.sink(count),
            Shape::Threads | Shape::FanOut => self.threads(|lane| lane.sink(count)),
            Shape::HotSpot => self.threads(|lane| lane.pings(count)),
            Shape::FanIn => self.threads(|lane| lane.stream(&self.plan, count)),
        }
    }

    fn in_turn(&self, count: u64, step: impl Fn(&Lane) -> Result<()>) -> Result<()> {
        for _ in 0..count {
            for lane in &self.lanes {
                step(lane)?;
            }
        }
        Ok(())
    }

    fn threads(&self, work: impl Fn(&Lane) -> Result<()> + Sync) -> Result<()> {
        thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = self
                .lanes
                .iter()
                .map(|lane| scope.spawn(move || work(lane)))
                .collect();
            threads.into_iter().try_for_each(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(BenchError::PeerGone("a thread panicked".to_owned())))
            })
        })
    }
}

impl Lane {
    /// Sends with the plan's work in between, until the far end has received all data.
    fn stream(&self, plan: &Plan, count: u64) -> Result<()> {
        let mark = plan.window.max(1);
        for sent in 1..=count {
            compute(plan.compute);
            self.link.send(&self.memory)?;
            if plan.window > 0 && sent.is_multiple_of(mark) {
                self.link.write_pattern(&self.memory, sent as u8)?;
            }
        }
        self.link.receive(&self.ack)
    }

    fn sink(&self, count: u64) -> Result<()> {
        for _ in 0..count {
            self.link.receive(&self.memory)?;
        }
        self.link.send(&self.ack)
    }

    fn pings(&self, count: u64) -> Result<()> {
        for _ in 0..count {
            self.link.send(&self.memory)?;
            self.link.receive(&self.memory)?;
        }
        Ok(())
    }

    fn pongs(&self, count: u64) -> Result<()> {
        for _ in 0..count {
            self.link.receive(&self.memory)?;
            self.link.send(&self.memory)?;
        }
        Ok(())
    }
}

/// Keep this processor busy.
fn compute(micros: u64) {
    if micros > 0 {
        let end = Instant::now() + Duration::from_micros(micros);
        while Instant::now() < end {
            std::hint::spin_loop();
        }
    }
}

/// A session with its peer's.
pub(crate) struct Pair {
    id: u32,
    session: Session,
}

impl Pair {
    pub(crate) fn open(devices: &mut Devices, peer: &mut Peer, plan: &Plan) -> Result<Pair> {
        let id = peer.new_id();
        peer.task(Task::Sdp, &(id, plan))?;
        let addr = peer.listening()?;
        let session = Session::connect(devices, plan, addr)?;
        peer.ready()?;
        Ok(Pair { id, session })
    }

    /// Seconds for `count` sends on each connection.
    pub(crate) fn run(&self, peer: &mut Peer, count: u64) -> Result<f64> {
        peer.task(Task::SdpGo, &(self.id, count))?;
        peer.ready()?;
        let start = Instant::now();
        self.session.drive(count)?;
        let wall = start.elapsed().as_secs_f64();
        match peer.receive()? {
            Reply::Done { .. } => Ok(wall),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) fn close(self, devices: &mut Devices, peer: &mut Peer) -> Result<()> {
        peer.task(Task::SdpClose, &self.id)?;
        self.session.close(devices);
        peer.closed()
    }
}
