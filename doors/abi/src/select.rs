//! `poll` and `select` for our descriptors and those of the kernel together: the conversion around the actual wait.

use std::ffi::c_int;

use libc::{POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT, POLLPRI, fd_set, nfds_t, pollfd};
use rustix::io::Errno;
use smallvec::SmallVec;

/// The most descriptors of one call: no program has more open.
const MOST: usize = 1 << 20;

/// Lets `wait` fill in the ready conditions of the descriptors. Returns its result.
///
/// # Errors
/// `EINVAL`, `EFAULT`, and those of `wait`.
///
/// # Safety
/// As for `poll(2)`.
pub(crate) unsafe fn poll(
    fds: *mut pollfd,
    n: nfds_t,
    wait: impl FnOnce(&mut [pollfd]) -> Result<c_int, Errno>,
) -> Result<c_int, Errno> {
    let n = usize::try_from(n).map_err(|_| Errno::INVAL)?;
    if n > MOST {
        return Err(Errno::INVAL);
    }
    if fds.is_null() && n > 0 {
        return Err(Errno::FAULT);
    }
    // Copies, because another thread may access the originals.
    let mut wanted: SmallVec<[pollfd; 8]> = (0..n)
        // SAFETY: the caller's promise.
        .map(|i| unsafe { fds.add(i).read() })
        .collect();
    let count = wait(&mut wanted)?;
    for (i, fd) in wanted.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { (&raw mut (*fds.add(i)).revents).write(fd.revents) };
    }
    Ok(count)
}

/// Like [`poll`], for sets of descriptors. Returns the number of bits left in them.
///
/// # Errors
/// `EINVAL`, `EBADF`, and those of `wait`.
///
/// # Safety
/// As for `select(2)`.
pub(crate) unsafe fn select(
    n: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    wait: impl FnOnce(&mut [pollfd]) -> Result<c_int, Errno>,
) -> Result<c_int, Errno> {
    if !usize::try_from(n).is_ok_and(|n| n <= libc::FD_SETSIZE) {
        return Err(Errno::INVAL);
    }
    let sets = [
        (read, POLLIN, POLLIN | POLLHUP | POLLERR),
        (write, POLLOUT, POLLOUT | POLLERR),
        (except, POLLPRI, POLLPRI),
    ];
    let mut fds: SmallVec<[pollfd; 8]> = SmallVec::new();
    for fd in 0..n {
        let mut events = 0;
        for (set, event, _) in sets {
            // SAFETY: null, or the caller's set, and `fd` is in its range.
            if !set.is_null() && unsafe { libc::FD_ISSET(fd, set) } {
                events |= event;
            }
        }
        if events != 0 {
            fds.push(pollfd {
                fd,
                events,
                revents: 0,
            });
        }
    }
    wait(&mut fds)?;
    if fds.iter().any(|fd| fd.revents & POLLNVAL != 0) {
        return Err(Errno::BADF);
    }
    let mut count = 0;
    for fd in &fds {
        for (set, event, any) in sets {
            if fd.events & event == 0 {
                continue;
            }
            if fd.revents & any != 0 {
                count += 1;
            } else {
                // SAFETY: the descriptor was found in this set.
                unsafe { libc::FD_CLR(fd.fd, set) };
            }
        }
    }
    Ok(count)
}
