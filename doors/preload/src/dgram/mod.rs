//! UDP sockets of the program, and rings to and from other programs of the host.
//!
//! The program's socket stays bound and carries the datagrams that cannot go through a ring. Each pair of a sending and a receiving socket has its
//! own ring (a direction of a [`weft_ring::stream::Stream`] with a header in front of each datagram), so that every datagram has the source
//! address that was verified when the pair was made. All rings of a receiving socket have one bell, a pair of Unix sockets: senders have
//! one end, and the other is in epoll sets together with the socket. How pairs meet is in `weft_run::dgram`.
//!
//! # Safety
//!
//! A [`Dgram`] is never freed but reused for another socket. Locks guard its contents; a thread that has taken one
//! checks that the descriptor still is that socket. A lock marks its thread ([`Held`]): a signal handler of that thread takes no lock of the same socket.

pub(crate) mod addr;
mod buffer;
pub(crate) mod fork;
pub(crate) mod frames;
pub(crate) mod io;
pub(crate) mod options;
mod parting;
pub(crate) mod ready;
pub(crate) mod rings;
pub(crate) mod rx;
pub(crate) mod tx;
mod unframed;

use libc::c_int;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64};
use std::sync::{Mutex, MutexGuard, PoisonError};

use weft_run::meet::Why;

use crate::hidden::Own;
use crate::private::{Guards, Private};
use crate::table::{self, Entry, Socket};
use crate::{clock, hidden, ledger, settings, signal};

/// Rarely used state: being found, and registrations in epoll sets.
#[derive(Default)]
pub(crate) struct Slow {
    pub(crate) listener: Option<Own>,
    /// Senders that have come to it and not spoken yet.
    pub(crate) silent: Vec<Own>,
    pub(crate) cookie: u64,
    pub(crate) regs: Vec<ready::Reg>,
}

#[repr(align(64))]
#[derive(Default)]
pub(crate) struct Dgram {
    /// Descriptors of this process that are it.
    refs: AtomicU32,
    /// The kernel's for good.
    plain: AtomicBool,
    /// Senders cannot find it any more.
    deaf: AtomicBool,
    /// It has rings to receive from.
    pub(crate) inbound: AtomicBool,
    /// It is in an epoll set: the bell is kept in step at the end of each receive.
    pub(crate) eager: AtomicBool,
    /// A registration that fires once waits for the bell.
    pub(crate) has_once: AtomicBool,
    /// The same, edge-triggered.
    pub(crate) edge: AtomicBool,
    pub(crate) nonblock: AtomicBool,
    pub(crate) v6: AtomicBool,
    /// The program wants to know the address that a datagram was sent to.
    pub(crate) pktinfo: AtomicBool,
    /// Threads that wait, or may wait, in the kernel for this socket alone.
    pub(crate) in_kernel: AtomicU32,
    /// Datagrams received.
    pub(crate) received: AtomicU64,
    /// When senders were last looked for.
    pub(crate) looked: AtomicU64,
    /// It sends no frames, and tells nobody that it takes them.
    pub(crate) frameless: AtomicBool,
    /// Number of the session with the broker in which it was told of, 0: none; and its cookie.
    pub(crate) told: AtomicU32,
    pub(crate) cookie: AtomicU64,
    /// Its queue pair number; 0: not asked yet.
    pub(crate) number: AtomicU32,
    /// Frames may wait in it of which the broker does not know; none come after this time. 0: none wait.
    pub(crate) doubtful: AtomicU64,
    /// The broker is asked whether another host was told of it.
    pub(crate) parting: AtomicBool,
    /// Only the program's own calls receive from it.
    pub(crate) own_calls: AtomicBool,
    /// An error that a look has taken from the kernel; 0: none.
    pub(crate) failed: AtomicI32,
    /// Frames sent.
    pub(crate) msn: AtomicU32,
    /// `SO_RCVTIMEO` in milliseconds; 0: none.
    pub(crate) patience: AtomicI64,
    /// Our end of the bell of all rings that come in; -1: none yet.
    pub(crate) bell: AtomicI32,
    slow: Mutex<Slow>,
    rx: Mutex<rings::Rx>,
    tx: Mutex<tx::Tx>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lock of a socket. A signal handler of the thread sees that it is held; guards are dropped in the opposite order of their making.
pub(crate) struct Held<'a, T> {
    guard: MutexGuard<'a, T>,
    _busy: signal::Busy,
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

type Pool = Vec<&'static Dgram>;
static POOL: Private<Pool> = Private::new(Guards::Datagrams, Vec::new());

impl crate::work::Work for Dgram {}

impl Dgram {
    fn new(v6: bool, nonblock: bool) -> &'static Dgram {
        let used = POOL.lock().pop();
        let d = used.unwrap_or_else(|| {
            let bell = AtomicI32::new(-1);
            Box::leak(Box::new(Dgram {
                bell,
                ..Dgram::default()
            }))
        });
        d.refs.store(1, Relaxed);
        d.v6.store(v6, Relaxed);
        d.nonblock.store(nonblock, Relaxed);
        d
    }

