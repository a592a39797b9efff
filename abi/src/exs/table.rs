//! Sockets by descriptor number.
//!
//! A number of ours is that of a descriptor which the system gave us, so it can be no other's: a second one of the socket's, because the
//! library may need its own for a while after the program has closed the socket. Sockets of the system are here only while operations are outstanding on them: the program closes those with `close`, and we would not know.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;
use weft_exs::{Context, InPlace, Memory, Ready, Sink, Socket};

/// A socket and what C programs know of it beyond the crate.
pub(crate) struct Entry {
    pub(crate) socket: Socket,
    /// The number that the program knows.
    pub(crate) fd: i32,
    /// Its descriptor, until the socket is closed. The system's are the program's own.
    number: Mutex<Option<OwnedFd>>,
    /// It is one of the system's.
    plain: bool,
    pub(crate) settings: Mutex<Settings>,
    pub(crate) in_place: Mutex<HashMap<usize, InPlace>>,
    pub(crate) listening: AtomicBool,
    /// While a connection is made by a call that did not wait: what becomes readable at its end.
    connecting: Mutex<Option<Arc<OwnedFd>>>,
    /// What becomes readable when the socket has failed or hung up; and that, or sends may go. Shared by all who wait.
    watches: Mutex<[Option<Arc<OwnedFd>>; 2]>,
    /// Receives are shut down: by `shutdown(SHUT_RD)`, which is a matter of this side only.
    pub(crate) read_shut: AtomicBool,
    /// The error that `SO_ERROR` tells once.
    pub(crate) error: AtomicI32,
    /// Bytes of sends that did not wait and are under way.
    pub(crate) unsent: AtomicUsize,
    pub(crate) limits: Arc<Limits>,
}

/// Limits of time, of sends and of receives. Those of a socket of the system outlast its entry.
#[derive(Default)]
pub(crate) struct Limits {
    times: Mutex<[Option<Duration>; 2]>,
    /// `EXS_TIMEOUT_ONCE`.
    pub(crate) once: [AtomicBool; 2],
}

/// Options of sockets that the crate has no use for.
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

/// Bytes that sends which do not wait may have under way, as `SO_SNDBUF` of the system.
const SEND_BUFFER: usize = 256 << 10;

impl Entry {
    /// # Errors
    /// `EMFILE`.
    pub(crate) fn new(socket: Socket, ipv6: bool) -> Result<Entry, Errno> {
        let number = rustix::io::fcntl_dupfd_cloexec(socket.as_fd(), 0)?;
        let entry = Entry::with(socket, number.as_raw_fd(), false, ipv6);
        entry.hold(Some(number));
        Ok(entry)
    }

    /// The program has closed it. (The system's it closes without us.)
    pub(crate) fn is_closed(&self) -> bool {
        let number = self.number.lock().unwrap_or_else(PoisonError::into_inner);
        !self.plain && number.is_none()
    }

    /// Ends it with the program. A connection of the system may be another process's as well: of that, only what was sent before is
    /// waited for, by a send of nothing behind it.
    ///
    /// # Errors
    /// `EBADF` when it is being closed already.
    pub(crate) fn end(&self, sink: Sink) -> Result<(), Errno> {
        if self.plain {
            let nothing = Memory::Owned(Vec::new());
            return self.socket.send_without_limit(nothing, sink);
        }
        self.socket.close(sink)
    }

    /// The number is free from here on, without a descriptor.
    fn hold(&self, number: Option<OwnedFd>) {
        *self.number.lock().unwrap_or_else(PoisonError::into_inner) = number;
    }

    fn with(socket: Socket, fd: i32, plain: bool, ipv6: bool) -> Entry {
        Entry {
            socket,
            fd,
            number: Mutex::default(),
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
        }
    }

    /// Set the limit of time of sends (0) or receives (1).
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

    /// Bytes that sends which do not wait may have under way.
    pub(crate) fn send_buffer(&self) -> usize {
        self.settings().send_buffer.unwrap_or(SEND_BUFFER)
    }

    /// Whether a send that does not wait would take something.
    pub(crate) fn has_room(&self) -> bool {
        self.unsent.load(Ordering::Acquire) < self.send_buffer()
    }

