//! Readiness of a few descriptors, without setting anything up.

use crate::{Interest, timespec};
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Waits until one of up to 64 descriptors is ready, has an error or is closed, at most for
/// `timeout` (`None`: for ever). Bit *i* of the answer stands for `fds[i]`; 0 means time-out.
/// Only `READ`, `WRITE` and `PEER_CLOSED` count.
///
/// # Errors
/// `Interrupted` when a signal's handler ran, also under `SA_RESTART`; `InvalidInput` for more than
/// 64 descriptors.
pub fn poll_fds(fds: &[(BorrowedFd<'_>, Interest)], timeout: Option<Duration>) -> io::Result<u64> {
    if fds.len() > 64 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // The common case, a socket and an eventfd, needs no heap.
    let (mut few, mut many);
    let list: &mut [PollFd<'_>] = if let [a, b] = fds {
        few = [entry(a), entry(b)];
        &mut few
    } else {
        many = fds.iter().map(entry).collect::<Vec<_>>();
        &mut many
    };
    poll(list, timeout.map(timespec).as_ref())?;
    Ok(list
        .iter()
        .enumerate()
        .filter(|(_, p)| !p.revents().is_empty())
        .fold(0, |bits, (i, _)| bits | 1 << i))
}

#[allow(clippy::trivially_copy_pass_by_ref)] // it maps over a slice
fn entry<'fd>(&(fd, interest): &(BorrowedFd<'fd>, Interest)) -> PollFd<'fd> {
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, interest.contains(Interest::READ));
    flags.set(PollFlags::OUT, interest.contains(Interest::WRITE));
    flags.set(PollFlags::RDHUP, interest.contains(Interest::PEER_CLOSED));
    PollFd::from_borrowed_fd(fd, flags)
}
