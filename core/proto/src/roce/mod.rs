//! Both directions of one connected queue pair of RoCE: the requester and the responder of a reliable connection (InfiniBand Architecture
//! Specification volume 1, section 9.7), and of an unreliable one (9.8).
//!
//! # Contract
//!
//! A [`Connection`] has no clock, no socket and no memory. Its caller owns those. Calls of one connection are not concurrent; no call blocks.
//!
//! **Send queue.** [`post_with`](Connection::post_with) appends a work request. The transmit loop calls [`next_tx`](Connection::next_tx) until
//! it returns `None`: each [`Tx`] is one packet (header bytes and the place of the payload) or one piece of local work. Payload is named, not
//! kept: a packet that is sent again is fetched again. [`pop`](Connection::pop) returns finished work requests in the order posted.
//!
//! **Receive.** Each packet for this queue pair with a valid ICRC goes to [`rx`](Connection::rx), which checks everything before a byte is
//! placed. It says what to do ([`Rx`]); do exactly that before the next `rx`:
//!
//! * `PlaceWrite`, `PlaceRecv`: put the payload there, then [`rx_placed`](Connection::rx_placed). If a receive is wanted and none
//!   is posted, [`not_ready`](Connection::not_ready). If the memory may not be used, [`refuse`](Connection::refuse).
//! * `PlaceRead`, `AtomicResult`: put the payload or the value there, then `rx_placed`. If the memory may not be used, `refuse`: the request
//!   has failed, and the peer is not told.
//! * `ReadRequested`: [`accept_read`](Connection::accept_read) or `refuse`. `AtomicRequested`: do it, then
//!   [`atomic_done`](Connection::atomic_done), or `refuse`.
//! * `Nothing`: nothing.
//!
//! After receiving, run the transmit loop again: it has acknowledgements and answers. One acknowledgement covers all packets received since
//! the last one. A long answer to a Read is interrupted now and then: if [`is_interrupted`](Connection::is_interrupted), receive what is there
//! and go on, so that a peer that asks for a part again is heard.
//!
//! On an unreliable connection a message whose packets were lost is dropped. The receive that it has used is the next message's.
//!
//! **Time.** [`deadline`](Connection::deadline) is the time at which [`expired`](Connection::expired) is to be called; run the transmit loop
//! after it.
//!
//! **End.** When the connection is no longer [`Open`](State::Open), send what `next_tx` still has, call [`flush`](Connection::flush) and pop all.
//!
//! # Hostile peers
//!
//! An answer counts only if its packet sequence number is of a packet that is on its way. Reads beyond the agreed number are refused, a repeated
//! Read is answered from what was asked first, and at most once at a time. So no peer makes a connection hold more than its limits.

pub mod cm;
mod requester;
mod responder;
mod rtt;
pub mod sidr;
mod window;

use std::collections::VecDeque;
use std::time::Duration;

use weft_wire::roce::{MASK_24, NakCode, Service};

use crate::dgram::Now;
use crate::rdmap::{Op, Payload, SendWr};
use responder::{Open, Out, Pending, Resource};
use rtt::Rtt;
use window::Window;

/// 0.54 s, which `rdma_cm` of Linux waits.
const LONGEST_WAIT: Duration = Duration::from_nanos(4096 << 17);

/// Requests that may precede an acknowledgement that is owed: packets of one size go to the network together, and it would part them.
const REQUESTS_FIRST: u32 = 16;

/// The packets of one message, and of all that are on their way, must be fewer than half of all numbers.
const MOST_PACKETS: u32 = 1 << 22;

/// The parameters of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// [`Service::Rc`] or [`Service::Uc`].
    pub service: Service,
    /// The peer's queue pair.
    pub dest_qp: u32,
    /// The partition.
    pub pkey: u16,
    /// Payload of a full packet, in bytes: 256, 512, 1,024, 2,048 or 4,096.
    pub mtu: u32,
    /// The first packet sequence number that we send.
    pub sq_psn: u32,
    /// The first one that the peer sends.
    pub rq_psn: u32,
    /// Reads and atomics of ours that are on their way at once.
    pub ord: u32,
    /// Reads and atomics of the peer that we take at once.
    pub ird: u32,
    /// How long an acknowledgement is waited for at first: 4.096 us times two to this power; 0: for ever. Each wait in vain makes the next one
    /// twice as long, up to half a second.
    pub timeout: u8,
    /// How often one packet is sent again, 0 to 7.
    pub retry_count: u8,
    /// How often one message is tried again whose receiver was not ready; 7: without end.
    pub rnr_retry: u8,
    /// The time that a sender is told to wait while we have no receive, a code of [`weft_wire::roce::rnr_delay`].
    pub rnr_timer: u8,
    /// Packets on their way at once, at most.
    pub window: u32,
}