    pub(crate) fn slow(&'static self) -> Held<'static, Slow> {
        self.hold(&self.slow)
    }

    pub(crate) fn rx(&'static self) -> Held<'static, rings::Rx> {
        self.hold(&self.rx)
    }

    pub(crate) fn tx(&'static self) -> Held<'static, tx::Tx> {
        self.hold(&self.tx)
    }

    fn hold<T>(&'static self, mutex: &'static Mutex<T>) -> Held<'static, T> {
        // First the mark: a signal may come as soon as the lock is held.
        let busy = signal::again(self);
        Held {
            guard: locked(mutex),
            _busy: busy,
        }
    }

    /// Returns true if the descriptor still is this socket.
    pub(crate) fn is(&self, fd: c_int) -> bool {
        of(fd).is_some_and(|d| std::ptr::eq(d, self))
    }

    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.plain.load(Relaxed)
    }

    pub(crate) fn is_deaf(&self) -> bool {
        self.deaf.load(Relaxed) || self.is_plain()
    }

    /// Sends the senders back to the kernel; datagrams in the rings can still be read.
    pub(crate) fn deafen(&'static self) {
        if self.deaf.swap(true, SeqCst) {
            return;
        }
        {
            let mut slow = self.slow();
            slow.listener = None;
            slow.silent.clear();
        }
        self.rx().close_all();
    }

    /// The kernel's for good, as plain UDP.
    pub(crate) fn plain(&'static self, why: Why) {
        frames::leave(self);
        self.without_rings(why);
    }

    /// The kernel's for good.
    pub(crate) fn without_rings(&'static self, why: Why) {
        if self.plain.swap(true, SeqCst) {
            return;
        }
        if !frames::may_go(self) {
            ledger::datagrams_stay(why);
        }
        self.deafen();
        self.tx().forget_all();
    }

    /// Its last descriptor is gone.
    fn recycle(&'static self) {
        frames::leave(self);
        // The order is that of `rx::look`.
        let mut slow = self.slow();
        ready::leave_all(self, &mut slow);
        {
            let mut rx = self.rx();
            rx.close_all();
            *rx = rings::Rx::default();
        }
        *slow = Slow::default();
        *self.tx() = tx::Tx::default();
        let bell = self.bell.swap(-1, SeqCst);
        if bell >= 0 {
            hidden::close(bell);
        }
        for flag in [
            &self.plain,
            &self.deaf,
            &self.inbound,
            &self.eager,
            &self.has_once,
            &self.edge,
            &self.pktinfo,
            &self.frameless,
            &self.parting,
            &self.own_calls,
        ] {
            flag.store(false, SeqCst);
        }
        self.number.store(0, Relaxed);
        self.doubtful.store(0, Relaxed);
        self.failed.store(0, Relaxed);
        self.msn.store(0, Relaxed);
        self.received.store(0, Relaxed);
        self.looked.store(0, Relaxed);
        self.patience.store(0, Relaxed);
        drop(slow);
        POOL.lock().push(self);
    }
}

// SAFETY: no other kind has the mark, and the type is aligned to more than four.
unsafe impl Socket for Dgram {
    const MARK: usize = 2;
}

/// The UDP socket behind a descriptor.
#[inline]
pub(crate) fn of(fd: c_int) -> Option<&'static Dgram> {
    table::get(fd).as_socket()
}

