//! Receiving.
//!
//! # Safety
//!
//! The program's buffers are as its call says: every function here that takes them is as safe as `recvmsg(2)`.

use libc::{c_int, c_ulong, iovec, ssize_t};
use std::cell::Cell;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::connection::receive::{self, Asked, Empty, First, Kernel};
use weft_run::connection::{Carrier, Route, back};
use weft_run::ledger::Word;
use weft_run::meet::Why;

use crate::bell::{self, Heard};
use crate::chan::{Chan, Side};
use crate::conn::{self, Conn};
use crate::fetch::{self, Took};
use crate::iov::{cut, one, total};
use crate::lend::{UNDER_WAY, memory};
use crate::lock::Held;
use crate::patience::{Deadline, millis};
use crate::{clock, direction, hosts, kernel, link, lock, ready, ring_poll, set_errno, signal};

/// Result of a receive from the ring.
enum Step {
    Done(ssize_t),
    /// The receive continues over TCP, with this many bytes received already.
    Tcp(usize),
}

/// Is the next byte to be read the one at the mark of urgent data?
pub(crate) const SIOCATMARK: c_ulong = 0x8905;

fn failed(errno: c_int) -> ssize_t {
    set_errno(errno);
    -1
}

/// Flags whose bytes are not part of the stream's count, or not part of the stream.
const ASIDE: c_int = libc::MSG_PEEK | libc::MSG_OOB | libc::MSG_ERRQUEUE;

/// Receives into the vector. `real` is the program's own call.
///
/// # Safety
/// As `recvmsg(2)`.
#[inline]
pub(crate) unsafe fn receive(
    fd: c_int,
    iov: &[iovec],
    flags: c_int,
    real: impl Fn() -> ssize_t,
) -> ssize_t {
    let Some(conn) = conn::of(fd) else {
        return real();
    };
    if !conn.phase.load(Relaxed).is_followed() {
        return real();
    }
    let Some(_busy) = signal::enter(conn) else {
        return -1;
    };
    // SAFETY: the caller's promise.
    unsafe { receive_looking(fd, iov, flags, &|| signal::outside(&real)) }
}

unsafe fn receive_looking(
    fd: c_int,
    iov: &[iovec],
    flags: c_int,
    real: &dyn Fn() -> ssize_t,
) -> ssize_t {
    let Some((conn, inside)) = conn::enter(fd) else {
        return real();
    };
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        return real();
    }
    link::tick(conn, fd, &inside);
    let mut has_waited = false;
    loop {
        if has_waited && !conn.is(fd) {
            // SAFETY: the caller's promise.
            return signal::outside(|| unsafe { kernel::receive(conn.socket(fd), iov, flags) });
        }
        let Some(chan) = conn.chan(&inside) else {
            if let Some(n) = over_tcp(conn, None, iov, flags, real) {
                return n;
            }
            continue;
        };
        let side = chan.side();
        ready::keep_up(conn, chan);
        match side.rx_state.load(SeqCst) {
            Route::Ring => {
                if may_not_block(chan, flags) && is_still_empty(chan) {
                    return failed(libc::EAGAIN);
                }
                // SAFETY: the caller's promise.
                match unsafe { from_ring((fd, conn), chan, iov, flags) } {
                    Step::Done(n) => return n,
                    Step::Tcp(0) => has_waited = true,
                    Step::Tcp(got) => {
                        // SAFETY: the caller's promise.
                        return unsafe { rest(conn.socket(fd), chan, iov, flags, got) };
                    }
                }
            }
            Route::Tcp => {
                side.run.store(0, Relaxed);
                let is_here = chan.carrier == Carrier::Here;
                if is_here && direction::try_switch_rx(conn, chan, &inside) {
                    continue;
                }
                if !is_here {
                    hosts::try_consent(conn, chan, &inside);
                }
                if let Some(n) = over_tcp(conn, Some(chan), iov, flags, real) {
                    let is_end = n == 0 && side.tx_state.load(Relaxed) == Route::Ring;
                    if is_end && total(iov) > 0 && bell::follow_death(fd, chan) {
                        continue;
                    }
                    acknowledge(fd, side, n);
                    if n > 0 && is_here {
                        direction::try_switch_rx(conn, chan, &inside);
                    }
                    return n;
                }
            }
            Route::Both => {
                // SAFETY: the caller's promise.
                if let Some(n) = unsafe { hosts::receive(fd, conn, chan, iov, flags) } {
                    let is_part = n > 0
                        && flags & libc::MSG_WAITALL != 0
                        && flags & (libc::MSG_PEEK | libc::MSG_DONTWAIT) == 0
                        && side.nonblock.load(Relaxed) == 0
                        && (n as usize) < total(iov);
                    if !is_part {
                        return n;
                    }
                    // SAFETY: the caller's promise.
                    return n + unsafe { remainder(fd, iov, flags, n as usize) };
                }
            }
            Route::After => {
                // What is given back comes before what TCP has by then.
                await_giver(side);
                let n = real();
                acknowledge(fd, side, n);
                if n > 0 && flags & ASIDE == 0 {
                    conn.rx_count.fetch_add(n as u64, Relaxed);
                    conn.tell_tcp();
                }
                return n;
            }
        }
    }
}

