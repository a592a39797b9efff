//! The context: one connection and everything that belongs to it.
//!
//! The states are those of the thesis's fig. 3.14; those that it passes through by itself there (address and
//! route resolution) are inside the calls here.
//!
//! ```text
//!   initiator   alloc() ──> VALID ── connect() ──> CONNECTED ─┐ disconnect(), await_disconnect(),
//!   responder   listen() ─> CONN_REQ ─ accept() ─> CONNECTED ─┤ or the connection breaks
//!                             └────── reject() ──> INVALID  <─┘
//! ```

use std::collections::VecDeque;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use weft_verbs::any::cm::{self, Dial, Request};
use weft_verbs::any::{Cq, Device, Pd, Qp, QpInit};
use weft_verbs::cm::ConnParam;
pub(crate) use weft_verbs::ext::lock;
use weft_verbs::{Access, EndReason, Wc, WcStatus};

use crate::{ADV_LEN, Error, Lmr, Rmr};

/// Receives for advertisements that can be posted at once.
pub(crate) const ADVS: usize = 16;
/// Marks the receives for advertisements among all receives.
pub(crate) const ADV_ID: u64 = 1 << 63;
/// How often a wait without a time limit checks that the connection is alive.
const LOOK: Duration = Duration::from_millis(500);

/// The state of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The connection has ended, or could not be made; the context cannot connect again.
    Invalid,
    /// All objects are there; not connected.
    Valid,
    /// A peer requests a connection.
    ConnReq,
    /// Connected.
    Connected,
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Invalid => "INVALID",
            Self::Valid => "VALID",
            Self::ConnReq => "CONN_REQ",
            Self::Connected => "CONNECTED",
        })
    }
}

/// Which completions to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CqType {
    /// Of sends, Writes and Reads.
    Send,
    /// Of receives.
    Recv,
}

/// The parameters of a context.
#[derive(Clone)]
pub struct Options {
    /// The device; contexts of one program can share it.
    pub device: Device,
    /// Private data, depths and settings of the wire protocol.
    pub param: ConnParam,
    /// Sends, Writes and Reads that may be outstanding.
    pub max_send_wr: u32,
    /// Receives that may be outstanding, without those for advertisements.
    pub max_recv_wr: u32,
    /// Scatter/gather elements of one request.
    pub max_sge: u32,
}

impl Options {
    /// A device of its own, CRC on, 128 sends, 128 receives, 4 elements.
    pub fn new() -> Result<Self, Error> {
        Ok(Self::with(weft_verbs::Device::open()?.into()))
    }

    /// As [`Options::new`], with this device: the soft RNIC, or an RNIC of the machine ([`weft_verbs::any::Choice`]).
    pub fn with(device: Device) -> Self {
        Self {
            device,
            param: ConnParam::default(),
            max_send_wr: 128,
            max_recv_wr: 128,
            max_sge: 4,
        }
    }
}

/// How a connection ended, and the condition variable for threads that wait for the end.
type End = Arc<(Mutex<Option<EndReason>>, Condvar)>;

/// One connection and everything that belongs to it.
pub struct Context {
    // Dropped first, because the connection uses the memory.
    pub(crate) qp: Option<Qp>,
    state: State,
    options: Options,
    peer: Peer,
    pd: Pd,
    pub(crate) send_cq: Cq,
    pub(crate) recv_cq: Cq,
    pub(crate) advs: Lmr,
    /// Places in `advs` without a receive.
    pub(crate) free_advs: Mutex<Vec<usize>>,
    /// Completions of receives that nobody has asked for yet.
    stash: Mutex<Stash>,
    /// The thread that was at the queue of receives has left it.
    sorted: Condvar,
    /// Identifies the next work request.
    pub(crate) next_id: std::sync::atomic::AtomicU64,
    private_data: Vec<u8>,
    end: End,
}

#[derive(Default)]
struct Stash {
    recv: VecDeque<Wc>,
    advs: VecDeque<Wc>,
    /// A thread takes completions from the queue.
    at_queue: bool,
}

impl Stash {
    /// Moves completions of messages to `out`: how many.
    fn fill(&mut self, out: &mut [Wc]) -> Option<usize> {
        let n = out.len().min(self.recv.len());
        for (to, wc) in out.iter_mut().zip(self.recv.drain(..n)) {
            *to = wc;
        }
        (n > 0).then_some(n)
    }
}

enum Peer {
    Dial(SocketAddr, Dial),
    Request(Request),
    Gone,
}

