//! The pure protocol of EXS connections: which messages are sent, and when, for the calls of the program.
//!
//! An [`Endpoint`] is one end of a connected socket. It opens no socket, reads no clock, touches no memory and uses no
//! verbs. It works with positions, lengths and ids of operations; its owner, the *driver*, does the rest. It has three
//! families of methods:
//!
//! * **Calls** of the program: [`send`](Endpoint::send), [`recv`](Endpoint::recv), [`cancel`](Endpoint::cancel),
//!   [`shutdown`](Endpoint::shutdown), [`recycle`](Endpoint::recycle).
//! * **Events** that the driver saw, in the order of its completion queue: [`on_message`](Endpoint::on_message),
//!   [`on_imm`](Endpoint::on_imm), [`on_transferred`](Endpoint::on_transferred). A [`Violation`] means that the peer broke
//!   the protocol: the driver ends the connection. Every value from the peer is checked before it changes anything.
//! * **Actions**: after each call or event the driver calls [`poll`](Endpoint::poll) until it returns `None`, and carries out
//!   each action before the next call. It sends in the order of the actions.
//!
//! The common case, small data with nothing before it, has two shortcuts: [`send_now`](Endpoint::send_now)
//! and [`take_now`](Endpoint::take_now) make all state changes of the normal path in one step, so that no operation needs
//! an id, storage or a report.
//!
//! Every operation gets exactly one [`Action::Complete`]. Sends complete in the order of their calls, and so do
//! receives; a cancelled operation may be reported earlier.
//!
//! The stream algorithm is that of `MacArthur` and Russell, *An Efficient Method for Stream Semantics over RDMA*
//! (figures 2 to 5), with corrections for the faults that the model checker found; see docs/spec/exs.md.
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

/// The announcement of message `index` with its memory.
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
/// The most adverts, or sources, outstanding in one direction.
pub const MAX_ADVERTS: usize = 1024;
/// The most adverts outstanding when no advert of the last phase was used, until a direct transfer arrives.
const WARY_ADVERTS: usize = 2;

/// Parameters of a connection, after the exchange of greetings.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// The type of the socket.
    pub kind: Kind,
    /// The transfers of a stream, in both directions. A `SOCK_SEQPACKET` ignores it.
    pub mode: Mode,
    /// Control receives that the peer has posted: at least [`weft_wire::exs::MIN_CREDITS`].
    pub send_credits: u32,
    /// Control receives that we have posted: at least [`weft_wire::exs::MIN_CREDITS`].
    pub recv_credits: u32,
    /// The longest payload in a message that we send, in bytes; 0: none.
    pub small_send: u32,
    /// The longest payload in a message that the peer sends, in bytes; 0: none.
    pub small_recv: u32,
    /// The peer's intermediate buffer.
    pub peer_ring: Option<Remote>,
    /// Bytes of our intermediate buffer; 0: none.
    pub own_ring_len: u32,
    /// Writes carry immediate data; otherwise a [`Body::Wrote`] follows each.
    pub immediate: bool,
    /// The rules of the stream algorithm in force.
    #[doc(hidden)]
    pub rules: Rules,
}

/// The rules of the stream algorithm. The model checker disables each of them to show its purpose.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Receives with an advert of an earlier phase block adverts for later receives.
    pub check_k_a: bool,
    /// So do receives without an advert.
    pub check_k_b: bool,
    /// The sender's phase advances past that of an advert that it drops (fig. 8).
    pub advance_phase: bool,
    /// In an indirect phase an advert matches only at the sender's exact position (the paper's prose), not also after it
    /// (fig. 2, line 3).
    pub exact_match: bool,
    /// The first advert of a phase has the receiver's actual position, not the sum of its estimates.
    pub resync_seq: bool,
    /// Receives that got no advert when they were posted, or an unused one, get another when the buffer is empty.
    pub retry: bool,
    /// A send uses the shortcut only if no other send precedes it.
    pub send_in_turn: bool,
    /// A message uses the shortcut only if no other data precedes it.
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

/// The id of an operation. The driver chooses it, unique among all outstanding sends and receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// Options of a receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RecvFlags {
    /// It completes when it is full, or at the end of the stream (`MSG_WAITALL`).
    pub waitall: bool,
    /// Data that arrived in a message may stay there (in-place receive, interface paper 5.2).
    pub in_place: bool,
}

/// The reason why a call is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// A send after [`Endpoint::shutdown`].
    #[error("the socket is shut down for sending")]
    Shutdown,
    /// A message longer than [`MAX_TRANSFER`] bytes.
    #[error("the message is too long")]
    TooLong,
}

/// The result of a request to cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancel {
    /// The operation completes as cancelled: at once or, for a stream send that is partly sent, when that part completes.
    Done,
    /// The peer has to return an advert first. The operation completes as cancelled, or with its data if that was
    /// in flight.
    Pending,
    /// It has begun and will complete, or there is no such operation.
    TooLate,
}

