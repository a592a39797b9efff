//! One side of a connection.

use crate::segment::{AtomicU64 as Shared, Segment, announce, announce_max, fence, look};
use crate::{Broken, Front, Ref, Role, Word};
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};
use weft_mem::{RecvList, SendList};

/// Values of [`Word::End`]; a direction's value only rises.
pub(crate) const OPEN: u64 = 0;
pub(crate) const FINISHED: u64 = 1;
pub(crate) const ABORTED: u64 = 2;

/// Kinds of records, in the upper half of a header; the lower half is the body's length in bytes. No header is 0, which marks the place of
/// the next one.
const BYTES: u8 = 1;
const REF: u8 = 2;
/// No record has been begun.
const NONE: u8 = 0;

/// Bytes of a record's header, and of the zero that follows the last record.
const HEADER: u64 = 8;
/// Bytes of a reference's body: space, address, length.
const REF_BODY: u64 = 24;

fn header(kind: u8, len: u64) -> u64 {
    u64::from(kind) << 32 | len
}

/// The state of the sending side, on cache lines that the receiving side does not use.
#[derive(Default)]
#[repr(align(128))]
struct Sender {
    /// Position after everything pushed.
    pushed: AtomicU64,
    /// Position after everything that the peer can see.
    published: AtomicU64,
    /// The header of the record at `published`, which is kept back until everything after it is there; 0: none.
    held: AtomicU64,
    /// The peer's consumer position at the last check.
    consumed: AtomicU64,
    asleep: AtomicBool,
}

/// The state of the receiving side.
#[derive(Default)]
#[repr(align(128))]
struct Receiver {
    /// The next byte to read: a header if `kind` is `NONE`, of a reference its header, of bytes their next.
    position: AtomicU64,
    /// The position up to which the caller is done with the taken data, which may be reported to the peer. No thread reads ring bytes
    /// before it again.
    dealt: Shared,
    /// The position that was reported to the peer.
    released: AtomicU64,
    kind: AtomicU8,
    /// A reference was consumed that was not reported to the peer.
    ref_done: AtomicBool,
    asleep: AtomicBool,
    /// The peer must be woken, which `release` has yet to say.
    owed: AtomicBool,
    space: AtomicU32,
    addr: AtomicU64,
    /// Bytes left in the record begun.
    left: AtomicU64,
}

/// Values of [`Word::WantData`]: what the sleeper waits for. All but 0 ask for a wake-up when there is data.
const DATA: u64 = 1;
const ANYTHING: u64 = 2;

/// One side of a connection.
///
/// Sending: [`room`](Self::room), [`push`](Self::push), [`push_ref`](Self::push_ref),
/// [`publish`](Self::publish), [`consumed`](Self::consumed), [`finish`](Self::finish),
/// [`sleep_on_room`](Self::sleep_on_room). Receiving: [`front`](Self::front), [`take`](Self::take),
/// [`advance_ref`](Self::advance_ref), [`release`](Self::release), [`sleep_on_data`](Self::sleep_on_data). The methods
/// of each family must not run at the same time as one another: if they do, bytes get mixed up, but memory stays safe.
/// The two families may run at the same time, and so may all other methods, except [`awake`](Self::awake), which ends the sleep of both.
///
/// A method that returns "the peer must be woken" has cleared the peer's flag: the caller has to wake it, because no other call will.
pub struct End {
    segment: Arc<Segment>,
    role: Role,
    tx: Sender,
    rx: Receiver,
}

impl End {
    /// One side of `segment`, as new: to be made once for a side.
    pub fn new(segment: Arc<Segment>, role: Role) -> End {
        End {
            segment,
            role,
            tx: Sender::default(),
            rx: Receiver::default(),
        }
    }

    #[inline]
    fn mine(&self, word: Word) -> &Shared {
        self.segment.control(self.role, word)
    }

    #[inline]
    fn theirs(&self, word: Word) -> &Shared {
        self.segment.control(self.role.peer(), word)
    }

    /// Whether the peer sleeps on `flag` and must be woken. The data that it sleeps for must have been announced.
    #[inline]
    fn wakes(&self, flag: Word) -> bool {
        let flag = self.theirs(flag);
        look(flag) != 0 && flag.swap(0, AcqRel) != 0
    }

    // ---- sending

    /// Whether the peer has announced that it sleeps until there is something to receive, and for nothing else. A hint, because it may just be waking up.
    #[inline]
    pub fn peer_sleeps(&self) -> bool {
        !matches!(self.theirs(Word::WantData).load(Relaxed), 0 | ANYTHING)
    }

