//! MPA connection start-up: the requests of both sides, and their agreement (RFC 5044 section 7.1, RFC 6581).
//!
//! ```text
//!   initiator                                    responder
//!   Initiator --- Request frame ---------------> Responder
//!                                                PendingRequest   (the user accepts or rejects)
//!   Accepted <--- Reply frame ------------------ accept
//!   Rejected <--- Reply frame with R ----------- reject
//!   first FPDU --------------------------------> may send FPDUs
//! ```
//!
//! Both sides give [`Initiator::on_bytes`] and [`Responder::on_bytes`] everything received so far, at most
//! [`MAX_FRAME`] bytes of it matter, and hand what follows the `consumed` bytes to their FPDU reader. The caller keeps
//! the clock: [`START_TIMEOUT`] is how long to wait for the peer's frame.

use std::time::Duration;

use weft_wire::mpa::{Enhanced, FrameKind, MAX_PRIVATE_DATA, START_HEADER_LEN, StartFrame};
use weft_wire::rdmap::{MpaError, TermError};

/// The longest start-up frame, in bytes.
pub const MAX_FRAME: usize = START_HEADER_LEN + MAX_PRIVATE_DATA;

/// How long to wait for the peer's start-up frame; the kernel's siw waits as long.
pub const START_TIMEOUT: Duration = Duration::from_secs(10);

/// The MPA revision to ask for, and the highest to answer with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revision {
    /// RFC 5044.
    One,
    /// RFC 6581: IRD and ORD are negotiated, peer-to-peer start-up is possible.
    Two,
}

/// The ready-to-receive messages that one side offers or can take (RFC 6581 section 4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RtrSet {
    /// A zero-length FPDU (sent as a zero-length Send).
    pub send: bool,
    /// A zero-length RDMA Write.
    pub write: bool,
    /// A zero-length RDMA Read.
    pub read: bool,
}

/// The ready-to-receive message that the initiator must send first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rtr {
    /// A zero-length FPDU (sent as a zero-length Send).
    Send,
    /// A zero-length RDMA Write.
    Write,
    /// A zero-length RDMA Read.
    Read,
}

impl RtrSet {
    const fn of(enhanced: Enhanced) -> Self {
        Self {
            send: enhanced.rtr_send,
            write: enhanced.rtr_write,
            read: enhanced.rtr_read,
        }
    }

    const fn only(rtr: Rtr) -> Self {
        Self {
            send: matches!(rtr, Rtr::Send),
            write: matches!(rtr, Rtr::Write),
            read: matches!(rtr, Rtr::Read),
        }
    }

    /// The one to use out of what both have: a Write needs nothing from the receiver, a Read needs IRD, a Send a
    /// receive.
    const fn choose(self, other: Self) -> Option<Rtr> {
        if self.write && other.write {
            Some(Rtr::Write)
        } else if self.read && other.read {
            Some(Rtr::Read)
        } else if self.send && other.send {
            Some(Rtr::Send)
        } else {
            None
        }
    }
}

/// The parameters of one side of the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Ask for CRCs; they are used if either side asks.
    pub crc: bool,
    /// Ask the peer to insert markers into its stream.
    pub recv_markers: bool,
    /// The revision to ask for, or the highest to answer with.
    pub revision: Revision,
    /// Inbound Reads and Atomics that we can take at once, at most 16,382.
    pub ird: u16,
    /// Our limit of outstanding Reads and Atomics, at most 16,382.
    pub ord: u16,
    /// Initiator: ask for peer-to-peer start-up and offer these. Responder: agree to it, with one of these.
    pub peer_to_peer: Option<RtrSet>,
}

