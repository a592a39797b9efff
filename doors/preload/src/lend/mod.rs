//! Large sends from the program's own memory: ZSDP (the send waits until the receiver has fetched) and AZ-SDP (the memory is protected, and the
//! send returns). The receiver's part is in fetch.rs, the table of loans in loans.rs.
//!
//! # Safety
//!
//! Memory that is lent is the program's buffer of a send. A send that waits does not return before the loan has ended or moved; memory of one that
//! does not is protected by `weft_sys::protect`, and memory.rs settles it before the program unmaps it.

pub(crate) mod loans;
mod measure;
pub(crate) mod memory;
mod signals;

use libc::c_int;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};

use weft_ring::source::{MAX_SOURCE, SOURCES, Terms};
use weft_run::connection::Carrier;
use weft_run::ledger::Word;
use weft_run::lend::{Copied, FROM, FROM_BYTES, MODE, Mode, ON_WRITE};
use weft_sys::protect::{self, Refused};

use crate::bell::{self, Heard, PATIENCE_MS};
use crate::chan::Chan;
use crate::conn::Conn;
use crate::iov::{Source, is_bad_list};
use crate::{kernel, lock, signal};
use loans::Origin;

/// Bytes of one loan, and of all that are under way in a direction, at most: as much as TCP's buffers hold.
const LARGEST: usize = 4 << 20;
pub(crate) const UNDER_WAY: u64 = 4 << 20;
const _: () = assert!(LARGEST as u64 <= MAX_SOURCE);

/// The user's mode, and the smallest send in bytes that it applies to.
struct Wish {
    mode: Mode,
    from: usize,
}

fn wish() -> &'static Wish {
    static WISH: OnceLock<Wish> = OnceLock::new();
    WISH.get_or_init(|| {
        let text = |name| std::env::var(name).unwrap_or_default();
        let mode = Mode::of(&text(MODE), &text(ON_WRITE));
        let from = text(FROM).parse().unwrap_or(FROM_BYTES);
        Wish {
            mode,
            from: from.max(protect::page_size()),
        }
    })
}

pub(crate) fn mode() -> Mode {
    wish().mode
}

/// At the library's start.
pub(crate) fn start() {
    let mode = mode();
    if mode == Mode::AzCopy {
        loans::copy_on_write();
    }
    if mode.protects() {
        memory::start();
        signals::start();
    }
}

/// By this value a peer knows that it reads this process.
static PROOF: AtomicU64 = AtomicU64::new(0);

fn proof() -> u64 {
    let now = PROOF.load(Relaxed);
    if now != 0 {
        return now;
    }
    let mut bytes = [0_u8; 8];
    // SAFETY: writes as many bytes.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    let value = u64::from_ne_bytes(bytes).max(1);
    match PROOF.compare_exchange(0, value, SeqCst, SeqCst) {
        Ok(_) => value,
        Err(other) => other,
    }
}

/// Resets the state in a child of a fork: the loans belong to the parent.
pub(crate) fn after_fork() {
    PROOF.store(0, SeqCst);
    TRACER.store(0, SeqCst);
    loans::after_fork();
}

/// The peer that Yama lets read our memory; the first one that met us.
static TRACER: AtomicU32 = AtomicU32::new(0);

/// Says to the peer that we lend, once for each channel.
fn introduce(chan: &Chan) {
    if chan.introduced.swap(true, SeqCst) {
        return;
    }
    let peer = chan.peer_process;
    if TRACER.compare_exchange(0, peer, SeqCst, SeqCst).is_ok() {
        // SAFETY: the arguments are numbers. Without Yama the call fails, and is not needed.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::c_ulong::from(peer), 0, 0, 0) };
    }
    let value = proof();
    chan.stream.prove(
        chan.role,
        (&raw const PROOF).expose_provenance() as u64,
        value,
    );
}

