//! The bell: a pair of connected Unix sockets with small buffers, whose readiness is that of the ring. It is the wire by which the two ends have met, or a
//! [pair](pair()) of the process that carries the bytes.
//!
//! A few bytes under way mean data and leave the socket writable; [`FILL`] more make it unwritable, which is what a full ring looks like. The
//! receiver reads them when the ring is empty or has room again. [`Side`] counts the bytes that each side owes, under `rx_lock`.

use libc::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_ring::Role;
use weft_ring::stream::{FILL, Stream, Wish};
use weft_run::connection::{Carrier, Route};
use weft_run::meet::Why;
use weft_sys::unix;

use crate::chan::{Chan, Side};
use crate::patience::millis;
use crate::{clock, hidden, kernel, next, signal};

/// Two connected ends with small buffers.
pub(crate) fn pair() -> Option<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: writes two descriptors; they are new, and ours.
    let (a, b) = unsafe {
        if libc::socketpair(
            libc::AF_UNIX,
            libc::SOCK_STREAM | libc::SOCK_CLOEXEC,
            0,
            fds.as_mut_ptr(),
        ) != 0
        {
            return None;
        }
        (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]))
    };
    for fd in [&a, &b] {
        kernel::set_option(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, &ROOM);
    }
    Some((a, b))
}

/// The send buffer of each end: five bytes leave it writable (each takes the memory of a whole buffer), and [`FILL`] do not.
const ROOM: c_int = 8192;

/// How long a sender waits for a receiver that reads nothing. After that the bytes go over TCP, which has larger buffers.
pub(crate) const PATIENCE_MS: c_int = 50;

/// A channel for a socket, with our end of the bell.
pub(crate) fn channel(stream: Stream, role: Role, bell: OwnedFd, fd: c_int) -> Result<Chan, Why> {
    let raw = bell.as_raw_fd();
    // SAFETY: the bell is ours; waits on it are to block.
    unsafe { next::fcntl(raw, libc::F_SETFL, 0) };
    // Urgent data would make it readable with nothing to read.
    for (option, value) in [(libc::SO_SNDBUF, &ROOM), (libc::SO_OOBINLINE, &1)] {
        kernel::set_option(raw, libc::SOL_SOCKET, option, value);
    }
    unix::take_rights(&bell, false);
    let bell = hidden::hide(bell).ok_or(Why::Descriptors)?;
    let chan = Chan::new(stream, role, bell, kernel::is_nonblocking(fd)).ok_or(Why::System)?;
    let inq = kernel::tcp_number(fd, libc::TCP_INQ).unwrap_or(0);
    chan.side().inq.store(inq.cast_unsigned(), Relaxed);
    chan.side().note_limits(fd);
    Ok(chan)
}

/// State of the peer's end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    Alive,
    /// It is closed, or shut down for sending.
    End,
    /// A time-out of the program's socket.
    Late,
    /// A signal.
    Interrupted,
    /// The kernel does not let this process wait, and will not: its limit of descriptors is too low for a list of `poll`.
    Refused,
}

fn result(n: isize) -> Heard {
    match n {
        1.. => Heard::Alive,
        0 => Heard::End,
        _ => match crate::errno() {
            libc::EAGAIN => Heard::Late,
            libc::EINTR => Heard::Interrupted,
            _ => Heard::End,
        },
    }
}

/// Sends up to `n` bytes, at most [`FILL`].
fn press(bell: c_int, n: usize) -> isize {
    static BYTES: [u8; FILL] = [b'!'; FILL];
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    kernel::send_bytes(bell, &BYTES[..n.min(FILL)], flags)
}

/// Rings: the peer's end becomes readable. [`Heard::Late`]: it has asked for more rings than an honest peer leaves unread.
pub(crate) fn ring(bell: c_int) -> Heard {
    let mut is_large = false;
    loop {
        match result(press(bell, 1)) {
            Heard::Interrupted => {}
            // A receiver that is stopped before it reads a full bell still gets its ring.
            Heard::Late if !is_large => {
                is_large = true;
                kernel::set_option(bell, libc::SOL_SOCKET, libc::SO_SNDBUF, &(4 * ROOM));
            }
            heard => return heard,
        }
    }
}

