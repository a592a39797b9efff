//! The kind of each descriptor: found at its first use, forgotten when it is closed.
//!
//! # Safety
//!
//! System calls with local memory of the calling function.

use libc::{c_int, sockaddr_storage, socklen_t};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use weft_advise::record::{Count, LiveProcess};

use crate::slot;

/// Descriptors beyond are asked about at each use.
const MANY: usize = 1 << 16;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// TCP.
    Stream,
    /// UDP.
    Datagram,
    /// A Unix socket.
    Unix,
    /// A socket of another family.
    Other,
}

const UNKNOWN: u64 = 0;
const NO_SOCKET: u64 = 1;
const KIND: u64 = 7;
/// The peer is on this host, or on another one; neither, and it has not been looked at.
const SAME_HOST: u64 = 8;
const OTHER_HOST: u64 = 16;
/// The last call was a receive.
const RECEIVED: u64 = 32;

pub(crate) struct Fd {
    state: AtomicU64,
    opened: AtomicU64,
    calls: AtomicU64,
    bytes: AtomicU64,
}

static FDS: [Fd; MANY] = [const {
    Fd {
        state: AtomicU64::new(UNKNOWN),
        opened: AtomicU64::new(0),
        calls: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
    }
}; MANY];

/// No descriptor above has been looked at.
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

fn place(fd: c_int) -> Option<&'static Fd> {
    FDS.get(usize::try_from(fd).ok()?)
}

fn kind_of(state: u64) -> Option<Kind> {
    match state & KIND {
        2 => Some(Kind::Stream),
        3 => Some(Kind::Datagram),
        4 => Some(Kind::Unix),
        5 => Some(Kind::Other),
        _ => None,
    }
}

impl Fd {
    pub(crate) fn is_same_host(&self) -> bool {
        self.state.load(Relaxed) & SAME_HOST != 0
    }

    /// Notes a call; returns whether it is a send after a receive.
    #[inline]
    pub(crate) fn note(&self, sends: bool, bytes: u64) -> bool {
        self.calls.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
        let state = self.state.load(Relaxed);
        let turned = state & RECEIVED != 0;
        if turned == sends {
            self.state.fetch_xor(RECEIVED, Relaxed);
        }
        sends && turned
    }

    /// Finds the place of the peer of a TCP or UDP socket, unless it is known.
    pub(crate) fn locate(&self, fd: c_int, process: &LiveProcess) {
        let state = self.state.load(Relaxed);
        if state & (SAME_HOST | OTHER_HOST) != 0 {
            return;
        }
        let Some(same) = same_host(fd) else { return };
        self.state
            .fetch_or(if same { SAME_HOST } else { OTHER_HOST }, Relaxed);
        if kind_of(state) == Some(Kind::Stream) {
            process.add(
                if same {
                    Count::SameHost
                } else {
                    Count::OtherHost
                },
                1,
            );
        }
    }
}

/// Returns the socket behind a descriptor; `None` for all others.
#[inline]
pub(crate) fn socket(fd: c_int) -> Option<(Kind, &'static Fd)> {
    let place = place(fd)?;
    let state = place.state.load(Relaxed);
    match state & KIND {
        NO_SOCKET => None,
        UNKNOWN => look(fd, place),
        _ => Some((kind_of(state)?, place)),
    }
}

fn option(fd: c_int, name: c_int) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as socklen_t;
    // SAFETY: writes an int.
    let result = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    (result == 0).then_some(value)
}

#[cold]
fn look(fd: c_int, place: &'static Fd) -> Option<(Kind, &'static Fd)> {
    let before = crate::errno();
    HIGHEST.fetch_max(fd as usize, Relaxed);
    let kind = option(fd, libc::SO_TYPE);
    let failed = crate::errno();
    let domain = option(fd, libc::SO_DOMAIN);
    crate::set_errno(before);
    let Some((kind, domain)) = kind.zip(domain) else {
        if failed == libc::ENOTSOCK {
            place.state.store(NO_SOCKET, Relaxed);
        }
        return None;
    };
    let kind = match (domain, kind) {
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_STREAM) => Kind::Stream,
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_DGRAM) => Kind::Datagram,
        (libc::AF_UNIX, _) => Kind::Unix,
        _ => Kind::Other,
    };
    let process = slot::mine()?;
    opened(place, kind, process);
    if matches!(kind, Kind::Stream | Kind::Datagram) {
        place.locate(fd, process);
        crate::set_errno(before);
    }
    Some((kind, place))
}