/// The parameters that both sides agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Params {
    /// FPDUs carry CRCs, both ways.
    pub crc: bool,
    /// We put markers into what we send.
    pub tx_markers: bool,
    /// The stream that we receive has markers.
    pub rx_markers: bool,
    /// Inbound Reads and Atomics to accept at once.
    pub ird: u16,
    /// Outbound Reads and Atomics to have at once, at most.
    pub ord: u16,
    /// The revision of the reply.
    pub revision: u8,
    /// The ready-to-receive message that the initiator sends first, if that was agreed.
    pub rtr: Option<Rtr>,
    /// We are the responder: no FPDU may go out before one came in (RFC 5044 section 7.1.2).
    pub must_wait_for_first_fpdu: bool,
}

/// Private data that does not fit its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("private data of {len} bytes, the frame takes {max}")]
pub struct TooLong {
    /// Bytes given.
    pub len: usize,
    /// Bytes that fit.
    pub max: usize,
}

/// Why start-up failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// The peer's frame is not one.
    #[error(transparent)]
    Frame(#[from] weft_wire::mpa::StartError),
    /// A reply with a higher revision than the request, or enhanced where the request was not.
    #[error("the reply does not fit the request")]
    BadReply,
    /// The responder's ORD exceeds our IRD (RFC 6581 section 8).
    #[error("the peer's ORD of {peer_ord} exceeds our IRD of {ird}")]
    InsufficientIrd {
        /// The ORD of the reply.
        peer_ord: u16,
        /// Our IRD.
        ird: u16,
    },
    /// The reply agrees to none of the ready-to-receive messages that we offered (RFC 6581 section 8).
    #[error("no matching ready-to-receive option")]
    NoMatchingRtr,
}

impl StartError {
    /// The error to send in a Terminate before closing, if the peer is known to speak MPA.
    pub const fn term_error(&self) -> Option<TermError> {
        match self {
            Self::Frame(weft_wire::mpa::StartError::Key) => None,
            Self::Frame(_) | Self::BadReply => Some(TermError::Mpa(MpaError::InvalidFrame)),
            Self::InsufficientIrd { .. } => Some(TermError::Mpa(MpaError::InsufficientIrd)),
            Self::NoMatchingRtr => Some(TermError::Mpa(MpaError::NoMatchingRtr)),
        }
    }
}

/// The side that connects, waiting for the reply.
#[derive(Clone, Debug)]
pub struct Initiator {
    config: Config,
}

/// The initiator's result for the bytes so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitStep {
    /// The reply is not complete.
    NeedMore,
    /// Connected.
    Accepted {
        /// The agreed parameters.
        params: Params,
        /// The responder's private data.
        private_data: Vec<u8>,
        /// Bytes of the reply; what follows are FPDUs.
        consumed: usize,
    },
    /// The responder's user refused.
    Rejected {
        /// The responder's private data.
        private_data: Vec<u8>,
        /// Bytes of the reply.
        consumed: usize,
    },
}

impl Initiator {
    /// Starts a connection: also returns the request to send.
    pub fn new(config: Config, private_data: &[u8]) -> Result<(Self, Vec<u8>), TooLong> {
        let enhanced = (config.revision == Revision::Two).then(|| {
            let rtr = config.peer_to_peer.unwrap_or_default();
            Enhanced {
                peer_to_peer: config.peer_to_peer.is_some(),
                rtr_send: rtr.send,
                rtr_write: rtr.write,
                rtr_read: rtr.read,
                ird: config.ird.min(MAX_DEPTH),
                ord: config.ord.min(MAX_DEPTH),
            }
        });
        let bytes = emit(&StartFrame {
            kind: FrameKind::Request,
            markers: config.recv_markers,
            crc: config.crc,
            reject: false,
            revision: if enhanced.is_some() { 2 } else { 1 },
            enhanced,
            private_data,
        })?;
        Ok((Self { config }, bytes))
    }