/// Waits until the bell is readable, for `left` nanoseconds at most; leaves the byte in it. The end of the TCP socket `fd` by the kernel is an end, too.
/// `has_some`: a signal ends the wait even if its handler restarts calls.
pub(crate) fn wait_in(chan: &Chan, fd: c_int, left: Option<u64>, has_some: bool) -> Heard {
    let bell = chan.bell();
    let mut list = [
        kernel::entry(bell, libc::POLLIN | libc::POLLRDHUP),
        kernel::entry(fd, 0),
    ];
    if chan.carrier != Carrier::Here {
        list[1].fd = -1;
    }
    let begun = clock::now();
    loop {
        let rest = left.map(|left| left.saturating_sub(clock::now() - begun));
        match signal::outside(|| kernel::poll(&mut list, millis(rest))) {
            0 => return Heard::Late,
            1.. if list[0].revents == libc::POLLIN => return Heard::Alive,
            1.. if list[0].revents != 0 => return probe(bell),
            // Another thread may have found the end, and taken its error.
            1.. if follow_abort(fd, chan) || chan.stream.is_closed(chan.peer()) => {
                return Heard::End;
            }
            // Both directions have ended in order, and the bell tells so.
            1.. => list[1].fd = -1,
            _ if crate::errno() != libc::EINTR => return Heard::Refused,
            // The kernel does not restart the call by itself.
            _ if has_some || left.is_some() || signal::interrupts() => return Heard::Interrupted,
            _ => {}
        }
    }
}

/// Checks that the peer's end is still open.
pub(crate) fn probe(bell: c_int) -> Heard {
    match result(kernel::peek(bell)) {
        Heard::End => Heard::End,
        _ => Heard::Alive,
    }
}

/// Returns true if the peer's end is closed for good, not only for sending, or if both directions of the bell have ended.
pub(crate) fn is_cut(bell: c_int) -> bool {
    kernel::poll_one(bell, 0, 0) != 0
}

/// Returns true if nothing at the peer's end reads or sends any more. After both directions have ended in order, the kernel shows an open end as it shows a
/// closed one; then the peer's mark or the end of its process tells.
pub(crate) fn is_gone(chan: &Chan) -> bool {
    let (stream, peer) = (&chan.stream, chan.peer());
    let has_no_input =
        stream.has_finished(peer) || chan.side().rx_state.load(SeqCst) == Route::After;
    let is_in_order = has_no_input && stream.has_finished(chan.role);
    let is_dead = || chan.peer_process != 0 && weft_sys::process::is_gone(chan.peer_process);
    is_cut(chan.bell()) && (!is_in_order || stream.has_left(peer) || is_dead())
}

/// The peer's bell or its TCP socket has ended. If its process was killed with our bytes unread in the ring, the kernel does not know of them, and has sent an orderly
/// end where TCP's is a reset: the socket gets the state after one. Bytes for us that are in the ring can still be read, as from TCP. Returns whether that was now.
pub(crate) fn follow_death(fd: c_int, chan: &Chan) -> bool {
    let (stream, side) = (&chan.stream, chan.side());
    let is_unread = chan.carrier == Carrier::Here
        && stream.progress(chan.role) != stream.published(chan.role)
        && !stream.has_finished(chan.peer())
        && !stream.is_closed(chan.peer());
    if !is_unread || side.is_reset.load(SeqCst) != 0 {
        return false;
    }
    let is_cut = || is_cut(chan.bell());
    let has_ended = || kernel::poll_one(fd, libc::POLLRDHUP, 0) & libc::POLLRDHUP != 0;
    // A process that dies closes both, one a moment after the other.
    let is_dead =
        (is_cut() || has_ended()) && chan.patience().wait(u64::MAX, || is_cut() && has_ended());
    if !is_dead || kernel::unread(fd) > 0 || side.is_reset.swap(1, SeqCst) != 0 {
        return false;
    }
    kernel::abort(fd);
    // SAFETY: what a reset does to the socket.
    unsafe { next::shutdown(fd, libc::SHUT_RDWR) };
    stream.close(chan.role);
    true
}

/// The kernel may have ended the TCP connection by itself: by a reset from elsewhere (`ss -K`), or after a time limit. Then calls go on over TCP, which has the
/// error, once the bytes of the rings are read. Returns whether it has.
pub(crate) fn follow_abort(fd: c_int, chan: &Chan) -> bool {
    if chan.carrier != Carrier::Here || is_cut(chan.bell()) || !kernel::is_aborted(fd) {
        return false;
    }
    chan.stream.close(chan.peer());
    chan.stream.close(chan.role);
    ring_for_tcp(chan);
    true
}

/// There may be bytes in TCP behind a closed ring: wakes a receiver that waits for the ring.
#[inline]
pub(crate) fn ring_for_tcp(chan: &Chan) {
    if chan.stream.is_armed(chan.role) && chan.stream.take_wish(chan.role) {
        ring(chan.bell());
    }
}

/// Returns true if the peer has stopped sending, even if bytes are left in the bell.
pub(crate) fn is_ended(bell: c_int) -> bool {
    kernel::poll_one(bell, libc::POLLRDHUP, 0) != 0
}