impl Context {
    /// Makes everything that a connection to `addr` needs, with default [`Options`] (`iw_ctx_alloc`).
    pub fn alloc(addr: impl ToSocketAddrs + std::fmt::Debug) -> Result<Self, Error> {
        Self::alloc_with(addr, Options::new()?)
    }

    /// As [`Self::alloc`], with options.
    pub fn alloc_with(
        addr: impl ToSocketAddrs + std::fmt::Debug,
        options: Options,
    ) -> Result<Self, Error> {
        let addr = resolve(&addr)?;
        let dial = Dial::new(&options.device, addr, options.param.options.timeout)?;
        Self::new(Peer::Dial(addr, dial), State::Valid, options)
    }

    fn new(peer: Peer, state: State, options: Options) -> Result<Self, Error> {
        let device = &options.device;
        let pd = device.alloc_pd()?;
        let max_recv_wr = options.max_recv_wr.saturating_add(ADVS as u32);
        let send_cq = device.create_cq(options.max_send_wr)?;
        let recv_cq = device.create_cq(max_recv_wr)?;
        let init = QpInit {
            max_send_wr: options.max_send_wr,
            max_recv_wr,
            max_sge: options.max_sge,
            ..QpInit::new(&send_cq, &recv_cq)
        };
        let qp = match &peer {
            Peer::Dial(_, dial) => dial.create_qp(&pd, &init)?,
            Peer::Request(request) => request.create_qp(&pd, &init)?,
            Peer::Gone => return Err(Error::Ended),
        };
        let end = End::default();
        let told = Arc::clone(&end);
        qp.on_end(move |reason| {
            *lock(&told.0) = Some(reason);
            told.1.notify_all();
        });
        let advs = Lmr(pd.alloc_mr(ADVS * ADV_LEN, Access::LOCAL_WRITE)?);
        Ok(Self {
            qp: Some(qp),
            state,
            options,
            peer,
            pd,
            send_cq,
            recv_cq,
            advs,
            free_advs: Mutex::new((0..ADVS).rev().collect()),
            stash: Mutex::default(),
            sorted: Condvar::new(),
            next_id: 0.into(),
            private_data: Vec::new(),
            end,
        })
    }

    /// The state of the context.
    pub fn state(&self) -> State {
        if self.state == State::Connected && lock(&self.end.0).is_some() {
            State::Invalid
        } else {
            self.state
        }
    }

    fn need(&self, call: &'static str, needs: State) -> Result<(), Error> {
        let is = self.state();
        if is == needs {
            Ok(())
        } else {
            Err(Error::State { call, needs, is })
        }
    }

    /// Connects; blocks until the responder has accepted or rejected, or for the time-out of
    /// [`Options::param`] (`iw_connect`).
    pub fn connect(&mut self) -> Result<(), Error> {
        self.need("connect()", State::Valid)?;
        let peer = std::mem::replace(&mut self.peer, Peer::Gone);
        let (Peer::Dial(_, dial), Some(qp)) = (peer, self.qp.take()) else {
            return Err(Error::Ended);
        };
        self.state = State::Invalid;
        let connection = dial.connect(qp, &self.options.param)?;
        self.connected(connection);
        Ok(())
    }

    /// Accepts the request that [`Listener::listen`] brought (`iw_accept`).
    pub fn accept(&mut self) -> Result<(), Error> {
        self.need("accept()", State::ConnReq)?;
        let peer = std::mem::replace(&mut self.peer, Peer::Gone);
        let (Peer::Request(request), Some(qp)) = (peer, self.qp.take()) else {
            return Err(Error::Ended);
        };
        self.state = State::Invalid;
        let connection = request.accept(qp, &self.options.param)?;
        self.connected(connection);
        Ok(())
    }

    fn connected(&mut self, connection: cm::Connection) {
        self.qp = Some(connection.qp);
        self.private_data = connection.private_data;
        self.state = State::Connected;
    }

    /// Rejects the request, with private data for the initiator (`iw_reject`).
    pub fn reject(mut self, private_data: &[u8]) -> Result<(), Error> {
        self.need("reject()", State::ConnReq)?;
        match std::mem::replace(&mut self.peer, Peer::Gone) {
            Peer::Request(request) => Ok(request.reject(private_data)?),
            Peer::Dial(..) | Peer::Gone => Ok(()),
        }
    }

