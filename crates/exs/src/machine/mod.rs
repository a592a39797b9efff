//! The pure protocol of EXS connections: what goes over the wire, and when, for the program's calls.
//!
//! An [`Endpoint`] is one end of a connected socket. It opens no socket, reads no clock, touches no memory and knows no
//! verbs: it deals in positions, lengths and names of operations, and its owner, the *driver*, does the rest. Three
//! families of methods:
//!
//! * **Calls** of the program: [`send`](Endpoint::send), [`recv`](Endpoint::recv), [`cancel`](Endpoint::cancel),
//!   [`shutdown`](Endpoint::shutdown), [`recycle`](Endpoint::recycle).
//! * **Events** that the driver saw, in the order of its completion queue: [`on_message`](Endpoint::on_message),
//!   [`on_imm`](Endpoint::on_imm), [`on_transferred`](Endpoint::on_transferred). A [`Violation`] is a peer that breaks
//!   the protocol: the driver ends the connection. Every value from the peer is checked before it changes anything.
//! * **Actions**: after any of the above the driver asks [`poll`](Endpoint::poll) until it says `None`, and carries out
//!   each action before it asks again. What an action sends goes out in this order.
//!
//! Two of these have a short way for the common case, small data with nothing before it: [`send_now`](Endpoint::send_now)
//! and [`take_now`](Endpoint::take_now) change the state as the usual way would, all at once, so that no operation has to be
//! named, kept and told.
//!
//! Every operation gets exactly one [`Action::Complete`]. Sends complete in the order of their calls, and so do
//! receives; one that is cancelled may be told earlier.
//!
//! The stream algorithm is that of `MacArthur` and Russell, *An Efficient Method for Stream Semantics over RDMA*
//! (figures 2 to 5), repaired where the model checker found it wanting; docs/spec/exs.md tells the story, and
//! `tests/model.rs` checks this very code.

mod credits;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod packet;
pub mod policy;
mod sends;
mod stream;

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

use credits::Credits;
use weft_wire::exs::Packet;
pub use weft_wire::exs::{Body, Design, Imm, Kind, Message, Mode, Remote, Transfer};

/// How the announcement of message `index` names its memory.
pub fn packet(index: u64, memory: Remote) -> Packet {
    let Remote { addr, rkey, len } = memory;
    Packet {
        index,
        addr,
        rkey,
        len,
    }
}

/// The longest transfer, and the longest message of a `SOCK_SEQPACKET`, in bytes.
pub const MAX_TRANSFER: u32 = 1 << 30;
/// Adverts, or sources, that may be outstanding in one direction.
pub const MAX_ADVERTS: usize = 1024;
/// Adverts that may be outstanding when those of the last phase were all in vain, until a direct transfer comes.
const WARY_ADVERTS: usize = 2;

/// Parameters of a connection, after both ends have said theirs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// The type of the socket.
    pub kind: Kind,
    /// The transfers of a stream, both ways. A `SOCK_SEQPACKET` has no use for it.
    pub mode: Mode,
    /// Control receives that the peer has posted: at least [`weft_wire::exs::MIN_CREDITS`].
    pub send_credits: u32,
    /// Control receives that we have posted: at least [`weft_wire::exs::MIN_CREDITS`].
    pub recv_credits: u32,
    /// The longest payload in a message of ours, in bytes; 0: none.
    pub small_send: u32,
    /// The longest payload in a message of the peer's, in bytes; 0: none.
    pub small_recv: u32,
    /// The peer's intermediate buffer.
    pub peer_ring: Option<Remote>,
    /// Bytes of our intermediate buffer; 0: none.
    pub own_ring_len: u32,
    /// Writes carry immediate data; without, a [`Body::Wrote`] follows each.
    pub immediate: bool,
    /// Which rules of the stream algorithm are kept.
    #[doc(hidden)]
    pub rules: Rules,
}