/// Returns true if the peer ended after it wrote to its bell and before it counted those bytes. Uncounted bytes hide the bell's end.
pub(crate) fn is_cut_in_fill(chan: &Chan) -> bool {
    chan.stream.filled(chan.peer(), 0).2 && is_cut(chan.bell())
}

/// Reads up to `n` bytes, as far as they are there. A message of [`FILL`] bytes counts for the sender until its last byte is read.
fn take(bell: c_int, n: i64) -> i64 {
    let mut bytes = [MaybeUninit::uninit(); FILL];
    let mut taken = 0;
    // A peer that writes all the time is left bytes.
    for _ in 0..16 {
        let want = FILL.min(usize::try_from(n - taken).unwrap_or(0));
        let got = if want == 0 {
            0
        } else {
            kernel::take_bytes(bell, &mut bytes[..want], libc::MSG_DONTWAIT)
        };
        if got <= 0 {
            break;
        }
        taken += got as i64;
    }
    taken
}

/// Longest time between a sender's write to its ring and its write to the bell, in nanoseconds.
const BETWEEN: u64 = 50_000_000;

/// Number of looks at a sender that has written to the bell and not counted the bytes yet, before the receiver sleeps for it.
const LOOKS: u32 = 100;

/// Waits for such a sender, for the same reason. Its byte has woken this thread, which may now occupy its processor, so this sleeps soon. The sender may
/// also be blocked before the bell, or stopped: then this reads the bytes before they are counted. Returns whether it has rung, or is about to: for data, or
/// because it has closed its direction.
fn await_count(chan: &Chan, side: &Side) -> bool {
    let is_counted = || !chan.stream.filled(chan.peer(), 0).2;
    let is_over = (0..LOOKS).any(|_| {
        std::hint::spin_loop();
        is_counted()
    });
    let is_over = is_over || chan.patience().wait(BETWEEN, is_counted);
    let has_rung = absorb(chan, side);
    if !is_over && !has_rung {
        let taken = take(chan.bell(), i64::MAX);
        side.owed.store(side.owed.load(Relaxed) - taken, Relaxed);
    }
    has_rung
}

/// Reads the owed bytes. The last byte may not be there yet, because its sender is between the ring and the bell. This waits for it, because a byte that comes
/// later makes the socket readable with nothing to read. It waits only once, because the sender may have been stopped there.
fn collect(chan: &Chan, side: &Side) {
    let owed = side.owed.load(Relaxed);
    if owed <= 0 {
        return;
    }
    let mut taken = take(chan.bell(), owed);
    let is_fresh = side.fresh.swap(0, Relaxed) != 0;
    if is_fresh && taken < owed {
        chan.patience().wait_readable(chan.bell(), BETWEEN);
        taken += take(chan.bell(), owed - taken);
    }
    side.owed.store(owed - taken, Relaxed);
}

/// Returns true if the bell, which was just found readable, has bytes that are not counted (under `rx_lock`, and the ring is empty): that is a lie. A sender
/// counts a ring before it writes its byte, and marks a fill until it is counted.
pub(crate) fn has_uncounted(chan: &Chan) -> bool {
    let side = chan.side();
    if chan.carrier != Carrier::Here || kernel::peek(chan.bell()) <= 0 {
        return false;
    }
    // The mark comes first: its bytes are counted when it is gone.
    if chan.stream.filled(chan.peer(), 0).2 {
        return false;
    }
    absorb(chan, side);
    side.owed.load(Relaxed) <= 0
}

/// Counts the bytes written to our bell since the last look. Returns whether the sender has rung since, or is about to.
fn absorb(chan: &Chan, side: &Side) -> bool {
    let (new, seen, _) = chan
        .stream
        .filled(chan.peer(), side.fill_seen.load(Relaxed));
    side.fill_seen.store(seen, Relaxed);
    // A lying peer can only make us look for missing bytes.
    let owed = side.owed.load(Relaxed);
    side.owed
        .store(owed.saturating_add(new.cast_signed()), Relaxed);
    owe_rings(side, chan.stream.take_rung(chan.peer()))
}

/// Adds rings to the owed bytes. Returns whether there are any.
fn owe_rings(side: &Side, rung: u64) -> bool {
    if rung > 0 {
        let owed = side.owed.load(Relaxed);
        side.owed
            .store(owed.saturating_add(rung.cast_signed()), Relaxed);
        side.fresh.store(1, Relaxed);
    }
    rung > 0
}

