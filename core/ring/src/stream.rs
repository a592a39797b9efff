//! A ring of bytes for each direction of a TCP connection between two unmodified programs (`weft run`).
//!
//! A [`Stream`] has no state except the mapping: producer and consumer keep their positions elsewhere (in memory that processes sharing a socket
//! after `fork` share) and pass them in. Each value that the peer wrote is loaded once and checked against them. The layout and the protocol of
//! each word are in `docs/spec/run.md`.
//!
//! The memory is a module of its own, which under loom is replaced by a safe model.

#[cfg_attr(loom, path = "stream/model.rs")]
#[cfg_attr(not(loom), path = "stream/memory.rs")]
mod memory;

pub use memory::Stream;

use crate::{Broken, Role};
use memory::{AtomicU64, announced, fence};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

/// Bytes that a sender puts into the bell to make its end unwritable, with one more behind them.
pub const FILL: usize = 2048;

const LINE: usize = 128;
const LINES: usize = 8;

/// In the tail: nothing more is produced; the stream continues over TCP from there.
const CLOSED: u64 = 1 << 63;
/// In the tail, with [`CLOSED`]: the receiver puts the bytes of the ring back into TCP, and the sender waits before it sends more there.
const HELD: u64 = 1 << 62;
const MARKS: u64 = CLOSED | HELD;

/// In the TCP word: the sender of this direction keeps it.
const JOINED: u64 = 1;
/// In the TCP word: the receiver looks at the ring from here on.
const SWITCHED: u64 = 2;
const BUSY_ONE: u64 = 1 << 4;
const COUNT_SHIFT: u32 = 20;

/// A word of one direction, by the role that sends in it.
#[derive(Clone, Copy)]
enum Lane {
    /// Up to where bytes have been produced, and [`CLOSED`]. Written by the sender; either side closes.
    Tail,
    /// Up to where they have been consumed. Written by the receiver.
    Head,
    /// A position up to which the receiver knows the bytes, whether it wants its bell rung for later ones ([`Wish`]), and how often it was rung.
    WantData,
    /// 1: the sender wants the bell's bytes taken when there is room.
    WantRoom,
    /// How many bytes the sender has put into the bell to make it unwritable, and in the upper bits how many fills are in progress: see
    /// [`FILLING`].
    Fill,
    /// Bytes sent over TCP, sends under way, and whether the direction has switched.
    Tcp,
    /// [`CLOSED_SOCKET`], [`SHUT`].
    Left,
    /// If the other end is on another host: the bytes that the receiver has taken from TCP, and its wish. See [`Stream::consent`].
    Seen,
}

/// In the wish word: ring for the next bytes after the position, once.
const ONCE: u64 = 1;
/// In the wish word: ring for all bytes after the position, each time that some are published.
const EACH: u64 = 2;
/// In the wish word: rings since the receiver last took their number.
const RUNG_SHIFT: u32 = 2;
const RUNG: u64 = 7 << RUNG_SHIFT;
/// Rings that are under way at a time: more of them would make the sender's end of the bell unwritable.
const MOST_RUNG: u64 = 4;
const WISH_SHIFT: u32 = 5;

/// When a receiver wants its bell rung for bytes after its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Wish {
    /// For the next bytes only.
    Once = ONCE,
    /// For the next bytes and all later ones: an edge-triggered program is told of each arrival.
    Each = EACH,
}

impl Wish {
    #[inline]
    fn at(self, head: u64) -> u64 {
        head << WISH_SHIFT | self as u64
    }
}

/// The rings that the wish word counts.
#[inline]
fn rings(word: u64) -> u64 {
    (word & RUNG) >> RUNG_SHIFT
}

/// The wish word with a ring more.
#[inline]
fn with_ring(word: u64) -> u64 {
    let more = (rings(word) + 1).min(RUNG >> RUNG_SHIFT);
    word & !RUNG | more << RUNG_SHIFT
}

