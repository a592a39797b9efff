//! File sends on a connection: their parts go out one after another, and what was asked for later waits behind them.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::conn::Conn;
use super::op::{Slot, Target, file_end};
use crate::event::Event;
use crate::file::{FileLane, FileSend};
use crate::lock::lock;
use crate::machine::OpId;
use crate::plain::{Done, Outcome};
use crate::{EventKind, Memory, Piece};

/// What waits behind a file send.
pub(super) enum Held {
    Send(Memory, Target, u64, Option<Duration>),
    File(Waiting),
    Shutdown(Option<(Target, u64)>),
    Close(Option<(Target, u64)>),
}

/// A file send that has not begun.
pub(super) struct Waiting {
    pieces: Vec<Piece>,
    target: Target,
    token: u64,
    /// Our name for it.
    id: u64,
}

/// The file send that has the way, and those behind it.
#[derive(Default)]
pub(super) struct Queue {
    current: Option<Current>,
    behind: VecDeque<Held>,
}

struct Current {
    token: u64,
    id: u64,
    send: FileSend,
}

impl Conn {
    /// Whether something has to wait behind a file send; then it is kept for later.
    pub(super) fn hold_back(&self, held: Held) -> Result<(), Held> {
        if !self.holding.load(Ordering::SeqCst) {
            return Err(held);
        }
        let mut queue = lock(&self.files);
        // Looked at again: it may just have ended.
        if !self.holding.load(Ordering::SeqCst) {
            return Err(held);
        }
        queue.behind.push_back(held);
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
        let id = FileSend::next_id();
        let file = Waiting {
            pieces,
            target,
            token,
            id,
        };
        let mut queue = lock(&self.files);
        if self.holding.load(Ordering::SeqCst) {
            queue.behind.push_back(Held::File(file));
            drop(queue);
        } else {
            let (queue, started) = self.start_file(queue, file);
            drop(queue);
            if started.is_err() {
                self.let_go();
                return started;
            }
        }
        if let Some(end) = limit.and_then(|limit| Instant::now().checked_add(limit)) {
            self.limit_at(end, move |conn| conn.expire_file(id));
        }
        Ok(())
    }

    /// A file send's time is up.
    fn expire_file(&self, id: u64) {
        let mut queue = lock(&self.files);
        if let Some(current) = queue.current.as_ref().filter(|current| current.id == id) {
            let send = current.send.clone();
            drop(queue);
            self.stop_file(&send, Errno::TIMEDOUT);
            return;
        }
        let its = |held: &Held| matches!(held, Held::File(file) if file.id == id);
        let late = queue.behind.iter().position(its);
        let late = late.and_then(|at| queue.behind.remove(at));
        drop(queue);
        if let Some(late) = late {
            self.refuse(late, Errno::TIMEDOUT);
        }
    }

    /// Nothing more of it is read, and what has not gone out does not.
    fn stop_file(&self, send: &FileSend, why: Errno) {
        send.stop(why);
        self.with(|core| {
            let parts = core.io.ops.ids().filter(|(_, op)| op.target.is_part());
            let parts: Vec<OpId> = parts.map(|(id, _)| id).collect();
            if let Some(machine) = &mut core.machine {
                for id in parts {
                    machine.cancel(id);
                }
            }
        });
    }

    fn start_file<'a>(
        self: &Arc<Self>,
        mut queue: MutexGuard<'a, Queue>,
        file: Waiting,
    ) -> (MutexGuard<'a, Queue>, Result<(), (Errno, Target)>) {
        let Waiting {
            pieces,
            target,
            token,
            id,
        } = file;
        let (done, take_back) = file_end(target, token, self.fd());
        self.holding.store(true, Ordering::SeqCst);
        let lane = Arc::new(Lane(Arc::downgrade(self)));
        match FileSend::start(self.context(), pieces, lane, done) {
            Ok(send) => {
                queue.current = Some(Current { token, id, send });
                (queue, Ok(()))
            }
            Err(errno) => (queue, Err((errno, take_back()))),
        }
    }

    /// Cancel file sends; says how many there were.
    pub(super) fn cancel_files(&self, token: Option<u64>) -> usize {
        let mut queue = lock(&self.files);
        let current = queue.current.as_ref();
        let current = current.filter(|file| token.is_none_or(|token| token == file.token));
        let current = current.map(|file| file.send.clone());
        let (cancelled, kept): (VecDeque<Held>, VecDeque<Held>) = std::mem::take(&mut queue.behind)
            .into_iter()
            .partition(|held| match held {
                Held::Send(_, _, its, _) | Held::File(Waiting { token: its, .. }) => {
                    token.is_none_or(|token| token == *its)
                }
                _ => false,
            });
        queue.behind = kept;
        drop(queue);
        let n = cancelled.len() + usize::from(current.is_some());
        if let Some(send) = current {
            self.stop_file(&send, Errno::CANCELED);
        }
        for held in cancelled {
            self.refuse(held, Errno::CANCELED);
        }
        n
    }

    /// A blocking send gives up. False when it does not wait behind a file send.
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

    /// Tell that something that waited will not be done.
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

    /// The file send is over: start what waited, up to the next file.
    fn let_go(self: &Arc<Self>) {
        loop {
            let mut queue = lock(&self.files);
            queue.current = None;
            let Some(held) = queue.behind.pop_front() else {
                self.holding.store(false, Ordering::SeqCst);
                return;
            };
            if let Held::File(file) = held {
                let (token, id) = (file.token, file.id);
                let (queue, started) = self.start_file(queue, file);
                drop(queue);
                match started {
                    Ok(()) => return,
                    Err((errno, target)) => {
                        let file = Waiting {
                            pieces: Vec::new(),
                            target,
                            token,
                            id,
                        };
                        self.refuse(Held::File(file), errno);
                    }
                }
                continue;
            }
            drop(queue);
            match held {
                Held::Send(memory, target, token, limit) => {
                    // Asked first, so that the memory comes back with the refusal.
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

/// The way of a file send's parts. It keeps nothing alive: a socket that goes ends its file sends.
struct Lane(Weak<Conn>);

impl Lane {
    /// A send in its turn; `told` hears of its end, also when it is refused.
    fn push(&self, memory: Memory, told: impl FnOnce(Event) + Send + 'static) {
        let target = Target::Part(Box::new(told));
        let refused = match self.0.upgrade() {
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
        // Behind what was sent before, as a send of nothing; and what comes behind it is told later.
        let conn = Weak::clone(&self.0);
        self.push(Memory::Owned(Vec::new()), move |_| {
            tell();
            if let Some(conn) = conn.upgrade() {
                conn.let_go();
            }
        });
    }

    fn fail(&self, tell: Box<dyn FnOnce() + Send>) {
        // What was sent before may not go out at all, and a cancelled send does not wait for it either.
        tell();
        self.release();
    }

    fn release(&self) {
        if let Some(conn) = self.0.upgrade() {
            conn.let_go();
        }
    }
}
