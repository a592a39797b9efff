//! Random numbers, the memory of an endpoint, and what the oracle remembers of a work request.

use weft_proto::rdmap::{Fault, SendWr};
use weft_wire::rdmap::{AtomicOp, TermError};

/// xorshift64*, so that a seed means the same for ever.
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        let mut rng = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        rng.next();
        rng.next();
        rng
    }
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub(super) fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 32) as usize * n) >> 32
    }
    pub(super) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            out.extend_from_slice(&self.next().to_le_bytes());
        }
        out.truncate(len);
        out
    }
}

pub(super) const SIZE: usize = 2048;
/// Written and read by the peer.
pub(super) const DATA: Region = Region {
    stag: 0x0001_0005,
    base: 0x7f00_0000_1003,
};
/// Read only; its last byte is the last that a tagged offset can name.
pub(super) const FIXED: Region = Region {
    stag: 0x0002_0006,
    base: u64::MAX - SIZE as u64,
};
/// Atomics only, words of 8 bytes.
pub(super) const WORDS: Region = Region {
    stag: 0x0003_0007,
    base: 0x40,
};

#[derive(Clone, Copy)]
pub(super) struct Region {
    pub(super) stag: u32,
    pub(super) base: u64,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Memory {
    pub(super) data: Vec<u8>,
    pub(super) fixed: Vec<u8>,
    pub(super) words: [u64; 8],
}

impl Memory {
    pub(super) fn new(rng: &mut Rng) -> Self {
        Self {
            data: rng.bytes(SIZE),
            fixed: rng.bytes(SIZE),
            words: std::array::from_fn(|_| rng.next()),
        }
    }
    /// What an RNIC checks for a Read or Write.
    pub(super) fn locate(
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
    pub(super) fn read(&self, stag: u32, to: u64, len: u32) -> Result<&[u8], Fault> {
        if len == 0 {
            return Ok(&[]);
        }
        let (bytes, offset) = self.locate(stag, to, len, false)?;
        Ok(&bytes[offset..offset + len as usize])
    }
    pub(super) fn atomic(
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
pub(super) enum Source {
    Own(Vec<u8>),
    /// The sink of an earlier Read, which a fence makes sure of.
    SinkOf(u64),
}

/// A posted work request, what it has done so far and what it must do.
pub(super) struct Posted {
    pub(super) wr: SendWr,
    pub(super) source: Source,
    pub(super) sink: Vec<u8>,
    /// The final content of the sink.
    pub(super) expect: Vec<u8>,
    pub(super) started: bool,
    pub(super) transmitted: bool,
    /// It must fail at the peer, with this error.
    pub(super) poison: Option<TermError>,
}

#[derive(Debug, PartialEq)]
pub(super) struct Message {
    /// Of the data; with Immediate Data, of the Write before it.
    pub(super) len: usize,
    pub(super) data: Vec<u8>,
    pub(super) solicited: bool,
    pub(super) invalidate: Option<u32>,
    pub(super) immediate: Option<u64>,
}
