//! The pure protocol of a connection: the messages on the wire, and their order.
//!
//! An [`Endpoint`] opens no socket, reads no clock and touches no memory. It works on lengths, offsets in its send buffer, and names of
//! sources. Its owner, the *driver*, does the rest. Three families of methods:
//!
//! * **Calls**: [`append`](Endpoint::append) (BSDP), [`source`](Endpoint::source) and [`move_source`](Endpoint::move_source) (ZSDP, AZ-SDP),
//!   [`shutdown`](Endpoint::shutdown); [`look`](Endpoint::look) and [`taken`](Endpoint::taken) of the program that receives,
//!   [`offer_sink`](Endpoint::offer_sink), [`cancel_sink`](Endpoint::cancel_sink).
//! * **Events**: [`on_message`](Endpoint::on_message), [`transmitted`](Endpoint::transmitted). A [`Violation`] is a peer that breaks the
//!   protocol: the driver ends the connection. Every value from the peer is checked before it changes anything.
//! * **Actions**: after any of the above the driver calls [`poll`](Endpoint::poll) until it returns `None`, and carries out each action
//!   before the next call. The messages of actions are sent in this order.
//!
//! The lock of a source, a word in the receiver's memory, preserves the bytes of the time of the send ([`crate::wire::locks`]; figure 3b of the
//! paper). The machine reports when a lock is free again ([`Action::Unlock`]); the drivers take it. `tests/model.rs` explores this code,
//! including the locks.

mod credits;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod policy;
mod rx;
mod tx;

use std::collections::VecDeque;

use credits::Credits;
pub use rx::Next;

use crate::wire::{Body, Buffer, Message};

/// Parameters of a connection, after both ends have greeted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Receives that the peer has posted: at least [`crate::wire::MIN_RECEIVES`].
    pub send_receives: u16,
    /// Receives that we have posted: at least as many.
    pub recv_receives: u16,
    /// Bytes of payload that fit one of the peer's.
    pub send_payload: u32,
    /// Payload bytes that fit into one of our receives.
    pub recv_payload: u32,
    /// Bytes of our send buffer.
    pub send_buffer: u32,
    /// The number of our sources that may be in flight.
    pub sources: u16,
    /// Sources of the peer's that may be in flight.
    pub peer_sources: u16,
}

/// A source's name: the driver chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Op(pub u64);

/// The state of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The peer does not know of it.
    Queued,
    /// The peer knows of it, by this index.
    Flying(u32),
    /// It is complete, or there is none of this name.
    Gone,
}

/// The bytes of an RDMA Write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum From {
    /// Our send buffer.
    Ring(Run),
    Source {
        op: Op,
        /// From this offset on.
        off: u32,
        /// Bytes.
        len: u32,
        /// The last bytes of it: it is complete when they have been transmitted.
        last: bool,
    },
}

/// A run of bytes in the send buffer; it may go on at the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// Offset of the first byte.
    pub off: u32,
    /// Bytes.
    pub len: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a message, with this payload. Ring bytes are free again by [`Endpoint::transmitted`].
    Send {
        message: Message,
        /// The payload of a [`Body::Data`].
        payload: Option<Run>,
    },
    /// RDMA Write to a sink, followed by the message.
    Write {
        from: From,
        /// The sink's first byte.
        addr: u64,
        key: u32,
        message: Message,
    },
    /// Post this receive again.
    Repost {
        /// The receive.
        buffer: u32,
    },
    /// An urgent byte has come: take it from there now.
    Urgent {
        /// The receive.
        buffer: u32,
        /// The offset in its payload.
        off: u32,
    },
    /// The lock of this source is free again: its bytes are where [`Endpoint::look`] says from now on.
    Unlock {
        /// The source.
        index: u32,
    },
    /// A source's bytes have been fetched: its memory is the program's.
    SourceDone {
        /// The source.
        op: Op,
    },
}

/// A violation of the protocol by the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Violation {
    /// A message arrived although no receive was left.
    #[error("a message without a credit")]
    NoCredit,
    /// A message number that is not the next one.
    #[error("a message out of sequence")]
    Sequence,
    /// More credits returned than were taken.
    #[error("credits that were never taken")]
    Credits,
    /// Data after the half-close.
    #[error("data after the end")]
    AfterEnd,
    /// More payload than fits a receive.
    #[error("a payload that does not fit")]
    Payload,
    /// More sources than there are locks.
    #[error("more sources than locks")]
    Sources,
    /// A source, completion or update with the wrong index or length.
    #[error("a source out of order")]
    Order,
    /// A message about a sink or a source that there is not.
    #[error("a message that has no place here")]
    Unexpected,
}

