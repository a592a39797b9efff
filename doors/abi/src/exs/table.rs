//! Sockets by descriptor number.
//!
//! The number of a socket is that of a descriptor from the kernel, so nothing else can have it. It is a second descriptor of the socket, because the
//! library may need the first for a while after the program has closed the socket. `dup` makes further numbers; the socket is closed with the last one. Kernel sockets are in the table only while
//! operations are outstanding on them: the program closes them with `close`, which the library does not see.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
};
use std::time::Duration;

use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT, POLLRDNORM, POLLWRNORM};
use rustix::io::Errno;
use rustix::net::sockopt;
use weft_exs::{Context, InPlace, Memory, Ready, Sink, Socket};

/// A socket, and the C state that the crate does not keep.
pub(crate) struct Entry {
    pub(crate) socket: Socket,
    /// The descriptors that the program has of it; those of kernel sockets are not counted.
    numbers: AtomicUsize,
    /// True for a kernel socket.
    plain: bool,
    pub(crate) settings: Mutex<Settings>,
    pub(crate) in_place: Mutex<HashMap<usize, InPlace>>,
    pub(crate) listening: AtomicBool,
    /// While a non-blocking connect is under way: a descriptor that becomes readable at its end.
    connecting: Mutex<Option<Arc<OwnedFd>>>,
    /// Descriptors that become readable on failure or hang-up; the second one also when sends are possible. Shared by all waiting threads.
    watches: Mutex<[Option<Arc<OwnedFd>>; 2]>,
    /// Receives are shut down by `shutdown(SHUT_RD)`, which affects only this end.
    pub(crate) read_shut: AtomicBool,
    /// The pending error for `SO_ERROR`; reading clears it.
    pub(crate) error: AtomicI32,
    /// Bytes of non-blocking sends under way.
    pub(crate) unsent: AtomicUsize,
    pub(crate) limits: Arc<Limits>,
    /// Conditions that epoll sets report once.
    edges: Mutex<Vec<Weak<Edge>>>,
    /// There were some.
    edged: AtomicBool,
}

/// The conditions of a socket that an edge-triggered epoll set has reported. A call that may end a condition makes it new.
pub(crate) struct Edge {
    seen: Mutex<Seen>,
    /// Rung when a condition becomes new: the set's waiting threads do not watch those that are not.
    bell: Arc<Bell>,
}

#[derive(Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) conditions: Ready,
    /// The calls that may have ended conditions.
    calls: u64,
}

/// The conditions of `poll`, and of epoll.
pub(super) const READ: i16 = POLLIN | POLLRDNORM;
pub(super) const WRITE: i16 = POLLOUT | POLLWRNORM;

/// What a program that asks for these events is told.
pub(super) fn told(ready: Ready, events: i16) -> i16 {
    let mut out = 0;
    if ready.contains(Ready::IN) {
        out |= events & READ;
    }
    if ready.contains(Ready::OUT) {
        out |= events & WRITE;
    }
    if ready.contains(Ready::ERR) {
        out |= POLLERR;
    }
    if ready.contains(Ready::HUP) {
        out |= POLLHUP;
    }
    out
}

/// Wakes all threads that wait at it.
#[derive(Default)]
pub(crate) struct Bell(Mutex<Option<Arc<OwnedFd>>>);

impl Bell {
    /// A descriptor that becomes readable when the bell is rung next.
    ///
    /// # Errors
    /// Those of a new descriptor.
    pub(crate) fn wait_at(&self) -> Result<Arc<OwnedFd>, Errno> {
        let mut fd = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let there = match &*fd {
            Some(there) => Arc::clone(there),
            None => bell()?,
        };
        *fd = Some(Arc::clone(&there));
        Ok(there)
    }

    pub(crate) fn ring(&self) {
        let fd = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(fd) = fd {
            ring(&fd);
        }
    }
}

