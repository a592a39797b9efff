//! `epoll_wait` checks rings before it asks the kernel.
//!
//! A receive that empties a ring does not request a bell at once: the byte of the last bell stays, and no new one is requested. The connection is *late*, and
//! is in the list of its set. `epoll_wait` finds the bytes in these rings, so neither side makes a system call for them. Before a thread waits in
//! the kernel, and at least every [`TURNS`] answers or [`BOUND`], all late bells are requested, and the kernel is asked, for the other descriptors of the set too.
//!
//! Changes of a late connection's level-triggered registration are deferred too, because some programs change it at each message.
//!
//! The kernel may report a late connection as readable too early, never too late: its bell has a byte, or is requested. So nothing is lost if
//! another thread asks the kernel meanwhile.
//!
//! # Safety
//!
//! As `epoll_wait(2)`.

use libc::{c_int, epoll_event};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

use weft_run::connection::{Carrier, Route};

use crate::chan::Chan;
use crate::conn::{self, Big, Conn, Reg};
use crate::iov::is_bad;
use crate::private::{self, Guards, Held, Private};
use crate::regs::catch_up;
use crate::{bell, clock, edges, sets, signal, table};

const EDGE: u32 = libc::EPOLLET as u32;
const READABLE: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
const WRITABLE: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
/// Flags of registrations that are left to the kernel.
const NEVER: u32 = (libc::EPOLLONESHOT | libc::EPOLLEXCLUSIVE) as u32;

/// The kernel is asked after at most this many answers without it, or this many nanoseconds.
pub(crate) const TURNS: u32 = 64;
pub(crate) const BOUND: u64 = 1_000_000;
/// Late connections of a set.
const MOST: usize = 256;
/// Sets that can have late connections at a time.
const SETS: usize = 64;
/// In a mark: the direction ends there.
const CLOSED: u64 = 1 << 63;

/// A late connection; its registration is in the connection.
pub(crate) struct Late {
    conn: &'static Conn,
    /// Edge-triggered: the stream position up to which the program has been notified.
    told: u64,
}

/// A set's state of its late connections.
struct Slot {
    /// The set's number; 0: free.
    number: AtomicUsize,
    /// Threads that are about to wait in the kernel, or do, for any set that this slot can become the slot of.
    asleep: AtomicU32,
    turns: AtomicU32,
    asked: AtomicU64,
    late: Private<Vec<Late>>,
}

static SLOTS: [Slot; SETS] = [const {
    Slot {
        number: AtomicUsize::new(0),
        asleep: AtomicU32::new(0),
        turns: AtomicU32::new(0),
        asked: AtomicU64::new(0),
        late: Private::new(Guards::Late, Vec::new()),
    }
}; SETS];

/// Returns the slot of a set that has one.
fn slot_of(number: usize) -> Option<&'static Slot> {
    let slot = &SLOTS[number % SETS];
    (number != 0 && slot.number.load(SeqCst) == number).then_some(slot)
}

/// Like [`slot_of`], but claims the slot if it is free.
fn claim(number: usize) -> Option<&'static Slot> {
    if number != 0 {
        let slot = &SLOTS[number % SETS];
        let _ = slot.number.compare_exchange(0, number, SeqCst, SeqCst);
    }
    slot_of(number)
}

