//! Messages in datagrams (docs/spec/dgram.md): segmentation, reassembly and pacing.
//!
//! The machines use no socket, no clock and no memory. The driver passes in the time with each call (it must not go back), a parsed segment
//! and its source, and gets the actions:
//!
//! * [`cut`] returns the segments of a message.
//! * [`Reassembler`] decides for each segment whether its payload has to be placed ([`Reassembler::admit`]), is told when it was
//!   ([`Reassembler::placed`]), and returns messages when they are complete, or when their time is up ([`Reassembler::expire`]).
//! * [`Pair`] and [`Flows`] are the two halves of the reliable mode: the sends of one queue pair to another, and the flows to a queue pair from
//!   all others. Both use [`Outgoing`] and [`Incoming`].
//! * [`Pacer`] decides whether a receiver has room for one more datagram, from that receiver's reports.
//!
//! Segments come from any host that can send a datagram. So all state has a limit, state beyond it is dropped, and each choice of what to
//! drop favours recently active senders.

mod flows;
mod pace;
mod pair;
mod reassembly;
mod window;

pub use flows::{Admit, Answer, Carried, Flows, FlowsConfig, Resumed, Spot};
pub use pace::{Pacer, PacerConfig, Wait};
pub use pair::{Failure, Pair, PairConfig, Transmit};
pub use reassembly::{Config, Finished, Ranges, Reassembler, Refusal, Source, Ticket, Whole};
pub use window::{Arrival, Incoming, Now, Outgoing, WINDOW, WindowConfig};

use weft_wire::dgram::segment::MAX_PAYLOAD;

/// The offsets and lengths of a message's segments, in order, none longer than `limit` bytes of payload. An empty message has one empty
/// segment. Segments of one message have the same length, but for the last: the kernel can then send several at once.
///
/// ```
/// let parts: Vec<_> = weft_proto::dgram::cut(100_000, 65_408).collect();
/// assert_eq!(parts, [(0, 50_048), (50_048, 49_952)]);
/// ```
pub fn cut(len: u32, limit: usize) -> impl Iterator<Item = (u32, u32)> + Clone {
    let each = each(len, limit);
    let mut next = Some(0);
    std::iter::from_fn(move || {
        let offset: u32 = next?;
        let part = each.min(len - offset);
        let end = offset + part;
        next = (end < len).then_some(end);
        Some((offset, part))
    })
}

/// The length of a message's segments, but for the last one.
fn each(len: u32, limit: usize) -> u32 {
    let limit = limit.clamp(1, MAX_PAYLOAD) as u32;
    let parts = len.div_ceil(limit).max(1);
    // Balanced, so that the last one is no crumb; in multiples of a cache line where the limit allows.
    let each = len.div_ceil(parts);
    each.next_multiple_of(64).min(limit).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_the_message_once() {
        for limit in [1, 7, 64, 100, 1472, MAX_PAYLOAD, usize::MAX] {
            for len in [0, 1, 63, 64, 65, 1000, 4096, 65_536, 300_001] {
                if limit == 1 && len > 5000 {
                    continue;
                }
                let parts: Vec<_> = cut(len, limit).collect();
                let mut at = 0;
                for &(offset, part) in &parts {
                    assert_eq!(offset, at);
                    assert!(part as usize <= limit && (part > 0 || len == 0));
                    assert!(part == parts[0].1 || offset + part == len);
                    at += part;
                }
                assert_eq!(at, len, "{len} cut at {limit}");
                assert!(!parts.is_empty());
            }
        }
    }
}
