//! The wire of a dialler that was let in: it may bring descriptors of any kind, and to close one of them can take any time.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use weft_sys::{memfd, unix};

use crate::peers::User;

/// What the responder sends to a dialler that may make its offer.
pub(crate) const LET_IN: u8 = b'+';

/// A descriptor that the caller hides from the program.
pub trait Hidden: AsFd + Into<OwnedFd> + Sized {
    /// Hides it. `None`, and it is closed: no number is left.
    fn hide(fd: OwnedFd) -> Option<Self>;

    /// Hides it where it is, and leaves it open: its `close` could wait.
    fn keep(fd: OwnedFd) {
        std::mem::forget(fd);
    }
}

/// Of a program that knows its own descriptors.
impl Hidden for OwnedFd {
    fn hide(fd: OwnedFd) -> Option<OwnedFd> {
        Some(fd)
    }
}

/// A dialler that was let in. What it has sent may have descriptors of any kind: then it stays open until the process ends, and its user is met no more.
#[derive(Debug)]
pub struct Wire<W: Hidden> {
    /// Until it is the bell.
    fd: Option<W>,
    uid: u32,
    user: User,
}

impl<W: Hidden> Wire<W> {
    /// Lets the dialler in. `None`: it has gone, or its user has as many wires as another user gets.
    pub(crate) fn let_in(fd: W, uid: u32, user: User) -> Option<Wire<W>> {
        if user != User::Own && !strangers::enter(uid, user) {
            return None;
        }
        let fd = Some(fd);
        let wire = Wire { fd, uid, user };
        let fd = wire.fd.as_ref()?;
        // Urgent data stays in its place.
        rustix::net::sockopt::set_socket_oobinline(fd, true).ok()?;
        unix::take_rights(fd, true);
        unix::send_with_fds(fd, &[LET_IN], &[]).ok()?;
        Some(wire)
    }

    /// The descriptor.
    pub fn descriptor(&mut self) -> Option<&mut W> {
        self.fd.as_mut()
    }

    /// Closes the descriptor alone: another process has the socket, and may go on with it.
    pub fn leave(mut self) {
        self.fd = None;
    }

    /// The wire as a bell, if nothing but bytes is in it.
    pub(crate) fn into_bell(mut self) -> Option<OwnedFd> {
        self.fd.take_if(|fd| has_no_rights(fd)).map(Into::into)
    }

    /// Why the sender of a message has no descriptor: before Linux 6.5 none has.
    pub(crate) fn no_process(&self) -> io::Error {
        let answer = self.fd.as_ref().map(unix::peer_process);
        let error = answer.and_then(Result::err);
        error.unwrap_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The user behind it, by number.
    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }

    /// What that user is to us.
    pub(crate) fn user(&self) -> User {
        self.user
    }

