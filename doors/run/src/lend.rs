//! Sends from the program's own memory: the user's choice, and when a sender stops lending for a while.

/// How a sender moves the bytes of large sends to a peer on this host. A receiver accepts every mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Through the ring: two copies.
    #[default]
    Bsdp,
    /// From the program's memory, while the send waits: one copy.
    Zsdp,
    /// The same, if a measurement on this machine shows that it is faster than the ring.
    Auto,
    /// From the program's memory, which is protected, while the program continues. A thread that writes to it waits until the receiver has the bytes.
    AzBlock,
    /// The same, but a thread that writes continues as soon as the bytes have been copied.
    AzCopy,
}

impl Mode {
    /// Parses the values of [`MODE`] and [`ON_WRITE`].
    pub fn of(mode: &str, on_write: &str) -> Mode {
        match (mode, on_write) {
            ("zsdp", _) => Mode::Zsdp,
            ("azsdp", "copy") => Mode::AzCopy,
            ("azsdp", _) => Mode::AzBlock,
            ("auto", _) => Mode::Auto,
            _ => Mode::Bsdp,
        }
    }

    /// Its name in the ledger; empty where nothing is sent from the program's memory.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Bsdp => "",
            Mode::Zsdp | Mode::Auto => "zsdp",
            Mode::AzBlock => "azsdp",
            Mode::AzCopy => "azsdp copy",
        }
    }

    /// Converts a number of a ledger.
    pub fn from_number(number: u64) -> Mode {
        match number {
            1 => Mode::Zsdp,
            2 => Mode::Auto,
            3 => Mode::AzBlock,
            4 => Mode::AzCopy,
            _ => Mode::Bsdp,
        }
    }

    /// Returns true if the mode protects memory.
    pub fn protects(self) -> bool {
        matches!(self, Mode::AzBlock | Mode::AzCopy)
    }
}

/// The variable of the environment that names the mode.
pub const MODE: &str = "WEFT_RUN";
/// Environment variable with the effect of a write to protected memory: `block` or `copy`.
pub const ON_WRITE: &str = "WEFT_RUN_AZSDP";
/// `trust`: no other process writes to shared memory that is sent.
pub const SHARED: &str = "WEFT_RUN_SHARED";
/// Environment variable with the least number of bytes of a send from the program's memory.
pub const FROM: &str = "WEFT_RUN_FROM";
/// The default of [`FROM`].
pub const FROM_BYTES: usize = 32 << 10;

/// Why the bytes of a large send went through the ring instead. Bits of a word of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Copied {
    /// The send must not wait.
    NonBlocking,
    /// The peer has not reported yet whether it can read our memory.
    NotYet,
    /// The peer may not read our memory.
    NotAllowed,
    /// Several processes share the socket, or another one has met the peer.
    Shared,
    /// Both ends are of one process.
    OneProcess,
    /// A stack, a read-only mapping, or less than the least number of whole pages.
    Memory,
    /// The memory is protected already, with other borders.
    Overlap,
    /// The program has put its own handler of SIGSEGV in the place of ours.
    Handler,
    /// Too much is under way.
    Full,
    /// The program wrote to memory under way too often.
    Faults,
    /// The receiver did not fetch for a while.
    SlowReader,
    /// Two copies are faster for this kind of memory.
    Slower,
    /// A shared mapping that other processes can have.
    Others,
    /// The peer is of another user, which is lent nothing.
    OtherUser,
}

impl Copied {
    const ALL: [Copied; 14] = [
        Copied::NonBlocking,
        Copied::NotYet,
        Copied::NotAllowed,
        Copied::Shared,
        Copied::OneProcess,
        Copied::Memory,
        Copied::Overlap,
        Copied::Handler,
        Copied::Full,
        Copied::Faults,
        Copied::SlowReader,
        Copied::Slower,
        Copied::Others,
        Copied::OtherUser,
    ];

    /// Its bit.
    pub fn bit(self) -> u64 {
        1 << self as u8
    }

    /// Returns the reasons in a word of the ledger.
    pub fn of(word: u64) -> impl Iterator<Item = Copied> {
        Copied::ALL
            .into_iter()
            .filter(move |one| word & one.bit() != 0)
    }