/// Reads the owed bytes but `keep`, as far as they are there.
fn keep(chan: &Chan, side: &Side, keep: i64) {
    let owed = side.owed.load(Relaxed);
    if owed > keep {
        let taken = take(chan.bell(), owed - keep);
        side.owed.store(owed - taken, Relaxed);
    }
}

/// When the sender has to ring.
fn wish(side: &Side) -> Wish {
    if side.eager.load(Relaxed) == EDGE {
        Wish::Each
    } else {
        Wish::Once
    }
}

/// A value of [`Side::eager`]: a registration is edge-triggered.
pub(crate) const EDGE: u32 = 2;

/// Requests a bell after the ring was found empty (under `rx_lock`), and reads the bytes of the last bell. `true`: there is data after all.
pub(crate) fn ask(chan: &Chan) -> bool {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    absorb(chan, side);
    let head = side.head.load(Relaxed);
    let wish = wish(side);
    let (rung, stood) = stream.arm(peer, head, wish);
    owe_rings(side, rung);
    if !stood && !matches!(stream.ready(peer, head), Ok((0, false))) {
        // The old byte stays and announces the data; only one may be there.
        if side.owed.load(Relaxed) > 0 {
            if wish == Wish::Once {
                stream.disarm(peer);
            }
            absorb(chan, side);
            keep(chan, side, 1);
        }
        return true;
    }
    if stream.filled(peer, 0).2 && await_count(chan, side) {
        // The last byte stays, and announces the new data.
        keep(chan, side, 1);
        return true;
    }
    collect(chan, side);
    false
}

/// An edge-triggered program has left bytes unread (under `rx_lock`): it is told of each later arrival. One byte stays and announces the unread bytes.
pub(crate) fn ask_for_more(chan: &Chan) {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    absorb(chan, side);
    keep(chan, side, 1);
    if !stream.is_armed(peer) {
        let (rung, _) = stream.arm(peer, side.head.load(Relaxed), Wish::Each);
        owe_rings(side, rung);
    }
}

/// Makes the end of a sender that waits for room writable, now that there is room (under `rx_lock`).
pub(crate) fn make_room(chan: &Chan) {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    stream.room_made(peer);
    absorb(chan, side);
    let is_empty = matches!(stream.ready(peer, side.head.load(Relaxed)), Ok((0, _)));
    // Where there is data, or nothing is asked for, one byte has to stay.
    keep(chan, side, i64::from(!is_empty || !stream.is_armed(peer)));
}

/// Tells the receiver that a byte follows. Marks first and looks second: a thread that empties the ring does the reverse, and waits for the byte to be
/// counted. `false`: there is room by now.
fn begin_fill(chan: &Chan) -> bool {
    chan.stream.begin_fill(chan.role);
    let room = chan.stream.room(chan.role, chan.side().tail.load(Relaxed));
    let is_full = room.is_ok_and(|room| room == 0);
    if !is_full {
        chan.stream.end_fill(chan.role, 0);
    }
    is_full
}

/// The ring is full: our end becomes unwritable (under `tx_lock`).
pub(crate) fn fill(chan: &Chan) -> Heard {
    let bell = chan.bell();
    for _ in 0..8 {
        if kernel::poll_one(bell, libc::POLLOUT, 0) == 0 {
            break;
        }
        if !begin_fill(chan) {
            break;
        }
        let mut n = press(bell, FILL);
        if n == FILL as isize {
            // The byte that a receiver leaves there for unread bytes is of this message, and does not hold the buffer of the other.
            n += press(bell, 1).max(0);
        }
        let heard = result(n);
        chan.stream.end_fill(chan.role, n.max(0) as u64);
        match heard {
            Heard::Alive => {}
            Heard::End => return Heard::End,
            _ => break,
        }
    }
    Heard::Alive
}

/// Waits until our end, which was filled, is writable, [`PATIENCE_MS`] and the `left` nanoseconds at most. `has_some`: a signal ends the wait even if its handler
/// restarts calls.
pub(crate) fn wait_out(chan: &Chan, left: Option<u64>, has_some: bool) -> Heard {
    let mut list = [kernel::entry(chan.bell(), libc::POLLOUT)];
    let most = left.map_or(PATIENCE_MS, |_| millis(left).min(PATIENCE_MS));
    match signal::outside(|| kernel::poll(&mut list, most)) {
        0 => Heard::Late,
        1.. if list[0].revents & (libc::POLLHUP | libc::POLLERR) != 0 => Heard::End,
        1.. => Heard::Alive,
        _ if crate::errno() != libc::EINTR => Heard::Refused,
        // With a time limit the kernel does not restart the call by itself.
        _ if has_some || left.is_some() || signal::interrupts() => Heard::Interrupted,
        _ => Heard::Alive,
    }
}
