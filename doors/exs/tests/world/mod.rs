//! Two endpoints with memory, and the wires between them: a model of driver and network, with an oracle that knows
//! the place of every byte. The model checker and the simulations share it.
#![allow(dead_code, reason = "each test program uses its part")]

use std::collections::{BTreeMap, VecDeque};

use weft_exs::machine::{
    Action, Body, Cancel, Completion, Config, Endpoint, Imm, Kind, Message, Mode, OpId, Outcome,
    RecvFlags, Remote, Rules, Transfer, packet,
};
use weft_wire::exs::Advert;

/// A fault, in the terms of the theorem.
pub(crate) type Fault = &'static str;

/// The settings of both ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) kind: Kind,
    pub(crate) mode: Mode,
    /// The greeting of each end: control receives, payload that fits one, length of its buffer.
    pub(crate) credits: [u32; 2],
    pub(crate) small: [u32; 2],
    pub(crate) ring: [u32; 2],
    pub(crate) immediate: bool,
    pub(crate) rules: Rules,
    /// Transfers complete locally as soon as they are handed over, except RDMA Reads.
    pub(crate) prompt: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            kind: Kind::Stream,
            mode: Mode::Dynamic,
            credits: [4; 2],
            small: [0; 2],
            ring: [2; 2],
            immediate: true,
            rules: Rules::default(),
            prompt: true,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) ends: [End; 2],
    /// The messages in flight to each end.
    pub(crate) wires: [VecDeque<Wire>; 2],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Wire {
    Message(Message, Vec<u8>),
    /// A notification, and the data that a direct transfer or a packet writes before it.
    Imm(Imm, Option<(u64, Vec<u8>)>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct End {
    pub(crate) machine: Endpoint,
    stream: bool,
    immediate: bool,
    prompt: bool,
    /// Posted control receives.
    posted: Vec<u32>,
    /// The payload in the other control receives.
    payload: BTreeMap<u32, Vec<u8>>,
    /// Buffers in use by the program.
    pub(crate) held: Vec<u32>,
    ring: Vec<Option<u8>>,
    ring_at: usize,
    pub(crate) sends: VecDeque<SendOp>,
    pub(crate) recvs: VecDeque<RecvOp>,
    /// Bytes in flight from this end, in order.
    sent: VecDeque<u8>,
    /// Messages in flight from this end: operation and length.
    messages: VecDeque<(OpId, u64)>,
    /// Transfers that have not completed locally.
    pub(crate) local: VecDeque<Local>,
    pub(crate) shut: bool,
    sends_made: u64,
    recvs_made: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SendOp {
    pub(crate) op: OpId,
    pub(crate) len: u64,
    off: u64,
    canceled: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RecvOp {
    pub(crate) op: OpId,
    pub(crate) flags: RecvFlags,
    pub(crate) memory: Vec<Option<u8>>,
    pub(crate) canceled: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Local {
    Sent(OpId),
    Read { op: OpId, addr: u64, len: u32 },
}

/// A call of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    Send(u64),
    /// By the shortcut, if possible.
    SendNow(u64),
    Recv(u64, RecvFlags),
    Cancel(OpId),
    Shutdown,
    Recycle,
}

fn done(op: OpId, len: u64) -> Completion {
    Completion {
        op,
        len,
        outcome: Outcome::Done,
        in_place: None,
    }
}

/// The byte at `off` of a send.
fn byte(op: OpId, off: u64) -> u8 {
    ((op.0 >> 2) * 8 + off + (off >> 8)) as u8
}

fn memory_of(op: OpId, off: u64, len: u32) -> Remote {
    Remote {
        addr: op.0 << 32 | off,
        rkey: op.0 as u32,
        len,
    }
}

/// Writes bytes to cells that must be empty.
fn fill(cells: &mut [Option<u8>], bytes: &[u8], twice: Fault) -> Result<(), Fault> {
    for (cell, &byte) in cells.iter_mut().zip(bytes) {
        if cell.replace(byte).is_some() {
            return Err(twice);
        }
    }
    Ok(())
}

const RING: u64 = 1 << 63;

impl World {
    pub(crate) fn new(settings: &Settings) -> Self {
        let end = |at: usize| {
            let peer = 1 - at;
            let ring = Remote {
                addr: RING,
                rkey: 7,
                len: settings.ring[peer],
            };
            let config = Config {
                kind: settings.kind,
                mode: settings.mode,
                send_credits: settings.credits[peer],
                recv_credits: settings.credits[at],
                small_send: settings.small[peer],
                small_recv: settings.small[at],
                peer_ring: (settings.ring[peer] != 0).then_some(ring),
                own_ring_len: settings.ring[at],
                immediate: settings.immediate,
                rules: settings.rules,
            };
            End {
                machine: Endpoint::new(&config),
                stream: settings.kind == Kind::Stream,
                immediate: settings.immediate,
                prompt: settings.prompt,
                posted: (0..settings.credits[at]).rev().collect(),
                payload: BTreeMap::new(),
                held: Vec::new(),
                ring: vec![None; settings.ring[at] as usize],
                ring_at: 0,
                sends: VecDeque::new(),
                recvs: VecDeque::new(),
                sent: VecDeque::new(),
                messages: VecDeque::new(),
                local: VecDeque::new(),
                shut: false,
                sends_made: 0,
                recvs_made: 0,
            }
        };
        World {
            ends: [end(0), end(1)],
            wires: Default::default(),
        }
    }

    pub(crate) fn call(&mut self, at: usize, call: Call) -> Result<(), Fault> {
        let end = &mut self.ends[at];
        match call {
            Call::Send(len) => {
                let op = OpId(end.sends_made << 2 | (at as u64) << 1);
                let taken = end.machine.send(op, len);
                if taken.is_err() != end.shut {
                    return Err("a send taken after shutdown, or refused before");
                }
                if taken.is_ok() {
                    end.begin_send(op, len);
                }
            }
            Call::SendNow(len) => {
                let op = OpId(end.sends_made << 2 | (at as u64) << 1);
                let Some(header) = end.machine.send_now(len) else {
                    return Ok(());
                };
                if end.shut {
                    return Err("a send taken after shutdown, or refused before");
                }
                end.begin_send(op, len);
                let bytes = end.hand_over(op, 0, len, true)?;
                end.send_complete(done(op, len))?;
                self.wires[1 - at].push_back(Wire::Message(header, bytes));
            }
            Call::Recv(len, flags) => {
                let op = OpId(end.recvs_made << 2 | (at as u64) << 1 | 1);
                end.recvs_made += 1;
                end.recvs.push_back(RecvOp {
                    op,
                    flags,
                    memory: vec![None; len as usize],
                    canceled: false,
                });
                end.machine.recv(op, len, flags);
            }
            Call::Cancel(op) => {
                let verdict = end.machine.cancel(op);
                if let Some(recv) = end.recvs.iter_mut().find(|recv| recv.op == op) {
                    recv.canceled |= verdict != Cancel::TooLate;
                } else if let Some(send) = end.sends.iter_mut().find(|send| send.op == op) {
                    // A stream send is cut at its offset, a message is sent whole or not at all. The start of an empty one may be unseen.
                    let begun = send.off == send.len || send.off != 0 && !end.stream;
                    let too_late = begun || send.canceled;
                    if (verdict == Cancel::Done) == too_late && send.len != 0 {
                        return Err("a send cancelled after it began, or not before");
                    }
                    send.canceled |= verdict == Cancel::Done;
                    if verdict == Cancel::Done && send.off != 0 {
                        send.len = send.off;
                    }
                }
            }
            Call::Shutdown => {
                end.machine.shutdown();
                end.shut = true;
            }
            Call::Recycle => {
                if let Some(buffer) = end.held.pop()
                    && !end.machine.recycle(buffer)
                {
                    return Err("a buffer that the machine never gave");
                }
            }
        }
        Ok(())
    }

    /// The first message in flight to this end arrives.
    pub(crate) fn deliver(&mut self, at: usize) -> Result<(), Fault> {
        let Some(wire) = self.wires[at].pop_front() else {
            return Ok(());
        };
        let end = &mut self.ends[at];
        let buffer = end.posted.pop().ok_or("no control receive is posted")?;
        let verdict = match wire {
            Wire::Message(message, payload) => {
                end.payload.insert(buffer, payload);
                end.machine.on_message(buffer, &message)
            }
            Wire::Imm(imm, placed) => {
                if let Some((addr, bytes)) = placed {
                    let op = OpId(addr >> 32);
                    let off = addr as u32 as usize;
                    let recv = end.recvs.iter_mut().find(|recv| recv.op == op);
                    let recv = recv.ok_or("a write into the memory of a finished receive")?;
                    let cells = recv.memory.get_mut(off..off + bytes.len());
                    let cells = cells.ok_or("a write beyond a receive")?;
                    fill(cells, &bytes, "a byte written twice")?;
                }
                end.payload.insert(buffer, Vec::new());
                if end.immediate {
                    end.machine.on_imm(buffer, imm)
                } else {
                    end.machine.on_message(buffer, &imm.message())
                }
            }
        };
        verdict.map_err(|_| "an honest peer taken for a hostile one")
    }

    /// The receive for the first message in flight to this end, if the message has a payload and the shortcut is possible.
    pub(crate) fn taken_now(&self, at: usize) -> Result<Option<OpId>, Fault> {
        let Some(Wire::Message(message, _)) = self.wires[at].front() else {
            return Ok(None);
        };
        let mut machine = self.ends[at].machine.clone();
        let taken = machine.take_now(message);
        let taken = taken.map_err(|_| "an honest peer taken for a hostile one")?;
        if taken.is_none() && machine != self.ends[at].machine {
            return Err("a way not taken left traces");
        }
        Ok(taken)
    }

    /// It arrives by the shortcut, if possible.
    pub(crate) fn take(&mut self, at: usize) -> Result<(), Fault> {
        if self.taken_now(at)?.is_none() {
            return Ok(());
        }
        let [a, b] = &mut self.ends;
        let (end, peer) = if at == 0 { (a, b) } else { (b, a) };
        let Some(Wire::Message(message, payload)) = self.wires[at].pop_front() else {
            return Ok(());
        };
        if end.posted.is_empty() {
            return Err("no control receive is posted");
        }
        let taken = end.machine.take_now(&message);
        let op = taken
            .ok()
            .flatten()
            .ok_or("the same state, another answer")?;
        let bytes: Vec<_> = payload.iter().map(|&byte| Some(byte)).collect();
        end.copy(op, 0, &bytes)?;
        end.recv_complete(peer, done(op, bytes.len() as u64))
    }

    /// The oldest local completion of this end is reported.
    pub(crate) fn transferred(&mut self, at: usize) -> Result<(), Fault> {
        let [a, b] = &mut self.ends;
        let (end, peer) = if at == 0 { (a, b) } else { (b, a) };
        match end.local.pop_front() {
            None => {}
            Some(Local::Sent(op)) => end.machine.on_transferred(op),
            Some(Local::Read { op, addr, len }) => {
                let source = OpId(addr >> 32);
                if !peer.sends.iter().any(|send| send.op == source) {
                    return Err("a read from the memory of a finished send");
                }
                let recv = end.recvs.iter_mut().find(|recv| recv.op == op);
                let recv = recv.ok_or("a read into the memory of a finished receive")?;
                let cells = recv
                    .memory
                    .get_mut(..len as usize)
                    .ok_or("a read beyond a receive")?;
                for (off, cell) in (0..).zip(cells) {
                    *cell = Some(byte(source, off));
                }
                end.machine.on_transferred(op);
            }
        }
        Ok(())
    }

    /// Carries out the next action of this end. Returns that action.
    pub(crate) fn poll(
        &mut self,
        at: usize,
        may_go_indirect: bool,
    ) -> Result<Option<Action>, Fault> {
        let [a, b] = &mut self.ends;
        let (end, peer) = if at == 0 { (a, b) } else { (b, a) };
        let Some(action) = end.machine.poll(may_go_indirect) else {
            return Ok(None);
        };
        let wire = &mut self.wires[1 - at];
        let mut say = |credits, body| {
            wire.push_back(Wire::Message(Message { credits, body }, Vec::new()));
        };
        let window = |recvs: &VecDeque<RecvOp>, op: OpId, off: u64, len: u32| {
            let recv = recvs.iter().find(|recv| recv.op == op);
            let memory = &recv.ok_or("memory of a finished receive")?.memory;
            if off + u64::from(len) > memory.len() as u64 {
                return Err("an advert beyond a receive");
            }
            Ok(memory_of(op, off, len))
        };
        match action {
            Action::Send(Message { credits, body }) => say(credits, body),
            Action::Advertise {
                op,
                off,
                len,
                seq,
                phase,
                waitall,
                credits,
            } => {
                let advert = Advert {
                    seq,
                    phase,
                    waitall,
                    memory: window(&end.recvs, op, off, len)?,
                };
                say(credits, Body::Advert(advert));
            }
            Action::AdvertisePacket {
                op,
                index,
                len,
                credits,
            } => {
                let memory = window(&end.recvs, op, 0, len)?;
                say(credits, Body::PktAdvert(packet(index, memory)));
            }
            Action::AdvertiseSource {
                op,
                index,
                len,
                credits,
            } => {
                end.hand_over(op, 0, u64::from(len), true)?;
                say(credits, Body::Source(packet(index, memory_of(op, 0, len))));
            }
            Action::Write {
                op,
                off,
                len,
                addr,
                rkey,
                imm,
                last,
            } => {
                let bytes = end.hand_over(op, off, u64::from(len), last)?;
                let placed = if imm.transfer == Transfer::Indirect {
                    if addr - RING != peer.ring_at as u64 || rkey != 7 {
                        return Err("the positions in the intermediate buffer differ");
                    }
                    let cells = peer.ring.get_mut(peer.ring_at..peer.ring_at + bytes.len());
                    let cells = cells.ok_or("a write beyond the buffer")?;
                    fill(cells, &bytes, "unread bytes in the buffer overwritten")?;
                    peer.ring_at = (peer.ring_at + bytes.len()) % peer.ring.len();
                    None
                } else {
                    Some((addr, bytes))
                };
                if imm.len != len {
                    return Err("a notification with another length");
                }
                wire.push_back(Wire::Imm(imm, placed));
                end.local.push_back(Local::Sent(op));
            }
            Action::SendSmall {
                op,
                off,
                len,
                header,
                last,
            } => {
                let bytes = end.hand_over(op, off, u64::from(len), last)?;
                wire.push_back(Wire::Message(header, bytes));
                end.local.push_back(Local::Sent(op));
            }
            Action::Read { op, len, addr, .. } => {
                end.local.push_back(Local::Read { op, addr, len });
            }
            Action::Copy {
                op,
                off,
                ring_off,
                len,
            } => {
                let range = ring_off as usize..(ring_off + len) as usize;
                let cells = end.ring.get_mut(range).ok_or("a copy beyond the buffer")?;
                let bytes: Vec<_> = cells.iter_mut().map(Option::take).collect();
                end.copy(op, off, &bytes)?;
            }
            Action::CopySmall {
                op,
                off,
                buffer,
                buf_off,
                len,
            } => {
                let payload = end
                    .payload
                    .get(&buffer)
                    .ok_or("a copy from a posted buffer")?;
                let bytes = payload.get(buf_off as usize..(buf_off + len) as usize);
                let bytes: Vec<_> = bytes
                    .ok_or("a copy beyond a payload")?
                    .iter()
                    .map(|&byte| Some(byte))
                    .collect();
                end.copy(op, off, &bytes)?;
            }
            Action::Repost { buffer } => {
                if end.payload.remove(&buffer).is_none() {
                    return Err("a buffer posted twice");
                }
                // The order of the buffers does not matter; sorting makes equal states compare equal.
                let place = end.posted.partition_point(|&other| other > buffer);
                end.posted.insert(place, buffer);
            }
            Action::Complete(told) if told.op.0 & 1 == 0 => end.send_complete(told)?,
            Action::Complete(told) => end.recv_complete(peer, told)?,
        }
        if end.prompt
            && let Some(Local::Sent(_)) = end.local.back()
        {
            self.transferred_last(at);
        }
        Ok(Some(action))
    }

    fn transferred_last(&mut self, at: usize) {
        if let Some(Local::Sent(op)) = self.ends[at].local.pop_back() {
            self.ends[at].machine.on_transferred(op);
        }
    }

    /// Makes all steps that need no program, in a fixed order.
    pub(crate) fn settle(&mut self) -> Result<(), Fault> {
        loop {
            let mut moved = false;
            for at in 0..2 {
                while self.poll(at, true)?.is_some() {
                    moved = true;
                }
                if !self.ends[at].local.is_empty() {
                    self.transferred(at)?;
                    moved = true;
                }
                if !self.wires[at].is_empty() {
                    self.deliver(at)?;
                    moved = true;
                }
            }
            if !moved {
                return Ok(());
            }
        }
    }

    /// False if an end that claims to have nothing to do has an action.
    pub(crate) fn knows_when_still(&self) -> bool {
        let wrong = |end: &End| end.machine.is_still() && end.machine.clone().poll(true).is_some();
        !self.ends.iter().any(wrong)
    }

    /// True if nothing can happen without the program.
    pub(crate) fn is_quiet(&self) -> bool {
        let quiet = |end: &End| end.local.is_empty() && end.machine.clone().poll(true).is_none();
        self.wires.iter().all(VecDeque::is_empty) && self.ends.iter().all(quiet)
    }

    /// True if nothing can happen while no send may go indirect, and a send waits for an advert.
    pub(crate) fn waits_in_vain(&self) -> bool {
        let waits = |end: &End| end.local.is_empty() && end.machine.clone().poll(false).is_none();
        let stuck =
            |at: usize| !self.ends[at].sends.is_empty() && !self.ends[1 - at].recvs.is_empty();
        self.wires.iter().all(VecDeque::is_empty)
            && self.ends.iter().all(waits)
            && (stuck(0) || stuck(1))
    }

    /// In a quiet state: the reason why an operation is stuck, if one is.
    pub(crate) fn stuck(&self) -> Option<Fault> {
        for at in 0..2 {
            let (end, peer) = (&self.ends[at], &self.ends[1 - at]);
            if !end.held.is_empty() || !peer.held.is_empty() {
                continue;
            }
            if !end.sends.is_empty() && !peer.recvs.is_empty() {
                return Some("a send and a receive wait for each other");
            }
            if let Some(head) = peer.recvs.front() {
                let enough = if head.flags.waitall {
                    head.memory.len()
                } else {
                    1
                };
                if end.stream && end.sent.len() >= enough {
                    return Some("bytes have come and a receive waits");
                }
            }
            if peer.recvs.iter().any(|recv| recv.canceled) {
                return Some("a cancelled receive never ends");
            }
            if end.shut && end.sends.is_empty() && !end.machine.is_shut() {
                return Some("the half-close is never sent");
            }
            if end.shut && end.sends.is_empty() && !peer.recvs.is_empty() {
                return Some("the end of the stream has come and a receive waits");
            }
            if end.recvs.is_empty() != end.machine.is_idle() && end.sends.is_empty() {
                return Some("idle or not");
            }
        }
        None
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.ends.iter().all(|end| {
            end.sends.is_empty()
                && end.recvs.is_empty()
                && end.sent.is_empty()
                && end.messages.is_empty()
                && !end.shut
                && end.held.is_empty()
        })
    }

    /// From a quiet and idle state: checks that a receive followed by a send go directly.
    pub(crate) fn returns_to_direct(&self, at: usize, len: u64) -> Result<(), Fault> {
        let mut world = self.clone();
        let before = *world.ends[at].machine.stats();
        world.call(1 - at, Call::Recv(len, RecvFlags::default()))?;
        world.settle()?;
        world.call(at, Call::Send(len))?;
        world.settle()?;
        if !world.is_idle() {
            return Err("an idle pair does not move on");
        }
        let after = world.ends[at].machine.stats();
        if after.direct_sent != before.direct_sent + 1
            || after.indirect_sent != before.indirect_sent
        {
            return Err("an idle pair does not return to direct transfers");
        }
        Ok(())
    }
}

impl End {
    fn begin_send(&mut self, op: OpId, len: u64) {
        self.sends_made += 1;
        self.sends.push_back(SendOp {
            op,
            len,
            off: 0,
            canceled: false,
        });
    }

    /// Bytes of a send are handed over: they must be the next.
    fn hand_over(&mut self, op: OpId, off: u64, len: u64, last: bool) -> Result<Vec<u8>, Fault> {
        let send = self
            .sends
            .iter_mut()
            .find(|send| send.off < send.len || send.op == op);
        let send = send.ok_or("a transfer of no send")?;
        if send.op != op || send.off != off || send.off + len > send.len {
            return Err("sends out of order");
        }
        let bytes: Vec<_> = (off..off + len).map(|off| byte(op, off)).collect();
        if self.stream {
            send.off += len;
            if last != (send.off == send.len) {
                return Err("the last transfer of a send, or not");
            }
            self.sent.extend(&bytes);
        } else {
            send.off = send.len;
            self.messages.push_back((op, send.len));
        }
        Ok(bytes)
    }

    fn copy(&mut self, op: OpId, off: u64, bytes: &[Option<u8>]) -> Result<(), Fault> {
        let recv = self.recvs.iter_mut().find(|recv| recv.op == op);
        let recv = recv.ok_or("a copy to a finished receive")?;
        let cells = recv
            .memory
            .get_mut(off as usize..off as usize + bytes.len());
        for (cell, byte) in cells
            .ok_or("a copy beyond a receive")?
            .iter_mut()
            .zip(bytes)
        {
            if byte.is_none() {
                return Err("a copy of bytes that have not come");
            }
            if std::mem::replace(cell, *byte).is_some() {
                return Err("a byte written twice");
            }
        }
        Ok(())
    }

    fn send_complete(&mut self, told: Completion) -> Result<(), Fault> {
        let place = self.sends.iter().position(|send| send.op == told.op);
        let place = place.ok_or("a send told twice")?;
        let canceled = told.outcome == Outcome::Canceled;
        let send = self.sends.get(place).ok_or("a send")?;
        if (!canceled || send.off != 0) && place != 0 {
            return Err("sends complete out of order");
        }
        let send = self.sends.remove(place).ok_or("a send")?;
        let moved = if canceled { send.off } else { send.len };
        if send.off != moved || told.len != moved {
            return Err("a send complete with another length");
        }
        Ok(())
    }

    fn recv_complete(&mut self, peer: &mut End, told: Completion) -> Result<(), Fault> {
        let place = self.recvs.iter().position(|recv| recv.op == told.op);
        let place = place.ok_or("a receive told twice")?;
        if told.outcome != Outcome::Canceled && place != 0 {
            return Err("receives complete out of order");
        }
        let recv = self.recvs.remove(place).ok_or("a receive")?;
        let len = told.len as usize;
        let data: Vec<Option<u8>> = if let Some(at) = told.in_place {
            if !recv.flags.in_place || recv.memory.iter().any(Option::is_some) {
                return Err("in place, but not asked for or not only");
            }
            let payload = self
                .payload
                .get(&at.buffer)
                .ok_or("in place in a posted buffer")?;
            self.held.push(at.buffer);
            let data = payload.get(at.off as usize..at.off as usize + len);
            data.ok_or("in place beyond the payload")?
                .iter()
                .map(|&byte| Some(byte))
                .collect()
        } else {
            if recv.memory.iter().skip(len).any(Option::is_some) {
                return Err("bytes written beyond what is told");
            }
            recv.memory
                .get(..len)
                .ok_or("more told than fits")?
                .to_vec()
        };
        let full = len == recv.memory.len();
        match told.outcome {
            Outcome::Canceled if !recv.canceled => return Err("cancelled without a call"),
            Outcome::Canceled if !recv.flags.waitall && len != 0 => {
                return Err("cancelled with data");
            }
            Outcome::Eof if !peer.shut => return Err("an end without a shutdown"),
            Outcome::Eof
                if !peer.sends.is_empty() && !peer.sends.iter().all(|s| s.off == s.len) =>
            {
                return Err("an end before all was sent");
            }
            Outcome::Done if self.stream && len == 0 && !recv.memory.is_empty() => {
                return Err("done with nothing");
            }
            Outcome::Done if self.stream && recv.flags.waitall && !full => {
                return Err("WAITALL not filled");
            }
            _ => {}
        }
        if self.stream {
            for byte in data {
                if byte.is_none() || byte != peer.sent.pop_front() {
                    return Err("bytes lost, doubled or out of order");
                }
            }
            if told.outcome == Outcome::Eof && !peer.sent.is_empty() {
                return Err("an end before all was received");
            }
            return Ok(());
        }
        if matches!(told.outcome, Outcome::Canceled | Outcome::Eof) {
            return if len == 0 && (told.outcome == Outcome::Canceled || peer.messages.is_empty()) {
                Ok(())
            } else {
                Err("an end before all was received")
            };
        }
        let (op, sent) = peer.messages.pop_front().ok_or("a message from nowhere")?;
        let room = recv.memory.len() as u64;
        if told.len != sent.min(room) || (told.outcome == Outcome::Truncated) != (sent > room) {
            return Err("a message of another length");
        }
        if !data
            .iter()
            .zip(0..)
            .all(|(&got, off)| got == Some(byte(op, off)))
        {
            return Err("a message with other bytes");
        }
        Ok(())
    }
}
