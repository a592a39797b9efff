//! Outgoing data: a flight of FPDUs, which is one `sendmsg` if the transport takes all of it, and the memory that it is read from.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;

use smallvec::SmallVec;
use weft_mem::{Access, LastStretch, SendList, Span};
use weft_wire::crc::crc32c;
use weft_wire::mpa::MarkerInserter;

use super::frame::Frame;
use super::{Core, QpInner};
use crate::engine::on_engine;
use crate::pool::Pool;
use crate::transport::Llp;
use crate::transport::local::LocalLink;
use crate::types::{ConnCounters, Sge};

/// Attempts to send that the transport refuses one after the other, until it is asked only each so many times.
const REFUSALS: u32 = 8;
/// Pieces of a flight: two for each large FPDU.
pub(super) const FLIGHT_PIECES: usize = 64;

/// Our earlier requests in the ring that direct operations must not overtake: Writes, Reads and atomics in the ring, and Sends that
/// invalidate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Barrier {
    /// None.
    #[default]
    None,
    /// In a flight that is not sent yet.
    Built,
    /// Up to this position of the ring.
    Ring(u64),
}

/// A request that is complete when the peer is out of a window.
#[derive(Clone, Copy)]
pub(super) struct Overdue {
    pub(super) seq: u64,
    pub(super) stag: u32,
}

pub(super) enum Piece {
    /// Bytes of the scratch buffer.
    Scratch(Range<usize>),
    /// A local buffer; looked up again for each system call, so that deregistration never waits for a slow peer.
    Local(Sge),
    /// Memory that the peer reads.
    Source { stag: u32, to: u64, len: u32 },
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Piece::Scratch(range) => range.len(),
            Piece::Local(sge) => sge.len as usize,
            Piece::Source { len, .. } => *len as usize,
        }
    }
    /// Take `n` bytes off the front.
    fn advance(&mut self, n: usize) {
        match self {
            Piece::Scratch(range) => range.start += n,
            Piece::Local(sge) => {
                sge.addr += n as u64;
                sge.len -= n as u32;
            }
            Piece::Source { to, len, .. } => {
                *to += n as u64;
                *len -= n as u32;
            }
        }
    }
}

#[derive(Default)]
pub(super) struct Tx {
    pub(super) frame: Frame,
    pub(super) crc: bool,
    pub(super) markers: Option<Box<MarkerInserter>>,
    pub(super) scratch: Vec<u8>,
    pub(super) pieces: VecDeque<Piece>,
    /// Bytes put into flights and bytes sent, over the connection's life.
    pub(super) built: u64,
    pub(super) sent: u64,
    /// (position, work request): sent up to there, the request is transmitted.
    pub(super) marks: VecDeque<(u64, u64)>,
    /// The transport took less than it was given.
    pub(super) blocked: bool,
    /// Attempts to send since the transport last took something.
    refused: u32,
    /// The value of the Terminate in the flight, 0 if there is none.
    pub(super) terminate: u32,
    pub(super) barrier: Barrier,
    /// Bytes of direct work that this drive may still do, and whether it had to leave some.
    pub(super) direct_left: u64,
    pub(super) direct_stopped: bool,
    /// The request that nothing is started before.
    pub(super) overdue: Option<Overdue>,
    /// Of the peer's arenas, for direct work.
    pub(super) stretch: LastStretch,
    /// Memory that the transport still reads, by the position in the stream up to which it does.
    /// Each span to its own end, so that a request's memory is free when the request is complete.
    held: VecDeque<(u64, Span)>,
}