/// A thread waits in the kernel as long as this lives.
struct Asleep(&'static Slot);

impl Asleep {
    fn at(number: usize) -> Asleep {
        let slot = &SLOTS[number % SETS];
        slot.asleep.fetch_add(1, SeqCst);
        Asleep(slot)
    }
}

impl Drop for Asleep {
    fn drop(&mut self) {
        self.0.asleep.fetch_sub(1, SeqCst);
    }
}

/// Events of a ring.
enum Says {
    Nothing,
    /// These events, up to there as [`mark`] counts.
    Ready(u32, u64),
    /// The kernel knows more.
    Ask,
}

/// Up to where the stream goes, with a bit for its end there, and the bytes to be read.
fn mark(chan: &Chan) -> Option<(u64, usize)> {
    let head = chan.side().head.load(Relaxed);
    let (ready, is_closed) = chan.stream.ready(chan.peer(), head).ok()?;
    let end = head.wrapping_add(ready as u64) & !CLOSED;
    Some((if is_closed { end | CLOSED } else { end }, ready))
}

fn ask(one: &Late, chan: &Chan) -> Says {
    let events = one.conn.late_events.load(Relaxed);
    if events == 0 {
        // It is not in the set any more.
        return Says::Nothing;
    }
    let (tx, rx) = chan.mode();
    let Some((end, ready)) = mark(chan).filter(|_| rx == Route::Ring) else {
        return Says::Ask;
    };
    let is_finished = chan.stream.has_finished(chan.peer());
    if events & EDGE != 0 {
        return match end != one.told {
            true => {
                let has_room = tx == Route::Ring && chan.is_writable() == Some(true);
                let room = if has_room { WRITABLE } else { 0 };
                Says::Ready(events & (READABLE | room), end)
            }
            false if is_finished => Says::Ask,
            false => Says::Nothing,
        };
    }
    if is_finished || end & CLOSED != 0 {
        return Says::Ask;
    }
    let mut bits = 0;
    if ready > 0 {
        bits |= events & READABLE;
    }
    if events & WRITABLE != 0 {
        match chan.is_writable().filter(|_| tx == Route::Ring) {
            Some(true) => bits |= events & WRITABLE,
            Some(false) => {}
            None => return Says::Ask,
        }
    }
    if bits == 0 {
        Says::Nothing
    } else {
        Says::Ready(bits, end)
    }
}

/// Result of a look at a set.
#[derive(Clone, Copy)]
struct Seen {
    events: usize,
    late: usize,
    must_ask: bool,
}

/// Looks at the late rings of a set.
fn look(slot: &'static Slot, events: &mut [epoll_event]) -> Seen {
    let mut seen = Seen {
        events: 0,
        late: 0,
        must_ask: false,
    };
    let Some(mut held) = slot.late.lock_once() else {
        seen.must_ask = true;
        return seen;
    };
    let list = &mut *held;
    seen.late = list.len();
    for at in 0..list.len() {
        let one = &mut list[at];
        // A connection leaves the list before its channel is freed.
        let says = one.conn.chan_of_late().map_or(Says::Ask, |c| ask(one, c));
        let (bits, end) = match says {
            Says::Nothing => continue,
            Says::Ask => {
                seen.must_ask = true;
                continue;
            }
            Says::Ready(bits, end) => (bits, end),
        };
        let Some(event) = events.get_mut(seen.events) else {
            // The others come first the next time.
            list.rotate_left(at);
            break;
        };
        (event.events, event.u64) = (bits, one.conn.late_data.load(Relaxed));
        one.told = end;
        seen.events += 1;
    }
    seen
}

/// Requests the bell of a late connection, which ends its lateness. `false`: it stays in the list, because there is an event that the
/// program has not been notified of and the kernel does not know.
fn ask_for(one: &Late, big: Option<&Big>) -> bool {
    let inside = one.conn.enter();
    let Some(chan) = one.conn.chan(&inside) else {
        one.conn.is_late.store(false, SeqCst);
        return true;
    };
    if one.conn.is_behind.load(SeqCst) {
        match big {
            Some(big) => catch_up(one.conn, chan, big),
            None => catch_up(one.conn, chan, &conn::big()),
        }
    }
    let side = chan.side();
    let is_edge = one.conn.late_events.load(Relaxed) & EDGE != 0;
    let _rx = side.rx_lock.lock();
    if side.rx_state.load(SeqCst) == Route::Ring
        && let Some((end, ready)) = mark(chan)
    {
        if is_edge && end != one.told {
            return false;
        }
        let is_empty = ready == 0 && end & CLOSED == 0;
        if is_empty && bell::ask(chan) && is_edge {
            return false;
        }
        if is_edge && !is_empty {
            // The program has been told of these bytes, and may wait for the next ones.
            bell::ask_for_more(chan);
            if mark(chan).is_none_or(|(now, _)| now != end) {
                return false;
            }
        }
    }
    one.conn.is_late.store(false, SeqCst);
    true
}

/// Requests all late bells of a set. Returns whether there is an event to report first.
fn ask_for_all(slot: &'static Slot, big: Option<&Big>) -> bool {
    let Some(mut held) = slot.late.lock_once() else {
        return false;
    };
    if held.is_empty() {
        return false;
    }
    let mut all = std::mem::take(&mut *held);
    drop(held);
    all.retain(|one| !ask_for(one, big));
    let Some(mut held) = slot.late.lock_once() else {
        return false;
    };
    all.retain(|one| {
        // It may have left meanwhile, and be late again.
        let is_it = one.conn.is_late.load(SeqCst)
            && one.conn.late_set.load(SeqCst) == slot.number.load(SeqCst);
        is_it && !held.iter().any(|it| std::ptr::eq(it.conn, one.conn))
    });
    // The memory of the list stays.
    all.append(&mut held);
    *held = all;
    !held.is_empty()
}

/// Waits for a set by `call`, with a look at the rings of its late connections first. `call` gets the room for events, and true if it must not wait.
///
/// # Safety
/// As `epoll_wait(2)`.
pub(crate) unsafe fn wait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    may_wait: bool,
    mut call: impl FnMut(*mut epoll_event, c_int, bool) -> c_int,
) -> c_int {
    let number = sets::number(set);
    let mut call = |events, most, must_not_wait| {
        let n = call(events, most, must_not_wait);
        if n > 0 {
            // SAFETY: the kernel has written so many.
            edges::renew(number, unsafe {
                std::slice::from_raw_parts(events, n as usize)
            });
        }
        n
    };
    // The set may get its slot while this thread waits.
    let asleep = slot_of(number).is_none().then(|| Asleep::at(number));
    let Some(slot) = slot_of(number) else {
        return call(events, most, false);
    };
    drop(asleep);
    if most <= 0 || is_bad(events) || private::holds(Guards::Late) {
        return call(events, most, false);
    }
    let _busy = signal::begin();
    let mut call =
        |events, most, must_not_wait| signal::outside(|| call(events, most, must_not_wait));
    // SAFETY: the caller's promise. Any bytes are events.
    let room = unsafe { std::slice::from_raw_parts_mut(events, most as usize) };
    for _ in 0..4 {
        let mut seen = look(slot, room);
        if seen.events == 0 && seen.late > 0 && may_wait && !seen.must_ask {
            weft_sys::spin::wait_for_any(|| {
                seen = look(slot, room);
                seen.events > 0 || seen.must_ask
            });
        }
        let known = seen.events;
        // A caller that does not wait wants everything that is ready now.
        if known > 0 && may_wait && !is_due(slot) {
            return known as c_int;
        }
        let asleep = Asleep::at(number);
        let is_more = ask_for_all(slot, None);
        // If rings have taken all places, the kernel may have half of them: the events of the rings are reported again.
        let is_full = known == room.len();
        let kept = if is_full { known / 2 } else { known };
        let left = &mut room[kept..];
        let n = call(left.as_mut_ptr(), left.len() as c_int, known > 0 || is_more);
        drop(asleep);
        slot.turns.store(0, Relaxed);
        slot.asked.store(clock::now(), Relaxed);
        if known == 0 && (n != 0 || !is_more) {
            return n;
        }
        if is_full && n <= 0 {
            return known as c_int;
        }
        let all = sets::join(&mut room[..kept + n.max(0) as usize], kept);
        if all > 0 {
            return all as c_int;
        }
    }
    call(events, most, false)
}

