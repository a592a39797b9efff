//! The state of a datagram queue pair that a thread holds while it processes datagrams, and their effects.

use std::cell::Cell;
use std::collections::VecDeque;
use std::hash::RandomState;
use std::net::{IpAddr, SocketAddr};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use weft_mem::{KeyGuard, Keys, Table};
use weft_proto::dgram::{Flows, FlowsConfig, Reassembler};
use weft_wire::dgram::Grh;

use super::record::{Maps, WriteRecord, Written};
use super::{UdError, UdInner};
use crate::types::{RecvWr, Wc};

/// Errors that wait for the program; the oldest are forgotten.
const MAX_ERRORS: usize = 64;

/// The contents of a datagram, and its origin.
pub(crate) struct Incoming<'a> {
    /// The payload, behind [`Grh::LEN`] bytes that are free.
    pub(crate) bytes: &'a mut [u8],
    pub(crate) from: SocketAddr,
    pub(crate) to: IpAddr,
    pub(crate) traffic_class: u8,
    /// When it was taken in.
    pub(crate) now: &'a ArrivalTime,
}

/// The arrival time of datagrams that are processed together. Single-datagram messages do not need it, and reading the clock is a noticeable part of their
/// cost in shared memory.
#[derive(Default)]
pub(crate) struct ArrivalTime(Cell<Option<Instant>>);

impl ArrivalTime {
    pub(super) fn time(&self) -> Instant {
        let time = self.0.get().unwrap_or_else(Instant::now);
        self.0.set(Some(time));
        time
    }
}

/// Writes the header space of a message of `payload` bytes.
pub(super) fn write_grh(payload: usize, arrived: &mut Incoming<'_>) {
    let grh = Grh {
        source: arrived.from.ip(),
        dest: arrived.to,
        traffic_class: arrived.traffic_class,
    };
    if let Some(room) = arrived.bytes.first_chunk_mut() {
        grh.emit(payload, room);
    }
}

/// A payload that arrived early, with the free space before it, and its origin.
pub(super) struct Early {
    pub(super) bytes: Vec<u8>,
    pub(super) to: IpAddr,
    pub(super) traffic_class: u8,
}

impl Early {
    pub(super) fn of(arrived: &Incoming<'_>) -> (Early, usize) {
        let early = Early {
            bytes: arrived.bytes.to_vec(),
            to: arrived.to,
            traffic_class: arrived.traffic_class,
        };
        let held = early.bytes.len() + size_of::<Early>();
        (early, held)
    }
}

/// The destination of a message's bytes.
pub(super) enum Buffer {
    Recv(RecvWr),
    Region,
}

/// The state that a thread holds while it processes datagrams.
pub(super) struct Inbound {
    /// Completions are still wanted.
    pub(super) live: bool,
    pub(super) reassembler: Reassembler<Buffer>,
    /// The flows of the reliable mode, and whether the engine will check them for age.
    pub(super) flows: Flows<Buffer, Early>,
    pub(super) flows_timed: bool,
    /// Messages of Write-Record that are open, and records that wait for the program.
    pub(super) recording: usize,
    pub(super) records: VecDeque<(u64, Written)>,
    pub(super) next_record: u64,
    pub(super) maps: Maps,
    errors: VecDeque<UdError>,
    /// The engine will check for messages that are too old.
    pub(super) timed: bool,
    /// Completions that go to the queue at the end of the hold, and whether one of them is solicited or an error.
    pub(super) made: Vec<Wc>,
    pub(super) urgent: bool,
    /// Memory that receives and Write-Records have named.
    pub(super) keys: Keys,
}

impl AsMut<Keys> for Inbound {
    fn as_mut(&mut self) -> &mut Keys {
        &mut self.keys
    }
}

impl Inbound {
    pub(super) fn new(config: weft_proto::dgram::Config, table: &Table) -> Inbound {
        Inbound {
            live: true,
            reassembler: Reassembler::new(config),
            flows: Flows::new(FlowsConfig::default(), RandomState::new()),
            flows_timed: false,
            recording: 0,
            records: VecDeque::new(),
            next_record: 0,
            maps: Maps::default(),
            errors: VecDeque::new(),
            timed: false,
            made: Vec::new(),
            urgent: false,
            keys: Keys::new(table),
        }
    }