    /// In words.
    pub fn text(self) -> &'static str {
        match self {
            Copied::NonBlocking => "the socket does not block",
            Copied::NotYet => "the peer had not tried yet to read our memory",
            Copied::NotAllowed => "the system does not let the peer read our memory",
            Copied::Shared => "several processes share the socket",
            Copied::OneProcess => "both ends are of one process",
            Copied::Memory => {
                "the memory cannot be protected: stack, read-only, or too few whole pages"
            }
            Copied::Overlap => "the memory is under way already with other borders",
            Copied::Handler => "the program has a SIGSEGV handler of its own in the place of ours",
            Copied::Full => "too much was under way",
            Copied::Faults => "the program wrote to memory under way too often",
            Copied::SlowReader => "the receiver did not fetch for a while",
            Copied::Slower => "two copies are faster here",
            Copied::Others => {
                "other processes can have the shared memory, or its names are too many"
            }
            Copied::OtherUser => "the peer is of another user, which is lent no memory",
        }
    }
}

/// Sends between two looks at how many of them met a fault.
const WINDOW: u32 = 32;
/// This many faults of them end it for a while.
const LIMIT: u32 = 16;
/// Sends through the ring after that, at first and at most.
const FIRST_REST: u32 = 64;
const LONGEST_REST: u32 = 4096;

/// Decides when a sender stops lending memory for a while, and resumes.
#[derive(Clone, Debug)]
pub struct Policy {
    sends: u32,
    faults: u32,
    rest: u32,
    next_rest: u32,
    why: Copied,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            sends: 0,
            faults: 0,
            rest: 0,
            next_rest: FIRST_REST,
            why: Copied::Faults,
        }
    }
}

impl Policy {
    /// Checks that the next large send may be from the program's memory.
    ///
    /// # Errors
    /// The reason why not.
    pub fn may(&mut self) -> Result<(), Copied> {
        if self.rest == 0 {
            return Ok(());
        }
        self.rest -= 1;
        Err(self.why)
    }

    /// Notes such a send. Since the last one `faults` threads have waited because they wrote to memory under way.
    pub fn sent(&mut self, faults: u32) {
        self.faults = self.faults.saturating_add(faults);
        self.sends += 1;
        if self.sends < WINDOW {
            return;
        }
        if self.faults >= LIMIT {
            self.leave_off(Copied::Faults);
        } else {
            self.next_rest = FIRST_REST;
        }
        (self.sends, self.faults) = (0, 0);
    }

    /// The receiver did not fetch in time.
    pub fn late(&mut self) {
        self.leave_off(Copied::SlowReader);
    }

    fn leave_off(&mut self, why: Copied) {
        self.why = why;
        self.rest = self.next_rest;
        self.next_rest = (self.next_rest * 2).min(LONGEST_REST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_and_reasons_survive_the_ledger() {
        for mode in [
            Mode::Bsdp,
            Mode::Zsdp,
            Mode::Auto,
            Mode::AzBlock,
            Mode::AzCopy,
        ] {
            assert_eq!(Mode::from_number(mode as u64), mode);
        }
        assert_eq!(Mode::of("azsdp", "copy"), Mode::AzCopy);
        assert_eq!(Mode::of("nonsense", ""), Mode::Bsdp);
        let word = Copied::Memory.bit() | Copied::Slower.bit();
        let both: Vec<_> = Copied::of(word).collect();
        assert_eq!(both, [Copied::Memory, Copied::Slower]);
        assert_eq!(Copied::of(u64::MAX).count(), Copied::ALL.len());
    }

    #[test]
    fn faults_end_it_for_a_while_and_then_longer() {
        let mut policy = Policy::default();
        let mut run = |faults| {
            let mut rest = 0;
            while let Err(why) = policy.may() {
                assert_eq!(why, Copied::Faults);
                rest += 1;
            }
            for _ in 0..WINDOW {
                policy.sent(faults);
            }
            rest
        };
        assert_eq!(run(1), 0);
        assert_eq!(run(1), FIRST_REST);
        assert_eq!(run(0), 2 * FIRST_REST);
        assert_eq!(run(0), 0);
        policy.late();
        assert_eq!(policy.may(), Err(Copied::SlowReader));
    }
}
