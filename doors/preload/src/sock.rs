//! The calls that make, connect, configure and wait for sockets.
//!
//! # Safety
//!
//! Each is as safe as its manual page says.

use libc::{
    c_int, c_uint, c_ulong, c_void, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t,
    sockaddr, socklen_t, timespec, timeval,
};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::connection::{Carrier, Phase};
use weft_run::meet::Why;

use crate::conn::{self, Conn};
use crate::iov::{is_bad, is_optional};
use crate::patience::millis;
use crate::stalled_ring::{patient, patient_until};
use crate::table::{self, Entry};
use crate::{
    bell, clock, dgram, direction, edges, fd as descriptor, hosts, kernel, ledger, link, next,
    poll as readiness, privileges, ready, return_to_tcp, ring_poll, sets, settings, signal,
};

/// The options of time limits as programs name them that are built for a `time_t` of 64 bits.
const SO_RCVTIMEO_NEW: c_int = 66;
const SO_SNDTIMEO_NEW: c_int = 67;

/// Forgets the previous state of a new descriptor's number.
fn fresh(fd: c_int) {
    if fd >= 0 && table::get(fd) != Entry::NONE {
        // It was closed unseen by the library; its state is dropped without touching the descriptor.
        descriptor::forget(fd);
    }
}

fn follow(fd: c_int, phase: Phase) {
    // The C library's streams stand on the first three, and read and write by themselves.
    if fd > libc::STDERR_FILENO && table::holds(fd) && !settings::is_off() {
        table::put(fd, Entry::socket(Conn::new(phase)));
    }
}

fn is_tcp(domain: c_int, kind: c_int, protocol: c_int) -> bool {
    let kind = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    matches!(domain, libc::AF_INET | libc::AF_INET6)
        && kind == libc::SOCK_STREAM
        && matches!(protocol, 0 | libc::IPPROTO_TCP)
}

