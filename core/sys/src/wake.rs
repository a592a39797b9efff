//! Wake-ups over a connected Unix socket: a byte that says nothing but "look again".

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io;
use std::os::fd::AsFd;

/// Wakes whoever sleeps on the other end; never blocks.
///
/// # Errors
/// `WouldBlock` when it has been woken often without looking, `BrokenPipe` when it is gone.
pub fn poke(fd: impl AsFd) -> io::Result<()> {
    send(fd, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Takes a few wake-ups off; what is left makes the descriptor readable again at once. False when the other end is closed.
pub fn drain(fd: impl AsFd) -> bool {
    let mut byte = [0; 8];
    for _ in 0..2 {
        match recv(&fd, &mut byte, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return false,
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return true,
            Err(_) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[test]
    fn wake_ups_come_and_go_and_end() {
        let (a, b) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        assert!(drain(&b));
        poke(&a).unwrap();
        assert!(drain(&b));
        while poke(&a).is_ok() {}
        assert_eq!(poke(&a).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        while crate::poll_fds(
            &[(b.as_fd(), crate::Interest::READ)],
            Some(std::time::Duration::ZERO),
        )
        .unwrap()
            != 0
        {
            assert!(drain(&b));
        }
        drop(a);
        // A process that another test starts has it too, until it executes its program.
        let begun = std::time::Instant::now();
        while drain(&b) {
            assert!(begun.elapsed() < std::time::Duration::from_secs(10));
            std::thread::yield_now();
        }
        assert!(poke(&b).is_err());
    }
}
