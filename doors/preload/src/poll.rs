//! `poll` and `select`: each direction is polled on the descriptor that carries it.
//!
//! # Safety
//!
//! As `poll(2)` and `select(2)`.

use libc::{c_int, c_short, c_ulong, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use std::cell::Cell;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::connection::{Carrier, Route, ready};
use weft_run::meet::Why;

use crate::conn::{self, Conn, Inside};
use crate::dgram::ready::Asked;
use crate::iov::{is_bad_list, is_optional};
use crate::patience::{Deadline, millis};
use crate::stalled_ring::{patient, patient_until};
use crate::{
    bell, clock, dgram, hosts, kernel, long_list, next, return_to_tcp, ring_poll, rx, signal, tx,
};

const OUT: c_short = libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND;
const IN: c_short = libc::POLLIN | libc::POLLRDNORM;

/// Threads that wait in the kernel for the TCP socket keep its direction from switching under them.
struct Waiting(&'static Conn, #[allow(dead_code)] Inside);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.in_rx.fetch_sub(1, SeqCst);
    }
}

fn wait_tcp(conn: &'static Conn, inside: Inside) -> Waiting {
    conn.in_rx.fetch_add(1, SeqCst);
    Waiting(conn, inside)
}

fn is_ours(fd: c_int) -> bool {
    dgram::ready::is_ours(fd)
        || conn::of(fd).is_some_and(|conn| conn.phase.load(SeqCst).is_followed())
}

/// The list passed to the kernel in place of the program's.
struct Translated {
    fds: Vec<pollfd>,
    /// The program's entry that each one is for.
    of: Vec<usize>,
    /// Held while the kernel is asked.
    waiting: Vec<Waiting>,
    datagrams: Vec<dgram::ready::Waiting>,
}

/// Translates the program's list. `None`: pass the list as it is.
fn translate(list: &[pollfd]) -> Option<Translated> {
    if !list.iter().any(|one| is_ours(one.fd)) {
        return None;
    }
    let mut out = Translated {
        fds: Vec::with_capacity(list.len() + 2),
        of: Vec::with_capacity(list.len() + 2),
        waiting: Vec::new(),
        datagrams: Vec::new(),
    };
    let mut put = |at: usize, fd: c_int, events: c_short| {
        out.fds.push(kernel::entry(fd, events));
        out.of.push(at);
    };
    for (at, one) in list.iter().enumerate() {
        match dgram::ready::for_poll(one.fd, one.events, |fd, events| put(at, fd, events)) {
            Asked::Stranger => {}
            Asked::Rings => continue,
            Asked::Kernel(waiting) => {
                out.datagrams.push(waiting);
                continue;
            }
        }
        let Some((conn, inside)) = conn::enter(one.fd).filter(|_| is_ours(one.fd)) else {
            put(at, one.fd, one.events);
            continue;
        };
        // Mark first, look second: a thread that switches does the reverse.
        let waiting = wait_tcp(conn, inside);
        let Some(chan) = conn.chan(&waiting.1) else {
            put(at, one.fd, one.events);
            out.waiting.push(waiting);
            continue;
        };
        if chan.side().rx_state.load(SeqCst) == Route::Both {
            hosts::leave_both(conn, chan);
        }
        hosts::follow_back(conn, chan);
        let (tx, rx) = chan.mode();
        if rx == Route::Ring {
            rx::take_bell_for_poll(chan);
        }
        let is_over =
            chan.carrier == Carrier::Here && bell::is_cut(chan.bell()) && !chan.has_bytes();
        if is_over {
            bell::follow_death(one.fd, chan);
        }
        // Bytes of a closed ring keep the bell readable.
        let (input, output) = (ready::input(rx, is_over, false), ready::output(tx, is_over));
        for (fd, takes_in, takes_out) in [
            (one.fd, input.tcp, output.tcp),
            (chan.bell(), input.bell, output.bell),
        ] {
            let mut events = if takes_in { one.events & !OUT } else { 0 };
            events |= if takes_out { one.events & OUT } else { 0 };
            if !takes_in && fd == one.fd {
                // Urgent data comes over TCP.
                events |= one.events & libc::POLLPRI;
            }
            // An entry for nothing still reports errors. The kernel may end the connection by itself, which only TCP tells.
            let tells_errors = fd == one.fd && chan.carrier == Carrier::Here;
            if events != 0 || tells_errors || takes_in && (fd == one.fd || !input.tcp) {
                put(at, fd, events);
            }
        }
        if ready::keeps_tcp(rx) {
            out.waiting.push(waiting);
        }
    }
    Some(out)
}

