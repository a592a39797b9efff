//! The state of a queue pair, and what its program has asked of it that changes rarely.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::types::QpState;

/// The two bits of [`QpState`].
const STATE: u32 = QpState::Error as u32;
const EXPECTED: u32 = 1 << 2;
const PAUSED: u32 = 1 << 3;
const RNR_WAIT: u32 = 1 << 4;
const ORPHAN: u32 = 1 << 5;
const DEAD: u32 = 1 << 6;

/// One word, which every request reads and few calls write. A state never goes back: [`QpState::Error`] has both of its bits, so entering it
/// sets bits only, and nothing that happens at the same time undoes it.
pub(super) struct Life(AtomicU32);

impl Life {
    pub(super) fn new(rnr_wait: bool) -> Self {
        Life(AtomicU32::new(if rnr_wait { RNR_WAIT } else { 0 }))
    }

    #[inline]
    fn has(&self, bit: u32) -> bool {
        self.0.load(Ordering::Relaxed) & bit != 0
    }

    fn set(&self, bit: u32) -> bool {
        self.0.fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// What was written before a state is seen by a thread that sees the state.
    #[inline]
    pub(super) fn state(&self) -> QpState {
        QpState::from_u8((self.0.load(Ordering::Acquire) & STATE) as u8)
    }

    /// Connected, and not paused.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) & (STATE | PAUSED) == QpState::Rts as u32
    }

    /// Init to Rts.
    pub(super) fn connect(&self) {
        self.set(QpState::Rts as u32);
    }

    /// Rts to Closing; false in any other state.
    pub(super) fn close(&self) -> bool {
        let closing = |word: u32| {
            let (state, rest) = (word & STATE, word & !STATE);
            (state == QpState::Rts as u32).then_some(rest | QpState::Closing as u32)
        };
        self.0
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, closing)
            .is_ok()
    }

    /// Any state to Error.
    pub(super) fn fail(&self) {
        self.set(STATE);
    }

    /// Sends are taken before the connection is there, see [`Qp::allow_early_posts`](super::Qp::allow_early_posts).
    pub(super) fn is_expected(&self) -> bool {
        self.has(EXPECTED)
    }

    pub(super) fn expect(&self) {
        self.set(EXPECTED);
    }

    /// Nothing moves for now, see [`Qp::pause`](super::Qp::pause).
    #[inline]
    pub(super) fn is_paused(&self) -> bool {
        self.has(PAUSED)
    }

    /// Returns whether that is a change.
    pub(super) fn set_paused(&self, paused: bool) -> bool {
        if paused {
            self.set(PAUSED)
        } else {
            self.0.fetch_and(!PAUSED, Ordering::AcqRel) & PAUSED != 0
        }
    }

    /// Messages without a receive wait for one.
    #[inline]
    pub(super) fn waits_for_receives(&self) -> bool {
        self.has(RNR_WAIT)
    }

    pub(super) fn wait_for_receives(&self) {
        self.set(RNR_WAIT);
    }

    /// The owner's handle was dropped: no more completions.
    #[inline]
    pub(super) fn is_orphan(&self) -> bool {
        self.has(ORPHAN)
    }

    pub(super) fn orphan(&self) {
        self.set(ORPHAN);
    }

    /// Nothing more will happen on the socket.
    #[inline]
    pub(super) fn is_dead(&self) -> bool {
        self.has(DEAD)
    }

    /// From now on it is dead. False if it was.
    pub(super) fn bury(&self) -> bool {
        self.set(DEAD)
    }
}