    /// Something has been written into the peer's memory past the ring. True: it [dozes](Self::doze), and must be woken.
    #[inline]
    pub fn written(&self) -> bool {
        self.theirs(Word::WantData).load(Relaxed) == ANYTHING && self.wakes(Word::WantData)
    }

    /// The payload that fits, as far as the peer's consumption is known. A multiple of 8.
    #[inline]
    fn known_room(&self) -> u64 {
        let used = self
            .tx
            .pushed
            .load(Relaxed)
            .saturating_sub(self.tx.consumed.load(Relaxed));
        // A record's header, and the zero after it.
        (self.segment.capacity() as u64).saturating_sub(used + 2 * HEADER)
    }

    /// Whether `n` bytes of payload fit, or else how many do.
    #[inline]
    fn room_for(&self, n: u64) -> Result<u64, Broken> {
        let known = self.known_room();
        if known >= n {
            return Ok(n);
        }
        self.consumed()?;
        Ok(self.known_room().min(n))
    }

    /// Whether [`push`](Self::push) would take a list of `n` bytes completely.
    #[inline]
    pub fn fits(&self, n: usize) -> Result<bool, Broken> {
        Ok(self.room_for(n as u64)? == n as u64)
    }

    /// Bytes of payload that [`push`](Self::push) would take now (0: full). An empty ring takes its
    /// capacity less 16.
    #[inline]
    pub fn room(&self) -> Result<usize, Broken> {
        self.consumed()?;
        Ok(self.known_room() as usize)
    }

    /// Appends a record whose body of `len` bytes was written already.
    #[inline]
    fn append(&self, kind: u8, len: u64) {
        let at = self.tx.pushed.load(Relaxed);
        let end = at + HEADER + len.next_multiple_of(8);
        // The peer finds it after this record, until there is another.
        self.segment.word(self.role, end).store(0, Relaxed);
        let header = header(kind, len);
        if self.tx.held.load(Relaxed) == 0 {
            self.tx.held.store(header, Relaxed);
        } else {
            // The peer does not get here before the header that is held back.
            self.segment.word(self.role, at).store(header, Relaxed);
        }
        self.tx.pushed.store(end, Relaxed);
    }

    /// Copies up to `n` bytes of `list`, from its byte `skip` on, into the ring as one record; returns
    /// the bytes taken, fewer when the ring is full or the list ends. The peer sees nothing before
    /// [`publish`](Self::publish).
    #[inline]
    pub fn push(&self, list: &SendList<'_>, skip: usize, n: usize) -> Result<usize, Broken> {
        let n = n.min(list.len_bytes().saturating_sub(skip));
        let n = self.room_for(n as u64)? as usize;
        if n == 0 {
            return Ok(0);
        }
        let at = self.tx.pushed.load(Relaxed);
        let n = self.segment.copy_in(self.role, at + HEADER, list, skip, n);
        self.append(BYTES, n as u64);
        Ok(n)
    }

    /// Appends a reference; false when there is no room for it. The memory must stay as it is until
    /// [`consumed`](Self::consumed) says that the peer is done with it. Panics when `len` is 0 or
    /// `addr + len` wraps.
    pub fn push_ref(&self, r: Ref) -> Result<bool, Broken> {
        assert!(
            r.len != 0 && r.addr.checked_add(r.len).is_some(),
            "{r:?} is no range"
        );
        if self.room_for(REF_BODY)? < REF_BODY {
            return Ok(false);
        }
        let at = self.tx.pushed.load(Relaxed) + HEADER;
        for (i, value) in [u64::from(r.space), r.addr, r.len].into_iter().enumerate() {
            self.segment
                .word(self.role, at + 8 * i as u64)
                .store(value, Relaxed);
        }
        self.append(REF, REF_BODY);
        Ok(true)
    }

    /// Makes everything pushed visible. Returns true when the peer sleeps and must be woken.
    #[inline]
    #[must_use]
    pub fn publish(&self) -> bool {
        let held = self.tx.held.load(Relaxed);
        if held == 0 {
            return false;
        }
        let at = self.tx.published.load(Relaxed);
        // First: once the peer has consumed it, no other thread must find that it went too far.
        self.tx
            .published
            .store(self.tx.pushed.load(Relaxed), Relaxed);
        self.tx.held.store(0, Relaxed);
        announce(self.segment.word(self.role, at), held);
        self.wakes(Word::WantData)
    }

