//! Sockets by number.

use std::net::SocketAddr;
use std::ops::Deref;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use libc::{c_int, linger};
use rustix::io::Errno;
use weft_rsockets::poll::Pollable;
use weft_rsockets::{Common, DatagramSocket, Options, Shutdown, Socket};

use crate::verbs::object::{Inherited, PerFork, lock};

/// A socket of either type.
pub(super) enum Kind {
    Stream(Socket),
    Datagram(Box<DatagramSocket>),
}

impl Deref for Kind {
    type Target = Common;

    fn deref(&self) -> &Common {
        match self {
            Kind::Stream(socket) => socket,
            Kind::Datagram(socket) => socket,
        }
    }
}

/// The same call for either type.
macro_rules! each {
    ($kind:expr, $socket:ident => $call:expr) => {
        match $kind {
            Kind::Stream($socket) => $call,
            Kind::Datagram($socket) => $call,
        }
    };
}

/// The calls of both types.
impl Kind {
    pub(super) fn bind(&self, addr: SocketAddr) -> Result<(), Errno> {
        each!(self, socket => socket.bind(addr))
    }

    pub(super) fn local_addr(&self) -> Result<SocketAddr, Errno> {
        each!(self, socket => socket.local_addr())
    }

    pub(super) fn peer_addr(&self) -> Result<SocketAddr, Errno> {
        each!(self, socket => socket.peer_addr())
    }

    pub(super) fn options(&self) -> Options {
        each!(self, socket => socket.options())
    }

    pub(super) fn has_begun(&self) -> bool {
        each!(self, socket => socket.has_begun())
    }

    pub(super) fn take_error(&self) -> Option<Errno> {
        each!(self, socket => socket.take_error())
    }

    pub(super) fn shutdown(&self, how: Shutdown) -> Result<(), Errno> {
        each!(self, socket => socket.shutdown(how))
    }

    fn close(&self) {
        each!(self, socket => socket.close());
    }

    pub(super) fn pollable(&self) -> &dyn Pollable {
        match self {
            Kind::Stream(socket) => socket,
            Kind::Datagram(socket) => socket.as_ref(),
        }
    }

    /// # Errors
    /// `EOPNOTSUPP` for a datagram socket.
    pub(super) fn stream(&self) -> Result<&Socket, Errno> {
        match self {
            Kind::Stream(socket) => Ok(socket),
            Kind::Datagram(_) => Err(Errno::OPNOTSUPP),
        }
    }
}

/// Options that are only remembered.
#[derive(Default)]
pub(super) struct Settings {
    pub(super) reuse_addr: bool,
    pub(super) keep_alive: bool,
    /// Seconds.
    pub(super) keep_idle: Option<c_int>,
    pub(super) oob_inline: bool,
    pub(super) no_delay: bool,
    pub(super) v6_only: bool,
    pub(super) linger: Option<linger>,
    pub(super) route: Vec<u8>,
}

/// A socket, and the state of it that only C programs see.
pub(super) struct Entry {
    pub(super) socket: Kind,
    /// The program's number. The program may close it, so only [`close`] closes it here.
    pub(super) fd: RawFd,
    /// The result of `F_GETFL`.
    pub(super) flags: AtomicI32,
    settings: Mutex<Settings>,
}

impl Entry {
    /// # Errors
    /// `EMFILE` when the process has no free descriptor.
    pub(super) fn new(socket: Kind) -> Result<Entry, Errno> {
        let fd = rustix::io::fcntl_dupfd_cloexec(socket.as_fd(), 0)?;
        Ok(Entry {
            socket,
            fd: fd.into_raw_fd(),
            flags: AtomicI32::new(libc::O_RDWR),
            settings: Mutex::default(),
        })
    }

    pub(super) fn settings(&self) -> MutexGuard<'_, Settings> {
        lock(&self.settings)
    }

    pub(super) fn set_nonblock(&self, on: bool) {
        self.socket.set_nonblocking(on);
        if on {
            self.flags.fetch_or(libc::O_NONBLOCK, Ordering::Relaxed);
        } else {
            self.flags.fetch_and(!libc::O_NONBLOCK, Ordering::Relaxed);
        }
    }
}

/// This process's sockets; a forked child has none of its parent's.
#[derive(Default)]
struct Table(RwLock<Vec<Option<Arc<Entry>>>>);

static TABLE: PerFork<Table> = PerFork::new();
/// In a forked child, the table of the parent: its numbers are in use, and can be closed.
static PARENT: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());

impl Inherited for Table {
    fn abandon(&self) {
        PARENT.store(std::ptr::from_ref(self).cast_mut(), Ordering::SeqCst);
    }
}

/// # Errors
/// `EBADF` below zero.
fn place(fd: c_int) -> Result<usize, Errno> {
    usize::try_from(fd).map_err(|_| Errno::BADF)
}

/// The socket of that number.
///
/// # Errors
/// `EBADF`; `ENOTCONN` for a parent's socket in a forked child.
pub(super) fn find(fd: c_int) -> Result<Arc<Entry>, Errno> {
    let place = place(fd)?;
    let slots = TABLE.get().0.read().unwrap_or_else(PoisonError::into_inner);
    match slots.get(place) {
        Some(Some(entry)) => Ok(Arc::clone(entry)),
        _ if is_parents(fd) => Err(Errno::NOTCONN),
        _ => Err(Errno::BADF),
    }
}

/// True for a socket in the parent's table, unless another thread of the parent had the table during the fork.
fn is_parents(fd: c_int) -> bool {
    let parent = PARENT.load(Ordering::SeqCst);
    // SAFETY: null, or a table that was leaked.
    let Some(parent) = (unsafe { parent.as_ref() }) else {
        return false;
    };
    let Ok(slots) = parent.0.try_read() else {
        return false;
    };
    let slot = place(fd).ok().and_then(|place| slots.get(place));
    slot.is_some_and(Option::is_some)
}

pub(super) fn insert(entry: Entry) -> Result<c_int, Errno> {
    let fd = entry.fd;
    let place = place(fd)?;
    let mut slots = TABLE
        .get()
        .0
        .write()
        .unwrap_or_else(PoisonError::into_inner);
    if slots.len() <= place {
        slots.resize_with(place + 1, || None);
    }
    // The program has closed this number with `close`, so that it was reused: the old socket is closed now.
    let lost = slots[place].replace(Arc::new(entry));
    drop(slots);
    drop(lost);
    Ok(fd)
}

/// Closes the socket of that number. A parent's number is only freed.
///
/// # Errors
/// `EBADF`.
pub(super) fn close(fd: c_int) -> Result<(), Errno> {
    let place = place(fd)?;
    let entry = {
        let mut slots = TABLE
            .get()
            .0
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        slots.get_mut(place).and_then(Option::take)
    };
    match &entry {
        Some(entry) => entry.socket.close(),
        None if forget_parents(fd) => {}
        None => return Err(Errno::BADF),
    }
    // SAFETY: the number is ours: it was made for the socket, which is not in the table any more.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Ok(())
}

/// Removes a number from the parent's table; returns true if it was there.
fn forget_parents(fd: c_int) -> bool {
    // SAFETY: null, or a table that was leaked.
    let Some(parent) = (unsafe { PARENT.load(Ordering::SeqCst).as_ref() }) else {
        return false;
    };
    let Ok(mut slots) = parent.0.try_write() else {
        return false;
    };
    let slot = place(fd).ok().and_then(|place| slots.get_mut(place));
    // The socket is the parent's: no part of it may be closed here.
    slot.and_then(Option::take).map(std::mem::forget).is_some()
}