/// New values of some of [`Config`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "as there")]
pub struct Change {
    pub rnr_timer: Option<u8>,
    pub timeout: Option<u8>,
    pub retry_count: Option<u8>,
    pub rnr_retry: Option<u8>,
    pub ord: Option<u8>,
    pub ird: Option<u8>,
}

impl Config {
    /// How long an acknowledgement is waited for; `None`: for ever.
    pub(super) fn patience(&self) -> Option<Duration> {
        let power = self.timeout & 31;
        (power > 0).then(|| cm::timeout(power))
    }

    /// Bytes of the longest message.
    pub const fn max_message(&self) -> u32 {
        self.mtu.saturating_mul(MOST_PACKETS)
    }

    /// Packets of a message; an empty one has one, too.
    pub(super) fn packets(&self, len: u32) -> u32 {
        len.div_ceil(self.mtu).max(1)
    }
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Work flows both ways.
    Open,
    /// A request has failed, or a request of the peer was refused: nothing is accepted, and only what was
    /// owed before and the refusal are sent.
    Failed,
    /// [`flush`](Connection::flush) was called.
    Closed,
}

/// One thing for the transmit loop to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tx {
    /// The bytes that follow the header. After [`Payload::Local`], which is no packet, call [`local_done`](Connection::local_done). If a
    /// [`Payload::Source`] has become invalid, drop the packet and call [`source_gone`](Connection::source_gone).
    pub payload: Payload,
    /// Bytes of padding behind the payload.
    pub pad: u8,
}

/// What to do with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rx {
    /// It was an acknowledgement, or is not to be used.
    Nothing,
    /// Check rights and bounds, place the payload in the region. Without payload no memory is touched, so the key is not to be checked.
    PlaceWrite {
        /// Our region.
        rkey: u32,
        /// The address in it; `va + len` does not overflow.
        va: u64,
        /// Bytes.
        len: u32,
        /// The message ends with immediate data, which needs a receive.
        takes_receive: bool,
    },
    /// Place the payload in the scatter list of a Read.
    PlaceRead {
        /// The Read.
        seq: u64,
        /// The offset in its scatter list; `offset + len` is within it.
        offset: u32,
        /// Bytes.
        len: u32,
    },
    /// Place the payload in the receive of the current message. If it is too short, [`refuse`](Connection::refuse) with
    /// [`NakCode::InvalidRequest`].
    PlaceRecv {
        /// A new message: take a receive.
        first: bool,
        /// The offset in the message.
        offset: u32,
        /// Bytes.
        len: u32,
    },
    /// The peer requests a Read: check rights and bounds now (unless `len` is 0).
    ReadRequested {
        /// Our region.
        rkey: u32,
        /// The address in it; `va + len` does not overflow.
        va: u64,
        /// Bytes.
        len: u32,
    },
    /// The peer requests an atomic operation on the eight bytes at `va`, which is a multiple of eight.
    AtomicRequested {
        /// Our region.
        rkey: u32,
        /// The address in it.
        va: u64,
        /// What to do.
        op: Atomic,
    },
    /// One of our atomics is done.
    AtomicResult {
        /// The atomic.
        seq: u64,
        /// The value before the operation.
        original: u64,
    },
}

/// An atomic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Add.
    FetchAdd {
        /// The number.
        add: u64,
    },
    /// Write `swap` if the value is `compare`.
    CompareSwap {
        /// The expected value.
        compare: u64,
        /// The new one.
        swap: u64,
    },
}

/// A message is complete, and has used its receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes of the message, those of a Write with immediate data too.
    pub len: u32,
    /// The sender asks for an event.
    pub solicited: bool,
    /// Invalidate this key first; if that is not allowed, [`refuse`](Connection::refuse).
    pub invalidate: Option<u32>,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// It is a Write.
    pub write: bool,
}

/// A finished work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its number.
    pub seq: u64,
    /// The result.
    pub status: Status,
}