    /// Whether the peer can have reached the position `head`; then returns up to where it has consumed.
    #[inline]
    fn check_head(&self, since: u64, head: u64) -> Result<u64, Broken> {
        let possible = since..=self.tx.published.load(Relaxed);
        if !possible.contains(&head) || !head.is_multiple_of(8) {
            return Err(Broken);
        }
        Ok(head)
    }

    /// The ring position up to which the peer has consumed, as it reported. It only rises, and reaches [`pushed`](Self::pushed). Positions
    /// count bytes since the start, headers included.
    #[inline]
    pub fn consumed(&self) -> Result<u64, Broken> {
        // Looked at before the peer's word: another thread may look at both in between.
        let since = self.tx.consumed.load(Acquire);
        let head = self.check_head(since, self.theirs(Word::Head).load(Acquire))?;
        self.tx.consumed.fetch_max(head, Release);
        Ok(head)
    }

    /// The ring position after everything pushed.
    #[inline]
    pub fn pushed(&self) -> u64 {
        self.tx.pushed.load(Relaxed)
    }

    /// Raises our `End` word, and lets nothing that follows be done before.
    fn end(&self, value: u64) {
        self.mine(Word::End).fetch_max(value, SeqCst);
        fence(SeqCst);
    }

    /// Publishes, and says that nothing follows in our direction. Returns true when the peer must be woken.
    #[must_use]
    pub fn finish(&self) -> bool {
        let published = self.publish();
        self.end(FINISHED);
        self.wakes(Word::WantData) | published
    }

    /// The abrupt end of both directions: unpublished data is lost, and references become invalid. Returns true if the peer must be woken.
    /// May run at the same time as any other call.
    #[must_use]
    pub fn abort(&self) -> bool {
        self.end(ABORTED);
        self.wakes(Word::WantData) | self.wakes(Word::WantRoom)
    }

    // ---- receiving

    /// The front record. While it is [`Front::Empty`], a call costs two loads of cache lines that are not being written.
    #[inline]
    pub fn front(&self) -> Result<Front, Broken> {
        let rx = &self.rx;
        match rx.kind.load(Relaxed) {
            BYTES => return Ok(Front::Bytes(rx.left.load(Relaxed) as usize)),
            REF => return Ok(Front::Ref(self.reference())),
            _ => {}
        }
        let at = rx.position.load(Relaxed);
        let word = self.segment.word(self.role.peer(), at);
        let mut header = word.load(Acquire);
        if header == 0 {
            match self.theirs(Word::End).load(Acquire) {
                OPEN => return Ok(Front::Empty),
                end @ (FINISHED | ABORTED) => {
                    // It may have been published after the first look.
                    header = word.load(Acquire);
                    match (header, end) {
                        (0, FINISHED) => return Ok(Front::End),
                        (0, _) => return Ok(Front::Aborted),
                        _ => {}
                    }
                }
                _ => return Err(Broken),
            }
        }
        self.begin(at, header)
    }

    /// Whether [`front`](Self::front) may return something else than [`Front::Empty`], or [`release`](Self::release) has something to
    /// report: by loads only, for a thread that does not receive. The result is a hint while another thread receives.
    #[inline]
    pub fn has_news(&self) -> bool {
        let rx = &self.rx;
        let at = rx.position.load(Relaxed);
        self.segment.word(self.role.peer(), at).load(Relaxed) != 0
            || rx.kind.load(Relaxed) != NONE
            || self.theirs(Word::End).load(Relaxed) != OPEN
            || rx.released.load(Relaxed) != at & !7
            || rx.owed.load(Relaxed)
    }

    /// Begins the record at `at`: from here on the checked values are private.
    #[inline]
    fn begin(&self, at: u64, header: u64) -> Result<Front, Broken> {
        let rx = &self.rx;
        let (kind, len) = (header >> 32, u64::from(header as u32));
        if kind == u64::from(BYTES) {
            if len == 0 || len > self.segment.capacity() as u64 - 2 * HEADER {
                return Err(Broken);
            }
            rx.position.store(at + HEADER, Relaxed);
            rx.left.store(len, Relaxed);
            rx.kind.store(BYTES, Relaxed);
            return Ok(Front::Bytes(len as usize));
        }
        if kind != u64::from(REF) || len != REF_BODY {
            return Err(Broken);
        }
        let body = |i: u64| {
            let word = self.segment.word(self.role.peer(), at + HEADER + 8 * i);
            word.load(Relaxed)
        };
        let (space, addr, len) = (body(0), body(1), body(2));
        let space = u32::try_from(space).map_err(|_| Broken)?;
        if len == 0 || addr.checked_add(len).is_none() {
            return Err(Broken);
        }
        rx.space.store(space, Relaxed);
        rx.addr.store(addr, Relaxed);
        rx.left.store(len, Relaxed);
        rx.kind.store(REF, Relaxed);
        Ok(Front::Ref(Ref { space, addr, len }))
    }