    /// Takes what the dialler has sent. `InvalidData`, and it stays, if that brings descriptors of another kind than a segment: its user is barred.
    pub(crate) fn receive(&self, bytes: &mut [u8]) -> io::Result<Option<unix::Packet>> {
        // What a barred user has sent is not looked at.
        match &self.fd {
            Some(fd) if self.user == User::Own || !strangers::is_barred(self.uid) => {
                self.receive_by(fd, bytes)
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn receive_by(&self, fd: &W, bytes: &mut [u8]) -> io::Result<Option<unix::Packet>> {
        let Some(seen) = unix::peek(fd, bytes)? else {
            return Ok(None);
        };
        if seen.is_cut || !seen.fds.iter().all(is_segment) {
            if self.user != User::Own {
                strangers::bar(self.uid);
                seen.fds.into_iter().for_each(W::keep);
            }
            return Err(io::ErrorKind::InvalidData.into());
        }
        // No more than was seen: what comes behind it may bring another kind.
        unix::recv(fd, &mut bytes[..seen.len], 1)
    }

    /// Whether the wire can be closed without delay, after the offer that may wait there.
    fn is_quick_to_close(&self, fd: &W) -> bool {
        const OFFER: usize = 64;
        if has_no_rights(fd) {
            return true;
        }
        if strangers::is_barred(self.uid) {
            return false;
        }
        let offer = self.receive_by(fd, &mut [0; OFFER]);
        // No number is free: of which kind the descriptor is cannot be known.
        if offer
            .as_ref()
            .is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
        {
            return false;
        }
        let is_quick = offer.is_ok() && has_no_rights(fd);
        if !is_quick {
            strangers::bar(self.uid);
        }
        is_quick
    }
}

impl<W: Hidden> Drop for Wire<W> {
    fn drop(&mut self) {
        if self.user == User::Own {
            return;
        }
        let kept = self.fd.take();
        let kept = kept.filter(|fd| !self.is_quick_to_close(fd));
        if kept.is_none() {
            strangers::leave(self.uid);
        }
        std::mem::forget(kept);
    }
}

/// From now on no message with descriptors comes. Whether none waits.
fn has_no_rights(wire: impl AsFd) -> bool {
    unix::take_rights(&wire, false);
    unix::has_no_rights(wire).unwrap_or(false)
}

/// A file that is as quick to close as a segment.
fn is_segment(fd: &OwnedFd) -> bool {
    const LARGEST: u64 = 64 << 20;
    memfd::check_sealed(fd).is_ok_and(|len| len <= LARGEST)
}

/// The wires of other users that were let in, and have not become bells.
pub(crate) mod strangers {
    use std::sync::{Mutex, PoisonError};

    use crate::peers::{MOST_OF_ONE, User};

    struct Stranger {
        uid: u32,
        wires: u32,
        /// It has sent what is slow to close.
        is_barred: bool,
    }

    static STRANGERS: Mutex<Vec<Stranger>> = Mutex::new(Vec::new());

    fn with<T>(what: impl FnOnce(&mut Vec<Stranger>) -> T) -> T {
        what(&mut STRANGERS.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts a wire more. Returns whether it may be let in: another user gets as many as connections.
    pub(crate) fn enter(uid: u32, user: User) -> bool {
        with(|all| {
            let at = all.iter().position(|one| one.uid == uid);
            let at = at.unwrap_or_else(|| {
                all.push(Stranger {
                    uid,
                    wires: 0,
                    is_barred: false,
                });
                all.len() - 1
            });
            let is_few = user == User::Unseen || all[at].wires < MOST_OF_ONE;
            all[at].wires += u32::from(is_few);
            is_few
        })
    }

    /// One of its wires is gone.
    pub(crate) fn leave(uid: u32) {
        with(|all| {
            for one in all.iter_mut().filter(|one| one.uid == uid) {
                one.wires = one.wires.saturating_sub(1);
            }
            all.retain(|one| one.wires > 0 || one.is_barred);
        });
    }

    /// It is met no more. It has a wire.
    pub(crate) fn bar(uid: u32) {
        with(|all| {
            let its = all.iter_mut().filter(|one| one.uid == uid);
            its.for_each(|one| one.is_barred = true);
        });
    }

    pub(crate) fn is_barred(uid: u32) -> bool {
        with(|all| all.iter().any(|one| one.uid == uid && one.is_barred))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    /// A wire of a dialler, and the dialler's end.
    fn wire(uid: u32, user: User) -> Option<(Wire<OwnedFd>, UnixStream)> {
        let (near, far) = UnixStream::pair().unwrap();
        Some((Wire::let_in(far.into(), uid, user)?, near))
    }

    fn send(near: &UnixStream, what: impl AsFd) -> Result<(), rustix::io::Errno> {
        let sent = unix::send_with_fds(near, b"!", &[what.as_fd()]);
        sent.map_err(|e| rustix::io::Errno::from_io_error(&e).unwrap())
    }

    #[test]
    fn nothing_is_closed_that_a_dialler_of_another_user_has_sent() {
        let (reader, writer) = std::io::pipe().unwrap();
        // A bell that has rung before it is one.
        let (rung, near) = wire(7, User::Other(7)).unwrap();
        unix::send_with_fds(&near, b"!", &[]).unwrap();
        assert!(rung.into_bell().is_some());
        let (kept, near) = wire(7, User::Other(7)).unwrap();
        send(&near, &writer).unwrap();
        drop(writer);
        assert!(kept.into_bell().is_none());
        assert!(strangers::is_barred(7));
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        let end = rustix::io::read(&reader, &mut [0; 1]);
        assert_eq!(end, Err(rustix::io::Errno::AGAIN), "the descriptor is open");
        if unix::take_rights(&near, true) {
            assert_eq!(send(&near, &reader), Err(rustix::io::Errno::PERM));
        }
    }

    #[test]
    fn an_offer_that_comes_too_late_bars_nobody() {
        let (late, near) = wire(8, User::Other(8)).unwrap();
        send(&near, memfd::create("segment", 4096).unwrap()).unwrap();
        drop(late);
        assert!(!strangers::is_barred(8));
        // One is taken, and no more is looked at.
        let (late, near) = wire(8, User::Other(8)).unwrap();
        for _ in 0..2 {
            send(&near, memfd::create("segment", 4096).unwrap()).unwrap();
        }
        drop(late);
        assert!(strangers::is_barred(8));
    }

    #[test]
    fn a_user_gets_so_many_wires_at_a_time() {
        use crate::peers::MOST_OF_ONE;
        let take = |n, user| (0..n).filter_map(|_| wire(9, user)).collect::<Vec<_>>();
        let all = take(MOST_OF_ONE + 1, User::Other(9));
        assert_eq!(all.len(), MOST_OF_ONE as usize);
        drop(all);
        assert_eq!(take(2, User::Other(9)).len(), 2);
        let own = take(MOST_OF_ONE + 1, User::Unseen);
        assert_eq!(own.len(), 1 + MOST_OF_ONE as usize);
    }
}
