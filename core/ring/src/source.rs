//! Memory that a sender offers in addition to its ring of bytes (SOURCE AVAIL of SDP), and that the receiver fetches by itself.
//!
//! A *source* is a number of bytes at an address of the sender's process. It takes the place of one byte of the ring, its *mark*: the bytes
//! of the stream are those of the ring, with each mark replaced by the bytes of its source. So tail, close, bell and positions are those of
//! [`Stream`]. The receiver counts a source as complete (GET COMPLETE) when it has the last byte.
//!
//! Each source has a lock, which either side takes by a compare-and-swap: the receiver while it fetches, the sender while it moves the bytes to another
//! place (copy on write). Each word that the peer wrote is loaded once and checked. An address is a number that only the kernel gets, for the process that
//! the receiver knows.

use crate::stream::Stream;
use crate::{Broken, Role};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

/// Sources of one direction that are not complete, at most.
pub const SOURCES: u64 = 16;
/// Bytes of one source, at most.
pub const MAX_SOURCE: u64 = 64 << 20;

/// The offset of the words of the first direction, and the distance between the directions.
const BASE: usize = 128 * 17;
const SPAN: usize = 128 * 7;

#[derive(Clone, Copy)]
#[repr(usize)]
enum Word {
    /// Sender: where its proof is, its value, and how many sources it has offered.
    ProofAt = 0,
    Proof = 8,
    Offered = 16,
    /// Receiver: whether it can fetch, and how many sources it has completed.
    Terms = 128,
    Completed = 136,
    /// Sender: 1 when it sleeps until a source is complete.
    Waits = 256,
    /// The first slot.
    Slots = 384,
}

const POSITION: usize = 0;
const ADDRESS: usize = 8;
const LENGTH: usize = 16;
const STATE: usize = 24;

// A slot's state: its phase, and how many of its bytes have been fetched.
const PHASE: u64 = 3;
const NOTHING: u64 = 0;
const OFFERED: u64 = 1;
const FETCHING: u64 = 2;
const MOVING: u64 = 3;
const TAKEN_SHIFT: u32 = 2;

/// Whether the receiver can read the sender's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// It has not tried yet.
    Unknown,
    /// It can.
    Ready,
    /// The system does not allow it.
    Refused,
}

/// The state of a source that the sender wants to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// The receiver does not get at it until [`Stream::source_moved`]; so many bytes have been fetched.
    Mine(u64),
    /// The receiver is fetching.
    Busy,
    /// It is complete, or withdrawn.
    Gone,
}

/// A source, as the receiver has locked it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Which one.
    pub number: u64,
    /// The address of the unfetched bytes, in the sender's process.
    pub address: u64,
    /// Their number.
    pub left: u64,
    taken: u64,
}

impl Stream {
    fn source_word(&self, sender: Role, word: Word) -> &AtomicU64 {
        self.at(BASE + SPAN * sender as usize + word as usize)
    }

    fn slot(&self, sender: Role, number: u64, field: usize) -> &AtomicU64 {
        let slot = (number % SOURCES) as usize;
        self.at(BASE + SPAN * sender as usize + Word::Slots as usize + 32 * slot + field)
    }

    // ---- the sender's part ----

    /// Offers to lend: this address of this process has this value, by which a receiver verifies that it reads the right process. Not 0.
    pub fn prove(&self, sender: Role, address: u64, value: u64) {
        self.source_word(sender, Word::ProofAt)
            .store(address, Relaxed);
        self.source_word(sender, Word::Proof).store(value, SeqCst);
    }

    /// Whether the receiver can fetch.
    #[inline]
    pub fn terms(&self, sender: Role) -> Terms {
        match self.source_word(sender, Word::Terms).load(SeqCst) {
            1 => Terms::Ready,
            2 => Terms::Refused,
            _ => Terms::Unknown,
        }
    }

