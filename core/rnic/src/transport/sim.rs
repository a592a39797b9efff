//! A simulated network inside the process: byte streams with seeded segmentation, delay and cuts.
//!
//! Time is virtual: each attempt to receive is one tick of the receiving pipe, and bytes arrive some ticks after they
//! were sent. So no test waits, and the same seed gives the same faults (not the same thread interleaving).

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use weft_mem::{RecvList, SendList};
use weft_sys::EventFd;

use super::{ByteStream, Received};
use crate::lock::lock;

/// Bytes a pipe holds.
const PIPE_BYTES: usize = 256 * 1024;

/// The faults of the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimFaults {
    /// Bytes that one receive gets, at most: 1 cuts everything into single bytes. 0: no limit.
    pub max_segment: u32,
    /// Ticks that bytes are on their way, at most.
    pub max_delay: u32,
    /// Cut a connection after so many bytes in one direction.
    pub cut_after: Option<u64>,
}

struct Net {
    faults: SimFaults,
    rng: u64,
    next_port: u16,
    bound: HashSet<SocketAddr>,
    listeners: HashMap<SocketAddr, Arc<Queue>>,
}

/// A simulated network. Clones are handles of the same one; devices opened on it reach each other.
#[derive(Clone)]
pub struct SimNet(Arc<Mutex<Net>>);

impl SimNet {
    /// A network without faults; `seed` fixes its choices.
    pub fn new(seed: u64) -> Self {
        Self::with_faults(seed, SimFaults::default())
    }

    /// A network with faults.
    pub fn with_faults(seed: u64, faults: SimFaults) -> Self {
        SimNet(Arc::new(Mutex::new(Net {
            faults,
            rng: seed,
            next_port: 49_152,
            bound: HashSet::new(),
            listeners: HashMap::new(),
        })))
    }

    /// Take an address (port 0: any).
    pub(crate) fn bind(&self, mut addr: SocketAddr) -> io::Result<SimPort> {
        let mut net = lock(&self.0);
        if addr.port() == 0 {
            addr.set_port(net.next_port);
            net.next_port = net.next_port.checked_add(1).unwrap_or(49_152);
        }
        if !net.bound.insert(addr) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        Ok(SimPort {
            addr,
            net: self.clone(),
        })
    }

    /// Connect, from the address that was taken if there is one.
    pub(crate) fn connect(
        &self,
        addr: SocketAddr,
        from: Option<SimPort>,
    ) -> io::Result<Arc<dyn ByteStream>> {
        let mut net = lock(&self.0);
        let queue = Arc::clone(
            net.listeners
                .get(&addr)
                .ok_or(io::ErrorKind::ConnectionRefused)?,
        );
        let local = if let Some(port) = &from {
            port.addr
        } else {
            let port = net.next_port;
            net.next_port = net.next_port.checked_add(1).unwrap_or(49_152);
            SocketAddr::new(addr.ip(), port)
        };
        let faults = net.faults;
        let mut pipe = || -> io::Result<Arc<Pipe>> {
            net.rng = next(net.rng);
            Ok(Arc::new(Pipe {
                state: Mutex::new(PipeState {
                    rng: net.rng,
                    ..PipeState::default()
                }),
                ready: EventFd::new()?,
                faults,
            }))
        };
        let (there, back) = (pipe()?, pipe()?);
        let ours = SimLink {
            tx: Arc::clone(&there),
            rx: Arc::clone(&back),
            local,
            peer: addr,
            _port: from,
        };
        let theirs = SimLink {
            tx: back,
            rx: there,
            local: addr,
            peer: local,
            _port: None,
        };
        lock(&queue.links).push_back(Arc::new(theirs));
        queue.ready.signal();
        Ok(Arc::new(ours))
    }
}

struct Queue {
    links: Mutex<VecDeque<Arc<SimLink>>>,
    ready: EventFd,
}

/// An address of the network that is taken.
pub(crate) struct SimPort {
    addr: SocketAddr,
    net: SimNet,
}

impl SimPort {
    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn connect(self, addr: SocketAddr) -> io::Result<Arc<dyn ByteStream>> {
        self.net.clone().connect(addr, Some(self))
    }

    pub(crate) fn listen(self) -> io::Result<SimListener> {
        let queue = Arc::new(Queue {
            links: Mutex::default(),
            ready: EventFd::new()?,
        });
        lock(&self.net.0)
            .listeners
            .insert(self.addr, Arc::clone(&queue));
        Ok(SimListener { port: self, queue })
    }
}

impl Drop for SimPort {
    fn drop(&mut self) {
        lock(&self.net.0).bound.remove(&self.addr);
    }
}

pub(crate) struct SimListener {
    port: SimPort,
    queue: Arc<Queue>,
}

