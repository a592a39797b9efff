//! What the literal tests share.
#![allow(dead_code, clippy::unnecessary_wraps)]

use weft_proto::rdmap::{
    Config, DEFAULT_MAX_ULPDU, Done, DoneStatus, Event, Fault, MAX_HEADER, MIN_MAX_ULPDU, Op,
    Payload, Rx, SendWr, Stream, Tx,
};
use weft_wire::ddp::Header;

pub(crate) const CONFIG: Config = Config {
    max_ulpdu: DEFAULT_MAX_ULPDU,
    ird: 4,
    ord: 4,
    hold_until_first_rx: false,
    sink_key: 7,
};

pub(crate) const SEND: Op = Op::Send {
    solicited: false,
    invalidate: None,
};

pub(crate) const READ: Op = Op::Read {
    src_stag: 0x1122_3344,
    src_to: 0x5566,
};

pub(crate) const FETCH_ADD: Op = Op::Atomic {
    op: weft_wire::rdmap::AtomicOp::FetchAdd,
    stag: 0x1122_3344,
    to: 0x5568,
    add_or_swap: 9,
    add_or_swap_mask: 0,
    compare: 0,
    compare_mask: 0,
};

pub(crate) fn stream() -> Stream {
    Stream::new(CONFIG)
}

pub(crate) fn wr(op: Op, len: u32) -> SendWr {
    SendWr {
        op,
        len,
        fence: false,
    }
}

pub(crate) fn fenced(op: Op, len: u32) -> SendWr {
    SendWr {
        op,
        len,
        fence: true,
    }
}

/// Hex digits, spaces ignored, to bytes.
pub(crate) fn hex(digits: &str) -> Vec<u8> {
    let digits: Vec<u32> = digits
        .chars()
        .filter(|c| !c.is_whitespace())
        .map(|c| c.to_digit(16).unwrap())
        .collect();
    assert_eq!(digits.len() % 2, 0);
    digits
        .chunks(2)
        .map(|pair| (pair[0] << 4 | pair[1]) as u8)
        .collect()
}

/// The next segment: its header bytes and what goes with them.
pub(crate) fn tx(stream: &mut Stream) -> Option<(Vec<u8>, Tx)> {
    let mut hdr = [0xee; MAX_HEADER];
    let tx = stream.next_tx(&mut hdr)?;
    assert!(hdr[tx.header_len..].iter().all(|b| *b == 0xee));
    Some((hdr[..tx.header_len].to_vec(), tx))
}

/// The next segment, which must be one.
pub(crate) fn must_tx(stream: &mut Stream) -> (Vec<u8>, Tx) {
    tx(stream).expect("something to send")
}

/// Announces a segment of the given header bytes and payload length.
pub(crate) fn announce(stream: &mut Stream, header: &[u8], payload: usize) -> Result<Rx, Fault> {
    let parsed = Header::parse(header)?;
    stream.rx_segment(&parsed, header.len() + payload)
}

/// Receives a whole segment, doing for placement nothing.
pub(crate) fn receive(stream: &mut Stream, ulpdu: &[u8]) -> Result<Option<Event>, Fault> {
    let parsed = Header::parse(ulpdu)?;
    match stream.rx_segment(&parsed, ulpdu.len())? {
        Rx::Control { len } => stream.rx_control(&ulpdu[parsed.len()..parsed.len() + len as usize]),
        _ => Ok(stream.rx_placed()),
    }
}

/// Moves one segment from one stream to the other, payload as zeros.
pub(crate) fn carry(from: &mut Stream, to: &mut Stream) -> Result<Option<Event>, Fault> {
    let (mut ulpdu, tx) = must_tx(from);
    assert!(!matches!(tx.payload, Payload::Local { .. }));
    ulpdu.resize(ulpdu.len() + tx.payload.len() as usize, 0);
    if let Some(seq) = tx.completes {
        from.transmitted(seq);
    }
    receive(to, &ulpdu)
}

pub(crate) fn ok(seq: u64, byte_len: u32) -> Option<Done> {
    Some(Done {
        seq,
        status: DoneStatus::Ok { byte_len },
    })
}

pub(crate) fn flushed(seq: u64) -> Option<Done> {
    Some(Done {
        seq,
        status: DoneStatus::Flushed,
    })
}

/// The smallest ULPDUs.
pub(crate) const SMALL: Config = Config {
    max_ulpdu: MIN_MAX_ULPDU,
    ..CONFIG
};

/// What comes of a Send without anything besides.
pub(crate) fn received(len: u32) -> Option<Event> {
    Some(Event::Received {
        len,
        solicited: false,
        invalidate: None,
        immediate: None,
    })
}

/// Random numbers of a seed, which is not 0.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(crate) fn percent(&mut self, n: u64) -> bool {
        self.below(100) < n
    }
}
