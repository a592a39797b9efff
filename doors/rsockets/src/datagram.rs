//! Datagram sockets: each is a datagram queue pair of its own UDP port, whose number follows from the port
//! (docs/spec/rsockets.md). So an address leads to its queue pair, and nothing has to be asked.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use weft_sockets::bell::{Bell, Heard};
use weft_sockets::error::{errno, io_errno};
use weft_sockets::lock::lock;
use weft_sockets::memory::{gather, room, scatter, total};
use weft_sockets::wait::Wait;
use weft_verbs::ext::CqExt;
use weft_verbs::{
    Access, Cq, Device, Error, Mr, RecvWr, SendWr, UdDest, UdErrorKind, UdInit, UdQp, Wc, WcStatus,
};

use crate::common::Common;
use crate::poll::Pollable;
use crate::{Options, RecvFlags, Shutdown, Sink, Source};

/// The longest message in bytes, as UDP over IPv4 has it.
pub const MAX_DATAGRAM: usize = 65_507;
/// The `Q_Key` of datagram sockets: the one that `rdma_cm` uses for datagrams.
const QKEY: u32 = 0x0123_4567;
/// Bytes between the places of two messages in memory. Nothing of a place is backed before a message is there.
const PLACE: usize = 64 << 10;
/// A buffer counts as so many messages as there are of this size in it, as rdma-core's do.
const USUAL: u32 = 2048;
/// Fewest messages of a queue.
const FEWEST: u32 = 16;
/// Completions taken at once.
const BATCH: usize = 32;
const TAG_RECV: u64 = 1 << 63;

/// The queue pair of the datagram socket at this port.
fn queue_pair_of(port: u16) -> u32 {
    u32::from(port) << 8
}

/// A message that has come.
#[derive(Clone, Copy)]
struct Message {
    place: usize,
    len: usize,
    from: SocketAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes that were copied.
    pub len: usize,
    /// Bytes of the message: more where there was no room for all.
    pub full: usize,
    pub from: SocketAddr,
}

/// The queue pair and its memory; there with the first address.
struct Made {
    // Dropped first, because it uses the memory.
    qp: UdQp,
    cq: Cq,
    local: SocketAddr,
    inbox: Mr,
    outbox: Mr,
}

struct State {
    peer: Option<SocketAddr>,
    arrived: VecDeque<Message>,
    /// Places of the outbox that are free; the one that was used last is the first.
    free: Vec<usize>,
    /// Room for completions, kept from one look to the next.
    wcs: Vec<Wc>,
    error: Option<Errno>,
    read_shut: bool,
    send_shut: bool,
    closed: bool,
}

/// A datagram socket: messages may be lost, doubled and overtaken, and those that come for a queue that is full are.
pub struct DatagramSocket {
    common: Common,
    made: OnceLock<Made>,
    making: Mutex<()>,
    state: Mutex<State>,
    /// Threads that wait in a call.
    waiting: AtomicU32,
}

impl Deref for DatagramSocket {
    type Target = Common;

    fn deref(&self) -> &Common {
        &self.common
    }
}

impl Made {
    fn new(
        device: &Device,
        addr: SocketAddr,
        options: Options,
        bell: &Arc<Bell>,
    ) -> Result<Made, Errno> {
        if let Some(made) = Made::on(device, addr, options, bell)? {
            return Ok(made);
        }
        // A socket of this process has the same port at another address, and the number on this device.
        let device = Device::open().map_err(|error| errno(&error))?;
        Made::on(&device, addr, options, bell)?.ok_or(Errno::ADDRINUSE)
    }

    /// Nothing if the device has a queue pair with the number.
    fn on(
        device: &Device,
        addr: SocketAddr,
        options: Options,
        bell: &Arc<Bell>,
    ) -> Result<Option<Made>, Errno> {
        let port = device.bind_ud(addr).map_err(|error| io_errno(&error))?;
        let local = port.local_addr();
        let messages = |buffer: u32, queue: u16| {
            let usual = (buffer / USUAL).max(FEWEST);
            usual.min(queue.into())
        };
        let recvs = messages(options.recv_buffer, options.recv_queue);
        let sends = messages(options.send_buffer, options.send_queue);
        let make = || -> Result<Made, Error> {
            let pd = device.alloc_pd()?;
            let cq = device.create_cq(recvs + sends, None)?;
            let bell = Arc::clone(bell);
            cq.set_hook(move || bell.ring());
            let init = UdInit {
                max_send_wr: sends,
                max_recv_wr: recvs,
                max_sge: 1,
                max_inline: 0,
                num: Some(queue_pair_of(local.port())),
                max_message: MAX_DATAGRAM as u32,
                ..UdInit::new(&port, QKEY, &cq, &cq)
            };
            let qp = pd.create_ud_qp(&init)?;
            let inbox = pd.alloc_mr(recvs as usize * PLACE, Access::LOCAL_WRITE)?;
            let outbox = pd.alloc_mr(sends as usize * PLACE, Access::LOCAL_WRITE)?;
            Ok(Made {
                qp,
                cq,
                local,
                inbox,
                outbox,
            })
        };
        let made = match make() {
            Ok(made) => made,
            Err(Error::Invalid(_)) => return Ok(None),
            Err(error) => return Err(errno(&error)),
        };
        let recvs: Vec<RecvWr> = (0..recvs as usize)
            .map(|place| made.receive(place))
            .collect();
        made.qp.post_recv(&recvs).map_err(|_| Errno::IO)?;
        Ok(Some(made))
    }

