//! Receiving datagrams: the calls, and how a socket gets its rings.
//!
//! # Safety
//!
//! The program's buffers are as its call says.

use libc::{c_int, ssize_t};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_ring::stream::{Stream, Wish};
use weft_run::dgram as rules;
use weft_run::meet::Why;

use super::rings::{Out, Rx, SENDER, Step};
use super::{Dgram, frames, now_ms, ready, unframed};
use crate::hidden::Own;
use crate::kernel::{self, borrowed, entry};
use crate::{clock, hidden, ledger, set_errno, settings, signal};

/// Senders that have come and not spoken yet; of more the latest are turned away.
const MAX_SILENT: usize = 4;
/// How often a receive that must not wait looks again after data was reported and none was found.
const MAX_TURNS: u32 = 16;

/// Flags of receives that only the kernel answers.
pub(super) const KERNEL_ONLY: c_int = libc::MSG_ERRQUEUE | libc::MSG_OOB;

/// Receives a datagram. `kernel` is the program's own call with flags added.
///
/// # Safety
/// As `recvmsg(2)`.
pub(crate) unsafe fn receive(
    fd: c_int,
    d: &'static Dgram,
    out: &Out<'_>,
    flags: c_int,
    kernel: &dyn Fn(c_int) -> ssize_t,
) -> ssize_t {
    if flags & KERNEL_ONLY != 0 {
        return kernel(0);
    }
    // SAFETY: the caller's promise.
    let framed = |more| unsafe { unframed::receive(fd, d, out, flags | more) };
    let kernel = if frames::looks_at(d) { &framed } else { kernel };
    if let Some(waiting) = ready::kernel_alone(d) {
        let n = kernel(0);
        drop(waiting);
        // A signal handler that interrupts its thread's work leaves the upkeep around the datagram to the next receive.
        let Some(_busy) = signal::enter_idle(d) else {
            return n;
        };
        return from_kernel(fd, d, n, flags);
    }
    let Some(_busy) = signal::enter(d) else {
        return -1;
    };
    // SAFETY: the caller's promise.
    unsafe { receive_any(fd, d, out, flags, kernel) }
}

unsafe fn receive_any(
    fd: c_int,
    d: &'static Dgram,
    out: &Out<'_>,
    flags: c_int,
    kernel: &dyn Fn(c_int) -> ssize_t,
) -> ssize_t {
    let may_wait = flags & libc::MSG_DONTWAIT == 0 && !d.nonblock.load(Relaxed);
    let mut spun = false;
    let mut turns = 0;
    let patience = d.patience.load(Relaxed);
    let deadline = if may_wait && patience > 0 {
        Some(precise_ms().saturating_add(patience))
    } else {
        None
    };
    loop {
        let mut rx = d.rx();
        if !d.is(fd) {
            drop(rx);
            return kernel(0);
        }
        let bell = d.bell.load(SeqCst);
        // SAFETY: the caller's promise.
        match unsafe { rx.step(fd, d, out, flags) } {
            Step::Got(n) => {
                let mut is_last = false;
                if d.eager.load(Relaxed) {
                    after(&mut rx, d, bell);
                    is_last = d.has_once.load(SeqCst) && !rx.has_data();
                }
                drop(rx);
                if is_last {
                    ready::fire_by_socket(d);
                }
                if flags & libc::MSG_PEEK == 0 {
                    received(fd, d);
                }
                if n < 0 {
                    set_errno(libc::EFAULT);
                }
                return n;
            }
            Step::Kernel => {
                drop(rx);
                let n = kernel(libc::MSG_DONTWAIT);
                if n >= 0 || crate::errno() != libc::EAGAIN {
                    return from_kernel(fd, d, n, flags);
                }
                d.rx().kernel_empty();
                continue;
            }
            Step::Empty => {}
        }
        if !may_wait {
            let n = kernel(libc::MSG_DONTWAIT);
            if n >= 0 || crate::errno() != libc::EAGAIN {
                drop(rx);
                return from_kernel(fd, d, n, flags);
            }
            let more = rx.settle(bell);
            leave_rings(d, &rx);
            drop(rx);
            turns += 1;
            if more && turns < MAX_TURNS {
                continue;
            }
            set_errno(libc::EAGAIN);
            return -1;
        }
        if !spun {
            spun = true;
            for _ in 0..weft_sys::spin::turns() {
                if rx.has_data() {
                    break;
                }
                std::hint::spin_loop();
            }
            continue;
        }
        spun = false;
        turns += 1;
        if rx.settle(bell) && turns < MAX_TURNS {
            continue;
        }
        turns = 0;
        drop(rx);
        if let Some(n) = sleep(fd, d, bell, deadline, flags, kernel) {
            return n;
        }
    }
}

