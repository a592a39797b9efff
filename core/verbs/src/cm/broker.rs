//! Queue pairs joined by number, for programs without a connection manager. Such programs exchange their GID and queue pair number by a
//! channel of their own, and call `modify_qp`.
//!
//! There is no daemon: a number contains the TCP port of its process's listener, `port << 8 | index`, so a peer finds the queue pair with
//! only the address (the GID) and the number. The side with the smaller number dials, with the MPA start-up of every connection; the
//! private data names the queue pairs. Format: docs/spec/persona.md.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::ops::RangeInclusive;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use weft_rnic::ext::QpExt;
use weft_rnic::{BindOptions, ConnParam, ConnectError, Incoming, Listening, WcStatus};

use super::lock;
use crate::{Device, Qp, UD_GROUP, UdPort};

/// Queue pairs behind one listener: the low byte of a number.
const INDEXES: usize = 256;
/// Requests kept for a queue pair whose peer is not set yet.
const EARLY: usize = 4;
/// Requests that a listener keeps unanswered.
const BACKLOG: u32 = 1024;
/// How long sends wait for a peer, unless [`Broker::set_patience`] sets another time.
const PATIENCE: Duration = Duration::from_secs(10);
/// Listeners tried for one whose number is free as a UDP port too.
const DATAGRAM_DOORS: usize = 16;
/// Listeners tried for one whose numbers are all at least [`FIRST_NUMBER`].
const UPPER_DOORS: usize = 16;
/// The first number of a listener that every peer of this host knows for one of a broker: below are those that RoCE counts up.
pub const FIRST_NUMBER: u32 = 1 << 23;
/// Connections that are dialled at once. The peer would refuse more than it can queue.
const DIALS: usize = 128;
/// Pauses between attempts to reach a peer: the first, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(200)];

const MAGIC: [u8; 4] = *b"WQP1";
const NO_SUCH_QP: u8 = 1;
const OTHER_PEER: u8 = 2;

/// A queue pair, as its peer knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QpName {
    /// Its number (24 bits).
    pub num: u32,
    /// The address behind its GID.
    pub ip: IpAddr,
}

impl QpName {
    fn port(self) -> u16 {
        (self.num >> 8) as u16
    }

    fn put(self, out: &mut [u8; Hello::LEN], num: usize, gid: usize) {
        out[num..num + 4].copy_from_slice(&self.num.to_be_bytes());
        out[gid..gid + 16].copy_from_slice(&gid_of(self.ip));
    }

    fn get(from: &[u8; Hello::LEN], num: usize, gid: usize) -> QpName {
        let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|i| from[at + i]));
        let gid = std::array::from_fn(|i| from[gid + i]);
        QpName {
            num: word(num),
            ip: ip_of(gid),
        }
    }
}

/// The GID of an address: an IPv6 address itself, an IPv4 address mapped into IPv6 (as `RoCEv2` has it).
pub fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// The address of a GID, see [`gid_of`].
pub fn ip_of(gid: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
}

/// The private data of a request: the number and GID of the initiator and of the responder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    from: QpName,
    to: QpName,
}

impl Hello {
    const LEN: usize = 48;

    fn encode(self) -> Vec<u8> {
        let mut out = [0; Hello::LEN];
        out[..4].copy_from_slice(&MAGIC);
        self.from.put(&mut out, 8, 16);
        self.to.put(&mut out, 12, 32);
        out.to_vec()
    }

    fn decode(data: &[u8]) -> Option<Hello> {
        let data: &[u8; Hello::LEN] = data.first_chunk()?;
        (data[..4] == MAGIC).then(|| Hello {
            from: QpName::get(data, 8, 16),
            to: QpName::get(data, 12, 32),
        })
    }
}

fn refusal(code: u8) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.push(code);
    out
}

/// A listener and the numbers behind it.
struct NumberBlock {
    /// The unspecified address of its family.
    ip: IpAddr,
    port: u16,
    used: [bool; INDEXES],
    /// Where the search for a free index continues, so that numbers are reused late.
    next: usize,
    /// The UDP port of the same number, once it was needed.
    datagrams: Option<UdPort>,
    _listening: Listening,
}

impl NumberBlock {
    fn take(&mut self) -> Option<u32> {
        let num = |index: usize| u32::from(self.port) << 8 | index as u32;
        let index = (0..INDEXES)
            .map(|i| (self.next + i) % INDEXES)
            // One number is reserved for the members of multicast groups.
            .find(|&i| !self.used[i] && num(i) != UD_GROUP)?;
        let num = num(index);
        self.used[index] = true;
        self.next = (index + 1) % INDEXES;
        Some(num)
    }