/// The way an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// As requested.
    Done,
    /// A message was longer than its receive; the rest is lost.
    Truncated,
    /// The peer's stream has ended: `len` is 0, or the bytes of a WAITALL up to the end.
    Eof,
    /// Cancelled: `len` is the bytes of a WAITALL up to then.
    Canceled,
}

/// The end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Completion {
    /// The operation.
    pub op: OpId,
    /// Bytes sent or received.
    pub len: u64,
    /// The way it ended.
    pub outcome: Outcome,
    /// The place of the data if it is not in the receive's memory; valid until [`Endpoint::recycle`].
    pub in_place: Option<InPlace>,
}

/// Data in a control receive's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InPlace {
    /// The buffer.
    pub buffer: u32,
    /// Offset of the data in the payload, in bytes.
    pub off: u32,
}

/// A task for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a message without payload.
    Send(Message),
    /// Allow the peer to write to a receive's memory at `[off, off + len)`, and send a [`Body::Advert`].
    Advertise {
        /// The receive.
        op: OpId,
        /// Offset in its memory.
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
    /// Allow the peer to write to the start of a receive's memory, and send a [`Body::PktAdvert`].
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
    /// Allow the peer to read a send's memory, and send a [`Body::Source`]. It needs no
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
    /// RDMA Write from a send's memory, with immediate data `imm`; without immediate data, followed by a Send of
    /// [`Imm::message`]. One [`Endpoint::on_transferred`] either way.
    Write {
        /// The send.
        op: OpId,
        /// Offset in its memory.
        off: u64,
        /// Bytes; 0 for an empty message.
        len: u32,
        /// The peer's memory.
        addr: u64,
        /// Its key.
        rkey: u32,
        /// The notification.
        imm: Imm,
        /// True for the last transfer of this send.
        last: bool,
    },
    /// Send a message with payload from a send's memory. One [`Endpoint::on_transferred`].
    SendSmall {
        /// The send.
        op: OpId,
        /// Offset in its memory.
        off: u64,
        /// Bytes.
        len: u32,
        /// The message that precedes the payload.
        header: Message,
        /// True for the last transfer of this send.
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
        /// Offset in its memory.
        off: u64,
        /// Offset in the buffer; the range does not wrap.
        ring_off: u32,
        /// Bytes.
        len: u32,
    },
    /// Copy from the payload in a control receive's buffer to a receive's memory.
    CopySmall {
        /// The receive.
        op: OpId,
        /// Offset in its memory.
        off: u64,
        /// The buffer.
        buffer: u32,
        /// Offset in the payload.
        buf_off: u32,
        /// Bytes.
        len: u32,
    },
    /// Post this control receive again.
    Repost {
        /// The buffer.
        buffer: u32,
    },
    /// Report a completed operation to the program.
    Complete(Completion),
}

/// The way a peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Violation {
    /// A message for which no control receive was left.
    #[error("a message without a credit")]
    NoCredit,
    /// More credits returned than were taken.
    #[error("credits that were never taken")]
    Credits,
    /// A message that is not valid on such a connection, or not at this time.
    #[error("a message that has no place here")]
    Unexpected,
    /// Data or adverts after the half-close.
    #[error("data after the end")]
    AfterFin,
    /// An advert with a phase that is impossible for its sender.
    #[error("an advert of an impossible phase")]
    Phase,
    /// An advert, source or acknowledgement out of order.
    #[error("out of order")]
    Order,
    /// An advert of length 0, or of memory that wraps.
    #[error("an advert of impossible memory")]
    Memory,
    /// More than [`MAX_ADVERTS`] adverts or sources outstanding.
    #[error("too many adverts")]
    TooMany,
    /// A direct transfer for which there is no advert, or longer than it.
    #[error("a transfer that no advert allowed")]
    NoAdvert,
    /// More data than the intermediate buffer has room for, or data beyond its end.
    #[error("the intermediate buffer is overfilled")]
    Overfilled,
    /// More buffer bytes acknowledged than are in use.
    #[error("acknowledged what was never sent")]
    Ack,
    /// A transfer or message of an impossible length.
    #[error("an impossible length")]
    Length,
}