/// Whether a wish stands, which is for bytes behind the position `to`.
#[inline]
fn is_for(word: u64, to: u64) -> bool {
    word & (ONCE | EACH) != 0 && word >> WISH_SHIFT != to & (u64::MAX >> WISH_SHIFT)
}

/// In the fill word: a sender is between the bell and the count of its bytes.
const FILLING: u64 = 1 << 48;

/// In the left word: the sender has closed its socket.
const CLOSED_SOCKET: u64 = 1;
/// In the left word: it has shut it down for sending.
const SHUT: u64 = 2;

/// In the seen word: the receiver looks at the ring too, so the sender may switch.
const CONSENT: u64 = 1;
/// In the seen word: the receiver wants the rest of the stream over TCP.
const STOP: u64 = 2;
const SEEN_SHIFT: u32 = 2;

/// The result of publishing bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// They are visible; the receiver is awake or will look.
    Quietly,
    /// They are visible; the receiver's bell has to be rung.
    Ring,
    /// They are not: the direction was closed, and they go over TCP.
    Closed,
}

impl Stream {
    #[inline]
    fn word(&self, sender: Role, lane: Lane) -> &AtomicU64 {
        self.at(LINE * (1 + LINES * sender as usize + lane as usize))
    }

    // ---- the sender's part ----

    /// Bytes that fit behind `tail`, the position that this sender has published.
    #[inline]
    pub fn room(&self, sender: Role, tail: u64) -> Result<usize, Broken> {
        let used = tail.wrapping_sub(self.word(sender, Lane::Head).load(Acquire));
        (self.capacity() as u64)
            .checked_sub(used)
            .map(|room| room as usize)
            .ok_or(Broken)
    }

    /// The position up to which the sender has published, which the other side can write too.
    pub fn published(&self, sender: Role) -> u64 {
        self.word(sender, Lane::Tail).load(Acquire) & !MARKS
    }

    /// Makes the bytes up to `to` visible, from `tail` on, which this sender has published before.
    #[inline]
    pub fn publish(&self, sender: Role, tail: u64, to: u64) -> Result<Published, Broken> {
        let word = self.word(sender, Lane::Tail);
        match word.compare_exchange(tail, to & !MARKS, SeqCst, SeqCst) {
            Ok(_) => {}
            Err(now) if now & CLOSED != 0 && now & !MARKS == tail => return Ok(Published::Closed),
            Err(_) => return Err(Broken),
        }
        announced();
        if self.count_ring(sender, to) {
            Ok(Published::Ring)
        } else {
            Ok(Published::Quietly)
        }
    }

    /// Takes the receiver's wish for bytes up to `to`. Returns whether the bell has to be rung.
    #[inline]
    fn count_ring(&self, sender: Role, to: u64) -> bool {
        let want = self.word(sender, Lane::WantData);
        let mut now = want.load(SeqCst);
        // The receiver may move its wish meanwhile; a hostile one for ever.
        for _ in 0..64 {
            if !is_for(now, to) || rings(now) >= MOST_RUNG && now & EACH != 0 {
                return false;
            }
            match want.compare_exchange(now, with_ring(now) & !ONCE, SeqCst, SeqCst) {
                Ok(_) => return true,
                Err(moved) => now = moved,
            }
        }
        true
    }

    /// The receiver's position, to detect its progress.
    pub fn progress(&self, sender: Role) -> u64 {
        self.word(sender, Lane::Head).load(Acquire)
    }

    /// Asks the receiver to take the bell's bytes when it has made room. The caller looks for room once more after this.
    pub fn want_room(&self, sender: Role) {
        self.word(sender, Lane::WantRoom).store(1, SeqCst);
        fence(SeqCst);
    }

    /// The sender is about to put bytes into the bell to make it unwritable; [`Stream::end_fill`] follows.
    pub fn begin_fill(&self, sender: Role) {
        self.word(sender, Lane::Fill).fetch_add(FILLING, SeqCst);
    }

    /// It has put `n` bytes into it.
    pub fn end_fill(&self, sender: Role, n: u64) {
        let add = n.wrapping_sub(FILLING);
        self.word(sender, Lane::Fill).fetch_add(add, SeqCst);
    }