/// What a bell reports at its end.
const END: c_short = libc::POLLHUP | libc::POLLERR | libc::POLLRDHUP;

/// The bell of a socket has ended. Returns true if there are bytes in its ring.
fn has_bytes_after_end(fd: c_int) -> bool {
    conn::enter(fd).is_some_and(|(conn, inside)| {
        conn.chan(&inside).is_some_and(|chan| {
            bell::follow_death(fd, chan);
            chan.has_bytes()
        })
    })
}

/// A TCP socket reports an error or its end. Returns what it tells of both directions, if the kernel has ended the connection.
fn after_abort(one: pollfd) -> c_short {
    let is_aborted = conn::enter(one.fd).is_some_and(|(conn, inside)| {
        conn.chan(&inside)
            .is_some_and(|chan| bell::follow_abort(one.fd, chan))
    });
    if is_aborted {
        kernel::poll_one(one.fd, one.events, 0)
    } else {
        0
    }
}

/// A bell has rung. Returns true if it announced only that the rest of the stream comes over TCP.
fn has_left_ring(fd: c_int) -> bool {
    conn::enter(fd).is_some_and(|(conn, inside)| {
        conn.chan(&inside).is_some_and(|chan| {
            if !chan.stream.is_closed(chan.peer()) {
                return false;
            }
            hosts::follow_back(conn, chan);
            !chan.mode().1.uses_ring()
        })
    })
}

/// Puts the answers where the program looks for them. Returns how many entries have one.
fn answer(list: &mut [pollfd], asked: &Translated) -> c_int {
    for one in &mut *list {
        one.revents = 0;
    }
    for (got, &at) in asked.fds.iter().zip(&asked.of) {
        let mut revents = got.revents;
        let is_bell = got.fd != list[at].fd;
        if is_bell && revents & END != 0 {
            // The peer's end of the bell is closed, or its direction has ended: what TCP says of it counts, beside bytes in the ring.
            let is_readable = has_bytes_after_end(list[at].fd);
            let tcp = kernel::poll_one(list[at].fd, list[at].events, 0);
            let rest = if is_readable { END } else { END | IN };
            revents = revents & !rest | tcp;
        } else if is_bell && revents & IN != 0 && has_left_ring(list[at].fd) {
            let tcp = kernel::poll_one(list[at].fd, list[at].events & !OUT, 0);
            revents = revents & !IN | tcp;
        }
        if !is_bell && revents & (libc::POLLERR | libc::POLLHUP) != 0 {
            revents |= after_abort(list[at]);
        }
        if is_bell {
            // A Unix socket reports this, and TCP does not.
            revents &= !libc::POLLWRBAND;
        }
        list[at].revents |= revents;
    }
    list.iter().filter(|one| one.revents != 0).count() as c_int
}

/// The rings' answer to a list, without asking the kernel.
#[derive(Default)]
struct Seen {
    /// Entries that have an answer.
    ready: c_int,
    /// Some can be answered by the kernel only.
    is_partial: bool,
    /// Some are rings.
    has_rings: bool,
    /// Some wait for bytes that are not there: the kernel knows whether their peers are.
    is_silent: bool,
}

/// Returns the rings' answer to one entry. `None`: the kernel has to be asked.
fn by_ring(one: pollfd) -> Option<c_short> {
    let (conn, inside) = conn::enter(one.fd)?;
    let chan = conn.chan(&inside)?;
    let (stream, side) = (&chan.stream, chan.side());
    let (out, into) = chan.mode();
    let (wants_in, wants_out) = (one.events & !OUT != 0, one.events & OUT != 0);
    if one.events & libc::POLLPRI != 0 {
        return None;
    }
    let ready = stream
        .ready(chan.peer(), side.head.load(Relaxed))
        .ok()
        .filter(|_| wants_in);
    let has_finished = stream.has_finished(chan.peer());
    let rings = ready::Rings {
        out,
        into,
        has_finished,
        ready,
    };
    if !ready::is_told_by_rings(rings, (wants_in, wants_out)) {
        return None;
    }
    let mut answer = 0;
    if ready.is_some_and(|(n, _)| n > 0) {
        answer |= one.events & IN;
    }
    if wants_out && chan.is_writable()? {
        answer |= one.events & (libc::POLLOUT | libc::POLLWRNORM);
    }
    Some(answer)
}