/// The part of `SendStats` that the machine counts. They are not part of the state: two endpoints that differ only here are equal.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Messages sent, credits included.
    pub messages: u64,
    /// Messages that only returned credits.
    pub credit_messages: u64,
    /// Data messages, and those of them that carried bytes of several sends (reverse packetisation).
    pub data_messages: u64,
    /// Of several sends.
    pub coalesced: u64,
    /// Sends that found no credit, and waited in the send buffer.
    pub stalls: u64,
    /// Sources announced, and moved to a copy.
    pub sources: u64,
    pub moved: u64,
    /// Sinks that were written to.
    pub sinks: u64,
}

impl PartialEq for Stats {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Stats {}

impl std::hash::Hash for Stats {
    fn hash<H: std::hash::Hasher>(&self, _: &mut H) {}
}

/// One end of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    config: Config,
    credits: Credits,
    tx: tx::Sender,
    rx: rx::Receiver,
    /// An action without a message.
    done: VecDeque<Action>,
    stats: Stats,
}

impl Endpoint {
    /// The end of a connection that was just made.
    pub fn new(config: &Config) -> Endpoint {
        Endpoint {
            config: *config,
            credits: Credits::new(config.send_receives, config.recv_receives),
            tx: tx::Sender::default(),
            rx: rx::Receiver::default(),
            done: VecDeque::new(),
            stats: Stats::default(),
        }
    }

    // ---- sending ---------------------------------------------------------------------------------------------------

    /// Bytes that the send buffer has room for.
    pub fn room(&self) -> u32 {
        self.tx.room(&self.config)
    }

    /// Queue bytes: where the driver puts them in the send buffer, before it polls. At most [`Endpoint::room`].
    pub fn append(&mut self, len: u32) -> Run {
        self.tx.append(len, false, &self.config, &mut self.stats)
    }

    /// Queue one urgent byte. The send buffer must have room for it.
    pub fn append_urgent(&mut self) -> Run {
        self.tx.append(1, true, &self.config, &mut self.stats)
    }

    /// The short way of a small send with nothing before it: the message to send at once, with the bytes behind it. `None`, with nothing
    /// changed: it takes the usual way.
    pub fn send_now(&mut self, len: u32) -> Option<Message> {
        if len == 0
            || len > self.config.send_payload
            || !self.done.is_empty()
            || !self.rx.outbox.is_empty()
            || !self.tx.is_empty()
        {
            return None;
        }
        let body = Body::Data { len, urgent: false };
        let message = self.credits.take_data(body, false)?;
        self.tx.advance(len);
        self.stats.messages += 1;
        self.stats.data_messages += 1;
        Some(message)
    }

    /// Queues a source: bytes that the peer fetches in place. [`Action::SourceDone`] reports that it has.
    pub fn source(&mut self, op: Op, at: Buffer) {
        self.tx.source(op, at);
    }

    /// Whether the number of sources allows another one to be sent to the peer at once.
    pub fn may_source(&self) -> bool {
        self.tx.sources() < usize::from(self.config.sources)
    }

    /// The state of a source.
    pub fn stage(&self, op: Op) -> Stage {
        self.tx.stage(op)
    }

    /// The bytes of a source are at another place from now on; it keeps its number. If the peer knows of it, the caller holds its lock, and the peer
    /// releases it after it has received the move.
    pub fn move_source(&mut self, op: Op, at: Buffer) {
        self.stats.moved += 1;
        self.tx.move_source(op, at);
    }

    /// So many bytes of the send buffer have been transmitted, oldest first.
    pub fn transmitted(&mut self, bytes: u32) {
        self.tx.transmitted(bytes);
    }

    /// Half-closes: the peer is told after everything that is queued.
    pub fn shutdown(&mut self) {
        self.tx.shutdown();
    }

    /// The half-close that [`Endpoint::shutdown`] asked for has been sent.
    pub fn is_shut(&self) -> bool {
        self.tx.is_finished()
    }

    /// Nothing that was sent is unfinished: all is with the peer, and no source is left.
    pub fn is_flushed(&self) -> bool {
        self.tx.is_empty() && self.tx.sources() == 0
    }

