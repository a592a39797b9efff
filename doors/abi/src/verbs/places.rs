//! Places in the queues of queue pairs, counted as adapters do. The place of a request is free again when the program has polled its completion. The place of
//! an unsignaled request is free with the next completion after it. A program that posts until `ENOMEM` therefore cannot overrun a completion queue that has an
//! entry for each place.
//!
//! The counters are found by the queue pair's number, without a lock, and outlive the queue pair: a poll may be returning its completions at that moment. A
//! late completion makes one place too many, never one too few. Sends that a completion counter counts and that make no completion free their places
//! themselves, because the program may never poll.

use std::sync::atomic::{AtomicI32, Ordering};

use rustix::io::Errno;
use weft_verbs::{Wc, WcOpcode};

use crate::once::ForkOnce;

#[derive(Default)]
pub(crate) struct Places(AtomicI32);

impl Places {
    /// Runs a post that needs one of `max` places.
    #[inline]
    pub(crate) fn take(
        &self,
        max: u32,
        post: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        self.take_or(max, || 0, post)
    }

    /// As [`Places::take`]. When no place is free, `reclaim` returns the number of places that are not needed any more.
    #[inline]
    pub(crate) fn take_or(
        &self,
        max: u32,
        reclaim: impl FnOnce() -> u32,
        post: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let before = i64::from(self.0.fetch_add(1, Ordering::Relaxed));
        let room = before < i64::from(max) || {
            let back = reclaim();
            self.give_back(back);
            before - i64::from(back) < i64::from(max)
        };
        let posted = if room { post() } else { Err(Errno::NOMEM) };
        posted.inspect_err(|_| self.give_back(1))
    }

    /// True if `count` more of `max` places are free.
    pub(crate) fn has_room(&self, count: usize, max: u32) -> bool {
        let used = usize::try_from(self.0.load(Ordering::Relaxed)).unwrap_or(0);
        used + count <= max as usize
    }

    #[inline]
    pub(crate) fn give_back(&self, count: u32) {
        self.0.fetch_sub(count as i32, Ordering::Relaxed);
    }
}

/// The places of a queue pair's own two queues.
#[derive(Default)]
pub(crate) struct Both {
    pub(crate) send: Places,
    pub(crate) recv: Places,
}

impl Both {
    /// Frees all places: no request is posted.
    pub(crate) fn clear(&self) {
        self.send.0.store(0, Ordering::Relaxed);
        self.recv.0.store(0, Ordering::Relaxed);
    }
}

/// Queue pair numbers of a page; they have 24 bits.
const PAGE: usize = 256;

static PAGES: [ForkOnce<[Both; PAGE]>; 1 << 16] = [const { ForkOnce::new() }; 1 << 16];

/// The page of a number and its index in the page.
fn place(num: u32) -> (&'static ForkOnce<[Both; PAGE]>, usize) {
    let num = num as usize & 0x00ff_ffff;
    (&PAGES[num / PAGE], num % PAGE)
}

/// The counters for a queue pair with this number.
pub(crate) fn of(num: u32) -> &'static Both {
    let (page, at) = place(num);
    &page.get_or_init(|| std::array::from_fn(|_| Both::default()))[at]
}

/// The program has polled these completions of one queue.
#[inline]
pub(crate) fn polled(wcs: &[Wc]) {
    let mut rest = wcs;
    while let [first, ..] = rest {
        let is_recv = |wc: &Wc| matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvWithImm);
        let same = |wc: &&Wc| wc.qp_num == first.qp_num && is_recv(wc) == is_recv(first);
        let run = rest.iter().take_while(same).count();
        let count = rest[..run].iter().map(|wc| wc.wqes_retired).sum();
        rest = &rest[run..];
        let (page, at) = place(first.qp_num);
        if let Some(page) = page.get() {
            let both = &page[at];
            let queue = if is_recv(first) {
                &both.recv
            } else {
                &both.send
            };
            queue.give_back(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wc(qp_num: u32, opcode: WcOpcode, places: u32) -> Wc {
        Wc {
            qp_num,
            opcode,
            wqes_retired: places,
            ..Wc::default()
        }
    }

    #[test]
    fn places_are_free_when_they_are_polled() {
        let (one, other) = (of(0x00ab_cd00), of(0x00ab_cdff));
        for _ in 0..3 {
            assert_eq!(one.send.take(3, || Ok(())), Ok(()));
        }
        assert_eq!(one.send.take(3, || Ok(())), Err(Errno::NOMEM));
        assert_eq!(one.send.take_or(3, || 1, || Ok(())), Ok(()));
        assert_eq!(one.recv.take(1, || Err(Errno::INVAL)), Err(Errno::INVAL));
        assert_eq!(one.recv.take(1, || Ok(())), Ok(()));
        assert_eq!(other.send.take(1, || Ok(())), Ok(()));
        polled(&[
            wc(0x00ab_cd00, WcOpcode::Write, 2),
            wc(0x00ab_cd00, WcOpcode::Recv, 1),
            wc(0x00ab_cdff, WcOpcode::Send, 1),
            wc(0x00ff_ffff, WcOpcode::Send, 1),
        ]);
        assert!(one.send.has_room(2, 3) && !one.send.has_room(3, 3));
        assert!(one.recv.has_room(1, 1) && other.send.has_room(1, 1));
        one.clear();
        assert!(one.send.has_room(3, 3));
    }
}