    // ---- the receiver's part ----

    /// Bytes to be consumed from `head` on, and whether nothing comes behind them.
    #[inline]
    pub fn ready(&self, sender: Role, head: u64) -> Result<(usize, bool), Broken> {
        let tail = self.word(sender, Lane::Tail).load(SeqCst);
        let ready = (tail & !MARKS).wrapping_sub(head);
        if ready > self.capacity() as u64 {
            return Err(Broken);
        }
        Ok((ready as usize, tail & CLOSED != 0))
    }

    /// Gives the bytes up to `head` back to the sender. Returns whether it waits for room.
    #[inline]
    pub fn consumed(&self, sender: Role, head: u64) -> bool {
        self.word(sender, Lane::Head).store(head, SeqCst);
        self.word(sender, Lane::WantRoom).load(SeqCst) != 0
    }

    /// Whether the sender waits for room.
    pub fn wants_room(&self, sender: Role) -> bool {
        self.word(sender, Lane::WantRoom).load(SeqCst) != 0
    }

    /// Answers [`Stream::want_room`]; the bell's bytes are taken after this.
    pub fn room_made(&self, sender: Role) {
        self.word(sender, Lane::WantRoom).store(0, SeqCst);
    }

    /// How many bytes [`Stream::end_fill`] has reported since `seen`; the new value of `seen`; and whether a sender is between
    /// [`Stream::begin_fill`] and that call.
    pub fn filled(&self, sender: Role, seen: u64) -> (u64, u64, bool) {
        let word = self.word(sender, Lane::Fill).load(SeqCst);
        let count = word & (FILLING - 1);
        let new = count.wrapping_sub(seen) & (FILLING - 1);
        (new, count, word >= FILLING)
    }

    /// Whether the receiver wants a bell.
    #[inline]
    pub fn is_armed(&self, sender: Role) -> bool {
        self.word(sender, Lane::WantData).load(SeqCst) & (ONCE | EACH) != 0
    }

    /// Requests a bell for bytes after `head`, up to which everything is consumed or known. The caller checks [`Stream::ready`] once more after this. A sender
    /// does not ring if its bytes are consumed before it checks the request. Returns how often the sender has rung, or is about to, since this was last asked,
    /// and whether [`Wish::Once`] stood before: then nothing was published since. A standing [`Wish::Each`] says nothing, because a publish leaves it.
    #[inline]
    pub fn arm(&self, sender: Role, head: u64, wish: Wish) -> (u64, bool) {
        let before = self
            .word(sender, Lane::WantData)
            .swap(wish.at(head), SeqCst);
        fence(SeqCst);
        (rings(before), before & ONCE != 0)
    }

    /// How often the sender has rung, or is about to, since this was last asked.
    #[inline]
    pub fn take_rung(&self, sender: Role) -> u64 {
        let word = self.word(sender, Lane::WantData);
        if word.load(Relaxed) & RUNG == 0 {
            return 0;
        }
        rings(word.fetch_and(!RUNG, SeqCst))
    }

    /// The same, without taking the count.
    #[inline]
    pub fn rung(&self, sender: Role) -> u64 {
        rings(self.word(sender, Lane::WantData).load(Relaxed))
    }

    /// Whether a sender that rings for each arrival has stopped, because the receiver has not taken its rings ([`Stream::take_rung`]).
    #[inline]
    pub fn is_rung_out(&self, sender: Role) -> bool {
        let word = self.word(sender, Lane::WantData).load(SeqCst);
        word & EACH != 0 && rings(word) >= MOST_RUNG
    }

    /// Takes the wish back. Returns whether it stood; if not, the sender has rung or will at once.
    #[inline]
    pub fn disarm(&self, sender: Role) -> bool {
        self.word(sender, Lane::WantData)
            .fetch_and(!(ONCE | EACH), SeqCst)
            & (ONCE | EACH)
            != 0
    }

