//! Ends of operations that cannot be told at once, because somebody is still in the memory of one.

use std::collections::VecDeque;

use rustix::io::Errno;

use super::conn::Conn;
use super::op::{Late, Op};
use super::state::Core;
use crate::event::InPlace;

/// Ends of operations of one direction that are to be told: in order, so behind one whose memory somebody is still in.
#[derive(Default)]
pub(super) struct Ends {
    queue: VecDeque<Box<Parked>>,
    /// The first of them waits for its memory.
    waiting: bool,
}

impl Ends {
    /// Ends that have not been told.
    pub(super) fn len(&self) -> usize {
        self.queue.len() + usize::from(self.waiting)
    }

    pub(super) fn push(&mut self, parked: Box<Parked>) {
        self.queue.push_back(parked);
    }

    /// The connection goes: the rest is told as soon as it can be.
    pub(super) fn abandon(&mut self) {
        // What was waited for is told by itself.
        self.waiting = false;
        while let Some(parked) = self.next() {
            parked.wait(|late, _| late.into_iter().for_each(Late::run));
        }
    }

    /// The next one, if none is waited for.
    fn next(&mut self) -> Option<Box<Parked>> {
        if self.waiting {
            return None;
        }
        self.queue.pop_front()
    }
}

/// The end of an operation, told when its memory has been left. A peer that does not leave it loses its connection.
pub(super) struct Parked {
    pub(super) op: Op,
    pub(super) fd: i32,
    pub(super) result: Result<usize, Errno>,
    pub(super) bytes: usize,
    pub(super) truncated: bool,
    pub(super) in_place: Option<InPlace>,
}

impl Parked {
    /// Tell it now, if nobody is in its memory: what is owed to the program, and whether a blocking call waits for it.
    fn try_tell(self: Box<Self>) -> Result<(Option<Late>, bool), Box<Parked>> {
        if self.op.is_used() {
            return Err(self);
        }
        let waiting = self.op.target.is_slot();
        let Parked {
            mut op,
            fd,
            result,
            bytes,
            truncated,
            in_place,
        } = *self;
        // Nothing is open, so that it ends here.
        let late = op.finish(fd, result, bytes, truncated, in_place).ok();
        Ok((late.flatten(), waiting))
    }

    /// Have `told` hear of it in time, on the engine's thread, with what is owed to the program.
    fn wait(mut self: Box<Self>, told: impl FnOnce(Option<Late>, bool) + Send + 'static) {
        // In their order: a part keeps the whole that it is of.
        if let Some((leaving, piece)) = self.op.next_leaving() {
            leaving.then(move |buffer| {
                self.op.came_back(piece, buffer);
                self.wait(told);
            });
            return;
        }
        if let Ok((late, waiting)) = self.try_tell() {
            told(late, waiting);
        }
    }
}

impl Conn {
    /// Tell the ends of operations, and do what follows from the state that is there then. Says whether the queue pair is to be closed now.
    pub(super) fn settle_ends(&self, core: &mut Core) -> bool {
        self.tell_ends(core);
        let mut close = core.look_around();
        // What has been told may be what a close waits for.
        while self.tell_ends(core) {
            close |= core.look_around();
        }
        close
    }

    /// Tell the ends of operations, in order. One whose memory somebody is in keeps those behind it waiting. Says whether any was told.
    fn tell_ends(&self, core: &mut Core) -> bool {
        let mut told = false;
        for lane in 0..core.io.ends.len() {
            while let Some(parked) = core.io.ends[lane].next() {
                let parked = match parked.try_tell() {
                    Ok((late, is_slot)) => {
                        told = true;
                        core.io.woken |= is_slot;
                        core.io.late.extend(late);
                        continue;
                    }
                    Err(parked) => parked,
                };
                core.io.ends[lane].waiting = true;
                let me = self.me.clone();
                parked.wait(move |late, is_slot| match me.upgrade() {
                    Some(conn) => conn.with(|core| {
                        core.io.ends[lane].waiting = false;
                        core.io.woken |= is_slot;
                        core.io.late.extend(late);
                    }),
                    None => late.into_iter().for_each(Late::run),
                });
            }
        }
        told
    }
}
