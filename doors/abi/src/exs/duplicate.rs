//! `exs_sync_dup` and its like: several numbers of one socket.

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use rustix::io::Errno;
use weft_exs::Sink;

use super::closing::OneClosing;
use super::epoll::epoll_duplicated;
use super::socket::on_system;
use super::state::state;
use super::table::{Entry, Found};

/// `exs_sync_dup`
pub fn dup(fd: c_int) -> Result<c_int, Errno> {
    fcntl_dup(fd, libc::F_DUPFD, 0)
}

/// `F_DUPFD` and `F_DUPFD_CLOEXEC`: the least free number from `least` on.
pub(super) fn fcntl_dup(fd: c_int, cmd: c_int, least: usize) -> Result<c_int, Errno> {
    // SAFETY: no pointers.
    let by = |from| unsafe { on_system(libc::SYS_fcntl, from, &[cmd as usize, least]) };
    duplicate(fd, by)
}

/// `exs_sync_dup2`
pub fn dup2(fd: c_int, new: c_int) -> Result<c_int, Errno> {
    if fd == new {
        // SAFETY: no pointers; an invalid number gives EBADF.
        let flags = unsafe { on_system::<c_int>(libc::SYS_fcntl, fd, &[libc::F_GETFD as usize]) };
        return flags.map(|_| fd);
    }
    dup3(fd, new, 0)
}

/// `exs_sync_dup3`
pub fn dup3(fd: c_int, new: c_int, flags: c_int) -> Result<c_int, Errno> {
    if fd == new {
        return Err(Errno::INVAL);
    }
    // SAFETY: a number of the program's, which this call replaces.
    let by = |from| unsafe { on_system(libc::SYS_dup3, from, &[new as usize, flags as usize]) };
    duplicate(fd, by)
}

fn duplicate(fd: c_int, by: impl FnOnce(c_int) -> Result<c_int, Errno>) -> Result<c_int, Errno> {
    let state = state();
    // The number that the program has may be closed by it at any time; the socket's own stays.
    let entry = match state.sockets.find(fd)? {
        Found::Exs(entry) => Some(entry),
        Found::System => None,
    };
    let from = entry
        .as_ref()
        .map_or(fd, |entry| entry.socket.as_fd().as_raw_fd());
    let replaced = |old: &Arc<Entry>| {
        let closing = OneClosing::begin(&state.closing);
        // One that cannot be closed has nothing to deliver.
        let _ = old.socket.close(Sink::call(move |_| drop(closing)));
    };
    let new = state.sockets.duplicate(fd, || by(from), replaced)?;
    epoll_duplicated(fd, new);
    Ok(new)
}
