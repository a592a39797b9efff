//! The send side: packets of one length for one destination follow each other in a train, which the kernel gets in one system call.

use std::collections::VecDeque;
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use weft_mem::{Access, Keys, MemError, Table};
use weft_wire::roce::{BTH_LEN, Deth, Header, ICRC_LEN, MASK_24, Op, Opcode};

use super::super::port::PortInner;
use super::super::scope_of;
use super::super::train::{Course, Full, Train};
use super::{Inner, NO_QKEY, is_at};
use crate::lock::add_alone;
use crate::types::{PostReason, QpState, SendOp, SendWr, Wc, WcOpcode, WcStatus};
use crate::ud::{Burst, OWN_QKEY, UdDest};

/// Bytes of the headers without immediate data.
const HEADERS: usize = BTH_LEN + 8;

/// What its lock protects.
pub(super) struct Sends {
    /// Posted and not complete.
    used: u32,
    psn: u32,
    train: Train,
    /// Where the train goes.
    way: Option<Way>,
    /// Sends whose packets are in the train.
    staged: VecDeque<Staged>,
    burst: Burst,
    /// The train waits for the coming poll, whose thread calls `Member::resume`.
    held: bool,
    /// Sends that could not go out, oldest first.
    waiting: VecDeque<(SendWr, UdDest)>,
    /// The socket has no room; `Member::resume` comes when it has.
    blocked: bool,
    /// Sends done without a completion.
    silent: u32,
    keys: Keys,
    /// The owner has not dropped it.
    live: bool,
}

impl AsMut<Keys> for Sends {
    fn as_mut(&mut self) -> &mut Keys {
        &mut self.keys
    }
}

#[derive(Clone)]
struct Way {
    port: Arc<PortInner>,
    course: Course,
}

impl Way {
    fn is(&self, other: &Way) -> bool {
        self.course == other.course && Arc::ptr_eq(&self.port, &other.port)
    }
}

struct Staged {
    id: u64,
    opcode: WcOpcode,
    signaled: bool,
    len: u32,
}

impl Staged {
    fn of(wr: &SendWr, len: u32) -> Staged {
        Staged {
            id: wr.id,
            opcode: wr.op.opcode(),
            signaled: wr.signaled,
            len,
        }
    }
}

impl Sends {
    pub(super) fn new(table: &Table) -> Sends {
        Sends {
            used: 0,
            psn: 0,
            train: Train::default(),
            way: None,
            staged: VecDeque::new(),
            burst: Burst::default(),
            held: false,
            waiting: VecDeque::new(),
            blocked: false,
            silent: 0,
            keys: Keys::new(table),
            live: true,
        }
    }

    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// The port of the last send.
    pub(super) fn port(&self) -> Option<Arc<PortInner>> {
        self.way.as_ref().map(|way| Arc::clone(&way.port))
    }

    /// Drops outstanding sends without completions.
    pub(super) fn end(&mut self) {
        self.live = false;
        self.train.clear();
        self.staged.clear();
        self.waiting.clear();
    }
}

/// Why a message is not in the train.
enum Halt {
    Full,
    Memory,
}

impl From<Full> for Halt {
    fn from(_: Full) -> Halt {
        Halt::Full
    }
}

impl From<MemError> for Halt {
    fn from(_: MemError) -> Halt {
        Halt::Memory
    }
}

impl Inner {
    pub(super) fn check(&self, wr: &SendWr) -> Result<u32, PostReason> {
        if !matches!(wr.op, SendOp::Send | SendOp::SendImm { .. }) {
            return Err(PostReason::Opcode);
        }
        let len = self.limits.check(wr)?;
        if len > self.max_message {
            return Err(PostReason::Length);
        }
        Ok(len)
    }

    pub(super) fn post(
        self: &Arc<Self>,
        wr: &SendWr,
        to: &UdDest,
        more: bool,
    ) -> Result<(), PostReason> {
        let posted = {
            let mut sends = self.sends.lock();
            let posted = self.check(wr).and_then(|len| {
                let way = self.way(&sends, to)?;
                self.begin(&mut sends, wr, to, &way, len)?;
                Ok((way, len))
            });
            let stays = match &posted {
                Ok((way, len)) => more || self.holds(&mut sends, to, way, *len),
                Err(_) => false,
            };
            if !stays {
                self.finish(&mut sends);
            }
            if !more {
                sends.burst.posted();
            }
            posted.map(drop)
        };
        self.queues.call_hooks();
        posted
    }

