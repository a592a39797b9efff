//! Who works for an object that several threads drive, one at a time: a connection.
//!
//! ```text
//!   poster        Wake::defer      leaves a request to the owner's next poll, or drives
//!   owner         Wake::disarm     takes the lease: the engine does not watch;  Wake::arm gives it back
//!                 Wake::fall_asleep / wake_up    sleeps on the object's descriptor
//!   engine        Wake::disarm     its descriptor was ready
//!   any           Wake::take_or_leave    drives under the object's lock, or leaves the work to the holder
//!   holder        Wake::take_left, Wake::publish, Wake::let_go
//! ```
//!
//! All of it is one word, and each transition is one read-modify-write of it. So any two transitions have an order, and the later one sees the
//! earlier: of a thread that defers a request and one that arms, for example, one knows of the other. Flags of their own would need a full fence on
//! both sides. Transitions are `AcqRel`: a thread that sees a transition sees what was written before it.
//!
//! The object's lock is another word, and needs those fences: [`Wake::take_or_leave`] and [`Wake::let_go`] have them.

use crate::sync::{AtomicU64, Ordering, fence};

/// A thread has left its work to the holder of the lock.
const LEFT: u64 = 1;
/// The thread that drives has to arm when it is done.
const ARM_WANTED: u64 = 1 << 1;
/// The engine watches the descriptor.
const ARMED: u64 = 1 << 2;
/// It is in the engine's list of leased objects.
const LISTED: u64 = 1 << 3;
/// A message waits for a receive: the thread that posts one drives.
const STARVED: u64 = 1 << 4;
const BLOCKED: u64 = 1 << 5;
const STOPPED: u64 = 1 << 6;
const CLOSED: u64 = 1 << 7;
const TRANSPORT: u64 = BLOCKED | STOPPED | CLOSED;
/// One sleeping owner; 20 bits count them.
const SLEEPER: u64 = 1 << 12;
const SLEEPERS: u64 = DEFERRED - SLEEPER;
/// One deferred request; the upper half counts them, and wraps.
const DEFERRED: u64 = 1 << 32;

/// The word. The head of this file says who makes which transition.
#[derive(Debug)]
pub struct Wake(AtomicU64);

/// The word as a transition found it, or as it is.
#[derive(Clone, Copy, Debug)]
pub struct Seen(u64);

/// The state of the transport, which the holder of the lock publishes for threads that sleep on it, or watch it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transport {
    /// It takes no more bytes.
    pub blocked: bool,
    /// A message waits in it: nothing is received for now.
    pub stopped: bool,
    /// The peer's end was seen behind that.
    pub closed: bool,
}

impl Transport {
    #[inline]
    fn bits(self) -> u64 {
        let bit = |is: bool, bit: u64| if is { bit } else { 0 };
        bit(self.blocked, BLOCKED) | bit(self.stopped, STOPPED) | bit(self.closed, CLOSED)
    }
}

impl Seen {
    /// Requests that were posted since the owner's last poll: the first was sent by its poster, the others are deferred.
    #[inline]
    pub fn posts(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Whether some of them were deferred.
    #[inline]
    pub fn has_deferred(self) -> bool {
        self.posts() > 1
    }

    /// The engine watches.
    #[inline]
    pub fn is_armed(self) -> bool {
        self.0 & ARMED != 0
    }

    /// An owner sleeps on the descriptor.
    #[inline]
    pub fn has_sleepers(self) -> bool {
        self.0 & SLEEPERS != 0
    }

    /// A thread has left its work to the holder.
    #[inline]
    pub fn is_left(self) -> bool {
        self.0 & LEFT != 0
    }

    /// A message waits for a receive.
    #[inline]
    pub fn is_starved(self) -> bool {
        self.0 & STARVED != 0
    }

    /// The state of the transport.
    #[inline]
    pub fn transport(self) -> Transport {
        Transport {
            blocked: self.0 & BLOCKED != 0,
            stopped: self.0 & STOPPED != 0,
            closed: self.0 & CLOSED != 0,
        }
    }
}

impl Default for Wake {
    fn default() -> Self {
        Wake(AtomicU64::new(0))
    }
}

/// Driving, under the object's lock.
impl Wake {
    /// Takes the lock by `try_lock`. `None`: another thread holds it, and does the work that was left before it ends its drive.
    #[inline]
    pub fn take_or_leave<G>(&self, try_lock: impl Fn() -> Option<G>) -> Option<G> {
        try_lock().or_else(|| {
            // Release: the holder that finds the mark finds the work. (Loom does not need it: its failed attempt has a fence.)
            self.0.fetch_or(LEFT, Ordering::AcqRel);
            // The lock is let go by a plain store. With the fence of `let_go`: either the holder sees the mark after that store, or this thread sees
            // the store.
            fence(Ordering::SeqCst);
            try_lock()
        })
    }