    fn reference(&self) -> Ref {
        Ref {
            space: self.rx.space.load(Relaxed),
            addr: self.rx.addr.load(Relaxed),
            len: self.rx.left.load(Relaxed),
        }
    }

    /// Copies up to `n` bytes of the front record into `list` from its byte `skip` on, and takes them
    /// off; returns how many: fewer when the record or the list ends before.
    ///
    /// # Errors
    /// [`Broken`] when the last [`front`](Self::front) was not [`Front::Bytes`].
    #[inline]
    pub fn take(&self, list: &mut RecvList<'_>, skip: usize, n: usize) -> Result<usize, Broken> {
        let rx = &self.rx;
        if rx.kind.load(Relaxed) != BYTES {
            return Err(Broken);
        }
        let (at, left) = (rx.position.load(Relaxed), rx.left.load(Relaxed));
        let n = n.min(left as usize);
        let n = self.segment.copy_out(self.role.peer(), at, list, skip, n) as u64;
        rx.left.store(left - n, Relaxed);
        if n < left {
            rx.position.store(at + n, Relaxed);
        } else {
            rx.position.store((at + n).next_multiple_of(8), Relaxed);
            rx.kind.store(NONE, Relaxed);
        }
        Ok(n as usize)
    }

    /// Takes `n` bytes off the front reference, after they have been pulled. Panics when it has not as many.
    pub fn advance_ref(&self, n: u64) {
        let rx = &self.rx;
        let left = rx.left.load(Relaxed);
        assert!(
            rx.kind.load(Relaxed) == REF && n <= left,
            "{n} bytes of no reference, or of one of {left}"
        );
        rx.addr.store(rx.addr.load(Relaxed) + n, Relaxed);
        rx.left.store(left - n, Relaxed);
        if n == left {
            let at = rx.position.load(Relaxed);
            rx.position.store(at + HEADER + REF_BODY, Relaxed);
            rx.kind.store(NONE, Relaxed);
            rx.ref_done.store(true, Relaxed);
        }
    }

    /// Up to where everything has been consumed. In a record of bytes that is inside of it.
    #[inline]
    fn read_to(&self) -> u64 {
        self.rx.position.load(Relaxed) & !7
    }

    /// Reports our consumer position to the peer; true if the peer slept until then, and must be woken.
    fn tell(&self, position: u64) -> bool {
        // Another thread may have reported a later position: it only rises.
        announce_max(self.mine(Word::Head), position);
        self.rx.released.fetch_max(position, Relaxed);
        self.wakes(Word::WantRoom)
    }

    /// The caller is done with the taken data: the bytes are out of the ring, and the requests in them have been carried out. Reports that
    /// to the peer after a quarter of the ring or a reference since the last report, if it waits for room, or with `force`. Returns true if
    /// the peer must be woken.
    ///
    /// Call it after each attempt to receive, also after one that found nothing, because the peer may have begun to wait since.
    #[inline]
    #[must_use]
    pub fn release(&self, force: bool) -> bool {
        let rx = &self.rx;
        let owed = rx.owed.load(Relaxed);
        if owed {
            rx.owed.store(false, Relaxed);
        }
        let position = self.read_to();
        rx.dealt.store(position, Release);
        let news = position.saturating_sub(rx.released.load(Relaxed));
        if news != 0
            && (force
                || news >= self.segment.capacity() as u64 / 4
                || rx.ref_done.load(Relaxed)
                || self.theirs(Word::WantRoom).load(Relaxed) != 0)
        {
            rx.ref_done.store(false, Relaxed);
            return self.tell(position) | owed;
        }
        owed
    }

    // ---- sleeping

