//! Memory of the program that a peer may still fetch from, and the handling of threads that write to it.
//!
//! A loan is LIVE from before its mark is published until a thread finds that the receiver has completed it. The table is static
//! and made of atomics, because the handler of `SIGSEGV` walks it ([`help`]).
//!
//! # Safety
//!
//! A loan holds a count of its stream's `Arc`. Only [`reap`] releases it, after the loan has left LIVE and no thread has it
//! pinned; a thread that looks at the stream pins the loan first. The memory that a loan names is mapped as long as it is LIVE: the program's is settled before it
//! is unmapped, our copy is unmapped by [`reap`].

use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};

use weft_ring::Role;
use weft_ring::source::Move;
use weft_ring::stream::Stream;
use weft_run::ledger::Word;
use weft_sys::map::map_anonymous;
use weft_sys::protect::{self, Hold, Refused};

use crate::conn::Conn;
use crate::{clock, kernel, next};

const FREE: u64 = 0;
/// Being set or cleared.
const CLAIMED: u64 = 1;
/// With the loan's serial above it: a thread that has seen one loan in a slot cannot end a later one there.
const LIVE: u64 = 2;
const SERIAL_SHIFT: u32 = 2;

fn live(serial: u64) -> u64 {
    serial << SERIAL_SHIFT | LIVE
}

fn is_live(state: u64) -> bool {
    state & 3 == LIVE
}

/// How long a thread that writes waits for a receiver that does not fetch; then the bytes are copied.
const PATIENCE_MS: u64 = 100;
/// How long a thread waits for a receiver that is in the middle of a fetch and gone.
const GONE_MS: u64 = 2000;

pub(crate) struct Loan {
    state: AtomicU64,
    /// Threads that look at it.
    pins: AtomicU32,
    stream: AtomicPtr<Stream>,
    role: AtomicU32,
    number: AtomicU64,
    /// Its place among all loans of the process.
    serial: AtomicU64,
    start: AtomicUsize,
    len: AtomicUsize,
    /// The hold of the pages, a number of [`Hold::into_raw`]; 0: they are not protected for it.
    hold: AtomicUsize,
    /// Current address of the bytes, if they were moved; and the length of the mapping.
    copy: AtomicUsize,
    copy_len: AtomicUsize,
    /// When a thread first waited for it, in milliseconds; 0: none has.
    since: AtomicU64,
    conn: AtomicPtr<Conn>,
    peer: AtomicU32,
}

/// Largest number of sources of all connections.
const LOANS: usize = 256;

static TABLE: [Loan; LOANS] = [const {
    Loan {
        state: AtomicU64::new(FREE),
        pins: AtomicU32::new(0),
        stream: AtomicPtr::new(null_mut()),
        role: AtomicU32::new(0),
        number: AtomicU64::new(0),
        serial: AtomicU64::new(0),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        hold: AtomicUsize::new(0),
        copy: AtomicUsize::new(0),
        copy_len: AtomicUsize::new(0),
        since: AtomicU64::new(0),
        conn: AtomicPtr::new(null_mut()),
        peer: AtomicU32::new(0),
    }
}; LOANS];
/// Entries from here on have never been used.
static HIGH: AtomicUsize = AtomicUsize::new(0);
/// Loans that are LIVE.
static COUNT: AtomicU32 = AtomicU32::new(0);
/// The serial of the next loan.
static SERIAL: AtomicU64 = AtomicU64::new(0);
/// Threads that wait for all loans, because memory is about to go: nothing more is lent.
static FINISHING: AtomicU32 = AtomicU32::new(0);
/// A write to memory under way copies at once.
static COPY_ON_WRITE: AtomicBool = AtomicBool::new(false);

pub(crate) fn copy_on_write() {
    COPY_ON_WRITE.store(true, Relaxed);
}

/// Returns true if nothing may be lent any more. Callers check again after they have entered a loan: [`finish`] does not wait for loans entered after its
/// start.
pub(crate) fn is_finishing() -> bool {
    FINISHING.load(SeqCst) != 0
}

fn used() -> &'static [Loan] {
    &TABLE[..HIGH.load(SeqCst).min(LOANS)]
}

/// Signals are blocked in this thread while it lives: a handler that sent, or wrote to protected memory, would wait for its own thread. Not that of a fault:
/// the allocator, or what it calls, may write to memory that is protected for another loan.
pub(crate) struct Quiet(libc::sigset_t);

