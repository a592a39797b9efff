//! Two endpoints against an oracle: start-up and streams over a byte pipe with delay, arbitrary segmentation, cut
//! connections, faulty work requests and a peer that alters its own segments. Everything comes from one seed.
//!
//! `WEFT_SEED` runs one seed, `WEFT_STEPS` sets how many steps in total.
//!
//! The oracle executes each work request when it is posted, on a model of the peer's memory that nothing else writes to.
//! That is what the peer must see in the end, and what Reads and Atomics must return, as long as a Write or Atomic that
//! overlaps an earlier Read is fenced: RFC 5040 section 5.5 allows a Read Response to see later Writes.

mod evil;
mod model;
mod start;
mod workload;

use std::collections::VecDeque;

use weft_proto::mpa::Params;
use weft_proto::rdmap::{
    Config, DoneStatus, Event, Fault, MAX_HEADER, Op, Payload, Rx, SendWr, State, Stream,
};
use weft_wire::crc::crc32c;
use weft_wire::ddp::{Header, Tagged};
use weft_wire::mpa::{MarkerInserter, MarkerStripper, fpdu_len};
use weft_wire::rdmap::{MpaError, Opcode, OperationError, TaggedError, TermError, UntaggedError};

use model::{Memory, Message, Posted, Rng, Source};
use start::start;

/// One direction's oracle and pipe: from endpoint `i` to the other.
struct Direction {
    /// What the peer's memory must be once everything posted was executed.
    model: Memory,
    messages: VecDeque<Message>,
    /// Bytes of the last Write, if no message came after it.
    last_write: usize,
    writes: VecDeque<(u32, u64, Vec<u8>)>,
    written: usize,
    /// Ranges of the data region with Reads that no fence has waited for.
    unfenced: Vec<std::ops::Range<usize>>,
    poisoned: bool,

    /// Bytes that the endpoint wants to send, and where the last byte of each work request is.
    outbox: VecDeque<u8>,
    marks: VecDeque<(u64, u64)>,
    framed: u64,
    moved: u64,
    wire: VecDeque<u8>,
    inserter: MarkerInserter,
    sent_fpdus: u64,
    received_fpdus: u64,
    /// The FPDU that the receiver must refuse.
    evil: Option<(u64, Fault)>,
    /// Alter a segment when one comes that can be altered.
    want_evil: bool,
    /// A bit of the stream was flipped: a CRC or marker error must follow, or silence.
    corrupted: bool,
    last_segment: Option<(Header, Vec<u8>)>,
}

struct Endpoint {
    stream: Stream,
    params: Params,
    memory: Memory,
    posted: Vec<Posted>,
    next_done: u64,
    receives: VecDeque<usize>,
    message: Vec<u8>,
    room: usize,
    inbox: Vec<u8>,
    raw: Vec<u8>,
    stripper: MarkerStripper,
    failed: Option<Fault>,
    terminated: Option<TermError>,
    terminates_sent: usize,
    flushed: bool,
    broken: bool,
}

struct World {
    rng: Rng,
    ends: [Endpoint; 2],
    ways: [Direction; 2],
    steps: u64,
}

#[derive(Default, Debug)]
struct Totals {
    steps: u64,
    episodes: u64,
    completed: u64,
    flushed: u64,
    remote_errors: u64,
    faults: u64,
    cuts: u64,
}