/// A socket is new.
pub(crate) fn follow(fd: c_int, domain: c_int, kind: c_int, protocol: c_int) {
    let bare = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    let is_udp = matches!(domain, libc::AF_INET | libc::AF_INET6)
        && bare == libc::SOCK_DGRAM
        && matches!(protocol, 0 | libc::IPPROTO_UDP);
    // The C library's streams stand on the first three, and read and write by themselves.
    if is_udp && fd > libc::STDERR_FILENO && table::holds(fd) && !settings::is_off() {
        let d = Dgram::new(domain == libc::AF_INET6, kind & libc::SOCK_NONBLOCK != 0);
        table::put(fd, Entry::socket(d));
        ledger::datagram_socket();
        frames::followed();
    }
}

/// A descriptor may stand for something else from now on.
pub(crate) fn forget(fd: c_int, d: &'static Dgram) {
    table::put(fd, Entry::NONE);
    if d.refs.fetch_sub(1, SeqCst) == 1 {
        d.recycle();
    } else {
        ready::leave(d, fd);
    }
}

/// `new` is another descriptor of it.
pub(crate) fn copied(d: &'static Dgram, new: c_int) {
    if !table::holds(new) {
        // Calls by that number would not be seen.
        parting::hand_over(&[(new, d)]);
        return d.plain(Why::Descriptors);
    }
    d.refs.fetch_add(1, SeqCst);
    table::put(new, Entry::socket(d));
    if new <= libc::STDERR_FILENO {
        parting::hand_over(&[(new, d)]);
        d.plain(Why::Stdio);
    }
}

/// The socket is used in a way that is not followed.
pub(crate) fn make_plain(fd: c_int, why: Why) {
    if let Some(d) = of(fd) {
        if matches!(why, Why::Stdio | Why::Passed | Why::Exec | Why::Splice) {
            parting::hand_over(&[(fd, d)]);
        }
        d.plain(why);
    }
}

/// Moves all sockets to the kernel, because the library does not see what the process does from now on.
pub(crate) fn everything_plain(why: Why) {
    if matches!(why, Why::Sandbox | Why::IoUring) {
        // What they receive is not looked at any more.
        let mut all = Vec::new();
        table::each_socket(|fd, d: &'static Dgram| all.push((fd, d)));
        parting::hand_over(&all);
    }
    table::each_socket(|_, d: &'static Dgram| d.plain(why));
}

/// The program wants the number of a descriptor of ours. Returns whether it was one of a UDP socket, which has moved.
pub(crate) fn move_away(fd: c_int, to: c_int) -> bool {
    let mut moved = frames::own_moves(fd, to);
    table::each_socket(|_, d: &'static Dgram| moved = moved || d.own_moves(fd, to));
    moved
}

impl Dgram {
    fn own_moves(&'static self, fd: c_int, to: c_int) -> bool {
        let mut slow = self.slow();
        if self.bell.load(SeqCst) == fd {
            ready::bell_moves(self, &slow, to);
            return true;
        }
        let Slow {
            listener, silent, ..
        } = &mut *slow;
        if let Some(own) = listener.iter_mut().chain(silent).find(|own| own.0 == fd) {
            own.0 = to;
            return true;
        }
        let mut rx = self.rx();
        let mut tx = self.tx();
        let found = rx
            .descriptors()
            .chain(tx.descriptors())
            .find(|own| own.0 == fd);
        found.is_some_and(|own| {
            own.0 = to;
            true
        })
    }
}

/// Milliseconds of a clock that is cheap to read, and coarse.
#[inline]
pub(crate) fn now_ms() -> u64 {
    clock::about_now() / 1_000_000
}