fn opened(place: &Fd, kind: Kind, process: &LiveProcess) {
    let (number, count) = match kind {
        Kind::Stream => (2, Count::Streams),
        Kind::Datagram => (3, Count::Datagrams),
        Kind::Unix => (4, Count::Unix),
        Kind::Other => (5, Count::Others),
    };
    place.opened.store(slot::now(), Relaxed);
    place.calls.store(0, Relaxed);
    place.bytes.store(0, Relaxed);
    place.state.store(number, Relaxed);
    process.add(count, 1);
}

/// Notes a new descriptor: the recorded state of its number belongs to an earlier one.
pub(crate) fn made(fd: c_int) {
    gone(fd);
    socket(fd);
}

/// A descriptor is about to be closed.
#[inline]
pub(crate) fn gone(fd: c_int) {
    if let Some(place) = place(fd)
        && place.state.load(Relaxed) != UNKNOWN
    {
        forget(place);
    }
}

fn forget(place: &Fd) {
    if slot::is_guest() {
        return;
    }
    let state = place.state.swap(UNKNOWN, Relaxed);
    let connected = state & (SAME_HOST | OTHER_HOST) != 0;
    if connected
        && kind_of(state) == Some(Kind::Stream)
        && let Some(process) = slot::known()
    {
        let open = slot::now().saturating_sub(place.opened.load(Relaxed));
        process.add(Count::Closed, 1);
        process.add(Count::Lifetime, open);
        if place.calls.load(Relaxed) < 4 && place.bytes.load(Relaxed) < 64 << 10 {
            process.add(Count::ShortLock, 1);
        }
    }
}

/// All from `first` to `last` are closed.
pub(crate) fn gone_between(first: u32, last: u32) {
    let last = (last as usize).min(HIGHEST.load(Relaxed)).min(MANY - 1);
    if last < first as usize {
        return;
    }
    for place in FDS.get(first as usize..=last).unwrap_or_default() {
        if place.state.load(Relaxed) != UNKNOWN {
            forget(place);
        }
    }
}

/// An address without its port: 4 or 16 bytes, and whether it is a loopback address.
fn host(address: &sockaddr_storage) -> Option<([u8; 16], bool)> {
    let from = std::ptr::from_ref(address);
    match c_int::from(address.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that it is one, and the storage is large and aligned enough for any.
            let address = unsafe { &*from.cast::<libc::sockaddr_in>() };
            Some(mapped(address.sin_addr.s_addr.to_ne_bytes()))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let bytes = unsafe { &*from.cast::<libc::sockaddr_in6>() }
                .sin6_addr
                .s6_addr;
            let is_mapped = bytes[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
            if is_mapped {
                return Some(mapped([bytes[12], bytes[13], bytes[14], bytes[15]]));
            }
            Some((bytes, bytes == std::net::Ipv6Addr::LOCALHOST.octets()))
        }
        _ => None,
    }
}

fn mapped(four: [u8; 4]) -> ([u8; 16], bool) {
    let mut bytes = [0; 16];
    bytes[10..12].fill(0xff);
    bytes[12..].copy_from_slice(&four);
    (bytes, four[0] == 127)
}

/// Reports whether a socket's peer has an address of this host: a loopback address, or the socket's own. `None` without a peer.
fn same_host(fd: c_int) -> Option<bool> {
    let ask = |name: unsafe extern "C" fn(c_int, *mut libc::sockaddr, *mut socklen_t) -> c_int| {
        // SAFETY: all zeros is a value of it.
        let mut address: sockaddr_storage = unsafe { std::mem::zeroed() };
        let mut len = size_of::<sockaddr_storage>() as socklen_t;
        // SAFETY: writes an address of at most this length.
        let result = unsafe { name(fd, (&raw mut address).cast(), &raw mut len) };
        (result == 0).then(|| host(&address)).flatten()
    };
    let (peer, loopback) = ask(libc::getpeername)?;
    if loopback {
        return Some(true);
    }
    Some(ask(libc::getsockname)?.0 == peer)
}