    /// What becomes readable when the connection is made, or could not be.
    pub(crate) fn connecting(&self) -> Option<Arc<OwnedFd>> {
        let connecting = self.connecting.lock();
        connecting.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A connection is being made from now on.
    ///
    /// # Errors
    /// `EALREADY` when one is, and those of a new descriptor.
    pub(crate) fn connect_begins(&self) -> Result<(), Errno> {
        let mut connecting = self
            .connecting
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if connecting.is_some() {
            return Err(Errno::ALREADY);
        }
        *connecting = Some(bell()?);
        Ok(())
    }

    /// What becomes readable when the socket has failed or hung up, or with `writable` when sends may go.
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

    /// Whoever waits for the connection looks again.
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
    // It has room for the number.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

/// What the system knows a descriptor's object by.
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
    Exs(Arc<Entry>),
    /// One of the system's, known by its inode.
    Plain(Weak<Entry>, Inode, Arc<Limits>),
    /// The parent's, in a forked child: its connection stays with the parent.
    Inherited,
}

/// The table.
pub(crate) struct Sockets(RwLock<Vec<Slot>>);

/// What a number stands for.
pub(crate) enum Found {
    /// A socket of ours.
    Exs(Arc<Entry>),
    /// Whatever it is, it is the system's.
    System,
}

/// What a number stood for that is being given up.
pub(crate) enum Removed {
    /// A socket of ours, which is closed.
    Exs(Arc<Entry>),
    /// The parent's, in a forked child: what is left of it here is the child's descriptor.
    Inherited,
    /// Whatever it is, it is the system's.
    System,
}

/// # Errors
/// `EBADF` below zero.
fn place(fd: i32) -> Result<usize, Errno> {
    usize::try_from(fd).map_err(|_| Errno::BADF)
}

impl Sockets {
    pub(crate) fn new() -> Sockets {
        Sockets(RwLock::new(Vec::new()))
    }

    /// What a forked child knows of its parent's. Nothing, when another thread was changing the table during the fork.
    pub(crate) fn inherited(&self) -> Sockets {
        let slots = match self.0.try_read() {
            Ok(slots) => slots
                .iter()
                .map(|slot| match slot {
                    Slot::Exs(_) | Slot::Inherited => Slot::Inherited,
                    Slot::Plain(..) | Slot::Empty => Slot::Empty,
                })
                .collect(),
            Err(_) => Vec::new(),
        };
        Sockets(RwLock::new(slots))
    }

    pub(crate) fn insert(&self, entry: Arc<Entry>) -> Result<i32, Errno> {
        let fd = entry.fd;
        let mut slots = self.write();
        put(&mut slots, place(fd)?, Slot::Exs(entry));
        Ok(fd)
    }

    /// What the number stands for.
    ///
    /// # Errors
    /// `EBADF` for a negative number; `ENOTCONN` for a parent's socket in a forked child.
    pub(crate) fn find(&self, fd: i32) -> Result<Found, Errno> {
        let slots = self.read();
        match slots.get(place(fd)?) {
            Some(Slot::Exs(entry)) => Ok(Found::Exs(Arc::clone(entry))),
            Some(Slot::Inherited) => Err(Errno::NOTCONN),
            _ => Ok(Found::System),
        }
    }

    /// Takes a socket of ours out, unless `close` fails, and frees its number. A parent's is forgotten.
    ///
    /// # Errors
    /// `EBADF` for a negative number, or that of `close`.
    pub(crate) fn remove(
        &self,
        fd: i32,
        close: impl FnOnce(&Arc<Entry>) -> Result<(), Errno>,
    ) -> Result<Removed, Errno> {
        let place = place(fd)?;
        let entry = {
            let mut slots = self.write();
            match slots.get_mut(place) {
                Some(slot @ Slot::Inherited) => {
                    *slot = Slot::Empty;
                    return Ok(Removed::Inherited);
                }
                Some(slot @ Slot::Exs(_)) => std::mem::take(slot),
                _ => return Ok(Removed::System),
            }
        };
        let Slot::Exs(entry) = entry else {
            return Ok(Removed::System);
        };
        // The number is still ours, and nobody finds the socket by it.
        if let Err(errno) = close(&entry) {
            self.insert(entry)?;
            return Err(errno);
        }
        entry.hold(None);
        Ok(Removed::Exs(entry))
    }

    /// All of ours, and those of the system's with operations outstanding; the table is empty after it.
    pub(crate) fn take_all(&self) -> Vec<Arc<Entry>> {
        let mut slots = self.write();
        std::mem::take(&mut *slots)
            .into_iter()
            .filter_map(|slot| match slot {
                Slot::Exs(entry) => Some(entry),
                Slot::Plain(entry, ..) => entry.upgrade(),
                Slot::Inherited | Slot::Empty => None,
            })
            .collect()
    }

    /// A stream socket of the system, with operations outstanding from now on.
    ///
    /// # Errors
    /// `EBADF`, `ENOTSOCK`, `EOPNOTSUPP` for another type of socket, those of `context`; `ENOTCONN` where it has to be `connected`.
    pub(crate) fn plain(
        &self,
        fd: i32,
        connected: bool,
        context: impl FnOnce() -> Result<Context, Errno>,
    ) -> Result<Arc<Entry>, Errno> {
        // SAFETY: not kept; a number that is no descriptor gives EBADF.
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
        let mut entry = Entry::with(socket, fd, true, false);
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

    /// A socket of the system with operations outstanding.
    ///
    /// # Errors
    /// `EBADF`.
    pub(crate) fn known_plain(&self, fd: i32) -> Result<Option<Arc<Entry>>, Errno> {
        // SAFETY: not kept; a number that is no descriptor gives EBADF.
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
