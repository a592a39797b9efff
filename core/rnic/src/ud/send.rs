//! The sending half of a datagram queue pair: messages become segments, segments of one size a train, and trains go to the kernel when the
//! pacing of their destination allows it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use weft_mem::{Access, Keys, MemError, Table};
use weft_proto::dgram::cut;
use weft_sys::udp::TRAIN;
use weft_wire::dgram::{self, Segment, Target};

use super::burst::Burst;
use super::local::Pipe;
use super::{OWN_QKEY, UD_MTU, UdDest, UdError, UdErrorKind, UdInner};
use crate::lock::add_alone;
use crate::types::{
    PostReason, QpState, RemoteAddr, SendOp, SendWr, Wc, WcOpcode, WcStatus, sub_list,
};

/// Datagrams that are not longer than [`LONG`] ask for room for so many at once.
pub(super) const AHEAD: usize = 8;
pub(super) const LONG: usize = 4096;
/// Most bytes of a train.
const TRAIN_BYTES: usize = 65_000;

pub(super) struct Sends {
    /// Of the last message of version 1.
    msn: u32,
    /// Of the last message of version 2, and what sets the queue pair's messages apart from those of others that had its number.
    long_msn: u32,
    incarnation: u32,
    /// Sends that could not go out, or not all of them, oldest first.
    pub(super) waiting: VecDeque<Waiting>,
    train: Train,
    /// Sends all of whose datagrams are in the train.
    staged: VecDeque<Staged>,
    burst: Burst,
    /// Sends done without a completion, since the last one that made one.
    silent: u32,
    /// Memory that sends have named.
    keys: Keys,
}

impl AsMut<Keys> for Sends {
    fn as_mut(&mut self) -> &mut Keys {
        &mut self.keys
    }
}

pub(super) struct Waiting {
    wr: SendWr,
    to: UdDest,
    progress: Progress,
}

/// The progress of a message into the train.
#[derive(Clone, Copy)]
struct Progress {
    len: u32,
    /// The next segment; `None` before the first.
    at: Option<u32>,
    msn: u32,
}

struct Staged {
    id: u64,
    opcode: WcOpcode,
    signaled: bool,
    len: u32,
}

/// Datagrams of one size for one destination; the last may be shorter.
#[derive(Default)]
pub(super) struct Train {
    pub(super) bytes: Vec<u8>,
    /// Bytes that the kernel has taken.
    pub(super) gone: usize,
    pub(super) to: Option<UdDest>,
    pub(super) each: usize,
    pub(super) count: usize,
    closed: bool,
    /// It waits for the next poll, which will send it.
    held: bool,
    /// Its pipe, if known.
    pipe: Option<Arc<Pipe>>,
}

impl Train {
    pub(super) fn takes(&self, len: usize, to: &UdDest) -> bool {
        self.count == 0
            || !self.closed
                && self.gone == 0
                && len <= self.each
                && self.count < TRAIN
                && self.bytes.len() + len <= TRAIN_BYTES
                && self.to.as_ref() == Some(to)
    }

    pub(super) fn appended(&mut self, start: usize, to: &UdDest) {
        let len = self.bytes.len() - start;
        if self.count == 0 {
            self.to = Some(*to);
            self.each = len;
        }
        self.closed = len < self.each;
        self.count += 1;
    }

    /// Before sending: the CRCs of its datagrams.
    pub(super) fn seal(&mut self) {
        if self.gone == 0 {
            dgram::seal_all(&mut self.bytes, self.each);
        }
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        (self.gone, self.count, self.closed, self.held) = (0, 0, false, false);
        self.pipe = None;
    }
}

/// The event that a send waits for.
enum Stall {
    /// Room in the socket.
    Socket,
    /// A report from the destination, until this time at most.
    Pace(Instant, UdDest),
}

/// The reason why a message stops.
enum Halt {
    Stall(Stall),
    Memory,
}

impl From<MemError> for Halt {
    fn from(_: MemError) -> Halt {
        Halt::Memory
    }
}

