//! One RDMAP stream over DDP: send queue, responses and receive rules of one connection (RFC 5040, RFC 5041, RFC 7306).
//!
//! # Contract
//!
//! A [`Stream`] has no clock, no socket and no memory. Its caller owns those and calls four families of methods. Calls of
//! one stream are not concurrent; no call blocks.
//!
//! **Send queue.** [`post_with`](Stream::post_with) appends a work request and numbers it, and stores the caller's data for it (its
//! scatter/gather list, for example). The transmit loop calls [`next_tx`](Stream::next_tx) until it returns `None`; each [`Tx`] is one DDP
//! segment (header bytes and the place of the payload), to be framed and sent in this order, or one piece of local work. When the transport
//! has all bytes of the segment that [`completes`](Tx::completes) a work request, call [`transmitted`](Stream::transmitted).
//! [`pop`](Stream::pop) returns finished work requests in the order they were posted: call it after
//! `transmitted`, after the receive calls and after `flush`.
//!
//! **Receive.** For each FPDU: parse the header ([`Fault::from`] turns a failure into a fault) and give it to
//! [`rx_segment`](Stream::rx_segment), which checks everything before a byte is placed and says what to do:
//!
//! * [`Rx::PlaceWrite`], [`Rx::PlaceRead`], [`Rx::PlaceRecv`]: put the payload there, then call
//!   [`rx_placed`](Stream::rx_placed), also if it is empty. The payload of a message of the opcodes of Immediate Data begins
//!   behind eight bytes, which go to [`rx_immediate`](Stream::rx_immediate) first.
//! * [`Rx::Control`]: give the body to [`rx_control`](Stream::rx_control).
//!
//! Call exactly that one before the next `rx_segment`, and only after the FPDU's CRC was checked. Either may return an
//! [`Event`]. [`Event::ReadRequested`] and [`Event::AtomicRequested`] must be answered at once, by
//! [`accept_read`](Stream::accept_read) and [`atomic_done`](Stream::atomic_done), or by `fail`. After receiving, run the
//! transmit loop again: answers may allow more work.
//!
//! **Errors.** Every `Err(fault)` and every fault that the caller finds (unknown `STag`, no receive posted, bad CRC) goes to
//! [`fail`](Stream::fail), before the next receive call. The transmit loop then yields one Terminate and nothing more, and nothing more is
//! accepted. A Read Response whose source has become invalid goes to [`fail_source`](Stream::fail_source).
//!
//! **End.** When the connection has ended, for any reason, call [`flush`](Stream::flush) and pop all completions.
//!
//! # Order
//!
//! Work requests start in the order posted; one that must wait (ORD, fence) stops those behind it. Segments of different
//! messages are never interleaved. Read and Atomic Responses go out in the order of their requests and take turns with the
//! send queue's work requests. A Send or Write is complete when transmitted, a Read or Atomic when its answer is in place,
//! and none passes an earlier one.
//!
//! # Hostile peers
//!
//! Message sequence numbers and offsets must be exactly the next ones. Requests beyond our IRD end the stream. A Read's sink
//! is named by an `STag` that the stream invents and offsets from 0, so a Read Response can only go where the oldest
//! outstanding Read's scatter list points, in order and never beyond its length.

mod fault;
mod rx;
mod state;
mod tx;
mod wr;

use std::collections::VecDeque;

use weft_wire::ddp;
use weft_wire::rdmap::{
    AtomicRequest, Opcode, QN_READ_REQUEST, QN_SEND, ReadRequest, TermError, Terminate,
};

pub use fault::Fault;
pub use rx::{Event, Rx};
pub use state::State;
pub use tx::{notice, noticed};
pub use wr::{Done, DoneStatus, Op, Payload, SendWr, Tx};

use fault::Offender;
use rx::{OpenTagged, OpenUntagged, Pending};
use state::Input;
use tx::Cut;