/// The rules of the stream algorithm, each of which the model checker can do without to show what it is there for.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Receives with an advert of an earlier phase stand in the way of adverts for later ones.
    pub check_k_a: bool,
    /// So do receives without an advert.
    pub check_k_b: bool,
    /// The sender's phase goes past that of an advert that it drops (fig. 8).
    pub advance_phase: bool,
    /// In an indirect phase an advert matches at exactly the sender's position (the paper's prose), not at or after it
    /// (fig. 2, line 3).
    pub exact_match: bool,
    /// The first advert of a phase has the position of the receiver, not what the estimates add up to.
    pub resync_seq: bool,
    /// Receives that got no advert when they were posted, or one in vain, get another when the buffer is empty.
    pub retry: bool,
    /// Sends take the short way only with no other before them.
    pub send_in_turn: bool,
    /// So do messages.
    pub take_in_turn: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            check_k_a: true,
            check_k_b: true,
            advance_phase: true,
            exact_match: true,
            resync_seq: true,
            retry: true,
            send_in_turn: true,
            take_in_turn: true,
        }
    }
}

/// An operation's name: the driver chooses it, unique among the outstanding ones, sends and receives together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// How a receive wants its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RecvFlags {
    /// It completes when it is full, or at the end of the stream (`MSG_WAITALL`).
    pub waitall: bool,
    /// Data that came in a message may stay there (in-place receive, interface paper 5.2).
    pub in_place: bool,
}

/// Why a call is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// A send after [`Endpoint::shutdown`].
    #[error("the socket is shut down for sending")]
    Shutdown,
    /// A message longer than [`MAX_TRANSFER`] bytes.
    #[error("the message is too long")]
    TooLong,
}

/// What became of a request to cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancel {
    /// The operation completes as cancelled: at once, or, a stream's send of which a part is out, when that part is through.
    Done,
    /// The peer has to give an advert back first. The operation completes as cancelled, or with its data if that was
    /// on its way.
    Pending,
    /// It has begun and will complete, or there is no such operation.
    TooLate,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// As asked.
    Done,
    /// A message was longer than its receive; the rest is lost.
    Truncated,
    /// The peer sends no more: `len` is 0, or what came for a WAITALL before that.
    Eof,
    /// Cancelled: `len` is what a WAITALL had got before.
    Canceled,
}

/// The end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Completion {
    /// The operation.
    pub op: OpId,
    /// Bytes sent or received.
    pub len: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// The data is not in the receive's memory but here, until [`Endpoint::recycle`].
    pub in_place: Option<InPlace>,
}

/// Data in a control receive's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InPlace {
    /// The buffer.
    pub buffer: u32,
    /// Where in its payload the data begins, in bytes.
    pub off: u32,
}

