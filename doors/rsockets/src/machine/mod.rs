//! The state machine of one connection: no sockets, no clock, no memory.
//!
//! ```text
//!   heard(word)      a message arrived                     grant()     the message for the peer, if any
//!   entry_wanted()   -> entry(buffer)                      write(max)  the destination of the next bytes
//!   consumed(n)      the program has read n bytes          said(end)   we have announced an end to the peer
//! ```
//!
//! Each side owns a receive buffer of two halves and a table of two entries. It grants a half to its peer by writing an entry into the peer's
//! table. The peer fills the half from beginning to end with Writes, and announces the length of each by a message. So the bytes arrive in order
//! around the buffer, and a half is granted again when as many bytes as it has have been read. Messages take receives, so they have credits of
//! their own.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use crate::wire::{Buffer, ENTRY_LEN, Greeting, MAP_LEN, MAX_TRANSFER, Message, Order};

/// Messages that take a receive without a credit (table entries, credits, ends); receives for them are posted in addition to those of the
/// credits.
pub const SPARE: u16 = 32;
/// This many of a peer's credits are left unused if the peer posts no additional receives (and cannot ask us to retry: iWARP ends the
/// connection).
const RESERVE: u16 = 8;

/// The parameters of our side.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Data messages that we take, beyond those that the program has read.
    pub credits: u16,
    /// Half of the receive buffer, in bytes; not 0.
    pub half: u32,
    /// Entries of our iomap table.
    pub maps: u16,
}

/// The peer did what no peer may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// More bytes than the receive buffer had room for.
    #[error("{0} bytes that there was no room for")]
    TooMuch(u32),
    /// More messages than it had credits for.
    #[error("a message without a credit")]
    NoCredit,
    /// An iomap entry that there is not.
    #[error("iomap entry {0} of a table that has fewer")]
    NoSuchMap(u32),
    /// A message of an unknown kind.
    #[error(transparent)]
    Unknown(#[from] crate::wire::Unknown),
}

/// A message for the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// To be written first: an entry of its table.
    pub entry: Option<Entry>,
    pub message: Message,
}

/// An entry for the peer's table: its place in the table, and the half of our receive buffer that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Address of the entry at the peer.
    pub addr: u64,
    /// The table's key.
    pub key: u32,
    /// Offset of the half in our receive buffer.
    pub off: u32,
    pub len: u32,
}

/// The destination of the next bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Address at the peer.
    pub addr: u64,
    pub key: u32,
    /// Bytes.
    pub len: u32,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Endpoint {
    // The peer's grants to us.
    sent: u16,
    limit: u16,
    reserve: u16,
    /// Messages without a credit that the peer may not have seen yet.
    uncounted: u16,
    slot: usize,
    room: Buffer,
    peer: Greeting,
    entry: u32,
    // Our grants to the peer.
    config: Config,
    /// Data messages that the program has read to their end.
    taken: u16,
    granted: u16,
    arrived: u16,
    grant_at: u16,
    lens: VecDeque<u32>,
    /// Bytes of the first message that have been read.
    head: u32,
    read_at: u32,
    readable: u32,
    /// Bytes that the peer may still write.
    open: u32,
    /// Bytes read, and not handed out again.
    free: u32,
    next_half: u32,
    // Ends.
    peer_shut: bool,
    peer_gone: bool,
    we_shut: bool,
    we_left: bool,
}

impl Endpoint {
    /// Both have greeted each other.
    pub fn new(config: Config, peer: Greeting) -> Endpoint {
        Endpoint {
            sent: 0,
            limit: peer.credits,
            reserve: if peer.kin.is_some() {
                0
            } else {
                RESERVE.min(peer.credits / 4)
            },
            uncounted: 0,
            slot: 0,
            room: peer.data,
            peer,
            // The greeting contains the first half, in place of entry 0.
            entry: 1,
            config,
            taken: 0,
            granted: config.credits,
            arrived: 0,
            grant_at: config.credits / 2,
            lens: VecDeque::new(),
            head: 0,
            read_at: 0,
            readable: 0,
            open: config.half,
            free: config.half,
            next_half: config.half,
            peer_shut: false,
            peer_gone: false,
            we_shut: false,
            we_left: false,
        }
    }