    /// Looks at everything received so far.
    pub fn on_bytes(&self, buf: &[u8]) -> Result<InitStep, StartError> {
        let Some((reply, consumed)) = StartFrame::parse(FrameKind::Reply, buf)? else {
            return Ok(InitStep::NeedMore);
        };
        let private_data = reply.private_data.to_vec();
        if reply.reject {
            return Ok(InitStep::Rejected {
                private_data,
                consumed,
            });
        }
        Ok(InitStep::Accepted {
            params: self.agree(&reply)?,
            private_data,
            consumed,
        })
    }

    fn agree(&self, reply: &StartFrame<'_>) -> Result<Params, StartError> {
        let config = &self.config;
        let mut params = Params {
            crc: config.crc || reply.crc,
            tx_markers: reply.markers,
            rx_markers: config.recv_markers,
            ird: config.ird,
            ord: config.ord,
            revision: reply.revision,
            rtr: None,
            must_wait_for_first_fpdu: false,
        };
        if config.revision == Revision::One {
            return if reply.revision == 1 {
                Ok(params)
            } else {
                Err(StartError::BadReply)
            };
        }
        let Some(enhanced) = reply.enhanced else {
            // The responder knows only RFC 5044: the depths are those of the user, and the initiator sends first. A revision 2 reply to our
            // enhanced request must be enhanced (RFC 6581 section 7).
            return if reply.revision == 1 {
                Ok(params)
            } else {
                Err(StartError::BadReply)
            };
        };
        if enhanced.ird != Enhanced::NOT_NEGOTIATED {
            params.ord = config.ord.min(enhanced.ird);
        }
        if enhanced.ord != Enhanced::NOT_NEGOTIATED && enhanced.ord > config.ird {
            return Err(StartError::InsufficientIrd {
                peer_ord: enhanced.ord,
                ird: config.ird,
            });
        }
        if let Some(offered) = config.peer_to_peer {
            let agreed = if enhanced.peer_to_peer {
                offered.choose(RtrSet::of(enhanced))
            } else {
                None
            };
            let rtr = agreed.ok_or(StartError::NoMatchingRtr)?;
            // A ready-to-receive Read needs an ORD of at least 1, whatever the user has set.
            params.ord = params.ord.max(u16::from(rtr == Rtr::Read));
            params.rtr = Some(rtr);
        }
        Ok(params)
    }
}

/// The side that listens, waiting for a request.
#[derive(Clone, Debug)]
pub struct Responder {
    config: Config,
}

/// The responder's result for the bytes so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RespStep {
    /// The request is not complete.
    NeedMore,
    /// A request for the user to accept or reject.
    Request(PendingRequest),
}

/// A complete request: the user accepts or rejects it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRequest {
    config: Config,
    markers: bool,
    crc: bool,
    revision: u8,
    enhanced: Option<Enhanced>,
    private_data: Vec<u8>,
    consumed: usize,
}

/// The reason why a request could not be accepted; the request is consumed, close the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcceptError {
    /// The private data does not fit the reply.
    #[error(transparent)]
    TooLong(#[from] TooLong),
    /// Both sides require peer-to-peer start-up, with different ready-to-receive messages.
    #[error("no matching ready-to-receive option")]
    NoMatchingRtr,
}

impl Responder {
    /// Waits for a request.
    pub const fn new(config: Config) -> Self {
        Self { config }
    }

    /// Looks at everything received so far.
    pub fn on_bytes(&self, buf: &[u8]) -> Result<RespStep, StartError> {
        let Some((request, consumed)) = StartFrame::parse(FrameKind::Request, buf)? else {
            return Ok(RespStep::NeedMore);
        };
        let known = self.config.revision == Revision::Two;
        Ok(RespStep::Request(PendingRequest {
            config: self.config,
            markers: request.markers,
            crc: request.crc,
            revision: if known { request.revision } else { 1 },
            enhanced: request.enhanced.filter(|_| known),
            private_data: request.private_data.to_vec(),
            consumed,
        }))
    }
}

