//! The part of a protection domain that peers of this host see.
//!
//! # Safety
//!
//! The table's mapping lives as long as its [`Domain`] and is reached through atomics only. The arenas' bytes are
//! registered memory like any other.

use crate::Access;
use crate::export::{self, Entry, Words};
use crate::export_addr::{ExportAddr, RW};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use weft_sys::memfd::{self, Mapping};
use weft_sys::process::ForkDetector;

/// Bytes of an arena; all but those in use are a hole.
const ARENA: u64 = 1 << 46;
/// The number of checks of a peer's use, one after the other, before the use counts as longer than a moment.
const MOMENT: u32 = 64;
/// Regions begin at multiples of this, for any page size.
const ALIGN: u64 = 1 << 16;

/// How long a peer may use memory that its owner takes back. Then its connection ends ([`Reader::cut_off`]): the peer was stopped, or breaks the
/// rules.
pub const PEER_LIMIT: Duration = Duration::from_secs(3);

/// The arena of regions that peers may read.
const RO: u32 = 2;
/// The arena of regions that peers may not reach by themselves.
const PRIVATE: u32 = 3;

/// A peer that may reach a domain's memory by itself.
pub trait Reader: Send + Sync {
    /// Whether the peer reports that it is using this `STag`. False for a peer that has ended, or was cut off.
    fn uses(&self, stag: u32) -> bool;
    /// Whether the peer can use windows of this queue pair of ours.
    fn serves(&self, qp: u32) -> bool;
    /// Whether the peer was told to fetch bytes of this range, and may not have finished.
    fn borrows(&self, place: ExportAddr, len: u64) -> bool;
    /// Ends its connection after [`PEER_LIMIT`]. [`Reader::uses`] is false after the return. Must not wait.
    fn cut_off(&self);
}

/// A region's memory, kept while it is referenced.
pub(crate) trait Memory: Send + Sync {
    /// Whether its bytes are in an arena.
    fn is_lent(&self) -> bool;
}

/// The `STag` of a window that a peer went on using when it was taken away.
struct Overdue {
    stag: u32,
    /// The queue pair that the window was for; 0: any.
    qp: u32,
    since: Instant,
    /// Keeps its memory until the peer has left it. Not for an arena: there a late write goes into a hole.
    #[expect(dead_code, reason = "kept")]
    region: Option<Arc<dyn Memory>>,
}

/// The part of a protection domain that peers on this host see: its `STag`s in a table that they can read, and three *arenas*, files of
/// memory that contain [`crate::Backing::Shared`] regions.
///
/// An arena's offsets are never reused, so a late write of a peer goes into a hole.
///
/// Hold it as long as a peer has its descriptors: with the last hold (of this or of a shared region) the
/// table is declared void.
pub struct Domain {
    id: [u8; 16],
    /// Children of `fork` share the files, but must not act on them.
    process: ForkDetector,
    table: OwnedFd,
    words: Mapping,
    /// Held while the table is written.
    writer: Mutex<()>,
    rw: Arena,
    ro: Arena,
    private: Arena,
    readers: Mutex<Vec<Weak<dyn Reader>>>,
    overdue: Mutex<Vec<Overdue>>,
}

struct Arena {
    fd: OwnedFd,
    /// The descriptor for peers that may only read.
    shown: Option<OwnedFd>,
    next: AtomicU64,
}

impl Arena {
    fn new(name: &str, writable: bool) -> io::Result<Arena> {
        let fd = memfd::create(name, ARENA)?;
        let shown = if writable {
            memfd::no_second_writer(&fd)?;
            None
        } else {
            Some(memfd::reader(&fd)?)
        };
        Ok(Arena {
            shown,
            fd,
            next: AtomicU64::new(0),
        })
    }