impl Quiet {
    pub(crate) fn new() -> Quiet {
        // SAFETY: signal sets are plain data; both are ours.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::sigdelset(&raw mut all, libc::SIGSEGV);
            next::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Quiet(before)
        }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // SAFETY: the set that was in effect before.
        unsafe { next::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, null_mut()) };
    }
}

/// A look at a loan that keeps its stream. Outside of the handler of faults only under [`Quiet`].
struct Pinned<'a>(&'a Loan, &'a Stream, Role);

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.0.pins.fetch_sub(1, SeqCst);
    }
}

/// Origin of a source.
pub(crate) struct Origin<'a> {
    pub(crate) conn: &'static Conn,
    pub(crate) stream: &'a Arc<Stream>,
    pub(crate) role: Role,
    pub(crate) peer: u32,
}

impl Loan {
    fn pin(&self) -> Option<Pinned<'_>> {
        self.pins.fetch_add(1, SeqCst);
        // SAFETY: null, or kept by its count as long as the loan is LIVE or pinned.
        let stream = unsafe { self.stream.load(SeqCst).as_ref() };
        match stream {
            Some(stream) if is_live(self.state.load(SeqCst)) => {
                let role = match self.role.load(Relaxed) {
                    0 => Role::Initiator,
                    _ => Role::Responder,
                };
                Some(Pinned(self, stream, role))
            }
            _ => {
                self.pins.fetch_sub(1, SeqCst);
                None
            }
        }
    }

    fn release_hold(&self) {
        drop(Hold::from_raw(self.hold.swap(0, SeqCst)));
    }

    fn is_of(&self, stream: &Stream) -> bool {
        std::ptr::eq(self.stream.load(SeqCst), stream)
    }
}

impl Pinned<'_> {
    fn is_done(&self) -> bool {
        self.1.completed_sources(self.2) > self.0.number.load(Relaxed)
    }

    /// Moves the bytes elsewhere, so that the program can use its memory. `true`: it can. Async-signal-safe.
    fn free_memory(&self) -> bool {
        let Pinned(loan, stream, role) = *self;
        let number = loan.number.load(Relaxed);
        if loan.copy.load(SeqCst) != 0 {
            return true;
        }
        let taken = match stream.move_source(role, number) {
            Move::Gone => return true,
            Move::Busy => return false,
            Move::Mine(taken) => taken as usize,
        };
        let (start, len) = (loan.start.load(Relaxed), loan.len.load(Relaxed));
        if taken >= len {
            // No honest receiver reports this.
            stream.spoil_source(role, number);
            return true;
        }
        let left = len - taken;
        let Ok(map) = map_anonymous(left) else {
            stream.source_moved(role, number, start as u64, taken as u64);
            return false;
        };
        let map = map.as_ptr();
        // SAFETY: the program's memory is mapped as long as the loan lives, and protected or the program's to keep until its send returns; the copy is ours.
        unsafe {
            let from = std::ptr::with_exposed_provenance::<u8>(start + taken);
            std::ptr::copy_nonoverlapping(from, map, left);
        }
        let at = map.expose_provenance();
        loan.copy_len.store(left, SeqCst);
        loan.copy.store(at, SeqCst);
        // Its first byte would be so far before the copy; never read.
        stream.source_moved(role, number, (at - taken) as u64, taken as u64);
        // SAFETY: a connection is never freed.
        if let Some(conn) = unsafe { loan.conn.load(Relaxed).as_ref() } {
            conn.row.count(Word::Moved, left as u64);
        }
        true
    }
}

