//! Two endpoints against an oracle: start-up and streams over a byte pipe with delay, arbitrary segmentation, cut
//! connections, faulty work requests and a peer that alters its own segments. Everything comes from one seed.
//!
//! `WEFT_SEED` runs one seed, `WEFT_STEPS` sets how many steps in total.
//!
//! The oracle executes each work request when it is posted, on a model of the peer's memory that nothing else writes to.
//! That is what the peer must see in the end, and what Reads and Atomics must return, as long as a Write or Atomic that
//! overlaps an earlier Read is fenced: RFC 5040 section 5.5 allows a Read Response to see later Writes.

use std::collections::VecDeque;

use weft_proto::mpa::{
    self, InitStep, Initiator, Params, RespStep, Responder, Revision, Rtr, RtrSet,
};
use weft_proto::rdmap::{
    Config, DoneStatus, Event, Fault, MAX_HEADER, Op, Payload, Rx, SendWr, State, Stream,
};
use weft_wire::crc::crc32c;
use weft_wire::ddp::{Header, Tagged, UNTAGGED_LEN, Untagged};
use weft_wire::mpa::{MarkerInserter, MarkerStripper, fpdu_len};
use weft_wire::rdmap::{
    AtomicOp, MpaError, OperationError, ProtectionError, TaggedError, TermError, UntaggedError,
};

/// xorshift64*, so that a seed means the same for ever.
struct Rng(u64);

impl Rng {
    fn new(seed: u64) -> Self {
        let mut rng = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        rng.next();
        rng.next();
        rng
    }
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 32) as usize * n) >> 32
    }
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            out.extend_from_slice(&self.next().to_le_bytes());
        }
        out.truncate(len);
        out
    }
}

const SIZE: usize = 2048;
/// Written and read by the peer.
const DATA: Region = Region {
    stag: 0x0001_0005,
    base: 0x7f00_0000_1003,
};
/// Read only; its last byte is the last that a tagged offset can name.
const FIXED: Region = Region {
    stag: 0x0002_0006,
    base: u64::MAX - SIZE as u64,
};
/// Atomics only, words of 8 bytes.
const WORDS: Region = Region {
    stag: 0x0003_0007,
    base: 0x40,
};

#[derive(Clone, Copy)]
struct Region {
    stag: u32,
    base: u64,
}

#[derive(Clone, PartialEq, Debug)]
struct Memory {
    data: Vec<u8>,
    fixed: Vec<u8>,
    words: [u64; 8],
}

impl Memory {
    fn new(rng: &mut Rng) -> Self {
        Self {
            data: rng.bytes(SIZE),
            fixed: rng.bytes(SIZE),
            words: std::array::from_fn(|_| rng.next()),
        }
    }
    /// What an RNIC checks for a Read or Write.
    fn locate(
        &self,
        stag: u32,
        to: u64,
        len: u32,
        write: bool,
    ) -> Result<(&Vec<u8>, usize), Fault> {
        let (region, bytes) = match stag {
            s if s == DATA.stag => (DATA, &self.data),
            s if s == FIXED.stag => (FIXED, &self.fixed),
            _ => return Err(Fault::InvalidStag),
        };
        let offset = to.checked_sub(region.base).ok_or(Fault::Bounds)?;
        if offset + u64::from(len) > SIZE as u64 {
            return Err(Fault::Bounds);
        }
        if write && stag == FIXED.stag {
            return Err(Fault::AccessRights);
        }
        Ok((bytes, offset as usize))
    }
    fn read(&self, stag: u32, to: u64, len: u32) -> Result<&[u8], Fault> {
        if len == 0 {
            return Ok(&[]);
        }
        let (bytes, offset) = self.locate(stag, to, len, false)?;
        Ok(&bytes[offset..offset + len as usize])
    }
    fn atomic(
        &mut self,
        stag: u32,
        to: u64,
        op: AtomicOp,
        value: u64,
        compare: u64,
    ) -> Result<u64, Fault> {
        if stag != WORDS.stag {
            return Err(Fault::InvalidStag);
        }
        let index = to
            .checked_sub(WORDS.base)
            .map(|o| o as usize / 8)
            .filter(|i| *i < 8)
            .ok_or(Fault::Bounds)?;
        let word = &mut self.words[index];
        let original = *word;
        match op {
            AtomicOp::FetchAdd => *word = original.wrapping_add(value),
            AtomicOp::Swap => *word = value,
            AtomicOp::CompareSwap if original == compare => *word = value,
            AtomicOp::CompareSwap => {}
        }
        Ok(original)
    }
}