/// Returns true if the kernel has to be asked although the rings have events.
fn is_due(slot: &Slot) -> bool {
    slot.turns.fetch_add(1, Relaxed) >= TURNS
        || clock::now().wrapping_sub(slot.asked.load(Relaxed)) > BOUND
}

/// Notes that a ring was emptied (under `rx_lock`). Returns whether its bell is left as it is: the connection is late.
#[inline]
pub(crate) fn put_off(conn: &'static Conn, chan: &Chan) -> bool {
    let number = conn.late_set.load(Relaxed);
    if number == 0 {
        return false;
    }
    conn.is_late.load(Relaxed) || begin(conn, chan, number)
}

fn begin(conn: &'static Conn, chan: &Chan, number: usize) -> bool {
    if chan.side().owed.load(Relaxed) + chan.stream.rung(chan.peer()).cast_signed() > 2 {
        // A few more in the bell would make it unwritable for the sender.
        return false;
    }
    // Bytes that have come since the ring was found empty have to be reported.
    let told = chan.side().head.load(Relaxed) & !CLOSED;
    let Some(slot) = slot_of(number).filter(|slot| is_free(conn, chan, slot)) else {
        return false;
    };
    let Some(mut held) = slot.late.lock_once() else {
        return false;
    };
    let list = &mut *held;
    if list.len() >= MOST || slot_of(number).is_none() || !is_free(conn, chan, slot) {
        return false;
    }
    list.push(Late { conn, told });
    // Rings for each arrival would cost both sides; the next one leaves a byte in the bell.
    chan.stream.ask_once(chan.peer());
    conn.is_late.store(true, SeqCst);
    true
}