    /// By the holder: whether work was left to it, which it does from here on.
    #[inline]
    pub fn take_left(&self) -> bool {
        // Acquire: the work that was left is seen.
        self.0.load(Ordering::Acquire) & LEFT != 0
            && self.0.fetch_and(!LEFT, Ordering::AcqRel) & LEFT != 0
    }

    /// Lets go of the lock. The thread then looks for work that was left meanwhile ([`Seen::is_left`]), and drives once more if there is any.
    #[inline]
    pub fn let_go<G>(&self, guard: G) {
        drop(guard);
        // See `take_or_leave`.
        fence(Ordering::SeqCst);
    }

    /// The word now.
    #[inline]
    pub fn seen(&self) -> Seen {
        Seen(self.0.load(Ordering::Acquire))
    }

    /// By the holder: publishes the state of the transport, and returns the last one. A thread that arms or falls asleep after this sees it; of one
    /// that did before, the holder sees that it did.
    #[inline]
    pub fn publish(&self, transport: Transport) -> Transport {
        // Only holders write these bits.
        let before = Seen(self.0.load(Ordering::Relaxed));
        let change = (before.0 & TRANSPORT) ^ transport.bits();
        if change != 0 {
            self.0.fetch_xor(change, Ordering::AcqRel);
        }
        before.transport()
    }

    /// The thread that drives has to arm when it is done.
    pub fn want_arm(&self) {
        self.0.fetch_or(ARM_WANTED, Ordering::AcqRel);
    }

    /// Whether this thread has to arm. One of those that ask is told so.
    #[inline]
    pub fn take_arm_wanted(&self) -> bool {
        self.0.load(Ordering::Relaxed) & ARM_WANTED != 0
            && self.0.fetch_and(!ARM_WANTED, Ordering::AcqRel) & ARM_WANTED != 0
    }
}

/// The lease.
impl Wake {
    /// The engine watches from here on. A request that was deferred before is seen by the [`Wake::take_deferred`] that has to follow; of later ones,
    /// the posters see that the object is armed.
    pub fn arm(&self) {
        self.0.fetch_or(ARMED, Ordering::AcqRel);
    }

    /// The owner takes the lease, or the engine an event. True for one of them.
    #[inline]
    pub fn disarm(&self) -> bool {
        self.0.load(Ordering::Relaxed) & ARMED != 0
            && self.0.fetch_and(!ARMED, Ordering::AcqRel) & ARMED != 0
    }

    /// An owner is about to sleep, and takes the lease with it. It has to send what was deferred; later posters see that it sleeps, and defer
    /// nothing.
    pub fn fall_asleep(&self) -> Seen {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            let asleep = (word + SLEEPER) & (DEFERRED - 1) & !ARMED;
            match self
                .0
                .compare_exchange(word, asleep, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return Seen(word),
                Err(now) => word = now,
            }
        }
    }

    /// It sleeps no more.
    pub fn wake_up(&self) {
        self.0.fetch_sub(SLEEPER, Ordering::AcqRel);
    }

    /// Requests were posted. What was found decides whether they may wait for the owner's next poll, or have to be sent by this thread.
    #[inline]
    pub fn defer(&self, requests: u32) -> Seen {
        // Release: the thread that takes them finds them.
        Seen(
            self.0
                .fetch_add(u64::from(requests) * DEFERRED, Ordering::AcqRel),
        )
    }

    /// The caller sends what was deferred, if this is true.
    #[inline]
    pub fn take_deferred(&self) -> bool {
        // A thread that has just armed reads its own transition here, or a later one.
        self.0.load(Ordering::Relaxed) >= DEFERRED
            && Seen(self.0.fetch_and(DEFERRED - 1, Ordering::AcqRel)).has_deferred()
    }

    /// The object has to be added to the engine's list, if this is true.
    pub fn enter_list(&self) -> bool {
        self.0.fetch_or(LISTED, Ordering::AcqRel) & LISTED == 0
    }

    /// The engine has taken it from the list.
    pub fn leave_list(&self) {
        self.0.fetch_and(!LISTED, Ordering::AcqRel);
    }
}

/// Receives. The order is that of the receive queue's lock: a holder without a receive announces that, and then looks once more.
impl Wake {
    /// A message waits for a receive. True if that is news.
    pub fn starve(&self) -> bool {
        self.0.fetch_or(STARVED, Ordering::AcqRel) & STARVED == 0
    }

    /// A receive is there. True if a message waited: the caller drives.
    #[inline]
    pub fn feed(&self) -> bool {
        self.0.load(Ordering::Relaxed) & STARVED != 0
            && self.0.fetch_and(!STARVED, Ordering::AcqRel) & STARVED != 0
    }
}