impl World {
    fn new(mut rng: Rng) -> Self {
        let params = start(&mut rng);
        let memories = [Memory::new(&mut rng), Memory::new(&mut rng)];
        let ends = std::array::from_fn(|i| {
            let params = params[i];
            Endpoint {
                stream: Stream::new(Config {
                    max_ulpdu: 100 + rng.below(900) as u32,
                    ird: params.ird.into(),
                    ord: params.ord.into(),
                    hold_until_first_rx: params.must_wait_for_first_fpdu,
                    sink_key: rng.next() as u32,
                }),
                params,
                memory: memories[i].clone(),
                posted: Vec::new(),
                next_done: 0,
                receives: VecDeque::new(),
                message: Vec::new(),
                room: 0,
                inbox: Vec::new(),
                raw: Vec::new(),
                stripper: MarkerStripper::new(params.crc),
                failed: None,
                terminated: None,
                terminates_sent: 0,
                flushed: false,
                broken: false,
            }
        });
        let ways = std::array::from_fn(|i| Direction {
            model: memories[1 - i].clone(),
            messages: VecDeque::new(),
            last_write: 0,
            writes: VecDeque::new(),
            written: 0,
            unfenced: Vec::new(),
            poisoned: false,
            outbox: VecDeque::new(),
            marks: VecDeque::new(),
            framed: 0,
            moved: 0,
            wire: VecDeque::new(),
            inserter: MarkerInserter::new(params[i].crc),
            sent_fpdus: 0,
            received_fpdus: 0,
            evil: None,
            want_evil: false,
            corrupted: false,
            last_segment: None,
        });
        let mut world = Self {
            rng,
            ends,
            ways,
            steps: 0,
        };
        // The responder may not send before the initiator did.
        let wr = SendWr {
            op: Op::Write { stag: 0, to: 0 },
            len: 0,
            fence: false,
        };
        world.ways[0].writes.push_back((0, 0, Vec::new()));
        world.push(0, wr, Source::Own(Vec::new()), Vec::new(), None);
        world
    }

    /// Frames up to `count` segments into the outbox.
    fn transmit(&mut self, i: usize, count: usize) {
        for _ in 0..count {
            if self.ways[i].outbox.len() > 8192 {
                return;
            }
            let mut hdr = [0; MAX_HEADER];
            let had_work = self.ends[i].stream.has_work();
            let Some(tx) = self.ends[i].stream.next_tx(&mut hdr) else {
                assert!(!had_work, "has_work without work");
                return;
            };
            assert!(had_work, "work without has_work");
            let end = &mut self.ends[i];
            assert!(
                end.stream.outbound_requests() <= end.params.ord as usize,
                "beyond ORD"
            );
            if tx.is_terminate() {
                end.terminates_sent += 1;
                assert!(
                    end.failed.is_some() && end.terminates_sent == 1,
                    "a Terminate without reason"
                );
            }
            let mut ulpdu = hdr[..tx.header_len].to_vec();
            match tx.payload {
                Payload::None => {}
                Payload::Wr { seq, offset, len } => {
                    let range = offset as usize..(offset + len) as usize;
                    match &end.posted[seq as usize].source {
                        Source::Own(data) => ulpdu.extend_from_slice(&data[range]),
                        Source::SinkOf(read) => {
                            ulpdu.extend_from_slice(&end.posted[*read as usize].sink[range]);
                        }
                    }
                }
                Payload::Source { stag, to, len } => {
                    ulpdu.extend_from_slice(end.memory.read(stag, to, len).unwrap());
                }
                Payload::Local { seq } => assert_eq!(tx.completes, Some(seq)),
            }
            if let Some(seq) = tx.completes {
                let (earlier, this) = end.posted.split_at_mut(seq as usize);
                let this = &mut this[0];
                assert!(!this.started, "work request {seq} sent twice");
                this.started = true;
                assert!(
                    earlier.iter().all(|p| p.started),
                    "work request {seq} passed an earlier one"
                );
                // Single-segment work requests show here that a fence held; the others show it in their data.
                if this.wr.fence && this.wr.len < 80 {
                    let waits = |p: &Posted| p.wr.op.is_answered() && p.sink != p.expect;
                    assert!(
                        !earlier.iter().any(waits),
                        "work request {seq} passed its fence"
                    );
                }
            }
            if let Payload::Local { seq } = tx.payload {
                end.posted[seq as usize].transmitted = true;
                end.stream.transmitted(seq);
                continue;
            }
            self.frame(i, ulpdu);
            if let Some(seq) = tx.completes {
                let at = self.ways[i].framed;
                self.ways[i].marks.push_back((at, seq));
            }
        }
    }

    fn frame(&mut self, i: usize, mut ulpdu: Vec<u8>) {
        let way = &mut self.ways[i];
        let before = way.last_segment.take();
        if way.want_evil
            && way.evil.is_none()
            && let Some((fault, first)) = evil::alter(&mut self.rng, before, &mut ulpdu)
        {
            way.evil = Some((way.sent_fpdus, fault));
            if let Some(first) = first {
                self.put(i, &first);
            }
        }
        let header = Header::parse(&ulpdu).ok();
        self.ways[i].last_segment = header.map(|header| (header, ulpdu.clone()));
        self.put(i, &ulpdu);
    }