impl From<Stall> for Halt {
    fn from(stall: Stall) -> Halt {
        Halt::Stall(stall)
    }
}

impl Sends {
    pub(super) fn new(incarnation: u32, table: &Table) -> Sends {
        Sends {
            msn: 0,
            long_msn: 0,
            incarnation,
            waiting: VecDeque::new(),
            train: Train::default(),
            staged: VecDeque::new(),
            burst: Burst::default(),
            silent: 0,
            keys: Keys::new(table),
        }
    }

    /// Drops outstanding sends without completions.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.staged.clear();
        self.train.clear();
    }
}

impl UdInner {
    pub(super) fn check_post(&self, wr: &SendWr) -> Result<u32, PostReason> {
        match wr.op {
            SendOp::Send | SendOp::SendImm { .. } => {}
            SendOp::Write { .. } | SendOp::WriteImm { .. } if self.record_depth > 0 => {}
            _ => return Err(PostReason::Opcode),
        }
        if wr.sges.len() > self.max_sge as usize {
            return Err(PostReason::TooManySges {
                asked: wr.sges.len() as u32,
                max: self.max_sge,
            });
        }
        if let Some(data) = &wr.inline {
            if !wr.sges.is_empty() {
                return Err(PostReason::Inline);
            }
            if data.len() > self.max_inline as usize {
                return Err(PostReason::InlineTooLong {
                    asked: data.len() as u32,
                    max: self.max_inline,
                });
            }
        }
        wr.len()
            .filter(|len| *len <= self.max_message)
            .ok_or(PostReason::Length)
    }

    pub(super) fn post_send(
        self: &Arc<Self>,
        wrs: &[(SendWr, UdDest)],
    ) -> Result<(), (usize, PostReason)> {
        if let Some(reliable) = &self.reliable {
            let posts = wrs.iter().map(|(wr, to)| (wr, to));
            return self.post_reliable(reliable, posts);
        }
        let mut sends = self.sends.lock();
        let refused = wrs.iter().enumerate().find_map(|(index, (wr, to))| {
            let posted = self
                .check_post(wr)
                .and_then(|len| self.begin(&mut sends, wr, to, len));
            posted.err().map(|reason| (index, reason))
        });
        self.finish_train(&mut sends);
        drop(sends);
        self.queues.call_hooks();
        refused.map_or(Ok(()), Err)
    }

    pub(super) fn post_one(self: &Arc<Self>, wr: &SendWr, to: &UdDest) -> Result<(), PostReason> {
        if let Some(reliable) = &self.reliable {
            let posted = self.post_reliable(reliable, std::iter::once((wr, to)));
            return posted.map_err(|(_, reason)| reason);
        }
        let len = self.check_post(wr)?;
        let mut sends = self.sends.lock();
        let begun = self.begin(&mut sends, wr, to, len);
        if !self.holds(&mut sends, to, len) {
            self.finish_train(&mut sends);
        }
        if self.gather {
            sends.burst.posted();
        }
        drop(sends);
        begun?;
        self.queues.call_hooks();
        Ok(())
    }

    /// Whether the train may wait for the coming poll: its program sends in bursts ([`UdInit::gather`](super::UdInit::gather)). The first datagrams of a
    /// burst are sent at once, and so is a shorter one, which ends it.
    fn holds(self: &Arc<Self>, sends: &mut Sends, to: &UdDest, len: u32) -> bool {
        if !self.gather {
            return false;
        }
        let Sends { train, burst, .. } = sends;
        burst.add(to, len, self.polls());
        let holds = burst.is_long()
            && train.count > 0
            && !train.closed
            && sends.waiting.is_empty()
            && self.port.lease.is_polled();
        if holds && !train.held {
            train.held = true;
            self.port.wait_for_room(Arc::downgrade(self));
        }
        if holds {
            self.queues.defer();
        }
        holds
    }

