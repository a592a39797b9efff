//! The parameters of one run of blast: the client sends them, the server checks them.

use crate::driver::Transport;
use crate::error::{BenchError, Result};
use crate::named::named;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use weft_exs::Options;

/// The most memory that either side may request for its outstanding operations.
const MOST_MEMORY: u64 = 4 << 30;
/// Outstanding operations of either side, at most.
const MOST_OUTSTANDING: u32 = 4096;
/// The longest message.
const LONGEST: u64 = 1 << 30;

/// An enumeration with its words on the command line and in JSON, and the sockets' values.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident = $exs:ty { $($(#[$case_doc:meta])* $case:ident = $word:literal => $value:ident),* $(,)? }) => {
        named! {
            $(#[$doc])*
            pub enum $name { $($(#[$case_doc])* $case = $word),* }
        }

        impl $name {
            pub(crate) fn exs(self) -> $exs {
                match self { $(Self::$case => <$exs>::$value),* }
            }
        }
    };
}

words! {
    /// The type of the sockets.
    Kind = weft_exs::Kind {
        /// Bytes
        Stream = "stream" => Stream,
        /// Messages
        Seqpacket = "seqpacket" => SeqPacket,
    }
}
words! {
    /// The transfer mode of a stream.
    Mode = weft_exs::Mode {
        /// Directly or through the receiver's buffer, whichever is faster: a sender without an advert may wait for one
        Dynamic = "dynamic" => Dynamic,
        /// As in the stream paper: directly if there is an advert, through the receiver's buffer at once otherwise
        Published = "published" => Published,
        /// Always directly: the sender waits for adverts
        Direct = "direct" => Direct,
        /// Always through the receiver's buffer
        Indirect = "indirect" => Indirect,
    }
}
words! {
    /// The transfer design of sequenced packets.
    Design = weft_exs::Design {
        /// The receiver adverts its memory, the sender writes to it
        Advert = "advert" => Advert,
        /// The sender adverts its memory, the receiver reads it
        Source = "source" => Source,
    }
}
words! {
    /// How both sides wait for events.
    Wait = weft_exs::Wait {
        /// Sleep at once
        Notify = "notify" => Notify,
        /// Look for a while, then sleep
        Adaptive = "adaptive" => Adaptive,
        /// Never sleep
        Busy = "busy" => BusyPoll,
    }
}

/// The lengths of the messages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lengths {
    /// All the same, in bytes.
    Fixed(u64),
    /// From an exponential distribution; longer ones than `max` become `max`.
    Exponential {
        /// Mean before that, in bytes.
        mean: u64,
        /// The longest, in bytes.
        max: u64,
        /// Seed of the lengths.
        seed: u64,
    },
}

impl Lengths {
    /// The longest message.
    pub fn max(&self) -> u64 {
        match *self {
            Self::Fixed(len) => len,
            Self::Exponential { max, .. } => max,
        }
    }

    /// The lengths, one after the other, the same each time.
    pub(crate) fn iter(self) -> impl Iterator<Item = usize> {
        let mut state = match self {
            Self::Fixed(_) => 0,
            Self::Exponential { seed, .. } => seed,
        };
        std::iter::from_fn(move || match self {
            Self::Fixed(len) => Some(len as usize),
            Self::Exponential { mean, max, .. } => {
                state = state.wrapping_add(GOLDEN);
                // From 0, exclusive, to 1, inclusive.
                let share = ((mix(state) >> 11) + 1) as f64 / (1u64 << 53) as f64;
                let len = -(mean as f64) * share.ln();
                Some((len as u64).clamp(1, max) as usize)
            }
        })
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finisher of splitmix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Writes into `out` the bytes from `offset` on of a stream made from `seed`.
pub(crate) fn pattern(seed: u64, offset: u64, out: &mut [u8]) {
    let mut at = offset;
    let mut rest = out;
    while !rest.is_empty() {
        let word = mix(seed.wrapping_add((at / 8).wrapping_mul(GOLDEN))).to_le_bytes();
        let from = (at % 8) as usize;
        let len = (8 - from).min(rest.len());
        let (now, later) = rest.split_at_mut(len);
        now.copy_from_slice(&word[from..from + len]);
        at = at.wrapping_add(len as u64);
        rest = later;
    }
}

/// When a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Amount {
    /// After this many messages.
    Messages(u64),
    /// With the message that completes this many bytes.
    Bytes(u64),
    /// With the first message that completes after this many seconds.
    Seconds(f64),
}

impl Amount {
    /// Whether the end is reached.
    pub(crate) fn is_reached(
        &self,
        messages: u64,
        bytes: u64,
        elapsed: impl FnOnce() -> Duration,
    ) -> bool {
        match *self {
            Self::Messages(most) => messages >= most,
            Self::Bytes(most) => bytes >= most,
            Self::Seconds(most) => elapsed().as_secs_f64() >= most,
        }
    }

    /// The completed share, from 0 to 1.
    pub fn share(&self, messages: u64, bytes: u64, elapsed: Duration) -> f64 {
        let share = match *self {
            Self::Messages(most) => messages as f64 / most.max(1) as f64,
            Self::Bytes(most) => bytes as f64 / most.max(1) as f64,
            Self::Seconds(most) => elapsed.as_secs_f64() / most,
        };
        share.min(1.0)
    }
}

/// One run: a connection, its messages, its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The transport of the connection; `None`: shared memory where both can use it.
    pub transport: Option<Transport>,
    /// The type of the sockets.
    pub kind: Kind,
    /// The transfer mode of a stream.
    pub mode: Mode,
    /// The transfer design of packets.
    pub design: Design,
    /// The lengths of the messages.
    pub lengths: Lengths,
    /// When the run ends.
    pub amount: Amount,
    /// Bytes before that, for memory, windows and caches to settle: neither counted nor timed, but in the statistics.
    pub warm_up: u64,
    /// Sends that are outstanding at the client.
    pub sends: u32,
    /// Receives that are outstanding at the server, each as long as the longest message.
    pub receives: u32,
    /// Receives complete only when they are full.
    pub waitall: bool,
    /// The library's registered memory; else ordinary memory.
    pub registered: bool,
    /// Data up to this many bytes travels in the message that announces it.
    pub small: u32,
    /// Small data may be left where it arrived.
    pub in_place: bool,
    /// Bytes of the intermediate buffer.
    pub buffer: u32,
    /// Control receives: the peer's send credits.
    pub credits: u32,
    /// How both sides wait.
    pub wait: Wait,
    /// FPDUs carry a CRC, over TCP.
    pub crc: bool,
    /// Seed of the contents, which are checked; the figures then mean little.
    pub verify: Option<u64>,
}

impl Default for Plan {
    /// Half a second of 64 KiB messages, twice as many receives as sends, the sockets' defaults, sleeping, no CRC.
    fn default() -> Self {
        let sockets = Options::default();
        Self {
            transport: None,
            kind: Kind::Stream,
            mode: Mode::Dynamic,
            design: Design::Advert,
            lengths: Lengths::Fixed(64 << 10),
            amount: Amount::Seconds(0.5),
            warm_up: 0,
            sends: 8,
            receives: 16,
            waitall: false,
            registered: true,
            small: sockets.small_packet_max,
            in_place: false,
            buffer: sockets.buffer,
            credits: sockets.credits,
            wait: Wait::Notify,
            crc: false,
            verify: None,
        }
    }
}

impl Plan {
    /// Refuses what cannot be, and what asks for too much memory.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: &str| Err(BenchError::Usage(why.to_owned()));
        let longest = self.lengths.max();
        let mean_is_odd = matches!(self.lengths, Lengths::Exponential { mean, .. } if mean == 0 || mean > LONGEST);
        if longest == 0 || longest > LONGEST || mean_is_odd {
            return refuse("messages are from 1 B to 1 GiB long");
        }
        let outstanding = 1..=MOST_OUTSTANDING;
        if !outstanding.contains(&self.sends) || !outstanding.contains(&self.receives) {
            return refuse("from 1 to 4096 operations can be outstanding");
        }
        if longest.saturating_mul(self.sends.max(self.receives).into()) > MOST_MEMORY {
            return refuse("the outstanding operations would need more than 4 GiB");
        }
        match self.amount {
            Amount::Messages(0) | Amount::Bytes(0) => return refuse("there is nothing to send"),
            Amount::Seconds(time) if !(time > 0.0 && time <= 3600.0) => {
                return refuse("a run takes more than 0 seconds, and 3600 at most");
            }
            _ => {}
        }
        if !(4096..=1 << 30).contains(&self.buffer) {
            return refuse("the intermediate buffer is from 4 KiB to 1 GiB long");
        }
        if !(4..=65_535).contains(&self.credits) {
            return refuse("credits are from 4 to 65535");
        }
        if self.small > 16 << 20 {
            return refuse("small packets are at most 16 MiB long");
        }
        Ok(())
    }

    /// Sets a socket.
    pub(crate) fn set(&self, options: &mut Options) {
        options.mode = self.mode.exs();
        options.design = self.design.exs();
        options.small_packet_max = self.small;
        options.buffer = self.buffer;
        options.credits = self.credits;
        options.crc = self.crc;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_lengths_have_their_mean_and_repeat() {
        let lengths = |seed| Lengths::Exponential {
            mean: 1 << 20,
            max: 4 << 20,
            seed,
        };
        let take = |seed| lengths(seed).iter().take(20_000).collect::<Vec<_>>();
        let first = take(1);
        assert_eq!(first, take(1));
        assert_ne!(first, take(2));
        assert!(first.iter().all(|len| (1..=4 << 20).contains(len)));
        // The cut at four times the mean removes e^-4 of the mean.
        let mean = first.iter().sum::<usize>() as f64 / first.len() as f64;
        let expected = (1.0 - (-4.0f64).exp()) * f64::from(1 << 20);
        assert!((mean / expected - 1.0).abs() < 0.03, "{mean}");
        assert_eq!(Lengths::Fixed(7).iter().take(2).collect::<Vec<_>>(), [7, 7]);
    }

    #[test]
    fn the_pattern_is_the_same_however_it_is_cut() {
        let mut whole = [0; 100];
        pattern(5, 3, &mut whole);
        for cut in 1..99 {
            let (mut left, mut right) = (vec![0; cut], vec![0; 100 - cut]);
            pattern(5, 3, &mut left);
            pattern(5, 3 + cut as u64, &mut right);
            assert_eq!([left, right].concat(), whole);
        }
        let mut other = [0; 100];
        pattern(6, 3, &mut other);
        assert_ne!(whole, other);
    }

    #[test]
    fn hostile_plans_are_refused() {
        let fine = Plan::default();
        fine.check().unwrap();
        let bad = |change: fn(&mut Plan)| {
            let mut plan = fine.clone();
            change(&mut plan);
            assert!(plan.check().is_err(), "{plan:?}");
        };
        bad(|plan| plan.lengths = Lengths::Fixed(0));
        bad(|plan| plan.lengths = Lengths::Fixed(u64::MAX));
        bad(|plan| {
            plan.lengths = Lengths::Exponential {
                mean: 0,
                max: 9,
                seed: 0,
            }
        });
        bad(|plan| plan.receives = 0);
        bad(|plan| plan.sends = u32::MAX);
        bad(|plan| {
            plan.lengths = Lengths::Fixed(1 << 30);
            plan.receives = 5;
        });
        bad(|plan| plan.amount = Amount::Messages(0));
        bad(|plan| plan.amount = Amount::Seconds(f64::NAN));
        bad(|plan| plan.buffer = 1);
        bad(|plan| plan.credits = 3);
        bad(|plan| plan.small = u32::MAX);
    }

    #[test]
    fn amounts() {
        let never = || panic!("the clock is not needed");
        assert!(Amount::Messages(3).is_reached(3, 0, never));
        assert!(!Amount::Bytes(3).is_reached(9, 2, never));
        assert!(Amount::Seconds(0.5).is_reached(0, 0, || Duration::from_secs(1)));
        let share = Amount::Bytes(8).share(0, 2, Duration::ZERO);
        assert!((share - 0.25).abs() < 1e-12);
    }
}