    fn put(&mut self, i: usize, ulpdu: &[u8]) {
        assert!(ulpdu.len() <= 1001, "beyond max_ulpdu");
        let params = self.ends[i].params;
        let way = &mut self.ways[i];
        let mut fpdu = (ulpdu.len() as u16).to_be_bytes().to_vec();
        fpdu.extend_from_slice(ulpdu);
        fpdu.resize(fpdu_len(ulpdu.len()) - 4, 0);
        let crc = if params.crc { crc32c(&fpdu) } else { 0 };
        fpdu.extend_from_slice(&crc.to_le_bytes());
        let mut out = Vec::new();
        if params.tx_markers {
            way.inserter.insert(&fpdu, &mut out);
        } else {
            out = fpdu;
        }
        way.framed += out.len() as u64;
        way.sent_fpdus += 1;
        way.outbox.extend(&out);
    }

    /// Moves up to `n` bytes from the outbox to the wire.
    fn hand_over(&mut self, i: usize, n: usize) {
        let way = &mut self.ways[i];
        let n = n.min(way.outbox.len());
        way.wire.extend(way.outbox.drain(..n));
        way.moved += n as u64;
        while let Some(&(at, seq)) = way.marks.front() {
            if at > way.moved {
                break;
            }
            way.marks.pop_front();
            let end = &mut self.ends[i];
            end.posted[seq as usize].transmitted = true;
            end.stream.transmitted(seq);
        }
    }

    /// Delivers up to `n` bytes from the wire of direction `i`.
    fn deliver(&mut self, i: usize, n: usize) {
        let way = &mut self.ways[i];
        let end = &mut self.ends[1 - i];
        let n = n.min(way.wire.len());
        if end.failed.is_some() || end.terminated.is_some() {
            way.wire.drain(..n);
            return;
        }
        end.raw.clear();
        end.raw.extend(way.wire.drain(..n));
        if end.params.rx_markers {
            if end.stripper.strip(&end.raw, &mut end.inbox).is_err() {
                assert!(way.corrupted, "marker error");
                self.fault(1 - i, Fault::Marker);
                return;
            }
        } else {
            end.inbox.extend_from_slice(&end.raw);
        }
        let mut used = 0;
        loop {
            let rest = &self.ends[1 - i].inbox[used..];
            let Some((len, _)) = rest.split_first_chunk() else {
                break;
            };
            let ulpdu_len = usize::from(u16::from_be_bytes(*len));
            let Some(fpdu) = rest.get(..fpdu_len(ulpdu_len)) else {
                break;
            };
            let (body, crc) = fpdu.split_at(fpdu.len() - 4);
            let ulpdu = body[2..2 + ulpdu_len].to_vec();
            used += fpdu.len();
            if self.ends[1 - i].params.crc && crc32c(body).to_le_bytes() != crc {
                assert!(self.ways[i].corrupted, "CRC error");
                self.fault(1 - i, Fault::Crc);
                break;
            }
            let number = self.ways[i].received_fpdus;
            self.ways[i].received_fpdus += 1;
            let result = self.receive(i, &ulpdu);
            match self.ways[i].evil {
                Some((evil, fault)) if evil == number => {
                    assert_eq!(
                        result,
                        Err(fault),
                        "altered segment {:?}",
                        Header::parse(&ulpdu)
                    );
                }
                _ => {
                    let poisoned = self.ways[i].poisoned
                        && result.is_err_and(|f| f != Fault::LocalCatastrophic);
                    assert!(
                        result.is_ok() || poisoned,
                        "{result:?} for {:?}",
                        Header::parse(&ulpdu)
                    );
                }
            }
            if let Err(fault) = result {
                self.fault(1 - i, fault);
                break;
            }
            if self.ends[1 - i].terminated.is_some() {
                break;
            }
        }
        self.ends[1 - i].inbox.drain(..used);
    }