    // ---- receiving -------------------------------------------------------------------------------------------------

    /// A message came.
    ///
    /// # Errors
    /// [`Violation`]: the connection cannot go on.
    pub fn heard(&mut self, word: u32) -> Result<Message, Violation> {
        let message = Message::decode(word)?;
        match message {
            Message::Data(len) => {
                self.count()?;
                if len > self.open {
                    return Err(Violation::TooMuch(len));
                }
                self.open -= len;
                if len == 0 {
                    self.taken = self.taken.wrapping_add(1);
                } else {
                    self.readable += len;
                    self.lens.push_back(len);
                }
            }
            Message::Map(index) => {
                if index >= u32::from(self.config.maps) {
                    return Err(Violation::NoSuchMap(index));
                }
                // Others count it among their data messages and never get that credit back; here it comes back at once.
                self.count()?;
                self.taken = self.taken.wrapping_add(1);
            }
            Message::Credit(limit) => {
                self.limit = limit;
                self.uncounted = 0;
            }
            Message::Disconnect => self.peer_gone = true,
            Message::Shutdown => self.peer_shut = true,
            Message::Keepalive => {}
        }
        Ok(message)
    }

    fn count(&mut self) -> Result<(), Violation> {
        if self.arrived == self.granted {
            return Err(Violation::NoCredit);
        }
        self.arrived = self.arrived.wrapping_add(1);
        Ok(())
    }

    /// Bytes that can be read.
    pub fn readable(&self) -> usize {
        self.readable as usize
    }

    /// The bytes that can be read next in one piece, `skip` bytes on: offset in the receive buffer, and how many.
    pub fn next_run(&self, skip: usize) -> (usize, usize) {
        let left = self.readable().saturating_sub(skip);
        let size = self.config.half as usize * 2;
        let at = (self.read_at as usize + skip) % size;
        (at, left.min(size - at))
    }

    /// The program has read so many bytes.
    pub fn consumed(&mut self, bytes: usize) {
        let mut left = (bytes as u64).min(u64::from(self.readable)) as u32;
        self.readable -= left;
        self.free += left;
        self.read_at = ((u64::from(self.read_at) + u64::from(left))
            % (u64::from(self.config.half) * 2)) as u32;
        while left > 0
            && let Some(first) = self.lens.front()
        {
            let rest = first - self.head;
            if left < rest {
                self.head += left;
                break;
            }
            left -= rest;
            self.head = 0;
            self.lens.pop_front();
            self.taken = self.taken.wrapping_add(1);
        }
    }

    /// The message that the peer needs now, if any.
    pub fn grant(&mut self) -> Option<Grant> {
        if self.peer_gone || self.we_left {
            return None;
        }
        let entry = self.free >= self.config.half;
        if !entry && self.taken.wrapping_sub(self.grant_at).cast_signed() < 0 {
            return None;
        }
        self.granted = self.taken.wrapping_add(self.config.credits);
        self.grant_at = self.taken.wrapping_add(self.config.credits / 2);
        let entry = entry.then(|| {
            let table = self.peer.table;
            let entry = Entry {
                addr: table
                    .addr
                    .wrapping_add(u64::from(self.entry) * ENTRY_LEN as u64),
                key: table.key,
                off: self.next_half,
                len: self.config.half,
            };
            self.free -= self.config.half;
            self.open += self.config.half;
            self.next_half = self.config.half - self.next_half;
            self.entry = (self.entry + 1) % table.len;
            entry
        });
        Some(Grant {
            entry,
            message: Message::Credit(self.granted),
        })
    }

