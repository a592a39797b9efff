//! Descriptors: closing, duplicating, flags.
//!
//! # Safety
//!
//! As the calls' manual pages say.

use libc::{c_int, c_uint, c_ulong};
use std::sync::atomic::Ordering::SeqCst;

use weft_run::connection::{Carrier, Route, without_one};
use weft_run::meet::Why;

use crate::chan::Chan;
use crate::conn::{self, Conn, big};
use crate::dgram::{self, Dgram};
use crate::table::{self, Entry};
use crate::{hidden, kernel, lend, lock, next, ready, regs, return_to_tcp, ring_poll, rx, signal};

/// Kind of a descriptor.
enum Kind {
    /// Not ours.
    Other,
    Hidden,
    /// An epoll set, and its number.
    Set(usize),
    Conn(&'static Conn),
    Dgram(&'static Dgram),
}

fn kind(fd: c_int) -> Kind {
    let entry = table::get(fd);
    if let Some(conn) = entry.as_socket() {
        return Kind::Conn(conn);
    }
    if let Some(d) = entry.as_socket() {
        return Kind::Dgram(d);
    }
    match entry.as_set() {
        Some(number) => Kind::Set(number),
        None if entry == Entry::HIDDEN => Kind::Hidden,
        None => Kind::Other,
    }
}

/// One that is open may stand for something else from now on: forgets it. The caller closes it then.
pub(crate) fn forget(fd: c_int) {
    match kind(fd) {
        Kind::Conn(conn) => forget_conn(fd, conn),
        Kind::Dgram(d) => dgram::forget(fd, d),
        Kind::Set(number) => {
            table::put(fd, Entry::NONE);
            ring_poll::close(number);
        }
        Kind::Hidden | Kind::Other => {}
    }
}

fn forget_conn(fd: c_int, conn: &'static Conn) {
    let inside = conn.enter();
    let big = big();
    if !conn.is(fd) {
        return;
    }
    table::put(fd, Entry::NONE);
    let last = conn.refs.fetch_sub(1, SeqCst) == 1;
    let chan = conn.chan(&inside);
    ready::closing(conn, fd, last, chan, &big);
    if !last {
        return;
    }
    if let Some(chan) = chan {
        if count_out(conn, Some(chan)) && !conn.leaves_later() {
            chan.leave(fd);
        }
        conn.leave_bell(chan.bell());
    } else {
        count_out(conn, None);
    }
    conn.recycle(&big);
}

/// This process has the socket no more, by its last descriptor or its own end. Returns whether it was the last one with the channel. A second call, after
/// the process has begun to end, does nothing.
fn count_out(conn: &Conn, chan: Option<&Chan>) -> bool {
    let own = lock::own();
    if conn.left.swap(own, SeqCst) == own {
        return false;
    }
    let is_last = conn.counter(chan).is_some_and(|count| {
        let left = count.fetch_update(SeqCst, SeqCst, |n| without_one(n, false));
        left == Ok(1)
    });
    is_last && chan.is_some()
}

/// An exec is about to close the socket. Other processes that have it are told so; the last one's end shows as that of a killed process does. Returns
/// whether it was counted out.
pub(crate) fn count_out_by_exec(conn: &Conn, chan: Option<&Chan>) -> bool {
    let Some(count) = conn.counter(chan) else {
        return false;
    };
    let counted = count
        .fetch_update(SeqCst, SeqCst, |n| without_one(n, true))
        .is_ok();
    if counted {
        conn.left.store(lock::own(), SeqCst);
    }
    counted
}

/// The exec has failed.
pub(crate) fn count_in_again(conn: &Conn, chan: Option<&Chan>) {
    if let Some(count) = conn.counter(chan) {
        conn.left.store(0, SeqCst);
        count.fetch_add(1, SeqCst);
    }
}

/// The process ends: its sockets are left as by [`close`]. Async-signal-safe.
pub(crate) fn leave_all() {
    table::each_socket(|fd, conn: &'static Conn| {
        let inside = conn.enter();
        let chan = conn.chan(&inside);
        if count_out(conn, chan)
            && let Some(chan) = chan
            && chan.carrier == Carrier::Here
        {
            chan.leave(fd);
        }
    });
}

/// # Safety
/// As `close(2)`.
pub(crate) unsafe fn close(fd: c_int) -> c_int {
    if conn::holds_big() {
        // A descriptor of the library. Its number may still have the entry of one that was closed unseen.
        // SAFETY: the caller's promise.
        return unsafe { next::close(fd) };
    }
    if table::refuses(fd) {
        return -1;
    }
    // SAFETY: the caller's promise.
    closed_by(fd, || unsafe { next::close(fd) })
}

/// The descriptor is forgotten, and then closed by `call`: as soon as the kernel has closed it, another descriptor may have its number.
/// The call may wait, for what a stream still has to write or a socket lingers for, so handlers are not put off meanwhile.
pub(crate) fn closed_by(fd: c_int, call: impl FnOnce() -> c_int) -> c_int {
    let busy = signal::begin();
    let bell = last_bell(fd);
    forget(fd);
    drop(busy);
    let rc = call();
    if let Some(bell) = bell {
        hidden::close(bell);
    }
    rc
}

/// A duplicate of the bell of a connection of which a descriptor is about to be closed. It closes after the socket: a peer that sees the bell's end finds
/// the socket's FIN.
fn last_bell(fd: c_int) -> Option<c_int> {
    let (conn, inside) = conn::enter(fd)?;
    conn.keep_for_users(fd);
    let chan = conn.chan(&inside)?;
    if conn.refs.load(SeqCst) == 1 {
        lend::closing(chan);
    }
    hidden::duplicate(chan.bell())
}

/// # Safety
/// As `close_range(2)`.
pub(crate) unsafe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if first > last || flags & libc::CLOSE_RANGE_CLOEXEC.cast_signed() != 0 {
        // SAFETY: the caller's promise. Ours are closed on exec anyway.
        return unsafe { next::close_range(first, last, flags) };
    }
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    table::each(first as usize, last as usize, |fd, entry| match entry {
        Entry::HIDDEN => ours.push(fd as c_uint),
        _ => theirs.push(fd),
    });
    for fd in theirs {
        // SAFETY: in the range that the program wants closed.
        unsafe { close(fd) };
    }
    // Hidden descriptors that belonged to the descriptors closed now are gone too.
    ours.retain(|&fd| table::get(fd as c_int) == Entry::HIDDEN);
    let mut from = first;
    for fd in ours {
        if from < fd {
            // SAFETY: the caller's promise.
            let rc = unsafe { next::close_range(from, fd - 1, flags) };
            if rc != 0 {
                return rc;
            }
        }
        from = fd + 1;
    }
    if from <= last {
        // SAFETY: the caller's promise.
        return unsafe { next::close_range(from, last, flags) };
    }
    0
}