impl SimListener {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.queue.ready.as_fd()
    }
    pub(crate) fn accept(&self) -> Option<Arc<dyn ByteStream>> {
        let mut links = lock(&self.queue.links);
        let link = links.pop_front();
        if links.is_empty() {
            self.queue.ready.drain();
        }
        link.map(|l| l as Arc<dyn ByteStream>)
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        let net = &self.port.net;
        lock(&net.0).listeners.remove(&self.port.addr);
    }
}

#[derive(Default)]
struct PipeState {
    /// (tick of arrival, bytes), in order.
    chunks: VecDeque<(u64, VecDeque<u8>)>,
    queued: usize,
    tick: u64,
    sent: u64,
    closed: bool,
    cut: bool,
    rng: u64,
}

/// One direction of a connection.
struct Pipe {
    state: Mutex<PipeState>,
    /// Readable while there is something to receive, now or at a later tick.
    ready: EventFd,
    faults: SimFaults,
}

fn next(rng: u64) -> u64 {
    // SplitMix64's step and a finish: good enough to choose sizes.
    let z = rng.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) | 1
}

impl PipeState {
    /// A number in `0..=max`.
    fn pick(&mut self, max: u64) -> u64 {
        self.rng = next(self.rng);
        (self.rng >> 8) % (max + 1)
    }
}

impl Pipe {
    fn close(&self, cut: bool) {
        let mut state = lock(&self.state);
        state.closed = true;
        state.cut |= cut;
        self.ready.signal();
    }

    fn send(&self, list: &SendList<'_>) -> io::Result<usize> {
        let mut state = lock(&self.state);
        if state.closed || state.cut {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let mut room = PIPE_BYTES - state.queued;
        if let Some(limit) = self.faults.cut_after {
            let left = limit.saturating_sub(state.sent);
            if left == 0 {
                state.cut = true;
                self.ready.signal();
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            room = room.min(usize::try_from(left).unwrap_or(usize::MAX));
        }
        if room == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut bytes = Vec::new();
        let n = list.copy_to(&mut bytes, room);
        let delay = if self.faults.max_delay > 0 {
            state.pick(u64::from(self.faults.max_delay))
        } else {
            0
        };
        let last = state.chunks.back().map_or(0, |(at, _)| *at);
        let at = last.max(state.tick + delay);
        state.chunks.push_back((at, bytes.into()));
        state.queued += n;
        state.sent += n as u64;
        self.ready.signal();
        Ok(n)
    }

    fn recv(&self, list: &mut RecvList<'_>) -> io::Result<usize> {
        let mut state = lock(&self.state);
        state.tick += 1;
        if state.cut {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let mut want = list.len_bytes();
        if self.faults.max_segment > 0 {
            want = want.min(1 + state.pick(u64::from(self.faults.max_segment - 1)) as usize);
        }
        let tick = state.tick;
        let Some((at, chunk)) = state.chunks.front_mut() else {
            if state.closed {
                return Ok(0);
            }
            self.ready.drain();
            return Err(io::ErrorKind::WouldBlock.into());
        };
        if *at > tick {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let bytes = chunk.make_contiguous();
        let n = list.fill_from(&bytes[..want.min(bytes.len())]);
        chunk.drain(..n);
        if chunk.is_empty() {
            state.chunks.pop_front();
        }
        state.queued -= n;
        Ok(n)
    }
}

/// One end of a simulated connection.
struct SimLink {
    tx: Arc<Pipe>,
    rx: Arc<Pipe>,
    local: SocketAddr,
    peer: SocketAddr,
    _port: Option<SimPort>,
}

impl ByteStream for SimLink {
    fn send(&self, list: &SendList<'_>) -> io::Result<usize> {
        self.tx.send(list)
    }
    fn recv(&self, list: &mut RecvList<'_>) -> io::Result<Received> {
        let n = self.rx.recv(list)?;
        let drained = n < list.len_bytes();
        Ok(Received { n, drained })
    }
    fn pause(&self) -> bool {
        lock(&self.rx.state).cut
    }
    fn fd(&self) -> BorrowedFd<'_> {
        self.rx.ready.as_fd()
    }
    fn shutdown_write(&self) {
        self.tx.close(false);
    }
    fn abort(&self) {
        self.tx.close(false);
        self.rx.close(true);
    }
    fn cut(&self) {
        self.tx.close(true);
        self.rx.close(true);
    }
    fn local_addr(&self) -> SocketAddr {
        self.local
    }
    fn peer_addr(&self) -> SocketAddr {
        self.peer
    }
    fn name(&self) -> &'static str {
        "sim"
    }
    fn max_fpdu(&self) -> Option<u32> {
        None
    }
}

impl Drop for SimLink {
    fn drop(&mut self) {
        self.abort();
    }
}