    /// Changes with each poll.
    fn polls(&self) -> u32 {
        self.queues.taken().wrapping_add(self.port.lease.polls())
    }

    fn begin(
        self: &Arc<Self>,
        sends: &mut Sends,
        wr: &SendWr,
        to: &UdDest,
        len: u32,
    ) -> Result<(), PostReason> {
        let is_full = || self.sq_used.load(Ordering::Relaxed) >= self.max_send_wr;
        if is_full() {
            self.finish_train(sends);
        }
        if is_full() {
            return Err(PostReason::Full);
        }
        self.count_used(1);
        if self.state() == QpState::Error {
            self.sent(sends, wr, WcStatus::WrFlushErr, 0);
            return Ok(());
        }
        let mut progress = Progress {
            len,
            at: None,
            msn: 0,
        };
        let stall = if sends.waiting.is_empty() {
            match self.stage(sends, wr, to, &mut progress) {
                Ok(()) => return Ok(()),
                Err(Halt::Memory) => {
                    self.spoiled(sends, wr);
                    return Ok(());
                }
                Err(Halt::Stall(stall)) => Some(stall),
            }
        } else {
            None
        };
        sends.waiting.push_back(Waiting {
            wr: wr.clone(),
            to: *to,
            progress,
        });
        if let Some(stall) = stall {
            self.await_end(&stall);
        }
        Ok(())
    }

    /// Sends the staged datagrams; the rest waits.
    fn finish_train(self: &Arc<Self>, sends: &mut Sends) {
        // If sends wait, the train waits with them.
        if sends.waiting.is_empty()
            && let Err(stall) = self.flush_train(sends)
        {
            self.await_end(&stall);
        }
    }

    fn await_end(self: &Arc<Self>, stall: &Stall) {
        match stall {
            Stall::Socket => self.port.wait_for_room(Arc::downgrade(self)),
            Stall::Pace(until, to) => {
                self.port.wait_for_report(*until, to, Arc::downgrade(self));
            }
        }
    }

    /// The scatter/gather list of a send names memory that is not ours. Those before it come first.
    fn spoiled(self: &Arc<Self>, sends: &mut Sends, wr: &SendWr) {
        if self.flush_train(sends).is_err() {
            // Lost, as datagrams may be: the order of completions matters more.
            self.train_is_gone(sends);
        }
        self.sent(sends, wr, WcStatus::LocProtErr, 0);
    }

    /// Puts the rest of a message into the train, and sends trains that are full.
    fn stage(
        &self,
        sends: &mut Sends,
        wr: &SendWr,
        to: &UdDest,
        progress: &mut Progress,
    ) -> Result<(), Halt> {
        let qkey = self.qkey_for(to);
        let (target, imm) = what_is_sent(wr);
        let len = progress.len;
        if target.is_none() && len <= UD_MTU && len as usize <= self.segment {
            let header = dgram::Header {
                dst_qp: to.qp_num,
                src_qp: self.num,
                qkey,
                msn: sends.msn.wrapping_add(1),
                solicited: wr.solicited,
                imm,
            };
            let size = dgram::HEADER_LEN + len as usize + dgram::CRC_LEN;
            let size = size + if imm.is_some() { dgram::IMM_LEN } else { 0 };
            self.make_way(sends, to, size)?;
            let bytes = &mut sends.train.bytes;
            let start = bytes.len();
            header.emit(bytes);
            self.append(Some(&sends.keys), wr, 0, len, bytes, start)?;
            sends.train.appended(start, to);
            sends.msn = header.msn;
        } else {
            if progress.at.is_none() {
                sends.long_msn = sends.long_msn.wrapping_add(1);
                progress.msn = sends.long_msn;
                progress.at = Some(0);
            }
            let mut segment = Segment {
                dst_qp: to.qp_num,
                src_qp: self.num,
                qkey,
                incarnation: sends.incarnation,
                msn: progress.msn,
                len,
                offset: 0,
                target,
                imm,
                solicited: wr.solicited,
                reliable: None,
            };
            let from = progress.at.unwrap_or(0);
            for (offset, part) in cut(len, self.segment).skip_while(|(offset, _)| *offset < from) {
                progress.at = Some(offset);
                segment.offset = offset;
                let size = segment.header_len() + part as usize + dgram::CRC_LEN;
                self.make_way(sends, to, size)?;
                let bytes = &mut sends.train.bytes;
                let start = bytes.len();
                segment.emit(part as usize, bytes);
                self.append(Some(&sends.keys), wr, offset, part, bytes, start)?;
                sends.train.appended(start, to);
            }
        }
        sends.staged.push_back(Staged {
            id: wr.id,
            opcode: wr.op.opcode(),
            signaled: wr.signaled,
            len,
        });
        Ok(())
    }