impl Edge {
    pub(crate) fn new(bell: Arc<Bell>) -> Edge {
        Edge {
            seen: Mutex::new(Seen {
                conditions: Ready::empty(),
                calls: 0,
            }),
            bell,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn seen(&self) -> Seen {
        *self.lock()
    }

    /// These conditions are reported. They were looked at after `before`: if a call may have ended them since then, they count as new.
    pub(crate) fn saw(&self, ready: Ready, before: Seen) {
        let mut seen = self.lock();
        if seen.calls == before.calls {
            seen.conditions |= ready;
        }
    }

    /// A call has been made that may have ended these conditions.
    pub(crate) fn over(&self, ready: Ready) {
        self.lock().calls += 1;
        self.ended(ready);
    }

    /// These conditions have ended, or may have.
    pub(crate) fn ended(&self, ready: Ready) {
        let mut seen = self.lock();
        let were = seen.conditions;
        seen.conditions.remove(ready);
        drop(seen);
        if were.intersects(ready) {
            self.bell.ring();
        }
    }
}

/// Time limits, of sends and of receives. Those of a kernel socket outlive its entry.
#[derive(Default)]
pub(crate) struct Limits {
    times: Mutex<[Option<Duration>; 2]>,
    /// `EXS_TIMEOUT_ONCE`.
    pub(crate) once: [AtomicBool; 2],
}

/// Socket options that the crate does not use.
#[derive(Clone, Copy, Default)]
pub(crate) struct Settings {
    pub(crate) nonblock: bool,
    pub(crate) ipv6: bool,
    pub(crate) nodelay: bool,
    pub(crate) keepalive: bool,
    pub(crate) reuse_addr: bool,
    pub(crate) linger: Option<Duration>,
    pub(crate) send_buffer: Option<usize>,
}

/// The most bytes that non-blocking sends may have under way, like the kernel's `SO_SNDBUF`.
const SEND_BUFFER: usize = 256 << 10;

impl Entry {
    /// The program has closed it. (Kernel sockets are closed without the library.)
    pub(crate) fn is_closed(&self) -> bool {
        !self.plain && !self.has_numbers(1)
    }

    /// The program has at least so many descriptors of it.
    pub(crate) fn has_numbers(&self, least: usize) -> bool {
        self.numbers.load(Ordering::Acquire) >= least
    }

    /// Closes it at the exit of the program. Another process may share a kernel connection; for that, only earlier sends are
    /// awaited, by an empty send behind them.
    ///
    /// # Errors
    /// `EBADF` when it is being closed.
    pub(crate) fn end(&self, sink: Sink) -> Result<(), Errno> {
        if self.plain {
            let nothing = Memory::Owned(Vec::new());
            return self.socket.send_without_limit(nothing, sink);
        }
        self.socket.close(sink)
    }

    fn with(socket: Socket, plain: bool, ipv6: bool) -> Entry {
        Entry {
            socket,
            numbers: AtomicUsize::new(1),
            plain,
            settings: Mutex::new(Settings {
                ipv6,
                nodelay: true,
                ..Settings::default()
            }),
            in_place: Mutex::default(),
            listening: AtomicBool::new(false),
            connecting: Mutex::default(),
            watches: Mutex::default(),
            read_shut: AtomicBool::new(false),
            error: AtomicI32::new(0),
            unsent: AtomicUsize::new(0),
            limits: Arc::default(),
            edges: Mutex::default(),
            edged: AtomicBool::new(false),
        }
    }

    /// Let calls tell this about the conditions that they may end, for as long as it exists.
    pub(crate) fn tell(&self, edge: &Arc<Edge>) {
        let mut edges = self.edges.lock().unwrap_or_else(PoisonError::into_inner);
        edges.retain(|edge| edge.strong_count() > 0);
        edges.push(Arc::downgrade(edge));
        self.edged.store(true, Ordering::Release);
    }

    /// A call has been made that may end these conditions.
    pub(crate) fn used(&self, ready: Ready) {
        if self.edged.load(Ordering::Acquire) {
            let edges = self.edges.lock().unwrap_or_else(PoisonError::into_inner);
            for edge in edges.iter().filter_map(Weak::upgrade) {
                edge.over(ready);
            }
        }
    }

    /// Set the time limit of sends (0) or receives (1).
    ///
    /// # Errors
    /// Those of the socket's options.
    pub(crate) fn set_limit(&self, way: usize, limit: Option<Duration>) -> Result<(), Errno> {
        self.socket.set_options(|options| match way {
            0 => options.send_timeout = limit,
            _ => options.recv_timeout = limit,
        })?;
        self.limits
            .times
            .lock()
            .unwrap_or_else(PoisonError::into_inner)[way] = limit;
        Ok(())
    }

    pub(crate) fn settings(&self) -> Settings {
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut Settings)) {
        change(&mut self.settings.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn nonblock(&self) -> bool {
        self.settings().nonblock
    }

    /// The most bytes that non-blocking sends may have under way.
    pub(crate) fn send_buffer(&self) -> usize {
        self.settings().send_buffer.unwrap_or(SEND_BUFFER)
    }

    /// True if a non-blocking send would accept data.
    pub(crate) fn has_room(&self) -> bool {
        self.unsent.load(Ordering::Acquire) < self.send_buffer()
    }

    /// A descriptor that becomes readable when the connect succeeds or fails; `None` if no connect is under way.
    pub(crate) fn connecting(&self) -> Option<Arc<OwnedFd>> {
        let connecting = self.connecting.lock();
        connecting.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Mark the start of a connect.
    ///
    /// # Errors
    /// `EALREADY` when a connect is under way, and those of a new descriptor.
    pub(crate) fn connect_begins(&self) -> Result<(), Errno> {
        let mut connecting = self
            .connecting
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if connecting.is_some() {
            return Err(Errno::ALREADY);
        }
        *connecting = Some(bell()?);
        drop(connecting);
        self.used(Ready::all());
        Ok(())
    }

    /// A descriptor that becomes readable when the socket has failed or hung up, or with `writable` when sends are possible.
    ///
    /// # Errors
    /// `ENOTCONN`, `EBADF` (closed), and those of a new descriptor.
    pub(crate) fn watch(self: &Arc<Self>, writable: bool) -> Result<Arc<OwnedFd>, Errno> {
        let which = usize::from(writable);
        let watches = || self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(watch) = &watches()[which] {
            return Ok(Arc::clone(watch));
        }
        let watch = bell()?;
        let there = watches()[which]
            .get_or_insert_with(|| Arc::clone(&watch))
            .clone();
        if !Arc::ptr_eq(&there, &watch) {
            return Ok(there); // another thread was faster
        }
        let of = Arc::downgrade(self);
        let told = Arc::clone(&watch);
        let wanted = if writable { Ready::OUT } else { Ready::empty() };
        let started = self.socket.poll(
            wanted,
            Sink::call(move |_| {
                if let Some(entry) = of.upgrade() {
                    entry.watches.lock().unwrap_or_else(PoisonError::into_inner)[which] = None;
                }
                ring(&told);
            }),
        );
        started.inspect_err(|_| {
            watches()[which] = None;
            ring(&watch);
        })?;
        Ok(watch)
    }

    /// Mark the end of a connect, and wake the threads that wait for it.
    pub(crate) fn connect_ends(&self) {
        let mut connecting = self
            .connecting
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(end) = connecting.take() {
            ring(&end);
        }
    }
}

/// A descriptor that becomes readable when it is rung.
fn bell() -> Result<Arc<OwnedFd>, Errno> {
    use rustix::event::{EventfdFlags, eventfd};
    Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?))
}

fn ring(bell: &OwnedFd) {
    // The counter cannot overflow.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

/// The identity of a descriptor's object in the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Inode {
    device: u64,
    number: u64,
}

impl Inode {
    fn of(fd: BorrowedFd<'_>) -> Result<Inode, Errno> {
        let stat = rustix::fs::fstat(fd)?;
        Ok(Inode {
            device: stat.st_dev,
            number: stat.st_ino,
        })
    }
}

#[derive(Default)]
enum Slot {
    #[default]
    Empty,
    /// One of ours, and the descriptor of this number.
    Exs(Arc<Entry>, OwnedFd),
    /// A kernel socket, identified by its inode.
    Plain(Weak<Entry>, Inode, Arc<Limits>),
    /// The parent's, in a forked child: its connection stays with the parent.
    Inherited,
}

pub(crate) struct Sockets(RwLock<Vec<Slot>>);

/// The object of a number.
pub(crate) enum Found {
    /// A socket of ours.
    Exs(Arc<Entry>),
    /// Any object of the kernel.
    System,
}

/// The object of a number that is being freed.
pub(crate) enum Removed {
    /// A socket of ours, which has been closed.
    Exs(Arc<Entry>),
    /// One of several numbers of a socket of ours.
    Duplicate,
    /// The parent's, in a forked child: only the child's descriptor is left of it.
    Inherited,
    /// Any object of the kernel.
    System,
}

/// # Errors
/// `EBADF` for a negative number.
fn place(fd: i32) -> Result<usize, Errno> {
    usize::try_from(fd).map_err(|_| Errno::BADF)
}

impl Sockets {
    pub(crate) fn new() -> Sockets {
        Sockets(RwLock::new(Vec::new()))
    }

    /// The table of a forked child, from its parent's. Empty when another thread was changing the table during the fork.
    pub(crate) fn inherited(&self) -> Sockets {
        let slots = match self.0.try_read() {
            Ok(slots) => slots
                .iter()
                .map(|slot| match slot {
                    Slot::Exs(..) | Slot::Inherited => Slot::Inherited,
                    Slot::Plain(..) | Slot::Empty => Slot::Empty,
                })
                .collect(),
            Err(_) => Vec::new(),
        };
        Sockets(RwLock::new(slots))
    }

    /// A new socket of ours, with the first settings. Returns its number.
    ///
    /// # Errors
    /// `EMFILE`.
    pub(crate) fn insert(&self, socket: Socket, ipv6: bool, nonblock: bool) -> Result<i32, Errno> {
        let number = rustix::io::fcntl_dupfd_cloexec(socket.as_fd(), 0)?;
        let fd = number.as_raw_fd();
        let entry = Entry::with(socket, false, ipv6);
        entry.set(|s| s.nonblock = nonblock);
        put(
            &mut self.write(),
            place(fd)?,
            Slot::Exs(Arc::new(entry), number),
        );
        Ok(fd)
    }

    /// Makes another number for the object of `fd` by `dup`, which returns a new descriptor of it. A socket of ours that had the new number is closed
    /// by `replaced`, if it has no other.
    ///
    /// # Errors
    /// As [`find`](Self::find), and those of `dup`.
    pub(crate) fn duplicate(
        &self,
        fd: i32,
        dup: impl FnOnce() -> Result<i32, Errno>,
        replaced: impl FnOnce(&Arc<Entry>),
    ) -> Result<i32, Errno> {
        let mut slots = self.write();
        let entry = match slots.get(place(fd)?) {
            Some(Slot::Exs(entry, _)) => Some(Arc::clone(entry)),
            Some(Slot::Inherited) => return Err(Errno::NOTCONN),
            _ => None,
        };
        let new = dup()?;
        let old = slots.get_mut(place(new)?).map(std::mem::take);
        if let Some(entry) = entry {
            // SAFETY: `dup` has just made it, and nothing else owns it.
            let number = unsafe { OwnedFd::from_raw_fd(new) };
            entry.numbers.fetch_add(1, Ordering::AcqRel);
            put(&mut slots, place(new)?, Slot::Exs(entry, number));
        }
        if let Some(Slot::Exs(old, number)) = old {
            // The kernel has closed that descriptor already.
            std::mem::forget(number);
            drop(slots);
            if old.numbers.fetch_sub(1, Ordering::AcqRel) == 1 {
                replaced(&old);
            }
        }
        Ok(new)
    }

    /// The object of a number.
    ///
    /// # Errors
    /// `EBADF` for a negative number; `ENOTCONN` for a parent's socket in a forked child.
    pub(crate) fn find(&self, fd: i32) -> Result<Found, Errno> {
        let slots = self.read();
        match slots.get(place(fd)?) {
            Some(Slot::Exs(entry, _)) => Ok(Found::Exs(Arc::clone(entry))),
            Some(Slot::Inherited) => Err(Errno::NOTCONN),
            _ => Ok(Found::System),
        }
    }

    /// Removes a number, and its socket if that was the last one, unless `close` fails. A parent's socket is forgotten.
    ///
    /// # Errors
    /// `EBADF` for a negative number, or that of `close`.
    pub(crate) fn remove(
        &self,
        fd: i32,
        close: impl FnOnce(&Arc<Entry>) -> Result<(), Errno>,
    ) -> Result<Removed, Errno> {
        let place = place(fd)?;
        let mut slots = self.write();
        let slot = match slots.get_mut(place) {
            Some(slot) => std::mem::take(slot),
            None => Slot::Empty,
        };
        let (entry, number) = match slot {
            Slot::Exs(entry, number) => (entry, number),
            Slot::Inherited => return Ok(Removed::Inherited),
            other => {
                if let Some(slot) = slots.get_mut(place) {
                    *slot = other;
                }
                return Ok(Removed::System);
            }
        };
        if entry.has_numbers(2) {
            entry.numbers.fetch_sub(1, Ordering::AcqRel);
            return Ok(Removed::Duplicate);
        }
        drop(slots);
        // The number is still ours, but can no longer be found in the table.
        if let Err(errno) = close(&entry) {
            put(&mut self.write(), place, Slot::Exs(entry, number));
            return Err(errno);
        }
        entry.numbers.store(0, Ordering::Release);
        drop(number);
        Ok(Removed::Exs(entry))
    }

    /// Empties the table. Returns all our sockets, and the kernel sockets with outstanding operations.
    pub(crate) fn take_all(&self) -> Vec<Arc<Entry>> {
        let mut slots = self.write();
        std::mem::take(&mut *slots)
            .into_iter()
            .filter_map(|slot| match slot {
                Slot::Exs(entry, _) => Some(entry),
                Slot::Plain(entry, ..) => entry.upgrade(),
                Slot::Inherited | Slot::Empty => None,
            })
            .collect()
    }

    /// A kernel stream socket, which has outstanding operations from now on.
    ///
    /// # Errors
    /// `EBADF`, `ENOTSOCK`, `EOPNOTSUPP` for another type of socket, those of `context`; `ENOTCONN` if it must be `connected` and is not.
    pub(crate) fn plain(
        &self,
        fd: i32,
        connected: bool,
        context: impl FnOnce() -> Result<Context, Errno>,
    ) -> Result<Arc<Entry>, Errno> {
        // SAFETY: not kept; an invalid number gives EBADF.
        let theirs = unsafe { BorrowedFd::borrow_raw(fd) };
        let inode = Inode::of(theirs)?;
        if let Some(entry) = plain_in(&self.read(), place(fd)?, inode) {
            return Ok(entry);
        }
        if sockopt::socket_type(theirs)? != rustix::net::SocketType::STREAM {
            return Err(Errno::OPNOTSUPP);
        }
        if connected {
            rustix::net::getpeername(theirs)?;
        }
        let context = context()?;
        let mut slots = self.write();
        if let Some(entry) = plain_in(&slots, place(fd)?, inode) {
            return Ok(entry); // another thread was faster
        }
        let dup = rustix::io::fcntl_dupfd_cloexec(theirs, 0)?;
        let socket = Socket::from_ended_tcp(&context, dup)?;
        let mut entry = Entry::with(socket, true, false);
        if let Some(Slot::Plain(_, its, limits)) = slots.get(place(fd)?)
            && *its == inode
        {
            entry.limits = Arc::clone(limits);
            let times = *limits.times.lock().unwrap_or_else(PoisonError::into_inner);
            for (way, limit) in times.into_iter().enumerate() {
                entry.set_limit(way, limit)?;
            }
        }
        let limits = Arc::clone(&entry.limits);
        let entry = Arc::new(entry);
        let slot = Slot::Plain(Arc::downgrade(&entry), inode, limits);
        put(&mut slots, place(fd)?, slot);
        Ok(entry)
    }

    /// A kernel socket with outstanding operations.
    ///
    /// # Errors
    /// `EBADF`.
    pub(crate) fn known_plain(&self, fd: i32) -> Result<Option<Arc<Entry>>, Errno> {
        // SAFETY: not kept; an invalid number gives EBADF.
        let inode = Inode::of(unsafe { BorrowedFd::borrow_raw(fd) })?;
        Ok(plain_in(&self.read(), place(fd)?, inode))
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Slot>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Slot>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn plain_in(slots: &[Slot], place: usize, inode: Inode) -> Option<Arc<Entry>> {
    match slots.get(place)? {
        Slot::Plain(entry, its, _) if *its == inode => entry.upgrade(),
        _ => None,
    }
}

fn put(slots: &mut Vec<Slot>, place: usize, slot: Slot) {
    if slots.len() <= place {
        slots.resize_with(place + 1, Slot::default);
    }
    slots[place] = slot;
}