/// After a receive of up to this many bytes the peer may wait for an acknowledgement before it sends more.
const SHORT: ssize_t = 4096;

/// Acknowledges a receive over TCP: if the outgoing direction is on the ring, no segment of ours does so.
fn acknowledge(fd: c_int, side: &Side, n: ssize_t) {
    if (1..=SHORT).contains(&n) && side.tx_state.load(Relaxed) == Route::Ring {
        direction::acknowledge(fd);
    }
}

/// Receives into the rest of a vector, from the direction's current source. Returns 0 if there is no more.
unsafe fn remainder(fd: c_int, iov: &[iovec], flags: c_int, got: usize) -> ssize_t {
    let left = cut(iov, got);
    // SAFETY: the caller's promise.
    let real = || signal::outside(|| unsafe { kernel::receive(fd, &left, flags) });
    // SAFETY: the caller's promise.
    unsafe { receive_looking(fd, &left, flags, &real) }.max(0)
}

/// Receives from the kernel. `None`: the direction has switched meanwhile.
fn over_tcp(
    conn: &Conn,
    chan: Option<&Chan>,
    iov: &[iovec],
    flags: c_int,
    real: &dyn Fn() -> ssize_t,
) -> Option<ssize_t> {
    conn.in_rx.fetch_add(1, SeqCst);
    if chan.is_some_and(|chan| chan.side().rx_state.load(SeqCst) != Route::Tcp) {
        conn.in_rx.fetch_sub(1, SeqCst);
        return None;
    }
    let n = real();
    if n > 0 && flags & ASIDE == 0 {
        // Discarded bytes are not in the program's buffers, which may not exist.
        if flags & libc::MSG_TRUNC == 0 {
            hosts::note_received(conn, iov, n as u64);
        }
        conn.rx_count.fetch_add(n as u64, SeqCst);
        conn.tell_tcp();
    } else if n < 0 {
        // An unsuccessful look does not count as a receive: the peer has not done its part yet.
        link::untick(conn);
    }
    conn.in_rx.fetch_sub(1, SeqCst);
    Some(n)
}

/// Receives the rest of a vector from TCP, behind the last bytes of the ring. Only a call that asked for all waits for it.
unsafe fn rest(fd: c_int, chan: &Chan, iov: &[iovec], flags: c_int, got: usize) -> ssize_t {
    let mut got = got;
    let mut deadline = Deadline::default();
    let waits = flags & (libc::MSG_WAITALL | libc::MSG_PEEK) == libc::MSG_WAITALL
        && !may_not_block(chan, flags);
    loop {
        // SAFETY: the caller's promise.
        let n = unsafe { more(fd, iov, flags, got) };
        got += n.max(0) as usize;
        if n == 0 || !waits || got == total(iov) {
            return got as ssize_t;
        }
        let left = deadline.left(&chan.side().receive_limit);
        let mut bytes = [kernel::entry(fd, libc::POLLIN)];
        // There are bytes: a signal ends the wait, even if its handler restarts calls.
        if n < 0
            && (crate::errno() != libc::EAGAIN
                || signal::outside(|| kernel::poll(&mut bytes, millis(left))) <= 0)
        {
            return got as ssize_t;
        }
    }
}

/// Receives from TCP without a wait, behind `got` bytes of a call. Returns 0 where the call ends.
unsafe fn more(fd: c_int, iov: &[iovec], flags: c_int, got: usize) -> ssize_t {
    if kernel::asked(fd, SIOCATMARK) == Some(1) {
        // A receive that has bytes ends at the mark of urgent data; one that begins there skips the urgent byte.
        return 0;
    }
    if kernel::poll_one(fd, libc::POLLIN, 0) & libc::POLLERR != 0 && kernel::unread(fd) <= 0 {
        // The next call reports the error; this one would take it away.
        return 0;
    }
    let flags = flags & !libc::MSG_WAITALL | libc::MSG_DONTWAIT;
    // SAFETY: the caller's promise.
    unsafe { kernel::receive(fd, &cut(iov, got), flags) }
}

