//! Which rings give their memory back.
//!
//! Only the sender of a direction writes to its ring, and an empty ring has no byte that the receiver still reads. So the sender decides alone, under its lock.

/// A ring that has carried fewer bytes since its pages were given back keeps them.
pub const LEAST: u64 = 64 << 10;

/// The time between two looks, in milliseconds. A ring is idle if nothing was sent between two.
pub const PAUSE_MS: u64 = 1000;

/// What a look at a ring finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It keeps its pages; only the next sends can change that.
    Stay,
    /// It is in use: another look is due.
    Later,
    /// Its pages go.
    GiveBack,
}

/// The verdict on a ring whose sender has published up to `tail`, of which the receiver has consumed up to `head`. `seen`: the tail at the look before; `given`:
/// the tail when its pages were given back last.
#[must_use]
pub fn verdict((seen, given): (u64, u64), tail: u64, head: u64) -> Verdict {
    if tail.wrapping_sub(given) < LEAST {
        Verdict::Stay
    } else if tail != seen {
        Verdict::Later
    } else if head == tail {
        Verdict::GiveBack
    } else {
        // A receiver that does not read is not waited for.
        Verdict::Stay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All short histories of a ring: sends, receives, looks.
    #[test]
    fn pages_go_when_they_are_empty_and_idle() {
        #[derive(Clone, Copy)]
        struct Ring {
            tail: u64,
            head: u64,
            seen: u64,
            given: u64,
            sent: bool,
        }
        fn follow(ring: Ring, steps: u32, given: &mut u32) {
            if steps == 0 {
                return;
            }
            for n in [1, LEAST] {
                let tail = ring.tail + n;
                follow(
                    Ring {
                        tail,
                        sent: true,
                        ..ring
                    },
                    steps - 1,
                    given,
                );
            }
            for head in [ring.tail, ring.head.midpoint(ring.tail)] {
                follow(Ring { head, ..ring }, steps - 1, given);
            }
            let verdict = verdict((ring.seen, ring.given), ring.tail, ring.head);
            let mut next = Ring {
                seen: ring.tail,
                sent: false,
                ..ring
            };
            if verdict == Verdict::GiveBack {
                assert!(ring.head == ring.tail && !ring.sent);
                next.given = ring.tail;
                *given += 1;
            } else if ring.head == ring.tail && !ring.sent && ring.seen == ring.tail {
                assert!(ring.tail - ring.given < LEAST, "it keeps too much");
            }
            follow(next, steps - 1, given);
        }
        let mut given = 0;
        let ring = Ring {
            tail: 0,
            head: 0,
            seen: 0,
            given: 0,
            sent: false,
        };
        follow(ring, 8, &mut given);
        assert!(given > 100, "{given}");
    }
}
