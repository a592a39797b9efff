//! Two endpoints, the wires between them, memory and locks: what drivers and a network would be, with an oracle that knows which byte belongs
//! where. The model checker and the simulation share it.
#![allow(dead_code, reason = "each test program uses its part")]

use std::collections::{BTreeMap, VecDeque};

use weft_sdp::machine::{Action, Config, Endpoint, From, Next, Op, Run, Stage};
use weft_sdp::wire::{Body, Buffer, Message, locks};

/// What is wrong.
pub(crate) type Fault = &'static str;

/// The settings of both ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) receives: u16,
    pub(crate) payload: u32,
    pub(crate) send_buffer: u32,
    pub(crate) sources: u16,
    /// The sender takes the lock before it lets the program overwrite a source that the peer knows of. Without, the model must find a fault.
    pub(crate) locked: bool,
    /// The receiver frees the lock of a source that has moved. Without, the model must find that something hangs.
    pub(crate) updates_unlock: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            receives: 6,
            payload: 2,
            send_buffer: 8,
            sources: 2,
            locked: true,
            updates_unlock: true,
        }
    }
}

/// A message on its way, with its payload and what an RDMA Write puts before it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Wire {
    message: Message,
    payload: Vec<u8>,
    write: Option<(u64, Vec<u8>)>,
}

/// A fetch that has begun: the bytes move at its end.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fetch {
    index: u32,
    at: Buffer,
    len: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct End {
    pub(crate) machine: Endpoint,
    /// Receives that are posted, and the payload in the others.
    posted: Vec<u32>,
    payload: BTreeMap<u32, Vec<u8>>,
    ring: Vec<u8>,
    /// Bytes of the send buffer that are being transmitted.
    out: VecDeque<u32>,
    /// Memory that the other end can reach, by its address.
    memory: BTreeMap<u64, Vec<u8>>,
    /// Sources in the program's memory: operation, address, and the bytes at the time of the send.
    sources: Vec<(Op, u64, Vec<u8>)>,
    /// Locks of the other end's sources.
    locks: Vec<u64>,
    /// A compare-and-swap that is on its way: for which source, by which index.
    locking: Option<(Op, u32)>,
    pub(crate) fetch: Option<Fetch>,
    /// The sink's address.
    sink: Option<u64>,
    /// What was sent, and what was received, in order.
    sent: Vec<u8>,
    got: usize,
    ops: u64,
    pub(crate) shut: bool,
    pub(crate) urgent: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) ends: [End; 2],
    /// What is on its way to each end.
    pub(crate) wires: [VecDeque<Wire>; 2],
    sources: u16,
    payload: u32,
    locked: bool,
    updates_unlock: bool,
}

/// What a program or a driver does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    /// Through the send buffer.
    Send(u32),
    /// By the short way, where that is open.
    SendNow(u32),
    Source(u32),
    /// The program writes to its oldest source: it is taken back first.
    Overwrite,
    /// Take up to so many bytes of what comes next; begins a fetch, or ends one.
    Recv(u32),
    OfferSink(u32),
    CancelSink,
    Shutdown,
}

/// The next byte of a stream: of the sender's end and its place.
fn byte(at: usize, place: usize) -> u8 {
    (place as u8).wrapping_mul(2) | at as u8
}

impl World {
    pub(crate) fn new(settings: &Settings) -> World {
        let config = Config {
            send_receives: settings.receives,
            recv_receives: settings.receives,
            send_payload: settings.payload,
            recv_payload: settings.payload,
            send_buffer: settings.send_buffer,
            sources: settings.sources,
            peer_sources: settings.sources,
        };
        let end = || End {
            machine: Endpoint::new(&config),
            posted: (0..u32::from(settings.receives)).rev().collect(),
            payload: BTreeMap::new(),
            ring: vec![0; settings.send_buffer as usize],
            out: VecDeque::new(),
            memory: BTreeMap::new(),
            sources: Vec::new(),
            locks: (0..u32::from(settings.sources))
                .map(|index| locks::word(index, locks::FREE))
                .collect(),
            locking: None,
            fetch: None,
            sink: None,
            sent: Vec::new(),
            got: 0,
            ops: 0,
            shut: false,
            urgent: Vec::new(),
        };
        World {
            ends: [end(), end()],
            wires: Default::default(),
            sources: settings.sources,
            payload: settings.payload,
            locked: settings.locked,
            updates_unlock: settings.updates_unlock,
        }
    }

