//! The protocol of rdma-core's `rping`, both sides.
//!
//! ```text
//!   client                                             server
//!   fills its source buffer
//!   Send: address, rkey, size of the source ---------> RDMA Read of the source
//!   <------------------------------------------------- Send: go ahead
//!   Send: address, rkey, size of the sink -----------> RDMA Write of the same bytes into the sink
//!   <------------------------------------------------- Send: go ahead
//!   compares sink and source, next round
//! ```
//!
//! Every Send carries the same 16 bytes, big-endian: address (8), rkey (4), size (4); in the server's they mean
//! nothing. The pattern begins with the text `rdma-ping-N: ` and goes on with the letters from `A` to `z` in a circle,
//! starting one later each round; its last byte is zero.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use weft_verbs::cm::{self, ConnParam, ConnectError, Connection, Request};
use weft_verbs::{
    Access, Cq, CqOverrun, Device, MemError, Mr, Pd, PostError, Qp, QpInit, RecvWr, RemoteAddr,
    SendWr, Sge, Wc, WcOpcode, WcStatus,
};

/// The port that `rping` uses unless told.
pub const PORT: u16 = 7174;
/// The smallest size that `rping` takes: room for the text of any round.
pub const MIN_SIZE: usize = 26;
/// The largest size that `rping` itself takes; our two sides take more.
pub const MAX_SIZE: usize = 64 * 1024 - 1;

const INFO_LEN: usize = 16;
const FIRST_LETTER: u8 = b'A';
const LETTERS: usize = (b'z' - b'A') as usize + 1;
/// A ping whose answer takes longer has failed.
const PATIENCE: Duration = Duration::from_mins(1);
/// How long to wait for an answer before [`Session::nudge`].
const NUDGE: Duration = Duration::from_secs(1);

/// How to ping.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes a ping, see [`MIN_SIZE`]. On the server's side the most that it takes.
    pub size: usize,
    /// Rounds; `None`: until the peer leaves.
    pub count: Option<u32>,
    /// Check the data: the client that what comes back is what it sent, the server that it is the pattern of `rping`.
    pub verify: bool,
    /// Print each round's data.
    pub verbose: bool,
    /// Connection settings.
    pub param: ConnParam,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            size: 64,
            count: None,
            verify: false,
            verbose: false,
            param: ConnParam {
                ird: 1,
                ord: 1,
                ..ConnParam::default()
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Rounds completed.
    pub rounds: u32,
    /// Rounds whose data was checked.
    pub verified: u32,
    /// Bytes moved in one direction.
    pub bytes: u64,
    /// From the first ping to the end.
    pub time: Duration,
    /// How often a peer had to be nudged, see [`Session::nudge`].
    pub nudges: u32,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = self.time.as_secs_f64() * 1e6 / f64::from(self.rounds.max(1));
        write!(
            f,
            "{} rounds, {} verified, {} bytes each way, {each:.1} us a round",
            self.rounds, self.verified, self.bytes
        )?;
        match self.nudges {
            0 => Ok(()),
            nudges => write!(f, ", {nudges} nudges"),
        }
    }
}

