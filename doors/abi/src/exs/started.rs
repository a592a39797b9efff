//! The outstanding operations of a queue.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use weft_exs::{Queue, Sink};

use super::op::Op;

/// The object of an `exs_qhandle_t`.
pub(crate) struct QueueEntry {
    pub(super) queue: Queue,
    pub(super) started: Arc<Started>,
}

/// The operations of a queue. They outlive it when it is deleted.
pub(crate) struct Started {
    /// Part of this queue's tokens. It distinguishes the operations that a socket has in several queues.
    serial: u32,
    ops: Mutex<Ops>,
}

/// Operations by the index in their token.
#[derive(Default)]
struct Ops {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Default)]
struct Slot {
    /// The generation of the operation, or of the next one: a late thread must not find a successor.
    generation: u32,
    op: Option<Op>,
}

/// Bits of the index in a token: a queue has at most a million operations, plus those of threads that are about to be refused. The index and the
/// generation are the lower 42 bits.
const PLACE: u32 = 21;
const GENERATION: u32 = 21;

impl Ops {
    fn insert(&mut self, op: Op) -> u64 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1 // bounded by the queue's depth
        });
        let slot = &mut self.slots[at as usize];
        slot.op = Some(op);
        slot.token(at)
    }

    fn remove(&mut self, token: u64) -> Option<Op> {
        let at = token as u32 & ((1 << PLACE) - 1);
        let slot = self.slots.get_mut(at as usize)?;
        if slot.token(at) != token & ((1 << (PLACE + GENERATION)) - 1) {
            return None;
        }
        let op = slot.op.take()?;
        slot.generation = (slot.generation + 1) & ((1 << GENERATION) - 1);
        self.free.push(at);
        Some(op)
    }
}

impl Slot {
    fn token(&self, at: u32) -> u64 {
        u64::from(self.generation) << PLACE | u64::from(at)
    }
}

impl Started {
    pub(super) fn new() -> Started {
        static SERIAL: AtomicU32 = AtomicU32::new(1);
        Started {
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
            ops: Mutex::default(),
        }
    }

    fn ops(&self) -> MutexGuard<'_, Ops> {
        self.ops.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The common part of this queue's tokens. Bit 62 distinguishes them from addresses, and bit 63 from [`super::queue::own_token`]s.
    fn mine(&self) -> u64 {
        1 << 62 | u64::from(self.serial & 0xf_ffff) << (PLACE + GENERATION)
    }

    pub(super) fn take(&self, token: u64) -> Option<Op> {
        self.ops().remove(token)
    }

    /// Cancels the operations that `wanted` selects. Returns the number that will end.
    pub(super) fn cancel(&self, wanted: impl Fn(&Op) -> bool) -> usize {
        let chosen: Vec<_> = self
            .ops()
            .slots
            .iter()
            .zip(0..)
            .filter_map(|(slot, at)| {
                let op = slot.op.as_ref().filter(|op| wanted(op))?;
                Some((op.socket(), self.mine() | slot.token(at)))
            })
            .collect();
        chosen
            .into_iter()
            .map(|(socket, token)| socket.cancel(Some(token)))
            .sum()
    }
}

impl QueueEntry {
    /// Starts an operation with `start`, whose sink leads to this queue. Returns its token.
    ///
    /// # Errors
    /// Those of `start`; then there is no event.
    pub(super) fn start(
        &self,
        op: Op,
        start: impl FnOnce(Sink) -> Result<(), Errno>,
    ) -> Result<u64, Errno> {
        // Inserted first: the event may arrive, and another thread take it, before `start` returns.
        let started = &self.started;
        let token = started.mine() | started.ops().insert(op);
        start(Sink::Queue(self.queue.clone(), token)).inspect_err(|_| {
            drop(started.take(token));
        })?;
        Ok(token)
    }
}