/// Statistics of a connection. Counters only grow. The comparison of endpoints ignores them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Direct transfers sent; on a `SOCK_SEQPACKET` messages written or read.
    pub direct_sent: u64,
    /// Their bytes.
    pub direct_bytes_sent: u64,
    /// Indirect transfers sent, except data in messages.
    pub indirect_sent: u64,
    /// Their bytes.
    pub indirect_bytes_sent: u64,
    /// Messages with data sent.
    pub small_sent: u64,
    /// Their bytes.
    pub small_bytes_sent: u64,
    /// Sends whose bytes all went directly.
    pub direct_sends: u64,
    /// Sends with bytes that went indirectly or in messages.
    pub indirect_sends: u64,
    /// Direct transfers received.
    pub direct_received: u64,
    /// Their bytes.
    pub direct_bytes_received: u64,
    /// Indirect transfers received, except data in messages.
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
    /// Adverts received and dropped unused.
    pub adverts_dropped: u64,
    /// Number of waits for a credit.
    pub credit_stalls: u64,
    /// Number of times that a send waited for room in the peer's buffer.
    pub ring_stalls: u64,
    /// Requests to return adverts.
    pub retracts: u64,
    /// Acknowledgements of freed buffer sent.
    pub acks: u64,
    /// Messages sent that only returned credits.
    pub credit_messages: u64,
    /// The last attempt found no credit. It makes a stall count once.
    stalled: bool,
    /// The last attempt found no room.
    full: bool,
}

impl Stats {
    /// Bytes sent, in all three ways.
    pub fn bytes_sent(&self) -> u64 {
        self.direct_bytes_sent + self.indirect_bytes_sent + self.small_bytes_sent
    }

    /// Returns `credits`; counts a stall if there are none.
    fn stall(&mut self, credits: Option<u16>) -> Option<u16> {
        self.credit_stalls += u64::from(credits.is_none() && !self.stalled);
        self.stalled = credits.is_none();
        credits
    }

    /// The last transfer of a send has been sent.
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

/// The state that the halves of both socket types share.
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
    /// Buffers in use by the program.
    held: Vec<u32>,
    /// Completions to report and buffers to post.
    done: VecDeque<Action>,
    stats: Stats,
}

impl Endpoint {
    /// One end of a new connection.
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

    /// The shortcut for a send: returns the header of a message to send at once, followed by the payload. The send is then complete and has no
    /// id. `None`, with nothing changed: use the normal path.
    pub fn send_now(&mut self, len: u64) -> Option<Message> {
        if !self.done.is_empty() {
            // It may be of an earlier send.
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

    /// The shortcut for a message with payload, instead of [`on_message`](Self::on_message). Returns the receive that gets all of
    /// it. The driver copies it to the start of that receive's memory, posts the message's buffer again before it sends anything,
    /// and reports to the program; the machine has forgotten the receive. `None`, with nothing changed: use the normal path.
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

    /// Cancel an operation.
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

    /// Half-close: further sends are refused, and the peer is informed after the queued ones.
    pub fn shutdown(&mut self) {
        match &mut self.tx {
            Tx::Stream(tx) => tx.sends.shutdown(),
            Tx::Packet(tx) => tx.sends.shutdown(),
        }
    }

    /// The program has released a buffer of an in-place completion. False: it had no such buffer.
    pub fn recycle(&mut self, buffer: u32) -> bool {
        let Some(at) = self.held.iter().position(|&held| held == buffer) else {
            return false;
        };
        self.held.swap_remove(at);
        self.done.push_back(Action::Repost { buffer });
        true
    }

    /// A control receive completed with a message; `buffer` is its id, and holds the payload of a [`Body::Small`]. It must
    /// not be posted again before [`Action::Repost`].
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

    /// A message that says nothing, for an end that must speak first. Only before the first [`poll`](Self::poll).
    pub fn greet(&mut self) -> Message {
        self.stats.credit_messages += 1;
        Message {
            credits: self.credits.spend(),
            body: Body::Credit,
        }
    }

    /// The next action. `may_go_indirect`: a send without an advert may be sent through the peer's buffer or in
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
        // Empty sends complete during the above.
        if let Some(action) = action.or_else(|| self.told()) {
            return Some(action);
        }
        if self.is_shut() && self.peer_closed() && self.is_idle() {
            // The peer needs no more credits, and may be gone.
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

    /// True if [`poll`](Self::poll) certainly returns `None`. Cheaper than `poll`, which may return `None` in other cases as well.
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

    /// Bytes (stream) or messages that have arrived and that no receive has taken.
    pub fn readable(&self) -> u64 {
        match &self.rx {
            Rx::Stream(rx) => rx.readable(),
            Rx::Packet(rx) => rx.readable(),
        }
    }

    /// Bytes that a receive would get at once: all of a stream, or the first message's.
    pub fn available(&self) -> u64 {
        match &self.rx {
            Rx::Stream(rx) => rx.readable(),
            Rx::Packet(rx) => rx.available(),
        }
    }

    /// The peer has closed its sending direction.
    pub fn peer_closed(&self) -> bool {
        match &self.rx {
            Rx::Stream(rx) => rx.eof(),
            Rx::Packet(rx) => rx.eof(),
        }
    }

    /// The half-close requested by [`shutdown`](Self::shutdown) has been sent.
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

    /// The statistics.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}
