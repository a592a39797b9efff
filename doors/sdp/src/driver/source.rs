//! Sources: memory that the peer fetches from, and its return to the program.
//!
//! The program owns a synchronous source again after the peer has fetched it. The memory of an asynchronous source is write-protected
//! meanwhile, see [`weft_verbs::protect`]. Either can be *taken back* before that: its bytes are copied, and the peer is told of the copy.
//! Once the peer knows of a source, taking it back needs its lock, by compare-and-swap in the peer's memory (figure 3b of the paper): while
//! the peer fetches, it holds the lock.

use std::time::Instant;

use rustix::io::Errno;
use weft_sockets::stream::Stream as _;
use weft_verbs::protect::Hold;
use weft_verbs::{Access, Mr, RawMemory, RemoteAddr, SendWr, Sge};

use super::{Conn, Core, TAG_LOCK};
use crate::machine::policy::Mode;
use crate::machine::{Endpoint, Op, Stage};
use crate::wire::{Buffer, locks};

/// The place of a source's bytes.
enum Place {
    /// In the program's memory.
    Program {
        region: Mr,
        memory: RawMemory,
        /// Protected.
        hold: Option<Hold>,
    },
    Copy(Mr),
}

/// A source that the peer has not fetched completely.
pub(super) struct Source {
    pub(super) op: Op,
    place: Place,
    /// Writes to a sink from it that have not been transmitted.
    pub(super) writes: u32,
    /// When a thread was first seen to wait for it.
    wanted_since: Option<Instant>,
    /// The program wants the memory back, at any cost.
    take: bool,
    /// The peer held the lock at the last attempt: retry only after a ring of the doorbell.
    lost: bool,
}

impl Source {
    pub(super) fn new(op: Op, region: Mr, memory: RawMemory, hold: Option<Hold>) -> Source {
        Source {
            op,
            place: Place::Program {
                region,
                memory,
                hold,
            },
            writes: 0,
            wanted_since: None,
            take: false,
            lost: false,
        }
    }

    fn region(&self) -> &Mr {
        match &self.place {
            Place::Program { region, .. } | Place::Copy(region) => region,
        }
    }

    pub(super) fn sge(&self, off: u32, len: u32) -> Sge {
        self.region().sge(off as usize, len as usize)
    }

    pub(super) fn buffer(&self) -> Buffer {
        let region = self.region();
        Buffer {
            addr: region.addr(),
            key: region.rkey(),
            len: region.len() as u32,
        }
    }

    /// Its memory is not the program's own yet.
    pub(super) fn is_programs(&self) -> bool {
        matches!(self.place, Place::Program { .. })
    }

    fn is_wanted(&self) -> bool {
        matches!(&self.place, Place::Program { hold: Some(hold), .. } if hold.is_wanted())
    }
}

impl Place {
    /// Ends the registration: the region and the hold are dropped when the peer no longer accesses the memory.
    fn release(self) {
        let (region, hold) = match self {
            Place::Program { region, hold, .. } => (region, hold),
            Place::Copy(region) => (region, None),
        };
        match region.retire() {
            Ok(_) => drop(hold),
            Err(leaving) => leaving.then(move |_| drop(hold)),
        }
    }
}

impl Conn {
    /// Queue a source.
    pub(super) fn add_source(
        &self,
        core: &mut Core,
        memory: &RawMemory,
        hold: Option<Hold>,
    ) -> Result<Op, Errno> {
        let region = self
            .pd
            .reg_raw(memory, Access::REMOTE_READ)
            .map_err(|error| weft_sockets::error::errno(&error))?;
        let op = Op(core.next_op);
        core.next_op += 1;
        let source = Source::new(op, region, memory.clone(), hold);
        if let Some(machine) = &mut core.machine {
            machine.source(op, source.buffer());
        }
        core.sources.push(source);
        self.act(core);
        Ok(op)
    }

    /// The peer has got all bytes.
    pub(super) fn source_done(core: &mut Core, op: Op) {
        let Some(at) = core.sources.iter().position(|it| it.op == op) else {
            return;
        };
        let source = core.sources.swap_remove(at);
        if let Place::Copy(region) = &source.place {
            core.copies -= region.len();
        }
        source.place.release();
    }

    /// Drops all sources; none will be fetched.
    pub(super) fn drop_sources(core: &mut Core) {
        core.copies = 0;
        for source in core.sources.drain(..) {
            source.place.release();
        }
    }

    /// Whether the program owns the memory of a source again: the peer has fetched it, or it was copied.
    pub(super) fn is_back(core: &Core, op: Op) -> bool {
        !core
            .sources
            .iter()
            .any(|it| it.op == op && it.is_programs())
    }

