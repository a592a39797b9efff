//! Messages over a queue pair, for both sides.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use weft_sys::{Interest, poll_fds};
use weft_verbs::any::cm::{Connection, Dial};
use weft_verbs::any::{CompChannel, Cq, Device, Mr, Pd, Qp, QpInit};
use weft_verbs::cm::{ConnParam, ConnectError, LinkOptions};
use weft_verbs::tls::Tls;
use weft_verbs::{Access, Error, MemError, RecvWr, SendWr, Wc, WcOpcode, WcStatus};

/// Limit for the start of a connection, and for a peer to take a message.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// Receives that each side has posted: a side that has more messages under way than replies to them breaks the protocol.
const RECEIVES: u64 = 4;
/// Work requests that may be outstanding.
const SENDS: u32 = 64;
/// Numbers of receives have this bit.
const RECEIVE: u64 = 1 << 63;
/// The number of a message's Send, inline and from the message buffer.
const MESSAGE: u64 = 1 << 62;
const STAGED: u64 = MESSAGE | 1;

/// A protocol of messages: how it is known, its limits, and how its threads wait.
#[derive(Debug, Clone, Copy)]
pub struct Protocol {
    /// The beginning of the private data of both MPA start-up frames.
    pub magic: [u8; 8],
    /// The version that is spoken here.
    pub version: u16,
    /// Bytes of a message.
    pub longest: usize,
    /// Bytes up to which a message travels inline.
    pub inline: usize,
    /// RDMA Reads outstanding at once.
    pub depth: u16,
    /// Mostly nothing comes: a thread that waits leaves the connection to the engine, and can wait for another descriptor too. Otherwise it
    /// polls.
    pub is_quiet: bool,
}

impl Protocol {
    /// The parameters of one side of a connection, by TLS unless the user wants none.
    pub fn param(&self, tls: Option<Tls>, private_data: Vec<u8>) -> ConnParam {
        ConnParam {
            private_data,
            ird: self.depth,
            ord: self.depth,
            options: LinkOptions {
                timeout: START_PATIENCE,
                ..LinkOptions::default()
            },
            tls,
        }
    }
}

/// The reason why a connection is unusable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// A Read or Write was refused.
    #[error("the peer does not let us reach its memory")]
    Denied,
    /// It has ended.
    #[error("the peer closed the connection or went away")]
    Closed,
    /// A message that is too long, or that the peer does not take, or one of its own out of turn.
    #[error("{0}")]
    Protocol(&'static str),
    /// A missing resource of this process.
    #[error("{0}")]
    Local(String),
}

impl From<MemError> for Broken {
    fn from(e: MemError) -> Self {
        Self::Local(e.to_string())
    }
}

/// One side's objects of one connection, in a protection domain of their own, so that keys known to one peer are useless to another.
pub struct Prepared {
    /// The protection domain.
    pub pd: Pd,
    protocol: Protocol,
    cq: Cq,
    channel: Option<CompChannel>,
    buffers: Mr,
}

impl Prepared {
    /// With the queue pair to connect, which `create` makes for the connection, and which has its receives.
    ///
    /// # Errors
    /// Missing resources.
    pub fn new(
        device: &Device,
        protocol: Protocol,
        create: impl FnOnce(&Pd, &QpInit) -> Result<Qp, Error>,
    ) -> Result<(Self, Qp), Error> {
        let pd = device.alloc_pd()?;
        let channel = protocol
            .is_quiet
            .then(|| device.create_comp_channel())
            .transpose()?;
        let depth = SENDS + 2 * RECEIVES as u32;
        let cq = match &channel {
            Some(channel) => device.create_cq_on(depth, channel)?,
            None => device.create_cq(depth)?,
        };
        let buffers = pd.alloc_mr(
            (RECEIVES as usize + 1) * protocol.longest,
            Access::LOCAL_WRITE,
        )?;
        let init = QpInit {
            max_send_wr: SENDS,
            max_recv_wr: RECEIVES as u32,
            max_sge: 1,
            max_inline: protocol.inline as u32,
            ..QpInit::new(&cq, &cq)
        };
        let qp = create(&pd, &init)?;
        let prepared = Self {
            pd,
            protocol,
            cq,
            channel,
            buffers,
        };
        let receives: Vec<_> = (0..RECEIVES).map(|i| prepared.receive(i)).collect();
        qp.post_recv(&receives)
            .map_err(|_| Error::Invalid("receives"))?;
        Ok((prepared, qp))
    }

    /// The connection of this queue pair.
    pub fn connected(self, qp: Qp) -> MessageChannel {
        MessageChannel {
            qp,
            base: self,
            is_staged: false,
        }
    }

    fn receive(&self, index: u64) -> RecvWr {
        let at = index as usize * self.protocol.longest;
        RecvWr::new(RECEIVE | index).sge(self.buffers.sge(at, self.protocol.longest))
    }
}

/// Something that has completed.
#[derive(Debug)]
pub enum Event {
    Message(Vec<u8>),
    /// The work request with this number.
    Done(u64),
}

pub struct MessageChannel {
    // Dropped first, because the connection uses the memory.
    /// Its queue pair.
    pub qp: Qp,
    /// The memory of its messages.
    base: Prepared,
    /// The message buffer for sending is in use.
    is_staged: bool,
}

/// Why a server was not reached.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// A missing resource of this process.
    #[error(transparent)]
    Local(#[from] Error),
    /// The connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
}