    /// Offers source `number`, the count of those before it, whose mark is about to be published at `position`. Its predecessor of [`SOURCES`]
    /// ago must be complete.
    pub fn offer_source(&self, sender: Role, number: u64, position: u64, address: u64, len: u64) {
        self.slot(sender, number, POSITION).store(position, Relaxed);
        self.slot(sender, number, ADDRESS).store(address, Relaxed);
        self.slot(sender, number, LENGTH).store(len, Relaxed);
        self.slot(sender, number, STATE).store(OFFERED, SeqCst);
        self.source_word(sender, Word::Offered)
            .store(number + 1, SeqCst);
    }

    /// The mark was not published: the direction is closed.
    pub fn withdraw_source(&self, sender: Role, number: u64) {
        self.slot(sender, number, STATE).store(NOTHING, SeqCst);
        self.source_word(sender, Word::Offered)
            .store(number, SeqCst);
    }

    /// Sources that the receiver has completed.
    #[inline]
    pub fn completed_sources(&self, sender: Role) -> u64 {
        self.source_word(sender, Word::Completed).load(SeqCst)
    }

    /// The word that changes when a source is complete, to sleep on by a futex (its low half). The caller looks once more after it has set
    /// [`Stream::wait_for_source`].
    pub fn completion_word(&self, sender: Role) -> *const u32 {
        let word = self.source_word(sender, Word::Completed).as_ptr();
        let half = usize::from(cfg!(target_endian = "big"));
        word.cast::<u32>().cast_const().wrapping_add(half)
    }

    /// The sender is about to sleep.
    pub fn wait_for_source(&self, sender: Role) {
        self.source_word(sender, Word::Waits).store(1, SeqCst);
    }

    /// How many bytes of a source have been fetched, to detect progress of the receiver.
    pub fn source_progress(&self, sender: Role, number: u64) -> u64 {
        self.slot(sender, number, STATE).load(SeqCst) >> TAKEN_SHIFT
    }

    /// Takes the lock of a source, to move its bytes.
    pub fn move_source(&self, sender: Role, number: u64) -> Move {
        if self.completed_sources(sender) > number {
            return Move::Gone;
        }
        let word = self.slot(sender, number, STATE);
        let now = word.load(SeqCst);
        match now & PHASE {
            NOTHING => Move::Gone,
            OFFERED => {
                let mine = now & !PHASE | MOVING;
                match word.compare_exchange(now, mine, SeqCst, SeqCst) {
                    Ok(_) => Move::Mine(now >> TAKEN_SHIFT),
                    Err(_) => Move::Busy,
                }
            }
            _ => Move::Busy,
        }
    }

    /// Gives the lock back: byte 0 of the source would now be at `address`.
    pub fn source_moved(&self, sender: Role, number: u64, address: u64, taken: u64) {
        self.slot(sender, number, ADDRESS).store(address, Relaxed);
        self.slot(sender, number, STATE)
            .store(taken << TAKEN_SHIFT | OFFERED, SeqCst);
    }

    /// The bytes are invalid: a receiver that fetches them ends the connection.
    pub fn spoil_source(&self, sender: Role, number: u64) {
        self.slot(sender, number, STATE).store(NOTHING, SeqCst);
    }

    // ---- the receiver's part ----

    /// The sender's proof: address and value. `None` while it does not lend.
    #[inline]
    pub fn proof(&self, sender: Role) -> Option<(u64, u64)> {
        let value = self.source_word(sender, Word::Proof).load(SeqCst);
        let address = self.source_word(sender, Word::ProofAt).load(Relaxed);
        (value != 0).then_some((address, value))
    }

    /// Answers the proof, or withdraws the answer: a receiver that has declined, or withdrawn, does not accept again.
    pub fn set_terms(&self, sender: Role, ready: bool) {
        let word = self.source_word(sender, Word::Terms);
        if ready {
            // Fails if it has declined meanwhile.
            let _ = word.compare_exchange(0, 1, SeqCst, SeqCst);
        } else {
            word.store(2, SeqCst);
        }
    }