    /// The sender has closed the direction: takes the receiver's wish, wherever it stands. Returns whether the bell has to be rung.
    pub fn take_wish(&self, sender: Role) -> bool {
        let taken = self
            .word(sender, Lane::WantData)
            .fetch_update(SeqCst, SeqCst, |now| {
                (now & (ONCE | EACH) != 0).then_some(with_ring(now) & !(ONCE | EACH))
            });
        taken.is_ok()
    }

    /// Turns a wish for each arrival into one for the next.
    pub fn ask_once(&self, sender: Role) {
        let word = self.word(sender, Lane::WantData);
        let _ = word.fetch_update(SeqCst, SeqCst, |now| {
            (now & EACH != 0).then_some((now & !EACH) | ONCE)
        });
    }

    // ---- a direction whose other end is on another host: the sender switches, at a count that the receiver learns ----

    /// The receiver, which has taken `count` bytes from TCP, looks at the ring too from now on: the sender may switch whenever it likes.
    pub fn consent(&self, sender: Role, count: u64) {
        self.word(sender, Lane::Seen)
            .store(CONSENT | count << SEEN_SHIFT, SeqCst);
    }

    /// Whether the receiver has consented.
    #[inline]
    pub fn has_consented(&self, sender: Role) -> bool {
        self.word(sender, Lane::Seen).load(SeqCst) & CONSENT != 0
    }

    /// After [`Stream::consent`]: the receiver has taken `n` bytes more from TCP.
    pub fn add_seen(&self, sender: Role, n: u64) {
        self.word(sender, Lane::Seen)
            .fetch_add(n << SEEN_SHIFT, SeqCst);
    }

    /// Bytes that the receiver has taken from TCP.
    pub fn seen(&self, sender: Role) -> u64 {
        self.word(sender, Lane::Seen).load(SeqCst) >> SEEN_SHIFT
    }

    /// The receiver requests the rest of the stream over TCP; the sender closes the direction when it sees this.
    pub fn want_tcp(&self, sender: Role) {
        self.word(sender, Lane::Seen).fetch_or(STOP, SeqCst);
    }

    /// Whether the receiver wants the rest over TCP.
    pub fn wants_tcp(&self, sender: Role) -> bool {
        self.word(sender, Lane::Seen).load(SeqCst) & STOP != 0
    }

    /// The sender switches by itself: later bytes go into the ring. Only if it has joined, the receiver has consented, and no send over TCP is
    /// in progress.
    pub fn switch_over(&self, sender: Role) -> bool {
        let word = self.word(sender, Lane::Tcp);
        let now = word.load(SeqCst);
        let low = now & ((1 << COUNT_SHIFT) - 1);
        low == JOINED
            && self.has_consented(sender)
            && word
                .compare_exchange(now, now | SWITCHED, SeqCst, SeqCst)
                .is_ok()
    }

    /// Bytes that the sender says it has sent over TCP.
    pub fn sent_over_tcp(&self, sender: Role) -> u64 {
        self.word(sender, Lane::Tcp).load(SeqCst) >> COUNT_SHIFT
    }

    // ---- both ----

    /// Closes a direction: published bytes stay readable, later bytes go over TCP.
    pub fn close(&self, sender: Role) {
        self.word(sender, Lane::Tail).fetch_or(CLOSED, SeqCst);
    }

    /// The receiver closes a direction and holds its sender back until [`Stream::release`].
    pub fn hold(&self, sender: Role) {
        self.word(sender, Lane::Tail).fetch_or(MARKS, SeqCst);
        announced();
    }

    /// Whether a send over TCP is under way in a direction that the sender counts.
    pub fn is_sending(&self, sender: Role) -> bool {
        let busy = self.word(sender, Lane::Tcp).load(SeqCst) & ((1 << COUNT_SHIFT) - BUSY_ONE);
        busy != 0
    }

    /// Begins a send over TCP in a direction that is closed; [`Stream::end_tcp`] ends it. `false`: the receiver holds the sender back.
    pub fn begin_after(&self, sender: Role) -> bool {
        self.word(sender, Lane::Tcp).fetch_add(BUSY_ONE, SeqCst);
        announced();
        let may = !self.is_held(sender);
        if !may {
            self.end_tcp(sender, 0);
        }
        may
    }