    fn fault(&mut self, i: usize, fault: Fault) {
        let end = &mut self.ends[i];
        end.failed = Some(fault);
        end.stream.fail(fault);
        assert_eq!(end.stream.state(), State::Terminating);
        // Nothing is accepted any more.
        let write = Header::Tagged(Tagged {
            opcode: Opcode::Write,
            last: true,
            stag: 1,
            to: 0,
        });
        assert_eq!(end.stream.rx_segment(&write, 20), Err(Fault::Closed));
    }

    /// The receive path of an RNIC, checked against the oracle.
    fn receive(&mut self, i: usize, ulpdu: &[u8]) -> Result<(), Fault> {
        let way = &mut self.ways[i];
        let end = &mut self.ends[1 - i];
        let header = Header::parse(ulpdu)?;
        let payload = &ulpdu[header.len()..];
        let event = match end.stream.rx_segment(&header, ulpdu.len())? {
            Rx::PlaceWrite { stag, to, len } => {
                assert_eq!(len as usize, payload.len());
                if len > 0 {
                    let (_, offset) = end.memory.locate(stag, to, len, true)?;
                    end.memory.data[offset..offset + len as usize].copy_from_slice(payload);
                }
                let (expect_stag, expect_to, data) =
                    way.writes.front().expect("a Write that nobody posted");
                assert_eq!(
                    (stag, to),
                    (*expect_stag, expect_to + way.written as u64),
                    "Write out of order"
                );
                assert_eq!(
                    payload,
                    &data[way.written..way.written + payload.len()],
                    "Write with other bytes"
                );
                way.written += payload.len();
                assert_eq!(header.is_last(), way.written == data.len());
                if header.is_last() {
                    way.writes.pop_front();
                    way.written = 0;
                }
                end.stream.rx_placed()
            }
            Rx::PlaceRead { seq, offset, len } => {
                assert_eq!(len as usize, payload.len());
                let read = &mut end.posted[seq as usize];
                assert!(read.started && matches!(read.wr.op, Op::Read { .. }));
                read.sink[offset as usize..(offset + len) as usize].copy_from_slice(payload);
                end.stream.rx_placed()
            }
            Rx::PlaceRecv { first, mo, len } => {
                assert_eq!(len as usize, payload.len());
                if first {
                    end.room = end.receives.pop_front().ok_or(Fault::NoReceive)?;
                    end.message.clear();
                }
                assert_eq!(mo as usize, end.message.len());
                if end.message.len() + payload.len() > end.room {
                    return Err(Fault::ReceiveTooSmall);
                }
                end.message.extend_from_slice(payload);
                end.stream.rx_placed()
            }
            Rx::Control { len } => end.stream.rx_control(&payload[..len as usize])?,
        };
        match event {
            None => {}
            Some(Event::Received {
                len,
                solicited,
                invalidate,
                immediate,
            }) => {
                let mut data = Vec::new();
                if immediate.is_some() {
                    end.receives.pop_front().ok_or(Fault::NoReceive)?;
                } else {
                    data.clone_from(&end.message);
                }
                let expected = way
                    .messages
                    .pop_front()
                    .expect("a message that nobody posted");
                assert_eq!(
                    Message {
                        len: len as usize,
                        data,
                        solicited,
                        invalidate,
                        immediate
                    },
                    expected
                );
            }
            Some(Event::ReadRequested { stag, to, len }) => {
                end.memory.read(stag, to, len)?;
                end.stream.accept_read();
                assert!(
                    end.stream.inbound_requests() <= end.params.ird as usize,
                    "beyond IRD"
                );
            }
            Some(Event::AtomicRequested(r)) => {
                let original = end
                    .memory
                    .atomic(r.stag, r.to, r.op, r.add_or_swap, r.compare)?;
                end.stream.atomic_done(original);
                assert!(
                    end.stream.inbound_requests() <= end.params.ird as usize,
                    "beyond IRD"
                );
            }
            Some(Event::AtomicResult { seq, original }) => {
                end.posted[seq as usize].sink = original.to_be_bytes().to_vec();
            }
            Some(Event::Terminated(terminate)) => {
                assert_eq!(end.stream.state(), State::Terminated);
                end.terminated = Some(terminate.error);
            }
        }
        Ok(())
    }