/// Waits for a ring or the kernel. `Some`: the call's result.
fn sleep(
    fd: c_int,
    d: &'static Dgram,
    bell: c_int,
    deadline: Option<i64>,
    flags: c_int,
    kernel: &dyn Fn(c_int) -> ssize_t,
) -> Option<ssize_t> {
    let mut list = [entry(fd, libc::POLLIN), entry(bell, libc::POLLIN)];
    let left = deadline.map_or(-1, |at| at.saturating_sub(precise_ms()).max(0));
    let left = c_int::try_from(left).unwrap_or(c_int::MAX);
    let n = signal::outside(|| kernel::poll(&mut list, left));
    if n < 0 && crate::errno() != libc::EINTR {
        // The limit of descriptors is too low for this list.
        d.plain(Why::Descriptors);
        return (!d.rx().has_data()).then(|| from_kernel(fd, d, kernel(0), flags));
    }
    if n < 0 {
        // With a time limit the kernel does not restart the call by itself.
        if deadline.is_none() && !signal::interrupts() {
            return None;
        }
        return Some(-1);
    }
    if n == 0 {
        set_errno(libc::EAGAIN);
        return Some(-1);
    }
    if list[1].revents != 0 {
        d.rx().woken();
    } else {
        let n = kernel(libc::MSG_DONTWAIT);
        if n >= 0 || crate::errno() != libc::EAGAIN {
            return Some(from_kernel(fd, d, n, flags));
        }
        if kernel::poll_one(fd, libc::POLLRDHUP, 0) != 0 {
            // It is shut down for reading: a receive that may wait returns at once.
            return Some(from_kernel(fd, d, kernel(0), flags));
        }
    }
    None
}

fn from_kernel(fd: c_int, d: &'static Dgram, n: ssize_t, flags: c_int) -> ssize_t {
    if n >= 0 && flags & libc::MSG_PEEK == 0 {
        received(fd, d);
    } else if n >= 0 && d.inbound.load(SeqCst) {
        d.rx().name_kernel();
    }
    n
}

/// After a receive of a socket that is in an epoll set.
fn after(rx: &mut Rx, d: &Dgram, bell: c_int) {
    if rx.settle(bell) && d.edge.load(Relaxed) {
        // The kernel reports each datagram anew.
        rx.light();
    }
}

/// The last ring has gone: receives are the kernel's alone again.
fn leave_rings(d: &Dgram, rx: &Rx) {
    if rx.is_empty() {
        d.inbound.store(false, SeqCst);
    }
}

fn precise_ms() -> i64 {
    clock::now_ms().cast_signed()
}

/// Receives many by one call of the kernel's. `None`: there are rings or frames to look at.
pub(crate) fn receive_many(
    fd: c_int,
    d: &'static Dgram,
    call: impl FnOnce() -> c_int,
) -> Option<c_int> {
    if frames::looks_at(d) {
        return None;
    }
    let waiting = ready::kernel_alone(d)?;
    let n = call();
    drop(waiting);
    if let Some(_busy) = signal::enter_idle(d) {
        for _ in 0..n.max(0) {
            received(fd, d);
        }
    }
    Some(n)
}

/// Counts a datagram, and looks for senders when that is due.
#[inline]
fn received(fd: c_int, d: &'static Dgram) {
    let n = d.received.fetch_add(1, Relaxed) + 1;
    let first = settings::first_look();
    if n < first {
        return;
    }
    frames::used(fd, d);
    if d.is_deaf() {
        return;
    }
    if n > first + 32 && !n.is_multiple_of(64) {
        let now = now_ms();
        if now.wrapping_sub(d.looked.load(Relaxed)) < 8 {
            return;
        }
    }
    let errno = crate::errno();
    look(fd, d);
    set_errno(errno);
}

