//! Carries out the machine's actions.

use smallvec::SmallVec;
use weft_sockets::stream::Stream as _;
use weft_verbs::{InlineData, PostReason, RemoteAddr, SendWr, SgList};

use super::{Conn, Core, INLINE, LONGEST, MOST_POSTED, TAG_SEND};
use crate::machine::{Action, From, Op, Run};
use crate::wire::{HEADER_LEN, Message, locks};
use rustix::io::Errno;

/// Messages whose memory is not waited for, before one makes a completion.
const QUIET: u32 = 16;

/// A run of messages with one completion, at its end.
#[derive(Debug, Default)]
pub(super) struct Mark {
    messages: u32,
    /// Bytes of the send buffer.
    bytes: u32,
    /// Writes from sources, and whether they were their last ones.
    writes: SmallVec<[(Op, bool); 1]>,
}

impl Conn {
    /// Carry out the machine's actions, as far as there is room for them.
    pub(super) fn act(&self, core: &mut Core) {
        loop {
            if core.state.over.is_some() || core.posted >= MOST_POSTED {
                break;
            }
            let Some(action) = core
                .machine
                .as_mut()
                .and_then(crate::machine::Endpoint::poll)
            else {
                break;
            };
            match action {
                Action::Repost { buffer } => core.state.recvs.push(self.receive(buffer)),
                Action::Urgent { buffer, off } => {
                    let mut byte = [0];
                    if self
                        .inbox
                        .read(self.payload(buffer, off), &mut byte)
                        .is_ok()
                    {
                        core.urgent = Some(byte[0]);
                    }
                }
                Action::Unlock { index } => {
                    let _ = self.store_lock(index, locks::word(index, locks::FREE));
                }
                Action::SourceDone { op } => Self::source_done(core, op),
                Action::Send { message, payload } => {
                    self.post_receives(core);
                    self.post_message(core, &message, payload, None);
                }
                Action::Write {
                    from,
                    addr,
                    key,
                    message,
                } => {
                    self.post_receives(core);
                    let to = RemoteAddr { addr, rkey: key };
                    self.post_message(core, &message, None, Some((from, to)));
                }
            }
        }
        self.post_receives(core);
        if core.closing {
            self.part(core);
        }
    }

    fn post_receives(&self, core: &mut Core) {
        if !core.state.recvs.is_empty() {
            // Refused only when the connection has ended.
            let _ = self.qp.post_recv(&core.state.recvs);
            core.state.recvs.clear();
        }
    }

    /// The offset of a receive's payload in the inbox, after the header.
    pub(super) fn payload(&self, buffer: u32, off: u32) -> usize {
        buffer as usize * self.slot() + HEADER_LEN + off as usize
    }

    /// Write a word of the lock table.
    pub(super) fn store_lock(&self, index: u32, word: u64) -> Result<(), weft_verbs::MemError> {
        self.locks.store_u64(self.lock_at(index), word)
    }

    /// The offset of the lock of one of the peer's sources.
    pub(super) fn lock_at(&self, index: u32) -> usize {
        8 * (index as usize % usize::from(self.options.sources))
    }

    /// The elements of a run of the send buffer.
    fn ring_sges(&self, run: Run, sges: &mut SgList) {
        let (off, len) = (run.off as usize, run.len as usize);
        let first = len.min(self.ring.len() - off);
        sges.push(self.ring.sge(off, first));
        if first < len {
            sges.push(self.ring.sge(0, len - first));
        }
    }

    /// The bytes of a run of the send buffer, appended to `data`.
    fn ring_bytes(&self, run: Run, data: &mut InlineData) {
        let at = data.len();
        let (off, len) = (run.off as usize, run.len as usize);
        data.resize(at + len, 0);
        let first = len.min(self.ring.len() - off);
        let _ = self.ring.read(off, &mut data[at..at + first]);
        if first < len {
            let _ = self.ring.read(0, &mut data[at + first..]);
        }
    }

    /// A small message whose bytes are not in the send buffer.
    pub(super) fn post_now(&self, core: &mut Core, data: InlineData) {
        let mut wr = SendWr::send(TAG_SEND);
        wr.inline = Some(data);
        let mut wrs = SmallVec::new();
        wrs.push(wr);
        self.post(core, wrs, 0, None);
    }

    fn post_message(
        &self,
        core: &mut Core,
        message: &Message,
        payload: Option<Run>,
        write: Option<(From, RemoteAddr)>,
    ) {
        let header = message.emit();
        let mut wrs: SmallVec<[SendWr; 2]> = SmallVec::new();
        let mut bytes = 0;
        let mut source = None;
        if let Some((from, to)) = write {
            let mut wr = SendWr::write(TAG_SEND, to);
            match from {
                From::Ring(run) => {
                    self.ring_sges(run, &mut wr.sges);
                    bytes += run.len;
                }
                From::Source { op, off, len, last } => {
                    let Some(it) = core.sources.iter_mut().find(|it| it.op == op) else {
                        return self.fail(core, Errno::IO);
                    };
                    wr.sges.push(it.sge(off, len));
                    it.writes += 1;
                    source = Some((op, last));
                }
            }
            wrs.push(wr);
        }
        let mut wr = SendWr::send(TAG_SEND);
        let run = payload.unwrap_or(Run { off: 0, len: 0 });
        bytes += run.len;
        if header.len() + run.len as usize <= INLINE {
            let mut data = InlineData::from_slice(&header);
            self.ring_bytes(run, &mut data);
            wr.inline = Some(data);
        } else {
            // There are as many places as messages may be posted.
            let at = core.header;
            core.header = (at + HEADER_LEN) % (MOST_POSTED as usize * HEADER_LEN);
            debug_assert!(header.len() == HEADER_LEN && HEADER_LEN < LONGEST);
            let _ = self.headers.write(at, &header);
            wr.sges.push(self.headers.sge(at, HEADER_LEN));
            self.ring_sges(run, &mut wr.sges);
        }
        wrs.push(wr);
        self.post(core, wrs, bytes, source);
    }

    fn post(
        &self,
        core: &mut Core,
        mut wrs: SmallVec<[SendWr; 2]>,
        bytes: u32,
        source: Option<(Op, bool)>,
    ) {
        core.posted += 1;
        core.open.messages += 1;
        core.open.bytes += bytes;
        core.open.writes.extend(source);
        let keeps = wrs.iter().any(|wr| wr.inline.is_none());
        // Bytes of the send buffer come back with a completion only.
        let many = core.open.bytes as usize >= self.ring.len() / 4;
        if (keeps || many || core.open.messages >= QUIET)
            && let Some(last) = wrs.last_mut()
        {
            last.signaled = true;
            core.marks.push_back(std::mem::take(&mut core.open));
        }
        if let Err(error) = self.qp.post_send(&wrs) {
            // Otherwise the connection is ending, and its end is reported.
            if error.reason == PostReason::Full {
                tracing::debug!("the peer asks for answers faster than they can be sent");
                self.fail(core, Errno::PROTO);
            }
        }
    }

    /// The oldest run of messages has been transmitted.
    pub(super) fn transmitted(core: &mut Core) {
        let Some(mark) = core.marks.pop_front() else {
            return;
        };
        core.posted -= mark.messages;
        if let Some(machine) = &mut core.machine {
            machine.transmitted(mark.bytes);
        }
        for (op, last) in mark.writes {
            if let Some(it) = core.sources.iter_mut().find(|it| it.op == op) {
                it.writes -= 1;
            }
            if last {
                Self::source_done(core, op);
            }
        }
    }
}