/// Enters a loan, the source of this number, whose mark is about to be published at `position`; with its pages protected where `protect` says so.
///
/// The slot is written before the loan is LIVE, and without signals: a thread that writes to the memory from then on looks at the slot.
///
/// # Safety
/// The memory is readable, and stays as it is until the source is complete or moved, unless it is protected; then its owner settles it.
pub(crate) unsafe fn begin(
    origin: &Origin<'_>,
    (number, position): (u64, u64),
    start: *mut u8,
    len: usize,
    protect: bool,
) -> Result<(&'static Loan, u64), Refused> {
    reap();
    let _quiet = Quiet::new();
    let free = TABLE.iter().enumerate().find(|(_, loan)| {
        loan.state
            .compare_exchange(FREE, CLAIMED, SeqCst, SeqCst)
            .is_ok()
    });
    let Some((index, loan)) = free else {
        return Err(Refused::Full);
    };
    HIGH.fetch_max(index + 1, SeqCst);
    let hold = if protect {
        protect::set_helper(help);
        let at = NonNull::new(start).ok_or(Refused::ReadOnly);
        // SAFETY: the caller's promise.
        match at.and_then(|at| unsafe { protect::guard_helped(at, len) }) {
            Ok(hold) => hold.into_raw(),
            Err(refused) => {
                loan.state.store(FREE, SeqCst);
                return Err(refused);
            }
        }
    } else {
        0
    };
    loan.role.store(origin.role as u32, Relaxed);
    loan.number.store(number, Relaxed);
    let serial = SERIAL.fetch_add(1, SeqCst);
    loan.serial.store(serial, Relaxed);
    loan.start.store(start.expose_provenance(), Relaxed);
    loan.len.store(len, Relaxed);
    loan.hold.store(hold, Relaxed);
    loan.copy.store(0, Relaxed);
    loan.since.store(0, Relaxed);
    loan.peer.store(origin.peer, Relaxed);
    loan.conn
        .store(std::ptr::from_ref(origin.conn).cast_mut(), Relaxed);
    let stream = Arc::into_raw(Arc::clone(origin.stream)).cast_mut();
    loan.stream.store(stream, SeqCst);
    COUNT.fetch_add(1, SeqCst);
    origin.stream.offer_source(
        origin.role,
        number,
        position,
        start.expose_provenance() as u64,
        len as u64,
    );
    loan.state.store(live(serial), SeqCst);
    Ok((loan, serial))
}

impl Loan {
    /// Ends the loan of this serial: the receiver has the bytes, or will never fetch them.
    pub(crate) fn end(&self, serial: u64) {
        let _quiet = Quiet::new();
        let claimed = self
            .state
            .compare_exchange(live(serial), CLAIMED, SeqCst, SeqCst);
        if claimed.is_err() {
            return;
        }
        while self.pins.load(SeqCst) != 0 {
            std::thread::yield_now();
        }
        self.release_hold();
        let copy = self.copy.swap(0, SeqCst);
        if copy != 0 {
            let len = self.copy_len.load(SeqCst);
            let copy = std::ptr::with_exposed_provenance_mut(copy);
            // SAFETY: our copy, which no thread reads any more.
            let _ = unsafe { rustix::mm::munmap(copy, len) };
        }
        let stream = self.stream.swap(null_mut(), SeqCst);
        if !stream.is_null() {
            // SAFETY: the count that `begin` took.
            drop(unsafe { Arc::from_raw(stream) });
        }
        COUNT.fetch_sub(1, SeqCst);
        self.state.store(FREE, SeqCst);
    }

    /// Returns true if the receiver has all of it. A reaped loan is done.
    pub(crate) fn is_done(&self, stream: &Stream, number: u64) -> bool {
        let _quiet = Quiet::new();
        match self.pin() {
            Some(pinned) => {
                !self.is_of(stream) || self.number.load(Relaxed) != number || pinned.is_done()
            }
            None => true,
        }
    }

    /// The program gets its memory back: see [`Pinned::free_memory`].
    pub(crate) fn give_back(&self) -> bool {
        let _quiet = Quiet::new();
        self.pin().is_none_or(|pinned| pinned.free_memory())
    }
}

/// Ends the loans that are complete.
pub(crate) fn reap() {
    if COUNT.load(Relaxed) == 0 {
        return;
    }
    let _quiet = Quiet::new();
    for loan in used() {
        // Its serial cannot change while it is pinned.
        let done = loan.pin().filter(Pinned::is_done);
        let serial = done.map(|pinned| pinned.0.serial.load(Relaxed));
        if let Some(serial) = serial {
            loan.end(serial);
        }
    }
}

