//! What a protection domain shows to peers of this host.
//!
//! # Safety
//!
//! The table's mapping lives as long as its [`Domain`] and is reached through atomics only. The arenas' bytes are
//! registered memory like any other.

use crate::Access;
use crate::export::{self, Entry, Words};
use crate::region::{DEREGISTER_WAIT, Registered};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use weft_sys::memfd::{self, Mapping};
use weft_sys::process::Birthmark;

/// Bytes of an arena; all but those in use are a hole.
const ARENA: u64 = 1 << 46;
/// Regions begin at multiples of this, whatever the page size.
const ALIGN: u64 = 1 << 16;

/// The arena of regions that peers may change.
pub(crate) const RW: u32 = 1;
/// The arena of regions that peers may read.
const RO: u32 = 2;
/// The arena of regions that peers may not reach by themselves.
const PRIVATE: u32 = 3;

/// Where a byte is, for a peer of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// 0: the process's address space; 1, 2, 3: the domain's arenas of memory that peers may write, may read, may not reach.
    pub space: u32,
    /// An address of the process, or an offset in the arena.
    pub addr: u64,
}

/// A peer that may reach a domain's memory by itself.
pub trait Reader: Send + Sync {
    /// Whether it says just now that it is using this `STag`. False for a peer that is gone.
    fn uses(&self, stag: u32) -> bool;
}

/// What a protection domain shows to peers on this host: its `STag`s in a table that they can read, and three
/// *arenas*, files of memory in which [`crate::Backing::Shared`] regions lie.
///
/// An arena's offsets are never used twice, so a peer that is late writes into a hole.
///
/// Hold it as long as a peer has its descriptors: with the last hold (of this or of a shared region) the
/// table is declared void.
pub struct Domain {
    id: [u8; 16],
    /// Children of `fork` share the files, but must not act on them.
    process: Birthmark,
    table: OwnedFd,
    words: Mapping,
    /// Held while the table is written.
    writer: Mutex<()>,
    rw: Arena,
    ro: Arena,
    private: Arena,
    readers: Mutex<Vec<Weak<dyn Reader>>>,
    /// Windows' `STag`s that a peer went on using after their owner had waited, and the memory that must stay for it.
    overdue: Mutex<Vec<(u32, Arc<Registered>)>>,
}

struct Arena {
    fd: OwnedFd,
    /// What peers get, where they may only read.
    shown: Option<OwnedFd>,
    next: AtomicU64,
}

impl Arena {
    fn new(name: &str, writable: bool) -> io::Result<Arena> {
        let fd = memfd::create(name, ARENA)?;
        let shown = memfd::reader(&fd)?;
        Ok(Arena {
            shown: (!writable).then_some(shown),
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
    /// An empty one.
    ///
    /// # Errors
    /// `Unsupported` and those of the system calls, where memory files are not to be had: an old
    /// kernel, no `/proc`, `RLIMIT_FSIZE`, too many open files.
    pub(crate) fn new() -> io::Result<Domain> {
        if cfg!(miri) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|e| io::Error::other(e.to_string()))?;
        let (table, words) = memfd::create_owned("weft-stags", export::BYTES)?;
        let domain = Domain {
            id,
            process: Birthmark::new()?,
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

    /// Whether this process made it, and not its parent.
    pub(crate) fn is_ours(&self) -> bool {
        self.process.is_here()
    }

    /// Its random name.
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// The descriptors for a peer, in the order that [`crate::Peer::open`] wants them: table, the arenas that peers may write
    /// and read, and, for a `trusted` one (that could trace this process anyway), that of memory without remote rights.
    ///
    /// Only the second lets its holder write; [`memfd::reader`] says how far that goes.
    pub fn fds(&self, trusted: bool) -> Vec<BorrowedFd<'_>> {
        let mut fds = vec![self.table.as_fd(), self.rw.shown(), self.ro.shown()];
        fds.extend(trusted.then(|| self.private.shown()));
        fds
    }

    /// Adds a peer that has the descriptors. It is asked whenever an `STag` becomes invalid, until it is dropped; the thread
    /// that asks holds no lock of this crate.
    pub fn add_reader(&self, reader: Weak<dyn Reader>) {
        let mut readers = lock(&self.readers);
        readers.retain(|r| r.strong_count() != 0);
        readers.push(reader);
    }

    /// Shows an entry, if it is of use to peers and has room.
    pub(crate) fn publish(&self, entry: &Entry) {
        let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if entry.rights.intersects(remote) && entry.len != 0 {
            let _one = lock(&self.writer);
            self.words().publish(entry);
        }
    }

    /// Hides an entry. Peers may still be using it: see [`Self::settle`].
    pub(crate) fn retract(&self, stag: u32) {
        let _one = lock(&self.writer);
        self.words().retract(stag);
    }

    /// Waits until no peer uses a retracted `STag`, at most until `deadline`; says whether that is so.
    pub(crate) fn settle(&self, stag: u32, deadline: Option<Instant>) -> bool {
        // Readers may do anything when they are dropped, so not under the lock.
        let mut busy: Vec<_> = lock(&self.readers)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        let mut rounds = 0_u32;
        loop {
            busy.retain(|r| r.uses(stag));
            if busy.is_empty() {
                return true;
            }
            rounds += 1;
            if rounds < 64 {
                std::hint::spin_loop();
            } else if rounds < 128 {
                weft_sys::thread::sched_yield();
            } else if deadline.is_some_and(|d| Instant::now() >= d) {
                return false;
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Waits for peers that use a window which was retracted. A region that they go on using is kept.
    pub(crate) fn settle_window(&self, stag: u32, region: Arc<Registered>) -> bool {
        let settled = self.settle(stag, Some(Instant::now() + DEREGISTER_WAIT));
        // A late write to an arena goes into a hole.
        if !settled && !region.is_lent() {
            lock(&self.overdue).push((stag, region));
        }
        settled
    }

    /// Waits for peers that still used a region through windows when these went, until `deadline`. Lets
    /// go of other regions that were kept for peers, and are not used any more.
    pub(crate) fn settle_overdue(&self, region: &Arc<Registered>, deadline: Option<Instant>) {
        let kept = std::mem::take(&mut *lock(&self.overdue));
        let now = Some(Instant::now());
        let still: Vec<_> = kept
            .into_iter()
            .filter(|(stag, r)| {
                let until = if Arc::ptr_eq(r, region) {
                    deadline
                } else {
                    now
                };
                !self.settle(*stag, until)
            })
            .collect();
        lock(&self.overdue).extend(still);
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
            place: Place {
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
        // Whoever used them may do so yet.
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
    pub(crate) place: Place,
    domain: Arc<Domain>,
}

impl Lent {
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        let mapping = self.mapping.as_ref();
        mapping.map_or(std::ptr::null_mut(), Mapping::as_ptr)
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