/// A process that has changed its user, or asked for it, cannot be read any more.
fn is_readable() -> bool {
    // SAFETY: asks.
    unsafe { libc::prctl(libc::PR_GET_DUMPABLE, 0, 0, 0, 0) == 1 }
}

/// Way of the next bytes of a send.
pub(crate) enum Plan {
    /// At most this many bytes go through the ring.
    Copy(usize),
    /// These are lent.
    Lend {
        start: *mut u8,
        len: usize,
        protect: bool,
    },
    /// Wait until the receiver has completed more than this many sources.
    Wait(u64),
}

/// State of one call of the program.
pub(crate) struct Call {
    /// The send may wait.
    may_wait: bool,
    /// The receiver was too slow once already.
    no_more: bool,
}

fn note(conn: &Conn, why: Copied, bytes: usize) {
    conn.row.put(Word::Lending, mode() as u64);
    conn.row.count(Word::TxCopied, bytes as u64);
    conn.row.mark(Word::WhyCopied, why.bit());
}

impl Call {
    #[inline]
    pub(crate) fn new(chan: &Chan, flags: c_int) -> Call {
        let nonblock = flags & libc::MSG_DONTWAIT != 0 || chan.side().nonblock.load(Relaxed) != 0;
        Call {
            may_wait: !nonblock,
            no_more: mode() == Mode::Bsdp || chan.carrier != Carrier::Here,
        }
    }

    /// Plans the bytes behind the first `sent` (under the sender's lock).
    #[inline]
    pub(crate) fn plan(
        &mut self,
        conn: &'static Conn,
        chan: &Chan,
        source: &Source<'_>,
        sent: usize,
    ) -> Plan {
        match source {
            Source::Memory(iov) if !self.no_more => self.plan_memory(conn, chan, iov, sent),
            _ => Plan::Copy(usize::MAX),
        }
    }

    fn plan_memory(
        &mut self,
        conn: &'static Conn,
        chan: &Chan,
        iov: &[libc::iovec],
        sent: usize,
    ) -> Plan {
        let from = wish().from;
        // The bytes before the first large piece go through the ring.
        let (mut skip, mut before) = (sent, 0);
        let mut found = None;
        for one in iov {
            if skip >= one.iov_len {
                skip -= one.iov_len;
                continue;
            }
            let len = one.iov_len - skip;
            let start = one.iov_base.cast::<u8>().wrapping_add(skip);
            skip = 0;
            if len >= from {
                found = Some((start, len));
                break;
            }
            before += len;
        }
        let Some((start, len)) = found else {
            self.no_more = true;
            return Plan::Copy(usize::MAX);
        };
        if before > 0 {
            return Plan::Copy(before);
        }
        let refuse = |call: &mut Call, why| {
            note(conn, why, len);
            call.no_more = true;
            Plan::Copy(usize::MAX)
        };
        if let Err(why) = self.may(conn, chan, start, len) {
            return refuse(self, why);
        }
        let (start, len) = if mode().protects() {
            let page = protect::page_size();
            let first = start.addr().next_multiple_of(page) - start.addr();
            let pages = len.saturating_sub(first) / page * page;
            if pages < from.min(len / 2).max(page) {
                return refuse(self, Copied::Memory);
            }
            if first > 0 {
                return Plan::Copy(first);
            }
            (start, pages.min(LARGEST))
        } else {
            (start, len.min(LARGEST))
        };
        let (offered, completed) = (
            chan.side().offered.load(Relaxed),
            chan.stream.completed_sources(chan.role),
        );
        let under_way = offered.saturating_sub(completed);
        let is_full = under_way >= SOURCES
            || (under_way > 0 && chan.lent.bytes_under_way(completed) + len as u64 > UNDER_WAY);
        if is_full {
            return if self.may_wait {
                Plan::Wait(completed)
            } else {
                refuse(self, Copied::Full)
            };
        }
        Plan::Lend {
            start,
            len,
            protect: mode().protects(),
        }
    }