impl MessageChannel {
    /// Connects to a server; returns its private data too.
    ///
    /// # Errors
    /// [`DialError`].
    pub fn dial(
        device: &Device,
        protocol: Protocol,
        addr: SocketAddr,
        param: &ConnParam,
    ) -> Result<(Self, Vec<u8>), DialError> {
        let dial = Dial::new(device, addr, START_PATIENCE)?;
        let (prepared, qp) = Prepared::new(device, protocol, |pd, init| dial.create_qp(pd, init))?;
        let Connection { qp, private_data } = dial.connect(qp, param)?;
        Ok((prepared.connected(qp), private_data))
    }

    /// The protection domain of its memory.
    pub fn pd(&self) -> &Pd {
        &self.base.pd
    }

    /// Whether it has not ended.
    pub fn is_alive(&self) -> bool {
        self.qp.is_connected()
    }

    /// Sends a message. Each side has one under way at a time.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let Protocol {
            longest, inline, ..
        } = self.base.protocol;
        // A device may take less than was asked for.
        if bytes.len() <= inline.min(self.qp.max_inline() as usize) {
            return self.post(SendWr::send(MESSAGE).inline(bytes));
        }
        let end = Instant::now() + START_PATIENCE;
        while self.is_staged {
            if Instant::now() > end {
                return Err(Broken::Protocol("the peer takes no messages"));
            }
            // Only our own completion can come: a peer that sends now breaks the protocol.
            if self.next(Duration::from_secs(1), None)?.is_some() {
                return Err(Broken::Protocol("a message out of turn"));
            }
        }
        if bytes.len() > longest {
            return Err(Broken::Protocol("a message that is too long"));
        }
        let at = RECEIVES as usize * longest;
        self.base.buffers.write(at, bytes)?;
        let sge = self.base.buffers.sge(at, bytes.len());
        self.post(SendWr::send(STAGED).sge(sge))?;
        self.is_staged = true;
        Ok(())
    }

    /// Posts a work request; its completion is an [`Event::Done`].
    ///
    /// # Errors
    /// [`Broken::Closed`].
    pub fn post(&self, wr: SendWr) -> Result<(), Broken> {
        let posted = self.qp.post_send_one(wr.signaled());
        posted.map_err(|_| Broken::Closed)
    }

    /// The next event; waits up to `timeout`, or, if the protocol says so, until `other` can be read. `None`: nothing happened here.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn next(
        &mut self,
        timeout: Duration,
        other: Option<BorrowedFd<'_>>,
    ) -> Result<Option<Event>, Broken> {
        let end = Instant::now() + timeout;
        loop {
            let mut wcs = [Wc::default(); 1];
            let left = end.saturating_duration_since(Instant::now());
            let got = if self.base.channel.is_some() {
                self.look(&mut wcs)?
            } else {
                let waited = self.base.cq.wait(&mut wcs, Some(left));
                waited.map_err(|e| Broken::Local(e.to_string()))?
            };
            if got > 0 {
                match self.take(&wcs[0])? {
                    None => continue,
                    event => return Ok(event),
                }
            }
            let Some(channel) = self.base.channel.as_ref().filter(|_| !left.is_zero()) else {
                return Ok(None);
            };
            let fds = [Some(channel.as_fd()), other].into_iter().flatten();
            let fds: Vec<_> = fds.map(|fd| (fd, Interest::READ)).collect();
            // After a signal's handler it looks again.
            let ready = poll_fds(&fds, Some(left)).unwrap_or(0);
            if ready & 1 != 0 {
                while take_event(channel)? {}
            }
            if ready & 2 != 0 {
                return Ok(None);
            }
        }
    }

    /// A completion that is there. If there is none, later ones raise an event.
    fn look(&self, wcs: &mut [Wc; 1]) -> Result<usize, Broken> {
        let look = |wcs: &mut [Wc; 1]| {
            let taken = self.base.cq.take(wcs);
            taken.map_err(|e| Broken::Local(e.to_string()))
        };
        let got = look(wcs)?;
        if got > 0 {
            return Ok(got);
        }
        let asked = self.base.cq.req_notify(false);
        asked.map_err(|e| Broken::Local(e.to_string()))?;
        look(wcs)
    }

    /// What a completion means to the caller, if anything.
    fn take(&mut self, wc: &Wc) -> Result<Option<Event>, Broken> {
        match wc.status {
            WcStatus::Success => {}
            WcStatus::RemAccessErr => return Err(Broken::Denied),
            _ => return Err(Broken::Closed),
        }
        if wc.opcode == WcOpcode::Recv && wc.wr_id & RECEIVE != 0 {
            let index = wc.wr_id & !RECEIVE;
            let longest = self.base.protocol.longest;
            let len = (wc.byte_len as usize).min(longest);
            let bytes = self.base.buffers.to_vec(index as usize * longest, len)?;
            self.qp
                .post_recv(&[self.base.receive(index)])
                .map_err(|e| Broken::Local(e.to_string()))?;
            return Ok(Some(Event::Message(bytes)));
        }
        if wc.wr_id & MESSAGE != 0 {
            self.is_staged &= wc.wr_id != STAGED;
            return Ok(None);
        }
        Ok(Some(Event::Done(wc.wr_id)))
    }
}

/// Takes an event of the channel, if one is there.
fn take_event(channel: &CompChannel) -> Result<bool, Broken> {
    let event = channel.get_event(Some(Duration::ZERO));
    Ok(event.map_err(|e| Broken::Local(e.to_string()))?.is_some())
}
