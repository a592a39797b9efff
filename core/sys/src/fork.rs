//! An object of which a process has one, created at its first use, and created again in a forked child, because threads do not survive a
//! fork; and descriptors that a forked child does not get.
//!
//! # Safety
//!
//! Slots are leaked before they are published, so references to them stay valid. The handler of a fork does system calls on numbers, nothing else.

use std::io;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

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
/// What a child gets in their place.
static INSTEAD: OnceLock<i32> = OnceLock::new();

/// A descriptor that children of this process do not get, also those that run no other program: what is bound to it ends with this process. A child has
/// the number, and something useless behind it. Dropped before the descriptor is closed.
#[derive(Debug)]
pub struct Withheld(usize);

/// Withholds a descriptor from children.
///
/// # Errors
/// Those of making a descriptor; `OutOfMemory` if there are too many.
pub fn withhold(fd: impl AsFd) -> io::Result<Withheld> {
    static MADE: Mutex<bool> = Mutex::new(false);
    {
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        if !*made {
            let instead = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
            let _ = INSTEAD.set(instead.into_raw_fd());
            // SAFETY: the handler only does system calls, and stays as long as the process.
            let done = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            if done != 0 {
                return Err(io::Error::from_raw_os_error(done));
            }
            *made = true;
        }
    }
    let number = fd.as_fd().as_raw_fd() + 1;
    let free = |place: &AtomicI32| {
        { place }
            .compare_exchange(0, number, Ordering::SeqCst, Ordering::Relaxed)
            .is_ok()
    };
    let place = WITHHELD.iter().position(free);
    place.map(Withheld).ok_or(io::ErrorKind::OutOfMemory.into())
}

/// The child has one thread, and may be in the middle of anything.
extern "C" fn in_child() {
    let Some(instead) = INSTEAD.get() else {
        return;
    };
    for place in &WITHHELD {
        let number = place.swap(0, Ordering::Relaxed) - 1;
        if number >= 0 {
            // SAFETY: both are numbers of descriptors; the owner of this one closes what is behind it now.
            unsafe { libc::syscall(libc::SYS_dup3, *instead, number, libc::O_CLOEXEC) };
        }
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        WITHHELD[self.0].store(0, Ordering::SeqCst);
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
}