/// Looks at the rings of a list. The answers are in it when they are all there.
fn look(list: &mut [pollfd]) -> Seen {
    let mut seen = Seen::default();
    for one in list {
        one.revents = 0;
        if one.fd < 0 {
            continue;
        }
        if let Some(has_data) = dgram::ready::by_ring(one.fd, one.events) {
            seen.has_rings = true;
            // Without data there the kernel may have some.
            seen.is_partial |= !has_data;
            one.revents = if has_data { one.events & IN } else { 0 };
        } else if let Some(answer) = by_ring(*one) {
            seen.has_rings = true;
            seen.is_silent |= one.events & !OUT != 0 && answer & IN == 0;
            one.revents = answer;
        } else {
            seen.is_partial = true;
        }
        seen.ready += c_int::from(one.revents != 0);
    }
    seen
}

thread_local! {
    /// Answers of this thread since it last asked the kernel, and when that was.
    static UNASKED: Cell<(u32, u64)> = const { Cell::new((0, 0)) };
}

/// Returns true if the kernel has to be asked for the other descriptors of a list of which some are ready.
fn is_due() -> bool {
    let (turns, asked) = UNASKED.get();
    UNASKED.set((turns + 1, asked));
    turns >= ring_poll::TURNS || clock::now().wrapping_sub(asked) > ring_poll::BOUND
}

/// Looks at the rings of a list first, for a moment where the program would wait. `Some`: that is the answer.
fn look_first(list: &mut [pollfd], may_wait: bool) -> Option<c_int> {
    let mut seen = look(list);
    if seen.has_rings && seen.ready == 0 && may_wait {
        weft_sys::spin::wait_for_any(|| {
            seen = look(list);
            seen.ready > 0 || !seen.has_rings
        });
    }
    if seen.ready == 0 {
        return None;
    }
    // A caller that does not wait wants everything that is ready now. The kernel knows more of rings with bytes, too: that a peer was killed.
    let is_whole = !seen.is_partial && !seen.is_silent;
    if (is_whole || may_wait) && !is_due() {
        return Some(seen.ready);
    }
    UNASKED.set((0, clock::now()));
    None
}

/// Moves the connections of a list back to TCP.
fn all_back(list: &[pollfd]) {
    for one in list {
        if let Some(conn) = conn::of(one.fd).filter(|_| is_ours(one.fd)) {
            return_to_tcp::downgrade(conn, Why::Descriptors);
        }
        dgram::make_plain(one.fd, Why::Descriptors);
    }
}

/// Asks by `call`, with the program's list or its translation.
///
/// # Safety
/// `fds` are `n` entries.
unsafe fn ask(
    fds: *mut pollfd,
    n: nfds_t,
    may_wait: bool,
    mut call: impl FnMut(*mut pollfd, nfds_t) -> c_int,
) -> c_int {
    if n == 0 || n > 1 << 20 || is_bad_list(fds, n as usize) {
        return call(fds, n);
    }
    let _busy = signal::begin();
    let mut call = |fds, n| signal::outside(|| call(fds, n));
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts_mut(fds, n as usize) };
    for one in &*list {
        ring_poll::be_exact(one.fd);
    }
    if let Some(ready) = look_first(list, may_wait) {
        return ready;
    }
    let mut is_back = false;
    loop {
        let Some(mut asked) = translate(list) else {
            return call(fds, n);
        };
        let mut rc = call(asked.fds.as_mut_ptr(), asked.fds.len() as nfds_t);
        if rc < 0 && crate::errno() == libc::EINVAL && asked.fds.len() > list.len() {
            match long_list::ask(&mut asked.fds, &asked.of, &mut call) {
                Some(answer) => rc = answer,
                // On TCP each socket is one entry.
                None if !is_back => {
                    drop(asked);
                    is_back = true;
                    all_back(list);
                    continue;
                }
                None => {}
            }
        }
        if rc < 0 {
            return rc;
        }
        if rc == 0 {
            for one in list {
                one.revents = 0;
            }
            return 0;
        }
        // A bell has ended or its ring is closed, and TCP has nothing yet: the next translation has TCP in its place.
        let ready = answer(list, &asked);
        if ready > 0 || !may_wait {
            return ready;
        }
    }
}

