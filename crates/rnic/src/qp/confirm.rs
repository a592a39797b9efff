//! Completions that say what became of a request at the peer ([`QpInit::remote_completion`](crate::QpInit)).
//!
//! iWARP tells a sender nothing about a Send or Write that went well. But the peer takes one thing after the other, so the answer to a
//! Read says that everything before it has been placed or received. So an empty Read goes out behind what is posted; the protocol machine
//! completes what is before it when it is answered. On shared memory most Writes are carried out by ourselves: there the Read goes out only
//! when something is left that was not.
//!
//! A peer that ends the connection once it has received everything may be gone before it answers. So it says what it has received before it
//! goes (docs/spec/rdmap-extensions.md).

use std::sync::atomic::Ordering;

use super::convert::zero_read;
use super::{Core, QpInner, post_internal};
use crate::transport::Link;
use crate::types::SendOp;

/// Reads of our own that may be outstanding. Their place is negotiated beside that of the program's.
const CONFIRMS: u16 = 16;
/// The tagged offset of the notice of what was received, but for the number of messages in the low half.
const NOTICE: u64 = u64::from_be_bytes(*b"wRCV\0\0\0\0");

/// The program's part of a depth that was negotiated: all of it but ours. A peer that was not prepared for ours shares.
pub(super) fn visible(depth: u16) -> u16 {
    depth.checked_sub(CONFIRMS).unwrap_or(depth.min(1))
}

/// What has been asked, and is to be.
pub(super) struct Confirming {
    /// The connection is in shared memory.
    local: bool,
    outstanding: u16,
    /// Something was posted since, and is waited for.
    wanted: bool,
    /// Messages that the peer was told we have received.
    told: u32,
}

impl Confirming {
    /// Reads of our own that are outstanding, at most.
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding.into()
    }

    /// It is to be asked only now, after what could be done directly.
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
    pub(super) fn start_confirming(&mut self, link: &Link, ord: u16) {
        if let Some(stream) = self.stream.as_mut().filter(|_| ord > 0) {
            stream.complete_when_answered();
            self.confirming = Some(Confirming {
                local: link.local().is_some(),
                outstanding: 0,
                wanted: false,
                told: 0,
            });
        }
    }

    /// Ask if somebody wants to know; says whether that was done.
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
        stream.notify(NOTICE | u64::from(received));
        true
    }

    /// The peer has sent an empty Write to this tagged offset: perhaps it says what it has received.
    pub(super) fn hear_received(&mut self, to: u64) {
        if let Some(stream) = &mut self.stream
            && to >> 32 == NOTICE >> 32
        {
            stream.peer_received(to as u32);
        }
    }
}

impl QpInner {
    /// Depths are about to be negotiated: what to add to the program's, for Reads of our own.
    pub(crate) fn ask_for_own_reads(&self) -> u16 {
        self.with_own_reads
            .store(self.remote_completion, Ordering::Relaxed);
        if self.remote_completion { CONFIRMS } else { 0 }
    }

    /// Something was posted, and with `signaled` somebody waits for it. If the peer's program is `told` of it, the question goes with it: the
    /// program may answer at once, and its answer must not come before ours. Programs rest on that order, because no InfiniBand device breaks it.
    pub(super) fn want_confirmation(&self, core: &mut Core, signaled: bool, told: bool) {
        let used = self.sq_used.load(Ordering::Relaxed);
        // Those that make no completion take room in the queue until they are known to be done.
        let short_of_room = used >= self.max_send_wr / 2;
        if let Some(confirming) = &mut core.confirming {
            confirming.wanted |= signaled || self.sq_sig_all || short_of_room;
            if !confirming.local || told {
                core.ask_for_confirmation();
            }
        }
    }
}