/// Returns true if only `epoll_wait` waits for the set and the connection.
fn is_free(conn: &Conn, chan: &Chan, slot: &Slot) -> bool {
    let set = table::get(conn.late_fd.load(Relaxed));
    chan.side().holders.load(SeqCst) == 1
        && slot.asleep.load(SeqCst) == 0
        && set.is_loose_set(conn.late_set.load(Relaxed))
}

/// Defers a change of a registration (under the big lock) that the kernel needs only when it is asked. `false`: it needs the change now.
pub(crate) fn put_off_change(
    conn: &'static Conn,
    chan: &Chan,
    (reg, op): (&mut Reg, c_int),
    (events, data): (u32, u64),
    big: &Big,
) -> bool {
    let is_gone = op == libc::EPOLL_CTL_DEL;
    let events = if is_gone { 0 } else { events };
    let number = conn.late_set.load(Relaxed);
    let Some(slot) = slot_of(number).filter(|slot| is_free(conn, chan, slot)) else {
        return false;
    };
    let fits = number == reg.number
        && chan.mode() == (Route::Ring, Route::Ring)
        && reg.is_gone == (op == libc::EPOLL_CTL_ADD)
        && (reg.events | events) & (NEVER | EDGE) == 0
        && (is_gone || events & (READABLE | WRITABLE) != 0);
    if !fits {
        return false;
    }
    {
        let _rx = chan.side().rx_lock.lock();
        if !conn.is_late.load(Relaxed) && !begin(conn, chan, number) {
            return false;
        }
        reg.is_gone = is_gone;
        (reg.events, reg.data) = (events, data);
        conn.late_events.store(events, Relaxed);
        conn.late_data.store(data, Relaxed);
        conn.is_behind.store(true, SeqCst);
    }
    if slot.asleep.load(SeqCst) != 0 {
        // A thread that is about to sleep may have looked before.
        catch_up(conn, chan, big);
    }
    true
}

/// Handles a receive that must not wait and found nothing (under `rx_lock`). Returns whether nothing else has to be done, and the bell is left as it is.
#[inline]
pub(crate) fn is_put_off(conn: &Conn, chan: &Chan) -> bool {
    conn.is_late.load(Relaxed)
        && !chan.stream.has_finished(chan.peer())
        && (conn.late_events.load(Relaxed) & EDGE == 0 || !bell::is_ended(chan.bell()))
}

/// Follows a change of a connection's registrations or directions (under the big lock): does the deferred work, and records which set may look at its ring.
pub(crate) fn follow(conn: &'static Conn, chan: Option<&Chan>, regs: &[Reg]) {
    let may = chan.and_then(|chan| {
        let [reg] = regs else { return None };
        let (tx, rx) = chan.mode();
        let fits = chan.carrier == Carrier::Here
            && rx == Route::Ring
            && reg.events & NEVER == 0
            && reg.events & (READABLE | WRITABLE) != 0
            && reg.bell.is_some()
            && (tx == Route::Ring || reg.events & EDGE != 0 || reg.events & sets::OUT == 0)
            // An edge of room alone is no answer to bytes.
            && (reg.events & EDGE == 0 || reg.events & READABLE != 0)
            && !sets::is_foreign(reg.number);
        (fits && claim(reg.number).is_some()).then_some((reg, chan))
    });
    let Some((reg, _)) = may else {
        forget(conn, chan);
        return;
    };
    let is_same = conn.late_set.load(Relaxed) == reg.number
        && conn.late_fd.load(Relaxed) == reg.set
        && conn.late_events.load(Relaxed) == reg.events
        && conn.late_data.load(Relaxed) == reg.data;
    if is_same {
        return;
    }
    forget(conn, chan);
    conn.late_fd.store(reg.set, Relaxed);
    conn.late_events.store(reg.events, Relaxed);
    conn.late_data.store(reg.data, Relaxed);
    conn.late_set.store(reg.number, SeqCst);
}