    /// Closes the connection in order: posted requests are sent, then the peer sees the end. Returns
    /// when both sides have closed, or the peer has not within 5 s (`iw_disconnect`).
    pub fn disconnect(self) -> Result<(), Error> {
        self.need("disconnect()", State::Connected)
            .or_else(|e| self.ended_well().ok_or(e))?;
        if let Some(qp) = &self.qp {
            qp.disconnect();
        }
        self.wait_end();
        Ok(())
    }

    /// Waits until the peer has closed the connection, and closes this side too (`iw_await_disconnect`).
    pub fn await_disconnect(self) -> Result<EndReason, Error> {
        self.need("await_disconnect()", State::Connected)
            .or_else(|e| self.ended_well().ok_or(e))?;
        Ok(self.wait_end())
    }

    fn ended_well(&self) -> Option<()> {
        lock(&self.end.0).map(drop)
    }

    fn wait_end(&self) -> EndReason {
        let mut end = lock(&self.end.0);
        loop {
            if let Some(reason) = *end {
                return reason;
            }
            end = self.end.1.wait(end).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The private data of the peer's program, from its connection request or its answer.
    pub fn private_data(&self) -> &[u8] {
        match &self.peer {
            Peer::Request(request) => request.private_data(),
            _ => &self.private_data,
        }
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        match &self.peer {
            Peer::Dial(addr, _) => Some(*addr),
            Peer::Request(request) => Some(request.peer_addr()),
            Peer::Gone => self.qp.as_ref()?.peer_addr(),
        }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.options.device
    }

    /// The protection domain.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }

    /// The queue pair; none after a connection that was refused.
    pub fn qp(&self) -> Option<&Qp> {
        self.qp.as_ref()
    }

    /// The completion queue of sends or receives.
    pub fn cq(&self, of: CqType) -> &Cq {
        match of {
            CqType::Send => &self.send_cq,
            CqType::Recv => &self.recv_cq,
        }
    }

    /// Makes a new region of `len` zero bytes (`iw_lmr_create`).
    pub fn lmr_create(&self, len: usize, access: Access) -> Result<Lmr, Error> {
        Ok(Lmr(self.pd.alloc_mr(len, access | Access::LOCAL_WRITE)?))
    }

    /// Registers a buffer as a region (`iw_lmr_register`); [`Lmr::deregister`] gives it back.
    pub fn lmr_register(&self, buffer: Vec<u8>, access: Access) -> Result<Lmr, Error> {
        Ok(Lmr(self.pd.reg_mr(buffer, access | Access::LOCAL_WRITE)?))
    }

    /// Registers memory of the program's own, whose owner has promised that it stays.
    ///
    /// # Errors
    /// As [`Context::lmr_register`].
    pub fn lmr_register_raw(
        &self,
        memory: &weft_verbs::RawMemory,
        access: Access,
    ) -> Result<Lmr, Error> {
        Ok(Lmr(self
            .pd
            .reg_raw(memory, access | Access::LOCAL_WRITE)?))
    }

    /// Waits until `out` is full of completions of one kind, in their order. Receives of advertisements are
    /// not among them: those belong to [`Self::wait_recv_adv`].
    ///
    /// # Errors
    /// [`Error::Completion`] with the first work request that failed, [`Error::Ended`] when the connection
    /// has ended and nothing more can come.
    pub fn await_completions(&self, of: CqType, out: &mut [Wc]) -> Result<(), Error> {
        let mut done = 0;
        while done < out.len() {
            let rest = &mut out[done..];
            let got = match of {
                CqType::Send => {
                    let time = self.time_to_wait();
                    let got = self.send_cq.wait(rest, Some(time))?;
                    (got > 0 || !time.is_zero()).then_some(got)
                }
                CqType::Recv => self.take_recv(true, |stash| stash.fill(rest))?,
            };
            let got = got.ok_or(Error::Ended)?;
            if let Some(failed) = out[done..done + got]
                .iter()
                .find(|wc| wc.status != WcStatus::Success)
            {
                return Err(Error::Completion(*failed));
            }
            done += got;
        }
        Ok(())
    }

    /// Takes completions that are there, without waiting: their number.
    ///
    /// # Errors
    /// [`Error::Completion`] with the first work request that failed.
    pub fn poll_completions(&self, of: CqType, out: &mut [Wc]) -> Result<usize, Error> {
        let got = match of {
            CqType::Send => self.send_cq.poll(out)?,
            CqType::Recv => self.take_recv(false, |stash| stash.fill(out))?.unwrap_or(0),
        };
        match out[..got].iter().find(|wc| wc.status != WcStatus::Success) {
            Some(failed) => Err(Error::Completion(*failed)),
            None => Ok(got),
        }
    }

    /// How long to wait for a completion before checking the connection again. Zero after it has ended: its last completions are in the
    /// queues before its end is announced, so a poll that finds nothing then is the last.
    fn time_to_wait(&self) -> Duration {
        match self.state() {
            State::Connected => LOOK,
            _ => Duration::ZERO,
        }
    }

    /// Takes of the completions of receives what `take` wants, when there is some. One thread at a time is at the queue; it sorts what comes, so that
    /// each kind keeps its order, and the others wait for it. `None`: there is nothing now, or with `wait` nothing more can come.
    fn take_recv<T>(
        &self,
        wait: bool,
        mut take: impl FnMut(&mut Stash) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let mut stash = lock(&self.stash);
        let mut looked = false;
        loop {
            if let Some(taken) = take(&mut stash) {
                return Ok(Some(taken));
            }
            if looked {
                return Ok(None);
            }
            if stash.at_queue {
                if !wait {
                    return Ok(None);
                }
                let sorted = self.sorted.wait(stash);
                stash = sorted.unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            stash.at_queue = true;
            drop(stash);
            let mut wcs = [Wc::default(); 16];
            let time = if wait {
                self.time_to_wait()
            } else {
                Duration::ZERO
            };
            let got = match time {
                Duration::ZERO => self.recv_cq.poll(&mut wcs),
                time => self.recv_cq.wait(&mut wcs, Some(time)),
            };
            stash = lock(&self.stash);
            stash.at_queue = false;
            self.sorted.notify_all();
            let got = got?;
            for wc in &wcs[..got] {
                if wc.wr_id & ADV_ID == 0 {
                    stash.recv.push_back(*wc);
                } else {
                    stash.advs.push_back(*wc);
                }
            }
            // Of a queue with only completions of the other kind there may be more.
            looked = got == 0 && time.is_zero();
        }
    }

    /// Waits for an advertisement in a receive posted by [`Self::post_recv_adv`] (`iw_wait_recv_adv`).
    pub fn wait_recv_adv(&self) -> Result<Rmr, Error> {
        let adv = self.take_recv(true, |stash| stash.advs.pop_front())?;
        let wc = adv.ok_or(Error::Ended)?;
        let place = (wc.wr_id & !ADV_ID) as usize;
        let mut bytes = [0; ADV_LEN];
        self.advs.read(place * ADV_LEN, &mut bytes)?;
        lock(&self.free_advs).push(place);
        if wc.status != WcStatus::Success {
            return Err(Error::Completion(wc));
        }
        if wc.byte_len as usize != ADV_LEN {
            return Err(Error::NotAnAdvertisement(wc.byte_len));
        }
        Ok(Rmr::decode(bytes))
    }
}

fn resolve(addr: &(impl ToSocketAddrs + std::fmt::Debug)) -> Result<SocketAddr, Error> {
    let error = |source| Error::Address {
        what: format!("{addr:?}"),
        source,
    };
    let mut found = addr.to_socket_addrs().map_err(error)?;
    found
        .next()
        .ok_or_else(|| error(std::io::ErrorKind::NotFound.into()))
}

/// Waits for connection requests.
pub struct Listener {
    listener: cm::Listener,
    options: Options,
}

impl Listener {
    /// Listens on an address, port 0 for any free one, with default [`Options`] (`iw_open`).
    pub fn open(addr: impl ToSocketAddrs + std::fmt::Debug) -> Result<Self, Error> {
        Self::open_with(addr, Options::new()?)
    }

    /// As [`Self::open`], with options for the contexts of all connections.
    pub fn open_with(
        addr: impl ToSocketAddrs + std::fmt::Debug,
        options: Options,
    ) -> Result<Self, Error> {
        let at = resolve(&addr)?;
        let listener =
            cm::Listener::bind(&options.device, at, 64, &options.param).map_err(|error| {
                Error::Address {
                    what: format!("{addr:?}"),
                    source: error.source,
                }
            })?;
        Ok(Self { listener, options })
    }

    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// Waits for a connection request. The returned context is [`State::ConnReq`]: make regions and post receives, then accept or reject
    /// (`iw_listen` and `iw_ctx_alloc`).
    pub fn listen(&self) -> Result<Context, Error> {
        loop {
            if let Some(request) = self.listener.next_request(None)? {
                return Context::new(Peer::Request(request), State::ConnReq, self.options.clone());
            }
        }
    }
}