/// `new` is another descriptor of what `old` is.
pub(crate) fn copied(old: c_int, new: c_int) {
    if new < 0 || new == old {
        return;
    }
    match kind(old) {
        Kind::Conn(conn) => {
            if table::holds(new) {
                {
                    let _big = big();
                    conn.refs.fetch_add(1, SeqCst);
                    table::put(new, Entry::socket(conn));
                }
                if new <= libc::STDERR_FILENO {
                    // The C library's streams stand there, and read and write by themselves.
                    return_to_tcp::downgrade(conn, Why::Stdio);
                }
            } else {
                // Calls by that number would not be seen.
                return_to_tcp::downgrade(conn, Why::Descriptors);
            }
        }
        Kind::Dgram(d) => dgram::copied(d, new),
        // A set with two descriptors cannot be followed when one is closed: its connections are the kernel's from now on.
        Kind::Set(number) => {
            for conn in ready::in_set(number) {
                return_to_tcp::downgrade(conn, Why::Descriptors);
            }
            table::put(old, Entry::set(0));
            table::put(new, Entry::set(0));
            ring_poll::close(number);
        }
        Kind::Hidden | Kind::Other => table::put(new, Entry::NONE),
    }
}

/// # Safety
/// As `dup3(2)`: `call` is the program's own.
pub(crate) unsafe fn over(old: c_int, new: c_int, flags: c_int, call: impl Fn() -> c_int) -> c_int {
    if old == new {
        return call();
    }
    if table::refuses(old) {
        return -1;
    }
    // A call that fails leaves what `new` is.
    let is_in_limit = u64::try_from(new).is_ok_and(|new| new < kernel::most_descriptors());
    // SAFETY: asks for flags.
    let is_open = || unsafe { next::fcntl(old, libc::F_GETFD, 0) } >= 0;
    if flags & !libc::O_CLOEXEC != 0 || !is_in_limit || !is_open() {
        return call();
    }
    if table::get(new) == Entry::HIDDEN {
        move_away(new);
    }
    let rc = closed_by(new, &call);
    if rc >= 0 {
        copied(old, rc);
    }
    rc
}