/// Where a Send or Write takes its bytes from.
enum Source {
    Own(Vec<u8>),
    /// The sink of an earlier Read, which a fence makes sure of.
    SinkOf(u64),
}

/// A posted work request, what it has done so far and what it must do.
struct Posted {
    wr: SendWr,
    source: Source,
    sink: Vec<u8>,
    /// The final content of the sink.
    expect: Vec<u8>,
    started: bool,
    transmitted: bool,
    /// It must fail at the peer, with this error.
    poison: Option<TermError>,
}

#[derive(Debug, PartialEq)]
struct Message {
    data: Vec<u8>,
    solicited: bool,
    invalidate: Option<u32>,
    immediate: Option<u64>,
}

/// One direction's oracle and pipe: from endpoint `i` to the other.
struct Direction {
    /// What the peer's memory must be once everything posted was executed.
    model: Memory,
    messages: VecDeque<Message>,
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

fn random_config(rng: &mut Rng) -> mpa::Config {
    mpa::Config {
        crc: rng.one_in(2),
        recv_markers: rng.one_in(3),
        revision: if rng.one_in(4) {
            Revision::One
        } else {
            Revision::Two
        },
        ird: 1 + rng.below(6) as u16,
        ord: 1 + rng.below(6) as u16,
        peer_to_peer: None,
    }
}

/// Both start-up machines over pieces of bytes.
fn start(rng: &mut Rng) -> [Params; 2] {
    let (mut ours, mut theirs) = (random_config(rng), random_config(rng));
    if rng.one_in(2) && ours.revision == Revision::Two && theirs.revision == Revision::Two {
        let set = RtrSet {
            send: false,
            write: true,
            read: rng.one_in(2),
        };
        (ours.peer_to_peer, theirs.peer_to_peer) = (
            Some(set),
            Some(RtrSet {
                send: rng.one_in(2),
                ..set
            }),
        );
    }
    // Without negotiation the users must agree by other means; here the initiator's limits fit.
    if ours.revision == Revision::One || theirs.revision == Revision::One {
        (ours.ird, ours.ord) = (theirs.ord, theirs.ird);
    }
    let len = rng.below(509);
    let data = rng.bytes(len);
    let (initiator, request) = Initiator::new(ours, &data).unwrap();
    let mut given = 0;
    let pending = loop {
        match Responder::new(theirs).on_bytes(&request[..given]).unwrap() {
            RespStep::NeedMore => given += 1 + rng.below(request.len() - given),
            RespStep::Request(pending) => break pending,
        }
    };
    assert_eq!(
        (pending.private_data(), pending.consumed()),
        (&data[..], request.len())
    );
    let len = rng.below(pending.max_private_data() + 1);
    let data = rng.bytes(len);
    let (theirs, mut reply) = pending.accept(&data, theirs.ird, theirs.ord).unwrap();
    let reply_len = reply.len();
    reply.extend_from_slice(b"early");
    let mut given = 0;
    let ours = loop {
        match initiator.on_bytes(&reply[..given]).unwrap() {
            InitStep::NeedMore => given += 1 + rng.below(reply.len() - given),
            InitStep::Accepted {
                params,
                private_data,
                consumed,
            } => {
                assert_eq!((private_data, consumed), (data, reply_len));
                break params;
            }
            InitStep::Rejected { .. } => panic!("rejected"),
        }
    };
    assert_eq!(
        (ours.crc, ours.tx_markers, ours.rx_markers),
        (theirs.crc, theirs.rx_markers, theirs.tx_markers)
    );
    assert!(
        ours.ord <= theirs.ird && theirs.ord <= ours.ird,
        "{ours:?} {theirs:?}"
    );
    assert_eq!(ours.rtr, theirs.rtr);
    assert!(matches!(ours.rtr, None | Some(Rtr::Write | Rtr::Read)));
    [ours, theirs]
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

    fn push(
        &mut self,
        i: usize,
        wr: SendWr,
        source: Source,
        expect: Vec<u8>,
        poison: Option<TermError>,
    ) {
        let seq = self.ends[i].stream.post(wr);
        assert_eq!(seq, self.ends[i].posted.len() as u64);
        let sink = vec![0; expect.len()];
        self.ends[i].posted.push(Posted {
            wr,
            source,
            sink,
            expect,
            started: false,
            transmitted: false,
            poison,
        });
    }

    /// Posts a random work request and executes it on the model.
    fn post(&mut self, i: usize) {
        if self.ends[i].posted.len() - self.ends[i].next_done as usize > 24 || self.ways[i].poisoned
        {
            return;
        }
        let rng = &mut self.rng;
        let way = &mut self.ways[i];
        let mut fence = rng.one_in(8);
        let len = match rng.below(8) {
            0 => 0,
            1 => rng.below(SIZE),
            _ => rng.below(300),
        };
        let solicited = rng.one_in(2);
        match rng.below(12) {
            0..=2 => {
                let invalidate = rng.one_in(3).then(|| rng.next() as u32);
                let op = Op::Send {
                    solicited,
                    invalidate,
                };
                let read = self.ends[i]
                    .posted
                    .iter()
                    .rposition(|p| matches!(p.wr.op, Op::Read { .. }) && p.poison.is_none());
                let (source, data) = match read {
                    Some(read) if rng.one_in(4) => {
                        fence = true;
                        (
                            Source::SinkOf(read as u64),
                            self.ends[i].posted[read].expect.clone(),
                        )
                    }
                    _ => {
                        let data = rng.bytes(len);
                        (Source::Own(data.clone()), data)
                    }
                };
                let len = data.len();
                self.ends[1 - i].receives.push_back(len + rng.below(10));
                way.messages.push_back(Message {
                    data,
                    solicited,
                    invalidate,
                    immediate: None,
                });
                self.finish(
                    i,
                    SendWr {
                        op,
                        len: len as u32,
                        fence,
                    },
                    source,
                    Vec::new(),
                );
            }
            3..=5 => {
                let offset = rng.below(SIZE - len + 1);
                let (stag, to) = (DATA.stag, DATA.base + offset as u64);
                let range = offset..offset + len;
                fence |= way
                    .unfenced
                    .iter()
                    .any(|r| r.start < range.end && range.start < r.end);
                let data = rng.bytes(len);
                way.model.data[range].copy_from_slice(&data);
                way.writes.push_back((stag, to, data.clone()));
                let imm = rng.next();
                let op = if rng.one_in(4) {
                    self.ends[1 - i].receives.push_back(0);
                    way.messages.push_back(Message {
                        data: Vec::new(),
                        solicited,
                        invalidate: None,
                        immediate: Some(imm),
                    });
                    Op::WriteImm {
                        stag,
                        to,
                        imm,
                        solicited,
                    }
                } else {
                    Op::Write { stag, to }
                };
                self.finish(
                    i,
                    SendWr {
                        op,
                        len: len as u32,
                        fence,
                    },
                    Source::Own(data),
                    Vec::new(),
                );
            }
            6 => {
                let imm = rng.next();
                self.ends[1 - i].receives.push_back(rng.below(3));
                way.messages.push_back(Message {
                    data: Vec::new(),
                    solicited,
                    invalidate: None,
                    immediate: Some(imm),
                });
                let wr = SendWr {
                    op: Op::Imm { imm, solicited },
                    len: 0,
                    fence,
                };
                self.finish(i, wr, Source::Own(Vec::new()), Vec::new());
            }
            7..=9 => {
                let offset = rng.below(SIZE - len + 1);
                let (region, expect) = if rng.one_in(3) {
                    (FIXED, way.model.fixed[offset..offset + len].to_vec())
                } else {
                    (DATA, way.model.data[offset..offset + len].to_vec())
                };
                let op = Op::Read {
                    src_stag: region.stag,
                    src_to: region.base + offset as u64,
                };
                self.finish(
                    i,
                    SendWr {
                        op,
                        len: len as u32,
                        fence,
                    },
                    Source::Own(Vec::new()),
                    expect,
                );
                if region.stag == DATA.stag {
                    self.ways[i].unfenced.push(offset..offset + len);
                }
            }
            10 => {
                let index = rng.below(8);
                let op = [AtomicOp::FetchAdd, AtomicOp::Swap, AtomicOp::CompareSwap][rng.below(3)];
                let value = rng.next();
                let compare = if rng.one_in(2) {
                    way.model.words[index]
                } else {
                    rng.next()
                };
                let to = WORDS.base + 8 * index as u64;
                let original = way
                    .model
                    .atomic(WORDS.stag, to, op, value, compare)
                    .unwrap();
                let op = Op::Atomic {
                    op,
                    stag: WORDS.stag,
                    to,
                    add_or_swap: value,
                    add_or_swap_mask: u64::MAX,
                    compare,
                    compare_mask: u64::MAX,
                };
                let expect = original.to_be_bytes().to_vec();
                self.finish(
                    i,
                    SendWr { op, len: 8, fence },
                    Source::Own(Vec::new()),
                    expect,
                );
            }
            _ => self.finish(
                i,
                SendWr {
                    op: Op::Local,
                    len: 0,
                    fence,
                },
                Source::Own(Vec::new()),
                Vec::new(),
            ),
        }
    }

    fn finish(&mut self, i: usize, wr: SendWr, source: Source, expect: Vec<u8>) {
        if wr.fence {
            self.ways[i].unfenced.clear();
        }
        self.push(i, wr, source, expect, None);
    }

    /// Posts a work request that the peer must refuse with a known error. Nothing is posted after it.
    fn poison(&mut self, i: usize) {
        if self.ways[i].poisoned {
            return;
        }
        let rng = &mut self.rng;
        let send = Op::Send {
            solicited: false,
            invalidate: None,
        };
        let bad = 0xdead_0001;
        let read = |src_stag, src_to| Op::Read { src_stag, src_to };
        let (op, len, error) = match rng.below(8) {
            0 => (send, 1, TermError::Untagged(UntaggedError::NoBuffer)),
            1 => {
                let room = rng.below(1000);
                self.ends[1 - i].receives.push_back(room);
                (
                    send,
                    room as u32 + 1,
                    TermError::Untagged(UntaggedError::TooLong),
                )
            }
            2 => (
                Op::Write { stag: bad, to: 0 },
                1,
                TermError::Tagged(TaggedError::InvalidStag),
            ),
            3 => (
                Op::Write {
                    stag: DATA.stag,
                    to: DATA.base + SIZE as u64,
                },
                1,
                TermError::Tagged(TaggedError::BaseBounds),
            ),
            4 => (
                Op::Write {
                    stag: FIXED.stag,
                    to: FIXED.base,
                },
                1,
                TermError::Protection(ProtectionError::AccessRights),
            ),
            5 => (
                read(bad, 0),
                5,
                TermError::Protection(ProtectionError::InvalidStag),
            ),
            6 => (
                read(DATA.stag, DATA.base - 1),
                5,
                TermError::Protection(ProtectionError::BaseBounds),
            ),
            _ => (
                read(FIXED.stag, u64::MAX - 3),
                5,
                TermError::Protection(ProtectionError::ToWrap),
            ),
        };
        if matches!(op, Op::Write { .. }) {
            self.ways[i].writes.push_back((0, 0, Vec::new()));
        }
        let expect = if op.is_answered() {
            rng.bytes(len as usize)
        } else {
            Vec::new()
        };
        let data = vec![7; len as usize];
        let fence = rng.one_in(4);
        self.ways[i].poisoned = true;
        self.push(
            i,
            SendWr { op, len, fence },
            Source::Own(data),
            expect,
            Some(error),
        );
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
            if tx.terminate {
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
        if self.ways[i].want_evil
            && self.ways[i].evil.is_none()
            && let Some(other) = self.alter(i, &mut ulpdu)
        {
            self.put(i, &other);
        }
        self.ways[i].last_segment =
            Some((Header::parse(&ulpdu).unwrap_or(LAST_RESORT), ulpdu.clone()));
        self.put(i, &ulpdu);
    }

    fn put(&mut self, i: usize, ulpdu: &[u8]) {
        assert!(ulpdu.len() <= 1000, "beyond max_ulpdu");
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

    /// Makes the segment one that the receiver must refuse, and notes with which fault. May return a segment to send
    /// before it instead.
    fn alter(&mut self, i: usize, ulpdu: &mut Vec<u8>) -> Option<Vec<u8>> {
        let Ok(header) = Header::parse(ulpdu) else {
            return None;
        };
        let choice = self.rng.below(6);
        let last = self.ways[i].last_segment.take();
        let mut replay = None;
        let fault = match (header, choice) {
            (Header::Untagged(h), _) if h.qn == 2 => return None,
            // The segment before, once more.
            (_, 0) => {
                let (header, segment) = last?;
                let fault = match header {
                    Header::Untagged(h) if h.last => Fault::MsnRange,
                    Header::Untagged(_) => Fault::InvalidMo,
                    Header::Tagged(h) if h.opcode as u8 == 0 && h.last => return None,
                    Header::Tagged(h) if h.opcode as u8 == 0 => Fault::Bounds,
                    Header::Tagged(_) => return None,
                };
                replay = Some(segment);
                fault
            }
            (Header::Untagged(h), 1) => {
                rewrite(
                    ulpdu,
                    Header::Untagged(Untagged {
                        msn: h.msn.wrapping_add(1),
                        ..h
                    }),
                );
                Fault::MsnRange
            }
            (Header::Untagged(h), 2) => {
                rewrite(
                    ulpdu,
                    Header::Untagged(Untagged {
                        msn: h.msn.wrapping_sub(1),
                        ..h
                    }),
                );
                Fault::MsnRange
            }
            (Header::Untagged(h), 3) => {
                rewrite(ulpdu, Header::Untagged(Untagged { mo: h.mo ^ 4, ..h }));
                Fault::InvalidMo
            }
            (Header::Untagged(h), 4) if h.qn != 0 => {
                rewrite(ulpdu, Header::Untagged(Untagged { last: false, ..h }));
                Fault::ReceiveTooSmall
            }
            (Header::Untagged(h), 5) if h.qn == 3 => {
                ulpdu[UNTAGGED_LEN] ^= 1;
                Fault::AtomicMismatch
            }
            (Header::Untagged(_), _) => {
                ulpdu[1] |= 0x0f;
                Fault::UnexpectedOpcode
            }
            (Header::Tagged(h), 1) if h.opcode as u8 == 2 => {
                rewrite(
                    ulpdu,
                    Header::Tagged(Tagged {
                        stag: h.stag ^ 1,
                        ..h
                    }),
                );
                Fault::InvalidStag
            }
            (Header::Tagged(h), 2) if h.opcode as u8 == 2 => {
                rewrite(ulpdu, Header::Tagged(Tagged { to: h.to + 1, ..h }));
                Fault::Bounds
            }
            (Header::Tagged(h), 3) if h.opcode as u8 == 2 => {
                rewrite(ulpdu, Header::Tagged(Tagged { last: !h.last, ..h }));
                Fault::Bounds
            }
            (Header::Tagged(h), 4) if h.opcode as u8 == 2 && h.last => {
                ulpdu.push(0);
                Fault::Bounds
            }
            (Header::Tagged(_), 5) => {
                ulpdu[0] ^= 0x02;
                Fault::DdpVersion { tagged: true }
            }
            (Header::Tagged(_), _) => {
                ulpdu[1] ^= 0x80;
                Fault::RdmapVersion
            }
        };
        self.ways[i].evil = Some((self.ways[i].sent_fpdus, fault));
        replay
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
            opcode: weft_wire::rdmap::Opcode::Write,
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
                assert_eq!(len as usize, data.len());
                let expected = way
                    .messages
                    .pop_front()
                    .expect("a message that nobody posted");
                assert_eq!(
                    Message {
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
                Fault::AtomicMismatch => TermError::Operation(OperationError::Unspecified),
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

const LAST_RESORT: Header = Header::Tagged(Tagged {
    opcode: weft_wire::rdmap::Opcode::ReadResponse,
    last: true,
    stag: 0,
    to: 0,
});

fn rewrite(ulpdu: &mut [u8], header: Header) {
    let mut raw = [0; UNTAGGED_LEN];
    let len = header.emit(&mut raw);
    ulpdu[..len].copy_from_slice(&raw[..len]);
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
fn a_million_steps_against_the_oracle() {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|v| v.parse::<u64>().expect("a number"))
    };
    let steps = number("WEFT_STEPS").unwrap_or(1_000_000);
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