/// Helps a thread that waits for memory between these addresses, see [`protect::set_helper`]. Async-signal-safe.
fn help(start: usize, end: usize) {
    let mut sleep = None;
    for loan in used() {
        if !is_live(loan.state.load(SeqCst)) {
            continue;
        }
        let Some(pinned) = loan.pin() else { continue };
        let (from, len) = (loan.start.load(Relaxed), loan.len.load(Relaxed));
        if loan.hold.load(SeqCst) == 0 || end <= from || from + len <= start {
            continue;
        }
        if pinned.is_done() {
            loan.release_hold();
            continue;
        }
        let now = clock::now_ms().max(1);
        let since = match loan.since.compare_exchange(0, now, SeqCst, SeqCst) {
            Ok(_) => {
                // SAFETY: a connection is never freed.
                if let Some(conn) = unsafe { loan.conn.load(Relaxed).as_ref() } {
                    conn.row.count(Word::Faults, 1);
                    conn.faults.fetch_add(1, Relaxed);
                }
                now
            }
            Err(since) => since,
        };
        let waited = now.saturating_sub(since);
        let hurry = COPY_ON_WRITE.load(Relaxed) || waited >= PATIENCE_MS;
        if hurry && pinned.free_memory() {
            loan.release_hold();
            continue;
        }
        let Pinned(_, stream, role) = pinned;
        if waited >= GONE_MS && weft_sys::process::is_gone(loan.peer.load(Relaxed)) {
            stream.spoil_source(role, loan.number.load(Relaxed));
            loan.release_hold();
            continue;
        }
        let completed = stream.completed_sources(role) as u32;
        stream.wait_for_source(role);
        if !pinned.is_done() {
            sleep = Some((stream.completion_word(role), completed));
        }
    }
    match sleep {
        Some((word, seen)) => _ = kernel::sleep_on(word, seen, 5),
        None => std::thread::yield_now(),
    }
}

/// The socket is about to be closed for good: its loans are waited for while the receiver goes on, and what it leaves is moved, so that it can
/// be fetched as long as the process lives. `lost`: nothing will fetch it any more.
pub(crate) fn close(stream: &Stream, lost: bool) {
    if COUNT.load(Relaxed) == 0 {
        return;
    }
    let is_copied = |loan: &Loan| loan.copy.load(SeqCst) != 0;
    if !lost {
        wait(500, |loan| loan.is_of(stream) && !is_copied(loan));
    }
    let _quiet = Quiet::new();
    for loan in used() {
        let Some(pinned) = loan.pin() else { continue };
        if !loan.is_of(stream) {
            continue;
        }
        if lost {
            pinned.1.spoil_source(pinned.2, loan.number.load(Relaxed));
            let serial = loan.serial.load(Relaxed);
            drop(pinned);
            loan.end(serial);
        } else if !pinned.is_done() && pinned.free_memory() {
            loan.release_hold();
        }
    }
}

/// Waits until all current loans are fetched, or nothing is fetched for ten seconds: our memory becomes unreadable soon. Nothing more
/// is lent while the returned value lives.
#[must_use]
pub(crate) fn finish() -> Finishing {
    FINISHING.fetch_add(1, SeqCst);
    if COUNT.load(SeqCst) != 0 {
        wait(10_000, |loan| {
            !weft_sys::process::is_gone(loan.peer.load(Relaxed))
        });
    }
    Finishing(())
}

/// Nothing is lent as long as this lives.
pub(crate) struct Finishing(());

impl Drop for Finishing {
    fn drop(&mut self) {
        FINISHING.fetch_sub(1, SeqCst);
    }
}

/// Waits for the current loans that `which` selects, until they are complete or nothing of them is fetched for `patience_ms`.
fn wait(patience_ms: u64, which: impl Fn(&Loan) -> bool) {
    let end = SERIAL.load(SeqCst);
    let mut last = (clock::now_ms(), 0);
    loop {
        reap();
        let (mut progress, mut sleep) = (0_u64, None);
        {
            let _quiet = Quiet::new();
            for loan in used() {
                let Some(pinned) = loan.pin() else { continue };
                if loan.serial.load(Relaxed) >= end || !which(loan) || pinned.is_done() {
                    continue;
                }
                let Pinned(_, stream, role) = pinned;
                let completed = stream.completed_sources(role);
                progress = progress
                    .wrapping_add(completed)
                    .wrapping_add(stream.source_progress(role, loan.number.load(Relaxed)));
                stream.wait_for_source(role);
                if !pinned.is_done() {
                    sleep = Some((stream.completion_word(role), completed as u32));
                }
            }
        }
        let Some((word, seen)) = sleep else {
            reap();
            return;
        };
        let now = clock::now_ms();
        if progress != last.1 {
            last = (now, progress);
        } else if now - last.0 >= patience_ms {
            return;
        }
        kernel::sleep_on(word, seen, 20);
    }
}

/// In a child of a fork: nothing is lent.
pub(crate) fn after_fork() {
    protect::in_child();
    COUNT.store(0, SeqCst);
    FINISHING.store(0, SeqCst);
    for loan in used() {
        // The references that they kept belong to the parent; our copy in the child stays where it is.
        loan.hold.store(0, SeqCst);
        loan.stream.store(null_mut(), SeqCst);
        loan.pins.store(0, SeqCst);
        loan.state.store(FREE, SeqCst);
    }
}