/// In the reserved field of an Immediate Data message's header (`RsvdULP`, RFC 5041 section 4.3): it belongs to a Send
/// (docs/spec/rdmap-extensions.md). Peers that do not know it do not look there.
pub const WITH_SEND: u32 = 1;

/// In the same field where the initiator writes the peer's memory itself: the bytes that it has written, in the bits below this one.
pub const WRITTEN: u32 = 1 << 31;

/// The longest body of a control message, in bytes.
pub const MAX_CONTROL: usize = if AtomicRequest::LEN > Terminate::MAX_LEN {
    AtomicRequest::LEN
} else {
    Terminate::MAX_LEN
};

/// Room for what [`Stream::next_tx`] writes, in bytes: a header and the longest control body.
pub const MAX_HEADER: usize = ddp::UNTAGGED_LEN + MAX_CONTROL;

/// The largest ULPDU whose FPDU needs no padding: tagged segments then carry up to 65,520
/// bytes.
pub const DEFAULT_MAX_ULPDU: u32 = 65_534;

/// The smallest ULPDU that a stream can be limited to: room for every control message.
pub const MIN_MAX_ULPDU: u32 = 128;

/// The parameters of a stream when its connection is established.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Largest ULPDU to send, in bytes with the DDP header, at least [`MIN_MAX_ULPDU`]. MPA's length field takes up to
    /// 65,535.
    pub max_ulpdu: u32,
    /// Reads and Atomics of the peer that we accept at once; more are a fault.
    pub ird: u32,
    /// Reads and Atomics that we have outstanding at once, at most. With 0 they never start: do not post any.
    pub ord: u32,
    /// Send nothing before the peer's first segment ([`Params::must_wait_for_first_fpdu`](crate::mpa::Params)).
    pub hold_until_first_rx: bool,
    /// A random number that the invented sink `STag`s are made from.
    pub sink_key: u32,
}

/// A work request in the send queue.
#[derive(Clone, Copy, Debug)]
struct Entry<W> {
    wr: SendWr,
    /// The caller's.
    request: W,
    /// Sequence number of its untagged message, once started.
    msn: u32,
    progress: Progress,
}

/// The progress of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Queued,
    /// Its first segment was handed out.
    Started,
    Done,
}

/// One of our Reads or Atomics that the peer has not answered.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    seq: u64,
    /// The sink `STag` of a Read, the request identifier of an Atomic.
    key: u32,
    len: u32,
    received: u32,
    atomic: bool,
}

/// An answer that we owe the peer.
#[derive(Clone, Copy, Debug)]
enum Response {
    Read { request: ReadRequest, msn: u32 },
    Atomic { request_id: u32, original: u64 },
}

/// One DDP/RDMAP stream, both directions. `W` is the caller's data for each work request. See the [module](self) for the contract.
#[derive(Debug)]
pub struct Stream<W = ()> {
    config: Config,
    state: State,
    hold: bool,
    /// See [`Stream::complete_when_answered`].
    until_answered: bool,
    /// See [`Stream::believe_written`].
    believes_written: bool,

    /// Posted and not popped; the first is number `base`.
    sq: VecDeque<Entry<W>>,
    base: u64,
    /// The work request being sent or to be sent next.
    next: u64,
    outstanding: VecDeque<Outstanding>,
    responses: VecDeque<Response>,
    cut: Cut,
    /// The work request of [`Stream::written_directly`].
    written: u32,
    /// See [`Stream::notify`]: their tagged offsets, and the number of the work request that each precedes.
    notices: VecDeque<(u64, u64)>,
    /// A response precedes the next work request.
    response_turn: bool,
    send_msn: u32,
    request_msn: u32,
    atomic_response_msn: u32,
    /// The Read Request whose response was handed out last.
    sourcing: Offender,
    terminate: Option<Terminate>,

    pending: Pending,
    offender: Offender,
    /// Next message sequence number of each queue.
    rx_msn: [u32; 4],
    rx_tagged: Option<OpenTagged>,
    rx_untagged: Option<OpenUntagged>,
    /// Bytes of the latest RDMA Write, until a message of queue 0 comes.
    rx_written: u32,
    /// The immediate data of the Send that is being received.
    rx_immediate: u64,

