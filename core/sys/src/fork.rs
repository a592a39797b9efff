//! An object of which a process has one, created at its first use, and created again in a forked child, because threads do not survive a
//! fork; and descriptors that a forked child does not get.
//!
//! # Safety
//!
//! Slots are leaked before they are published, so references to them stay valid. The handler of a fork does system calls on numbers, nothing else.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// One `T` per process, for a `static`. If a child is forked while another thread of the parent creates the parent's object, the child does not wait
/// for it: locks belong to a process as well.
pub struct PerProcess<T>(AtomicPtr<Slot<T>>);

struct Slot<T> {
    process: u32,
    it: Mutex<Option<Arc<T>>>,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// Nothing is made yet.
    #[must_use]
    pub const fn new() -> Self {
        PerProcess(AtomicPtr::new(null_mut()))
    }

    /// The one of this process; the first caller makes it while others wait, and after a failure the next one tries again. A parent's is left alone:
    /// descriptors in it are shared with the parent.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get<E>(&'static self, make: impl FnOnce() -> Result<Arc<T>, E>) -> Result<Arc<T>, E> {
        let mut it = self
            .slot()
            .it
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(it) = &*it {
            return Ok(Arc::clone(it));
        }
        let made = make()?;
        Ok(Arc::clone(it.insert(made)))
    }

    fn slot(&'static self) -> &'static Slot<T> {
        let process = std::process::id();
        let mut seen = self.0.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or leaked before it was stored.
            if let Some(slot) = unsafe { seen.as_ref() }
                && slot.process == process
            {
                return slot;
            }
            let ours = Box::into_raw(Box::new(Slot {
                process,
                it: Mutex::new(None),
            }));
            let swap = self
                .0
                .compare_exchange(seen, ours, Ordering::AcqRel, Ordering::Acquire);
            match swap {
                // SAFETY: stored and leaked just now.
                Ok(_) => return unsafe { &*ours },
                Err(other) => {
                    // SAFETY: no other thread has seen it.
                    drop(unsafe { Box::from_raw(ours) });
                    seen = other;
                }
            }
        }
    }
}

impl<T: Send + Sync + 'static> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Most descriptors that are withheld at once.
const MOST: usize = 1024;
/// Their numbers plus one, in any order; 0 is a free place.
static WITHHELD: [AtomicI32; MOST] = [const { AtomicI32::new(0) }; MOST];
/// What a child gets in their place, plus one; 0 before the first one is withheld.
static INSTEAD: AtomicI32 = AtomicI32::new(0);

/// A descriptor that children of this process do not get, also those that run no other program: what is bound to it ends with this process. A child has
/// the number, and something useless behind it. Dropped right before the descriptor is closed, and after its last use: what is bound to it is let go then,
/// so that no child can get it in between.
#[derive(Debug)]
pub struct Withheld {
    place: usize,
    number: i32,
}

/// Withholds a descriptor from children. A socket is withheld before it is bound, or a child that is forked in between has what it is bound to.
///
/// # Errors
/// Those of making a descriptor; `OutOfMemory` if there are too many.
pub fn withhold(fd: impl AsFd) -> io::Result<Withheld> {
    prepare()?;
    let number = fd.as_fd().as_raw_fd() + 1;
    let free = |place: &AtomicI32| {
        { place }
            .compare_exchange(0, number, Ordering::SeqCst, Ordering::Relaxed)
            .is_ok()
    };
    let place = WITHHELD.iter().position(free);
    let place = place.ok_or(io::ErrorKind::OutOfMemory)?;
    Ok(Withheld { place, number })
}

/// Makes what a child gets, and has each fork handled. There is no lock, which a child could inherit: a handler that is there twice does no harm.
fn prepare() -> io::Result<()> {
    static HANDLED: AtomicBool = AtomicBool::new(false);
    if HANDLED.load(Ordering::Acquire) {
        return Ok(());
    }
    let instead = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
    let number = instead.as_raw_fd() + 1;
    let first = INSTEAD.compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire);
    if first.is_ok() {
        let _ = instead.into_raw_fd();
    }
    // SAFETY: the handler only does system calls, and stays as long as the process.
    let done = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if done != 0 {
        return Err(io::Error::from_raw_os_error(done));
    }
    HANDLED.store(true, Ordering::Release);
    Ok(())
}

/// Puts something useless behind the number of a descriptor.
fn replace(number: i32) {
    let instead = INSTEAD.load(Ordering::Acquire) - 1;
    if instead >= 0 && number >= 0 {
        // SAFETY: both are numbers of descriptors; the owner of this one closes what is behind it now.
        unsafe { libc::syscall(libc::SYS_dup3, instead, number, libc::O_CLOEXEC) };
    }
}

/// The child has one thread, and may be in the middle of anything.
extern "C" fn in_child() {
    for place in &WITHHELD {
        replace(place.swap(0, Ordering::Relaxed) - 1);
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        let place = &WITHHELD[self.place];
        // In a child it has been replaced, and the place may be another one's.
        if place.load(Ordering::SeqCst) == self.number {
            replace(self.number - 1);
            let _ = place.compare_exchange(self.number, 0, Ordering::SeqCst, Ordering::Relaxed);
        }
    }
}

/// A descriptor that is withheld from children as long as it lives.
#[derive(Debug)]
pub struct PrivateFd {
    withheld: Option<Withheld>,
    fd: OwnedFd,
}

impl PrivateFd {
    /// Takes it in. If there are too many, it is not withheld.
    #[must_use]
    pub fn new(fd: OwnedFd) -> PrivateFd {
        PrivateFd {
            withheld: withhold(&fd).ok(),
            fd,
        }
    }

    /// Whether children do not get it.
    #[must_use]
    pub fn is_withheld(&self) -> bool {
        self.withheld.is_some()
    }
}

impl AsFd for PrivateFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn is_made_once_and_tried_again_after_a_failure() {
        static ONE: PerProcess<u32> = PerProcess::new();
        assert_eq!(ONE.get(|| Err("not now")), Err("not now"));
        let made = ONE.get(|| Ok::<_, ()>(Arc::new(7))).unwrap();
        let again = ONE.get(|| Err("not asked for")).unwrap();
        assert!(Arc::ptr_eq(&made, &again));
    }

    #[test]
    fn a_child_does_not_get_what_is_withheld() {
        let (ours, other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let withheld = withhold(&ours).expect("a place");
        // SAFETY: the child only sleeps and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                libc::pause();
                libc::_exit(0);
            }
        }
        drop(withheld);
        drop(ours);
        // The end of the stream comes although the child lives.
        let end = std::io::Read::read(&mut &other, &mut [0; 1]);
        // SAFETY: a child of ours.
        unsafe { libc::kill(child, libc::SIGKILL) };
        assert_eq!(end.expect("the end"), 0);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::waitpid(child, null_mut(), 0) }, child);
    }

    /// A child that is forked between both gets something useless.
    #[test]
    fn what_is_withheld_is_let_go_before_its_place_is() {
        let (ours, other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let withheld = withhold(&ours).expect("a place");
        let (place, number) = (withheld.place, withheld.number);
        drop(withheld);
        let end = std::io::Read::read(&mut &other, &mut [0; 1]);
        assert_eq!(end.expect("the end"), 0);
        // The number is open still: nobody else can have withheld it.
        assert_ne!(WITHHELD[place].load(Ordering::SeqCst), number);
        drop(ours);
    }
}