    /// Calls that change something.
    pub(crate) fn may(&self, at: usize, call: Call) -> bool {
        let end = &self.ends[at];
        match call {
            Call::Send(len) => !end.shut && end.machine.room() >= len,
            Call::SendNow(len) => !end.shut && end.machine.clone().send_now(len).is_some(),
            Call::Source(_) => !end.shut && end.machine.may_source(),
            Call::Overwrite => !end.sources.is_empty() && end.locking.is_none(),
            Call::Recv(_) => {
                end.fetch.is_some() || !matches!(end.machine.look(0), Next::Nothing | Next::End)
            }
            Call::OfferSink(len) => {
                end.fetch.is_none()
                    && end.machine.clone().offer_sink(Buffer {
                        addr: 0,
                        key: 0,
                        len,
                    })
            }
            Call::CancelSink => end.machine.has_sink(),
            Call::Shutdown => !end.shut,
        }
    }

    pub(crate) fn call(&mut self, at: usize, call: Call) -> Result<(), Fault> {
        let end = &mut self.ends[at];
        match call {
            Call::Send(len) => {
                let bytes = end.make(at, len);
                let run = end.machine.append(len);
                if run.len != len {
                    return Err("the send buffer has less room than it said");
                }
                for (i, byte) in bytes.into_iter().enumerate() {
                    let place = (run.off as usize + i) % end.ring.len();
                    end.ring[place] = byte;
                }
            }
            Call::SendNow(len) => {
                if let Some(message) = end.machine.send_now(len) {
                    let payload = end.make(at, len);
                    self.wires[1 - at].push_back(Wire {
                        message,
                        payload,
                        write: None,
                    });
                }
            }
            Call::Source(len) => {
                let bytes = end.make(at, len);
                let op = Op(end.ops);
                let addr = end.place(bytes.clone());
                end.machine.source(op, Buffer { addr, key: 1, len });
                end.sources.push((op, addr, bytes));
            }
            Call::Overwrite => self.overwrite(at),
            Call::Recv(max) => self.receive(at, max)?,
            Call::OfferSink(len) => {
                let addr = end.place(vec![0xee; len as usize]);
                let at = Buffer { addr, key: 2, len };
                if end.machine.offer_sink(at) {
                    end.sink = Some(addr);
                }
            }
            Call::CancelSink => end.machine.cancel_sink(),
            Call::Shutdown => {
                end.machine.shutdown();
                end.shut = true;
            }
        }
        Ok(())
    }

    /// The program wants to write to its oldest source.
    fn overwrite(&mut self, at: usize) {
        let end = &mut self.ends[at];
        let Some(&(op, ..)) = end.sources.first() else {
            return;
        };
        match end.machine.stage(op) {
            // It is about to be told as done.
            Stage::Gone => {}
            Stage::Queued => end.copy_and_spoil(op),
            Stage::Flying(_) if !self.locked => end.copy_and_spoil(op),
            Stage::Flying(index) => end.locking = Some((op, index)),
        }
    }

    /// The compare-and-swap reaches the other end's memory, and its answer comes back.
    pub(crate) fn lock(&mut self, at: usize) {
        let Some((op, index)) = self.ends[at].locking.take() else {
            return;
        };
        let word = &mut self.ends[1 - at].locks[index as usize % usize::from(self.sources)];
        if *word == locks::word(index, locks::FREE) {
            *word = locks::word(index, locks::WRITER);
            self.ends[at].copy_and_spoil(op);
        }
    }

    fn receive(&mut self, at: usize, max: u32) -> Result<(), Fault> {
        let (mine, theirs) = if at == 0 {
            let (a, b) = self.ends.split_at_mut(1);
            (&mut a[0], &mut b[0])
        } else {
            let (a, b) = self.ends.split_at_mut(1);
            (&mut b[0], &mut a[0])
        };
        if let Some(fetch) = mine.fetch.take() {
            // The end of a fetch: now the bytes are read.
            let bytes = theirs.read(fetch.at.addr, fetch.len)?;
            mine.check(&theirs.sent, &bytes)?;
            let slot = fetch.index as usize % usize::from(self.sources);
            let next = if fetch.len == fetch.at.len {
                fetch.index.wrapping_add(u32::from(self.sources))
            } else {
                fetch.index
            };
            mine.locks[slot] = locks::word(next, locks::FREE);
            mine.machine.taken(fetch.len);
            return Ok(());
        }
        match mine.machine.look(0) {
            Next::Bytes { buffer, off, len } => {
                let n = len.min(max);
                let payload = mine.payload.get(&buffer).ok_or("bytes of no receive")?;
                let bytes = payload
                    .get(off as usize..(off + n) as usize)
                    .ok_or("bytes outside a receive")?
                    .to_vec();
                mine.check(&theirs.sent, &bytes)?;
                mine.machine.taken(n);
            }
            Next::Source { index, at, .. } => {
                let slot = &mut mine.locks[index as usize % usize::from(self.sources)];
                if *slot == locks::word(index, locks::FREE) {
                    *slot = locks::word(index, locks::READER);
                    let len = at.len.min(max);
                    mine.fetch = Some(Fetch { index, at, len });
                } else if *slot != locks::word(index, locks::WRITER) {
                    return Err("a lock with a word of another source");
                }
            }
            Next::Placed { len } => {
                let addr = mine.sink.take().ok_or("placed without a sink")?;
                let bytes = mine.read(addr, len)?;
                mine.check(&theirs.sent, &bytes)?;
                mine.machine.taken(len);
            }
            Next::Mark => mine.machine.pass_mark(),
            Next::End | Next::Nothing => {}
        }
        Ok(())
    }