    fn receive(&self, place: usize) -> RecvWr {
        RecvWr::new(TAG_RECV | place as u64).sge(self.inbox.sge(place * PLACE, MAX_DATAGRAM))
    }

    /// The place of a message that was read, or is not wanted, is free for another one.
    fn read(&self, place: usize) {
        // Refused only when the socket is being closed.
        let _ = self.qp.post_recv(&[self.receive(place)]);
    }

    /// Processes completions; returns whether there were any.
    fn process(&self, state: &mut State) -> bool {
        let mut wcs = std::mem::take(&mut state.wcs);
        let mut changed = false;
        while let Ok(n @ 1..) = self.cq.take(&mut wcs) {
            changed = true;
            for wc in &wcs[..n] {
                self.completed(state, wc);
            }
        }
        state.wcs = wcs;
        while let Some(error) = self.qp.take_error() {
            if error.kind == UdErrorKind::NotSent {
                state.error = Some(Errno::HOSTUNREACH);
            }
        }
        changed
    }

    fn completed(&self, state: &mut State, wc: &Wc) {
        let place = (wc.wr_id & !TAG_RECV) as usize;
        if wc.wr_id & TAG_RECV == 0 {
            state.free.push(place);
            return;
        }
        let from = wc.source.map(|source| source.addr);
        let Some(from) = from.filter(|_| wc.status == WcStatus::Success) else {
            return self.read(place);
        };
        // As for kernel sockets: a connected socket receives only from its peer.
        let who = |addr: SocketAddr| (addr.ip(), addr.port());
        if state.peer.is_some_and(|peer| who(peer) != who(from)) || state.read_shut {
            return self.read(place);
        }
        let len = wc.byte_len as usize;
        state.arrived.push_back(Message { place, len, from });
    }
}

