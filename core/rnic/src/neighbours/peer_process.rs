//! The identity of the process at the other end of the Unix socket of a handshake, and its rights over our process.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use weft_sys::process;
use weft_sys::unix::{self, Cred, Sender};
use weft_wire::local::{self, Secret};

use super::{Why, why};

fn same_user(cred: &Cred) -> Result<(), Why> {
    if cred.is_same_user() {
        Ok(())
    } else {
        Err(stranger(cred).into())
    }
}

/// The reason why a peer is not of our user.
fn stranger(cred: &Cred) -> &'static str {
    if cred.uid == weft_sys::process::uid() {
        // `is_same_user` does not accept the overflow user.
        "user 65534 (nobody) stands for all users that a user namespace does not know: run both as another user"
    } else {
        "the peer runs as another user"
    }
}

/// Before any message: the user that created the socket at the other end.
pub(crate) fn admitted(wire: &OwnedFd) -> Result<Cred, Why> {
    let cred = unix::peer_cred(wire).map_err(why("asking who is there"))?;
    same_user(&cred)?;
    Ok(cred)
}

/// The process at the other end, of our user.
pub(crate) struct PeerProcess {
    pub(crate) pid: Option<u32>,
    /// Identifies the process.
    pub(crate) pidfd: Option<OwnedFd>,
}

impl PeerProcess {
    /// The sender of a message on a socket that the process of `maker` has made. A socket can change hands, and a process its user.
    pub(crate) fn sent(maker: &Cred, sender: Option<Sender>) -> Result<PeerProcess, Why> {
        let Sender { cred, pidfd } = sender.ok_or("the peer does not say who it is")?;
        same_user(&cred)?;
        if cred.pid != maker.pid {
            return Err("another process has taken the peer's place".into());
        }
        let pidfd = match (pidfd, cred.pid) {
            (None, Some(pid)) => Some(process::pidfd_open(pid).map_err(why("the peer's process"))?),
            (pidfd, _) => pidfd,
        };
        let pid = cred.pid;
        Ok(PeerProcess { pid, pidfd })
    }

    /// Whether it is in our user namespace, as far as the kernel shows.
    pub(crate) fn is_kin(&self) -> bool {
        let pidfd = self.pidfd.as_ref();
        pidfd.is_some_and(process::shares_user_namespace)
    }

    /// It is in our user namespace, or can trace us: then it is kept from nothing by being in another one.
    pub(crate) fn is_one_of_us(&self, traces: bool) -> Result<(), Why> {
        if traces || self.is_kin() {
            Ok(())
        } else {
            Err("the peer is in another user namespace, as far as the kernel tells us".into())
        }
    }

    /// A number that no other living process has.
    pub(crate) fn number(&self) -> Option<u64> {
        let pid = self.pid.map(u64::from);
        pid.or_else(|| process::pidfd_number(self.pidfd.as_ref()?))
    }

    /// The contents of its memory at `addr`, if the kernel lets us read it: our challenge, and its secret.
    pub(crate) fn look(&self, addr: u64) -> Option<(Secret, Secret)> {
        let mut bytes = [0; 32];
        process::read_memory(self.pid?, addr, &mut bytes).ok()?;
        let (shown, secret) = bytes.split_first_chunk()?;
        Some((*shown, *secret.first_chunk()?))
    }
}

/// Thirty-two bytes of this process, which the peer of one handshake reads if the kernel allows it: the peer's challenge, which shows the
/// peer that it reads the right process, and a secret, which proves that the peer may trace us.
pub(crate) struct ChallengeCell(Box<[AtomicU64; 4]>);

impl ChallengeCell {
    /// One with a new secret, and a challenge for the peer.
    pub(crate) fn new() -> Result<(ChallengeCell, Secret), Why> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|_| "no source of randomness")?;
        let (secret, challenge) = bytes.split_at(16);
        let cell = ChallengeCell(Box::default());
        cell.store(2, secret);
        Ok((cell, std::array::from_fn(|i| challenge[i])))
    }

    fn store(&self, at: usize, bytes: &[u8]) {
        for (word, bytes) in self.0[at..].iter().zip(bytes.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::SeqCst);
        }
    }

    /// From now on the peer finds its challenge.
    pub(crate) fn show(&self, challenge: &Secret) {
        self.store(0, challenge);
    }

    pub(crate) fn secret(&self) -> Secret {
        let words = [2, 3].map(|i| self.0[i].load(Ordering::Relaxed).to_ne_bytes());
        std::array::from_fn(|i| words[i / 8][i % 8])
    }

    /// The cell as it is sent to the peer.
    pub(crate) fn announce(&self, challenge: Secret) -> local::ChallengeCell {
        local::ChallengeCell {
            addr: self.0.as_ptr().expose_provenance() as u64,
            challenge,
        }
    }
}