    /// The next message arrives.
    pub(crate) fn deliver(&mut self, at: usize) -> Result<(), Fault> {
        let Some(wire) = self.wires[at].pop_front() else {
            return Ok(());
        };
        let end = &mut self.ends[at];
        if let Some((addr, bytes)) = wire.write {
            let memory = end.memory.get_mut(&addr).ok_or("a write to nowhere")?;
            memory
                .get_mut(..bytes.len())
                .ok_or("a write past the sink")?
                .copy_from_slice(&bytes);
        }
        let buffer = end.posted.pop().ok_or("a message without a receive")?;
        let len = (wire.message.emit().len() + wire.payload.len()) as u32;
        let parsed = Message::parse(&wire.message.emit(), len);
        if parsed != Ok(wire.message) {
            return Err("a message that does not come back from its bytes");
        }
        end.payload.insert(buffer, wire.payload);
        end.machine
            .on_message(buffer, &wire.message)
            .map_err(|_| "a violation")
    }

    /// The oldest bytes are transmitted.
    pub(crate) fn transmitted(&mut self, at: usize) {
        let end = &mut self.ends[at];
        if let Some(bytes) = end.out.pop_front() {
            end.machine.transmitted(bytes);
        }
    }

    pub(crate) fn is_transmitting(&self, at: usize) -> bool {
        !self.ends[at].out.is_empty()
    }

    pub(crate) fn is_locking(&self, at: usize) -> bool {
        self.ends[at].locking.is_some()
    }

    /// One action of the machine; false: there is none.
    pub(crate) fn poll(&mut self, at: usize) -> Result<bool, Fault> {
        let end = &mut self.ends[at];
        let Some(action) = end.machine.poll() else {
            return Ok(false);
        };
        match action {
            Action::Repost { buffer } => {
                end.payload
                    .remove(&buffer)
                    .ok_or("a receive posted twice")?;
                end.posted.push(buffer);
            }
            Action::Urgent { buffer, off } => {
                let payload = end.payload.get(&buffer).ok_or("urgent in no receive")?;
                end.urgent
                    .push(*payload.get(off as usize).ok_or("urgent outside")?);
            }
            Action::Unlock { index } => {
                let slot = index as usize % usize::from(self.sources);
                if self.updates_unlock {
                    end.locks[slot] = locks::word(index, locks::FREE);
                }
            }
            Action::SourceDone { op } => end.done(op)?,
            Action::Send { message, payload } => {
                let payload = payload.map_or(Vec::new(), |run| end.take_out(run));
                if payload.len() > self.payload as usize {
                    return Err("a payload that does not fit");
                }
                self.wires[1 - at].push_back(Wire {
                    message,
                    payload,
                    write: None,
                });
            }
            Action::Write {
                from,
                addr,
                message,
                ..
            } => {
                let bytes = match from {
                    From::Ring(run) => end.take_out(run),
                    From::Source { op, off, len, last } => {
                        let (_, from, _) = end
                            .sources
                            .iter()
                            .find(|(of, ..)| *of == op)
                            .ok_or("a write from no source")?;
                        let bytes = end.read(from + u64::from(off), len)?;
                        if last {
                            end.done(op)?;
                        }
                        bytes
                    }
                };
                if !matches!(message.body, Body::RdmaWrCompl { len } if len as usize == bytes.len())
                {
                    return Err("a write of another length than it is told");
                }
                self.wires[1 - at].push_back(Wire {
                    message,
                    payload: Vec::new(),
                    write: Some((addr, bytes)),
                });
            }
        }
        Ok(true)
    }