/// Lets senders find the socket, and accepts the rings that they offer.
#[cold]
fn look(fd: c_int, d: &'static Dgram) {
    d.looked.store(now_ms(), Relaxed);
    if settings::is_off() {
        d.plain(Why::IoUring);
        return;
    }
    let mut slow = d.slow();
    if !d.is(fd) || d.is_deaf() {
        return;
    }
    if slow.listener.is_none() {
        let made = rules::cookie(borrowed(fd)).and_then(|cookie| {
            slow.cookie = cookie;
            rules::listen(cookie).map_err(|_| Why::System)
        });
        let Ok(Some(own)) = made.map(Own::new) else {
            drop(slow);
            d.deafen();
            return;
        };
        slow.listener = Some(own);
    }
    // Connections that had sent no offer at the last look come first.
    let mut silent = std::mem::take(&mut slow.silent);
    for _ in 0..MAX_SILENT {
        match slow.listener.as_ref().map(rules::caller) {
            Some(Ok(Some(wire))) => silent.extend(Own::new(wire)),
            Some(Err(why)) => ledger::datagrams_stay(why),
            Some(Ok(None)) | None => break,
        }
    }
    for wire in silent {
        match rules::hear(&wire, slow.cookie) {
            Ok(None) if slow.silent.len() < MAX_SILENT => slow.silent.push(wire),
            Ok(None) => {}
            Ok(Some(offer)) => {
                if let Err(why) = accept(fd, d, &mut slow, offer, wire) {
                    ledger::datagrams_stay(why);
                }
            }
            Err(why) => ledger::datagrams_stay(why),
        }
    }
}

/// Accepts a ring.
fn accept(
    fd: c_int,
    d: &'static Dgram,
    slow: &mut super::Slow,
    offer: rules::Offer,
    wire: Own,
) -> Result<(), Why> {
    if d.pktinfo.load(Relaxed) && !offer.route.to.ip().is_loopback() {
        return Err(Why::Option);
    }
    if !ready::can_ring(slow) {
        return Err(Why::Epoll);
    }
    let stream = Stream::open(offer.segment).map_err(|_| Why::Broken)?;
    let bell = match d.bell.load(SeqCst) {
        -1 => make_bell(fd, d)?,
        bell => bell,
    };
    let mut rx = d.rx();
    let button = rx.button().ok_or(Why::Descriptors)?;
    if !rx.has_place() {
        return Err(Why::Descriptors);
    }
    let was = d.inbound.swap(true, SeqCst);
    // Another thread waits for the kernel's socket alone.
    if d.in_kernel.load(SeqCst) != 0 {
        d.inbound.store(was, SeqCst);
        return Err(Why::None);
    }
    // Before the answer: a sender that has it may publish at once, and rings only where it is asked to.
    stream.arm(SENDER, 0, Wish::Once);
    let bound = kernel::number(fd, libc::SO_RCVBUF).unwrap_or(0);
    rules::answer(&wire, bound.unsigned_abs().into(), borrowed(button))?;
    let row = ledger::RowOf::begin(fd, offer.route.to, offer.route.from, false);
    rx.add(stream, &offer.route, wire, row);
    rx.settle(bell);
    drop(rx);
    ready::ring_all(d, slow);
    Ok(())
}

/// A pair of sockets: senders have one end, so what they do to it does not make our reads wait.
fn make_bell(fd: c_int, d: &'static Dgram) -> Result<c_int, Why> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (bell, button) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
        .map_err(|_| Why::Descriptors)?;
    let button = Own::new(button).ok_or(Why::Descriptors)?;
    let bell = hidden::hide(bell).ok_or(Why::Descriptors)?;
    d.nonblock.store(kernel::is_nonblocking(fd), SeqCst);
    d.rx().set_button(button);
    d.bell.store(bell, SeqCst);
    Ok(bell)
}
