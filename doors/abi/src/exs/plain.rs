//! Asynchronous connects and accepts on kernel sockets: `exs_connect` and `exs_accept`.
//!
//! The layers below have no such operations, so a thread waits for each. Its event is the end of a poll on the *bell*, a connection of the process with
//! itself on which nothing ever arrives: the thread stores its result and cancels the poll. So the operation counts in its
//! queue from the beginning, is cancelled like any other, and only the library puts events into queues.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, PoisonError};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::sockopt;
use weft_exs::{Ready, Socket};

use super::closing::Done;
use super::helper::{Found, Helped, Shared};
use super::op::{Of, Op, What};
use super::region::Uses;
use super::started::QueueEntry;
use super::state::state;
use super::types::AHandle;
use crate::address;

type Fallible<T> = Result<T, Errno>;

/// A duplicate of the program's descriptor for the thread.
fn ours(fd: RawFd) -> Fallible<OwnedFd> {
    // SAFETY: not kept; an invalid number gives EBADF.
    let theirs = unsafe { BorrowedFd::borrow_raw(fd) };
    if fd < 0 {
        return Err(Errno::BADF);
    }
    if sockopt::socket_type(theirs)? != rustix::net::SocketType::STREAM {
        return Err(Errno::OPNOTSUPP);
    }
    rustix::io::fcntl_dupfd_cloexec(theirs, 0)
}

/// Starts the operation, and a thread that runs `work`. The descriptor passed to `work` hangs up when the
/// operation is over, for example when it is cancelled.
fn help(
    fd: RawFd,
    what: What,
    queue: &QueueEntry,
    ahandle: AHandle,
    work: impl FnOnce(BorrowedFd<'_>) -> Option<Found> + Send + 'static,
) -> Fallible<()> {
    let bell = state().bell()?;
    let (over, alive) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let (found, ended) = (Shared::default(), Arc::new(Done::default()));
    let op = Op {
        fd,
        ahandle,
        of: Of::Helper(Helped {
            bell: bell.clone(),
            found: Arc::clone(&found),
            alive: Some(alive),
            ended: Arc::clone(&ended),
        }),
        what,
        uses: Uses::new(),
        limited: [false; 2],
    };
    let token = queue.start(op, |sink| {
        bell.poll(Ready::IN, sink).inspect_err(|_| ended.set())
    })?;
    let end = End {
        bell,
        token,
        found: Some(Found::Failed(Errno::AGAIN)),
        shared: found,
        ended,
    };
    // If the thread cannot be started, the closure is dropped, which ends the operation with the error.
    let _ = std::thread::Builder::new()
        .name("exs-connection".into())
        .spawn(move || {
            let mut end = end;
            end.found = Some(Found::Failed(Errno::IO)); // should it panic
            end.found = work(over.as_fd());
        });
    Ok(())
}

/// Stores the result and rings the bell on drop, even if the thread panics.
struct End {
    bell: Socket,
    token: u64,
    found: Option<Found>,
    shared: Shared,
    ended: Arc<Done>,
}

impl Drop for End {
    fn drop(&mut self) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        *shared = self.found.take();
        drop(shared);
        self.bell.cancel(Some(self.token));
        self.ended.set();
    }
}

/// Waits for the events `what` of the socket; `false` when the operation was cancelled.
fn wait(socket: BorrowedFd<'_>, what: PollFlags, bell: BorrowedFd<'_>) -> Fallible<bool> {
    let mut fds = [
        PollFd::from_borrowed_fd(socket, what),
        PollFd::from_borrowed_fd(bell, PollFlags::IN),
    ];
    loop {
        match rustix::event::poll(&mut fds, None) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
            Ok(_) => return Ok(fds[1].revents().is_empty()),
        }
    }
}

