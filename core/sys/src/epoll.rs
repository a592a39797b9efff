//! Readiness of many descriptors.
//!
//! # Safety
//!
//! One `unsafe` call, because `epoll_pwait2` (time-outs finer than a millisecond) is not reached
//! through `rustix` without giving up older kernels.

use crate::timespec;
use rustix::event::epoll as ep;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

bitflags::bitflags! {
    /// The events to watch a descriptor for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Interest: u32 {
        /// A read would not block.
        const READ = 1;
        /// A write would not block.
        const WRITE = 2;
        /// One event, then silence until [`Epoll::modify`].
        const ONESHOT = 4;
        /// Report changes, not levels.
        const EDGE = 8;
        /// The peer has stopped sending, also if data of before waits.
        const PEER_CLOSED = 16;
    }
}

/// One descriptor's readiness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The value given to [`Epoll::add`].
    pub token: u64,
    /// A read will not block: data, end of stream or an error waits.
    pub readable: bool,
    /// A write will not block: there is room, or an error waits.
    pub writable: bool,
    /// Both directions are closed, or the descriptor has an error. A peer that only stopped
    /// sending shows as `readable`.
    pub hangup: bool,
}

/// An epoll instance.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

/// Events taken from the kernel in one call.
const BATCH: usize = 256;

static NO_PWAIT2: AtomicBool = AtomicBool::new(false);

fn flags(i: Interest) -> ep::EventFlags {
    let mut f = ep::EventFlags::empty();
    f.set(ep::EventFlags::IN, i.contains(Interest::READ));
    f.set(
        ep::EventFlags::RDHUP,
        i.intersects(Interest::READ | Interest::PEER_CLOSED),
    );
    f.set(ep::EventFlags::OUT, i.contains(Interest::WRITE));
    f.set(ep::EventFlags::ONESHOT, i.contains(Interest::ONESHOT));
    f.set(ep::EventFlags::ET, i.contains(Interest::EDGE));
    f
}

impl Epoll {
    /// A new instance, closed on exec.
    pub fn new() -> io::Result<Epoll> {
        Ok(Epoll(ep::create(ep::CreateFlags::CLOEXEC)?))
    }

    /// Starts watching a descriptor; its events carry `token`.
    ///
    /// # Errors
    /// `AlreadyExists` when it is watched already.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(ep::add(
            &self.0,
            fd,
            ep::EventData::new_u64(token),
            flags(interest),
        )?)
    }

    /// Changes the watched events (and re-arms `ONESHOT`).
    ///
    /// # Errors
    /// `NotFound` when the descriptor is not watched.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(ep::modify(
            &self.0,
            fd,
            ep::EventData::new_u64(token),
            flags(interest),
        )?)
    }

    /// Stops watching a descriptor.
    ///
    /// # Errors
    /// `NotFound` when it is not watched.
    pub fn delete(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(ep::delete(&self.0, fd)?)
    }

    /// Waits until something is ready, at most for `timeout` (to the nanosecond where the kernel
    /// has `epoll_pwait2`, else rounded up to milliseconds; `None` waits for ever). Replaces the
    /// content of `events`, at most 256 at a time. A signal ends the wait early with no events.
    pub fn wait(&self, events: &mut Vec<Event>, timeout: Option<Duration>) -> io::Result<()> {
        events.clear();
        let mut buf = [MaybeUninit::<libc::epoll_event>::uninit(); BATCH];
        let n = match self.wait_raw(&mut buf, timeout) {
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
            Err(e) => return Err(e),
        };
        events.extend(buf[..n].iter().map(|e| {
            // SAFETY: the kernel filled the first `n` entries.
            let e = unsafe { e.assume_init() };
            let has = |bits: libc::c_int| e.events & bits as u32 != 0;
            let hangup = has(libc::EPOLLHUP | libc::EPOLLERR);
            Event {
                token: e.u64,
                readable: hangup || has(libc::EPOLLIN | libc::EPOLLRDHUP),
                writable: hangup || has(libc::EPOLLOUT),
                hangup,
            }
        }));
        Ok(())
    }

    fn wait_raw(
        &self,
        buf: &mut [MaybeUninit<libc::epoll_event>],
        timeout: Option<Duration>,
    ) -> io::Result<usize> {
        let fd = self.0.as_raw_fd();
        if let Some(d) = timeout
            && d.subsec_nanos() % 1_000_000 != 0
            && !NO_PWAIT2.load(Ordering::Relaxed)
        {
            let ts = timespec(d);
            // SAFETY: `buf` has room for as many events as it says; `ts` has the layout of the
            // kernel's 64-bit timespec; no signal mask is given.
            let n = unsafe {
                libc::syscall(
                    libc::SYS_epoll_pwait2,
                    fd,
                    buf.as_mut_ptr(),
                    buf.len(),
                    &raw const ts,
                    std::ptr::null::<u8>(),
                    0_usize,
                )
            };
            if n >= 0 {
                return Ok(n as usize);
            }
            let e = io::Error::last_os_error();
            // Old kernels do not have the call, and some sandboxes forbid unknown calls.
            if !matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) {
                return Err(e);
            }
            NO_PWAIT2.store(true, Ordering::Relaxed);
        }
        let ms = timeout.map_or(-1, |d| {
            i32::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
        });
        // SAFETY: as above.
        let n = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait,
                fd,
                buf.as_mut_ptr(),
                buf.len(),
                ms,
                std::ptr::null::<u8>(),
                0_usize,
            )
        };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(n as usize)
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