/// Returns the bytes received so far, or the error if there are none.
fn so_far(got: usize, errno: c_int) -> Step {
    Step::Done(if got > 0 {
        got as ssize_t
    } else {
        failed(errno)
    })
}

thread_local! {
    /// This thread gives bytes back.
    static GIVES: Cell<bool> = const { Cell::new(false) };
}

fn is_given(side: &Side) -> bool {
    side.giver.load(SeqCst) != 0 && !GIVES.get()
}

/// Waits until the bytes that are given back are in TCP, or whoever does it is dead.
fn await_giver(side: &Side) {
    while is_given(side) {
        let giver = side.giver.load(SeqCst);
        if giver != lock::own() && weft_sys::process::is_gone(giver) {
            let _ = side.giver.compare_exchange(giver, 0, SeqCst, SeqCst);
        }
        kernel::nap(50_000);
    }
}

/// While it lives, no other thread or process receives.
pub(crate) struct Giving<'a>(&'a Side);

impl<'a> Giving<'a> {
    /// `None`: another one gives.
    pub(crate) fn begin(side: &'a Side) -> Option<Giving<'a>> {
        // A receive that has the lock ends its step first.
        let _rx = side.rx_lock.lock();
        let begun = side.giver.compare_exchange(0, lock::own(), SeqCst, SeqCst);
        begun.ok()?;
        GIVES.set(true);
        Some(Giving(side))
    }
}

impl Drop for Giving<'_> {
    fn drop(&mut self) {
        GIVES.set(false);
        self.0.giver.store(0, SeqCst);
    }
}

/// TCP has fewer bytes under way in a direction.
const MOST_IN_TCP: usize = 64 << 20;

/// Takes all bytes of a closed direction: those of its ring, and those that TCP has behind them. `None`: there are more than an honest peer has sent, and
/// the connection is reset.
pub(crate) fn drain(fd: c_int, conn: &'static Conn, chan: &Chan) -> Option<Vec<u8>> {
    let mut all = Vec::new();
    let mut bytes = vec![0_u8; 64 << 10];
    let mut is_in_ring = true;
    let mut most = chan.stream.capacity() + UNDER_WAY as usize;
    loop {
        let iov = one(bytes.as_mut_ptr().cast(), bytes.len());
        let flags = libc::MSG_DONTWAIT;
        // SAFETY: our buffer.
        let step = unsafe {
            if is_in_ring {
                from_ring((fd, conn), chan, &iov, flags)
            } else {
                Step::Done(kernel::receive(fd, &iov, flags))
            }
        };
        let (n, is_last) = match step {
            Step::Done(n) => (n.max(0) as usize, n <= 0),
            Step::Tcp(n) => (n, true),
        };
        if n > most {
            conn.reset(chan, Why::Broken);
            return None;
        }
        most -= n;
        all.extend_from_slice(&bytes[..n]);
        if is_last && !is_in_ring {
            return Some(all);
        }
        if is_last {
            is_in_ring = false;
            most = MOST_IN_TCP;
        }
    }
}

/// What a call has waited for so far.
#[derive(Default)]
struct Waits {
    deadline: Deadline,
    /// Its last wait was ended by the bell.
    is_woken: bool,
    /// The bell was readable when the kernel was asked last.
    rings: bool,
}

/// A pause while the next source is moved, for longer than [`fetch::take`] waits for it. A move is one copy, but the peer may be stopped meanwhile.
fn await_move(
    conn: &Conn,
    chan: &Chan,
    flags: c_int,
    (got, waits): (usize, &mut Waits),
) -> Option<Step> {
    const PAUSE_MS: c_int = 2;
    if bell::is_gone(chan) {
        return Some(Step::Done(conn.reset(chan, Why::SourceLost)));
    }
    let left = waits.deadline.left(&chan.side().receive_limit);
    if may_not_block(chan, flags) || left == Some(0) {
        return Some(so_far(got, libc::EAGAIN));
    }
    let rc = signal::outside(|| kernel::poll(&mut [], PAUSE_MS));
    let is_over = rc < 0 && (got > 0 || left.is_some() || signal::interrupts());
    is_over.then(|| so_far(got, libc::EINTR))
}