    /// The `Q_Key` in datagrams to this destination.
    pub(super) fn qkey_for(&self, to: &UdDest) -> u32 {
        let own = self.qkey.load(Ordering::Relaxed);
        match u32::try_from(own) {
            Ok(own) if to.qkey & OWN_QKEY != 0 => own,
            _ => to.qkey,
        }
    }

    /// A datagram of this size may be appended after this.
    fn make_way(&self, sends: &mut Sends, to: &UdDest, size: usize) -> Result<(), Stall> {
        if !sends.train.takes(size, to) {
            self.flush_train(sends)?;
        }
        // Of short ones several at once, as they mostly come.
        let ahead = if size > LONG { 1 } else { AHEAD };
        let counted = sends.train.count.is_multiple_of(ahead);
        if !counted {
            return Ok(());
        }
        match self.port.may_send(to, size * ahead) {
            Ok(pipe) => {
                sends.train.pipe = pipe;
                Ok(())
            }
            Err(until) => {
                // Staged datagrams must not wait for this.
                self.flush_train(sends)?;
                Err(Stall::Pace(until, *to))
            }
        }
    }

    /// Copied: the bytes that the CRC will be computed over are the bytes that are sent (docs/adr/0003). `keys`: in a hold of their lock.
    pub(super) fn append(
        &self,
        keys: Option<&Keys>,
        wr: &SendWr,
        offset: u32,
        len: u32,
        out: &mut Vec<u8>,
        start: usize,
    ) -> Result<(), MemError> {
        if let Some(data) = &wr.inline {
            let part = offset as usize..offset as usize + len as usize;
            out.extend_from_slice(&data[part]);
        } else {
            let table = &self.pd.device.table;
            for sge in sub_list(&wr.sges, offset, len) {
                let (pd, lkey) = (self.pd.id, sge.lkey);
                let copied = match keys {
                    Some(keys) => keys
                        .local(pd, lkey, sge.addr, sge.len, Access::empty())
                        .map(|span| span.append_to(out)),
                    None => table.copy_local_out(pd, lkey, sge.addr, sge.len, out),
                };
                if let Err(error) = copied {
                    out.truncate(start);
                    return Err(error);
                }
            }
        }
        // Room for the CRC, which is computed when the train is sent.
        out.extend_from_slice(&[0; dgram::CRC_LEN]);
        Ok(())
    }

    /// Hands the train to the kernel; the sends that end with it are complete then.
    fn flush_train(&self, sends: &mut Sends) -> Result<(), Stall> {
        let Sends { train, .. } = &mut *sends;
        train.seal();
        while train.gone < train.bytes.len()
            && let Some(to) = &train.to
            && !self.is_down()
        {
            let rest = &train.bytes[train.gone..];
            match self
                .port
                .send_train(rest, train.each, to, train.pipe.take())
            {
                Ok(0) => return Err(Stall::Socket),
                Ok(taken) => train.gone += taken,
                Err(error) => {
                    // As any datagram may be, it is lost.
                    tracing::debug!(%error, to = %to.addr, "datagrams are lost");
                    self.report(UdError {
                        kind: UdErrorKind::NotSent,
                        peer: Some(to.addr),
                        qp_num: to.qp_num,
                        msn: 0,
                    });
                    break;
                }
            }
        }
        self.train_is_gone(sends);
        Ok(())
    }

