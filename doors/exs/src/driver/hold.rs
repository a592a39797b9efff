//! File sends on a connection: their parts are sent one after another, and later operations wait behind them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_sockets::lock::lock;

use super::conn::Conn;
use super::held::{Current, Files, Held, Waiting};
use super::op::{Op, Part, Slot, Target, file_end};
use crate::bell::deadline;
use crate::event::Event;
use crate::file::{Done, FileLane, FileSend, Outcome};
use crate::queue::Member;
use crate::{EventKind, Memory, Piece};

impl Conn {
    /// Keep an operation for later if it must wait behind a file send. `Err` returns it otherwise.
    pub(super) fn hold_back(&self, held: Held) -> Result<(), Held> {
        if !self.holding.load(Ordering::SeqCst) {
            return Err(held);
        }
        let mut queue = lock(&self.files);
        // Checked again under the lock: the file send may just have ended.
        if !self.holding.load(Ordering::SeqCst) {
            return Err(held);
        }
        let deadline = held.terms().and_then(|(_, deadline)| deadline);
        queue.behind.push_back(held);
        self.set_held_alarm(&mut queue, deadline);
        Ok(())
    }

    /// Send memory and parts of files, in order.
    pub(crate) fn send_file(
        self: &Arc<Self>,
        pieces: Vec<Piece>,
        target: Target,
        token: u64,
        limit: Option<Duration>,
    ) -> Result<(), (Errno, Target)> {
        let deadline = deadline(limit);
        let file = Waiting {
            pieces,
            target,
            token,
            deadline,
        };
        let mut queue = lock(&self.files);
        if self.holding.load(Ordering::SeqCst) {
            queue.behind.push_back(Held::File(file));
        } else {
            let started = self.start_file(&mut queue, file);
            if started.is_err() {
                drop(queue);
                self.let_go();
                return started;
            }
        }
        self.set_held_alarm(&mut queue, deadline);
        Ok(())
    }

    /// Let a timer check the files and the operations behind them, at that time or earlier. One timer serves all of them.
    fn set_held_alarm(&self, queue: &mut Files, at: Option<Instant>) {
        let Some(at) = at else { return };
        if queue.alarms.add(at) {
            self.limit_at(at, move |conn| conn.expire_held(at));
        }
    }

    /// End the file sends and the operations behind them whose time limit has expired.
    fn expire_held(&self, alarm: Instant) {
        let mut queue = lock(&self.files);
        queue.alarms.remove(alarm);
        let now = Instant::now();
        let current = queue.current.iter().filter_map(|file| file.deadline);
        let behind = queue.behind.iter().filter_map(|held| held.terms()?.1);
        let next = current.chain(behind).filter(|&end| end > now).min();
        self.set_held_alarm(&mut queue, next);
        let late = |_, deadline: Option<Instant>| deadline.is_some_and(|end| end <= now);
        self.stop_files(queue, late, Errno::TIMEDOUT);
    }

    /// Cancel file sends, and sends behind them. Returns their number.
    pub(super) fn cancel_files(&self, token: Option<u64>) -> usize {
        let wanted = |its, _| token.is_none_or(|token| token == its);
        self.stop_files(lock(&self.files), wanted, Errno::CANCELED)
    }

    /// End those that `wanted` selects by token and deadline. Returns their number.
    fn stop_files(
        &self,
        mut queue: MutexGuard<'_, Files>,
        wanted: impl Fn(u64, Option<Instant>) -> bool,
        why: Errno,
    ) -> usize {
        let current = queue.current.as_ref();
        let current = current.filter(|file| wanted(file.token, file.deadline));
        let current = current.cloned();
        let (stopped, kept): (VecDeque<Held>, VecDeque<Held>) = std::mem::take(&mut queue.behind)
            .into_iter()
            .partition(|held| held.terms().is_some_and(|(token, end)| wanted(token, end)));
        queue.behind = kept;
        drop(queue);
        let n = stopped.len() + usize::from(current.is_some());
        if let Some(file) = current {
            self.stop_file(&file, why);
        }
        for held in stopped {
            self.refuse(held, why);
        }
        n
    }

    /// Stop reading the file, and cancel its unsent parts.
    fn stop_file(&self, file: &Current, why: Errno) {
        file.send.stop(why);
        self.with(|core| {
            // No part follows one that is cut here.
            file.stopped.store(true, Ordering::Relaxed);
            let is_part = |op: &Op| op.target.is_part_of(&file.stopped);
            let parts = core.io.ops.oldest_first(is_part);
            if let Some(machine) = &mut core.machine {
                for id in parts {
                    machine.cancel(id);
                }
            }
        });
    }

    fn start_file(
        self: &Arc<Self>,
        queue: &mut Files,
        file: Waiting,
    ) -> Result<(), (Errno, Target)> {
        let Waiting {
            pieces,
            target,
            token,
            deadline,
        } = file;
        let (done, take_back) = file_end(target, token, self.fd());
        self.holding.store(true, Ordering::SeqCst);
        let stopped = Arc::<AtomicBool>::default();
        let lane = Arc::new(Lane {
            conn: Arc::downgrade(self),
            stopped: Arc::clone(&stopped),
        });
        match FileSend::start(self.context(), pieces, lane, done) {
            Ok(send) => {
                queue.current = Some(Current {
                    token,
                    deadline,
                    send,
                    stopped,
                });
                Ok(())
            }
            Err(errno) => Err((errno, take_back())),
        }
    }

