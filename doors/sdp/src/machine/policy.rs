//! Which way a send takes: by its size, by its memory, and by what the program does with its buffers.

/// How a sender moves the bytes of large sends. The receiver takes all of them at any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Buffered: copied into the send buffer, sent in messages, copied out.
    #[default]
    Bsdp,
    /// Zero copy, synchronous: the receiver fetches from the program's memory, while the send waits. One source in flight.
    Zsdp,
    /// Zero copy, asynchronous: the memory is protected, the send returns at once, many sources are in flight. A thread that writes to the memory
    /// waits until it has been fetched (block on write).
    AzBlock,
    /// The same, but a thread that writes gets on as soon as the bytes have been copied, if the receiver has not begun to fetch them
    /// (copy on write).
    AzCopy,
}

impl Mode {
    /// The name, as options and results have it.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Bsdp => "bsdp",
            Mode::Zsdp => "zsdp",
            Mode::AzBlock => "azsdp-block",
            Mode::AzCopy => "azsdp-copy",
        }
    }

    /// Whether it protects memory.
    pub fn is_async(self) -> bool {
        matches!(self, Mode::AzBlock | Mode::AzCopy)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Through the send buffer.
    Buffered,
    /// A source; the send waits.
    Sync,
    /// A source of protected memory.
    Async,
}

/// Asynchronous sends between two looks at how many of them met a fault.
const WINDOW: u32 = 32;
/// Sends that are synchronous at first after too many faults, and at most.
const FIRST_REST: u32 = 64;
const LONGEST_REST: u32 = 4096;

/// The rules, and what has been learned.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    mode: Mode,
    /// Sends of at least this many bytes go from the program's memory.
    min: usize,
    /// Faults among [`WINDOW`] asynchronous sends from which on they are given up for a while.
    limit: u32,
    sends: u32,
    faults: u32,
    /// Synchronous sends still to come, and how many there will be the next time.
    rest: u32,
    next_rest: u32,
    falls: u64,
}

impl Policy {
    /// `min`: bytes from which on sends go from the program's memory. `limit`: faults of 32 asynchronous sends in a row from
    /// which on there are none for a while; past 32: never.
    pub fn new(mode: Mode, min: usize, limit: u32) -> Policy {
        Policy {
            mode,
            min,
            limit,
            sends: 0,
            faults: 0,
            rest: 0,
            next_rest: FIRST_REST,
            falls: 0,
        }
    }

    /// What the program has asked for.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Ask for another one, and forget what was learned.
    pub fn set_mode(&mut self, mode: Mode) {
        *self = Policy::new(mode, self.min, self.limit);
    }

    /// The way of a send of `len` bytes, of which `pages` are in whole pages.
    pub fn way(&mut self, len: usize, pages: usize) -> Way {
        if self.mode == Mode::Bsdp || len < self.min {
            return Way::Buffered;
        }
        if !self.mode.is_async() {
            return Way::Sync;
        }
        if self.rest > 0 {
            self.rest -= 1;
            return Way::Sync;
        }
        // The ends go through the send buffer: that has to pay.
        if pages < self.min.min(len / 2).max(1) {
            return Way::Sync;
        }
        Way::Async
    }

    /// An asynchronous send was begun.
    pub fn sent(&mut self) {
        self.sends += 1;
        if self.sends < WINDOW {
            return;
        }
        if self.faults >= self.limit {
            self.rest = self.next_rest;
            self.next_rest = (self.next_rest * 2).min(LONGEST_REST);
            self.falls += 1;
        } else {
            self.next_rest = FIRST_REST;
        }
        self.sends = 0;
        self.faults = 0;
    }

    /// A thread had to wait for the memory of one.
    pub fn faulted(&mut self) {
        self.faults = self.faults.saturating_add(1);
    }

    /// How often asynchronous sends were given up.
    pub fn falls(&self) -> u64 {
        self.falls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_unaligned_sends_take_the_other_ways() {
        let mut policy = Policy::new(Mode::AzCopy, 1 << 15, 16);
        assert_eq!(policy.way(100, 0), Way::Buffered);
        assert_eq!(policy.way(1 << 15, 1 << 15), Way::Async);
        assert_eq!(policy.way(1 << 16, 1 << 12), Way::Sync);
        policy.set_mode(Mode::Zsdp);
        assert_eq!(policy.way(1 << 16, 1 << 16), Way::Sync);
        policy.set_mode(Mode::Bsdp);
        assert_eq!(policy.way(1 << 30, 1 << 30), Way::Buffered);
    }

    #[test]
    fn too_many_faults_end_it_for_a_while_and_then_longer() {
        let mut policy = Policy::new(Mode::AzBlock, 1, 16);
        let mut run = |faulty: bool| {
            let mut sync = 0;
            while policy.way(4096, 4096) == Way::Sync {
                sync += 1;
            }
            for at in 0..WINDOW {
                if at > 0 {
                    assert_eq!(policy.way(4096, 4096), Way::Async);
                }
                if faulty {
                    policy.faulted();
                }
                policy.sent();
            }
            sync
        };
        assert_eq!(run(true), 0);
        assert_eq!(run(true), FIRST_REST);
        assert_eq!(run(false), 2 * FIRST_REST);
        assert_eq!(run(true), 0);
        assert_eq!(run(true), FIRST_REST);
        assert_eq!(policy.falls(), 4);
    }

    #[test]
    fn a_limit_past_the_window_is_never_reached() {
        let mut policy = Policy::new(Mode::AzBlock, 1, u32::MAX);
        for _ in 0..1000 {
            assert_eq!(policy.way(4096, 4096), Way::Async);
            policy.faulted();
            policy.sent();
        }
    }
}