    /// Checks that the receiver may fetch this send from the program's memory.
    fn may(&self, conn: &Conn, chan: &Chan, start: *mut u8, len: usize) -> Result<(), Copied> {
        let mode = mode();
        if chan.guest.is_some() {
            return Err(Copied::OtherUser);
        }
        if !mode.protects() && !self.may_wait {
            return Err(Copied::NonBlocking);
        }
        if mode == Mode::Auto && !measure::is_faster(start, len) {
            return Err(Copied::Slower);
        }
        // The receiver cannot tell the program of memory that is not there. A copy can.
        if !mode.protects() && is_bad_list(start, len.min(LARGEST)) {
            return Err(Copied::Memory);
        }
        if chan.peer_process == lock::own() {
            return Err(Copied::OneProcess);
        }
        if chan.process != lock::own() || chan.side().holders.load(SeqCst) != 1 {
            return Err(Copied::Shared);
        }
        if chan.peer_process == 0 || loans::is_finishing() || !is_readable() {
            return Err(Copied::NotAllowed);
        }
        match chan.stream.terms(chan.role) {
            Terms::Ready => {}
            Terms::Refused => return Err(Copied::NotAllowed),
            Terms::Unknown => {
                introduce(chan);
                return Err(Copied::NotYet);
            }
        }
        let faults = conn.faults.swap(0, Relaxed);
        let mut policy = chan.lent.policy();
        policy.may()?;
        policy.sent(faults);
        Ok(())
    }

    /// Enters a loan whose mark is about to be published at `position` (under the sender's lock). `None`: the caller has to copy.
    ///
    /// # Safety
    /// As `sendmsg(2)`: the memory is the program's buffer of this send.
    pub(crate) unsafe fn offer(
        &mut self,
        conn: &'static Conn,
        chan: &Chan,
        position: u64,
        (start, len, protect): (*mut u8, usize, bool),
    ) -> Option<Offer> {
        let number = chan.side().offered.load(Relaxed);
        let origin = Origin {
            conn,
            stream: &chan.stream,
            role: chan.role,
            peer: chan.peer_process,
        };
        // SAFETY: the caller's promise; the send waits for unprotected memory before it returns.
        match unsafe { loans::begin(&origin, (number, position), start, len, protect) } {
            Ok((loan, serial)) => {
                let offer = Offer {
                    loan,
                    serial,
                    number,
                    len,
                };
                // After the offer: a receiver that loses its rights sets the terms before it looks for the last offer.
                let refused = chan.stream.terms(chan.role) != Terms::Ready;
                if refused || loans::is_finishing() {
                    offer.withdrawn(chan);
                    note(conn, Copied::NotAllowed, len);
                    self.no_more = true;
                    return None;
                }
                Some(offer)
            }
            Err(refused) => {
                let why = match refused {
                    Refused::Busy => Copied::Overlap,
                    Refused::Full => Copied::Full,
                    Refused::Handler => Copied::Handler,
                    Refused::Shared => Copied::Others,
                    _ => Copied::Memory,
                };
                note(conn, why, len);
                self.no_more = true;
                None
            }
        }
    }

    /// Waits until the receiver has completed more than `completed` sources (without the lock).
    pub(crate) fn wait_for_room(&mut self, conn: &Conn, chan: &Chan, completed: u64) -> Heard {
        let heard = wait(chan, completed, None);
        loans::reap();
        if heard == Heard::Late {
            self.too_slow(conn, chan);
        }
        heard
    }

    fn too_slow(&mut self, conn: &Conn, chan: &Chan) {
        chan.lent.policy().late();
        conn.row.mark(Word::WhyCopied, Copied::SlowReader.bit());
        self.no_more = true;
    }