    /// Withdraw a blocking send. False when it does not wait behind a file send.
    pub(super) fn take_back(&self, slot: &Arc<Slot>) -> bool {
        let mut queue = lock(&self.files);
        let its = |held: &Held| matches!(held, Held::Send(_, target, ..) if target.is(slot));
        let at = queue.behind.iter().position(its);
        let held = at.and_then(|at| queue.behind.remove(at));
        drop(queue);
        let found = held.is_some();
        if let Some(held) = held {
            self.refuse(held, Errno::CANCELED);
        }
        found
    }

    /// Report that a waiting operation is refused.
    fn refuse(&self, held: Held, errno: Errno) {
        let (kind, target, token, memory) = match held {
            Held::Send(memory, target, token, _) => {
                let kind = EventKind::of_send(&memory);
                (kind, target, token, Some(memory))
            }
            Held::File(Waiting { target, token, .. }) => (EventKind::SendFile, target, token, None),
            Held::Shutdown(Some((target, token))) => (EventKind::Shutdown, target, token, None),
            Held::Close(_) | Held::Shutdown(None) => return,
        };
        let mut event = Event::new(kind, token, self.fd(), Err(errno));
        event.memory = memory;
        let slot = target.is_slot();
        target.tell_now(event);
        if slot {
            self.interrupt();
        }
    }

    /// The file send is over: start the waiting operations, up to the next file.
    fn let_go(self: &Arc<Self>) {
        loop {
            let mut queue = lock(&self.files);
            queue.current = None;
            let Some(held) = queue.behind.pop_front() else {
                self.holding.store(false, Ordering::SeqCst);
                return;
            };
            if let Held::File(file) = held {
                let token = file.token;
                let started = self.start_file(&mut queue, file);
                drop(queue);
                match started {
                    Ok(()) => return,
                    Err((errno, target)) => {
                        let file = Waiting {
                            pieces: Vec::new(),
                            target,
                            token,
                            deadline: None,
                        };
                        self.refuse(Held::File(file), errno);
                    }
                }
                continue;
            }
            drop(queue);
            match held {
                Held::Send(memory, target, token, deadline) => {
                    let now = Instant::now();
                    let limit = deadline.map(|end| end.saturating_duration_since(now));
                    // Checked first, so that a refusal returns the memory.
                    if let Some(errno) = self.refuses_sends() {
                        self.refuse(Held::Send(memory, target, token, None), errno);
                    } else if let Err((errno, target)) = self.send_now(memory, target, token, limit)
                    {
                        let nothing = Memory::Owned(Vec::new());
                        self.refuse(Held::Send(nothing, target, token, None), errno);
                    }
                }
                Held::Shutdown(told) => {
                    let token = told.as_ref().map_or(0, |(_, token)| *token);
                    if let Err((errno, target)) = self.shutdown_now(told) {
                        self.refuse(Held::Shutdown(Some((target, token))), errno);
                    }
                }
                Held::Close(told) => self.close_now(told),
                Held::File(..) => {}
            }
        }
    }
}

/// Sends a file send's parts. It does not keep the connection alive: dropping the socket ends its file sends.
struct Lane {
    conn: Weak<Conn>,
    stopped: Arc<AtomicBool>,
}

impl Lane {
    /// Queue a send in order; `told` is called at its end, also when it is refused.
    fn push(&self, memory: Memory, told: impl FnOnce(Event) + Send + 'static) {
        let target = Target::Part(Box::new(Part {
            stopped: Arc::clone(&self.stopped),
            told: Box::new(told),
        }));
        let refused = match self.conn.upgrade() {
            Some(conn) => conn.send_now(memory, target, 0, None).err(),
            None => Some((Errno::CONNRESET, target)),
        };
        if let Some((errno, target)) = refused {
            target.tell_now(Event::new(EventKind::Send, 0, -1, Err(errno)));
        }
    }
}

impl FileLane for Lane {
    fn send(&self, memory: Memory, done: Done) {
        self.push(memory, move |event| {
            done(Outcome {
                result: event.result,
                bytes: event.bytes,
                memory: event.memory.unwrap_or(Memory::Owned(Vec::new())),
            });
        });
    }

    fn end(&self, tell: Box<dyn FnOnce() + Send>) {
        // An empty send orders this end behind earlier sends and before later ones. It does not wait when the file send is stopped.
        let conn = Weak::clone(&self.conn);
        self.push(Memory::Owned(Vec::new()), move |_| {
            tell();
            if let Some(conn) = conn.upgrade() {
                conn.let_go();
            }
        });
    }

    fn release(&self) {
        if let Some(conn) = self.conn.upgrade() {
            conn.let_go();
        }
    }
}