/// The result of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The peer has acknowledged it, or its answer is in place.
    Ok {
        /// Bytes moved.
        byte_len: u32,
    },
    /// The peer refused it.
    Refused(NakCode),
    /// The peer did not acknowledge it.
    RetryExceeded,
    /// The peer had no receive for it.
    RnrRetryExceeded,
    /// The answer does not fit the request.
    BadResponse,
    /// It could not be carried out on this side: its memory may not be used, or its local work failed.
    LocalError,
    /// The connection had failed before.
    Flushed,
}

/// How far a work request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Queued,
    Started,
    Done,
}

/// A work request in the send queue.
#[derive(Debug)]
struct Entry<W> {
    wr: SendWr,
    request: W,
    progress: Progress,
    /// Its first packet sequence number, once started.
    first: u32,
    /// How many it has; none for local work.
    packets: u32,
    /// Packets of the answer that are in place.
    received: u32,
    /// Its completion is not waited for.
    unsignaled: bool,
}

/// One connected queue pair. `W` is the caller's data for each work request. See the [module](self) for the contract.
#[derive(Debug)]
pub struct Connection<W = ()> {
    config: Config,
    state: State,
    /// The work request that failed, and why.
    blame: Option<(u64, Status)>,
    broken: bool,
    /// A request that cannot be carried out: it and those behind it are not sent.
    doomed: Option<u64>,
    refusal: Option<NakCode>,

    // The requester.
    sq: VecDeque<Entry<W>>,
    base: u64,
    /// The work request that is sent next, the packet of it, and its number.
    next: u64,
    packet: u32,
    psn: u32,
    /// The oldest packet that is not acknowledged, and the first that was never sent.
    unacked: u32,
    fresh: u32,
    /// Reads and atomics that are started and not complete.
    reads: u32,
    window: Window,
    tries: u8,
    rnr_tries: u8,
    /// The peer was not ready: nothing is sent before.
    rnr_until: Option<Now>,
    /// The beginning of the wait for an acknowledgement.
    since: Now,
    /// Since the last progress an answer was missing, and was asked for again.
    asked_again: bool,
    rtt: Rtt,
    /// The last packet is to be repeated, so that the peer answers.
    asks: bool,
    /// How often it was, since the last progress or loss.
    asked: u32,
    /// The peer has not answered that yet.
    questioned: bool,
    /// Follows the last packet that asks for an acknowledgement.
    awaited: u32,

    // The responder.
    expected: u32,
    msn: u32,
    open: Option<Open>,
    pending: Option<Pending>,
    /// The packet looked at last.
    looked_at: u32,
    /// The packet of an answer that was handed out last, and whether the answer is a repeated one.
    sourcing: (u32, bool),
    /// Packets of answers that may go before the next interruption.
    burst: u32,
    interrupted: bool,
    /// The packet expected was asked for.
    nak_sent: bool,
    /// The newest packet that came since then and is not expected yet.
    early: Option<u32>,
    resources: VecDeque<Resource>,
    out: VecDeque<Out>,
    /// Requests since the last answer.
    requests: u32,
    /// Messages are here that the peer knows nothing of, because it did not ask.
    unsaid: bool,
}