    // ---- receiving -------------------------------------------------------------------------------------------------

    /// The bytes to receive after the next `skip`.
    pub fn look(&self, skip: u64) -> Next {
        self.rx.look(skip)
    }

    /// The program has taken the next bytes: not more than [`Endpoint::look`] returned.
    pub fn taken(&mut self, bytes: u32) {
        self.rx.taken(bytes, &mut self.done);
    }

    /// The program has read up to the urgent mark, and continues past it.
    pub fn pass_mark(&mut self) {
        self.rx.pass_mark();
    }

    /// Bytes that can be received.
    pub fn readable(&self) -> u64 {
        self.rx.readable()
    }

    /// Whether the peer has announced that it sends no more.
    pub fn peer_closed(&self) -> bool {
        self.rx.is_ended()
    }

    /// The peer has urgent bytes that it could not send yet.
    pub fn urgent_pends(&self) -> bool {
        self.rx.pending
    }

    /// Urgent bytes stay in the stream (`SO_OOBINLINE`).
    pub fn set_inline(&mut self, inline: bool) {
        self.rx.inline = inline;
    }

    /// Open memory to the peer for the next bytes, while there are none and none has been opened. False: not now.
    pub fn offer_sink(&mut self, at: Buffer) -> bool {
        self.rx.offer_sink(at)
    }

    /// Whether the peer may write to the sink.
    pub fn has_sink(&self) -> bool {
        self.rx.has_sink()
    }

    /// Ask for the sink back: it is when [`Endpoint::has_sink`] says so.
    pub fn cancel_sink(&mut self) {
        self.rx.cancel_sink();
    }

    // ---- events and actions ----------------------------------------------------------------------------------------

    /// A receive completed with a message; `buffer` names it, and has the payload. It may be posted again when [`Action::Repost`] says so.
    ///
    /// # Errors
    /// [`Violation`]: the connection cannot go on.
    pub fn on_message(&mut self, buffer: u32, message: &Message) -> Result<(), Violation> {
        self.credits.arrived(message)?;
        if message.pending {
            self.rx.pending = true;
        }
        match message.body {
            Body::Data { len, urgent } if len > 0 => {
                if len > self.config.recv_payload {
                    return Err(Violation::Payload);
                }
                return self.rx.on_data(buffer, len, urgent, &mut self.done);
            }
            Body::Data { .. } => {}
            Body::SrcAvail { index, at } => {
                self.rx.on_source(index, at, self.config.peer_sources)?;
            }
            Body::SrcUpdate { index, at } => {
                self.rx.on_update(index, at)?;
                self.done.push_back(Action::Unlock { index });
            }
            Body::RdmaRdCompl { index, len } => {
                let op = self.tx.on_read(index, len)?;
                self.done.push_back(Action::SourceDone { op });
            }
            Body::SinkAvail { position, at } => self.tx.on_sink(position, at),
            Body::RdmaWrCompl { len } => self.rx.on_written(len)?,
            Body::SinkAvailCancel => {
                self.tx.drop_sink();
                self.rx.acknowledge()?;
            }
            Body::SinkCancelAck => self.rx.on_cancel_ack()?,
            Body::DisConn => self.rx.on_end()?,
        }
        self.done.push_back(Action::Repost { buffer });
        Ok(())
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Action> {
        if let Some(action) = self.done.pop_front() {
            if matches!(action, Action::Repost { .. }) {
                self.credits.reposted();
            }
            return Some(action);
        }
        let pending = self.tx.has_urgent();
        if let Some(&body) = self.rx.outbox.front() {
            if let Some(message) = self.credits.take(body, pending) {
                self.rx.outbox.pop_front();
                return Some(self.send(message, None));
            }
        } else if let Some(action) = self
            .tx
            .poll(&self.config, &mut self.credits, &mut self.stats)
        {
            self.stats.messages += 1;
            return Some(action);
        }
        let last = self.is_shut() && self.peer_closed() && self.is_flushed();
        if last && self.rx.outbox.is_empty() {
            // No credits are needed, and the peer may be gone.
            return None;
        }
        let message = self.credits.take_last(pending)?;
        self.stats.credit_messages += 1;
        Some(self.send(message, None))
    }

    fn send(&mut self, message: Message, payload: Option<Run>) -> Action {
        self.stats.messages += 1;
        Action::Send { message, payload }
    }

    /// The statistics so far.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}
