//! Bodies of the fuzz targets in `fuzz/`, and the replay of their corpora by plain `cargo test`.

mod roce;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use weft_wire::ddp::{Header, Tagged, Untagged};
use weft_wire::dgram::{Segment, Target};
use weft_wire::rdmap::{AtomicOp, IMMEDIATE_LEN, Opcode};

use crate::dgram::{self, Finished, Reassembler, Source};
use crate::mpa::{self, InitStep, Initiator, RespStep, Responder, Revision, RtrSet};
use crate::rdmap::{
    Config, DoneStatus, Event, Fault, MAX_CONTROL, MAX_HEADER, Op, Payload, Rx, SendWr, State,
    Stream,
};

pub use roce::roce_connection;

/// Bytes that run out as zeros.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let n = N.min(self.0.len());
        out[..n].copy_from_slice(&self.0[..n]);
        self.0 = &self.0[n..];
        out
    }
    fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }
    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }
    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }
    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }
}

/// Both sides of the start-up on any bytes: the agreed parameters are within each side's configuration, and later bytes change no result.
pub fn start_up(data: &[u8]) {
    let mut input = Input(data);
    let flags = input.u8();
    let config = mpa::Config {
        crc: flags & 1 != 0,
        recv_markers: flags & 2 != 0,
        revision: if flags & 4 != 0 {
            Revision::One
        } else {
            Revision::Two
        },
        ird: input.u16(),
        ord: input.u16(),
        peer_to_peer: (flags & 8 != 0).then_some(RtrSet {
            send: flags & 16 != 0,
            write: flags & 32 != 0,
            read: flags & 64 != 0,
        }),
    };
    let bytes = input.0;
    let (initiator, request) = Initiator::new(config, b"data").expect("short private data");
    let step = initiator.on_bytes(bytes);
    if let Ok(InitStep::Accepted {
        params,
        consumed,
        private_data,
    }) = &step
    {
        assert!(*consumed <= bytes.len().min(mpa::MAX_FRAME) && private_data.len() <= *consumed);
        assert!(params.ord <= config.ord.max(1) && params.ird <= config.ird);
        assert!(params.crc || !config.crc);
        assert_eq!(params.rx_markers, config.recv_markers);
        assert!(params.rtr.is_none() || config.peer_to_peer.is_some());
    }
    let mut longer = bytes.to_vec();
    longer.push(0);
    if step != Ok(InitStep::NeedMore) {
        assert_eq!(initiator.on_bytes(&longer), step);
    }

    let responder = Responder::new(config);
    let step = responder.on_bytes(bytes);
    if step != Ok(RespStep::NeedMore) {
        assert_eq!(responder.on_bytes(&longer), step);
    }
    // The initiator understands every answer to the peer's request, unless the request was not its own.
    for request in [bytes, &request] {
        let Ok(RespStep::Request(pending)) = responder.on_bytes(request) else {
            continue;
        };
        assert!(pending.consumed() <= request.len());
        let reply = pending.clone().reject(b"no").expect("short private data");
        let rejected = initiator.on_bytes(&reply);
        assert!(
            matches!(rejected, Ok(InitStep::Rejected { consumed, .. }) if consumed == reply.len())
        );
        if let Ok((params, reply)) = pending.accept(b"yes", config.ird, config.ord) {
            assert!(params.ord <= config.ord && params.ird <= config.ird.max(1));
            assert!(params.must_wait_for_first_fpdu);
            if let Ok(step) = initiator.on_bytes(&reply) {
                assert!(
                    matches!(step, InitStep::Accepted { consumed, .. } if consumed == reply.len())
                );
            }
        }
    }
}

/// A stream and its caller's state.
struct Caller {
    stream: Stream,
    config: Config,
    posted: Vec<SendWr>,
    popped: u64,
    /// The next number that the stream should accept, for each queue.
    msn: [u32; 4],
    /// The body of the request that the stream sent last, which begins with the name its answer must bear.
    asked: [u8; MAX_CONTROL],
    terminates: usize,
}