    fn datagrams(&mut self, device: &Device) -> io::Result<UdPort> {
        let port = match &self.datagrams {
            Some(port) => port.clone(),
            None => device.bind_ud(SocketAddr::new(self.ip, self.port))?,
        };
        Ok(self.datagrams.insert(port).clone())
    }
}

/// A queue pair whose peer is set, and which is not connected yet.
struct Joining {
    qp: Weak<Qp>,
    hello: Hello,
    /// The peer's address, on the side that dials.
    dial: Option<SocketAddr>,
    source: Option<SocketAddr>,
    param: ConnParam,
    /// Distinguishes the outcome of a dial from that of an earlier one.
    round: u64,
    /// A dial is under way, or a thread is about to begin it: a second one could be taken for the next connection by a peer that is reset meanwhile.
    dialling: bool,
    pause: Duration,
    due: Instant,
    /// Since when sends have been waiting.
    waiting: Option<Instant>,
    patience: Duration,
}

#[derive(Default)]
struct State {
    blocks: Vec<NumberBlock>,
    joining: HashMap<u32, Joining>,
    /// Numbers of queue pairs whose peer is set, and which do not wait for it.
    settled: HashSet<u32>,
    /// Requests for queue pairs whose peer is not set yet.
    early: HashMap<u32, Vec<(Hello, Incoming)>>,
    /// The other ends of queue pairs that are joined to themselves.
    twins: HashMap<u32, Arc<Qp>>,
    rounds: u64,
    /// Dials under way.
    dials: usize,
    /// When a connection with this address came about last.
    heard: HashMap<IpAddr, Instant>,
    /// Counts events for the thread.
    news: u64,
    /// The thread that dials again and loses patience.
    awake: bool,
}

impl State {
    /// This queue pair is joined to its peer.
    fn end_join(&mut self, num: u32) {
        if let Some(joining) = self.joining.remove(&num) {
            self.heard.insert(joining.hello.to.ip, Instant::now());
        }
        if self.joining.is_empty() {
            self.heard = HashMap::new();
        }
        self.settled.insert(num);
    }
}

struct Inner {
    device: Device,
    state: Mutex<State>,
    changed: Condvar,
}

/// Joins the queue pairs of one process to those of others, by number. Clones are handles of the same one.
#[derive(Clone)]
pub struct Broker(Arc<Inner>);

