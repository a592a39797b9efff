//! When a connection is worth a look for its peer.
//!
//! A connection of one request never gets that far: it stays plain TCP and costs a counter. Looks become rarer with time, and then stop.

/// Sends and receives before the first look.
pub const FIRST_LOOK: u64 = 4;
/// Bytes before the first look, whichever comes first.
pub const FIRST_BYTES: u64 = 64 << 10;
/// Sends and receives between two looks for the answer of the broker that was asked for another host, or for the next step of a meeting.
pub const ANSWER: u64 = 32;
/// Sends and receives after which a connection without a peer on weft stays on TCP for good.
pub const LAST_LOOK: u64 = 1 << 14;
/// The same of one that has begun to meet its peer.
pub const LAST_STEP: u64 = 2 * LAST_LOOK;

/// Returns true if the connection looks for its peer at its `n`-th send or receive (from 1): each of the first 32, then the powers of two and the middle
/// between them.
#[must_use]
pub fn is_due(n: u64) -> bool {
    if n <= 32 {
        return true;
    }
    let top = 1_u64 << n.ilog2();
    n == top || n == top + top / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_become_rare() {
        assert_eq!((1..=32).filter(|&n| is_due(n)).count(), 32);
        assert_eq!((33..=1 << 14).filter(|&n| is_due(n)).count(), 18);
        assert!(is_due(48) && is_due(64) && is_due(96) && !is_due(65));
    }
}