/// A stream fed arbitrary headers, bodies and calls: no panic, bounded state, and nothing to place where it must not go.
pub fn rdmap_stream(data: &[u8]) {
    let mut input = Input(data);
    let config = Config {
        max_ulpdu: input.u16().into(),
        ird: (input.u8() % 8).into(),
        ord: (input.u8() % 8).into(),
        hold_until_first_rx: input.u8() % 4 == 1,
        sink_key: input.u32(),
    };
    let mut caller = Caller {
        stream: Stream::new(config),
        config,
        posted: Vec::new(),
        popped: 0,
        msn: [1; 4],
        asked: [0; MAX_CONTROL],
        terminates: 0,
    };
    while !input.0.is_empty() {
        match input.u8() % 8 {
            0 => caller.post(&mut input),
            1 | 2 => caller.transmit(&mut input),
            3..=6 => caller.receive(&mut input),
            _ => match input.u8() {
                0 => caller.stream.flush(),
                1 => caller.stream.fail(Fault::Bounds),
                2 => caller.stream.fail_source(Fault::InvalidStag),
                seq => caller
                    .stream
                    .transmitted(caller.popped.wrapping_add(seq.into()).wrapping_sub(9)),
            },
        }
        caller.reap();
        let stream = &caller.stream;
        assert!(stream.inbound_requests() <= config.ird as usize);
        assert!(stream.outbound_requests() <= config.ord as usize);
        assert_eq!(
            stream.posted() as u64 + caller.popped,
            caller.posted.len() as u64
        );
    }
    caller.stream.flush();
    caller.reap();
    assert_eq!(caller.popped, caller.posted.len() as u64);
    assert_eq!(
        (caller.stream.state(), caller.stream.has_work()),
        (State::Closed, false)
    );
}

impl Caller {
    fn post(&mut self, input: &mut Input<'_>) {
        let flags = input.u8();
        let solicited = flags & 8 != 0;
        let (stag, to) = (1, u64::from(flags).wrapping_neg());
        let op = match flags % 8 {
            0 => Op::Send {
                solicited,
                invalidate: None,
            },
            1 => Op::Send {
                solicited,
                invalidate: Some(7),
            },
            2 => Op::Write { stag, to },
            3 => Op::WriteImm {
                stag,
                to,
                imm: 5,
                solicited,
            },
            4 => Op::Imm { imm: 6, solicited },
            5 => Op::Read {
                src_stag: stag,
                src_to: to,
            },
            6 => Op::Atomic {
                op: AtomicOp::Swap,
                stag,
                to,
                add_or_swap: 0,
                add_or_swap_mask: 0,
                compare: 0,
                compare_mask: 0,
            },
            _ => Op::Local,
        };
        let wr = SendWr {
            op,
            len: input.u16().into(),
            fence: flags & 16 != 0,
        };
        assert_eq!(self.stream.post(wr), self.posted.len() as u64);
        self.posted.push(wr);
    }

    fn transmit(&mut self, input: &mut Input<'_>) {
        let mut hdr = [0; MAX_HEADER];
        let has_work = self.stream.has_work();
        let tx = self.stream.next_tx(&mut hdr);
        assert_eq!(tx.is_some(), has_work);
        let Some(tx) = tx else { return };
        let limit = self.config.max_ulpdu.max(crate::rdmap::MIN_MAX_ULPDU);
        assert!(tx.header_len as u32 + tx.payload.len() <= limit);
        if let Payload::Wr { seq, offset, len } = tx.payload {
            assert!(len > 0 && offset + len <= self.posted[seq as usize].len);
        }
        self.terminates += usize::from(tx.is_terminate());
        assert!(self.terminates <= 1);
        if let Payload::Local { .. } = tx.payload {
            assert_eq!(tx.header_len, 0);
        } else {
            let header = Header::parse(&hdr[..tx.header_len]).expect("a header that parses");
            if matches!(header.opcode(), Opcode::ReadRequest | Opcode::AtomicRequest) {
                self.asked.copy_from_slice(&hdr[header.len()..]);
            }
        }
        if let Some(seq) = tx.completes.filter(|_| !input.u8().is_multiple_of(4)) {
            self.stream.transmitted(seq);
        }
    }

    /// A header that is often the right one.
    fn header(&self, input: &mut Input<'_>) -> Header {
        let flags = input.u8();
        let opcode = Opcode::from_code(flags & 0xf).unwrap_or(Opcode::ReadResponse);
        let last = flags & 0x10 == 0;
        let (a, b) = if flags & 0x20 == 0 {
            (0, 0)
        } else {
            (input.u32(), input.u64())
        };
        match opcode.queue() {
            None => {
                let name = if opcode == Opcode::ReadResponse {
                    u32::from_be_bytes([self.asked[0], self.asked[1], self.asked[2], self.asked[3]])
                } else {
                    0
                };
                Header::Tagged(Tagged {
                    opcode,
                    last,
                    stag: name ^ a,
                    to: b,
                })
            }
            Some(qn) => {
                let msn = self.msn[qn as usize] ^ a;
                Header::Untagged(Untagged {
                    opcode,
                    last,
                    invalidate: 3,
                    qn,
                    msn,
                    mo: b as u32,
                })
            }
        }
    }