    /// Takes back the memory of this source (`None`: of all) before the peer has fetched it.
    pub(super) fn take_back(&self, core: &mut Core, op: Option<Op>) {
        for source in &mut core.sources {
            if op.is_none_or(|op| op == source.op) {
                source.take = true;
            }
        }
        self.serve_wanted(core);
    }

    /// Threads wait for our memory: serve them.
    pub(super) fn serve_wanted(&self, core: &mut Core) {
        if core.state.over.is_some() {
            return;
        }
        let mode = core.policy.mode();
        let now = Instant::now();
        let mut want = Vec::new();
        for source in &mut core.sources {
            source.lost = false;
            let mut take = source.take;
            if source.is_wanted() {
                if source.wanted_since.is_none() {
                    core.policy.faulted();
                    core.send_stats.faults += 1;
                }
                let since = *source.wanted_since.get_or_insert(now);
                let patience = self.options.patience;
                let late = patience.is_some_and(|p| now - since >= p);
                let room = core.copies.saturating_add(source.region().len()) <= self.options.copies;
                take |= room && (mode == Mode::AzCopy || late);
            }
            if take && source.is_programs() && source.writes == 0 {
                want.push(source.op);
            }
        }
        for op in want {
            self.begin_to_take(core, op);
        }
    }

    fn begin_to_take(&self, core: &mut Core, op: Op) {
        let Some(machine) = &core.machine else { return };
        match machine.stage(op) {
            Stage::Gone => {}
            // The peer does not know of this source, so it cannot be fetching it.
            Stage::Queued => self.copy_source(core, op),
            Stage::Flying(index) => {
                let Some(peer) = self.peer.get().filter(|peer| peer.atomics) else {
                    return;
                };
                // One at a time; the next one follows its answer.
                if core.locking.is_some() {
                    return;
                }
                let slot = u64::from(index % u32::from(peer.locks));
                let lock = RemoteAddr {
                    addr: peer.lock_addr.wrapping_add(8 * slot),
                    rkey: peer.lock_key,
                };
                let free = locks::word(index, locks::FREE);
                let taken = locks::word(index, locks::WRITER);
                let wr = SendWr::compare_swap(TAG_LOCK, lock, free, taken)
                    .sge(self.answer.whole())
                    .signaled();
                if self.qp.post_send_one(wr).is_ok() {
                    core.locking = Some((op, index));
                }
            }
        }
    }

    /// The answer to a compare-and-swap has come.
    pub(super) fn locked(&self, core: &mut Core, good: bool) {
        let Some((op, index)) = core.locking.take() else {
            return;
        };
        if !good {
            return;
        }
        if self.answer.load_u64(0) == Ok(locks::word(index, locks::FREE)) {
            self.copy_source(core, op);
        } else {
            // The peer fetches, or has: it is asked again when the thread that waits rings again.
            core.send_stats.lock_lost += 1;
            if let Some(source) = core.sources.iter_mut().find(|it| it.op == op) {
                source.lost = true;
            }
        }
        self.next_to_take(core);
    }

    /// Others of the same memory wait for their turn.
    fn next_to_take(&self, core: &mut Core) {
        let next = core
            .sources
            .iter()
            .filter(|it| !it.lost && it.is_programs() && it.writes == 0)
            .find(|it| it.take || it.is_wanted() && core.policy.mode() == Mode::AzCopy)
            .map(|it| it.op);
        if let Some(next) = next {
            self.begin_to_take(core, next);
        }
    }

    /// Copy a source that the peer cannot be in, and give its memory back.
    fn copy_source(&self, core: &mut Core, op: Op) {
        let Some(source) = core.sources.iter_mut().find(|it| it.op == op) else {
            return;
        };
        let Place::Program { memory, .. } = &source.place else {
            return;
        };
        let len = memory.len();
        let copied = self
            .pd
            .alloc_mr(len, Access::LOCAL_WRITE | Access::REMOTE_READ)
            .ok()
            .filter(|copy| copy.copy_from_raw(0, memory).is_ok());
        let Some(copy) = copied else {
            // With the lock, and without memory for a copy.
            tracing::warn!(len, "no memory for a copy of bytes that are being sent");
            return self.fail(core, Errno::NOMEM);
        };
        let before = std::mem::replace(&mut source.place, Place::Copy(copy));
        let buffer = source.buffer();
        core.copies += len;
        core.send_stats.copies += 1;
        core.send_stats.copied_bytes += len as u64;
        if let Some(machine) = &mut core.machine {
            machine.move_source(op, buffer);
        }
        before.release();
    }

    /// Whether `len` bytes may be copied without a request to copy at any cost.
    pub(super) fn may_copy(&self, core: &Core, len: usize) -> bool {
        core.copies.saturating_add(len) <= self.options.copies
    }

    /// Whether another source may be sent now.
    pub(super) fn may_source(core: &Core) -> bool {
        core.machine.as_ref().is_some_and(Endpoint::may_source)
    }
}