    /// The sender may go on.
    pub fn release(&self, sender: Role) {
        self.word(sender, Lane::Tail).fetch_and(!HELD, SeqCst);
    }

    /// Whether the receiver holds the sender back.
    pub fn is_held(&self, sender: Role) -> bool {
        self.word(sender, Lane::Tail).load(SeqCst) & HELD != 0
    }

    /// Closes a direction in which nothing has ever been published. Returns whether it is closed now: if not, bytes are in it.
    pub fn close_unused(&self, sender: Role) -> bool {
        let word = self.word(sender, Lane::Tail);
        match word.compare_exchange(0, CLOSED, SeqCst, SeqCst) {
            Ok(_) => true,
            Err(now) => now & CLOSED != 0,
        }
    }

    /// Whether the direction was closed.
    pub fn is_closed(&self, sender: Role) -> bool {
        self.word(sender, Lane::Tail).load(SeqCst) & CLOSED != 0
    }

    /// The sender of this direction counts here from now on; it has sent `count` bytes over TCP so far.
    pub fn join(&self, sender: Role, count: u64) {
        let add = JOINED | count << COUNT_SHIFT;
        self.word(sender, Lane::Tcp).fetch_add(add, SeqCst);
    }

    /// Whether the sender of this direction has joined.
    pub fn has_joined(&self, sender: Role) -> bool {
        self.word(sender, Lane::Tcp).load(SeqCst) & JOINED != 0
    }

    /// The receiver of this direction looks at the ring.
    #[inline]
    pub fn has_switched(&self, sender: Role) -> bool {
        self.word(sender, Lane::Tcp).load(SeqCst) & SWITCHED != 0
    }

    /// Begins a send over TCP. `false`: the direction has switched, the bytes go into the ring.
    pub fn begin_tcp(&self, sender: Role) -> bool {
        let word = self.word(sender, Lane::Tcp);
        let before = word.fetch_add(BUSY_ONE, SeqCst);
        if before & SWITCHED != 0 {
            word.fetch_sub(BUSY_ONE, SeqCst);
            return false;
        }
        true
    }

    /// Ends it: `n` bytes were taken by TCP.
    pub fn end_tcp(&self, sender: Role, n: u64) {
        let add = (n << COUNT_SHIFT).wrapping_sub(BUSY_ONE);
        self.word(sender, Lane::Tcp).fetch_add(add, SeqCst);
    }

    /// Whether [`Stream::switch`] would succeed now.
    #[inline]
    pub fn may_switch(&self, sender: Role, count: u64) -> bool {
        let still = JOINED | count << COUNT_SHIFT;
        self.word(sender, Lane::Tcp).load(SeqCst) == still
    }

    /// The receiver, which has taken `count` bytes from TCP, switches to the ring. This succeeds if these are all bytes that were sent and
    /// no send over TCP is in progress.
    pub fn switch(&self, sender: Role, count: u64) -> bool {
        let still = JOINED | count << COUNT_SHIFT;
        self.word(sender, Lane::Tcp)
            .compare_exchange(still, still | SWITCHED, SeqCst, SeqCst)
            .is_ok()
    }

    /// This side has closed its socket.
    pub fn leave(&self, side: Role) {
        self.word(side, Lane::Left).fetch_or(CLOSED_SOCKET, Release);
    }

    /// This side has shut its socket down for sending.
    pub fn shut(&self, side: Role) {
        self.word(side, Lane::Left).fetch_or(SHUT, Release);
    }

    /// Whether that side has closed its socket.
    #[inline]
    pub fn has_left(&self, side: Role) -> bool {
        self.word(side, Lane::Left).load(Acquire) & CLOSED_SOCKET != 0
    }