    // ---- sending ---------------------------------------------------------------------------------------------------

    /// The entry of our table to look at, where no room is left.
    pub fn entry_wanted(&self) -> Option<usize> {
        (self.room.len == 0).then_some(self.slot)
    }

    /// The entry names a half of the peer's receive buffer. This call consumes it; the caller clears it.
    pub fn entry(&mut self, buffer: Buffer) {
        if self.room.len == 0 {
            self.room = buffer;
        }
    }

    /// Whether bytes may be sent: there is a credit, and room.
    pub fn can_write(&self) -> bool {
        self.has_credit() && self.room.len > 0
    }

    /// Whether a data message may be sent.
    pub fn has_credit(&self) -> bool {
        let left = self.limit.wrapping_sub(self.sent);
        u32::from(left) > u32::from(self.reserve) + u32::from(self.uncounted)
    }

    /// The destination of up to `max` bytes; a message with their number follows them.
    pub fn write(&mut self, max: u32) -> Option<Write> {
        if !self.can_write() || max == 0 {
            return None;
        }
        let len = max.min(self.room.len).min(MAX_TRANSFER);
        let write = Write {
            addr: self.room.addr,
            key: self.room.key,
            len,
        };
        self.sent = self.sent.wrapping_add(1);
        self.room.addr = self.room.addr.wrapping_add(u64::from(len));
        self.room.len -= len;
        if self.room.len == 0 {
            self.slot = 1 - self.slot;
        }
        Some(write)
    }

    /// Whether the peer is weft.
    pub fn is_kin(&self) -> bool {
        self.peer.kin.is_some()
    }

    /// Entries of the peer's iomap table.
    pub fn peer_maps(&self) -> u16 {
        self.peer.maps
    }

    /// The place of the peer's iomap entry, to be followed by [`Message::Map`]; takes a credit.
    pub fn map(&mut self, index: u16) -> Option<Write> {
        if index >= self.peer.maps || !self.has_credit() {
            return None;
        }
        if self.peer.kin.is_some() {
            self.sent = self.sent.wrapping_add(1);
        } else {
            self.uncounted = self.uncounted.saturating_add(1);
        }
        let table = self.peer.table;
        let begin = u64::from(table.len) * ENTRY_LEN as u64;
        Some(Write {
            addr: table
                .addr
                .wrapping_add(begin)
                .wrapping_add(u64::from(index) * MAP_LEN as u64),
            key: table.key,
            len: MAP_LEN as u32,
        })
    }

    /// The order of bytes in the peer's memory.
    pub fn order(&self) -> Order {
        self.peer.order
    }

    // ---- ends ------------------------------------------------------------------------------------------------------

    /// We stop sending; returns the message for the peer.
    pub fn shut_down(&mut self) -> Option<Message> {
        if self.we_shut || self.peer_gone {
            self.we_shut = true;
            return None;
        }
        self.we_shut = true;
        if self.peer_shut {
            // Neither direction is left.
            return self.leave();
        }
        Some(Message::Shutdown)
    }

    /// We stop sending and receiving; returns the message for the peer.
    pub fn leave(&mut self) -> Option<Message> {
        let told = self.we_left || self.peer_gone;
        self.we_shut = true;
        self.we_left = true;
        (!told).then_some(Message::Disconnect)
    }

    /// Whether the peer has announced that no bytes come after those that are readable now.
    pub fn peer_is_done(&self) -> bool {
        self.peer_shut || self.peer_gone
    }

    /// Whether the peer has stopped receiving.
    pub fn peer_is_gone(&self) -> bool {
        self.peer_gone
    }

    /// Whether we have announced that we stop sending.
    pub fn is_shut(&self) -> bool {
        self.we_shut
    }

    /// Whether both directions have ended in order.
    pub fn is_over(&self) -> bool {
        self.peer_gone || self.we_left || (self.we_shut && self.peer_shut)
    }
}