impl<W> Connection<W> {
    /// A connection that has carried nothing.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            state: State::Open,
            blame: None,
            broken: false,
            doomed: None,
            refusal: None,
            sq: VecDeque::new(),
            base: 0,
            next: 0,
            packet: 0,
            psn: config.sq_psn & MASK_24,
            unacked: config.sq_psn & MASK_24,
            fresh: config.sq_psn & MASK_24,
            reads: 0,
            window: Window::new(config.window),
            tries: config.retry_count,
            rnr_tries: config.rnr_retry,
            rnr_until: None,
            since: Now::ZERO,
            asked_again: false,
            rtt: Rtt::default(),
            asks: false,
            asked: 0,
            questioned: false,
            awaited: config.sq_psn & MASK_24,
            expected: config.rq_psn & MASK_24,
            msn: 0,
            open: None,
            pending: None,
            looked_at: config.rq_psn & MASK_24,
            sourcing: (0, false),
            burst: responder::BURST,
            interrupted: false,
            nak_sent: false,
            early: None,
            resources: VecDeque::new(),
            out: VecDeque::new(),
            requests: 0,
            unsaid: false,
        }
    }

    /// The state.
    pub const fn state(&self) -> State {
        self.state
    }

    /// Bytes of the longest message.
    pub fn max_message(&self) -> u32 {
        self.config.max_message().min(1 << 31)
    }

    /// Work requests posted and not popped.
    pub fn posted(&self) -> usize {
        self.sq.len()
    }

    /// Appends a work request and returns its number; numbers start at 0 and increase by 1. A work request that [`supports`] refuses, or
    /// longer than [`Config::max_message`], must not be posted. On a connection that has ended it is accepted and flushed.
    pub fn post_with(&mut self, wr: SendWr, request: W) -> u64 {
        self.post_as(wr, request, false)
    }

    /// As [`post_with`](Self::post_with), of a request whose completion nobody waits for: an acknowledgement of it is asked for later, with one of those that
    /// follow, or by a question. Its payload may be fetched again until then.
    pub fn post_unsignaled(&mut self, wr: SendWr, request: W) -> u64 {
        self.post_as(wr, request, true)
    }

    fn post_as(&mut self, wr: SendWr, request: W, unsignaled: bool) -> u64 {
        let unsignaled = unsignaled && !wr.op.is_answered();
        self.sq.push_back(Entry {
            wr,
            request,
            progress: Progress::Queued,
            first: 0,
            packets: 0,
            received: 0,
            unsignaled,
        });
        self.base + self.sq.len() as u64 - 1
    }

    /// The caller's data for a work request; `None` after it was popped.
    pub fn request_mut(&mut self, seq: u64) -> Option<&mut W> {
        Some(&mut self.entry(seq)?.request)
    }

    /// The next finished work request, in the order posted, and the caller's data for it.
    pub fn pop(&mut self) -> Option<(Done, W)> {
        let front = self.sq.front()?;
        let seq = self.base;
        let ok = Status::Ok {
            byte_len: byte_len(&front.wr),
        };
        let done = front.progress == Progress::Done;
        let status = match self.blame.filter(|(blamed, _)| *blamed == seq) {
            Some((_, status)) if self.state == State::Closed => status,
            _ if done && !self.broken => ok,
            _ if self.state == State::Closed => Status::Flushed,
            _ => return None,
        };
        self.broken |= status != ok;
        let entry = self.sq.pop_front()?;
        self.base += 1;
        if self.next < self.base {
            (self.next, self.packet) = (self.base, 0);
        }
        Some((Done { seq, status }, entry.request))
    }

    /// Sends start: the first packet sequence number, and how answers are waited for, as in [`Config`]. Call it before the first
    /// [`post_with`](Self::post_with), if the connection was made before these were known.
    pub fn start_sending(&mut self, sq_psn: u32, ord: u32, timeout: u8, retries: (u8, u8)) {
        let psn = sq_psn & MASK_24;
        (self.psn, self.unacked, self.fresh, self.awaited) = (psn, psn, psn, psn);
        (self.config.ord, self.config.timeout) = (ord, timeout);
        (self.config.retry_count, self.config.rnr_retry) = retries;
        (self.tries, self.rnr_tries) = retries;
    }

    /// Changes how answers are waited for, and what a sender is told to wait while we have no receive, as in [`Config`].
    pub fn change(&mut self, change: &Change) {
        let config = &mut self.config;
        for (value, new) in [
            (&mut config.rnr_timer, change.rnr_timer),
            (&mut config.timeout, change.timeout),
            (&mut config.retry_count, change.retry_count),
            (&mut config.rnr_retry, change.rnr_retry),
        ] {
            *value = new.unwrap_or(*value);
        }
        config.ord = change.ord.map_or(config.ord, u32::from);
        config.ird = change.ird.map_or(config.ird, u32::from);
    }

    /// A request of ours cannot be carried out: its memory may not be used, or its [`Payload::Local`] work failed. Drop its packet, if
    /// [`next_tx`](Self::next_tx) has named one. The connection fails when the requests before it are complete.
    pub fn fail_request(&mut self, seq: u64) {
        self.doomed.get_or_insert(seq);
        if let Some(entry) = self.entry(seq) {
            // On an unreliable connection it was done when its last packet was named.
            entry.progress = Progress::Started;
        }
        self.fail_doomed();
    }

    fn fail_doomed(&mut self) {
        if let Some(seq) = self.doomed
            && self.oldest() == seq
        {
            self.fail(seq, Status::LocalError);
        }
    }

    /// Why a request of the peer was refused, which is the end of a reliable connection.
    pub const fn refused_with(&self) -> Option<NakCode> {
        self.refusal
    }

    /// Ends the connection: all posted requests become poppable.
    pub fn flush(&mut self) {
        self.state = State::Closed;
        self.out.clear();
        self.pending = None;
    }

    /// The next thing to transmit, its header appended to `header`; `None` if there is nothing that may go now.
    pub fn next_tx(&mut self, now: Now, header: &mut Vec<u8>) -> Option<Tx> {
        self.interrupted = false;
        if self.state == State::Closed {
            return None;
        }
        let first = match self.out.front() {
            None => u32::MAX,
            Some(Out::Ack { .. }) => REQUESTS_FIRST,
            Some(_) => 1,
        };
        if self.requests < first
            && let Some(tx) = self.next_request(now, header)
        {
            self.requests += 1;
            return Some(tx);
        }
        self.requests = 0;
        self.next_answer(header)
    }

    /// All that there is to send are acknowledgements, which may go with what the program posts next.
    pub fn may_rest(&self) -> bool {
        self.state == State::Open
            && !self.asks
            && !self.out.is_empty()
            && self.out.iter().all(|out| matches!(out, Out::Ack { .. }))
            && self.next >= self.base + self.sq.len() as u64
    }

    /// The last `None` of [`next_tx`](Self::next_tx) was no end: receive what is there, and run the transmit loop again.
    pub const fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// The time for [`expired`](Self::expired), if there is one.
    pub fn deadline(&self) -> Option<Now> {
        if self.state != State::Open {
            return None;
        }
        if let Some(until) = self.rnr_until {
            return Some(until);
        }
        let waits = self.unacked != self.fresh && self.config.service == Service::Rc;
        let patience = self.patience().filter(|_| waits)?;
        Some(self.since + self.until_question(patience).unwrap_or(patience))
    }

    /// How long an answer is waited for until the peer is asked; `None` where the transport timer ends soon.
    fn until_question(&self, patience: Duration) -> Option<Duration> {
        let wait = self.rtt.wait(patience, self.asked);
        (wait < patience / 2).then_some(wait)
    }

    /// How long the next acknowledgement is waited for. Each wait in vain makes the next one twice as long, up to half a second: a peer whose
    /// processor is busy with others has not gone.
    fn patience(&self) -> Option<Duration> {
        let first = self.config.patience()?;
        let in_vain = self.config.retry_count.saturating_sub(self.tries).min(7);
        Some((first * (1 << in_vain)).min(first.max(LONGEST_WAIT)))
    }

    fn entry(&mut self, seq: u64) -> Option<&mut Entry<W>> {
        let index = usize::try_from(seq.checked_sub(self.base)?).ok()?;
        self.sq.get_mut(index)
    }

    /// A work request has failed, and the connection with it.
    fn fail(&mut self, seq: u64, status: Status) {
        if self.state == State::Open {
            self.state = State::Failed;
            self.blame = Some((seq, status));
        }
    }
}

