//! Messages that wait for a receive, and their time limits.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use weft_wire::ddp::Header;

/// The bytes that may wait outside the transport, for one queue pair and for all of a device. Each segment counts for a little more than
/// its length.
const HELD_MAX: usize = 64 << 20;
const HELD_BY_ALL: usize = 256 << 20;
const HELD_COST: usize = 64;

/// Retries that have no end, as InfiniBand encodes them.
pub(super) const RNR_FOR_EVER: u8 = 7;
/// The longest timer that InfiniBand has, which connections of its connection manager get.
const RNR_TIMER: Duration = Duration::from_micros(655_360);
/// The tagged offset of the notice of how often to wait, but for that number in the lowest byte.
pub(super) const NOTICE: u64 = u64::from_be_bytes(*b"weftRNR\0");

/// The time limit of a message that waits for its receive.
pub(super) struct Patience {
    pub(super) retry: u8,
    pub(super) timer: Duration,
    /// The message that waits now: its first segment, and how long that is.
    pub(super) first: Option<(Header, usize)>,
    /// When it has waited too long.
    pub(super) due: Option<Instant>,
    /// When the engine calls us. One timer at a time, however many messages wait one after the other.
    pub(super) timed: Option<Instant>,
    /// A message has waited too long.
    pub(super) over: bool,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            retry: RNR_FOR_EVER,
            timer: RNR_TIMER,
            first: None,
            due: None,
            timed: None,
            over: false,
        }
    }
}

impl Patience {
    /// The peer has sent an empty Write to this tagged offset.
    pub(super) fn hear(&mut self, to: u64) {
        if to & !0xff == NOTICE {
            self.retry = to as u8;
        }
    }

    /// This message begins to wait. When to look whether it still does, unless that is known.
    pub(super) fn begin(&mut self, header: Header, len: usize) -> Option<Instant> {
        self.first = Some((header, len));
        self.due = None;
        if self.retry >= RNR_FOR_EVER {
            return None;
        }
        let due = Instant::now().checked_add(self.timer.saturating_mul(u32::from(self.retry) + 1));
        self.due = due;
        if self
            .timed
            .is_some_and(|timed| due.is_none_or(|due| timed <= due))
        {
            return None;
        }
        self.timed = due;
        due
    }

    pub(super) fn end(&mut self) {
        (self.first, self.due) = (None, None);
    }
}

/// The messages that wait for a receive.
#[derive(Default)]
pub(super) struct RnrQueue {
    /// Whether something waits: the first of `ulpdus`, or the beginning of the staging buffer.
    pub(super) waits: bool,
    /// The beginning of the staging buffer has to wait there.
    pub(super) stopped: bool,
    /// The peer has closed, behind what waits.
    pub(super) closed: bool,
    /// A Read Response has begun and not ended: nothing may come in between.
    pub(super) response_open: bool,
    pub(super) ulpdus: VecDeque<Box<[u8]>>,
    /// A segment that is being fetched.
    pub(super) partial: Vec<u8>,
    bytes: usize,
    /// The total of the device, once this queue pair holds anything.
    by_all: Option<Arc<AtomicUsize>>,
}

impl Drop for RnrQueue {
    fn drop(&mut self) {
        if let Some(all) = &self.by_all {
            all.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

impl RnrQueue {
    /// Room for a segment of this length, if there is any.
    pub(super) fn reserve(&mut self, len: usize, by_all: &Arc<AtomicUsize>) -> bool {
        let cost = len + HELD_COST;
        let all = self.by_all.get_or_insert_with(|| Arc::clone(by_all));
        if self.bytes + cost > HELD_MAX
            || all.fetch_add(cost, Ordering::Relaxed) + cost > HELD_BY_ALL
        {
            if self.bytes + cost <= HELD_MAX {
                all.fetch_sub(cost, Ordering::Relaxed);
            }
            return false;
        }
        self.bytes += cost;
        true
    }

    pub(super) fn release(&mut self, len: usize) {
        self.bytes -= len + HELD_COST;
        if let Some(all) = &self.by_all {
            all.fetch_sub(len + HELD_COST, Ordering::Relaxed);
        }
    }

    /// The segment that was being fetched is there.
    pub(super) fn fetched(&mut self) {
        self.ulpdus
            .push_back(std::mem::take(&mut self.partial).into());
    }

    /// The peer has closed: nothing follows the waiting messages. The program is notified now, and the queue pair ends when the last of them
    /// has its receive.
    pub(super) fn close(&mut self) {
        (self.stopped, self.closed) = (true, true);
    }
}
