//! Whether a peer's address space is still that of the process at the handshake.
//!
//! A process number says little: its process may have ended and another got the number, or the same
//! process may run another program since `exec`. But the kernel, when a thread ends or calls `exec`,
//! marks each robust futex that it holds (`FUTEX_OWNER_DIED`), and does so before the number can be
//! used again. So a process shows a page with a robust mutex that it never lets go of, and a
//! peer that looks at one word knows.
//!
//! # Safety
//!
//! The mutex lives in a shared page that only its maker can write (`F_SEAL_FUTURE_WRITE`); others read
//! its first word through an atomic. It is locked once, by the thread that made it, and never
//! contended.

use crate::memfd::{Mapping, check, create_owned};
use rustix::thread::gettid;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};

const PAGE: usize = 4096;
/// The kernel's bits of a futex word: there is a waiter; the owner died; the owner's thread number.
const OWNER_DIED: u32 = 0x4000_0000;
const TID: u32 = 0x3fff_ffff;

fn word(page: &Mapping) -> &AtomicU32 {
    // SAFETY: a mapping starts on a page and is never empty, lives as long as the reference, and
    // nobody has a plain reference to its bytes.
    unsafe { AtomicU32::from_ptr(page.as_ptr().cast()) }
}

/// The word of a page that is mapped for reading only: there only relaxed loads are certain to be plain ones (see `std::sync::atomic` on
/// read-only memory), so a fence makes the order.
#[inline]
fn look(page: &Mapping) -> u32 {
    let value = word(page).load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}

/// A robust mutex in a page of its own, held by the thread that made it until it is dropped, or the thread or
/// its address space ends. Children of a `fork` neither hold it nor stop it.
///
/// The thread must not call `exec` itself, unless it is the process's first: at `exec` the kernel gives the
/// calling thread the number of the first one before it looks for robust futexes, and then does not know
/// this one as held. (Threads that end because another one calls `exec` are no trouble.)
pub struct Liveness {
    fd: OwnedFd,
    page: Mapping,
    /// Only the thread that locked the mutex may unlock it.
    _here: PhantomData<*const ()>,
}

impl Liveness {
    /// Starts one for the calling thread.
    ///
    /// # Errors
    /// Those of making a memory file; `Unsupported` when the C library's mutex is not what we take it for.
    pub fn start() -> io::Result<Liveness> {
        const _: () = assert!(size_of::<libc::pthread_mutex_t>() <= PAGE);
        let (fd, page) = create_owned("weft-liveness", PAGE)?;
        #[allow(clippy::cast_ptr_alignment)] // a page is aligned for all
        let mutex = page.as_ptr().cast::<libc::pthread_mutex_t>();
        let check = |rc: libc::c_int| match rc {
            0 => Ok(()),
            e => Err(io::Error::from_raw_os_error(e)),
        };
        // SAFETY: the page is aligned for a mutex, large enough, and ours alone; the attributes are made
        // before they are used.
        unsafe {
            let mut attr: libc::pthread_mutexattr_t = std::mem::zeroed();
            check(libc::pthread_mutexattr_init(&raw mut attr))?;
            let made = check(libc::pthread_mutexattr_setpshared(
                &raw mut attr,
                libc::PTHREAD_PROCESS_SHARED,
            ))
            .and_then(|()| {
                check(libc::pthread_mutexattr_setrobust(
                    &raw mut attr,
                    libc::PTHREAD_MUTEX_ROBUST,
                ))
            })
            .and_then(|()| check(libc::pthread_mutex_init(mutex, &raw const attr)));
            libc::pthread_mutexattr_destroy(&raw mut attr);
            made?;
            check(libc::pthread_mutex_lock(mutex))?;
        }
        let liveness = Liveness {
            fd,
            page,
            _here: PhantomData,
        };
        let me = gettid().as_raw_nonzero().get() as u32;
        if word(&liveness.page).load(Ordering::Relaxed) & TID != me {
            // The mutex is on the thread's list of robust ones, so its page must stay.
            std::mem::forget(liveness);
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(liveness)
    }

    /// For a peer's [`PeerLiveness::open`]; the descriptor does not allow writing.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Liveness {
    fn drop(&mut self) {
        let me = gettid().as_raw_nonzero().get() as u32;
        // A child of fork has the guard, but not the lock.
        if word(&self.page).load(Ordering::Relaxed) & TID == me {
            // SAFETY: locked by this very thread, which takes it off the list of the kernel before the page goes.
            unsafe { libc::pthread_mutex_unlock(self.page.as_ptr().cast()) };
        }
    }
}

/// A peer's [`Liveness`], to look at.
#[derive(Debug)]
pub struct PeerLiveness {
    page: Mapping,
    owner: u32,
}

impl PeerLiveness {
    /// Looks at a peer's liveness for the first time.
    ///
    /// # Errors
    /// `InvalidData` when it is no sealed memory file of a page, `NotConnected` when it does not beat.
    pub fn open(fd: impl AsFd) -> io::Result<PeerLiveness> {
        if check(&fd)? < PAGE as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let page = Mapping::new(fd, 0, PAGE, false)?;
        let owner = look(&page);
        if owner & OWNER_DIED != 0 || owner & TID == 0 {
            return Err(io::ErrorKind::NotConnected.into());
        }
        Ok(PeerLiveness {
            page,
            owner: owner & TID,
        })
    }

    /// Whether the thread that started it still runs in the same address space.
    #[inline]
    pub fn beats(&self) -> bool {
        let now = look(&self.page);
        now & OWNER_DIED == 0 && now & TID == self.owner
    }
}
