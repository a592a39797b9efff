//! Bursts of single posts: programs that post one by one, and poll afterwards.

use std::time::{Duration, Instant};

use super::UdDest;

/// So many posts of a burst are sent at once, before further ones are taken for the rest of a long one.
const AT_ONCE: u32 = 2;
/// A program that takes longer than that between two posts is computing, and may continue so after the second one.
const PAUSE: Duration = Duration::from_micros(4);

/// Posts of one length to one destination, with neither a poll nor much time between them.
#[derive(Default)]
pub(crate) struct Burst {
    to: Option<UdDest>,
    len: u32,
    polls: u32,
    count: u32,
    /// When the last post was over.
    last: Option<Instant>,
}

impl Burst {
    /// One more post. `polls` changes with each poll.
    pub(crate) fn add(&mut self, to: &UdDest, len: u32, polls: u32) {
        let goes_on = self.len == len
            && self.polls == polls
            && self.to.as_ref() == Some(to)
            && self.last.is_some_and(|last| last.elapsed() < PAUSE);
        if goes_on {
            self.count += 1;
            return;
        }
        *self = Burst {
            to: Some(*to),
            len,
            polls,
            count: 1,
            last: None,
        };
    }

    /// Whether the program posts so many at once that the next one is likely to follow.
    pub(crate) fn is_long(&self) -> bool {
        self.count > AT_ONCE
    }

    /// The post is over.
    pub(crate) fn posted(&mut self) {
        self.last = Some(Instant::now());
    }
}