    fn train_is_gone(&self, sends: &mut Sends) {
        add_alone(&self.counters.sent, sends.train.count as u64);
        sends.train.clear();
        while let Some(staged) = sends.staged.pop_front() {
            self.done(&mut sends.silent, &staged, WcStatus::Success);
        }
    }

    /// A send is over.
    fn sent(&self, sends: &mut Sends, wr: &SendWr, status: WcStatus, len: u32) {
        self.finished(&mut sends.silent, wr, status, len);
    }

    /// As [`UdInner::sent`], with the number of sends done without a completion before.
    pub(super) fn finished(&self, silent: &mut u32, wr: &SendWr, status: WcStatus, len: u32) {
        let staged = Staged {
            id: wr.id,
            opcode: wr.op.opcode(),
            signaled: wr.signaled,
            len,
        };
        self.done(silent, &staged, status);
    }

    /// Adds to the number of outstanding sends; the caller holds the lock of all sends.
    pub(super) fn count_used(&self, n: u32) {
        let used = self.sq_used.load(Ordering::Relaxed).wrapping_add(n);
        self.sq_used.store(used, Ordering::Relaxed);
    }

    fn done(&self, silent: &mut u32, send: &Staged, status: WcStatus) {
        self.count_used(u32::MAX);
        let wc = Wc {
            wr_id: send.id,
            status,
            opcode: send.opcode,
            byte_len: send.len,
            qp_num: self.num,
            ..Wc::default()
        };
        let wanted = send.signaled || self.sq_sig_all;
        self.queues.sent(silent, wanted, wc);
    }

    /// The kernel, or a receiver, may have room again: `false` when the kernel has too little.
    pub(crate) fn send_on(self: &Arc<Self>) -> bool {
        let all = match &self.reliable {
            Some(reliable) => self.reliable_on(reliable),
            None => self.send_waiting(),
        };
        self.queues.call_hooks();
        all
    }

    fn send_waiting(self: &Arc<Self>) -> bool {
        let mut sends = self.sends.lock();
        let stall = loop {
            let Some(mut first) = sends.waiting.pop_front() else {
                break self.flush_train(&mut sends).err();
            };
            // Datagrams in the train come before it.
            let staged = self.stage(&mut sends, &first.wr, &first.to, &mut first.progress);
            match staged {
                Ok(()) => {}
                Err(Halt::Memory) => self.spoiled(&mut sends, &first.wr),
                Err(Halt::Stall(stall)) => {
                    sends.waiting.push_front(first);
                    break Some(stall);
                }
            }
        };
        if let Some(stall) = &stall {
            self.await_end(stall);
        }
        !matches!(stall, Some(Stall::Socket))
    }

    /// Everything posted is over.
    pub(super) fn flush_sends(&self) {
        if let Some(reliable) = &self.reliable {
            return self.flush_reliable(reliable);
        }
        let sends = &mut *self.sends.lock();
        sends.train.clear();
        while let Some(staged) = sends.staged.pop_front() {
            self.done(&mut sends.silent, &staged, WcStatus::WrFlushErr);
        }
        while let Some(Waiting { wr, .. }) = sends.waiting.pop_front() {
            self.sent(sends, &wr, WcStatus::WrFlushErr, 0);
        }
    }
}

/// The destination of a message, if it is memory, and its immediate data.
pub(super) fn what_is_sent(wr: &SendWr) -> (Option<Target>, Option<u64>) {
    let target = |remote: RemoteAddr| {
        Some(Target {
            stag: remote.rkey,
            to: remote.addr,
        })
    };
    match wr.op {
        SendOp::Write { remote } => (target(remote), None),
        SendOp::WriteImm { remote, imm } => (target(remote), Some(imm)),
        SendOp::SendImm { imm } => (None, Some(imm)),
        _ => (None, None),
    }
}