    /// Waits until the receiver has fetched a loan of memory that is not protected (without the lock). When this returns, the memory belongs to the
    /// program again in every case.
    pub(crate) fn wait_for_fetch(&mut self, conn: &Conn, chan: &Chan, offer: &Offer) -> Heard {
        let is_done = || offer.loan.is_done(&chan.stream, offer.number);
        let mut stuck = 0;
        loop {
            match wait(chan, offer.number, Some(offer)) {
                Heard::Alive => {}
                Heard::End => {
                    chan.stream.spoil_source(chan.role, offer.number);
                    offer.loan.end(offer.serial);
                    return Heard::End;
                }
                heard => {
                    // Late, or a signal: the rest is copied, so that the bytes are sent exactly once in every case.
                    if !is_done() && !offer.loan.give_back() {
                        // In the middle of a fetch. A receiver that never ends it is stopped or dead: it loses the connection, and not this thread its time.
                        stuck += c_int::from(heard == Heard::Late);
                        if stuck * PATIENCE_MS < STUCK_MS {
                            continue;
                        }
                        chan.stream.spoil_source(chan.role, offer.number);
                        offer.loan.end(offer.serial);
                        return Heard::End;
                    }
                    if heard == Heard::Late {
                        self.too_slow(conn, chan);
                    }
                    return heard;
                }
            }
            if is_done() {
                loans::reap();
                return Heard::Alive;
            }
        }
    }
}

/// A loan whose mark is being published.
pub(crate) struct Offer {
    loan: &'static loans::Loan,
    serial: u64,
    number: u64,
    pub(crate) len: usize,
}

impl Offer {
    /// The mark was published.
    pub(crate) fn published(&self, conn: &Conn, chan: &Chan) {
        chan.lent.note(self.number, self.len as u64);
        chan.side().offered.store(self.number + 1, Relaxed);
        conn.row.count(Word::TxSource, self.len as u64);
        conn.row.put(Word::Lending, mode() as u64);
    }

    /// It was not: the direction is closed.
    pub(crate) fn withdrawn(&self, chan: &Chan) {
        chan.stream.withdraw_source(chan.role, self.number);
        self.loan.end(self.serial);
    }
}

/// How long a receiver may be in the middle of one fetch, which is a copy of a few MiB.
const STUCK_MS: c_int = 5000;

/// How often the count is looked at before the thread sleeps.
const SPINS: u32 = 2000;

/// Waits until more than `completed` sources are complete, or the receiver does nothing for a while.
fn wait(chan: &Chan, completed: u64, offer: Option<&Offer>) -> Heard {
    let (stream, role) = (&chan.stream, chan.role);
    let is_done = || stream.completed_sources(role) > completed;
    if weft_sys::spin::turns() > 0 {
        for _ in 0..SPINS {
            if is_done() {
                return Heard::Alive;
            }
            std::hint::spin_loop();
        }
    }
    let number = offer.map_or(completed, |offer| offer.number);
    let mut progress = stream.source_progress(role, number);
    loop {
        let seen = stream.completed_sources(role) as u32;
        stream.wait_for_source(role);
        if is_done() {
            return Heard::Alive;
        }
        let word = stream.completion_word(role);
        match signal::outside(|| kernel::sleep_on(word, seen, PATIENCE_MS.into())) {
            -1 | libc::EINTR if signal::interrupts() => return Heard::Interrupted,
            0 | -1 | libc::EINTR => {}
            // The time is over, or the kernel does not let this thread sleep.
            _ => {
                if is_done() {
                    return Heard::Alive;
                }
                if bell::is_gone(chan) {
                    return Heard::End;
                }
                let now = stream.source_progress(role, number);
                if now == progress {
                    return Heard::Late;
                }
                progress = now;
            }
        }
    }
}

/// The socket is about to be closed for good.
pub(crate) fn closing(chan: &Chan) {
    if chan.process == lock::own() {
        loans::close(&chan.stream, bell::is_gone(chan));
    }
}

pub(crate) use loans::{Finishing, finish};

/// The process ends: what it lends is waited for, and nothing more is lent.
pub(crate) fn finish_for_good() {
    std::mem::forget(finish());
}