    /// Pops completions and checks their order and that they are true.
    fn reap(&mut self, i: usize, totals: &mut Totals) {
        let end = &mut self.ends[i];
        while let Some(done) = end.stream.pop_completed() {
            assert_eq!(done.seq, end.next_done, "completions out of order");
            end.next_done += 1;
            let posted = &end.posted[done.seq as usize];
            match done.status {
                DoneStatus::Ok { byte_len } => {
                    assert!(!end.broken, "success after an error");
                    assert_eq!(
                        posted.sink, posted.expect,
                        "work request {} {:?}",
                        done.seq, posted.wr
                    );
                    assert!(posted.started);
                    assert!(posted.transmitted || posted.wr.op.is_answered());
                    let expected = match posted.wr.op {
                        Op::Imm { .. } => 8,
                        _ => posted.wr.len,
                    };
                    assert_eq!(byte_len, expected);
                    totals.completed += 1;
                }
                DoneStatus::RemoteError(error) => {
                    assert_eq!(
                        end.terminated,
                        Some(error),
                        "an error that the peer did not send"
                    );
                    assert!(posted.poison.is_none_or(|p| p == error));
                    end.broken = true;
                    totals.remote_errors += 1;
                }
                DoneStatus::Flushed => {
                    assert!(end.flushed, "flushed while open");
                    if posted.poison.is_some() && posted.wr.op.is_answered() {
                        assert!(
                            end.terminated.is_none() || end.terminated != posted.poison,
                            "the culprit went unnamed"
                        );
                    }
                    end.broken = true;
                    totals.flushed += 1;
                }
            }
        }
    }

    fn step(&mut self, totals: &mut Totals) {
        self.steps += 1;
        let i = self.rng.below(2);
        match self.rng.below(10) {
            0 | 1 => self.post(i),
            2..=4 => {
                let count = 1 + self.rng.below(4);
                self.transmit(i, count);
            }
            5 | 6 => {
                let n = if self.rng.one_in(4) {
                    1 + self.rng.below(40)
                } else {
                    1 + self.rng.below(4000)
                };
                self.hand_over(i, n);
            }
            7 | 8 => {
                let n = if self.rng.one_in(4) {
                    1 + self.rng.below(40)
                } else {
                    1 + self.rng.below(4000)
                };
                self.deliver(i, n);
            }
            _ => {}
        }
        self.reap(i, totals);
    }

    /// Runs until nothing moves any more.
    fn drain(&mut self, totals: &mut Totals) {
        for _ in 0..100_000 {
            for i in 0..2 {
                self.transmit(i, 8);
                self.hand_over(i, usize::MAX);
                self.deliver(i, usize::MAX);
            }
            self.reap(0, totals);
            self.reap(1, totals);
            let quiet = |i: usize| {
                !self.ends[i].stream.has_work()
                    && self.ways[i].outbox.is_empty()
                    && self.ways[i].wire.is_empty()
            };
            if quiet(0) && quiet(1) {
                return;
            }
        }
        panic!("the streams do not come to rest");
    }

    fn flush(&mut self, totals: &mut Totals) {
        for i in 0..2 {
            self.ends[i].flushed = true;
            self.ends[i].stream.flush();
            assert_eq!(self.ends[i].stream.state(), State::Closed);
            assert!(!self.ends[i].stream.has_work());
            self.reap(i, totals);
            assert_eq!(
                self.ends[i].next_done,
                self.ends[i].posted.len() as u64,
                "lost a work request"
            );
            assert_eq!(self.ends[i].stream.posted(), 0);
        }
    }

    /// A connection that nobody disturbs: everything posted happens.
    fn end_in_peace(mut self, totals: &mut Totals) {
        self.drain(totals);
        for i in 0..2 {
            let (end, way) = (&self.ends[i], &self.ways[i]);
            assert_eq!((end.failed, end.terminated), (None, None));
            assert_eq!(
                end.next_done,
                end.posted.len() as u64,
                "a work request hangs"
            );
            assert!(way.messages.is_empty() && way.writes.is_empty());
            assert!(self.ends[1 - i].receives.is_empty());
            assert_eq!(way.model, self.ends[1 - i].memory, "memory differs");
        }
        self.flush(totals);
    }