/// Moves our descriptor away from a number that the program wants.
fn move_away(fd: c_int) {
    let big = big();
    let Some(new) = hidden::duplicate(fd) else {
        return;
    };
    drop(big);
    let mut moved = dgram::move_away(fd, new);
    let big = conn::big();
    table::each_socket(|_, conn: &'static Conn| {
        if !moved {
            if let Some(chan) = conn.chan_slow(&big)
                && chan.bell() == fd
            {
                ready::bell_moves(conn, chan, new, &big);
                moved = true;
            }
            let slow = conn.slow(&big);
            for ours in slow.wires().filter(|ours| **ours == fd) {
                *ours = new;
                moved = true;
            }
            moved |= conn.kept_moves(fd, new) || regs::own_moves(&mut slow.regs, fd, new);
        }
    });
    table::put(fd, Entry::NONE);
    // SAFETY: it is ours.
    unsafe { next::close(fd) };
}

/// # Safety
/// As `fcntl(2)`: `call` is the program's own.
pub(crate) unsafe fn fcntl(fd: c_int, op: c_int, arg: c_ulong, call: impl Fn() -> c_int) -> c_int {
    if table::refuses(fd) {
        return -1;
    }
    let rc = call();
    if rc < 0 {
        return rc;
    }
    match op {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => copied(fd, rc),
        libc::F_SETFL => {
            set_nonblocking(fd, arg as c_int & libc::O_NONBLOCK != 0);
            if arg as c_int & libc::O_ASYNC != 0 {
                // The kernel signals what it carries itself.
                dgram::make_plain(fd, Why::Option);
                if let Some(conn) = conn::of(fd) {
                    return_to_tcp::downgrade(conn, Why::Option);
                }
            }
        }
        // Signals announce the kernel's datagrams only.
        F_SETOWN | F_SETSIG | F_SETOWN_EX => dgram::make_plain(fd, Why::Option),
        _ => {}
    }
    rc
}

/// Signal-driven I/O, by the kernel's numbers.
const F_SETOWN: c_int = 8;
const F_SETSIG: c_int = 10;
const F_SETOWN_EX: c_int = 15;

/// Asks for the bytes that TCP has not sent yet.
const SIOCOUTQNSD: c_ulong = 0x894b;

fn set_nonblocking(fd: c_int, on: bool) {
    if let Some(d) = dgram::of(fd) {
        d.nonblock.store(on, SeqCst);
    }
    if let Some((conn, inside)) = conn::enter(fd)
        && let Some(chan) = conn.chan(&inside)
    {
        chan.side().nonblock.store(on.into(), SeqCst);
    }
}

/// # Safety
/// As `ioctl(2)`: `call` is the program's own.
pub(crate) unsafe fn ioctl(
    fd: c_int,
    op: c_ulong,
    arg: c_ulong,
    call: impl Fn() -> c_int,
) -> c_int {
    if let Some(d) = dgram::of(fd) {
        // SAFETY: the caller's promise.
        return unsafe { dgram::options::ioctl(fd, d, op, arg, call) };
    }
    let Some((conn, inside)) = conn::enter(fd) else {
        return call();
    };
    let rc = call();
    if rc == 0 && op == dgram::options::FIOASYNC {
        return_to_tcp::downgrade(conn, Why::Option);
    }
    let out: *mut c_int = std::ptr::with_exposed_provenance_mut(arg as usize);
    if rc != 0 || out.is_null() {
        return rc;
    }
    if let Some(chan) = conn.chan(&inside) {
        let asks = op == libc::FIONREAD || op == rx::SIOCATMARK;
        if asks && chan.side().rx_state.load(SeqCst) == Route::Ring {
            let n = chan.ring_bytes().unwrap_or(0);
            if n > 0 {
                // Bytes in TCP, and the mark of urgent data, are behind those of the ring.
                // SAFETY: the kernel has just written there.
                let all = n.saturating_add(unsafe { out.read_unaligned() }.max(0) as usize);
                let told = if op == libc::FIONREAD { all } else { 0 };
                // SAFETY: as above.
                unsafe { out.write_unaligned(c_int::try_from(told).unwrap_or(c_int::MAX)) };
            }
        } else if op == libc::TIOCOUTQ || op == SIOCOUTQNSD {
            // SAFETY: the kernel has just written there.
            let all = chan
                .not_taken()
                .saturating_add(unsafe { out.read_unaligned() });
            // SAFETY: as above.
            unsafe { out.write_unaligned(all) };
        } else if op == libc::FIONBIO {
            // SAFETY: the kernel has just read it.
            chan.side()
                .nonblock
                .store((unsafe { out.read_unaligned() } != 0).into(), SeqCst);
        }
    }
    rc
}