    fn shown(&self) -> BorrowedFd<'_> {
        self.shown.as_ref().unwrap_or(&self.fd).as_fd()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Domain {
    /// An empty domain.
    ///
    /// # Errors
    /// `Unsupported` and the errors of the system calls, if memory files cannot be created: an old kernel, no `/proc`, `RLIMIT_FSIZE`, too
    /// many open files.
    pub(crate) fn new() -> io::Result<Domain> {
        if cfg!(miri) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|e| io::Error::other(e.to_string()))?;
        let (table, words) = memfd::create_owned("weft-stags", export::BYTES)?;
        let domain = Domain {
            id,
            process: ForkDetector::new()?,
            table,
            words,
            writer: Mutex::new(()),
            rw: Arena::new("weft-rw", true)?,
            ro: Arena::new("weft-ro", false)?,
            private: Arena::new("weft-private", false)?,
            readers: Mutex::default(),
            overdue: Mutex::default(),
        };
        domain.words().begin(id);
        Ok(domain)
    }

    fn words(&self) -> Words<'_> {
        // SAFETY: a mapping of the right size that lives as long as `self`.
        unsafe { Words::of(self.words.as_ptr()) }
    }

    fn arena(&self, space: u32) -> &Arena {
        match space {
            RW => &self.rw,
            RO => &self.ro,
            _ => &self.private,
        }
    }

    /// Whether this process created it, and not its parent.
    pub(crate) fn is_ours(&self) -> bool {
        self.process.is_here()
    }

    /// Its random name.
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// The descriptors for a peer, in the order of [`crate::Peer::open`]: table, the arenas that peers may write and read, and, for a
    /// `trusted` peer (which may trace this process anyway), the arena of memory without remote rights.
    ///
    /// Only the second lets its holder write; [`memfd::reader`] says how far that goes.
    pub fn fds(&self, trusted: bool) -> Vec<BorrowedFd<'_>> {
        let mut fds = vec![self.table.as_fd(), self.rw.shown(), self.ro.shown()];
        fds.extend(trusted.then(|| self.private.shown()));
        fds
    }

    /// Adds a peer that has the descriptors. It is queried whenever an `STag` becomes invalid, until it is dropped; the querying thread
    /// holds no lock of this crate.
    pub fn add_reader(&self, reader: Weak<dyn Reader>) {
        let mut readers = lock(&self.readers);
        readers.retain(|r| r.strong_count() != 0);
        readers.push(reader);
    }

    /// Shows an entry, if it is of use to peers and has room.
    pub(crate) fn publish(&self, entry: &Entry) {
        if entry.rights.intersects(Access::REMOTE) && entry.len != 0 {
            let _one = lock(&self.writer);
            self.words().publish(entry);
        }
    }

    /// Hides an entry. Peers may still be using it: see [`Self::is_used`].
    pub(crate) fn retract(&self, stag: u32) {
        let _one = lock(&self.writer);
        self.words().retract(stag);
    }

    /// Those that can use windows of this queue pair; of any, for 0.
    fn readers(&self, qp: u32) -> Vec<Arc<dyn Reader>> {
        // Readers may do anything when they are dropped, so not under the lock.
        let readers = lock(&self.readers);
        let readers = readers.iter().filter_map(Weak::upgrade);
        let mut readers: Vec<_> = readers.collect();
        readers.retain(|r| qp == 0 || r.serves(qp));
        readers
    }

    /// Whether a peer uses a retracted `STag` for longer than a moment.
    pub(crate) fn is_used(&self, stag: u32, qp: u32) -> bool {
        let mut busy = self.readers(qp);
        for _ in 0..MOMENT {
            busy.retain(|r| r.uses(stag));
            if busy.is_empty() {
                return false;
            }
            std::hint::spin_loop();
        }
        true
    }

    /// Cuts off the peers that use a retracted `STag`.
    pub(crate) fn cut_off_users(&self, stag: u32, qp: u32) {
        let readers = self.readers(qp).into_iter();
        readers.filter(|r| r.uses(stag)).for_each(|r| r.cut_off());
    }

    /// Cuts off the peers that were told to fetch bytes of this range.
    pub(crate) fn cut_off_borrowers(&self, place: ExportAddr, len: u64) {
        let readers = self.readers(0).into_iter();
        readers
            .filter(|r| r.borrows(place, len))
            .for_each(|r| r.cut_off());
    }

    /// A window for this queue pair was retracted: says whether it is still used. Then its region is kept, see [`Self::is_overdue`].
    pub(crate) fn keep_if_used(&self, stag: u32, qp: u32, region: Arc<dyn Memory>) -> bool {
        let used = self.is_used(stag, qp);
        if used {
            lock(&self.overdue).push(Overdue {
                stag,
                qp,
                since: Instant::now(),
                region: (!region.is_lent()).then_some(region),
            });
        }
        used
    }

    /// Whether a kept window is still in use. Releases all unused ones, and cuts off peers that have used one for too long.
    ///
    /// There are few of them, because each peer uses one `STag` at a time.
    pub(crate) fn is_overdue(&self, stag: u32) -> bool {
        let kept = lock(&self.overdue);
        let mut over: Vec<_> = kept.iter().map(|w| (w.stag, w.qp, w.since)).collect();
        drop(kept);
        over.retain(|&(stag, qp, since)| {
            let used = self.is_used(stag, qp);
            let late = used && since.elapsed() >= PEER_LIMIT;
            if late {
                self.cut_off_users(stag, qp);
            }
            late || !used
        });
        let mut kept = lock(&self.overdue);
        let (gone, still): (Vec<_>, _) = std::mem::take(&mut *kept)
            .into_iter()
            .partition(|w| over.contains(&(w.stag, w.qp, w.since)));
        *kept = still;
        let found = kept.iter().any(|w| w.stag == stag);
        drop(kept);
        // Memory is freed without the lock.
        drop(gone);
        found
    }

    /// New memory for a region with these rights.
    pub(crate) fn lend(self: &Arc<Domain>, len: usize, access: Access) -> io::Result<Lent> {
        let space = if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC) {
            RW
        } else if access.contains(Access::REMOTE_READ) {
            RO
        } else {
            PRIVATE
        };
        let arena = self.arena(space);
        let room = (len as u64).checked_next_multiple_of(ALIGN);
        let room = room.ok_or(io::ErrorKind::OutOfMemory)?;
        let offset = arena
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                next.checked_add(room).filter(|&end| end <= ARENA)
            })
            .map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Lent {
            mapping: Some(Mapping::new(&arena.fd, offset, len, true)?),
            place: ExportAddr {
                space,
                addr: offset,
            },
            domain: self.clone(),
        })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if self.is_ours() {
            self.words().end();
        }
        // No peer is left to query, but one may still finish its last operation.
        std::mem::forget(std::mem::take(&mut *lock(&self.overdue)));
    }
}

impl std::fmt::Debug for Domain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Domain")
            .field("id", &format_args!("{:032x}", u128::from_be_bytes(self.id)))
            .finish_non_exhaustive()
    }
}

/// Memory of an arena, given back on drop.
pub(crate) struct Lent {
    /// `None` only while it is dropped.
    mapping: Option<Mapping>,
    pub(crate) place: ExportAddr,
    domain: Arc<Domain>,
}

impl Lent {
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        let mapping = self.mapping.as_ref();
        mapping.map_or(std::ptr::null_mut(), Mapping::as_ptr)
    }

    /// The arena, in which its bytes are from `place.addr` on.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.domain.arena(self.place.space).fd.as_fd()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(len) = self.mapping.take().map(|m| m.len() as u64) else {
            return;
        };
        // A child of fork ends its own mapping only.
        if self.domain.is_ours() {
            let room = len.next_multiple_of(ALIGN);
            // A failure leaves memory in use, and nothing else.
            let _ = memfd::punch(
                &self.domain.arena(self.place.space).fd,
                self.place.addr,
                room,
            );
        }
    }
}
