//! File sends on a connection: their parts go out one after another, and what was asked for later waits behind them.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use rustix::io::Errno;

use super::conn::Conn;
use super::op::{Target, file_end};
use crate::event::Event;
use crate::file::{FileLane, FileSend};
use crate::lock::lock;
use crate::plain::{Done, Outcome};
use crate::{EventKind, Memory, Piece};

/// What waits behind a file send.
pub(super) enum Held {
    Send(Memory, Target, u64, Option<Duration>),
    File(Vec<Piece>, Target, u64),
    Shutdown(Option<(Target, u64)>),
    Close(Option<(Target, u64)>),
}

/// The file send that has the way, and those behind it.
#[derive(Default)]
pub(super) struct Queue {
    current: Option<(u64, FileSend)>,
    behind: VecDeque<Held>,
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
    ) -> Result<(), (Errno, Target)> {
        let mut queue = lock(&self.files);
        if self.holding.load(Ordering::SeqCst) {
            queue.behind.push_back(Held::File(pieces, target, token));
            return Ok(());
        }
        let (queue, started) = self.start_file(queue, pieces, target, token);
        drop(queue);
        if started.is_err() {
            self.let_go();
        }
        started
    }

    fn start_file<'a>(
        self: &Arc<Self>,
        mut queue: MutexGuard<'a, Queue>,
        pieces: Vec<Piece>,
        target: Target,
        token: u64,
    ) -> (MutexGuard<'a, Queue>, Result<(), (Errno, Target)>) {
        let (done, take_back) = file_end(target, token, self.fd());
        self.holding.store(true, Ordering::SeqCst);
        let lane = Arc::new(Lane(Arc::downgrade(self)));
        match FileSend::start(self.context(), pieces, lane, done) {
            Ok(send) => {
                queue.current = Some((token, send));
                (queue, Ok(()))
            }
            Err(errno) => (queue, Err((errno, take_back()))),
        }
    }

    /// Cancel file sends; says how many there were.
    pub(super) fn cancel_files(&self, token: Option<u64>) -> usize {
        let mut queue = lock(&self.files);
        let mut n = 0;
        if let Some((its, send)) = &queue.current
            && token.is_none_or(|token| token == *its)
        {
            send.stop(Errno::CANCELED);
            n += 1;
        }
        let (cancelled, kept): (VecDeque<Held>, VecDeque<Held>) = std::mem::take(&mut queue.behind)
            .into_iter()
            .partition(|held| match held {
                Held::Send(_, _, its, _) | Held::File(_, _, its) => {
                    token.is_none_or(|token| token == *its)
                }
                _ => false,
            });
        queue.behind = kept;
        drop(queue);
        n += cancelled.len();
        for held in cancelled {
            self.refuse(held, Errno::CANCELED);
        }
        n
    }

    /// Tell that something that waited will not be done.
    fn refuse(&self, held: Held, errno: Errno) {
        let (kind, target, token, memory) = match held {
            Held::Send(memory, target, token, _) => {
                let kind = EventKind::of_send(&memory);
                (kind, target, token, Some(memory))
            }
            Held::File(_, target, token) => (EventKind::SendFile, target, token, None),
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
            if let Held::File(pieces, target, token) = held {
                let (queue, started) = self.start_file(queue, pieces, target, token);
                drop(queue);
                match started {
                    Ok(()) => return,
                    Err((errno, target)) => {
                        self.refuse(Held::File(Vec::new(), target, token), errno);
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
        let target = Target::Call(Box::new(told));
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
        // Behind what was sent before, as a send of nothing.
        self.push(Memory::Owned(Vec::new()), move |_| tell());
        self.release();
    }

    fn release(&self) {
        if let Some(conn) = self.0.upgrade() {
            conn.let_go();
        }
    }
}
