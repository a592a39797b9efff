//! Shared mappings of this process only, and all their addresses in it.
//!
//! Another process with the memory could write to it while it is sent, and our handler would not see it. The kernel does not report which processes
//! have a file mapped. So only anonymous memory that this process has mapped since its last fork is accepted, because another process can get it by
//! inheritance only. The user may also declare that no other process writes ([`trust_others`]).

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::mapping::{self, Object, Part};
use super::{ALIASES, FREE, PHASE, Refused, SignalsBlocked, Zone, in_use, is_here};

/// Objects that are known, at most; older ones are forgotten.
const MOST: usize = 64;

/// Inodes of anonymous memory that this process has made since its last fork; 0: none. They are all of one device.
static OWN: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// One more than that device's number.
static DEVICE: AtomicU64 = AtomicU64::new(0);
/// Forks that have begun, and those that are over.
static BEGUN: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicU64 = AtomicU64::new(0);
static TRUST: AtomicBool = AtomicBool::new(false);

fn device(object: &Object) -> u64 {
    (u64::from(object.device.0) << 32 | u64::from(object.device.1)) + 1
}

/// No other process writes to shared memory while it is sent from here, nor does this one by a descriptor: the user says so.
pub fn trust_others() {
    TRUST.store(true, Ordering::SeqCst);
}

/// See [`made_shared`](super::made_shared).
pub(super) fn made(make: impl FnOnce() -> Option<*const u8>) {
    let begun = BEGUN.load(Ordering::SeqCst);
    let quiet = ENDED.load(Ordering::SeqCst) == begun;
    let object = make().and_then(|at| mapping::object_at(at.addr()));
    let Some(object) = object.filter(|_| quiet) else {
        return;
    };
    let known = DEVICE.compare_exchange(0, device(&object), Ordering::SeqCst, Ordering::SeqCst);
    if known.is_err_and(|known| known != device(&object)) {
        return;
    }
    let slot = &OWN[NEXT.fetch_add(1, Ordering::Relaxed) % MOST];
    slot.store(object.inode, Ordering::SeqCst);
    if BEGUN.load(Ordering::SeqCst) != begun {
        // A child may have it.
        let _ = slot.compare_exchange(object.inode, 0, Ordering::SeqCst, Ordering::SeqCst);
    }
}

fn is_own(object: &Object) -> bool {
    let is = |slot: &AtomicU64| slot.load(Ordering::SeqCst) == object.inode;
    DEVICE.load(Ordering::SeqCst) == device(object) && OWN.iter().any(is)
}

/// Whether no other process writes to it.
pub(super) fn allowed(part: &Part) -> Result<(), Refused> {
    if TRUST.load(Ordering::SeqCst) || is_own(&part.object) {
        return Ok(());
    }
    Err(Refused::Shared)
}

/// Finds the other addresses of the memory that a zone is about to protect. Its state is visible to other threads already, so a fork that has
/// begun before is detected here.
pub(super) fn enter(part: &Part, zone: &Zone) -> Result<(), Refused> {
    allowed(part)?;
    let mut n = 0;
    mapping::aliases(part, zone.range().0, |start, end| {
        let (from, to) = zone.aliases.get(n).ok_or(Refused::Shared)?;
        from.store(start, Ordering::Release);
        to.store(end, Ordering::Release);
        n += 1;
        Ok(())
    })?;
    debug_assert!(n <= ALIASES);
    Ok(())
}

/// Waits until nothing of shared mappings is on its way, and makes them writable: to be called after a call that may have given one another name, before
/// the program has it.
pub fn settle_shared() {
    if !is_here() {
        return;
    }
    for zone in in_use() {
        let state = zone.state.load(Ordering::SeqCst);
        if state & PHASE != FREE && zone.shared.load(Ordering::SeqCst) {
            let _blocked = SignalsBlocked::new();
            zone.resolve(state);
        }
    }
}

/// The process is about to fork: its memory is no longer private. Nothing of it is in flight afterwards, until [`end_sharing`].
pub fn begin_sharing() {
    BEGUN.fetch_add(1, Ordering::SeqCst);
    for slot in &OWN {
        slot.store(0, Ordering::SeqCst);
    }
    settle_shared();
}

/// In the parent, after the fork.
pub fn end_sharing() {
    ENDED.fetch_add(1, Ordering::SeqCst);
}

/// In the child: forks of the parent's other threads are not its own.
pub(super) fn in_child() {
    for slot in &OWN {
        slot.store(0, Ordering::SeqCst);
    }
    ENDED.store(BEGUN.load(Ordering::SeqCst), Ordering::SeqCst);
}