    /// Nothing moves without the programs.
    pub(crate) fn is_quiet(&self) -> bool {
        (0..2).all(|at| {
            self.wires[at].is_empty()
                && !self.is_transmitting(at)
                && !self.is_locking(at)
                && self.ends[at].machine.clone().poll().is_none()
        })
    }

    /// What hangs although nothing is on its way: everything that was sent, the receiver knows of, or can be received.
    pub(crate) fn stuck(&self) -> Option<Fault> {
        for at in 0..2 {
            let (from, to) = (&self.ends[at], &self.ends[1 - at]);
            let idle = to.machine.look(0) == Next::Nothing || to.machine.look(0) == Next::End;
            if !idle || to.fetch.is_some() {
                // The program that receives has something to do first.
                continue;
            }
            if to.got != from.sent.len() {
                return Some("bytes that never arrive");
            }
            if from.shut && !to.machine.peer_closed() {
                return Some("an end that is never told");
            }
            if !from.sources.is_empty() {
                return Some("a source that is never done");
            }
        }
        None
    }

    /// Let everything run, with receivers that take all.
    pub(crate) fn drain(&mut self) -> Result<(), Fault> {
        for _ in 0..100_000 {
            let mut moved = false;
            for at in 0..2 {
                while self.poll(at)? {
                    moved = true;
                }
                self.lock(at);
                self.transmitted(at);
                moved |= !self.wires[at].is_empty();
                self.deliver(at)?;
                if self.may(at, Call::Recv(3)) {
                    let before = self.ends[at].clone();
                    self.call(at, Call::Recv(3))?;
                    moved |= before != self.ends[at];
                }
            }
            if !moved && self.is_quiet() {
                if (0..2).any(|at| self.may(at, Call::Recv(1))) {
                    return Err("bytes that never arrive");
                }
                return self.stuck().map_or(Ok(()), Err);
            }
        }
        Err("it does not come to rest")
    }
}

impl End {
    /// New bytes of the stream.
    fn make(&mut self, at: usize, len: u32) -> Vec<u8> {
        let from = self.sent.len();
        self.sent
            .extend((from..from + len as usize).map(|place| byte(at, place)));
        self.sent[from..].to_vec()
    }

    fn place(&mut self, bytes: Vec<u8>) -> u64 {
        self.ops += 1;
        let addr = self.ops << 16;
        self.memory.insert(addr, bytes);
        addr
    }

    fn read(&self, addr: u64, len: u32) -> Result<Vec<u8>, Fault> {
        let (start, memory) = self
            .memory
            .range(..=addr)
            .next_back()
            .ok_or("a read of nothing")?;
        let off = (addr - start) as usize;
        let bytes = memory.get(off..off + len as usize);
        bytes.map(<[u8]>::to_vec).ok_or("a read out of bounds")
    }

    fn take_out(&mut self, run: Run) -> Vec<u8> {
        self.out.push_back(run.len);
        (0..run.len as usize)
            .map(|i| self.ring[(run.off as usize + i) % self.ring.len()])
            .collect()
    }

    fn done(&mut self, op: Op) -> Result<(), Fault> {
        let at = self
            .sources
            .iter()
            .position(|(of, ..)| *of == op)
            .ok_or("a source done twice")?;
        let (_, addr, _) = self.sources.remove(at);
        // The program writes to it again.
        if let Some(memory) = self.memory.get_mut(&addr) {
            memory.fill(0xdd);
        }
        Ok(())
    }

    /// Copy a source, tell the machine, and let the program overwrite it.
    fn copy_and_spoil(&mut self, op: Op) {
        let Some(index) = self.sources.iter().position(|(of, ..)| *of == op) else {
            return;
        };
        let (_, addr, _) = self.sources[index];
        let Some(bytes) = self.memory.get(&addr).cloned() else {
            return;
        };
        let len = bytes.len() as u32;
        let copy = self.place(bytes);
        if let Some(memory) = self.memory.get_mut(&addr) {
            memory.fill(0xdd);
        }
        self.sources[index].1 = copy;
        self.machine.move_source(
            op,
            Buffer {
                addr: copy,
                key: 1,
                len,
            },
        );
    }

    fn check(&mut self, sent: &[u8], bytes: &[u8]) -> Result<(), Fault> {
        let want = sent
            .get(self.got..self.got + bytes.len())
            .ok_or("more bytes than were sent")?;
        if want != bytes {
            return Err("other bytes than were sent");
        }
        self.got += bytes.len();
        Ok(())
    }
}
