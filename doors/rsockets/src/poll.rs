//! Waits for several sockets, and for system descriptors at the same time.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use weft_sockets::bell::{Bell, Heard};
use weft_sockets::wait::timespec;

/// A socket of either type.
pub trait Pollable {
    /// Its present readiness.
    fn ready(&self) -> PollFlags;
    /// A thread is about to sleep at its bell: from now on the engine drives the socket.
    fn arm(&self) -> Heard;
    /// The bell that rings when its state has changed.
    fn bell(&self) -> &Bell;
    /// Wait for this one alone: then this thread drives it. Nothing when there is nothing to drive.
    ///
    /// # Errors
    /// `EINTR`, inside.
    fn wait_ready(
        &self,
        wanted: PollFlags,
        deadline: Option<Instant>,
    ) -> Option<Result<PollFlags, Errno>>;
}

/// An object to wait for.
#[derive(Clone, Copy)]
pub enum What<'a> {
    /// A socket of this crate.
    Socket(&'a dyn Pollable),
    /// A descriptor of the system.
    Fd(BorrowedFd<'a>),
    /// A place that is left out.
    Nothing,
}

/// One of those that are waited for.
pub struct Entry<'a> {
    pub what: What<'a>,
    pub wanted: PollFlags,
    /// Its present readiness.
    pub ready: PollFlags,
}

/// Wait until something is ready, up to `timeout` (`None`: for ever); returns how many are.
///
/// # Errors
/// As `poll(2)`.
pub fn poll<'a>(entries: &mut [Entry<'a>], timeout: Option<Duration>) -> Result<usize, Errno> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let n = look(entries)?;
    if n > 0 || timeout == Some(Duration::ZERO) {
        return Ok(n);
    }
    if let [entry] = entries
        && let What::Socket(socket) = entry.what
        && let Some(waited) = socket.wait_ready(entry.wanted, deadline)
    {
        let ready = waited?;
        entry.ready = ready;
        return Ok(usize::from(!ready.is_empty()));
    }
    let arm = |entry: &Entry<'a>| match entry.what {
        What::Socket(socket) => Some((socket, socket.arm())),
        _ => None,
    };
    let mut bells: Vec<_> = entries.iter().filter_map(arm).collect();
    let result = sleep(entries, &mut bells, deadline);
    for (socket, heard) in bells {
        socket.bell().disarm(heard);
    }
    result
}

/// Everybody's readiness now.
fn look(entries: &mut [Entry<'_>]) -> Result<usize, Errno> {
    let mut ready = 0;
    let mut theirs = false;
    for entry in &mut *entries {
        entry.ready = match entry.what {
            What::Socket(socket) => {
                let always = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
                socket.ready() & (entry.wanted | always)
            }
            What::Fd(_) => {
                theirs = true;
                PollFlags::empty()
            }
            What::Nothing => PollFlags::empty(),
        };
        ready += usize::from(!entry.ready.is_empty());
    }
    if theirs {
        ready += system(entries, Some(Duration::ZERO), false)?;
    }
    Ok(ready)
}

fn sleep(
    entries: &mut [Entry<'_>],
    bells: &mut [(&dyn Pollable, Heard)],
    deadline: Option<Instant>,
) -> Result<usize, Errno> {
    loop {
        let n = look(entries)?;
        let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
        if n > 0 || left == Some(Duration::ZERO) {
            return Ok(n);
        }
        system(entries, left, true)?;
        for (socket, heard) in &mut *bells {
            socket.bell().hear(heard);
        }
    }
}

/// The system's `poll`: of its own descriptors, and with `bells` also of those that our sockets ring. Returns how many of its own are ready.
fn system(
    entries: &mut [Entry<'_>],
    timeout: Option<Duration>,
    bells: bool,
) -> Result<usize, Errno> {
    let mut places = Vec::with_capacity(entries.len());
    let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(entries.len());
    for (i, entry) in entries.iter().enumerate() {
        match entry.what {
            What::Fd(fd) => fds.push(PollFd::from_borrowed_fd(fd, entry.wanted)),
            What::Socket(socket) if bells => {
                fds.push(PollFd::new(socket.bell(), PollFlags::IN));
            }
            _ => continue,
        }
        places.push(i);
    }
    let timeout = timeout.map(timespec);
    rustix::event::poll(&mut fds, timeout.as_ref())?;
    let seen: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
    let mut ready = 0;
    for (place, revents) in places.into_iter().zip(seen) {
        if matches!(entries[place].what, What::Fd(_)) {
            entries[place].ready = revents;
            ready += usize::from(!revents.is_empty());
        }
    }
    Ok(ready)
}