    /// The work request that the peer's Terminate names.
    blame: Option<(u64, TermError)>,
    /// A work request was popped with an error.
    broken: bool,
}

impl<W> Stream<W> {
    /// A stream whose connection is established and has carried no FPDU.
    pub fn new(config: Config) -> Self {
        let max_ulpdu = config.max_ulpdu.max(MIN_MAX_ULPDU);
        Self {
            config: Config {
                max_ulpdu,
                ..config
            },
            state: State::Open,
            hold: config.hold_until_first_rx,
            until_answered: false,
            believes_written: false,
            sq: VecDeque::new(),
            base: 0,
            next: 0,
            outstanding: VecDeque::new(),
            responses: VecDeque::new(),
            cut: Cut::Idle,
            written: 0,
            notices: VecDeque::new(),
            response_turn: false,
            send_msn: 1,
            request_msn: 1,
            atomic_response_msn: 1,
            sourcing: Offender::default(),
            terminate: None,
            pending: Pending::Idle,
            offender: Offender::default(),
            rx_msn: [1; 4],
            rx_tagged: None,
            rx_untagged: None,
            rx_written: 0,
            rx_immediate: 0,
            blame: None,
            broken: false,
        }
    }

    /// From now on a Send or Write is complete when the peer has received or placed it, and not when it is with the transport: which is
    /// known when a later Read or Atomic is answered, because the peer does one thing after the other. The caller posts empty Reads
    /// as it sees fit.
    pub fn complete_when_answered(&mut self) {
        self.until_answered = true;
    }

    /// The peer writes our memory itself, and says so with the Immediate Data of a Write: how much it has written.
    pub fn believe_written(&mut self) {
        self.believes_written = true;
    }

    /// The state of the stream.
    pub const fn state(&self) -> State {
        self.state
    }

    /// True if [`next_tx`](Self::next_tx) would return something.
    pub fn has_work(&self) -> bool {
        match self.state {
            State::Open => !self.hold && self.choose().is_some(),
            State::Terminating => self.terminate.is_some(),
            State::Terminated | State::Closed => false,
        }
    }

    /// Work requests posted and not popped.
    pub fn posted(&self) -> usize {
        self.sq.len()
    }

    /// The peer has begun a message and not ended it: an end of the connection here is not in order.
    pub const fn mid_message(&self) -> bool {
        self.rx_tagged.is_some() || self.rx_untagged.is_some()
    }

    /// The number of our Reads and Atomics that the peer has not answered yet.
    pub fn outbound_requests(&self) -> usize {
        self.outstanding.len()
    }

    /// Reads and Atomics of the peer that we have not answered yet.
    pub fn inbound_requests(&self) -> usize {
        self.responses.len()
    }

    /// Appends a work request and returns its number; numbers start at 0 and increase by 1. `request` is the caller's,
    /// and comes back with [`pop`](Self::pop).
    ///
    /// On a stream that has ended it is accepted and flushed.
    pub fn post_with(&mut self, wr: SendWr, request: W) -> u64 {
        let seq = self.base + self.sq.len() as u64;
        self.sq.push_back(Entry {
            wr,
            request,
            msn: 0,
            progress: Progress::Queued,
        });
        seq
    }

    /// All bytes of this work request are with the transport, or it was local work and is done.
    pub fn transmitted(&mut self, seq: u64) {
        let until_answered = self.until_answered;
        // Only a completely transmitted request can be: `next` is still being segmented.
        if seq < self.next
            && let Some(entry) = self.entry(seq)
            && !entry.wr.op.is_answered()
            && (!until_answered || entry.wr.op == Op::Local)
        {
            entry.progress = Progress::Done;
        }
    }

    /// The caller's data for a work request; `None` after it was popped.
    pub fn request(&self, seq: u64) -> Option<&W> {
        let index = usize::try_from(seq.checked_sub(self.base)?).ok()?;
        Some(&self.sq.get(index)?.request)
    }