    fn receive(&mut self, input: &mut Input<'_>) {
        let header = self.header(input);
        let payload = usize::from(input.u16());
        let open = self.stream.state() == State::Open;
        let verdict = self.stream.rx_segment(&header, header.len() + payload);
        assert!(open || verdict == Err(Fault::Closed));
        let event = match verdict {
            Err(fault) => {
                self.stream.fail(fault);
                return;
            }
            Ok(Rx::PlaceWrite { to, len, .. }) => {
                assert_eq!(len as usize, payload);
                assert!(to.checked_add(len.into()).is_some());
                Ok(self.stream.rx_placed())
            }
            Ok(Rx::PlaceRead { seq, offset, len }) => {
                let wr = self.posted[seq as usize];
                assert!(matches!(wr.op, Op::Read { .. }) && seq >= self.popped);
                assert!(
                    len as usize == payload
                        && offset.checked_add(len).is_some_and(|end| end <= wr.len)
                );
                Ok(self.stream.rx_placed())
            }
            Ok(Rx::PlaceRecv { first, mo, len }) => {
                let opcode = header.opcode();
                let immediate = matches!(opcode, Opcode::Immediate | Opcode::ImmediateSe);
                let before = if immediate && first { IMMEDIATE_LEN } else { 0 };
                assert!(len as usize + before == payload && mo.checked_add(len).is_some());
                Ok(self.stream.rx_placed())
            }
            Ok(Rx::Control { len }) => {
                assert!(len as usize == payload && payload <= MAX_CONTROL);
                let mut body = self.asked;
                if input.u8().is_multiple_of(2) {
                    body = input.take();
                } else {
                    // The body of an Atomic Response begins with the request's fields after its operation.
                    body.copy_within(4..8, 0);
                }
                self.stream.rx_control(&body[..payload])
            }
        };
        if let Header::Untagged(h) = header
            && h.last
        {
            self.msn[h.qn as usize] = self.msn[h.qn as usize].wrapping_add(1);
        }
        match event {
            Err(fault) => self.stream.fail(fault),
            Ok(Some(Event::ReadRequested { to, len, .. })) => {
                assert!(to.checked_add(len.into()).is_some());
                self.stream.accept_read();
            }
            Ok(Some(Event::AtomicRequested(_))) => self.stream.atomic_done(input.u64()),
            Ok(Some(Event::AtomicResult { seq, .. })) => {
                assert!(
                    matches!(self.posted[seq as usize].op, Op::Atomic { .. }) && seq >= self.popped
                );
            }
            Ok(Some(Event::Terminated(_))) => assert_eq!(self.stream.state(), State::Terminated),
            Ok(Some(Event::Received { .. }) | None) => {}
        }
    }

    fn reap(&mut self) {
        while let Some(done) = self.stream.pop_completed() {
            assert_eq!(done.seq, self.popped);
            self.popped += 1;
            if done.status == DoneStatus::Flushed {
                assert_eq!(self.stream.state(), State::Closed);
            }
        }
    }
}