impl Tx {
    pub(super) fn start(&mut self, frame: Frame, crc: bool, markers: bool, prefix: &[u8]) {
        self.frame = frame;
        self.crc = crc;
        self.markers = markers.then(|| Box::new(MarkerInserter::new(crc)));
        if !prefix.is_empty() {
            self.scratch.extend_from_slice(prefix);
            self.pieces.push_back(Piece::Scratch(0..prefix.len()));
            self.built = prefix.len() as u64;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Nothing is queued, and no answer of the peer is outstanding.
    pub(super) fn is_still(&self) -> bool {
        self.pieces.is_empty()
            && !self.blocked
            && self.overdue.is_none()
            && self.held.is_empty()
            && self.marks.is_empty()
    }

    pub(super) fn release(&mut self, pool: &Pool) {
        self.pieces = VecDeque::new();
        self.held = VecDeque::new();
        self.marks = VecDeque::new();
        self.blocked = false;
        self.overdue = None;
        self.stretch = LastStretch::default();
        pool.put_tx(std::mem::take(&mut self.scratch));
    }

    /// Counts bytes that were sent outside the flights.
    pub(super) fn sent_fast(&mut self, n: usize) {
        self.built += n as u64;
        self.sent += n as u64;
    }

    /// Whether a direct operation may be done now, before the requests in the ring.
    pub(super) fn may_overtake(&mut self, local: &LocalLink) -> bool {
        if self.barrier == Barrier::Built && self.pieces.is_empty() {
            self.barrier = Barrier::Ring(local.pushed());
        }
        if let Barrier::Ring(position) = self.barrier
            && local.consumed() >= position
        {
            self.barrier = Barrier::None;
        }
        self.barrier == Barrier::None
    }

    /// The transport has taken nothing several times, so a thread is spinning. Further attempts would only keep the socket from the thread
    /// that makes room. The engine is notified when there is room.
    pub(super) fn rests(&mut self) -> bool {
        let spins = self.blocked && self.refused >= REFUSALS && !on_engine();
        if spins {
            self.refused = self.refused.wrapping_add(1);
        }
        spins && !self.refused.is_multiple_of(REFUSALS)
    }

    /// Direct work of `len` bytes is about to be done in this drive. False when it has done enough: others wait.
    pub(super) fn takes_direct(&mut self, len: u32) -> bool {
        self.direct_stopped = self.direct_left == 0;
        self.direct_left = self.direct_left.saturating_sub(len.into());
        !self.direct_stopped
    }

    /// Whether the transport still reads our memory.
    pub(super) fn lends(&self) -> bool {
        !self.held.is_empty()
    }

    /// Put pad, CRC and markers to an FPDU that begins at `start` in the scratch buffer, where its payload is too, unless it is sent in place.
    /// Says how long it is.
    pub(super) fn finish_fpdu(&mut self, start: usize, ulpdu_len: usize, in_place: bool) -> usize {
        let trailer_from = if in_place { self.scratch.len() } else { start };
        let pad = self.frame.pad(ulpdu_len);
        self.scratch.extend_from_slice(&[0; 3][..pad]);
        if self.frame.has_crc() {
            let crc = if self.crc {
                crc32c(&self.scratch[start..])
            } else {
                0
            };
            self.scratch.extend_from_slice(&crc.to_le_bytes());
        }
        let mut fpdu_len = self.frame.total(ulpdu_len);
        if let Some(markers) = &mut self.markers {
            let fpdu = self.scratch.split_off(start);
            markers.insert(&fpdu, &mut self.scratch);
            fpdu_len = self.scratch.len() - start;
        }
        self.close_scratch(trailer_from);
        self.built += fpdu_len as u64;
        fpdu_len
    }

    pub(super) fn close_scratch(&mut self, from: usize) {
        if from == self.scratch.len() {
            return;
        }
        if let Some(Piece::Scratch(last)) = self.pieces.back_mut()
            && last.end == from
        {
            last.end = self.scratch.len();
            return;
        }
        self.pieces
            .push_back(Piece::Scratch(from..self.scratch.len()));
    }

    /// One system call. `Ok(false)` when the transport takes no more now.
    pub(super) fn send_once(
        &mut self,
        qp: &QpInner,
        link: &Llp,
        counters: &mut ConnCounters,
    ) -> io::Result<bool> {
        // The spans must outlive the list that names them. With each, where its bytes end in the stream.
        let mut spans: SmallVec<[(u64, Span); FLIGHT_PIECES / 2]> = SmallVec::new();
        let mut end = self.sent;
        for piece in self.pieces.iter().take(FLIGHT_PIECES) {
            end += piece.len() as u64;
            let span = match piece {
                Piece::Scratch(_) => continue,
                Piece::Local(sge) => qp.local_span(*sge, Access::empty()),
                Piece::Source { stag, to, len } => {
                    qp.remote_span(*stag, *to, *len, Access::REMOTE_READ)
                }
            };
            // The memory went away in the middle of an FPDU: the stream cannot be saved.
            spans.push((end, span.map_err(|e| io::Error::other(e.to_string()))?));
        }
        let mut list = SendList::new();
        let mut next = spans.iter();
        for piece in self.pieces.iter().take(FLIGHT_PIECES) {
            match piece {
                Piece::Scratch(range) => list.push_bytes(&self.scratch[range.clone()]),
                Piece::Local(_) | Piece::Source { .. } => {
                    if let Some((_, span)) = next.next() {
                        list.push_span(span, 0, span.len());
                    }
                }
            }
        }
        let total = list.len_bytes();
        counters.tx_syscalls += 1;
        let n = match link.send(&list) {
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.blocked = true;
                self.refused = self.refused.wrapping_add(1);
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        self.refused = 0;
        drop(list);
        self.consume(n);
        if !spans.is_empty() && link.copied(self.sent) < self.sent {
            for (end, span) in spans {
                if end - (span.len() as u64) < self.sent {
                    self.held.push_back((end.min(self.sent), span));
                }
            }
        }
        // A short count means a full buffer: the next attempt would fail.
        self.blocked = n < total;
        Ok(!self.blocked)
    }

    fn consume(&mut self, mut n: usize) {
        self.sent += n as u64;
        while n > 0 {
            let Some(first) = self.pieces.front_mut() else {
                return;
            };
            if first.len() > n {
                first.advance(n);
                return;
            }
            n -= first.len();
            self.pieces.pop_front();
        }
        while self.pieces.front().is_some_and(|p| p.len() == 0) {
            self.pieces.pop_front();
        }
    }

    /// Sends the flight and builds no further one. `Ok(true)`: all sent.
    pub(super) fn send_all(
        &mut self,
        qp: &QpInner,
        link: &Llp,
        counters: &mut ConnCounters,
    ) -> io::Result<bool> {
        while !self.pieces.is_empty() {
            if !self.send_once(qp, link, counters)? && !self.pieces.is_empty() {
                return Ok(false);
            }
        }
        self.blocked = false;
        Ok(true)
    }
}

/// Requests whose bytes are out of our memory are transmitted.
pub(super) fn note_transmitted(core: &mut Core, link: &Llp) {
    let Core {
        stream: Some(stream),
        tx,
        ..
    } = core
    else {
        return;
    };
    let copied = link.copied(tx.sent);
    while tx.held.front().is_some_and(|(end, _)| *end <= copied) {
        tx.held.pop_front();
    }
    while let Some(&(position, seq)) = tx.marks.front() {
        if position > copied {
            break;
        }
        tx.marks.pop_front();
        stream.transmitted(seq);
    }
}