    /// As [`request`](Self::request), to be changed.
    pub fn request_mut(&mut self, seq: u64) -> Option<&mut W> {
        Some(&mut self.entry(seq)?.request)
    }

    /// The caller's data for the work requests that are posted and not popped, oldest first.
    pub fn requests_mut(&mut self) -> impl Iterator<Item = &mut W> {
        self.sq.iter_mut().map(|entry| &mut entry.request)
    }

    /// Gives back the memory of an empty queue that has had more than `keep` work requests.
    pub fn shrink(&mut self, keep: usize) {
        if self.sq.is_empty() && self.sq.capacity() > keep {
            self.sq = VecDeque::new();
        }
    }

    /// The next finished work request, in the order posted, and the caller's data for it.
    pub fn pop(&mut self) -> Option<(Done, W)> {
        let front = self.sq.front()?;
        let seq = self.base;
        let ok = DoneStatus::Ok {
            byte_len: front.wr.byte_len(),
        };
        let done = front.progress == Progress::Done;
        let status = if self.state != State::Closed {
            if !done {
                return None;
            }
            ok
        } else if let Some((_, error)) = self.blame.filter(|(blamed, _)| *blamed == seq) {
            DoneStatus::RemoteError(error)
        } else if done && !self.broken {
            ok
        } else {
            DoneStatus::Flushed
        };
        self.broken |= status != ok;
        let entry = self.sq.pop_front()?;
        self.base += 1;
        Some((Done { seq, status }, entry.request))
    }

    /// Ends the stream after its connection has ended. All posted requests become poppable: complete ones as such, the work request that
    /// the peer's Terminate names with its error, the rest flushed.
    pub fn flush(&mut self) {
        self.state = self.state.on(Input::Flush);
        self.outstanding.clear();
        self.responses.clear();
        self.pending = Pending::Idle;
    }

    /// Ends the stream with a Terminate: [`next_tx`](Self::next_tx) yields it, then nothing. About the segment last given
    /// to [`rx_segment`](Self::rx_segment), or about none. The first fault counts.
    pub fn fail(&mut self, fault: Fault) {
        self.fail_about(fault, self.offender);
    }

    /// As [`fail`](Self::fail), for the Read Request whose response [`next_tx`](Self::next_tx) returned last: its source can no longer be
    /// read. That segment must not be sent.
    pub fn fail_source(&mut self, fault: Fault) {
        self.fail_about(fault, self.sourcing);
    }

    /// As [`fail`](Self::fail), about a message that was not given to [`rx_segment`](Self::rx_segment), because there is no receive for it: its
    /// first segment has this header and `ulpdu_len` bytes.
    pub fn fail_unreceived(&mut self, header: &ddp::Header, ulpdu_len: usize) {
        self.fail_about(Fault::NoReceive, Offender::new(header, ulpdu_len));
    }

    fn fail_about(&mut self, fault: Fault, offender: Offender) {
        if self.state == State::Open {
            self.state = self.state.on(Input::Fail);
            self.terminate = Some(offender.terminate(fault));
            self.pending = Pending::Idle;
        }
    }

    /// The peer says goodbye: remember which work request it blames, by the header it copied.
    fn terminated(&mut self, terminate: &Terminate) {
        self.state = self.state.on(Input::PeerTerminate);
        let Some(header) = terminate.ddp_header else {
            return;
        };
        let started = self
            .sq
            .iter()
            .take_while(|entry| entry.progress != Progress::Queued);
        let named = started
            .enumerate()
            .find(|(_, entry)| entry.is_named_by(&header));
        self.blame = named.map(|(i, _)| (self.base + i as u64, terminate.error));
        if let Some((seq, _)) = self.blame {
            self.received_before(seq);
        }
    }

    fn entry(&mut self, seq: u64) -> Option<&mut Entry<W>> {
        let index = usize::try_from(seq.checked_sub(self.base)?).ok()?;
        self.sq.get_mut(index)
    }
}