/// Whether RoCE has this operation on such a connection.
pub fn supports(service: Service, op: &Op) -> bool {
    use weft_wire::rdmap::AtomicOp;
    match op {
        Op::Local
        | Op::Send {
            invalidate: None, ..
        }
        | Op::SendImm { .. }
        | Op::Write { .. }
        | Op::WriteImm { .. }
        | Op::Imm { .. } => true,
        Op::Send { .. } | Op::Read { .. } => service == Service::Rc,
        Op::Atomic {
            op,
            add_or_swap_mask,
            compare_mask,
            ..
        } => {
            let plain = match op {
                AtomicOp::FetchAdd => *add_or_swap_mask == 0,
                AtomicOp::CompareSwap => (*add_or_swap_mask & *compare_mask) == u64::MAX,
                AtomicOp::Swap => false,
            };
            service == Service::Rc && plain
        }
    }
}

/// Bytes of payload that a work request sends or asks for.
const fn payload_len(wr: &SendWr) -> u32 {
    match wr.op {
        Op::Imm { .. } | Op::Atomic { .. } | Op::Local => 0,
        _ => wr.len,
    }
}

const fn byte_len(wr: &SendWr) -> u32 {
    match wr.op {
        Op::Atomic { .. } => 8,
        _ => payload_len(wr),
    }
}

/// `a - b` of packet sequence numbers: the later one is less than 2^23 ahead.
const fn distance(a: u32, b: u32) -> i32 {
    (a.wrapping_sub(b) << 8).cast_signed() >> 8
}

/// Whether `psn` is one of so many from `first` on.
const fn is_within(psn: u32, first: u32, packets: u32) -> bool {
    let after = distance(psn, first);
    after >= 0 && after.cast_unsigned() < packets
}

/// The number that many packets later.
const fn ahead(psn: u32, packets: u32) -> u32 {
    psn.wrapping_add(packets) & MASK_24
}
