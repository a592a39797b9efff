//! Operations that end before their data: expired time limits, blocking calls that give up, and receives that no caller wants any more.
//!
//! The memory of an operation may still be in use: by the peer for an advertised receive, by the transport for a send. The program gets it
//! back when they release it, within a grace period.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::conn::Conn;
use super::op::{End, Op, Slot};
use super::state::{Core, Io};
use super::timer::Grace;
use crate::bell::deadline;
use crate::machine::{Cancel, Endpoint, OpId};

/// The connection fails when no byte moves for this long.
const GRACE: Duration = Duration::from_secs(3);
/// The retry interval for an operation that cannot be found.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

impl Io {
    /// True for a receive of a closed socket, or of a caller that no longer waits.
    pub(super) fn nobody_wants(&mut self, id: OpId) -> bool {
        let (closed, deaf) = (self.unwanted, self.deaf);
        let op = self.ops.get_mut(id);
        op.is_some_and(|op| !op.is_send() && (closed || deaf && op.target.is_slot()))
    }

    /// End a receive that no caller wants, and close its memory to the peer; a peer that still writes there gets an access error. False if a
    /// caller wants it.
    pub(super) fn take_away(&mut self, machine: &Endpoint, id: OpId) -> bool {
        let unwanted = self.nobody_wants(id);
        if unwanted {
            let bytes = machine.received(id) as usize;
            self.finish(id, End::new(Err(Errno::CANCELED), bytes));
        }
        unwanted
    }
}

impl Conn {
    pub(super) fn set_limit(&self, io: &mut Io, id: OpId, limit: Option<Duration>) {
        if let Some(deadline) = deadline(limit) {
            self.set_deadline(io, id, deadline);
        }
    }

    fn set_deadline(&self, io: &mut Io, id: OpId, deadline: Instant) {
        if let Some(op) = io.ops.get_mut(id) {
            op.deadline = Some(deadline);
            self.set_alarm(io, deadline);
        }
    }

    /// Let a timer check the operations, at that time or earlier. One timer serves all of them.
    fn set_alarm(&self, io: &mut Io, at: Instant) {
        if io.alarms.add(at) {
            self.limit_at(at, move |conn| conn.expire(at));
        }
    }

    /// Like [`Conn::call_at`], for a time limit. The limit has no effect if there is no timer thread.
    pub(super) fn limit_at(&self, at: Instant, call: impl FnOnce(&Conn) + Send + 'static) {
        if let Err(error) = self.call_at(at, call) {
            tracing::warn!(%error, "no thread for time limits: they will not be kept");
        }
    }

    fn grace(&self) -> Grace {
        Grace::new(self.link.moved())
    }

    /// Cancel a receive; if it is advertised, the peer has a grace period to release its memory. False: it has ended, or is about to.
    pub(super) fn call_back(&self, core: &mut Core, id: OpId) -> bool {
        let Some(machine) = &mut core.machine else {
            return false;
        };
        if machine.cancel(id) != Cancel::Pending {
            return false;
        }
        if let Some(op) = core.io.ops.get_mut(id) {
            op.grace.get_or_insert_with(|| Box::new(self.grace()));
        }
        self.set_deadline(&mut core.io, id, Instant::now() + GRACE);
        true
    }

    /// Cancel the operations whose time is up, and end expired grace periods.
    fn expire(&self, alarm: Instant) {
        self.with(|core| {
            let Core {
                machine: Some(machine),
                io,
                ..
            } = core
            else {
                return;
            };
            io.alarms.remove(alarm);
            let now = Instant::now();
            let timed = io.ops.ids();
            let timed: Vec<_> = timed
                .filter_map(|(id, op)| Some((id, op.deadline?)))
                .collect();
            let mut overdue = false;
            for &(id, deadline) in &timed {
                let Some(op) = io.ops.get_mut(id) else {
                    continue;
                };
                if deadline > now {
                    self.set_alarm(io, deadline);
                    continue;
                }
                op.deadline = None;
                if let Some(grace) = &mut op.grace {
                    if !grace.goes_on(self.link.moved()) {
                        overdue |= !io.take_away(machine, id);
                        continue;
                    }
                } else {
                    op.grace = Some(Box::new(self.grace()));
                    // An announced message remains with its reader, however long the reader takes.
                    let stays = op.is_send() && io.announces;
                    machine.cancel(id);
                    if stays {
                        continue;
                    }
                }
                self.set_deadline(io, id, now + GRACE);
            }
            if overdue {
                self.fail(core, Errno::TIMEDOUT);
            }
        });
    }

    /// End a blocking call because of `why`. Returns when its operation's end has been reported. The peer or the transport has a grace period
    /// to release the memory.
    pub(crate) fn give_up(&self, slot: &Arc<Slot>, id: OpId, why: Errno) {
        let mut grace: Option<(Grace, Instant)> = None;
        loop {
            if self.take_back(slot) {
                return;
            }
            let patient = self.with(|core| {
                // An operation that waited behind a file send has got another id.
                let mut ops = core.io.ops.ids();
                let (id, op) = ops.find(|(its, op)| *its == id || op.target.is(slot))?;
                // A signal is no reason to lose a connection for bytes in flight.
                let patient = op.is_send() && (core.io.announces || why == Errno::INTR);
                if let Some(machine) = &mut core.machine {
                    machine.cancel(id);
                }
                Some(patient)
            });
            let end = match patient {
                // It is just moving from behind a file send to its new id: retry.
                None => Some(Instant::now() + LOOK_AGAIN),
                Some(true) => None,
                Some(false) => {
                    let begin = || (self.grace(), Instant::now() + GRACE);
                    Some(grace.get_or_insert_with(begin).1)
                }
            };
            match self.wait_for(slot, end) {
                Ok(()) => return,
                Err(Errno::AGAIN) => {
                    if let (Some(_), Some((grace, end))) = (patient, &mut grace) {
                        *end = Instant::now() + GRACE;
                        if !grace.goes_on(self.link.moved()) {
                            self.with(|core| self.fail(core, Errno::TIMEDOUT));
                        }
                    }
                }
                Err(_) => {}
            }
        }
    }

    /// Refuse further blocking receives, and cancel the current ones.
    pub(crate) fn stop_waiting(&self) {
        self.with(|core| {
            core.io.deaf = true;
            let waits = |op: &Op| !op.is_send() && op.target.is_slot();
            for id in core.io.ops.oldest_first(waits) {
                self.call_back(core, id);
            }
        });
    }
}