impl Stream {
    /// [`post_with`](Self::post_with), for callers that keep nothing.
    pub fn post(&mut self, wr: SendWr) -> u64 {
        self.post_with(wr, ())
    }

    /// [`pop`](Self::pop), for callers that keep nothing.
    pub fn pop_completed(&mut self) -> Option<Done> {
        self.pop().map(|(done, ())| done)
    }
}

impl SendWr {
    const fn byte_len(&self) -> u32 {
        match self.op {
            Op::Imm { .. } | Op::Atomic { .. } => 8,
            Op::Local => 0,
            Op::Send { .. }
            | Op::SendImm { .. }
            | Op::Write { .. }
            | Op::WriteImm { .. }
            | Op::Read { .. } => self.len,
        }
    }
}

impl<W> Entry<W> {
    /// Whether a header that we sent belongs to this work request.
    fn is_named_by(&self, header: &ddp::Header) -> bool {
        match (header, &self.wr.op) {
            (ddp::Header::Tagged(h), Op::Write { stag, to } | Op::WriteImm { stag, to, .. }) => {
                h.opcode == Opcode::Write
                    && h.stag == *stag
                    && h.to
                        .checked_sub(*to)
                        .is_some_and(|offset| offset <= u64::from(self.wr.len))
            }
            (
                ddp::Header::Untagged(h),
                Op::Send { .. } | Op::SendImm { .. } | Op::Imm { .. } | Op::WriteImm { .. },
            ) => h.qn == QN_SEND && h.msn == self.msn,
            (ddp::Header::Untagged(h), Op::Read { .. } | Op::Atomic { .. }) => {
                h.qn == QN_READ_REQUEST && h.msn == self.msn
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Config, DEFAULT_MAX_ULPDU, Event, MAX_HEADER, Op, Rx, SendWr, Stream};
    use weft_wire::ddp::Header;

    /// Sequence numbers count modulo 2^32 (RFC 5041 section 5).
    #[test]
    fn sequence_numbers_wrap() {
        let config = Config {
            max_ulpdu: DEFAULT_MAX_ULPDU,
            ird: 1,
            ord: 1,
            hold_until_first_rx: false,
            sink_key: 0,
        };
        let (mut a, mut b) = (Stream::new(config), Stream::new(config));
        (a.send_msn, a.request_msn, b.atomic_response_msn) = (u32::MAX, u32::MAX, u32::MAX);
        (a.rx_msn, b.rx_msn) = ([u32::MAX; 4], [u32::MAX; 4]);
        let send = Op::Send {
            solicited: false,
            invalidate: None,
        };
        let atomic = Op::Atomic {
            op: weft_wire::rdmap::AtomicOp::Swap,
            stag: 0,
            to: 0,
            add_or_swap: 0,
            add_or_swap_mask: 0,
            compare: 0,
            compare_mask: 0,
        };
        for msn in [u32::MAX, 0, 1] {
            for op in [send, atomic] {
                a.post(SendWr {
                    op,
                    len: 0,
                    fence: false,
                });
            }
            let next = |from: &mut Stream, to: &mut Stream| {
                let mut hdr = [0; MAX_HEADER];
                let tx = from.next_tx(&mut hdr).unwrap();
                let header = Header::parse(&hdr).unwrap();
                assert!(matches!(header, Header::Untagged(h) if h.msn == msn));
                match to.rx_segment(&header, tx.header_len).unwrap() {
                    Rx::Control { .. } => to.rx_control(&hdr[header.len()..tx.header_len]).unwrap(),
                    _ => to.rx_placed(),
                }
            };
            assert!(matches!(next(&mut a, &mut b), Some(Event::Received { .. })));
            assert!(matches!(
                next(&mut a, &mut b),
                Some(Event::AtomicRequested(_))
            ));
            b.atomic_done(0);
            assert!(matches!(
                next(&mut b, &mut a),
                Some(Event::AtomicResult { .. })
            ));
        }
    }
}