/// Before a wait for room: a ring that a send has filled exactly is full as one that a send has found full, and has to be looked at during the wait.
///
/// # Safety
/// `fds` are `n` entries.
unsafe fn fill_full(fds: *const pollfd, n: nfds_t) {
    if n == 0 || n > 1 << 20 || is_bad_list(fds, n as usize) {
        return;
    }
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts(fds, n as usize) };
    for one in list.iter().filter(|one| one.events & OUT != 0) {
        let _busy = signal::begin();
        if let Some((conn, inside)) = conn::enter(one.fd)
            && let Some(chan) = conn.chan(&inside)
            && chan.is_writable() == Some(false)
        {
            tx::fill_bell_for_poll(conn, chan);
        }
    }
}

/// # Safety
/// As `poll(2)`.
pub(crate) unsafe fn poll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        fill_full(fds, n);
        patient(timeout, |timeout| {
            let (limit, mut deadline) = (clock::in_ns(timeout), Deadline::default());
            ask(fds, n, timeout != 0, |fds, n| {
                next::poll(fds, n, millis(limit.map(|limit| deadline.left_of(limit))))
            })
        })
    }
}

/// # Safety
/// As `ppoll(2)`.
pub(crate) unsafe fn ppoll(
    fds: *mut pollfd,
    n: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    if !is_optional(timeout) {
        crate::set_errno(libc::EFAULT);
        return -1;
    }
    // SAFETY: the caller's promise.
    if let Some(given) = unsafe { timeout.as_ref() }
        && (given.tv_sec < 0 || !(0..1_000_000_000).contains(&given.tv_nsec))
    {
        crate::set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller's promise.
    unsafe {
        fill_full(fds, n);
        patient_until(timeout, |timeout| {
            let may_wait = timeout
                .as_ref()
                .is_none_or(|t| (t.tv_sec, t.tv_nsec) != (0, 0));
            let mut deadline = Deadline::default();
            let limit = timeout.as_ref().map(|&limit| clock::nanoseconds_of(limit));
            ask(fds, n, may_wait, |fds, n| {
                let left = limit.map(|limit| clock::timespec(deadline.left_of(limit)));
                let left = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
                next::ppoll(fds, n, left, mask)
            })
        })
    }
}

/// The word of a set that has a descriptor's bit, and the bit. A set may be longer than an `fd_set`.
fn place(set: *const fd_set, fd: c_int) -> (*mut c_ulong, c_ulong) {
    let bits = c_ulong::BITS as usize;
    let word = set.cast_mut().cast::<c_ulong>();
    (
        word.wrapping_add(fd as usize / bits),
        1 << (fd as usize % bits),
    )
}

/// # Safety
/// The set is null, or has a bit for the descriptor.
unsafe fn has(set: *const fd_set, fd: c_int) -> bool {
    let (word, bit) = place(set, fd);
    // SAFETY: the caller's promise.
    !set.is_null() && unsafe { word.read_unaligned() } & bit != 0
}

/// The part of a set of `n` bits that the kernel looks at. Programs pass larger numbers than their sets have bits.
fn looked_at(n: c_int) -> c_int {
    /// The size of the kernel's table of descriptors, which only grows.
    static SIZE: AtomicI32 = AtomicI32::new(libc::FD_SETSIZE as c_int);
    if n > SIZE.load(Relaxed) {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:"));
        if let Some(size) = size.and_then(|size| size.trim().parse().ok()) {
            SIZE.fetch_max(size, Relaxed);
        }
    }
    n.min(SIZE.load(Relaxed))
}

/// The sets as a list, when one of them has a socket of ours.
///
/// # Safety
/// As `select(2)`.
unsafe fn list(
    n: c_int,
    r: *const fd_set,
    w: *const fd_set,
    e: *const fd_set,
) -> Option<Vec<pollfd>> {
    if n < 1 || ![r, w, e].into_iter().all(is_optional) {
        return None;
    }
    let n = looked_at(n);
    // SAFETY: the caller's promise.
    let has = |set, fd| unsafe { has(set, fd) };
    for fd in (0..n).filter(|fd| has(r, *fd) || has(w, *fd)) {
        ring_poll::be_exact(fd);
    }
    let any = (0..n).any(|fd| is_ours(fd) && (has(r, fd) || has(w, fd) || has(e, fd)));
    if !any {
        return None;
    }
    let mut out = Vec::new();
    for fd in 0..n {
        let mut events = 0;
        for (set, flag) in [
            (r, libc::POLLIN | libc::POLLRDNORM),
            (w, OUT),
            (e, libc::POLLPRI),
        ] {
            if has(set, fd) {
                events |= flag;
            }
        }
        if events != 0 {
            out.push(kernel::entry(fd, events));
        }
    }
    Some(out)
}

/// `select` by `ppoll`.
unsafe fn by_poll(
    mut asked: Vec<pollfd>,
    sets: [*mut fd_set; 3],
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // The events that select(2) counts as readable, writable and exceptional.
    let means = [
        libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND | libc::POLLHUP | libc::POLLERR,
        OUT | libc::POLLERR,
        libc::POLLPRI,
    ];
    let counts = |one: &pollfd| {
        let of = sets.iter().zip(means);
        // SAFETY: the program's set, and a number within its size.
        of.filter(|&(&set, _)| unsafe { has(set, one.fd) })
            .any(|(_, means)| one.revents & means != 0)
    };
    if !is_optional(timeout) {
        crate::set_errno(libc::EFAULT);
        return -1;
    }
    let begun = clock::now();
    // SAFETY: the caller's, or none.
    let given = unsafe { timeout.as_ref() }.copied();
    let mut left = given;
    loop {
        let timeout = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: our list.
        let rc = unsafe { ppoll(asked.as_mut_ptr(), asked.len() as nfds_t, timeout, mask) };
        if rc < 0 {
            return rc;
        }
        if asked.iter().any(|one| one.revents & libc::POLLNVAL != 0) {
            crate::set_errno(libc::EBADF);
            return -1;
        }
        if rc == 0 || asked.iter().any(|one| one.fd >= 0 && counts(one)) {
            break;
        }
        // poll(2) reports ends and errors that these sets do not ask for: the wait goes on without those.
        for one in asked.iter_mut().filter(|one| one.revents != 0) {
            (one.fd, one.revents) = (!one.fd, 0);
        }
        left = given.map(|given| {
            let all = clock::nanoseconds_of(given);
            clock::timespec(all.saturating_sub(clock::now() - begun))
        });
    }
    let mut total = 0;
    for one in &mut asked {
        if one.fd < 0 {
            one.fd = !one.fd;
        }
        for (&set, means) in sets.iter().zip(means) {
            // SAFETY: the program's set, and a number within its size.
            if unsafe { has(set, one.fd) } {
                if one.revents & means == 0 {
                    let (word, bit) = place(set, one.fd);
                    // SAFETY: as above.
                    unsafe { word.write_unaligned(word.read_unaligned() & !bit) };
                } else {
                    total += 1;
                }
            }
        }
    }
    total
}

/// # Safety
/// As `select(2)`.
pub(crate) unsafe fn select(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(asked) = (unsafe { list(n, r, w, e) }) else {
        // SAFETY: the caller's promise.
        return unsafe { next::select(n, r, w, e, timeout) };
    };
    if !is_optional(timeout) {
        crate::set_errno(libc::EFAULT);
        return -1;
    }
    if timeout.is_null() {
        // SAFETY: the caller's promise.
        return unsafe { by_poll(asked, [r, w, e], std::ptr::null(), std::ptr::null()) };
    }
    // SAFETY: the caller's promise.
    let given = unsafe { *timeout };
    if given.tv_sec < 0 || given.tv_usec < 0 {
        crate::set_errno(libc::EINVAL);
        return -1;
    }
    let wait = timespec {
        tv_sec: given.tv_sec.saturating_add(given.tv_usec / 1_000_000),
        tv_nsec: given.tv_usec % 1_000_000 * 1000,
    };
    let began = clock::now();
    // SAFETY: the caller's promise.
    let rc = unsafe { by_poll(asked, [r, w, e], &raw const wait, std::ptr::null()) };
    // Linux returns the remaining time.
    let all = i128::from(wait.tv_sec) * 1_000_000_000 + i128::from(wait.tv_nsec);
    let left = (all - i128::from(clock::now() - began)).max(0);
    // SAFETY: the caller's promise.
    unsafe {
        (*timeout).tv_sec = (left / 1_000_000_000) as i64;
        (*timeout).tv_usec = (left % 1_000_000_000 / 1000) as i64;
    }
    rc
}

/// # Safety
/// As `pselect(2)`.
pub(crate) unsafe fn pselect(
    n: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    e: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(asked) = (unsafe { list(n, r, w, e) }) else {
        // SAFETY: the caller's promise.
        return unsafe { next::pselect(n, r, w, e, timeout, mask) };
    };
    // SAFETY: the caller's promise.
    unsafe { by_poll(asked, [r, w, e], timeout, mask) }
}