impl DatagramSocket {
    /// A socket without an address.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn new(device: &Device, ipv6: bool) -> Result<DatagramSocket, Errno> {
        Ok(DatagramSocket {
            common: Common::new(device, ipv6)?,
            made: OnceLock::new(),
            making: Mutex::default(),
            state: Mutex::new(State {
                peer: None,
                arrived: VecDeque::new(),
                free: Vec::new(),
                wcs: vec![Wc::default(); BATCH],
                error: None,
                read_shut: false,
                send_shut: false,
                closed: false,
            }),
            waiting: AtomicU32::new(0),
        })
    }

    pub fn options(&self) -> Options {
        *lock(&self.common.options)
    }

    /// Whether the sizes are fixed.
    pub fn has_begun(&self) -> bool {
        self.made.get().is_some()
    }

    /// Take an address; port 0: any free one.
    ///
    /// # Errors
    /// `EAFNOSUPPORT`, `EINVAL` when it has one, and as `bind(2)`.
    pub fn bind(&self, addr: SocketAddr) -> Result<(), Errno> {
        self.check_family(addr)?;
        let _making = lock(&self.making);
        if self.made.get().is_some() {
            return Err(Errno::INVAL);
        }
        self.make(addr).map(drop)
    }

    fn make(&self, addr: SocketAddr) -> Result<&Made, Errno> {
        let made = Made::new(&self.device, addr, self.options(), &self.bell)?;
        let mut state = lock(&self.state);
        if state.closed {
            return Err(Errno::BADF);
        }
        state.free = (0..made.outbox.len() / PLACE).rev().collect();
        Ok(self.made.get_or_init(|| made))
    }

    /// The queue pair; without an address it takes any.
    fn made(&self) -> Result<&Made, Errno> {
        if let Some(made) = self.made.get() {
            return Ok(made);
        }
        let _making = lock(&self.making);
        match self.made.get() {
            Some(made) => Ok(made),
            None => self.make(self.any_addr()),
        }
    }

    /// Connects to `to`: sends go there, and only its messages are received. `None` dissolves the connection.
    ///
    /// # Errors
    /// `EAFNOSUPPORT`, and as [`DatagramSocket::bind`] if the socket has no address yet.
    pub fn connect(&self, to: Option<SocketAddr>) -> Result<(), Errno> {
        let peer = match to {
            Some(to) => {
                let peer = self.dest(to)?;
                self.made()?;
                Some(peer)
            }
            None => None,
        };
        lock(&self.state).peer = peer;
        Ok(())
    }

    /// The destination for an address, in the form in which messages from there name it.
    fn dest(&self, to: SocketAddr) -> Result<SocketAddr, Errno> {
        self.check_family(to)?;
        if to.port() == 0 {
            return Err(Errno::INVAL);
        }
        let ip = match to.ip().to_canonical() {
            // "This host", as the system takes it.
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip if ip.is_multicast() => return Err(Errno::OPNOTSUPP),
            ip => ip,
        };
        Ok(match to {
            SocketAddr::V6(mut v6) if ip.is_ipv6() => {
                v6.set_ip(match ip {
                    IpAddr::V6(ip) => ip,
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                });
                v6.into()
            }
            _ => SocketAddr::new(ip, to.port()),
        })
    }

    /// An address as programs of this family know it.
    fn shown(&self, addr: SocketAddr) -> SocketAddr {
        match addr.ip() {
            IpAddr::V4(ip) if self.is_ipv6() => (ip.to_ipv6_mapped(), addr.port()).into(),
            _ => addr,
        }
    }

    /// Sends a message, to `to` or to the connected peer. The message is copied; success does not mean that it arrives.
    ///
    /// # Errors
    /// `EMSGSIZE` beyond [`MAX_DATAGRAM`]; `EDESTADDRREQ`; `EAGAIN`, `EINTR` while too much is in flight; `EPIPE`; a pending error.
    pub fn send(
        &self,
        from: &[Source<'_>],
        to: Option<SocketAddr>,
        dont_wait: bool,
    ) -> Result<usize, Errno> {
        let len = total(from);
        if len > MAX_DATAGRAM {
            return Err(Errno::MSGSIZE);
        }
        let to = to.map(|to| self.dest(to)).transpose()?;
        let peer = lock(&self.state).peer;
        let addr = to.or(peer).ok_or(Errno::DESTADDRREQ)?;
        let made = self.made()?;
        let wait = self.send_wait(dont_wait);
        let place = self.wait_until(made, wait, |state| {
            if state.send_shut {
                return Some(Err(Errno::PIPE));
            }
            if let Some(errno) = state.error.take() {
                return Some(Err(errno));
            }
            state.free.pop().map(Ok)
        })??;
        let posted = gather(from, 0, len, &made.outbox, place * PLACE)
            .map_err(|_| Errno::FAULT)
            .and_then(|()| {
                let dest = UdDest {
                    addr,
                    qp_num: queue_pair_of(addr.port()),
                    qkey: QKEY,
                    from: None,
                    traffic_class: 0,
                };
                let wr = SendWr::send(place as u64).sge(made.outbox.sge(place * PLACE, len));
                let posted = made.qp.post_send(&wr.signaled(), &dest);
                posted.map_err(|_| Errno::IO)
            });
        let mut state = lock(&self.state);
        if let Err(errno) = posted {
            state.free.push(place);
            return Err(errno);
        }
        if made.process(&mut state) {
            self.wake(made);
        }
        state.error.take().map_or(Ok(len), Err)
    }

    /// Receives the oldest message. Bytes that do not fit are lost, except with [`RecvFlags::PEEK`].
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, a pending error. `Ok(None)`: the program has shut down this direction.
    pub fn recv(&self, to: &mut [Sink<'_>], flags: RecvFlags) -> Result<Option<Received>, Errno> {
        let made = self.made()?;
        let peek = flags.contains(RecvFlags::PEEK);
        let wait = self.recv_wait(flags.contains(RecvFlags::DONTWAIT));
        self.wait_until(made, wait, |state| {
            if let Some(errno) = state.error.take() {
                return Some(Err(errno));
            }
            let Some(message) = state.arrived.front().copied() else {
                return state.read_shut.then_some(Ok(None));
            };
            // Under the lock, because the place may be reused after the copy only.
            let len = message.len.min(room(to));
            let copied = scatter(&made.inbox, message.place * PLACE, len, to, 0);
            if !peek {
                state.arrived.pop_front();
                made.read(message.place);
            }
            let received = Received {
                len,
                full: message.len,
                from: self.shown(message.from),
            };
            Some(copied.map(|()| Some(received)).map_err(|_| Errno::FAULT))
        })?
    }

    /// Sleep until `test` finds something; drives the queue pair.
    fn wait_until<T>(
        &self,
        made: &Made,
        wait: Wait,
        mut test: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, Errno> {
        let mut look = || {
            let mut state = lock(&self.state);
            if made.process(&mut state) {
                self.wake(made);
            }
            // Later changes make another epoch.
            let epoch = made.cq.epoch();
            let found = if state.closed {
                Some(Err(Errno::BADF))
            } else {
                test(&mut state).map(Ok)
            };
            (found, epoch)
        };
        if let (Some(found), _) = look() {
            return found;
        }
        if !wait.waits() {
            made.cq.look();
            return look().0.unwrap_or(Err(Errno::AGAIN));
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            let (found, epoch) = look();
            if let Some(found) = found {
                break found;
            }
            let deadline = wait.deadline();
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                break Err(Errno::AGAIN);
            }
            if made.cq.watch(epoch, true, left) {
                break Err(Errno::INTR);
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        found
    }

    /// Something has changed that others may wait for.
    fn wake(&self, made: &Made) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            made.cq.interrupt();
        }
        self.bell.ring();
    }

    /// End one direction, or both: that is this end's alone.
    ///
    /// # Errors
    /// `ENOTCONN` without a peer.
    pub fn shutdown(&self, how: Shutdown) -> Result<(), Errno> {
        let mut state = lock(&self.state);
        let made = self.made.get();
        let Some(made) = made.filter(|_| state.peer.is_some()) else {
            return Err(Errno::NOTCONN);
        };
        state.read_shut |= how != Shutdown::Write;
        state.send_shut |= how != Shutdown::Read;
        self.wake(made);
        Ok(())
    }

    /// Closes: calls of other threads end, and messages are no longer received. Unsent messages are lost when the last handle is dropped.
    pub fn close(&self) {
        lock(&self.state).closed = true;
        if let Some(made) = self.made.get() {
            self.wake(made);
        }
        self.bell.ring();
    }

    /// Our address; before it has one, that of any address and port 0. With a peer, the one that it is reached from.
    ///
    /// # Errors
    /// `EBADF` after the close.
    pub fn local_addr(&self) -> Result<SocketAddr, Errno> {
        let (peer, closed) = {
            let state = lock(&self.state);
            (state.peer, state.closed)
        };
        if closed {
            return Err(Errno::BADF);
        }
        let Some(made) = self.made.get() else {
            return Ok(self.any_addr());
        };
        let mut local = made.local;
        if let Some(peer) = peer.filter(|_| local.ip().is_unspecified())
            && let Some(ip) = source_for(peer)
        {
            local = SocketAddr::new(ip, local.port());
        }
        Ok(self.shown(local))
    }

    /// The peer's address.
    ///
    /// # Errors
    /// `ENOTCONN`.
    pub fn peer_addr(&self) -> Result<SocketAddr, Errno> {
        let peer = lock(&self.state).peer.ok_or(Errno::NOTCONN)?;
        Ok(self.shown(peer))
    }

    pub fn take_error(&self) -> Option<Errno> {
        lock(&self.state).error.take()
    }

    fn ready_now(state: &State) -> PollFlags {
        if state.closed {
            return PollFlags::NVAL;
        }
        let mut ready = PollFlags::empty();
        ready.set(PollFlags::IN, !state.arrived.is_empty() || state.read_shut);
        ready.set(PollFlags::RDHUP, state.read_shut);
        ready.set(PollFlags::HUP, state.read_shut && state.send_shut);
        ready.set(PollFlags::OUT, !state.free.is_empty() || state.send_shut);
        ready.set(PollFlags::ERR, state.error.is_some());
        ready
    }
}

/// The local address from which the system reaches `peer`; nothing is sent.
fn source_for(peer: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if peer.is_ipv6() {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(peer).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

impl Pollable for DatagramSocket {
    fn ready(&self) -> PollFlags {
        let Ok(made) = self.made() else {
            return PollFlags::ERR;
        };
        made.cq.look();
        let mut state = lock(&self.state);
        made.process(&mut state);
        Self::ready_now(&state)
    }

    fn arm(&self) -> Heard {
        let heard = self.bell.arm();
        if let Some(made) = self.made.get() {
            made.cq.release();
        }
        heard
    }

    fn bell(&self) -> &Bell {
        &self.common.bell
    }

    fn wait_ready(
        &self,
        wanted: PollFlags,
        deadline: Option<Instant>,
    ) -> Option<Result<PollFlags, Errno>> {
        let made = self.made().ok()?;
        let wait = deadline.map_or(Wait::Forever, Wait::Until);
        let wanted = wanted | PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
        let waited = self.wait_until(made, wait, |state| {
            let ready = Self::ready_now(state) & wanted;
            (!ready.is_empty()).then_some(ready)
        });
        Some(match waited {
            Err(Errno::AGAIN) => Ok(PollFlags::empty()),
            Err(Errno::BADF) => Ok(PollFlags::NVAL),
            waited => waited,
        })
    }
}