/// A socket that a listener gave. It is asked what it is: the listener's number may have become another's by a call that the library does not see.
fn accepted(fd: c_int) {
    if fd < 0 {
        return;
    }
    fresh(fd);
    let tcp = kernel::number(fd, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
        && matches!(
            kernel::number(fd, libc::SO_DOMAIN),
            Some(libc::AF_INET | libc::AF_INET6)
        );
    if tcp {
        follow(fd, Phase::Probing);
        ledger::seen();
    }
}

/// A socket that was followed has left its connection (`AF_UNSPEC`), after which it may connect again.
unsafe fn connected_anew(fd: c_int, addr: *const sockaddr, len: socklen_t) {
    let has_family = len as usize >= size_of::<libc::sa_family_t>() && !is_bad(addr);
    // SAFETY: the kernel has read it.
    let leaves = has_family && c_int::from(unsafe { (*addr).sa_family }) == libc::AF_UNSPEC;
    if leaves {
        descriptor::forget(fd);
        follow(fd, Phase::Fresh);
    }
}

fn is_time(t: &timespec) -> bool {
    t.tv_sec >= 0 && (0..1_000_000_000).contains(&t.tv_nsec)
}

/// A time limit in nanoseconds; `None`: without end.
unsafe fn limit(timeout: *const timespec) -> Option<u64> {
    // SAFETY: the caller's promise.
    let t = unsafe { timeout.as_ref() }?;
    (t.tv_sec.cast_unsigned())
        .checked_mul(1_000_000_000)?
        .checked_add(t.tv_nsec.cast_unsigned())
}

/// Waits by `call` for a time limit, in nanoseconds (`None`: without end), until there are events that the program may see, of which there is room for `most`.
unsafe fn wait_for_events(
    set: c_int,
    (events, most): (*mut epoll_event, c_int),
    limit: Option<u64>,
    mut call: impl FnMut(Option<u64>) -> c_int,
) -> c_int {
    let mut left_ns = limit;
    let mut begun = 0;
    loop {
        if begun == 0 && limit.is_some_and(|limit| limit > 0) {
            begun = clock::now();
        }
        // SAFETY: the caller's promise; `call` has written as many events as it returns.
        let (left, is_changed) = unsafe {
            let n = sets::merge(events, call(left_ns));
            let of_hosts = hosts::settle(set, events, n);
            let (left, is_changed) = ready::settle(set, events, of_hosts);
            (left, is_changed || of_hosts != n)
        };
        if left < 0 || !is_changed {
            return left;
        }
        left_ns = limit.map(|limit| match begun {
            0 => limit,
            begun => limit.saturating_sub(clock::now().wrapping_sub(begun)),
        });
        if left > 0 {
            // What the TCP sockets have in place of the ends that were taken out.
            // SAFETY: room for the rest of the events.
            unsafe {
                let more = next::epoll_wait(set, events.add(left as usize), most - left, 0).max(0);
                let list = std::slice::from_raw_parts_mut(events, (left + more) as usize);
                return sets::merge(events, sets::join(list, left as usize) as c_int);
            }
        }
    }
}

weft_sys::interpose! {
    "C-unwind"

    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
        let fd = next::socket(domain, kind, protocol);
        if fd >= 0 {
            fresh(fd);
            if is_tcp(domain, kind, protocol) { follow(fd, Phase::Fresh); }
            dgram::follow(fd, domain, kind, protocol);
        }
        fd
    }

    fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
        let rc = next::connect(fd, addr, len);
        if rc == 0 && conn::of(fd).is_some_and(|conn| conn.phase.load(SeqCst) != Phase::Fresh) {
            // The kernel took the end of one connection, or the beginning of another. `EISCONN` and a connect that goes on do not come here.
            connected_anew(fd, addr, len);
        }
        if let Some(conn) = conn::of(fd)
            && (rc == 0 || crate::errno() == libc::EINPROGRESS || crate::errno() == libc::EINTR)
            && conn.phase.change(Phase::Fresh, Phase::Probing, SeqCst)
        {
            conn.dialled.store(true, Relaxed);
            ledger::seen();
        }
        if rc == 0 { dgram::options::connected(fd); }
        rc
    }

    fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
        let rc = next::bind(fd, addr, len);
        if rc == 0 { dgram::options::bound(fd); }
        rc
    }

    fn listen(fd: c_int, backlog: c_int) -> c_int {
        let rc = next::listen(fd, backlog);
        if rc == 0 && conn::of(fd).is_some() {
            descriptor::forget(fd);
        }
        rc
    }

    fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
        let new = next::accept(fd, addr, len);
        accepted(new);
        new
    }

    fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
        let new = next::accept4(fd, addr, len, flags);
        accepted(new);
        new
    }

    fn shutdown(fd: c_int, how: c_int) -> c_int {
        dgram::make_plain(fd, Why::ShutRead);
        let Some((conn, inside)) = conn::enter(fd) else { return next::shutdown(fd, how) };
        if how != libc::SHUT_WR { return_to_tcp::downgrade(conn, Why::ShutRead); }
        edges::found_full(conn);
        let rc = match conn.chan(&inside) {
            Some(chan) if how != libc::SHUT_RD => direction::shut_sending(chan, || next::shutdown(fd, how)),
            _ => next::shutdown(fd, how),
        };
        if rc == 0 && how != libc::SHUT_WR && let Some(chan) = conn.chan(&inside).filter(|chan| chan.carrier == Carrier::Here) {
            // It ends the waits of other threads, as it does in the kernel.
            next::shutdown(chan.bell(), libc::SHUT_RD);
        }
        if rc == 0 && how != libc::SHUT_RD { link::stop_asking(conn); }
        if rc == 0 && how != libc::SHUT_RD && let Some(chan) = conn.chan(&inside) {
            // After this, sends are TCP's to refuse; the peer reads the ring to its end and finds the FIN.
            direction::tx_after(conn, chan, Why::None);
            if chan.carrier == Carrier::Here { chan.stream.shut(chan.role); next::shutdown(chan.bell(), how); } else { hosts::shut_write(chan); }
        }
        rc
    }

    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int {
        if (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR)
            && let Some((conn, inside)) = conn::enter(fd)
            && let Some(chan) = conn.chan(&inside).filter(|chan| chan.carrier == Carrier::Here)
        {
            let _busy = signal::begin();
            // The kernel does not know of the bytes that a killed peer had not read.
            bell::follow_death(fd, chan);
            // The error is gone after this call.
            bell::follow_abort(fd, chan);
        }
        let rc = next::getsockopt(fd, level, name, value, len);
        if rc == 0 && (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR) {
            dgram::options::tell_error(fd, value, len);
        }
        rc
    }

    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int {
        if level == libc::SOL_SOCKET && matches!(name, libc::SO_ATTACH_FILTER | libc::SO_ATTACH_BPF) && let Some(conn) = conn::of(fd) {
            // What has come already is not for the filter.
            return_to_tcp::downgrade(conn, Why::Option);
        }
        let rc = next::setsockopt(fd, level, name, value, len);
        if rc != 0 { return rc; }
        dgram::options::set(fd, level, name, value, len);
        let Some((conn, inside)) = conn::enter(fd) else { return rc };
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | SO_RCVTIMEO_NEW | SO_SNDTIMEO_NEW) => {
                if let Some(chan) = conn.chan(&inside) { chan.side().note_limits(fd); }
            }
            (libc::IPPROTO_TCP, libc::TCP_INQ) => {
                if let Some(chan) = conn.chan(&inside) {
                    let on = kernel::tcp_number(fd, libc::TCP_INQ).unwrap_or(0);
                    chan.side().inq.store(on.cast_unsigned(), Relaxed);
                }
            }
            (libc::SOL_SOCKET, libc::SO_RCVLOWAT | libc::SO_TIMESTAMP | libc::SO_TIMESTAMPNS | libc::SO_TIMESTAMPING
                | libc::SO_ZEROCOPY | libc::SO_PEEK_OFF | libc::SO_MAX_PACING_RATE)
            | (libc::IPPROTO_TCP, libc::TCP_ULP | libc::TCP_REPAIR) => {
                let on = len >= 4 && !value.is_null() && value.cast::<c_int>().read_unaligned() > 1;
                let is_low = (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
                if !is_low || on { return_to_tcp::downgrade(conn, Why::Option); }
            }
            _ => {}
        }
        rc
    }

    fn poll(fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int { readiness::poll(fds, n, timeout) }

    fn __poll_chk(fds: *mut pollfd, n: nfds_t, timeout: c_int, room: size_t) -> c_int {
        if room / size_of::<pollfd>() < n as usize { libc::abort(); }
        readiness::poll(fds, n, timeout)
    }

    fn ppoll(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int {
        readiness::ppoll(fds, n, timeout, mask)
    }

    fn __ppoll_chk(fds: *mut pollfd, n: nfds_t, timeout: *const timespec, mask: *const sigset_t, room: size_t) -> c_int {
        if room / size_of::<pollfd>() < n as usize { libc::abort(); }
        readiness::ppoll(fds, n, timeout, mask)
    }

    fn select(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, timeout: *mut timeval) -> c_int {
        readiness::select(n, r, w, e, timeout)
    }

    fn pselect(n: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int {
        readiness::pselect(n, r, w, e, timeout, mask)
    }

    fn epoll_create(size: c_int) -> c_int {
        let fd = next::epoll_create(size);
        fresh(fd);
        sets::new_set(fd);
        fd
    }

    fn epoll_create1(flags: c_int) -> c_int {
        let fd = next::epoll_create1(flags);
        fresh(fd);
        sets::new_set(fd);
        fd
    }

    fn epoll_ctl(set: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
        let Some((conn, inside)) = conn::enter(fd) else {
            ring_poll::be_exact(fd);
            return dgram::ready::epoll_ctl(set, op, fd, event);
        };
        if conn.chan(&inside).is_some_and(|chan| ready::needs_tcp(chan, op, event)) {
            direction::stop_sending(conn, Why::Epoll);
        }
        ready::epoll_ctl(conn, &inside, (set, op, fd), event)
    }

    fn epoll_wait(set: c_int, events: *mut epoll_event, n: c_int, timeout: c_int) -> c_int {
        wait_for_events(set, (events, n), clock::in_ns(timeout), |left| patient(millis(left), |timeout| {
            ring_poll::wait(set, events, n, timeout != 0, |events, n, must_not_wait| {
                next::epoll_wait(set, events, n, if must_not_wait { 0 } else { timeout })
            })
        }))
    }

    fn epoll_pwait(set: c_int, events: *mut epoll_event, n: c_int, timeout: c_int, mask: *const sigset_t) -> c_int {
        wait_for_events(set, (events, n), clock::in_ns(timeout), |left| patient(millis(left), |timeout| {
            ring_poll::wait(set, events, n, timeout != 0, |events, n, must_not_wait| {
                next::epoll_pwait(set, events, n, if must_not_wait { 0 } else { timeout }, mask)
            })
        }))
    }

    fn epoll_pwait2(set: c_int, events: *mut epoll_event, n: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int {
        if !is_optional(timeout) || timeout.as_ref().is_some_and(|t| !is_time(t)) {
            return next::epoll_pwait2(set, events, n, timeout, mask);
        }
        wait_for_events(set, (events, n), limit(timeout), |left| {
            let rest = left.map(clock::timespec);
            let timeout = rest.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            patient_until(timeout, |timeout| {
                let at_once = clock::timespec(0);
                let may_wait = timeout.as_ref().is_none_or(|t| (t.tv_sec, t.tv_nsec) != (0, 0));
                ring_poll::wait(set, events, n, may_wait, |events, n, must_not_wait| {
                    next::epoll_pwait2(set, events, n, if must_not_wait { &raw const at_once } else { timeout }, mask)
                })
            })
        })
    }

    fn close(fd: c_int) -> c_int { descriptor::close(fd) }

    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        if flags & libc::CLOSE_RANGE_UNSHARE.cast_signed() != 0 && first <= last && kernel::has_threads() {
            let _nothing_lent = privileges::own_descriptors();
            return next::close_range(first, last, flags);
        }
        descriptor::close_range(first, last, flags)
    }

    fn closefrom(first: c_int) -> () {
        descriptor::close_range(first.max(0) as c_uint, c_uint::MAX, 0);
    }

    fn dup(fd: c_int) -> c_int {
        if table::refuses(fd) {
            return -1;
        }
        let new = next::dup(fd);
        descriptor::copied(fd, new);
        new
    }

    fn dup2(fd: c_int, to: c_int) -> c_int { descriptor::over(fd, to, 0, || next::dup2(fd, to)) }

    fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int { descriptor::over(fd, to, flags, || next::dup3(fd, to, flags)) }

    fn fcntl(fd: c_int, op: c_int, arg: c_ulong) -> c_int {
        descriptor::fcntl(fd, op, arg, || next::fcntl(fd, op, arg))
    }

    fn fcntl64(fd: c_int, op: c_int, arg: c_ulong) -> c_int {
        descriptor::fcntl(fd, op, arg, || next::fcntl64(fd, op, arg))
    }

    fn ioctl(fd: c_int, op: c_ulong, arg: c_ulong) -> c_int {
        descriptor::ioctl(fd, op, arg, || next::ioctl(fd, op, arg))
    }
}
