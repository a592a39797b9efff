//! The direction that we receive.

use std::collections::VecDeque;

use super::{Action, Violation};
use crate::wire::{Body, Buffer};

/// The next bytes to receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Bytes in a receive's payload.
    Bytes {
        /// The receive.
        buffer: u32,
        /// The offset in its payload.
        off: u32,
        /// Bytes.
        len: u32,
    },
    /// Bytes to fetch by RDMA Read, under the lock of the source.
    Source {
        /// The source.
        index: u32,
        /// Its place, without the bytes that were already fetched.
        at: Buffer,
        /// Nothing of it was skipped: these are the first bytes that have not been taken.
        first: bool,
    },
    /// Bytes that are in the sink's memory already.
    Placed {
        /// Bytes.
        len: u32,
    },
    /// The place of an urgent byte.
    Mark,
    /// The peer sends no more.
    End,
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Part {
    /// `last`: the receive is free after it.
    Bytes {
        buffer: u32,
        off: u32,
        len: u32,
        last: bool,
    },
    /// `off` bytes of it have been taken.
    Source {
        index: u32,
        at: Buffer,
        off: u32,
    },
    Placed {
        len: u32,
    },
    Mark,
}

impl Part {
    fn len(&self) -> u32 {
        match self {
            Part::Bytes { len, .. } | Part::Placed { len } => *len,
            Part::Source { at, off, .. } => at.len - off,
            Part::Mark => 0,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Receiver {
    queue: VecDeque<Part>,
    /// Messages to send.
    pub(super) outbox: VecDeque<Body>,
    /// The number of stream bytes announced so far.
    position: u64,
    next_index: u32,
    /// Bytes of the sink that the peer may write to.
    sink: Option<u32>,
    /// The sink was asked for, and the answer has not come.
    canceling: bool,
    pub(super) inline: bool,
    pub(super) pending: bool,
    ended: bool,
}

impl Receiver {
    pub(super) fn look(&self, mut skip: u64) -> Next {
        for part in &self.queue {
            let len = u64::from(part.len());
            if matches!(part, Part::Mark) {
                return Next::Mark;
            }
            if skip >= len {
                skip -= len;
                continue;
            }
            let skip = skip as u32;
            return match *part {
                Part::Bytes {
                    buffer, off, len, ..
                } => Next::Bytes {
                    buffer,
                    off: off + skip,
                    len: len - skip,
                },
                Part::Source { index, at, off } => Next::Source {
                    index,
                    at: Buffer {
                        addr: at.addr.wrapping_add(u64::from(off + skip)),
                        key: at.key,
                        len: at.len - off - skip,
                    },
                    first: skip == 0 && self.queue.front() == Some(part),
                },
                Part::Placed { len } => Next::Placed { len: len - skip },
                Part::Mark => Next::Mark,
            };
        }
        if self.ended { Next::End } else { Next::Nothing }
    }

    pub(super) fn taken(&mut self, bytes: u32, done: &mut VecDeque<Action>) {
        let Some(part) = self.queue.front_mut() else {
            return;
        };
        let bytes = bytes.min(part.len());
        match part {
            Part::Bytes { off, len, .. } => {
                *off += bytes;
                *len -= bytes;
            }
            Part::Source { off, .. } => *off += bytes,
            Part::Placed { len } => *len -= bytes,
            Part::Mark => return,
        }
        if part.len() > 0 {
            return;
        }
        match self.queue.pop_front() {
            Some(Part::Bytes {
                buffer, last: true, ..
            }) => done.push_back(Action::Repost { buffer }),
            Some(Part::Source { index, at, .. }) => {
                self.outbox
                    .push_back(Body::RdmaRdCompl { index, len: at.len });
            }
            _ => {}
        }
    }

    pub(super) fn pass_mark(&mut self) {
        if self.queue.front() == Some(&Part::Mark) {
            self.queue.pop_front();
        }
    }

    pub(super) fn readable(&self) -> u64 {
        self.queue.iter().map(|part| u64::from(part.len())).sum()
    }

    pub(super) fn is_ended(&self) -> bool {
        self.ended
    }

    // ---- messages --------------------------------------------------------------------------------------------------

    /// Bytes of the stream were announced: the sink no longer matches the stream's position.
    fn announced(&mut self, len: u32) -> Result<(), Violation> {
        if self.ended {
            return Err(Violation::AfterEnd);
        }
        self.position += u64::from(len);
        self.sink = None;
        // Too late for one that has not been sent.
        self.outbox
            .retain(|body| !matches!(body, Body::SinkAvail { .. }));
        Ok(())
    }

    pub(super) fn on_data(
        &mut self,
        buffer: u32,
        len: u32,
        urgent: bool,
        done: &mut VecDeque<Action>,
    ) -> Result<(), Violation> {
        self.announced(len)?;
        let plain = len - u32::from(urgent);
        let kept = urgent && self.inline;
        if plain > 0 {
            self.queue.push_back(Part::Bytes {
                buffer,
                off: 0,
                len: plain,
                last: !kept,
            });
        }
        if urgent {
            self.pending = false;
            // One mark is enough where nothing is between two.
            if self.queue.back() != Some(&Part::Mark) {
                self.queue.push_back(Part::Mark);
            }
            if kept {
                self.queue.push_back(Part::Bytes {
                    buffer,
                    off: plain,
                    len: 1,
                    last: true,
                });
            } else {
                done.push_back(Action::Urgent { buffer, off: plain });
                if plain == 0 {
                    done.push_back(Action::Repost { buffer });
                }
            }
        }
        Ok(())
    }

    pub(super) fn on_source(&mut self, index: u32, at: Buffer, most: u16) -> Result<(), Violation> {
        if index != self.next_index {
            return Err(Violation::Order);
        }
        let is_source = |part: &&Part| matches!(part, Part::Source { .. });
        let done = |body: &&Body| matches!(body, Body::RdmaRdCompl { .. });
        // Reads whose completion the peer does not know of still count, at its end.
        let flying =
            self.queue.iter().filter(is_source).count() + self.outbox.iter().filter(done).count();
        if flying >= usize::from(most) {
            return Err(Violation::Sources);
        }
        self.announced(at.len)?;
        self.next_index = index.wrapping_add(1);
        self.queue.push_back(Part::Source { index, at, off: 0 });
        Ok(())
    }

    pub(super) fn on_update(&mut self, of: u32, to: Buffer) -> Result<(), Violation> {
        for part in &mut self.queue {
            if let Part::Source { index, at, .. } = part
                && *index == of
            {
                if at.len != to.len {
                    return Err(Violation::Order);
                }
                *at = to;
                return Ok(());
            }
        }
        Err(Violation::Unexpected)
    }

    pub(super) fn on_written(&mut self, len: u32) -> Result<(), Violation> {
        match self.sink {
            Some(room) if len <= room => {
                self.announced(len)?;
                self.queue.push_back(Part::Placed { len });
                Ok(())
            }
            _ => Err(Violation::Unexpected),
        }
    }

    pub(super) fn on_end(&mut self) -> Result<(), Violation> {
        self.announced(0)?;
        self.ended = true;
        Ok(())
    }

    // ---- sinks -----------------------------------------------------------------------------------------------------

    pub(super) fn offer_sink(&mut self, at: Buffer) -> bool {
        if self.ended || self.canceling || self.sink.is_some() || !self.queue.is_empty() {
            return false;
        }
        self.sink = Some(at.len);
        self.outbox.push_back(Body::SinkAvail {
            position: self.position,
            at,
        });
        true
    }

    pub(super) fn has_sink(&self) -> bool {
        self.sink.is_some()
    }

    pub(super) fn cancel_sink(&mut self) {
        if self.sink.is_some() && !self.canceling {
            let unsent = |body: &Body| matches!(body, Body::SinkAvail { .. });
            if let Some(at) = self.outbox.iter().position(unsent) {
                self.outbox.remove(at);
                self.sink = None;
                return;
            }
            self.canceling = true;
            self.outbox.push_back(Body::SinkAvailCancel);
        }
    }

    /// The peer's sink is dropped.
    pub(super) fn acknowledge(&mut self) -> Result<(), Violation> {
        // It waits for the answer before it offers another: there is never more than one to give.
        if self.outbox.contains(&Body::SinkCancelAck) {
            return Err(Violation::Unexpected);
        }
        self.outbox.push_back(Body::SinkCancelAck);
        Ok(())
    }

    pub(super) fn on_cancel_ack(&mut self) -> Result<(), Violation> {
        if !self.canceling {
            return Err(Violation::Unexpected);
        }
        self.canceling = false;
        self.sink = None;
        Ok(())
    }
}