/// `exs_connect` on a kernel socket.
///
/// # Errors
/// The errors of `connect` that appear at once, among them `EISCONN`.
pub(super) fn connect(
    fd: RawFd,
    to: SocketAddr,
    queue: &QueueEntry,
    ahandle: AHandle,
) -> Fallible<()> {
    let socket = ours(fd)?;
    if rustix::net::getpeername(&socket).is_ok() {
        return Err(Errno::ISCONN);
    }
    help(fd, What::Connect, queue, ahandle, move |bell| {
        // The flags are shared with the program's descriptor, so they are restored.
        let flags = match rustix::fs::fcntl_getfl(&socket) {
            Ok(flags) => flags,
            Err(errno) => return Some(Found::Connected(Err(errno))),
        };
        let result = rustix::fs::fcntl_setfl(&socket, flags | OFlags::NONBLOCK)
            .and_then(|()| rustix::net::connect(&socket, &to));
        let result = match result {
            Err(Errno::INPROGRESS) => match wait(socket.as_fd(), PollFlags::OUT, bell) {
                Ok(true) => sockopt::socket_error(&socket).and_then(|result| result),
                Ok(false) => Err(Errno::CANCELED),
                Err(errno) => Err(errno),
            },
            other => other,
        };
        let back = rustix::fs::fcntl_setfl(&socket, flags);
        Some(Found::Connected(result.and(back)))
    })
}

/// `exs_accept` on a listening kernel socket.
///
/// # Errors
/// `EINVAL` when the socket does not listen.
pub(super) fn accept(fd: RawFd, what: What, queue: &QueueEntry, ahandle: AHandle) -> Fallible<()> {
    let socket = ours(fd)?;
    if !sockopt::socket_acceptconn(&socket)? {
        return Err(Errno::INVAL);
    }
    help(fd, what, queue, ahandle, move |bell| {
        loop {
            match wait(socket.as_fd(), PollFlags::IN, bell) {
                Ok(true) => {}
                Ok(false) => return None,
                Err(errno) => return Some(Found::Accepted(Err(errno))),
            }
            if let Some(result) = accept_one(socket.as_fd()) {
                return Some(Found::Accepted(result));
            }
        }
    })
}

/// Accepts a connection if there still is one. Our threads take turns, so that none blocks in `accept` after another took its connection.
fn accept_one(listener: BorrowedFd<'_>) -> Option<Fallible<(OwnedFd, Option<SocketAddr>)>> {
    let _turn = state()
        .accepting
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let mut fds = [PollFd::from_borrowed_fd(listener, PollFlags::IN)];
    match rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())) {
        Ok(0) | Err(Errno::INTR) => return None,
        Ok(_) => {}
        Err(errno) => return Some(Err(errno)),
    }
    let mut addr = [0_u8; size_of::<libc::sockaddr_storage>()];
    let mut len = addr.len() as libc::socklen_t;
    // SAFETY: the address has the room that `len` states.
    let new = unsafe {
        crate::call::system(
            libc::SYS_accept4,
            [
                listener.as_raw_fd() as usize,
                addr.as_mut_ptr() as usize,
                &raw mut len as usize,
                libc::SOCK_CLOEXEC as usize,
                0,
                0,
            ],
        )
    };
    match new {
        // SAFETY: a new descriptor, owned by nobody else.
        Ok(new) => Some(Ok(unsafe {
            let fd = OwnedFd::from_raw_fd(new as RawFd);
            (fd, address::read(addr.as_ptr().cast(), len).ok())
        })),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => None,
        Err(errno) => Some(Err(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancelled_wait_ends() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let pair = || {
            socketpair(
                AddressFamily::UNIX,
                SocketType::STREAM,
                SocketFlags::CLOEXEC,
                None,
            )
            .unwrap()
        };
        let (quiet, _other) = pair();
        let (bell, cancelled) = pair();
        drop(cancelled);
        assert_eq!(wait(quiet.as_fd(), PollFlags::IN, bell.as_fd()), Ok(false));
        let (bell, _kept) = pair();
        assert_eq!(wait(quiet.as_fd(), PollFlags::OUT, bell.as_fd()), Ok(true));
    }
}