impl PendingRequest {
    /// The initiator's private data.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The initiator's IRD, ORD and ready-to-receive offers; none in revision 1.
    pub const fn enhanced(&self) -> Option<&Enhanced> {
        self.enhanced.as_ref()
    }

    /// Bytes of the request; what follows are FPDUs, which the initiator should not have sent yet.
    pub const fn consumed(&self) -> usize {
        self.consumed
    }

    /// The private data that the reply can carry, in bytes.
    pub const fn max_private_data(&self) -> usize {
        StartFrame::max_private_data(self.enhanced.is_some())
    }

    /// Accepts, with at most `ird` inbound and `ord` outbound Reads and Atomics; also returns the reply to send.
    ///
    /// The initiator's limits are applied to both (RFC 6581 section 6): its ORD is all we have to take, its IRD all we may
    /// use. Without negotiation both are as given.
    pub fn accept(
        self,
        private_data: &[u8],
        ird: u16,
        ord: u16,
    ) -> Result<(Params, Vec<u8>), AcceptError> {
        let mut params = Params {
            crc: self.config.crc || self.crc,
            tx_markers: self.markers,
            rx_markers: self.config.recv_markers,
            ird: ird.min(MAX_DEPTH),
            ord: ord.min(MAX_DEPTH),
            revision: self.revision,
            rtr: None,
            must_wait_for_first_fpdu: true,
        };
        let mut answer = None;
        if let Some(asked) = self.enhanced {
            let (ird, ord);
            (params.ird, ird) = limit(params.ird, asked.ord);
            (params.ord, ord) = limit(params.ord, asked.ird);
            if let Some(known) = self.config.peer_to_peer.filter(|_| asked.peer_to_peer) {
                let rtr = known
                    .choose(RtrSet::of(asked))
                    .ok_or(AcceptError::NoMatchingRtr)?;
                params.ird = params.ird.max(u16::from(rtr == Rtr::Read));
                params.rtr = Some(rtr);
            }
            let rtr = params.rtr.map(RtrSet::only).unwrap_or_default();
            answer = Some(Enhanced {
                peer_to_peer: params.rtr.is_some(),
                rtr_send: rtr.send,
                rtr_write: rtr.write,
                rtr_read: rtr.read,
                ird,
                ord,
            });
        }
        let reply = self.reply(false, params.crc, answer, private_data)?;
        Ok((params, reply))
    }

    /// Refuses: returns the reply to send before closing.
    pub fn reject(self, private_data: &[u8]) -> Result<Vec<u8>, TooLong> {
        let answer = self.enhanced.map(|_| Enhanced::default());
        self.reply(true, self.config.crc || self.crc, answer, private_data)
    }

    fn reply(
        &self,
        reject: bool,
        crc: bool,
        enhanced: Option<Enhanced>,
        data: &[u8],
    ) -> Result<Vec<u8>, TooLong> {
        emit(&StartFrame {
            kind: FrameKind::Reply,
            markers: self.config.recv_markers,
            crc,
            reject,
            revision: self.revision,
            enhanced,
            private_data: data,
        })
    }
}

/// The largest depth that can be negotiated: all ones means that it is not.
const MAX_DEPTH: u16 = Enhanced::NOT_NEGOTIATED - 1;

/// The value to use and the value to answer, for our limit `ours` and the peer's requested or allowed `asked`.
const fn limit(ours: u16, asked: u16) -> (u16, u16) {
    if asked == Enhanced::NOT_NEGOTIATED {
        (ours, Enhanced::NOT_NEGOTIATED)
    } else if asked < ours {
        (asked, asked)
    } else {
        (ours, ours)
    }
}

fn emit(frame: &StartFrame<'_>) -> Result<Vec<u8>, TooLong> {
    let (len, max) = (
        frame.private_data.len(),
        StartFrame::max_private_data(frame.enhanced.is_some()),
    );
    if len > max {
        return Err(TooLong { len, max });
    }
    Ok(frame.emit())
}