    /// Whether the train may wait for the coming poll: its program posts in bursts. The first packets of a burst are sent at once, and so is a shorter
    /// one, which ends it.
    fn holds(self: &Arc<Self>, sends: &mut Sends, to: &UdDest, way: &Way, len: u32) -> bool {
        let found = self.queues.taken();
        sends
            .burst
            .add(to, len, found.wrapping_add(way.port.polls()));
        let holds = sends.burst.is_long()
            && sends.waiting.is_empty()
            && !sends.blocked
            && !sends.train.is_empty()
            && !sends.train.closed
            && way.port.is_polled();
        if holds {
            if !std::mem::replace(&mut sends.held, true) {
                let member = Arc::downgrade(self);
                way.port.wait(member, true);
            }
            self.queues.defer();
        }
        holds
    }

    pub(super) fn send_staged(self: &Arc<Self>) {
        self.finish(&mut self.sends.lock());
        self.queues.call_hooks();
    }

    /// The way to a destination.
    fn way(self: &Arc<Self>, sends: &Sends, to: &UdDest) -> Result<Way, PostReason> {
        let course = Course {
            to: to.addr,
            from: to.from.filter(|_| to.is_group()),
            traffic_class: to.traffic_class,
        };
        let from = to.from.ok_or(PostReason::State)?;
        let scope = scope_of(to.addr);
        if let Some(way) = &sends.way
            && is_at(way.port.local_addr(), from, scope)
        {
            let port = Arc::clone(&way.port);
            return Ok(Way { port, course });
        }
        let port = self.port_of(from, scope);
        let port = port.ok_or(PostReason::State)?;
        let port = Arc::clone(port.inner());
        // The program polls for the completion, and for the answer that comes there.
        self.poll_port(&port);
        Ok(Way { port, course })
    }

    fn begin(
        self: &Arc<Self>,
        sends: &mut Sends,
        wr: &SendWr,
        to: &UdDest,
        way: &Way,
        len: u32,
    ) -> Result<(), PostReason> {
        if sends.used >= self.limits.max_send_wr {
            self.finish(sends);
        }
        if sends.used >= self.limits.max_send_wr {
            return Err(PostReason::Full);
        }
        sends.used += 1;
        if self.state() == QpState::Error {
            self.done(sends, &Staged::of(wr, len), WcStatus::WrFlushErr);
        } else if sends.blocked || !sends.waiting.is_empty() {
            sends.waiting.push_back((wr.clone(), *to));
        } else {
            self.stage_or_wait(sends, wr, to, way, len);
        }
        Ok(())
    }

    fn stage_or_wait(
        self: &Arc<Self>,
        sends: &mut Sends,
        wr: &SendWr,
        to: &UdDest,
        way: &Way,
        len: u32,
    ) {
        match self.stage(sends, wr, to, way, len) {
            Ok(()) => {}
            Err(Halt::Full) => sends.waiting.push_back((wr.clone(), *to)),
            Err(Halt::Memory) => {
                // Completions come in the order of the posts.
                self.finish(sends);
                let spoiled = Staged::of(wr, len);
                if sends.blocked {
                    // It fails again, or its memory has become right.
                    sends.waiting.push_back((wr.clone(), *to));
                } else {
                    self.done(sends, &spoiled, WcStatus::LocProtErr);
                }
            }
        }
    }

    /// Puts a message into the train.
    fn stage(
        self: &Arc<Self>,
        sends: &mut Sends,
        wr: &SendWr,
        to: &UdDest,
        way: &Way,
        len: u32,
    ) -> Result<(), Halt> {
        let immediate = match wr.op {
            // The low half is what the wire has.
            SendOp::SendImm { imm } => Some(imm as u32),
            _ => None,
        };
        let pad = (len.wrapping_neg() & 3) as usize;
        let whole =
            HEADERS + if immediate.is_some() { 4 } else { 0 } + len as usize + pad + ICRC_LEN;
        let goes_on = sends.way.as_ref().is_some_and(|now| now.is(way)) && sends.train.takes(whole);
        if !sends.train.is_empty() && !goes_on {
            self.flush(sends)?;
        }
        let qkey = match self.qkey.load(Ordering::Relaxed) {
            NO_QKEY => to.qkey,
            own if to.qkey & OWN_QKEY != 0 => own as u32,
            _ => to.qkey,
        };
        let op = if immediate.is_some() {
            Op::SendOnlyImm
        } else {
            Op::SendOnly
        };
        let header = Header {
            solicited: wr.solicited,
            pad: pad as u8,
            deth: Some(Deth {
                qkey,
                src_qp: self.num,
            }),
            immediate,
            ..Header::new(Opcode::ud(op), to.qp_num & MASK_24, sends.psn)
        };
        let Sends { train, keys, .. } = &mut *sends;
        if train.bytes.capacity() == 0 {
            train.bytes = self.pd.device.pool().get_tx();
        }
        let start = train.bytes.len();
        train.bytes.reserve(whole);
        header.emit(&mut train.bytes);
        if let Err(error) = self.append(keys, wr, &mut train.bytes) {
            train.bytes.truncate(start);
            return Err(error.into());
        }
        train.bytes.resize(start + whole, 0);
        train.appended(start);
        sends.psn = (sends.psn + 1) & MASK_24;
        sends.way = Some(way.clone());
        sends.staged.push_back(Staged::of(wr, len));
        Ok(())
    }