    /// Somebody sent what the other must refuse: the refusal arrives with the right code.
    fn end_in_fault(mut self, totals: &mut Totals) {
        self.drain(totals);
        let mut refusals = 0;
        for i in 0..2 {
            let Some(fault) = self.ends[i].failed else {
                continue;
            };
            refusals += 1;
            let way = &self.ways[1 - i];
            let sender = &self.ends[1 - i];
            assert_eq!(self.ends[i].terminates_sent, 1);
            let expected = match fault {
                Fault::MsnRange => TermError::Untagged(UntaggedError::MsnRange),
                Fault::InvalidMo => TermError::Untagged(UntaggedError::InvalidMo),
                Fault::Crc => TermError::Mpa(MpaError::CrcError),
                Fault::Marker => TermError::Mpa(MpaError::MarkerMismatch),
                Fault::UnexpectedOpcode => TermError::Operation(OperationError::UnexpectedOpcode),
                Fault::AtomicMismatch | Fault::BadReceive => {
                    TermError::Operation(OperationError::Unspecified)
                }
                Fault::RdmapVersion => TermError::Operation(OperationError::InvalidVersion),
                Fault::DdpVersion { .. } => TermError::Tagged(TaggedError::InvalidVersion),
                Fault::ReceiveTooSmall => TermError::Untagged(UntaggedError::TooLong),
                _ if way.evil.is_some_and(|(n, _)| n < way.received_fpdus) => match fault {
                    Fault::InvalidStag => TermError::Tagged(TaggedError::InvalidStag),
                    Fault::Bounds => TermError::Tagged(TaggedError::BaseBounds),
                    _ => panic!("{fault:?}"),
                },
                _ => sender
                    .posted
                    .last()
                    .unwrap()
                    .poison
                    .expect("a fault that nobody made"),
            };
            // Unless the other side had given up before, or its own stream was cut.
            if sender.failed.is_none() && !self.ways[i].corrupted {
                assert_eq!(sender.terminated, Some(expected));
            }
        }
        totals.faults += refusals;
        self.flush(totals);
    }
}

/// One connection from start-up to its end.
fn episode(seed: u64, totals: &mut Totals) {
    let mut world = World::new(Rng::new(seed));
    let length = 200 + world.rng.below(3000);
    let at = world.rng.below(length);
    let fate = world.rng.below(8);
    for step in 0..length {
        if step == at {
            let i = world.rng.below(2);
            match fate {
                0 | 1 => world.poison(i),
                2 | 3 => world.ways[i].want_evil = true,
                4 => {
                    // Nothing more arrives, anywhere.
                    world.flush(totals);
                    totals.cuts += 1;
                    break;
                }
                5 if world.ends[i].params.crc && !world.ways[i].wire.is_empty() => {
                    let at = world.rng.below(world.ways[i].wire.len());
                    world.ways[i].wire[at] ^= 1 << world.rng.below(8);
                    world.ways[i].corrupted = true;
                }
                _ => {}
            }
        }
        world.step(totals);
    }
    totals.steps += world.steps;
    totals.episodes += 1;
    let cut = world.ends[0].flushed;
    let troubled = world
        .ways
        .iter()
        .any(|w| w.poisoned || w.want_evil || w.corrupted);
    if troubled && !cut {
        world.end_in_fault(totals);
    } else if !cut {
        world.end_in_peace(totals);
    }
}

#[test]
fn millions_of_steps_against_the_oracle() {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|v| v.parse::<u64>().expect("a number"))
    };
    let steps = number("WEFT_STEPS").unwrap_or(3_000_000);
    let first = number("WEFT_SEED");
    let mut totals = Totals::default();
    let mut seed = first.unwrap_or(1);
    while totals.steps < steps {
        let result =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| episode(seed, &mut totals)));
        if let Err(panic) = result {
            eprintln!("failed with WEFT_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
        if first.is_some() && number("WEFT_STEPS").is_none() {
            return;
        }
        seed += 1;
    }
    println!("{totals:?}");
    if steps >= 100_000 {
        let Totals {
            completed,
            flushed,
            remote_errors,
            faults,
            cuts,
            ..
        } = totals;
        assert!(
            completed > steps / 20
                && flushed > 100
                && remote_errors > 10
                && faults > 50
                && cuts > 10,
            "the simulation misses its point: {totals:?}"
        );
    }
}