/// What the driver has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a message without payload.
    Send(Message),
    /// Give the peer the right to write to a receive's memory at `[off, off + len)` and send a [`Body::Advert`].
    Advertise {
        /// The receive.
        op: OpId,
        /// Where in its memory.
        off: u64,
        /// Bytes.
        len: u32,
        /// For the message.
        seq: u64,
        /// For the message.
        phase: u64,
        /// For the message.
        waitall: bool,
        /// For the message.
        credits: u16,
    },
    /// Give the peer the right to write to the start of a receive's memory and send a [`Body::PktAdvert`].
    AdvertisePacket {
        /// The receive.
        op: OpId,
        /// For the message.
        index: u64,
        /// Bytes.
        len: u32,
        /// For the message.
        credits: u16,
    },
    /// Give the peer the right to read a send's memory and send a [`Body::Source`]. It is not reported by
    /// [`Endpoint::on_transferred`]: the peer's answer completes the send.
    AdvertiseSource {
        /// The send.
        op: OpId,
        /// For the message.
        index: u64,
        /// Bytes.
        len: u32,
        /// For the message.
        credits: u16,
    },
    /// RDMA Write from a send's memory, with immediate data `imm`; or, where there is none, followed by a Send of
    /// [`Imm::message`]. One [`Endpoint::on_transferred`] either way.
    Write {
        /// The send.
        op: OpId,
        /// Where in its memory.
        off: u64,
        /// Bytes; 0 for an empty message.
        len: u32,
        /// The peer's memory.
        addr: u64,
        /// Its key.
        rkey: u32,
        /// The notification.
        imm: Imm,
        /// The last transfer of this send.
        last: bool,
    },
    /// Send a message with payload from a send's memory. One [`Endpoint::on_transferred`].
    SendSmall {
        /// The send.
        op: OpId,
        /// Where in its memory.
        off: u64,
        /// Bytes.
        len: u32,
        /// The message that goes before the payload.
        header: Message,
        /// The last transfer of this send.
        last: bool,
    },
    /// RDMA Read to the start of a receive's memory. One [`Endpoint::on_transferred`].
    Read {
        /// The receive.
        op: OpId,
        /// Bytes, not 0.
        len: u32,
        /// The peer's memory.
        addr: u64,
        /// Its key.
        rkey: u32,
    },
    /// Copy from our intermediate buffer to a receive's memory.
    Copy {
        /// The receive.
        op: OpId,
        /// Where in its memory.
        off: u64,
        /// Where in the buffer; the range does not wrap.
        ring_off: u32,
        /// Bytes.
        len: u32,
    },
    /// Copy from the payload in a control receive's buffer to a receive's memory.
    CopySmall {
        /// The receive.
        op: OpId,
        /// Where in its memory.
        off: u64,
        /// The buffer.
        buffer: u32,
        /// Where in the payload.
        buf_off: u32,
        /// Bytes.
        len: u32,
    },
    /// Post this control receive again.
    Repost {
        /// The buffer.
        buffer: u32,
    },
    /// Tell the program.
    Complete(Completion),
}

/// How a peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Violation {
    /// A message for which no control receive was left.
    #[error("a message without a credit")]
    NoCredit,
    /// More credits returned than were taken.
    #[error("credits that were never taken")]
    Credits,
    /// A message that has no place on such a connection, or not now.
    #[error("a message that has no place here")]
    Unexpected,
    /// Data or adverts after the half-close.
    #[error("data after the end")]
    AfterFin,
    /// An advert with a phase that its sender cannot be in.
    #[error("an advert of an impossible phase")]
    Phase,
    /// An advert, source or acknowledgement out of order.
    #[error("out of order")]
    Order,
    /// An advert of nothing, or of memory that wraps.
    #[error("an advert of impossible memory")]
    Memory,
    /// More than [`MAX_ADVERTS`] adverts or sources outstanding.
    #[error("too many adverts")]
    TooMany,
    /// A direct transfer for which there is no advert, or longer than it.
    #[error("a transfer that no advert allowed")]
    NoAdvert,
    /// More data than the intermediate buffer has room for, or beyond its end.
    #[error("the intermediate buffer is overfilled")]
    Overfilled,
    /// More buffer acknowledged than is in use.
    #[error("acknowledged what was never sent")]
    Ack,
    /// A transfer or message of a length that it cannot have.
    #[error("an impossible length")]
    Length,
}