    /// Whether that side has closed its socket, or shut it down for sending.
    #[inline]
    pub fn has_finished(&self, side: Role) -> bool {
        self.word(side, Lane::Left).load(Acquire) != 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::OpenError;
    use crate::file::file_len;
    use weft_sys::memfd;

    const A: Role = Role::Initiator;

    fn pair() -> (Stream, Stream) {
        let (mine, fd) = Stream::create(1 << 14).unwrap();
        (mine, Stream::open(fd).unwrap())
    }

    fn put(stream: &Stream, tail: u64, bytes: &[u8]) -> Published {
        // SAFETY: a slice.
        unsafe { stream.put(A, tail, bytes.as_ptr(), bytes.len()) };
        let to = tail + bytes.len() as u64;
        stream.publish(A, tail, to).unwrap()
    }

    fn get(stream: &Stream, head: u64, n: usize) -> Vec<u8> {
        let mut out = vec![0; n];
        // SAFETY: a slice.
        unsafe { stream.get(A, head, out.as_mut_ptr(), n) };
        out
    }

    #[test]
    fn bytes_go_round_the_end_of_the_ring() {
        let (a, b) = pair();
        let mut at = 0;
        let message: Vec<u8> = (0..=250).cycle().take(5000).collect();
        for _ in 0..50 {
            assert!(a.room(A, at).unwrap() >= message.len());
            assert_eq!(put(&a, at, &message), Published::Quietly);
            assert_eq!(b.ready(A, at), Ok((message.len(), false)));
            assert_eq!(get(&b, at, message.len()), message);
            at += message.len() as u64;
            assert!(!b.consumed(A, at));
        }
    }

    #[test]
    fn an_armed_receiver_is_rung_once() {
        let (a, b) = pair();
        b.arm(A, 0, Wish::Once);
        assert_eq!(put(&a, 0, b"x"), Published::Ring);
        assert_eq!(put(&a, 1, b"y"), Published::Quietly);
        b.arm(A, 2, Wish::Once);
        assert!(b.disarm(A));
        assert!(!b.disarm(A));
    }

    #[test]
    fn a_receiver_that_has_consumed_the_bytes_is_not_rung_for_them() {
        let (a, b) = pair();
        // As if it did so between the sender's two steps.
        b.arm(A, 1, Wish::Once);
        assert_eq!(put(&a, 0, b"x"), Published::Quietly);
        assert!(b.is_armed(A));
        assert_eq!(b.arm(A, 2, Wish::Once), (0, true));
        assert_eq!(put(&a, 1, b"y"), Published::Quietly);
        assert_eq!(put(&a, 2, b"z"), Published::Ring);
        assert_eq!(b.arm(A, 3, Wish::Once), (1, false), "it was rung");
        assert!(a.take_wish(A));
        assert!(!a.take_wish(A));
        assert_eq!(b.take_rung(A), 1);
    }

    #[test]
    fn a_receiver_that_wants_each_arrival_is_rung_for_each_and_not_without_end() {
        let (a, b) = pair();
        assert_eq!(b.arm(A, 0, Wish::Each), (0, false));
        for at in 0..MOST_RUNG {
            assert_eq!(put(&a, at, b"x"), Published::Ring);
        }
        assert_eq!(put(&a, 4, b"y"), Published::Quietly, "enough are under way");
        assert!(b.is_rung_out(A));
        assert_eq!(b.take_rung(A), MOST_RUNG);
        assert!(!b.is_rung_out(A));
        assert_eq!(b.take_rung(A), 0);
        assert_eq!(put(&a, 5, b"z"), Published::Ring);
        assert_eq!(
            b.arm(A, 7, Wish::Each),
            (1, false),
            "a publish leaves the wish"
        );
        b.ask_once(A);
        assert_eq!(put(&a, 6, b"z"), Published::Quietly, "it is known already");
        assert_eq!(put(&a, 7, b"z"), Published::Ring);
        assert_eq!(put(&a, 8, b"z"), Published::Quietly);
        assert_eq!(b.arm(A, 9, Wish::Once), (1, false));
    }

    #[test]
    fn a_closed_direction_keeps_what_was_published_and_takes_no_more() {
        let (a, b) = pair();
        assert_eq!(put(&a, 0, b"abc"), Published::Quietly);
        b.close(A);
        assert_eq!(put(&a, 3, b"d"), Published::Closed);
        assert_eq!(b.ready(A, 0), Ok((3, true)));
        assert!(a.is_closed(A));
    }

    #[test]
    fn a_held_direction_is_closed_and_its_sender_waits() {
        let (a, b) = pair();
        assert_eq!(put(&a, 0, b"abc"), Published::Quietly);
        assert!(a.begin_after(A), "nothing holds it back");
        assert!(b.is_sending(A));
        a.end_tcp(A, 0);
        b.hold(A);
        assert!(!a.begin_after(A) && !b.is_sending(A));
        assert_eq!(put(&a, 3, b"d"), Published::Closed);
        assert_eq!(b.ready(A, 0), Ok((3, true)));
        assert!(a.is_held(A) && a.is_closed(A));
        b.release(A);
        assert!(!a.is_held(A) && a.is_closed(A));
    }

    #[test]
    fn a_direction_that_has_carried_a_byte_is_not_closed_as_unused() {
        let (a, b) = pair();
        assert_eq!(put(&a, 0, b"abc"), Published::Quietly);
        assert!(!b.close_unused(A));
        assert!(!a.is_closed(A));
        let (a, b) = pair();
        assert!(b.close_unused(A));
        assert_eq!(put(&a, 0, b"abc"), Published::Closed);
        assert!(b.close_unused(A), "it is closed already");
    }

    #[test]
    fn the_direction_switches_only_between_sends_and_when_all_is_taken() {
        let (a, b) = pair();
        assert!(!b.switch(A, 0), "the sender has not joined");
        a.join(A, 10);
        assert!(!b.switch(A, 9));
        assert!(a.begin_tcp(A));
        assert!(!b.switch(A, 10), "a send is under way");
        a.end_tcp(A, 5);
        assert!(!b.switch(A, 10));
        assert!(b.switch(A, 15));
        assert!(!a.begin_tcp(A));
        assert!(a.has_switched(A));
    }

    #[test]
    fn a_sender_switches_by_itself_only_with_consent_and_between_sends() {
        let (a, b) = pair();
        assert!(!a.switch_over(A), "it has not joined");
        a.join(A, 10);
        assert!(!a.switch_over(A), "nobody has consented");
        b.consent(A, 7);
        assert!(a.begin_tcp(A));
        assert!(!a.switch_over(A), "a send is under way");
        a.end_tcp(A, 2);
        b.add_seen(A, 5);
        assert!(a.switch_over(A));
        assert!(!a.begin_tcp(A));
        assert_eq!((a.sent_over_tcp(A), b.seen(A)), (12, 12));
        assert!(!a.wants_tcp(A));
        b.want_tcp(A);
        assert!(a.wants_tcp(A) && a.has_consented(A) && b.seen(A) == 12);
        a.put_slice(A, 0, b"abc");
        let mut out = [0; 3];
        b.get_slice(A, 0, &mut out);
        assert_eq!(&out, b"abc");
    }

    #[test]
    fn positions_that_no_honest_peer_writes_are_refused() {
        let (a, b) = pair();
        a.word(A, Lane::Tail).store(1 << 40, SeqCst);
        assert_eq!(b.ready(A, 0), Err(Broken));
        b.word(A, Lane::Head).store(77, SeqCst);
        assert_eq!(a.room(A, 5), Err(Broken));
        assert_eq!(a.publish(A, 5, 6), Err(Broken));
    }

    #[test]
    fn foreign_files_are_refused() {
        let fd = memfd::create("x", 100).unwrap();
        assert!(matches!(Stream::open(fd), Err(OpenError::Size(100))));
        let fd = memfd::create("x", file_len(1 << 14)).unwrap();
        assert!(matches!(Stream::open(fd), Err(OpenError::Magic)));
        let (_segment, fd) = crate::Segment::create(1 << 14).unwrap();
        assert!(matches!(Stream::open(fd), Err(OpenError::Magic)));
    }
}