    /// The caller is about to sleep until there is something to receive: sets our flag for the peer. Returns false if there is something
    /// already (or the end, or an invalid record), or if [`release`](Self::release) has to be called first because the peer must be woken.
    /// Data taken since the last [`release`](Self::release) stays unreported, because the thread that took it may still be processing it.
    #[must_use]
    pub fn sleep_on_data(&self) -> bool {
        let rx = &self.rx;
        // The peer may wait for less than `release` had thought worth telling, and we shall not look again.
        let dealt = rx.dealt.load(Acquire);
        if dealt > rx.released.load(Relaxed) && self.tell(dealt) {
            rx.owed.store(true, Relaxed);
        }
        rx.asleep.store(true, Relaxed);
        let flag = self.mine(Word::WantData);
        announce(flag, DATA);
        let at = rx.position.load(Relaxed);
        if rx.owed.load(Relaxed)
            || rx.kind.load(Relaxed) != NONE
            || look(self.segment.word(self.role.peer(), at)) != 0
            || look(self.theirs(Word::End)) != OPEN
        {
            // The flag stays: another thread may sleep by it. At worst it is woken once for nothing.
            return false;
        }
        true
    }

    /// The caller, who [sleeps](Self::sleep_on_data) next, looks for changes of its memory too: the peer is to wake it for what it [writes](Self::written).
    /// A change just before this call wakes nobody, so the sleep has to be short.
    pub fn doze(&self) {
        // A flag that the peer has cleared stays so: a wake-up is under way.
        let flag = self.mine(Word::WantData);
        let _ = flag.compare_exchange(DATA, ANYTHING, Relaxed, Relaxed);
    }

    /// We are about to sleep until the peer has consumed more than up to `position`: sets our flag. Returns false when it has already, or when it aborted or wrote nonsense.
    #[must_use]
    pub fn sleep_on_room(&self, position: u64) -> bool {
        self.tx.asleep.store(true, Relaxed);
        let flag = self.mine(Word::WantRoom);
        announce(flag, 1);
        let since = self.tx.consumed.load(Acquire);
        let head = self.check_head(since, look(self.theirs(Word::Head)));
        if head.map_or(true, |head| head > position) || look(self.theirs(Word::End)) >= ABORTED {
            return false;
        }
        true
    }

    /// The caller is awake: clears both our flags.
    #[inline]
    pub fn awake(&self) {
        for (asleep, flag) in [
            (&self.rx.asleep, Word::WantData),
            (&self.tx.asleep, Word::WantRoom),
        ] {
            if asleep.load(Relaxed) {
                asleep.store(false, Relaxed);
                self.mine(flag).store(0, Relaxed);
            }
        }
    }

    // ---- one-sided access

    /// The caller is about to touch the peer's memory that `stag` names. Stores our mark, then a full fence: a peer that misses the mark
    /// has written the values that are read afterwards (access, table) before.
    #[inline]
    pub fn enter(&self, stag: u32) {
        self.mine(Word::Mark).store(stag.into(), Release);
        fence(SeqCst);
    }

    /// The caller has finished touching the peer's memory.
    #[inline]
    pub fn leave(&self) {
        self.mine(Word::Mark).store(0, Release);
    }

    /// Our `STag` whose memory the peer touches now; 0: none. An untrusted value. Call it after a retraction; it contains the fence in
    /// between.
    pub fn peer_mark(&self) -> u32 {
        fence(SeqCst);
        self.theirs(Word::Mark).load(Acquire) as u32
    }

    /// Lets the peer touch our memory directly.
    pub fn open_access(&self) {
        self.mine(Word::Access).store(1, Release);
    }

    /// Forbids it again. After that a peer whose mark is not seen touches nothing; one whose mark is seen may still be
    /// at it.
    pub fn close_access(&self) {
        self.mine(Word::Access).store(0, SeqCst);
        fence(SeqCst);
    }

    /// Whether the peer lets us touch its memory; call it after [`enter`](Self::enter).
    #[inline]
    pub fn peer_access_open(&self) -> bool {
        self.theirs(Word::Access).load(Acquire) != 0
    }

    /// Publishes the capabilities of this side; the caller defines the bits.
    pub fn set_caps(&self, bits: u32) {
        self.mine(Word::Caps).store(bits.into(), Release);
    }

    /// The peer's capabilities. An untrusted value.
    pub fn peer_caps(&self) -> u32 {
        self.theirs(Word::Caps).load(Acquire) as u32
    }

    /// Whether the peer has aborted. If false, its memory read before this call was valid.
    pub fn peer_aborted(&self) -> bool {
        fence(SeqCst);
        self.theirs(Word::End).load(SeqCst) >= ABORTED
    }
}

impl std::fmt::Debug for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("End")
            .field("role", &self.role)
            .field("pushed", &self.tx.pushed)
            .field("published", &self.tx.published)
            .field("position", &self.rx.position)
            .finish_non_exhaustive()
    }
}