/// What has happened on a connection. Counters only grow; two endpoints in the same state are equal whatever theirs say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Direct transfers sent; on a `SOCK_SEQPACKET` messages written or read.
    pub direct_sent: u64,
    /// Their bytes.
    pub direct_bytes_sent: u64,
    /// Indirect transfers sent, without those in messages.
    pub indirect_sent: u64,
    /// Their bytes.
    pub indirect_bytes_sent: u64,
    /// Messages with data sent.
    pub small_sent: u64,
    /// Their bytes.
    pub small_bytes_sent: u64,
    /// Sends all of whose bytes went directly.
    pub direct_sends: u64,
    /// Sends with bytes that did not.
    pub indirect_sends: u64,
    /// Direct transfers received.
    pub direct_received: u64,
    /// Their bytes.
    pub direct_bytes_received: u64,
    /// Indirect transfers received, without those in messages.
    pub indirect_received: u64,
    /// Their bytes.
    pub indirect_bytes_received: u64,
    /// Messages with data received.
    pub small_received: u64,
    /// Their bytes.
    pub small_bytes_received: u64,
    /// Changes between direct and indirect, as sender (stream paper table III).
    pub mode_switches: u64,
    /// Adverts (or sources) sent.
    pub adverts_sent: u64,
    /// Adverts (or sources) received.
    pub adverts_received: u64,
    /// Adverts received and thrown away unused.
    pub adverts_dropped: u64,
    /// Times that something waited for a credit.
    pub credit_stalls: u64,
    /// Times that a send waited for room in the peer's buffer.
    pub ring_stalls: u64,
    /// Requests to get adverts back.
    pub retracts: u64,
    /// Acknowledgements of freed buffer sent.
    pub acks: u64,
    /// Messages sent that said nothing but credits.
    pub credit_messages: u64,
    /// Whether the last attempt found no credit, so that a stall counts once.
    stalled: bool,
    /// Whether the last attempt found no room.
    full: bool,
}

impl Stats {
    /// Bytes sent, all ways together.
    pub fn bytes_sent(&self) -> u64 {
        self.direct_bytes_sent + self.indirect_bytes_sent + self.small_bytes_sent
    }

    /// `credits`, with a stall counted when there are none.
    fn stall(&mut self, credits: Option<u16>) -> Option<u16> {
        self.credit_stalls += u64::from(credits.is_none() && !self.stalled);
        self.stalled = credits.is_none();
        credits
    }

    /// The last transfer of a send has gone out.
    fn sent(&mut self, directly: bool) {
        if directly {
            self.direct_sends += 1;
        } else {
            self.indirect_sends += 1;
        }
    }

    fn ring_full(&mut self, full: bool) {
        self.ring_stalls += u64::from(full && !self.full);
        self.full = full;
    }
}

impl PartialEq for Stats {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Stats {}

impl Hash for Stats {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// What both halves of both kinds share while they work.
struct Shared<'a> {
    credits: &'a mut Credits,
    done: &'a mut VecDeque<Action>,
    stats: &'a mut Stats,
}

impl Shared<'_> {
    fn credit(&mut self) -> Option<u16> {
        let credits = self.credits.take();
        self.stats.stall(credits)
    }

    fn send(&mut self, body: Body) -> Option<Action> {
        let credits = self.credit()?;
        Some(Action::Send(Message { credits, body }))
    }

    fn repost(&mut self, buffer: u32) {
        self.done.push_back(Action::Repost { buffer });
    }

    fn complete(&mut self, op: OpId, len: u64, outcome: Outcome) {
        self.done.push_back(ended(op, len, outcome, None));
    }
}

