//! Readiness of a few descriptors, without setting anything up.

use crate::{Interest, timespec};
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Waits until one of up to 64 descriptors is ready, has an error or is closed, at most for
/// `timeout` (`None`: for ever). Bit *i* of the answer stands for `fds[i]`; 0 means time-out or a
/// signal. Only `READ` and `WRITE` count.
///
/// # Errors
/// `InvalidInput` for more than 64 descriptors.
pub fn poll_fds(fds: &[(BorrowedFd<'_>, Interest)], timeout: Option<Duration>) -> io::Result<u64> {
    if fds.len() > 64 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut list = Vec::with_capacity(fds.len());
    for (fd, interest) in fds {
        let mut f = PollFlags::empty();
        f.set(PollFlags::IN, interest.contains(Interest::READ));
        f.set(PollFlags::OUT, interest.contains(Interest::WRITE));
        list.push(PollFd::from_borrowed_fd(*fd, f));
    }
    match poll(&mut list, timeout.map(timespec).as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(0),
        Err(e) => return Err(e.into()),
    }
    Ok(list
        .iter()
        .enumerate()
        .filter(|(_, p)| !p.revents().is_empty())
        .fold(0, |bits, (i, _)| bits | 1 << i))
}