    /// The distance of the mark of source `number` from `head`; `None` if it is not offered. Call it after [`Stream::ready`], and use it
    /// only up to that length.
    #[inline]
    pub fn next_source(&self, sender: Role, number: u64, head: u64) -> Result<Option<u64>, Broken> {
        let offered = self.source_word(sender, Word::Offered).load(SeqCst);
        let ahead = offered.wrapping_sub(number);
        // One more than is complete may be withdrawn, when the direction was closed.
        let most = if self.takes_sources() { SOURCES } else { 0 };
        if ahead > most {
            return Err(Broken);
        }
        if ahead == 0 {
            return Ok(None);
        }
        let position = self.slot(sender, number, POSITION).load(Relaxed);
        Ok(Some(position.wrapping_sub(head)))
    }

    /// Bytes of a source that have not been fetched, without its lock.
    pub fn source_left(&self, sender: Role, number: u64) -> u64 {
        let len = self.slot(sender, number, LENGTH).load(Acquire);
        let taken = self.source_progress(sender, number);
        len.min(MAX_SOURCE).saturating_sub(taken)
    }

    /// Takes the lock of a source, to fetch from it. `None`: the sender is moving it; soon.
    pub fn begin_fetch(&self, sender: Role, number: u64) -> Result<Option<Fetch>, Broken> {
        let word = self.slot(sender, number, STATE);
        let now = word.load(SeqCst);
        match now & PHASE {
            OFFERED => {}
            MOVING => return Ok(None),
            _ => return Err(Broken),
        }
        let mine = now & !PHASE | FETCHING;
        if word.compare_exchange(now, mine, SeqCst, SeqCst).is_err() {
            return Ok(None);
        }
        let taken = now >> TAKEN_SHIFT;
        let len = self.slot(sender, number, LENGTH).load(Relaxed);
        let start = self.slot(sender, number, ADDRESS).load(Relaxed);
        let address = start.checked_add(taken).ok_or(Broken)?;
        if len > MAX_SOURCE || taken >= len || address.checked_add(len).is_none() {
            return Err(Broken);
        }
        Ok(Some(Fetch {
            number,
            address,
            left: len - taken,
            taken,
        }))
    }

    /// Releases the lock after fetching `n` bytes. Fails if the lock is no longer ours: the fetched bytes are not those that were sent.
    pub fn end_fetch(&self, sender: Role, fetch: &Fetch, n: u64) -> Result<(), Broken> {
        let mine = fetch.taken << TAKEN_SHIFT | FETCHING;
        let after = (fetch.taken + n.min(fetch.left)) << TAKEN_SHIFT | OFFERED;
        self.slot(sender, fetch.number, STATE)
            .compare_exchange(mine, after, SeqCst, SeqCst)
            .map(drop)
            .map_err(|_| Broken)
    }