impl Broker {
    /// A broker for queue pairs of this device. It takes no port before the first number is asked for.
    pub fn new(device: &Device) -> Broker {
        Broker(Arc::new(Inner {
            device: device.clone(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// A number for a queue pair to be. The listener behind it takes peers from now on, and lets them wait until [`Broker::join`].
    ///
    /// # Errors
    /// As `bind(2)` and `listen(2)`.
    pub fn reserve(&self) -> io::Result<Number> {
        let mut state = lock(&self.0.state);
        if let Some(num) = state.blocks.iter_mut().find_map(NumberBlock::take) {
            return Ok(Number(num, self.clone()));
        }
        let mut block = self.open_block()?;
        let num = block.take().ok_or(io::ErrorKind::AddrInUse)?;
        state.blocks.push(block);
        Ok(Number(num, self.clone()))
    }

    /// A number for a datagram queue pair to be, and the UDP port to make it with: that of the number, so that a sender finds the queue pair with nothing
    /// but the address and the number.
    ///
    /// # Errors
    /// As `bind(2)` and `listen(2)`.
    pub fn reserve_datagram(&self) -> io::Result<(Number, UdPort)> {
        let device = &self.0.device;
        let mut state = lock(&self.0.state);
        for block in &mut state.blocks {
            // The port may be in use by another process; then try another one.
            if block.used.contains(&false)
                && let Ok(port) = block.datagrams(device)
                && let Some(num) = block.take()
            {
                return Ok((Number(num, self.clone()), port));
            }
        }
        let mut refused = Vec::new();
        loop {
            let mut block = self.open_block()?;
            match block.datagrams(device) {
                Ok(port) => {
                    let num = block.take().ok_or(io::ErrorKind::AddrInUse)?;
                    state.blocks.push(block);
                    return Ok((Number(num, self.clone()), port));
                }
                Err(error) if refused.len() == DATAGRAM_DOORS => return Err(error),
                // Kept for now, so that the kernel gives us another port.
                Err(_) => refused.push(block),
            }
        }
    }

    /// A listener: at a port whose numbers are this device's, or in the upper half of the ports if the system has one free there.
    fn open_block(&self) -> io::Result<NumberBlock> {
        if let Some(ports) = self.0.device.ports_of_numbers()? {
            return self.open_among(ports);
        }
        let mut low = Vec::new();
        loop {
            let block = self.open_door(0)?;
            if u32::from(block.port) << 8 >= FIRST_NUMBER || low.len() == UPPER_DOORS {
                return Ok(block);
            }
            // Kept for now, so that the kernel gives us another port.
            low.push(block);
        }
    }

    /// A listener at one of these ports. Other processes may have some of them, or of the names that belong to them.
    fn open_among(&self, ports: RangeInclusive<u16>) -> io::Result<NumberBlock> {
        let mut ports: Vec<u16> = ports.collect();
        // Not those of the last process first: its peers may dial still.
        let first = RandomState::new().hash_one(()) as usize % ports.len();
        ports.rotate_left(first);
        let taken = io::ErrorKind::AddrInUse;
        for port in ports {
            match self.open_door(port) {
                Err(error) if error.kind() == taken => {}
                made => return made,
            }
        }
        Err(taken.into())
    }

    /// A listener at this port, or at any for 0.
    fn open_door(&self, port: u16) -> io::Result<NumberBlock> {
        let weak = Arc::downgrade(&self.0);
        let on_request = move |incoming| {
            if let Some(inner) = weak.upgrade() {
                inner.arrived(incoming);
            }
        };
        let listen = |ip: IpAddr| {
            let options = BindOptions {
                v6_only: false,
                share: false,
            };
            let bound = self
                .0
                .device
                .bind_with(SocketAddr::new(ip, port), options)?;
            if port != 0 {
                // Both sides of a pair look at it (docs/spec/persona.md, "Which wire"): it is ours, or the number is no good.
                bound.claim_name()?;
            }
            bound.listen(BACKLOG, &ConnParam::default(), on_request.clone())
        };
        // Without IPv6 in the kernel, IPv4 alone.
        let listening =
            listen(Ipv6Addr::UNSPECIFIED.into()).or_else(|error| match error.kind() {
                io::ErrorKind::AddrInUse => Err(error),
                _ => listen(Ipv4Addr::UNSPECIFIED.into()),
            })?;
        let addr = listening.local_addr();
        Ok(NumberBlock {
            ip: addr.ip(),
            port: addr.port(),
            used: [false; INDEXES],
            next: 0,
            datagrams: None,
            _listening: listening,
        })
    }

    /// Join `qp`, which has the number and the address `ours`, to `peer`; `scope` is the interface's index where that address is a
    /// link-local one, else 0. Returns at once; the peer may come much later. Sends can be posted from now on and wait for it: when it has not
    /// come after the patience, and nothing has of its address in that time, the first of them ends with [`WcStatus::RetryExcErr`].
    ///
    /// # Errors
    /// `InvalidInput` for one that is already joined; [`ConnectError::Invalid`] in form.
    pub fn join(
        &self,
        qp: &Arc<Qp>,
        ours: QpName,
        peer: QpName,
        scope: u32,
        param: &ConnParam,
    ) -> io::Result<()> {
        if peer.port() == 0 || peer.num >= 1 << 24 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // One that is joined to itself dials, and has another end to be dialled.
        let dials = ours <= peer;
        let at = |ip, port| match ip {
            IpAddr::V4(ip) => SocketAddr::from((ip, port)),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, scope).into(),
        };
        let param = ConnParam {
            private_data: if dials {
                Hello {
                    from: ours,
                    to: peer,
                }
                .encode()
            } else {
                MAGIC.to_vec()
            },
            ..param.clone()
        };
        let mut state = lock(&self.0.state);
        if state.joining.contains_key(&ours.num) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if ours == peer {
            let twin = qp.twin().ok_or(io::ErrorKind::InvalidInput)?;
            state.twins.insert(ours.num, Arc::new(twin));
        }
        qp.allow_early_posts();
        state.rounds += 1;
        let round = state.rounds;
        let now = Instant::now();
        state.joining.insert(
            ours.num,
            Joining {
                qp: Arc::downgrade(qp),
                hello: Hello {
                    from: ours,
                    to: peer,
                },
                dial: dials.then(|| at(peer.ip, peer.port())),
                source: dials.then(|| at(ours.ip, 0)),
                param,
                round,
                // By this thread, and not by that of the broker as well.
                dialling: dials,
                pause: PAUSES[0],
                due: now,
                waiting: None,
                patience: PATIENCE,
            },
        );
        let early = state.early.remove(&ours.num).unwrap_or_default();
        self.0.wake(&mut state);
        drop(state);
        if dials {
            self.0.dial(ours.num, round);
        } else {
            for (hello, incoming) in early {
                self.0.admit(hello, incoming);
            }
        }
        Ok(())
    }

    /// Sets how long sends of this queue pair wait for a peer that does not connect (the transport timer times the retries).
    pub fn set_patience(&self, num: u32, patience: Duration) {
        if let Some(joining) = lock(&self.0.state).joining.get_mut(&num) {
            joining.patience = patience;
        }
    }

    /// Stops joining the queue pair with this number: it returns to its first state, or is destroyed.
    pub fn leave(&self, num: u32) {
        self.end(num, false);
    }

    /// The peer of this queue pair comes by another way: requests for it are rejected until [`Broker::leave`].
    pub fn refuse(&self, num: u32) {
        self.end(num, true);
    }

    fn end(&self, num: u32, settled: bool) {
        let mut state = lock(&self.0.state);
        let gone = (
            state.joining.remove(&num),
            state.early.remove(&num),
            state.twins.remove(&num),
        );
        if settled {
            state.settled.insert(num);
        } else {
            state.settled.remove(&num);
        }
        // Dropping requests rejects them, on sockets, and a twin closes its connection: not under the lock.
        drop(state);
        drop(gone);
    }
}

/// A queue pair's number, from [`Broker::reserve`]. Dropping it frees the number.
pub struct Number(u32, Broker);

impl Number {
    /// The number: 24 bits.
    pub fn get(&self) -> u32 {
        self.0
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        self.1.leave(self.0);
        let mut state = lock(&self.1.0.state);
        let port = (self.0 >> 8) as u16;
        if let Some(block) = state.blocks.iter_mut().find(|d| d.port == port) {
            block.used[self.0 as usize % INDEXES] = false;
        }
    }
}

impl Inner {
    /// Dials for the thread that has set `dialling` in this round.
    fn dial(self: &Arc<Self>, num: u32, round: u64) {
        let mut state = lock(&self.state);
        let State { joining, dials, .. } = &mut *state;
        let Some(joining) = joining.get_mut(&num).filter(|j| j.round == round) else {
            return;
        };
        let (Some(addr), Some(qp)) = (joining.dial, joining.qp.upgrade()) else {
            return;
        };
        if *dials >= DIALS {
            // It stays due: the thread looks again when half of those are over.
            joining.dialling = false;
            return;
        }
        *dials += 1;
        let (source, param) = (joining.source, joining.param.clone());
        drop(state);
        let weak = Arc::downgrade(self);
        self.device.dial(addr, source, &qp, &param, move |outcome| {
            if let Some(inner) = weak.upgrade() {
                inner.dialled(num, round, outcome.map(drop));
            }
        });
    }

    fn dialled(&self, num: u32, round: u64, outcome: Result<(), ConnectError>) {
        let mut state = lock(&self.state);
        state.dials -= 1;
        if state.dials == DIALS / 2 {
            state.news += 1;
            self.changed.notify_all();
        }
        let Some(joining) = state.joining.get_mut(&num).filter(|j| j.round == round) else {
            return;
        };
        match outcome {
            Ok(()) => state.end_join(num),
            Err(error) => {
                tracing::debug!(num, peer = joining.hello.to.num, %error, "the peer is not there yet");
                joining.dialling = false;
                joining.due = Instant::now() + joining.pause;
                joining.pause = (joining.pause * 2).min(PAUSES[1]);
                state.news += 1;
                self.changed.notify_all();
            }
        }
    }

    /// Handles a request for one of our queue pairs.
    fn arrived(&self, incoming: Incoming) {
        let Some(hello) = Hello::decode(incoming.private_data()) else {
            return;
        };
        // The initiator dials from the address behind its GID. Another host must not take a queue pair's place, or the peer's place in the
        // queue.
        if incoming.peer_addr().ip().to_canonical() != hello.from.ip {
            let _ = incoming.reject(&refusal(OTHER_PEER));
            return;
        }
        self.admit(hello, incoming);
    }

    fn admit(&self, hello: Hello, incoming: Incoming) {
        let num = hello.to.num;
        let mut state = lock(&self.state);
        let known = state.blocks.iter().any(|block| {
            block.port == hello.to.port() && block.used[num as usize % INDEXES] && num < 1 << 24
        });
        if !known {
            drop(state);
            let _ = incoming.reject(&refusal(NO_SUCH_QP));
            return;
        }
        if state.settled.contains(&num) {
            drop(state);
            let _ = incoming.reject(&refusal(OTHER_PEER));
            return;
        }
        let Some(joining) = state.joining.get(&num) else {
            let early = state.early.entry(num).or_default();
            // A second request of one peer replaces its first one. Otherwise the newest requests are the most likely to be alive.
            let before = early.iter().position(|(other, _)| *other == hello);
            let before = before.or_else(|| (early.len() >= EARLY).then_some(0));
            let old = before.map(|at| early.remove(at));
            early.push((hello, incoming));
            drop(state);
            drop(old);
            return;
        };
        let itself = hello.from == hello.to;
        if joining.hello.to != hello.from || (joining.dial.is_some() && !itself) {
            drop(state);
            let _ = incoming.reject(&refusal(OTHER_PEER));
            return;
        }
        let (param, round) = (joining.param.clone(), joining.round);
        let qp = if itself {
            state.twins.get(&num).cloned()
        } else {
            joining.qp.upgrade()
        };
        drop(state);
        // It dials again: a queue pair that was joined to a request given up could not be joined to that one.
        if incoming.is_over() {
            return;
        }
        let Some(qp) = qp else { return };
        match incoming.accept(&qp, &param) {
            Ok(()) => {
                let mut state = lock(&self.state);
                // One that is joined to itself is joined when its dial says so.
                if !itself && state.joining.get(&num).is_some_and(|j| j.round == round) {
                    state.end_join(num);
                }
            }
            // It will dial again.
            Err(error) => tracing::debug!(num, %error, "a peer went away before it was let in"),
        }
    }

    /// See to it that the thread runs, and looks.
    fn wake(self: &Arc<Self>, state: &mut State) {
        state.news += 1;
        if state.awake {
            self.changed.notify_all();
            return;
        }
        let inner = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("weft-broker".into());
        match thread.spawn(move || look_after(&inner)) {
            Ok(_) => state.awake = true,
            Err(error) => tracing::warn!(%error, "no thread to dial again with"),
        }
    }

    /// Dials due connections and fails those that have waited too long. Returns when to run again, and the count of events seen; `None`: no
    /// queue pair is joining.
    fn round(self: &Arc<Self>, now: Instant) -> Option<(Instant, u64)> {
        let mut due = Vec::new();
        let mut late: Vec<Arc<Qp>> = Vec::new();
        let mut next = now + PAUSES[1];
        let mut state = lock(&self.state);
        let State {
            joining: all,
            heard,
            ..
        } = &mut *state;
        all.retain(|&num, joining| {
            let Some(qp) = joining.qp.upgrade() else {
                return false;
            };
            if qp.outstanding() == 0 {
                joining.waiting = None;
            } else {
                let since = *joining.waiting.get_or_insert(now);
                // A host that makes connections may be busy making many, and is alive.
                let heard = heard.get(&joining.hello.to.ip).copied();
                if since.max(heard.unwrap_or(since)) + joining.patience <= now {
                    late.push(qp);
                    return false;
                }
            }
            if joining.dial.is_some() && !joining.dialling {
                if joining.due <= now {
                    joining.dialling = true;
                    due.push((num, joining.round));
                } else {
                    next = next.min(joining.due);
                }
            }
            true
        });
        state.settled.extend(late.iter().map(|qp| qp.num()));
        let more = !state.joining.is_empty();
        state.awake = more;
        let seen = state.news;
        drop(state);
        for qp in late {
            qp.fail(WcStatus::RetryExcErr);
        }
        for (num, round) in due {
            self.dial(num, round);
        }
        more.then_some((next, seen))
    }
}

fn look_after(inner: &Weak<Inner>) {
    loop {
        let Some(inner) = inner.upgrade() else {
            return;
        };
        let Some((next, seen)) = inner.round(Instant::now()) else {
            return;
        };
        let state = lock(&inner.state);
        let pause = next.saturating_duration_since(Instant::now());
        let woken = inner
            .changed
            .wait_timeout_while(state, pause, |state| state.news == seen);
        drop(woken.unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_read_as_it_was_written() {
        let hello = Hello {
            from: QpName {
                num: 0x0012_3456,
                ip: "192.0.2.7".parse().unwrap(),
            },
            to: QpName {
                num: 0x00ab_cdef,
                ip: "2001:db8::9".parse().unwrap(),
            },
        };
        let bytes = hello.encode();
        assert_eq!(bytes.len(), Hello::LEN);
        assert_eq!(Hello::decode(&bytes), Some(hello));
        assert_eq!(Hello::decode(&bytes[..47]), None);
        assert_eq!(Hello::decode(&[0; 48]), None);
        // docs/spec/persona.md
        assert_eq!(&bytes[..8], b"WQP1\0\0\0\0");
        assert_eq!(&bytes[8..16], &[0, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef]);
        assert_eq!(&bytes[26..32], &[0xff, 0xff, 192, 0, 2, 7]);
    }
}
