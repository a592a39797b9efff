//! How a direction goes over to its ring. The receiver decides, when it has read all bytes that were sent over TCP.

use super::{Carrier, Route};
use crate::meet::Why;

/// A step of the receiver, in this order. The caller does what a step says and answers it; see [`Step::next`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Is the library on, and the direction not closed?
    IsOpen,
    /// Has this process alone the socket? Another one would go on reading TCP.
    IsAlone,
    /// Can all epoll sets with the socket watch its bell?
    CanMove,
    /// Is the direction on TCP? The receive lock is held from here on.
    IsOnTcp,
    /// Is there somebody to carry the bytes on?
    IsCarried,
    /// Stores [`marked`]. A thread that is about to wait in the kernel sees it and does not.
    Mark,
    /// Does no thread wait in the kernel for TCP? Behind [`Step::Mark`], because such a thread does the reverse.
    NobodyWaits,
    /// Does the kernel have our count? Answered by [`compare`]. On this host all bytes that have arrived count: the sender has counted no more than we have
    /// received, so one that is left is of a call that is not seen, and others would overtake those behind it.
    Count,
    /// Asks for the bell: the request stands before the sender may send anything in the ring.
    Arm,
    /// Tells the sender, if it has sent nothing since: by a swap of its word, or on another host by the consent.
    Tell,
}

/// The answer to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// It is so, or is done.
    Yes,
    /// Not now.
    No,
    /// It will never be yes.
    Never,
}

impl From<bool> for Answer {
    fn from(yes: bool) -> Answer {
        if yes { Answer::Yes } else { Answer::No }
    }
}

/// What follows a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Next {
    /// This step.
    Do(Step),
    /// The direction has gone over.
    Over,
    /// Not now.
    Not {
        /// The mark is taken back.
        unmark: bool,
        /// The reason to note, if any.
        why: Why,
    },
    /// Never: the rest of the stream comes over TCP.
    Never {
        /// The mark is taken back.
        unmark: bool,
        /// The reason.
        why: Why,
    },
}

impl Step {
    /// The first one.
    pub const FIRST: Step = Step::IsOpen;

    /// The step after this one, by its answer.
    #[must_use]
    pub fn next(self, answer: impl Into<Answer>) -> Next {
        let unmark = matches!(self, Step::NobodyWaits | Step::Count | Step::Tell);
        let why = match self {
            Step::IsAlone => Why::Forked,
            Step::CanMove => Why::Epoll,
            Step::Count => Why::Unseen,
            Step::IsCarried => Why::SideLost,
            _ => Why::None,
        };
        match (answer.into(), self) {
            (Answer::Yes, Step::IsOpen) => Next::Do(Step::IsAlone),
            (Answer::Yes, Step::IsAlone) => Next::Do(Step::CanMove),
            (Answer::Yes, Step::CanMove) => Next::Do(Step::IsOnTcp),
            (Answer::Yes, Step::IsOnTcp) => Next::Do(Step::IsCarried),
            (Answer::Yes, Step::IsCarried) => Next::Do(Step::Mark),
            (Answer::Yes, Step::Mark) => Next::Do(Step::NobodyWaits),
            (Answer::Yes, Step::NobodyWaits) => Next::Do(Step::Count),
            (Answer::Yes, Step::Count) => Next::Do(Step::Arm),
            (Answer::Yes, Step::Arm) => Next::Do(Step::Tell),
            (Answer::Yes, Step::Tell) => Next::Over,
            (Answer::Never, _) | (Answer::No, Step::IsCarried) => Next::Never { unmark, why },
            (Answer::No, Step::Count) => Next::Not {
                unmark,
                why: Why::None,
            },
            (Answer::No, _) => Next::Not { unmark, why },
        }
    }
}

/// The state of a receiver that is going over.
#[must_use]
pub fn marked(carrier: Carrier) -> Route {
    match carrier {
        Carrier::Here => Route::Ring,
        Carrier::Bsdp => Route::Both,
    }
}

/// Compares our count of a direction with the kernel's. `None`: the kernel does not say, or bytes move at this moment.
#[must_use]
pub fn compare(ours: u64, kernel: Option<u64>) -> Answer {
    match kernel {
        Some(count) if count == ours => Answer::Yes,
        Some(_) => Answer::Never,
        None => Answer::No,
    }
}

/// Whether a sender may begin to count its bytes where the peer sees the count, as far as the kernel agrees to it. Another process that has the socket counts
/// for itself.
#[must_use]
pub fn may_join(holders: u32, out: Route) -> bool {
    holders == 1 && out == Route::Tcp
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_marked_is_taken_back() {
        let mut step = Step::FIRST;
        let mut is_marked = false;
        loop {
            let unmarks = match step.next(false) {
                Next::Not { unmark, .. } | Next::Never { unmark, .. } => unmark,
                other => panic!("{step:?} goes on with {other:?}"),
            };
            // These two are always answered by yes.
            if !matches!(step, Step::Mark | Step::Arm) {
                assert_eq!(unmarks, is_marked, "{step:?}");
            }
            is_marked |= step == Step::Mark;
            match step.next(true) {
                Next::Do(next) => step = next,
                next => return assert_eq!(next, Next::Over),
            }
        }
    }

    #[test]
    fn a_count_that_disagrees_ends_the_attempt_for_good() {
        assert_eq!(compare(3, Some(3)), Answer::Yes);
        assert_eq!(compare(3, None), Answer::No);
        let why = Why::Unseen;
        let unmark = true;
        let next = Step::Count.next(compare(3, Some(4)));
        assert_eq!(next, Next::Never { unmark, why });
    }
}