/// Segments of any messages from a few sources, at any times, into a reassembler with small limits: no byte of a message is placed twice, valid
/// bytes were placed, a message ends once, and the limits hold. Each eight bytes are: source and flags, message, length, offset, payload, time.
pub fn reassembly(data: &[u8]) {
    const MAX_OPEN: usize = 4;
    let config = dgram::Config {
        timeout: Duration::from_millis(10),
        max_sources: 6,
        max_open: MAX_OPEN,
        max_open_per_host: 3,
        max_ranges: 5,
    };
    let mut machine: Reassembler<u64> = Reassembler::new(config);
    // The buffer's number -> where bytes are.
    let mut placed: HashMap<u64, Vec<bool>> = HashMap::new();
    let mut next = 0;
    let mut now = Instant::now();
    let over = |placed: &mut HashMap<u64, Vec<bool>>, finished: &Finished<u64>| {
        let bytes = placed.remove(&finished.buffer).expect("over once");
        let valid = finished.valid.as_slice();
        for (i, &there) in bytes.iter().enumerate() {
            let i = i as u32;
            let said = valid.iter().any(|&(start, end)| (start..end).contains(&i));
            assert_eq!(said, there, "byte {i}");
        }
        assert_eq!(finished.is_complete(), bytes.iter().all(|&there| there));
    };
    for op in data.chunks_exact(8) {
        let [who, msn, len, offset, payload, time, imm, _] = *op.first_chunk().expect("eight");
        now += Duration::from_micros(u64::from(time) * 50);
        while let Some(finished) = machine.expire(now) {
            over(&mut placed, &finished);
        }
        let source = Source {
            addr: ([10, 0, who & 1, 1], 9).into(),
            qp_num: u32::from(who >> 1 & 3),
            incarnation: u32::from(who >> 3 & 3),
        };
        let segment = Segment {
            dst_qp: 1,
            src_qp: source.qp_num,
            qkey: 1,
            incarnation: source.incarnation,
            msn: u32::from(msn),
            len: u32::from(len),
            offset: u32::from(offset),
            target: (who & 0x40 != 0).then_some(Target { stag: 1, to: 2 }),
            imm: (imm & 1 != 0).then_some(3),
            solicited: imm & 2 != 0,
            reliable: None,
        };
        let whole = machine.admit_whole(&source, &segment, usize::from(payload));
        let Ok(ticket) = machine.admit(&source, &segment, usize::from(payload)) else {
            assert!(whole.is_none());
            continue;
        };
        // While a message of its source is open, it takes the general path.
        assert!(whole.is_none() || ticket.opens() && payload == len);
        if imm & 4 != 0
            && let Some(whole) = whole
        {
            machine.came(whole);
            continue;
        }
        if who & 0x80 != 0 {
            if let Some(finished) = machine.abandon(&ticket) {
                over(&mut placed, &finished);
            }
            assert!(
                machine
                    .admit(&source, &segment, usize::from(payload))
                    .is_err()
            );
            continue;
        }
        let buffer = machine.buffer(&ticket).copied().unwrap_or_else(|| {
            assert!(ticket.opens());
            next += 1;
            placed.insert(next, vec![false; usize::from(len)]);
            next
        });
        let bytes = placed.get_mut(&buffer).expect("open");
        let range = usize::from(offset)..usize::from(offset) + usize::from(payload);
        for byte in &mut bytes[range] {
            assert!(!std::mem::replace(byte, true), "placed twice");
        }
        let (whole, evicted) = machine.placed(now, ticket, || buffer);
        for finished in [whole, evicted].into_iter().flatten() {
            over(&mut placed, &finished);
        }
        assert!(machine.open() <= MAX_OPEN && machine.open() == placed.len());
        assert!(machine.sources() <= 6);
    }
    for finished in machine.clear() {
        over(&mut placed, &finished);
    }
    assert!(placed.is_empty());
}