/// Ends the lateness of a connection for good; the kernel gets its registrations (under the big lock).
pub(crate) fn leave(conn: &'static Conn, chan: Option<&Chan>, big: &Big) {
    if let Some(chan) = chan
        && conn.is_behind.load(SeqCst)
    {
        catch_up(conn, chan, big);
    }
    forget(conn, chan);
}

/// The same for a connection whose registrations the kernel has.
fn forget(conn: &'static Conn, chan: Option<&Chan>) {
    let number = conn.late_set.swap(0, SeqCst);
    // A thread that empties the ring at this moment still defers; after this none does.
    let rx = chan.map(|chan| chan.side().rx_lock.lock());
    if !conn.is_late.swap(false, SeqCst) {
        return;
    }
    drop(rx);
    let Some(slot) = slot_of(number) else { return };
    let mut gone = None;
    if let Some(mut held) = slot.late.lock_once()
        && let Some(at) = held.iter().position(|one| std::ptr::eq(one.conn, conn))
    {
        gone = Some(held.swap_remove(at));
    }
    if let Some(one) = gone
        && !ask_for(&one, None)
        && let Some(chan) = chan
    {
        // The kernel looks once more, and reports the events that the program has not seen.
        conn.is_late.store(false, SeqCst);
        let set = conn.late_fd.load(Relaxed);
        let events = conn.late_events.load(Relaxed);
        let data = conn.late_data.load(Relaxed);
        if sets::number(set) == number {
            sets::control(set, libc::EPOLL_CTL_MOD, chan.bell(), events, data);
        }
    }
}

/// Keeps the kernel's view of a set exact from now on: the set itself is waited for.
pub(crate) fn be_exact(fd: c_int) {
    if let Some(number) = table::be_exact(fd)
        && let Some(slot) = slot_of(number)
    {
        ask_for_all(slot, None);
    }
}

/// The set is closed, and not in the table any more.
pub(crate) fn close(number: usize) {
    if let Some(slot) = slot_of(number) {
        ask_for_all(slot, None);
        let held = slot.late.lock_once();
        slot.number.store(0, SeqCst);
        for one in held
            .into_iter()
            .flat_map(|mut held| std::mem::take(&mut *held))
        {
            one.conn.is_late.store(false, SeqCst);
        }
    }
}

/// Slots whose locks a fork holds without an allocation.
const FEW: usize = 8;

/// Held over a fork.
pub(crate) type Lists = ([Option<Held<Vec<Late>>>; FEW], Vec<Held<Vec<Late>>>);

/// Before a fork: the bells are as the kernel has to have them, and no list is half done. Without the lock of connections, which is this thread's already, the
/// bells stay as they are.
pub(crate) fn before_fork(big: Option<&Big>) -> Lists {
    let used = || SLOTS.iter().filter(|slot| slot.number.load(SeqCst) != 0);
    let mut lists = (const { [const { None }; FEW] }, Vec::new());
    if private::holds(Guards::Late) {
        return lists;
    }
    if let Some(big) = big {
        used().for_each(|slot| _ = ask_for_all(slot, Some(big)));
    }
    for (at, slot) in used().enumerate() {
        let held = slot.late.lock();
        match lists.0.get_mut(at) {
            Some(few) => *few = Some(held),
            None => lists.1.push(held),
        }
    }
    lists
}

/// In the child: the sets are the parent's too, and the kernel's alone.
pub(crate) fn in_child((few, more): Lists) {
    for mut list in few.into_iter().flatten().chain(more) {
        for one in list.drain(..) {
            one.conn.is_late.store(false, SeqCst);
        }
    }
    for slot in &SLOTS {
        slot.asleep.store(0, SeqCst);
        // One whose lock a thread of the parent has taken since is lost for this process.
        let number = if slot.late.is_held() { usize::MAX } else { 0 };
        slot.number.store(number, SeqCst);
    }
}