fn ended(op: OpId, len: u64, outcome: Outcome, in_place: Option<InPlace>) -> Action {
    Action::Complete(Completion {
        op,
        len,
        outcome,
        in_place,
    })
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Tx {
    Stream(stream::Sender),
    Packet(packet::Sender),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Rx {
    Stream(stream::Receiver),
    Packet(packet::Receiver),
}

/// One end of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    immediate: bool,
    credits: Credits,
    tx: Tx,
    rx: Rx,
    /// Buffers that the program has.
    held: Vec<u32>,
    /// Completions to tell and buffers to post.
    done: VecDeque<Action>,
    stats: Stats,
}

impl Endpoint {
    /// The end of a connection that was just made.
    pub fn new(config: &Config) -> Self {
        let (tx, rx) = match config.kind {
            Kind::Stream => (
                Tx::Stream(stream::Sender::new(config)),
                Rx::Stream(stream::Receiver::new(config)),
            ),
            Kind::SeqPacket(design) => (
                Tx::Packet(packet::Sender::new(config, design)),
                Rx::Packet(packet::Receiver::new(config, design)),
            ),
        };
        Endpoint {
            immediate: config.immediate,
            credits: Credits::new(config.send_credits, config.recv_credits),
            tx,
            rx,
            held: Vec::new(),
            done: VecDeque::new(),
            stats: Stats::default(),
        }
    }

    fn split(&mut self) -> (&mut Tx, &mut Rx, Shared<'_>) {
        let shared = Shared {
            credits: &mut self.credits,
            done: &mut self.done,
            stats: &mut self.stats,
        };
        (&mut self.tx, &mut self.rx, shared)
    }

    /// Queue a send of `len` bytes.
    pub fn send(&mut self, op: OpId, len: u64) -> Result<(), Refused> {
        match &mut self.tx {
            Tx::Stream(tx) => tx.send(op, len),
            Tx::Packet(tx) => tx.send(op, len),
        }
    }

    /// The short way of a send: the message to send at once, with the payload behind it. The send is complete then, and has no
    /// name. `None`, with nothing changed: it takes the usual way.
    pub fn send_now(&mut self, len: u64) -> Option<Message> {
        if !self.done.is_empty() {
            // Perhaps of a send before it.
            return None;
        }
        let (tx, _, mut shared) = self.split();
        let credits = match tx {
            Tx::Stream(tx) => tx.send_now(len, &mut shared),
            Tx::Packet(tx) => tx.send_now(len, &mut shared),
        }?;
        let len = len as u32;
        Some(Message {
            credits,
            body: Body::Small { len },
        })
    }

    /// The short way of a message with payload, in place of [`on_message`](Self::on_message): the receive that takes all of
    /// it. The driver copies it to the start of that receive's memory, posts the message's buffer again before it sends anything,
    /// and tells the program; the machine has forgotten the receive. `None`, with nothing changed: the message takes the usual way.
    pub fn take_now(&mut self, message: &Message) -> Result<Option<OpId>, Violation> {
        let Body::Small { len } = message.body else {
            return Ok(None);
        };
        let rx = match &self.rx {
            Rx::Stream(rx) => rx.may_take(len),
            Rx::Packet(rx) => rx.may_take(len),
        };
        if !rx || !self.done.is_empty() {
            return Ok(None);
        }
        self.credits.arrived(message.credits)?;
        let (_, rx, mut shared) = self.split();
        let op = match rx {
            Rx::Stream(rx) => rx.take(len, &mut shared),
            Rx::Packet(rx) => rx.take(len, &mut shared),
        };
        self.credits.reposted();
        Ok(op)
    }

    /// Queue a receive of up to `len` bytes.
    pub fn recv(&mut self, op: OpId, len: u64, flags: RecvFlags) {
        let (_, rx, mut shared) = self.split();
        match rx {
            Rx::Stream(rx) => rx.recv(op, len, flags, &mut shared),
            Rx::Packet(rx) => rx.recv(op, len, flags, &mut shared),
        }
    }

    /// Take an operation back.
    pub fn cancel(&mut self, op: OpId) -> Cancel {
        let (tx, rx, mut shared) = self.split();
        let (sends, is_stream) = match tx {
            Tx::Stream(tx) => (&mut tx.sends, true),
            Tx::Packet(tx) => (&mut tx.sends, false),
        };
        let sent = sends.cancel(op, is_stream, shared.done);
        sent.unwrap_or_else(|| match rx {
            Rx::Stream(rx) => rx.cancel(op, &mut shared),
            Rx::Packet(rx) => rx.cancel(op, &mut shared),
        })
    }

    /// Half-close: no send is taken any more, and the peer hears of it after those queued.
    pub fn shutdown(&mut self) {
        match &mut self.tx {
            Tx::Stream(tx) => tx.sends.shutdown(),
            Tx::Packet(tx) => tx.sends.shutdown(),
        }
    }

    /// The program has finished with a buffer from an in-place completion. False: it had no such buffer.
    pub fn recycle(&mut self, buffer: u32) -> bool {
        let Some(at) = self.held.iter().position(|&held| held == buffer) else {
            return false;
        };
        self.held.swap_remove(at);
        self.done.push_back(Action::Repost { buffer });
        true
    }

    /// A control receive completed with a message; `buffer` names it, and has the payload of a [`Body::Small`]. It may
    /// be posted again when [`Action::Repost`] says so.
    pub fn on_message(&mut self, buffer: u32, message: &Message) -> Result<(), Violation> {
        if let Body::Wrote { transfer, len } = message.body {
            let credits = message.credits;
            return self.on_notification(
                buffer,
                Imm {
                    transfer,
                    credits,
                    len,
                },
                false,
            );
        }
        self.credits.arrived(message.credits)?;
        let (tx, rx, mut shared) = self.split();
        if let Body::Small { len } = message.body {
            return match rx {
                Rx::Stream(rx) => rx.on_small(buffer, len, &mut shared),
                Rx::Packet(rx) => rx.on_small(buffer, len, shared.stats),
            };
        }
        match (message.body, tx, rx) {
            (Body::Credit, ..) => {}
            (Body::Fin, _, Rx::Stream(rx)) => rx.on_fin(&mut shared)?,
            (Body::Fin, _, Rx::Packet(rx)) => rx.on_fin(&mut shared)?,
            (Body::Advert(advert), Tx::Stream(tx), _) => tx.on_advert(advert, shared.stats)?,
            (Body::Ack { freed }, Tx::Stream(tx), _) => tx.on_ack(freed)?,
            (Body::Retract, Tx::Stream(tx), _) => tx.on_retract(shared.stats)?,
            (Body::Retract, Tx::Packet(tx), _) => tx.on_retract(shared.stats)?,
            (Body::Retracted { seq }, _, Rx::Stream(rx)) => rx.on_retracted(seq, &mut shared)?,
            (Body::Retracted { seq }, _, Rx::Packet(rx)) => rx.on_retracted(seq, &mut shared)?,
            (Body::PktAdvert(packet), Tx::Packet(tx), _) => tx.on_advert(packet, shared.stats)?,
            (Body::Source(packet), _, Rx::Packet(rx)) => rx.on_source(packet, shared.stats)?,
            (Body::SourceDone { index, len }, Tx::Packet(tx), _) => {
                tx.on_source_done(index, len, &mut shared)?;
            }
            _ => return Err(Violation::Unexpected),
        }
        shared.repost(buffer);
        Ok(())
    }

    /// A control receive completed with immediate data.
    pub fn on_imm(&mut self, buffer: u32, imm: Imm) -> Result<(), Violation> {
        self.on_notification(buffer, imm, true)
    }

    fn on_notification(&mut self, buffer: u32, imm: Imm, immediate: bool) -> Result<(), Violation> {
        self.credits.arrived(imm.credits)?;
        if immediate != self.immediate {
            return Err(Violation::Unexpected);
        }
        let (_, rx, mut shared) = self.split();
        match (imm.transfer, rx) {
            (Transfer::Direct, Rx::Stream(rx)) => rx.on_direct(imm.len, &mut shared)?,
            (Transfer::Indirect, Rx::Stream(rx)) => rx.on_indirect(imm.len, &mut shared)?,
            (Transfer::Packet { truncated }, Rx::Packet(rx)) => {
                rx.on_packet(imm.len, truncated, shared.stats)?;
            }
            _ => return Err(Violation::Unexpected),
        }
        shared.repost(buffer);
        Ok(())
    }

    /// One [`Action::Write`], [`Action::SendSmall`] or [`Action::Read`] of this operation is complete.
    pub fn on_transferred(&mut self, op: OpId) {
        let (tx, rx, mut shared) = self.split();
        match tx {
            Tx::Stream(tx) => {
                tx.sends.transferred(op);
                tx.sends.complete(shared.done);
            }
            Tx::Packet(tx) => {
                if tx.sends.transferred(op) {
                    tx.sends.complete(shared.done);
                } else if let Rx::Packet(rx) = rx {
                    rx.on_read(op, &mut shared);
                }
            }
        }
    }

    /// The next thing to do. `may_go_indirect`: a send without an advert may take the way through the peer's buffer or
    /// a message now; false makes it wait for an advert.
    pub fn poll(&mut self, may_go_indirect: bool) -> Option<Action> {
        let (_, rx, mut shared) = self.split();
        let action = match rx {
            Rx::Stream(rx) => rx
                .acknowledge(&mut shared)
                .or_else(|| rx.deliver(&mut shared)),
            Rx::Packet(rx) => rx.deliver(&mut shared),
        };
        if let Some(action) = action {
            return Some(action);
        }
        if let Some(action) = self.told() {
            return Some(action);
        }
        let (tx, rx, mut shared) = self.split();
        let action = match (tx, rx) {
            (Tx::Stream(tx), Rx::Stream(rx)) => rx
                .control(&mut shared)
                .or_else(|| tx.poll(may_go_indirect, &mut shared)),
            (Tx::Packet(tx), Rx::Packet(rx)) => {
                rx.control(&mut shared).or_else(|| tx.poll(&mut shared))
            }
            _ => None,
        };
        // Empty sends complete on the way.
        if let Some(action) = action.or_else(|| self.told()) {
            return Some(action);
        }
        if self.is_shut() && self.peer_closed() && self.is_idle() {
            // Nobody needs them, and the peer may be gone.
            return None;
        }
        let credits = self.credits.take_last()?;
        self.stats.credit_messages += 1;
        Some(Action::Send(Message {
            credits,
            body: Body::Credit,
        }))
    }

    fn told(&mut self) -> Option<Action> {
        let action = self.done.pop_front()?;
        match action {
            Action::Repost { .. } => self.credits.reposted(),
            Action::Complete(Completion {
                in_place: Some(at), ..
            }) => self.held.push(at.buffer),
            _ => {}
        }
        Some(action)
    }

    /// For certain [`poll`](Self::poll) says `None`. Cheaper than asking it, but it may say so where this is false.
    pub fn is_still(&self) -> bool {
        let tx = match &self.tx {
            Tx::Stream(tx) => tx.is_still(),
            Tx::Packet(tx) => tx.is_still(),
        };
        let rx = match &self.rx {
            Rx::Stream(rx) => rx.is_still(),
            Rx::Packet(rx) => rx.is_still(),
        };
        tx && rx && self.done.is_empty() && !self.credits.is_due()
    }

    /// Bytes left of the send at the head, if it waits for [`poll`](Self::poll) with `may_go_indirect`.
    pub fn wants_indirect(&self) -> Option<u64> {
        match &self.tx {
            Tx::Stream(tx) => tx.wants_indirect(),
            Tx::Packet(_) => None,
        }
    }

    /// Bytes in the memory of this outstanding receive of a stream.
    pub fn received(&self, op: OpId) -> u64 {
        match &self.rx {
            Rx::Stream(rx) => rx.received(op),
            Rx::Packet(_) => 0,
        }
    }

    /// Bytes (stream) or messages that have come and that no receive has taken.
    pub fn readable(&self) -> u64 {
        match &self.rx {
            Rx::Stream(rx) => rx.readable(),
            Rx::Packet(rx) => rx.readable(),
        }
    }

    /// The peer has said that it sends no more.
    pub fn peer_closed(&self) -> bool {
        match &self.rx {
            Rx::Stream(rx) => rx.eof(),
            Rx::Packet(rx) => rx.eof(),
        }
    }

    /// The half-close that [`shutdown`](Self::shutdown) asked for has been sent.
    pub fn is_shut(&self) -> bool {
        self.sends().is_finished()
    }

    /// No call of the program is unfinished.
    pub fn is_idle(&self) -> bool {
        let receives = match &self.rx {
            Rx::Stream(rx) => rx.is_idle(),
            Rx::Packet(rx) => rx.is_idle(),
        };
        receives && self.sends().is_idle() && self.done.is_empty()
    }

    fn sends(&self) -> &sends::Sends {
        match &self.tx {
            Tx::Stream(tx) => &tx.sends,
            Tx::Packet(tx) => &tx.sends,
        }
    }

    /// What has happened so far.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}