/// What a look at the ring gives: `n` bytes of it and, if they are the last of a closed one, those of TCP behind them.
unsafe fn peeked(
    (fd, conn): (c_int, &'static Conn),
    chan: &Chan,
    iov: &[iovec],
    flags: c_int,
    (n, is_last): (usize, bool),
) -> Step {
    if is_last {
        // SAFETY: the caller's promise.
        return Step::Done(unsafe { rest(fd, chan, iov, flags & !libc::MSG_WAITALL, n) });
    }
    if chan.side().eager.load(Relaxed) == bell::EDGE && !chan.stream.is_closed(chan.peer()) {
        told_of_rest(conn, chan);
    }
    Step::Done(n as ssize_t)
}

/// A look that is to see all bytes (`MSG_WAITALL`) pauses for those that are not there yet. `false`: it returns what there is.
fn await_all(fd: c_int, chan: &Chan, flags: c_int, rx: Held<'_>, waits: &mut Waits) -> bool {
    drop(rx);
    if flags & libc::MSG_WAITALL == 0
        || may_not_block(chan, flags)
        || ask_kernel(fd, chan, false, waits) != Kernel::Quiet
    {
        return false;
    }
    let left = waits.deadline.left(&chan.side().receive_limit);
    left != Some(0) && signal::outside(|| kernel::poll(&mut [], 1)) >= 0
}

/// The peer broke the rules of the ring or of its bell.
#[cold]
fn broken(conn: &Conn, chan: &Chan) -> Step {
    Step::Done(conn.reset(chan, Why::Broken))
}

unsafe fn from_ring(
    (fd, conn): (c_int, &'static Conn),
    chan: &Chan,
    iov: &[iovec],
    flags: c_int,
) -> Step {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    let want = total(iov);
    let mut got = 0;
    let (mut spun, mut ended, mut waits) = (false, false, Waits::default());
    fetch::answer(chan);
    memory::settle_all(iov);
    loop {
        // Another thread may close the socket meanwhile, and its number may be another's.
        let fd = conn.socket(fd);
        let (empty, first);
        let mut is_busy = false;
        {
            let rx = side.rx_lock.lock();
            if is_given(side) {
                drop(rx);
                match got {
                    0 => await_giver(side),
                    got => return Step::Done(got as ssize_t),
                }
                continue;
            }
            if side.rx_state.load(SeqCst) != Route::Ring {
                return Step::Tcp(got);
            }
            let head = side.head.load(Relaxed);
            let Ok((ready, is_closed)) = stream.ready(peer, head) else {
                return broken(conn, chan);
            };
            if ready > 0 {
                // SAFETY: the caller's buffers.
                match unsafe { fetch::take(conn, chan, iov, (got, want), ready, flags) } {
                    Took::Bytes(n) if flags & libc::MSG_PEEK != 0 => {
                        let is_last = is_closed && n < want;
                        let is_part = !is_last && n < want && ready < stream.capacity();
                        if is_part && await_all(fd, chan, flags, rx, &mut waits) {
                            continue;
                        }
                        // SAFETY: the caller's promise.
                        return unsafe { peeked((fd, conn), chan, iov, flags, (n, is_last)) };
                    }
                    Took::Bytes(n) => {
                        got += n;
                        let is_empty = side.head.load(Relaxed) == head.wrapping_add(ready as u64);
                        let is_eager = is_empty && side.eager.load(Relaxed) != 0 && !is_closed;
                        if is_eager && !ring_poll::put_off(conn, chan) {
                            bell::ask(chan);
                        } else if !is_empty && side.eager.load(Relaxed) == bell::EDGE {
                            told_of_rest(conn, chan);
                        }
                        // Behind the last bytes of a closed ring come those of TCP.
                        let wants_all = flags & libc::MSG_WAITALL != 0;
                        let is_more =
                            receive::goes_on(wants_all, is_empty, is_closed, chan.carrier);
                        if got == want || !is_more {
                            return Step::Done(got as ssize_t);
                        }
                        continue;
                    }
                    Took::Busy => is_busy = true,
                    _ if got > 0 => return Step::Done(got as ssize_t),
                    Took::Fault => return Step::Done(failed(libc::EFAULT)),
                    Took::Broken => return broken(conn, chan),
                    Took::Lost => return Step::Done(conn.reset(chan, Why::SourceLost)),
                }
            }
            let may_wait = !may_not_block(chan, flags);
            empty = Empty {
                is_closed,
                has_ended: ended,
                may_wait,
                has_spun: spun,
                is_left: !may_wait
                    && !ended
                    && (ring_poll::is_put_off(conn, chan) || was_just_probed(chan)),
            };
            first = receive::on_empty(empty);
            match first {
                _ if is_busy => {}
                First::Return => return so_far(got, libc::EAGAIN),
                First::Ask if bell::ask(chan) => continue,
                First::Ask if waits.is_woken && bell::has_uncounted(chan) => {
                    return broken(conn, chan);
                }
                First::Ask | First::GoOn | First::Spin => {}
            }
        }
        if is_busy {
            if let Some(step) = await_move(conn, chan, flags, (got, &mut waits)) {
                return step;
            }
            continue;
        }
        if first == First::GoOn {
            return go_on_over_tcp((fd, conn), chan, true, got);
        }
        if first == First::Spin {
            spun = true;
            spin(chan);
            continue;
        }
        spun = false;
        match receive::asked(empty, || ask_kernel(fd, chan, empty.may_wait, &mut waits)) {
            Asked::Return if rings_for_nothing(chan, &waits) => return broken(conn, chan),
            Asked::GoOn => return go_on_over_tcp((fd, conn), chan, false, got),
            Asked::Reset => return Step::Done(conn.reset(chan, Why::Unseen)),
            Asked::Return => return so_far(got, libc::EAGAIN),
            Asked::Ended => ended = true,
            Asked::Sleep => match sleep((fd, conn), chan, (got, want), &mut waits) {
                Ok(is_end) => ended = is_end,
                Err(step) => return step,
            },
        }
    }
}

/// Sleeps until the bell rings. Returns whether the peer, or the kernel, has ended the connection.
fn sleep(
    (fd, conn): (c_int, &Conn),
    chan: &Chan,
    (got, want): (usize, usize),
    waits: &mut Waits,
) -> Result<bool, Step> {
    let left = waits.deadline.left(&chan.side().receive_limit);
    if left == Some(0) {
        return Err(so_far(got, libc::EAGAIN));
    }
    conn.row.count(Word::Sleeps, 1);
    let heard = bell::wait_in(chan, fd, left, got > 0);
    waits.is_woken = heard == Heard::Alive;
    match heard {
        Heard::Alive => Ok(bell::is_cut_in_fill(chan)),
        Heard::End => Ok(true),
        Heard::Refused if chan.carrier == Carrier::Here => {
            // On TCP the kernel waits in the receive itself.
            conn.note(Why::Descriptors);
            let _rx = chan.side().rx_lock.lock();
            chan.stream.close(chan.peer());
            bell::make_room(chan);
            Ok(false)
        }
        Heard::Refused => Err(so_far(got, crate::errno())),
        // In the kernel such a receive waits once, and has no error to report.
        Heard::Late | Heard::Interrupted if want == 0 => Err(Step::Done(0)),
        Heard::Late => Err(so_far(got, libc::EAGAIN)),
        Heard::Interrupted => Err(so_far(got, libc::EINTR)),
    }
}

/// The rest of the stream, or its end, comes over TCP. `closed`: the direction is, and not only the peer gone.
fn go_on_over_tcp(
    (fd, conn): (c_int, &'static Conn),
    chan: &Chan,
    closed: bool,
    got: usize,
) -> Step {
    if !closed {
        if hosts::is_lost(chan, chan.peer()) {
            return Step::Done(conn.reset(chan, Why::SideLost));
        }
        await_end(fd);
        bell::follow_abort(fd, chan);
        bell::follow_death(fd, chan);
        if chan.carrier == Carrier::Here && kernel::unread(fd) > 0 {
            return Step::Done(conn.reset(chan, Why::Unseen));
        }
    }
    let why = back::reason(closed, hosts::is_at_end(conn, chan));
    direction::rx_after(conn, chan, why);
    Step::Tcp(got)
}

/// A bell is readable that has been read. Returns true if it is so without bytes in its ring, which would wake the program without end.
fn rings_for_nothing(chan: &Chan, waits: &Waits) -> bool {
    if !waits.rings {
        return false;
    }
    let side = chan.side();
    let _rx = side.rx_lock.lock();
    let ready = chan.stream.ready(chan.peer(), side.head.load(Relaxed));
    matches!(ready, Ok((0, false))) && bell::has_uncounted(chan)
}

/// What the kernel says of an empty ring's peer. A receiver that is about to sleep is told of the end by its bell. For one that is not,
/// `waits` says then whether the bell is readable.
fn ask_kernel(fd: c_int, chan: &Chan, may_wait: bool, waits: &mut Waits) -> Kernel {
    let mut says = Kernel::Quiet;
    if chan.carrier == Carrier::Here {
        says = socket_says(fd, chan, &mut waits.rings);
    }
    if says == Kernel::Quiet && !may_wait {
        // The bell can end before a FIN that the kernel has to send again.
        let may_have_ended = chan.carrier != Carrier::Here || chan.stream.has_finished(chan.peer());
        let has_ended = may_have_ended && bell::probe(chan.bell()) == Heard::End;
        if has_ended || bell::is_cut_in_fill(chan) {
            says = Kernel::End;
        }
    }
    says
}

/// An edge-triggered program has left bytes in the ring (under `rx_lock`).
fn told_of_rest(conn: &Conn, chan: &Chan) {
    if !conn.is_late.load(Relaxed) {
        bell::ask_for_more(chan);
    }
}

/// What the kernel says of the TCP socket while its bytes come through the ring.
fn socket_says(fd: c_int, chan: &Chan, rings: &mut bool) -> Kernel {
    const END: i16 = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR;
    let mut list = [
        kernel::entry(fd, libc::POLLIN | libc::POLLRDHUP),
        kernel::entry(chan.bell(), libc::POLLIN),
    ];
    kernel::look(&mut list, 0);
    *rings = list[1].revents & libc::POLLIN != 0;
    match list[0].revents {
        0 => Kernel::Quiet,
        bits => receive::readable(
            bits & END != 0,
            || chan.stream.is_closed(chan.peer()),
            || kernel::unread(fd) > 0,
        ),
    }
}

/// How long a probe of the peer stays valid, in nanoseconds; at least a tick of the kernel, whose clock measures it.
const THERE: u64 = 1_000_000;

/// Returns true for a socket that a program polls repeatedly and that is in no epoll set: the bell can wait, because a thread that waits for it requests it
/// first. From time to time it is false, so that the kernel is asked whether the peer has been killed (under `rx_lock`).
fn was_just_probed(chan: &Chan) -> bool {
    let side = chan.side();
    if !is_only_looked_at(chan) {
        return false;
    }
    let now = clock::about_now();
    if now.wrapping_sub(side.probed.load(Relaxed)) < THERE {
        return true;
    }
    side.probed.store(now, Relaxed);
    false
}

/// Returns true if the socket is in no epoll set, and its sender has not finished.
#[inline]
fn is_only_looked_at(chan: &Chan) -> bool {
    chan.side().eager.load(Relaxed) == 0 && !chan.stream.has_finished(chan.peer())
}

/// As [`was_just_probed`], without `rx_lock`: the ring is empty, and the last probe found the peer.
#[inline]
fn is_still_empty(chan: &Chan) -> bool {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    matches!(stream.ready(peer, side.head.load(Relaxed)), Ok((0, false)))
        && is_only_looked_at(chan)
        && clock::about_now().wrapping_sub(side.probed.load(Relaxed)) < THERE
}

/// Returns true if the call must not wait, by its flags or its descriptor.
#[inline]
fn may_not_block(chan: &Chan, flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT != 0 || chan.side().nonblock.load(Relaxed) != 0
}

/// A short look before sleeping: waking costs more.
fn spin(chan: &Chan) {
    let (stream, peer) = (&chan.stream, chan.peer());
    let head = chan.side().head.load(Relaxed);
    let spun = &chan.side().spun;
    spun.wait(|| !matches!(stream.ready(peer, head), Ok((0, false))));
}

/// The peer has closed its bell: its FIN or RST is there, or comes at once. If memory for TCP is short, the kernel drops even segments that stay on the host,
/// and sends them again later; a program that the bell has woken has to find the end all the same.
const END_MS: c_int = 2000;

fn await_end(fd: c_int) {
    kernel::poll_one(fd, libc::POLLIN | libc::POLLRDHUP, END_MS);
}

/// Reads a bell that was left, before the program waits for the socket by `poll` or `select`, so that readiness is the ring's.
pub(crate) fn take_bell_for_poll(chan: &Chan) {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    if side.rx_state.load(SeqCst) != Route::Ring {
        return;
    }
    let _rx = side.rx_lock.lock();
    if let Ok((0, false)) = stream.ready(peer, side.head.load(Relaxed)) {
        bell::ask(chan);
    }
}