/// Why the pinging failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device refused to make an object.
    #[error(transparent)]
    Verbs(#[from] weft_verbs::Error),
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A request was refused.
    #[error(transparent)]
    Post(#[from] PostError),
    /// Completions were lost.
    #[error(transparent)]
    Overrun(#[from] CqOverrun),
    /// A buffer was too small for what the peer wants.
    #[error(transparent)]
    Memory(#[from] MemError),
    /// A request failed.
    #[error("{:?} failed: {} (Terminate {:#06x})", .0.opcode, .0.status, .0.vendor_err)]
    Completion(Wc),
    /// The peer left in the middle.
    #[error("the peer disconnected in round {0}")]
    Disconnected(u32),
    /// The peer did not answer in time.
    #[error("no answer in round {0}")]
    Silent(u32),
    /// The peer does not keep to the protocol.
    #[error("the peer does not speak rping's protocol: {0}")]
    Protocol(String),
    /// The data is not what it should be.
    #[error("round {round}: byte {at} of the data is wrong")]
    Mismatch {
        /// Which round, from 0.
        round: u32,
        /// The first wrong byte.
        at: usize,
    },
}

/// The data of a round, as `rping` makes it.
pub fn pattern(round: u32, size: usize) -> Vec<u8> {
    let mut data = format!("rdma-ping-{round}: ").into_bytes();
    data.truncate(size);
    let start = round as usize % LETTERS;
    let letters = (start..).map(|i| FIRST_LETTER + (i % LETTERS) as u8);
    let missing = size - data.len();
    data.extend(letters.take(missing));
    if let Some(last) = data.last_mut() {
        *last = 0;
    }
    data
}

fn check(round: u32, found: &[u8]) -> Result<(), Error> {
    let wanted = pattern(round, found.len());
    match found.iter().zip(&wanted).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(Error::Mismatch { round, at }),
    }
}

/// One side of a connection, message by message: for [`client`] and [`serve`], and for tests that misbehave.
pub struct Session {
    /// The connected queue pair.
    pub qp: Qp,
    /// Where all its completions go.
    pub cq: Cq,
    /// The round that runs, from 0; only for messages.
    pub round: u32,
    /// Nudges so far.
    pub nudges: u32,
    /// Two receives of 16 bytes.
    inbox: Mr,
    outbox: Mr,
}

impl Session {
    /// Connect to a server.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Verbs`].
    pub fn connect(pd: &Pd, addr: SocketAddr, param: &ConnParam) -> Result<Session, Error> {
        Self::new(pd, |qp| cm::connect_qp(addr, qp, &pd.device(), param))
    }

    /// Accept a client.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Verbs`].
    pub fn accept(pd: &Pd, request: Request, param: &ConnParam) -> Result<Session, Error> {
        Self::new(pd, |qp| request.accept(qp, param))
    }

    /// Both receives are posted before it is connected, so that the peer may send at once.
    fn new(
        pd: &Pd,
        connect: impl FnOnce(Qp) -> Result<Connection, ConnectError>,
    ) -> Result<Session, Error> {
        let cq = pd.device().create_cq(64, None)?;
        let qp = pd.create_qp(&QpInit {
            max_send_wr: 16,
            max_recv_wr: 2,
            ..QpInit::new(&cq, &cq)
        })?;
        let inbox = pd.alloc_mr(2 * INFO_LEN, Access::LOCAL_WRITE)?;
        for slot in [0, 1] {
            qp.post_recv(&[inbox_slot(&inbox, slot)])?;
        }
        Ok(Session {
            qp: connect(qp)?.qp,
            cq,
            round: 0,
            nudges: 0,
            inbox,
            outbox: pd.alloc_mr(INFO_LEN, Access::empty())?,
        })
    }

    /// The next completion, which must be this one. `None` when the peer has disconnected.
    ///
    /// # Errors
    /// [`Error::Completion`] when it failed, [`Error::Protocol`] when it is another one, [`Error::Silent`].
    pub fn next(&mut self, wanted: WcOpcode) -> Result<Option<Wc>, Error> {
        let mut wc = [Wc::default()];
        let end = Instant::now() + PATIENCE;
        while self.cq.wait(&mut wc, Some(NUDGE))? == 0 {
            if Instant::now() >= end {
                return Err(Error::Silent(self.round));
            }
            self.nudge()?;
        }
        match wc[0] {
            wc if wc.status == WcStatus::WrFlushErr && wc.vendor_err == 0 => Ok(None),
            wc if wc.status != WcStatus::Success => Err(Error::Completion(wc)),
            wc if wc.opcode == wanted => Ok(Some(wc)),
            wc => Err(Error::Protocol(format!(
                "{:?} where {wanted:?} was due",
                wc.opcode
            ))),
        }
    }

    /// Send an RDMA Write of no bytes, which does nothing. The kernel's siw (6.1) looks at its socket only when more
    /// comes in, and overlooks what comes in while it is at work on the accept: the first messages of an initiator
    /// that is faster than that lie there until the next.
    ///
    /// # Errors
    /// [`Error::Post`].
    pub fn nudge(&mut self) -> Result<(), Error> {
        self.nudges += 1;
        let nowhere = RemoteAddr { addr: 0, rkey: 0 };
        Ok(self.qp.post_send_one(SendWr::write(4, nowhere))?)
    }

    /// The next message: what memory it names. `None` when the peer has disconnected.
    ///
    /// # Errors
    /// As [`Session::next`]; [`Error::Protocol`] when it is not 16 bytes long.
    pub fn receive(&mut self) -> Result<Option<(RemoteAddr, usize)>, Error> {
        let Some(wc) = self.next(WcOpcode::Recv)? else {
            return Ok(None);
        };
        if wc.byte_len as usize != INFO_LEN {
            return Err(Error::Protocol(format!(
                "a message of {} bytes",
                wc.byte_len
            )));
        }
        let mut info = [0; INFO_LEN];
        self.inbox.read(wc.wr_id as usize * INFO_LEN, &mut info)?;
        self.qp.post_recv(&[inbox_slot(&self.inbox, wc.wr_id)])?;
        let info = u128::from_be_bytes(info);
        let remote = RemoteAddr {
            addr: (info >> 64) as u64,
            rkey: (info >> 32) as u32,
        };
        Ok(Some((remote, info as u32 as usize)))
    }

    fn receive_in_round(&mut self) -> Result<(RemoteAddr, usize), Error> {
        self.receive()?.ok_or(Error::Disconnected(self.round))
    }

    /// The memory of the message that goes out next: what was advertised last.
    pub fn message(&self) -> Sge {
        self.outbox.whole()
    }

    /// Send a go-ahead.
    ///
    /// # Errors
    /// [`Error::Post`].
    pub fn go_ahead(&self) -> Result<(), Error> {
        Ok(self.qp.post_send_one(SendWr::send(0).sge(self.message()))?)
    }

    /// Tell the peer of memory, whether it is there or not.
    ///
    /// # Errors
    /// [`Error::Post`].
    pub fn advertise(&self, remote: RemoteAddr, len: usize) -> Result<(), Error> {
        self.outbox.write(0, &remote.addr.to_be_bytes())?;
        self.outbox.write(8, &remote.rkey.to_be_bytes())?;
        self.outbox.write(12, &(len as u32).to_be_bytes())?;
        self.go_ahead()
    }
}

fn inbox_slot(inbox: &Mr, slot: u64) -> RecvWr {
    RecvWr::new(slot).sge(inbox.sge(slot as usize * INFO_LEN, INFO_LEN))
}

fn show(side: &str, data: &[u8]) {
    let text = data.split(|&byte| byte == 0).next().unwrap_or_default();
    println!("{side}ping data: {}", String::from_utf8_lossy(text));
}

/// Ping a server.
///
/// # Errors
/// [`Error`].
pub fn client(device: &Device, addr: SocketAddr, options: &Options) -> Result<Report, Error> {
    let pd = device.alloc_pd()?;
    let remote_use = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let source = pd.alloc_mr(options.size, remote_use)?;
    let sink = pd.alloc_mr(options.size, remote_use)?;
    let mut side = Session::connect(&pd, addr, &options.param)?;
    let mut report = Report {
        rounds: 0,
        verified: 0,
        bytes: 0,
        time: Duration::ZERO,
        nudges: 0,
    };
    let begun = Instant::now();
    while options.count.is_none_or(|count| side.round < count) {
        let data = pattern(side.round, options.size);
        source.write(0, &data)?;
        if options.verify {
            sink.fill(0, sink.len(), 0xff)?;
        }
        side.advertise(source.remote(0), source.len())?;
        side.receive_in_round()?;
        side.advertise(sink.remote(0), sink.len())?;
        side.receive_in_round()?;
        if options.verify {
            check(side.round, &sink.to_vec(0, options.size)?)?;
            report.verified += 1;
        }
        if options.verbose {
            show("", &sink.to_vec(0, options.size)?);
        }
        report.bytes += options.size as u64;
        side.round += 1;
        report.rounds = side.round;
    }
    report.time = begun.elapsed();
    report.nudges = side.nudges;
    side.qp.disconnect();
    Ok(report)
}

/// Serve one client until it disconnects.
///
/// # Errors
/// [`Error`].
pub fn serve(device: &Device, request: Request, options: &Options) -> Result<Report, Error> {
    let pd = device.alloc_pd()?;
    let mr = pd.alloc_mr(options.size, Access::LOCAL_WRITE)?;
    let mut side = Session::accept(&pd, request, &options.param)?;
    let mut report = Report {
        rounds: 0,
        verified: 0,
        bytes: 0,
        time: Duration::ZERO,
        nudges: 0,
    };
    let begun = Instant::now();
    while let Some((source, len)) = side.receive()? {
        let place = |len| {
            if len > mr.len() {
                Err(Error::Protocol(format!(
                    "a ping of {len} bytes, our buffer has {}",
                    mr.len()
                )))
            } else {
                Ok(mr.sge(0, len))
            }
        };
        let read = SendWr::read(1, source).sge(place(len)?).signaled();
        side.qp.post_send_one(read)?;
        if side.next(WcOpcode::Read)?.is_none() {
            return Err(Error::Disconnected(side.round));
        }
        if options.verify {
            check(side.round, &mr.to_vec(0, len)?)?;
            report.verified += 1;
        }
        if options.verbose {
            show("server ", &mr.to_vec(0, len)?);
        }
        side.go_ahead()?;
        let (sink, room) = side.receive_in_round()?;
        // As rping does: what is written is what was read, whatever room there is said to be.
        let write = SendWr::write(2, sink).sge(place(len.min(room))?);
        let done = SendWr::send(3).sge(side.message());
        side.qp.post_send(&[write, done])?;
        report.bytes += len as u64;
        side.round += 1;
        report.rounds = side.round;
    }
    report.time = begun.elapsed();
    report.nudges = side.nudges;
    side.qp.disconnect();
    Ok(report)
}