    pub(super) fn report(&mut self, error: UdError) {
        if self.errors.len() >= MAX_ERRORS {
            self.errors.pop_front();
        }
        self.errors.push_back(error);
    }

    pub(super) fn take_error(&mut self) -> Option<UdError> {
        self.errors.pop_front()
    }

    pub(super) fn take_record(&mut self, number: u64) -> Option<WriteRecord> {
        // Mostly they are taken in order: then none is missing in front of it.
        let guess = number.checked_sub(self.records.front()?.0)? as usize;
        if guess == 0 {
            let first = self.records.front()?.1.record();
            self.records.pop_front();
            return Some(first);
        }
        let at = match self.records.get(guess) {
            Some((n, _)) if *n == number => guess,
            _ => self
                .records
                .binary_search_by_key(&number, |(n, _)| *n)
                .ok()?,
        };
        Some(self.records.remove(at)?.1.record())
    }

    /// Messages of Write-Record that are open, and records that wait for the program.
    pub(super) fn records_held(&self) -> usize {
        self.recording + self.records.len()
    }
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) no_recv: AtomicU64,
    pub(super) too_long: AtomicU64,
    pub(super) wrong_qkey: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) incomplete: AtomicU64,
    pub(super) records: AtomicU64,
    pub(super) no_record: AtomicU64,
    pub(super) no_access: AtomicU64,
    pub(super) resent: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A hold of the state that a thread needs to process datagrams. Its completions are added to the queue at its end, all at once.
pub(super) struct Hold<'a> {
    of: &'a UdInner,
    inbound: KeyGuard<'a, Inbound>,
}

impl Deref for Hold<'_> {
    type Target = Inbound;

    fn deref(&self) -> &Inbound {
        &self.inbound
    }
}

impl DerefMut for Hold<'_> {
    fn deref_mut(&mut self) -> &mut Inbound {
        &mut self.inbound
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let Inbound { made, urgent, .. } = &mut *self.inbound;
        if !made.is_empty() {
            // One without room is of no more use, which its device's event says; the queue pair is not touched by it.
            self.of.queues.recv.push(made, std::mem::take(urgent));
            made.clear();
        }
    }
}

impl UdInner {
    pub(super) fn hold(&self) -> Hold<'_> {
        Hold {
            of: self,
            inbound: self.inbound.lock(),
        }
    }
}

#[cfg(test)]
mod tests {
    use weft_proto::dgram::Ranges;
    use weft_wire::dgram::Target;

    use super::*;
    use crate::types::UdSource;

    fn message(number: u32) -> Written {
        Written {
            source: UdSource {
                addr: SocketAddr::from(([127, 0, 0, 1], 1)),
                qp_num: 2,
            },
            msn: number,
            target: Target {
                stag: number,
                to: 0x1000,
            },
            len: 10,
            imm: None,
            valid: Ranges::up_to(10),
        }
    }

    /// In any order of the requests, and once each.
    #[test]
    fn records_are_found_by_their_number() {
        for order in [[0, 1, 2, 3, 4], [3, 0, 4, 1, 2], [4, 3, 2, 1, 0]] {
            let mut inbound = Inbound::new(weft_proto::dgram::Config::default(), &Table::new(8));
            for number in 0..5 {
                inbound
                    .records
                    .push_back((number + 100, message(number as u32)));
            }
            assert!(inbound.take_record(99).is_none() && inbound.take_record(105).is_none());
            for number in order {
                let record = inbound.take_record(number + 100).unwrap();
                assert_eq!(
                    (record.rkey, record.valid.as_slice()),
                    (number as u32, std::slice::from_ref(&(0..10))),
                    "{order:?}"
                );
                assert!(inbound.take_record(number + 100).is_none());
            }
        }
    }
}