/// Segments of the reliable mode from a few sources with any numbers, with valid cookies: each message is placed from its first byte to its last, in the
/// order of its flow; the kept bytes stay within their limit. Each eight bytes are: source, packet number, message, length, offset, payload, outcome, time.
pub fn flows(data: &[u8]) {
    const MAX_KEPT: usize = 300;
    let config = dgram::FlowsConfig {
        max_flows: 3,
        max_flows_per_host: 2,
        max_kept: MAX_KEPT,
        max_kept_per_flow: 200,
        ..dgram::FlowsConfig::default()
    };
    let mut machine: dgram::Flows<u64, u32> =
        dgram::Flows::new(config, std::hash::RandomState::new());
    // The buffer's number -> bytes placed, and the message's length.
    let mut open: HashMap<u64, (u32, u32)> = HashMap::new();
    let mut next = 0;
    let mut now = Duration::from_secs(1);
    let over = |open: &mut HashMap<u64, (u32, u32)>, carried: &dgram::Carried<u64>| {
        let (placed, len) = open.remove(&carried.buffer).expect("over once");
        assert_eq!((carried.filled, carried.header.len), (placed, len));
    };
    let via = [10, 0, 0, 9].into();
    for op in data.chunks_exact(8) {
        let [who, psn, msn, len, offset, payload, fate, time] = *op.first_chunk().expect("eight");
        now += Duration::from_millis(u64::from(time) * 50);
        let from = ([10, 0, who & 1, 1], 9).into();
        let flow = weft_wire::dgram::Flow {
            dst_qp: 1,
            src_qp: u32::from(who >> 1 & 1),
            incarnation: u32::from(who >> 2 & 1),
        };
        let weft_wire::dgram::Control::Welcome { cookie, .. } = machine.welcome(now, from, &flow)
        else {
            unreachable!("the answer to a question");
        };
        let segment = Segment {
            dst_qp: 1,
            src_qp: flow.src_qp,
            qkey: 1,
            incarnation: flow.incarnation,
            msn: u32::from(msn),
            len: u32::from(len),
            offset: u32::from(offset),
            target: None,
            imm: None,
            solicited: false,
            reliable: Some(weft_wire::dgram::Packet {
                psn: u32::from(psn).max(1),
                cookie: if who & 0x80 == 0 { cookie } else { 7 },
            }),
        };
        let size = usize::from(payload);
        let mut spot = match machine.admit(now, from, via, &segment, size, || (0, size)) {
            dgram::Admit::Next(spot) => Some(spot),
            dgram::Admit::Done => None,
        };
        while let Some(this) = spot.take() {
            let segment = *this.segment();
            match fate & 7 {
                0 => machine.starve(&this, || (0, size)),
                1 => {
                    let code = weft_wire::dgram::FaultCode::Access;
                    if let Some(carried) = machine.refuse(&this, code) {
                        over(&mut open, &carried);
                    }
                }
                _ => {
                    let buffer = if this.opens() && machine.buffer(&this).is_none() {
                        next += 1;
                        open.insert(next, (0, segment.len));
                        Some(next)
                    } else {
                        None
                    };
                    let number = buffer.or(machine.buffer(&this).copied());
                    let number = number.expect("the message of the segment is open");
                    let placed = &mut open.get_mut(&number).expect("open").0;
                    assert_eq!(*placed, segment.offset);
                    *placed += this.payload();
                    if let Some(carried) = machine.placed(&this, buffer) {
                        assert!(carried.is_whole());
                        over(&mut open, &carried);
                    }
                    spot = machine.next_kept(&this).map(|(spot, _)| spot);
                }
            }
        }
        if fate & 8 != 0
            && let Some(carried) = machine.evict(now, |_| true)
        {
            over(&mut open, &carried);
        }
        if fate & 16 != 0 {
            // The kept payload is dropped here, and may be retransmitted.
            if let dgram::Resumed::Segment(spot, _) = machine.resume(false) {
                machine.resumed(false, &spot);
            }
        }
        if fate & 32 != 0 {
            assert!(machine.answers().len() <= 3 + 64);
        }
        for carried in machine.released() {
            over(&mut open, &carried);
        }
        assert!(machine.len() <= 3 && machine.held() <= MAX_KEPT);
    }
    for carried in machine.clear() {
        over(&mut open, &carried);
    }
    assert!(open.is_empty() && machine.held() == 0);
}

#[cfg(test)]
mod tests {
    use weft_wire::fuzzing::replay;

    #[test]
    fn flows() {
        replay("flows", super::flows);
        let mut seed = 0x2545_f491_4f6c_dd1d_u64;
        for _ in 0..500 {
            let op = || {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                // Numbers that are often the expected ones, and payloads that are often all.
                let [who, a, b, len, cut, fate, time, _] = seed.to_le_bytes();
                let whole = cut & 3 != 0;
                let (offset, payload) = if whole { (0, len) } else { (cut, len / 2) };
                let time = if time > 250 { time } else { time & 1 };
                [who & 0x87, a % 12, b % 6, len, offset, payload, fate, time]
            };
            let data: Vec<u8> = std::iter::repeat_with(op).take(300).flatten().collect();
            super::flows(&data);
        }
    }

    #[test]
    fn roce_connection() {
        replay("roce_connection", super::roce_connection);
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..3000 {
            let byte = || {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                // Small numbers often: those that are expected.
                (if seed & 0x300 == 0 {
                    seed >> 40
                } else {
                    seed >> 40 & 15
                }) as u8
            };
            let data: Vec<u8> = std::iter::repeat_with(byte).take(900).collect();
            super::roce_connection(&data);
        }
    }

    #[test]
    fn reassembly() {
        replay("reassembly", super::reassembly);
    }

    #[test]
    fn start_up() {
        replay("start_up", super::start_up);
    }

    #[test]
    fn rdmap_stream() {
        replay("rdmap_stream", super::rdmap_stream);
    }
}
