//! Completions that confirm the outcome of a request at the peer ([`QpInit::remote_completion`](crate::QpInit)).
//!
//! iWARP does not acknowledge a successful Send or Write to its sender. But the peer processes requests in order, so the response to a Read
//! confirms that everything before it has been placed or received. So an empty Read follows the posted requests, and the protocol machine
//! completes the requests before it when the response arrives. On shared memory this process carries out most Writes itself; the Read is
//! sent only if some requests were not carried out that way.
//!
//! A peer that ends the connection after it has received everything may be gone before it answers. Therefore it reports what it has
//! received before it closes (docs/spec/rdmap-extensions.md).

use weft_proto::rdmap::{notice, noticed};

use super::convert::zero_read;
use super::{Core, post_internal};
use crate::transport::Llp;
use crate::types::SendOp;

/// Our own Reads that may be outstanding. Their ORD is negotiated in addition to the program's.
pub(super) const CONFIRMS: u16 = 16;
/// The kind of notice that says how many messages were received.
const RECEIVED: [u8; 4] = *b"wRCV";

/// The program's part of a depth that was negotiated, of which it had asked for `asked`: all of it but ours. A peer that was not prepared for ours
/// leaves no more than those: they are shared.
pub(super) fn visible(depth: u16, asked: u16) -> u16 {
    match depth.saturating_sub(CONFIRMS) {
        0 => depth.min(asked).min(1),
        rest => rest,
    }
}

/// The confirmations that were requested, and that have to be.
pub(super) struct Confirming {
    /// The connection is in shared memory.
    local: bool,
    outstanding: u16,
    /// Something was posted since, and is waited for.
    wanted: bool,
    /// The confirmation is requested before anything is sent, not after the direct operations.
    due: bool,
    /// The number of received messages reported to the peer.
    told: u32,
}

impl Confirming {
    /// Reads of our own that are outstanding, at most.
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding.into()
    }

    /// The confirmation is requested only now, after the direct operations.
    pub(super) fn is_late(&self) -> bool {
        self.local && self.wanted
    }

    /// A request of our own is complete.
    pub(super) fn answered(&mut self, op: SendOp) {
        if matches!(op, SendOp::Read { .. }) {
            self.outstanding = self.outstanding.saturating_sub(1);
        }
    }
}

impl Core {
    /// The connection is there.
    pub(super) fn start_confirming(&mut self, link: &Llp, ord: u16) {
        if let Some(stream) = self.stream.as_mut().filter(|_| ord > 0) {
            stream.complete_when_answered();
            self.confirming = Some(Confirming {
                local: link.local().is_some(),
                outstanding: 0,
                wanted: false,
                due: false,
                told: 0,
            });
        }
    }

    /// Requests a confirmation if it is needed; returns whether it did.
    pub(super) fn ask_for_confirmation(&mut self) -> bool {
        let nothing_posted = self.nothing_posted();
        let Some(confirming) = &mut self.confirming else {
            return false;
        };
        if !confirming.wanted || confirming.outstanding >= CONFIRMS || self.ended.is_some() {
            return false;
        }
        confirming.wanted = false;
        if nothing_posted {
            return false;
        }
        confirming.outstanding += 1;
        post_internal(self, zero_read());
        true
    }

    /// The connection is about to end: the peer is to know what we have received. False when it does.
    pub(super) fn tell_received(&mut self) -> bool {
        let (Some(stream), Some(confirming)) = (&mut self.stream, &mut self.confirming) else {
            return false;
        };
        let received = stream.messages_received();
        if received == confirming.told {
            return false;
        }
        confirming.told = received;
        stream.notify(notice(RECEIVED, received));
        true
    }

    /// The peer has sent an empty Write to this tagged offset: it may report the messages that it has received.
    pub(super) fn hear_received(&mut self, to: u64) {
        if let Some(stream) = &mut self.stream
            && let Some(count) = noticed(RECEIVED, to)
        {
            stream.peer_received(count);
        }
    }

    /// A request was posted; with `wanted` its outcome is waited for. If the peer's program sees the request (`told`), the confirmation is
    /// requested with it: that program may answer at once, and its answer must not arrive before the confirmation. Programs rely on that order,
    /// because every InfiniBand device keeps it.
    pub(super) fn want_confirmation(&mut self, wanted: bool, told: bool) {
        if let Some(confirming) = &mut self.confirming {
            confirming.wanted |= wanted;
            confirming.due |= !confirming.local || told;
        }
    }

    /// Before sending: requests the confirmation of what was posted.
    #[inline]
    pub(super) fn confirm_if_due(&mut self) {
        if let Some(confirming) = &mut self.confirming
            && std::mem::take(&mut confirming.due)
        {
            self.ask_for_confirmation();
        }
    }
}