    /// Source `number` is complete. Returns whether the sender sleeps, and has to be woken.
    pub fn complete_source(&self, sender: Role, number: u64) -> bool {
        self.source_word(sender, Word::Completed)
            .store(number + 1, SeqCst);
        let waits = self.source_word(sender, Word::Waits);
        waits.load(SeqCst) != 0 && waits.swap(0, SeqCst) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Role = Role::Initiator;

    fn pair() -> (Stream, Stream) {
        let (mine, fd) = Stream::create(1 << 14).unwrap();
        (mine, Stream::open(fd).unwrap())
    }

    #[test]
    fn a_source_is_fetched_in_parts_and_completed_once() {
        let (a, b) = pair();
        assert_eq!((b.proof(A), a.terms(A)), (None, Terms::Unknown));
        a.prove(A, 4096, 77);
        assert_eq!(b.proof(A), Some((4096, 77)));
        b.set_terms(A, true);
        assert_eq!(a.terms(A), Terms::Ready);
        a.offer_source(A, 0, 10, 1 << 20, 5000);
        assert_eq!(b.next_source(A, 0, 4), Ok(Some(6)));
        let fetch = b.begin_fetch(A, 0).unwrap().unwrap();
        assert_eq!((fetch.address, fetch.left), (1 << 20, 5000));
        assert_eq!(a.move_source(A, 0), Move::Busy);
        b.end_fetch(A, &fetch, 3000).unwrap();
        assert_eq!((b.source_left(A, 0), a.source_progress(A, 0)), (2000, 3000));
        let fetch = b.begin_fetch(A, 0).unwrap().unwrap();
        assert_eq!((fetch.address, fetch.left), ((1 << 20) + 3000, 2000));
        b.end_fetch(A, &fetch, 2000).unwrap();
        a.wait_for_source(A);
        assert!(b.complete_source(A, 0) && !b.complete_source(A, 0));
        assert_eq!(a.completed_sources(A), 1);
        assert_eq!(a.move_source(A, 0), Move::Gone);
        assert_eq!(b.next_source(A, 1, 11), Ok(None));
    }

    #[test]
    fn a_stream_without_sources_takes_none() {
        let (a, mut b) = pair();
        b.refuse_sources();
        assert_eq!(b.next_source(A, 0, 0), Ok(None));
        a.offer_source(A, 0, 0, 1 << 20, 5000);
        assert_eq!(b.next_source(A, 0, 0), Err(Broken));
    }

    #[test]
    fn a_source_that_has_moved_is_fetched_from_its_new_place() {
        let (a, b) = pair();
        a.offer_source(A, 0, 0, 1 << 20, 5000);
        let fetch = b.begin_fetch(A, 0).unwrap().unwrap();
        b.end_fetch(A, &fetch, 1000).unwrap();
        assert_eq!(a.move_source(A, 0), Move::Mine(1000));
        assert_eq!(b.begin_fetch(A, 0), Ok(None));
        a.source_moved(A, 0, 1 << 30, 1000);
        let fetch = b.begin_fetch(A, 0).unwrap().unwrap();
        assert_eq!((fetch.address, fetch.left), ((1 << 30) + 1000, 4000));
        a.spoil_source(A, 0);
        assert_eq!(b.end_fetch(A, &fetch, 4000), Err(Broken));
        assert_eq!(b.begin_fetch(A, 0), Err(Broken));
    }

    #[test]
    fn a_receiver_that_cannot_read_any_more_does_not_say_yes_again() {
        let (a, b) = pair();
        b.set_terms(A, true);
        b.set_terms(A, false);
        assert_eq!(a.terms(A), Terms::Refused);
        b.set_terms(A, true);
        assert_eq!(a.terms(A), Terms::Refused);
    }

    #[test]
    fn what_no_honest_sender_writes_is_refused() {
        let (a, b) = pair();
        a.offer_source(A, 0, 0, u64::MAX - 10, 5000);
        assert_eq!(b.begin_fetch(A, 0), Err(Broken));
        a.offer_source(A, 0, 0, 4096, MAX_SOURCE + 1);
        assert_eq!(b.begin_fetch(A, 0), Err(Broken));
        a.offer_source(A, 0, 0, 4096, 0);
        assert_eq!(b.begin_fetch(A, 0), Err(Broken));
        a.source_word(A, Word::Offered).store(50, SeqCst);
        assert_eq!(b.next_source(A, 0, 0), Err(Broken));
        a.slot(A, 0, LENGTH).store(u64::MAX, SeqCst);
        assert_eq!(b.source_left(A, 0), MAX_SOURCE);
        a.slot(A, 0, STATE).store(u64::MAX, SeqCst);
        assert_eq!(b.source_left(A, 0), 0);
    }

    #[test]
    fn the_words_are_in_the_control_page_and_do_not_overlap() {
        let end = BASE + 2 * SPAN;
        assert!(end <= 4096 && Word::Slots as usize + 32 * SOURCES as usize == SPAN);
        let (a, _) = pair();
        for sender in [Role::Initiator, Role::Responder] {
            a.prove(sender, 1, 2);
            a.wait_for_source(sender);
            a.set_terms(sender, true);
            for number in 0..SOURCES {
                a.offer_source(sender, number, u64::MAX, u64::MAX, u64::MAX);
            }
        }
        for sender in [Role::Initiator, Role::Responder] {
            assert_eq!(a.ready(sender, 0), Ok((0, false)));
            assert!(!a.has_switched(sender) && !a.has_left(sender));
            assert_eq!(a.seen(sender), 0);
        }
    }
}
