//! The memory of sends and receives, as the machine accesses it through its host.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

use weft_verbs::{Access, Mr, Pd, RawMemory};

use crate::completion::Status;
use crate::machine::{Event, Host, Part, PeerId};
use crate::wire::{Meta, Target};

/// A large message is written in pieces of this length: a failure loses one piece only.
const PIECE: u64 = 1 << 20;
pub(crate) struct Send {
    /// `None`: it has no bytes.
    pub(crate) memory: Option<RawMemory>,
    pub(crate) context: Option<usize>,
    pub(crate) meta: Meta,
    pub(crate) mr: Option<Mr>,
    /// Writes of it that the queue pair still has.
    pub(crate) writes: usize,
    /// Its status, once it has ended.
    pub(crate) ended: Option<Status>,
}

pub(crate) struct Recv {
    pub(crate) memory: RawMemory,
    pub(crate) context: usize,
    pub(crate) mr: Option<Mr>,
    /// The receive that takes many messages, of which this is one.
    pub(crate) parent: Option<u64>,
}

/// A receive that takes many messages.
pub(crate) struct Many {
    pub(crate) memory: RawMemory,
    pub(crate) context: usize,
    pub(crate) used: usize,
    /// With less than so many bytes left it takes no more.
    pub(crate) least: usize,
    /// Messages that are still coming.
    pub(crate) coming: usize,
    /// It takes no more.
    pub(crate) spent: bool,
}

pub(crate) struct Write {
    pub(crate) send: u64,
    pub(crate) to: PeerId,
    pub(crate) target: Target,
    pub(crate) range: Range<u64>,
    pub(crate) id: u64,
    pub(crate) way: Way,
}

/// The path of a piece.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Datagrams,
    /// The last one tells the peer that everything is written.
    Connection {
        last: bool,
    },
}

/// A peer would take a connection.
pub(crate) struct Offer {
    pub(crate) peer: PeerId,
    pub(crate) port: u16,
    pub(crate) token: u64,
}

/// The machine's host: memory, and what waits to be posted.
pub(crate) struct Memory {
    pub(crate) pd: Pd,
    pub(crate) sends: HashMap<u64, Send>,
    pub(crate) recvs: HashMap<u64, Recv>,
    pub(crate) many: HashMap<u64, Many>,
    pub(crate) next: u64,
    pub(crate) writes: VecDeque<Write>,
    /// Peers with a connection.
    pub(crate) connected: HashSet<PeerId>,
    pub(crate) offers: Vec<Offer>,
    pub(crate) events: Vec<Event>,
}

impl Memory {
    /// A number for an operation.
    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The latest receive with this context that is not complete.
    pub(crate) fn latest(&self, context: usize) -> Option<u64> {
        let whole = self.recvs.iter().filter(|(_, r)| r.parent.is_none());
        let recvs = whole.map(|(number, r)| (r.context, *number));
        let many = self.many.iter().map(|(number, m)| (m.context, *number));
        let named = recvs.chain(many).filter(|(of, _)| *of == context);
        named.map(|(_, number)| number).max()
    }
}

impl Host for Memory {
    fn carve(&mut self, parent: u64, len: u64) -> Part {
        let number = self.number();
        let Some(many) = self.many.get_mut(&parent) else {
            // The machine names only our own receives.
            return Part {
                recv: number,
                room: 0,
                last: true,
            };
        };
        let left = many.memory.len() - many.used;
        let room = left.min(usize::try_from(len).unwrap_or(usize::MAX));
        let memory = many.memory.slice(many.used, room);
        many.used += room;
        many.spent = left - room < many.least.max(1);
        many.coming += 1;
        let last = many.spent;
        if let Ok(memory) = memory {
            let recv = Recv {
                memory,
                context: many.context,
                mr: None,
                parent: Some(parent),
            };
            self.recvs.insert(number, recv);
        }
        Part {
            recv: number,
            room: room as u64,
            last,
        }
    }

    fn place(&mut self, recv: u64, at: u64, bytes: &[u8]) {
        if let Some(recv) = self.recvs.get(&recv) {
            // The machine knows how long it is.
            let _ = recv.memory.write(at as usize, bytes);
        }
    }

    fn open(&mut self, recv: u64, len: u64) -> Option<Target> {
        let recv = self.recvs.get_mut(&recv)?;
        let part = recv.memory.slice(0, len as usize).ok()?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = self.pd.reg_raw(&part, access);
        let mr = mr.inspect_err(|e| tracing::warn!("cannot open memory to a peer: {e}"));
        let mr = recv.mr.insert(mr.ok()?);
        Some(Target {
            rkey: mr.rkey(),
            addr: mr.addr(),
        })
    }

    fn close(&mut self, recv: u64) {
        let mr = self.recvs.get_mut(&recv).and_then(|recv| recv.mr.take());
        // Waits for a peer of this host that is in it. One that does not go loses its connection.
        if let Some(Err((_, error))) = mr.map(Mr::deregister) {
            tracing::warn!("memory that was open to a peer: {error}");
        }
    }

    fn write(
        &mut self,
        send: u64,
        to: PeerId,
        target: Target,
        range: Range<u64>,
        id: u64,
        whole: bool,
    ) -> bool {
        let Some(state) = self.sends.get_mut(&send) else {
            return false;
        };
        // Parts go by datagrams: only of a whole does the end of it say that all is there.
        let connected = whole && self.connected.contains(&to);
        let mut at = range.start;
        while at < range.end {
            let end = (at + PIECE).min(range.end);
            let way = match (connected, end == range.end) {
                (false, _) => Way::Datagrams,
                (true, last) => Way::Connection { last },
            };
            state.writes += 1;
            self.writes.push_back(Write {
                send,
                to,
                target,
                range: at..end,
                id,
                way,
            });
            at = end;
        }
        connected
    }

    fn offered(&mut self, peer: PeerId, port: u16, token: u64) {
        self.offers.push(Offer { peer, port, token });
    }

    fn writing(&self, send: u64) -> bool {
        self.sends.get(&send).is_some_and(|send| send.writes > 0)
    }

    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

/// Copies bytes from `at` on of ranges that lie one behind the other.
pub(crate) fn read_ranges(ranges: &[RawMemory], mut at: usize, mut buffer: &mut [u8]) {
    for range in ranges {
        if at >= range.len() {
            at -= range.len();
            continue;
        }
        let (part, rest) = buffer.split_at_mut((range.len() - at).min(buffer.len()));
        // It fits.
        let _ = range.read(at, part);
        (at, buffer) = (0, rest);
        if buffer.is_empty() {
            return;
        }
    }
}