    fn append(&self, keys: &Keys, wr: &SendWr, out: &mut Vec<u8>) -> Result<(), MemError> {
        if let Some(data) = &wr.inline {
            out.extend_from_slice(data);
            return Ok(());
        }
        for sge in &wr.sges {
            let span = keys.local(self.pd.id, sge.lkey, sge.addr, sge.len, Access::empty())?;
            span.append_to(out);
        }
        Ok(())
    }

    /// Sends the staged packets, unless the socket has no room: then that is awaited.
    fn finish(self: &Arc<Self>, sends: &mut Sends) {
        if !sends.blocked {
            // What has no room is kept, and its owner waits for it.
            let _ = self.flush(sends);
        }
    }

    /// Hands the train to the kernel; the sends in it are complete then.
    fn flush(self: &Arc<Self>, sends: &mut Sends) -> Result<(), Full> {
        while !sends.train.is_empty()
            && let Some(way) = &sends.way
            && !self.is_down()
        {
            if let Err(full) = sends.train.push(&way.port, &way.course) {
                if !std::mem::replace(&mut sends.blocked, true) {
                    let member = Arc::downgrade(self);
                    way.port.wait(member, true);
                }
                return Err(full);
            }
        }
        sends.train.clear();
        if sends.train.bytes.capacity() > 0 {
            let spare = take(&mut sends.train.bytes);
            self.pd.device.pool().put_tx(spare);
        }
        let count = sends.staged.len() as u64;
        if count > 0 {
            add_alone(&self.counters.sent, count);
        }
        while let Some(staged) = sends.staged.pop_front() {
            self.done(sends, &staged, WcStatus::Success);
        }
        Ok(())
    }

    /// The socket may have room.
    pub(super) fn send_waiting(self: &Arc<Self>) {
        let mut sends = self.sends.lock();
        (sends.blocked, sends.held) = (false, false);
        if self.flush(&mut sends).is_err() {
            return;
        }
        while let Some((wr, to)) = sends.waiting.pop_front() {
            let len = wr.len().unwrap_or(0);
            let Ok(way) = self.way(&sends, &to) else {
                // Its address has gone.
                self.done(&mut sends, &Staged::of(&wr, len), WcStatus::LocQpOpErr);
                continue;
            };
            let before = sends.waiting.len();
            self.stage_or_wait(&mut sends, &wr, &to, &way, len);
            if sends.waiting.len() > before {
                // It is the oldest still.
                if let Some(oldest) = sends.waiting.pop_back() {
                    sends.waiting.push_front(oldest);
                }
                return;
            }
        }
        self.finish(&mut sends);
    }

    /// Everything posted is over.
    pub(super) fn flush_sends(&self) {
        let sends = &mut *self.sends.lock();
        sends.train.clear();
        while let Some(staged) = sends.staged.pop_front() {
            self.done(sends, &staged, WcStatus::WrFlushErr);
        }
        while let Some((wr, _)) = sends.waiting.pop_front() {
            self.done(sends, &Staged::of(&wr, 0), WcStatus::WrFlushErr);
        }
    }

    /// A send is over.
    fn done(&self, sends: &mut Sends, send: &Staged, status: WcStatus) {
        sends.used = sends.used.saturating_sub(1);
        if !sends.live {
            return;
        }
        let wc = Wc {
            wr_id: send.id,
            status,
            opcode: send.opcode,
            byte_len: send.len,
            qp_num: self.num,
            ..Wc::default()
        };
        let wanted = send.signaled || self.limits.sq_sig_all;
        self.queues.sent(&mut sends.silent, wanted, wc);
    }
}
