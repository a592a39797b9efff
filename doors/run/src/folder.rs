//! The rendezvous of two containers of one host, through a folder that is mounted into both.
//!
//! The kernel shows a network namespace only its own sockets. So both ends prove that they know the first bytes of both directions ([`crate::proof`]), as
//! two brokers do, and the kernel names the user of the process behind the wire (`SO_PEERCRED`, `SCM_CREDENTIALS`).
//!
//! The end that has called `accept` listens on a Unix socket in the folder, under a [name](name()) that both know; the other one dials it. An address may be
//! translated on the way: the name has only the address of the end that has called `connect`, which published ports leave as it is. Masquerading changes
//! that address, and then two connections could have the same one. So a stream that begins with TLS has its name from the random bytes there.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hmac::Mac;
use rustix::fs::{FileType, Mode, OFlags, chmod, fstat, open};
use weft_sys::process;
use weft_sys::unix::{self, Name};

use crate::addr::{ADDR, get_addr, put_addr};
use crate::hosts::Beginning;
use crate::meet::{Ends, Offer, Why, behind, is_bell};
use crate::peers::{Peers, User};
use crate::proof::{DIGEST, Prover, common, digest, is_enough};

const MAGIC: [u8; 8] = *b"weftrunF";
const HELLO: usize = 8 + 2 + 32;
const ANSWER: usize = 8 + 2 + 32 + DIGEST + ADDR;
const LINK: usize = 8 + DIGEST;
/// Of a TLS stream: up to the end of the random bytes of the first message.
const RANDOM: usize = 43;
/// Diallers that an acceptor keeps until their next message.
const MOST_WAITING: usize = 4;

/// What an end knows of the connection.
#[derive(Debug)]
pub struct View<'a> {
    /// Its addresses.
    pub ends: Ends,
    /// Whether it has called `connect`.
    pub dialled: bool,
    /// The first bytes that it has sent.
    pub sent: &'a Beginning,
    /// The first bytes that it has received.
    pub received: &'a Beginning,
}

impl View<'_> {
    /// The first bytes from the dialler, and to it.
    fn directions(&self) -> (&[u8], &[u8]) {
        if self.dialled {
            (self.sent.bytes(), self.received.bytes())
        } else {
            (self.received.bytes(), self.sent.bytes())
        }
    }

    /// Whether it begins with a record and a `ClientHello` in it, as far as it is known.
    fn is_tls(&self) -> bool {
        let (first, _) = self.directions();
        let may_be = |at: usize, byte| first.get(at).is_none_or(|&is| is == byte);
        first.starts_with(&[0x16, 3]) && may_be(5, 1) && may_be(9, 3)
    }

    fn known(&self) -> [u8; 2] {
        [self.sent, self.received].map(|known| known.bytes().len() as u8)
    }

    fn digest(&self, who: Prover, nonces: &[[u8; 32]; 2], lens: [u8; 2]) -> Option<Proof> {
        let (from, to) = self.directions();
        Some(Proof(digest(who, nonces, lens, from, to)?))
    }
}

struct Proof(hmac::Hmac<sha2::Sha256>);

impl Proof {
    fn bytes(self) -> [u8; DIGEST] {
        self.0.finalize().into_bytes().into()
    }

    /// In a time that does not depend on the bytes.
    fn is(self, bytes: &[u8]) -> bool {
        self.0.verify_slice(bytes).is_ok()
    }
}

/// The path of the connection's socket. `None`: too little is known so far.
#[must_use]
pub fn name(folder: &Path, view: &View<'_>) -> Option<PathBuf> {
    if !is_enough(view.known()) {
        return None;
    }
    let hash = if view.is_tls() {
        fnv(view.directions().0.get(..RANDOM)?)
    } else if view.dialled {
        fnv(&put_addr(view.ends.own))
    } else {
        fnv(&put_addr(view.ends.peer))
    };
    let mut name = String::from("run-");
    let _ = write!(name, "{hash:016x}");
    Some(folder.join(name))
}

/// FNV-1a: it is the same in every version, and the proof tells connections of one name apart.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn nonce() -> Result<[u8; 32], Why> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|_| Why::System)?;
    Ok(nonce)
}

/// The next message, of this length.
fn message<const N: usize>(
    wire: impl AsFd,
    fds: usize,
) -> Result<Option<([u8; N], unix::Packet)>, Why> {
    // One byte more shows a message that is too long: it is cut there, which is an error.
    let mut bytes = [0; N];
    match unix::recv(wire, &mut bytes, fds) {
        Ok(Some(packet)) if packet.len == N && bytes[..8] == MAGIC => Ok(Some((bytes, packet))),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        _ => Err(Why::Impostor),
    }
}

fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

/// A dialler that has said hello. The wire is the caller's to keep.
#[derive(Debug)]
pub struct Dialled {
    nonce: [u8; 32],
    user: User,
}

/// Dials the acceptor. `None` if it does not listen.
pub fn dial(
    path: &Path,
    view: &View<'_>,
    peers: &Peers,
) -> Result<Option<(OwnedFd, Dialled)>, Why> {
    let wire = match unix::connect(Name::Path(path)) {
        Ok(wire) => wire,
        Err(e) => {
            return match e.kind() {
                io::ErrorKind::NotFound
                | io::ErrorKind::ConnectionRefused
                | io::ErrorKind::WouldBlock => Ok(None),
                io::ErrorKind::PermissionDenied => Err(Why::OtherUser),
                _ => Err(Why::System),
            };
        }
    };
    let user = behind(&wire, peers)?.ok_or(Why::OtherUser)?;
    let nonce = nonce()?;
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&view.known());
    bytes[10..].copy_from_slice(&nonce);
    unix::send_signed(&wire, &bytes, &[]).map_err(|_| Why::System)?;
    Ok(Some((wire, Dialled { nonce, user })))
}

/// An acceptor whose proof is right.
#[derive(Debug)]
pub struct Found {
    /// What proves our end to it.
    pub link: Link,
    /// Its user.
    pub user: User,
    /// Its address is not the one that we have called, and nothing in the stream is random: a connection with our address and another peer could be the one that
    /// it means.
    pub may_be_another: bool,
}

/// The acceptor's answer. `None`: it has not come.
pub fn answered(wire: impl AsFd, dialled: &Dialled, view: &View<'_>) -> Result<Option<Found>, Why> {
    let Some((bytes, _)) = message::<ANSWER>(wire, 0)? else {
        return Ok(None);
    };
    let (lens, theirs) = (part(&bytes, 8), part(&bytes, 10));
    let nonces = [dialled.nonce, theirs];
    let proof = |who| view.digest(who, &nonces, lens);
    let is_right = proof(Prover::Acceptor).is_some_and(|proof| proof.is(&bytes[42..74]));
    if !is_enough(lens) || !is_right {
        return Err(Why::NotConfirmed);
    }
    let ours = proof(Prover::Dialler).ok_or(Why::NotConfirmed)?;
    Ok(Some(Found {
        link: Link(ours.bytes()),
        user: dialled.user,
        may_be_another: !view.is_tls() && get_addr(&part(&bytes, 74)) != view.ends.peer,
    }))
}

/// The dialler's proof.
#[derive(Debug)]
pub struct Link([u8; DIGEST]);

impl Link {
    /// Hands the segment and the acceptor's end of the bell over.
    pub fn offer(
        &self,
        wire: impl AsFd,
        segment: BorrowedFd<'_>,
        bell: BorrowedFd<'_>,
    ) -> Result<(), Why> {
        let mut bytes = [0; LINK];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..].copy_from_slice(&self.0);
        unix::send_signed(wire, &bytes, &[segment, bell]).map_err(|_| Why::System)
    }
}

/// Makes the acceptor's listening socket. Who may dial is decided by the kernel's word of the dialler, so a peer of another user can open it.
///
/// # Errors
/// [`Why::NameTaken`], which can end; [`Why::System`].
pub fn listen(path: &Path) -> Result<OwnedFd, Why> {
    let listener = unix::listen_for_senders(Name::Path(path), MOST_WAITING as u32);
    let listener = listener.map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => Why::NameTaken,
        _ => Why::System,
    })?;
    // Without that only our own user reaches it.
    let _ = open_for_all(path);
    Ok(listener)
}

/// Lets every user connect to our socket. Others may write to the folder, so another file could be at its path by now.
fn open_for_all(path: &Path) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = open(path, flags, Mode::empty())?;
    let about = fstat(&file)?;
    let is_socket = FileType::from_raw_mode(about.st_mode) == FileType::Socket;
    if !is_socket || about.st_uid != process::uid() || about.st_nlink != 1 {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let same = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(chmod(same, Mode::from_raw_mode(0o666))?)
}

/// Entries of a folder that [`sweep`] looks at.
const MOST_SWEPT: usize = 1024;
/// A file of a live listener is this old only if its peer never comes.
const OLD: Duration = Duration::from_mins(10);

/// Removes the sockets of processes of our user that were killed.
pub fn sweep(folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.take(MOST_SWEPT) {
        let is_ours = entry.file_name().as_encoded_bytes().starts_with(b"run-");
        let Ok(about) = entry.metadata() else {
            continue;
        };
        let is_old = about
            .modified()
            .is_ok_and(|at| at.elapsed().is_ok_and(|age| age > OLD));
        let is_dead = || unix::is_dead(&entry.path());
        if is_ours && is_old && about.uid() == process::uid() && is_dead() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// An acceptor, beside its listener.
#[derive(Debug, Default)]
pub struct Acceptor {
    waiting: Vec<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    wire: OwnedFd,
    user: User,
    /// What it has been asked to prove: the nonces, and the lengths.
    asked: Option<([[u8; 32]; 2], [u8; 2])>,
}

impl Acceptor {
    /// Answers diallers, and returns the offer of one that has proved that it is the connection's other end.
    pub fn look(
        &mut self,
        listener: impl AsFd,
        view: &View<'_>,
        peers: &Peers,
    ) -> Result<Option<Offer>, Why> {
        for _ in 0..2 * MOST_WAITING {
            let Some(wire) = unix::accept(&listener).map_err(|_| Why::System)? else {
                break;
            };
            // Nothing is kept or read of others.
            let Some(user) = behind(&wire, peers)? else {
                continue;
            };
            if self.waiting.len() == MOST_WAITING {
                self.waiting.remove(0);
            }
            self.waiting.push(Waiting {
                wire,
                user,
                asked: None,
            });
        }
        let mut found = None;
        self.waiting.retain_mut(|one| match one.next(view, peers) {
            Ok(None) => true,
            Ok(Some(offer)) => {
                found.get_or_insert(offer);
                false
            }
            Err(_) => false,
        });
        Ok(found)
    }
}

impl Waiting {
    /// Its next message. Fails if it is not the peer.
    fn next(&mut self, view: &View<'_>, peers: &Peers) -> Result<Option<Offer>, Why> {
        let Some((nonces, lens)) = self.asked else {
            let Some((bytes, packet)) = message::<HELLO>(&self.wire, 0)? else {
                return Ok(None);
            };
            self.check_sender(&packet, peers)?;
            let known = part(&bytes, 8);
            let lens = common(known, view.received, view.sent).ok_or(Why::NotConfirmed)?;
            let nonces = [part(&bytes, 10), nonce()?];
            let proof = view.digest(Prover::Acceptor, &nonces, lens);
            let mut answer = [0; ANSWER];
            answer[..8].copy_from_slice(&MAGIC);
            answer[8..10].copy_from_slice(&lens);
            answer[10..42].copy_from_slice(&nonces[1]);
            answer[42..74].copy_from_slice(&proof.ok_or(Why::NotConfirmed)?.bytes());
            answer[74..].copy_from_slice(&put_addr(view.ends.own));
            unix::send_with_fds(&self.wire, &answer, &[]).map_err(|_| Why::System)?;
            self.asked = Some((nonces, lens));
            return Ok(None);
        };
        let Some((bytes, packet)) = message::<LINK>(&self.wire, 2)? else {
            return Ok(None);
        };
        let user = self.check_sender(&packet, peers)?;
        let proof = view.digest(Prover::Dialler, &nonces, lens);
        let Ok([segment, bell]) = <[OwnedFd; 2]>::try_from(packet.fds) else {
            return Err(Why::Impostor);
        };
        if !proof.is_some_and(|proof| proof.is(&bytes[8..])) || !is_bell(&bell) {
            return Err(Why::Impostor);
        }
        Ok(Some(Offer {
            segment,
            bell,
            process: 0,
            user,
        }))
    }

    fn check_sender(&self, packet: &unix::Packet, peers: &Peers) -> Result<User, Why> {
        let sender = packet.sender.as_ref().ok_or(Why::Impostor)?.cred;
        let signed = peers.judge(sender.uid).ok_or(Why::OtherUser)?;
        Ok(signed.and(self.user))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    const HELLO_TLS: [u8; 60] = {
        let mut bytes = [9; 60];
        (bytes[0], bytes[1], bytes[5], bytes[9]) = (0x16, 3, 1, 3);
        bytes
    };

    /// The two ends as they see themselves: the dialler's own address and its peer's, the acceptor's.
    fn addresses(dialler: [&str; 2], acceptor: [&str; 2]) -> [Ends; 2] {
        [dialler, acceptor].map(|[own, peer]| Ends {
            own: own.parse().unwrap(),
            peer: peer.parse().unwrap(),
        })
    }

    fn direct() -> [Ends; 2] {
        addresses(
            ["10.0.0.2:4000", "10.0.0.3:80"],
            ["10.0.0.3:80", "10.0.0.2:4000"],
        )
    }

    /// Tries to meet through a folder, where the ends know these bytes.
    fn meet(ends: [Ends; 2], dialler: [&[u8]; 2], acceptor: [&[u8]; 2]) -> Result<bool, Why> {
        let folder = tempfile::tempdir().unwrap();
        let peers = Peers::default();
        let [a, b, c, d] = [dialler[0], dialler[1], acceptor[0], acceptor[1]].map(Beginning::new);
        let view = |ends, dialled, sent, received| View {
            ends,
            dialled,
            sent,
            received,
        };
        let (ours, theirs) = (view(ends[0], true, &a, &b), view(ends[1], false, &c, &d));
        let (Some(at), Some(there)) = (name(folder.path(), &ours), name(folder.path(), &theirs))
        else {
            return Ok(false);
        };
        let listener = listen(&there).unwrap();
        assert_eq!(listen(&there).err(), Some(Why::NameTaken));
        let mut acceptor = Acceptor::default();
        let mut look = || acceptor.look(&listener, &theirs, &peers);
        assert!(look()?.is_none());
        let Some((wire, dialled)) = dial(&at, &ours, &peers)? else {
            return Ok(false);
        };
        assert!(answered(&wire, &dialled, &ours)?.is_none());
        assert!(look()?.is_none());
        let Some(found) = answered(&wire, &dialled, &ours)? else {
            return Ok(false);
        };
        assert_eq!(found.user, User::Own);
        let is_other = ours.ends.peer != theirs.ends.own;
        assert_eq!(found.may_be_another, is_other && !ours.is_tls());
        let (bell, other) = UnixStream::pair().unwrap();
        found.link.offer(&wire, bell.as_fd(), other.as_fd())?;
        Ok(look()?.is_some())
    }

    #[test]
    fn two_ends_that_know_the_same_bytes_meet() {
        let (request, answer) = (b"GET / HTTP/1.1\r\n".as_slice(), b"HTTP/1.1 200".as_slice());
        let both = [answer, request];
        assert_eq!(meet(direct(), [request, answer], both), Ok(true));
        // The acceptor is a request ahead, and the dialler has not read all.
        let more = [answer, b"GET / HTTP/1.1\r\nHost: x"];
        assert_eq!(meet(direct(), [request, b"HTTP"], more), Ok(true));
        // A published port: the dialler has called another address.
        let published = addresses(
            ["10.0.0.2:4000", "192.168.1.1:8080"],
            ["172.17.0.2:80", "10.0.0.2:4000"],
        );
        assert_eq!(meet(published, [request, answer], both), Ok(true));
        // Too little is known.
        assert_eq!(
            meet(direct(), [b"GET", b"200"], [b"200", b"GET"]),
            Ok(false)
        );
    }

    #[test]
    fn other_bytes_or_other_addresses_do_not_meet() {
        let (request, answer) = (b"GET / HTTP/1.1\r\n".as_slice(), b"HTTP/1.1 200".as_slice());
        let wrong = [b"HTTP/1.1 404".as_slice(), request];
        assert_eq!(
            meet(direct(), [request, answer], wrong),
            Err(Why::NotConfirmed)
        );
        let masqueraded = addresses(
            ["10.0.0.2:4000", "10.0.0.3:80"],
            ["10.0.0.3:80", "172.17.0.1:4000"],
        );
        assert_eq!(
            meet(masqueraded, [request, answer], [answer, request]),
            Ok(false)
        );
        // Only the random bytes of TLS tell masqueraded connections apart.
        assert_eq!(
            meet(masqueraded, [&HELLO_TLS, answer], [answer, &HELLO_TLS]),
            Ok(true)
        );
    }

    #[test]
    fn only_our_own_socket_is_opened_for_all() {
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        let secret = folder.path().join("secret");
        fs::write(&secret, "x").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        let at = folder.path().join("run-1");
        std::os::unix::fs::symlink(&secret, &at).unwrap();
        assert!(open_for_all(&at).is_err() && open_for_all(&secret).is_err());
        assert_eq!(mode(&secret), 0o600);
        fs::remove_file(&at).unwrap();
        let listener = listen(&at).unwrap();
        assert_eq!(mode(&at), 0o666);
        // What a killed process leaves is removed when it is old.
        drop(listener);
        let old = [
            &at,
            &folder.path().join("run-2"),
            &folder.path().join("other"),
        ];
        let _alive = listen(old[1]).unwrap();
        drop(listen(old[2]).unwrap());
        sweep(folder.path());
        assert!(at.exists());
        for path in old {
            let before = rustix::fs::Timespec {
                tv_sec: 1_000_000_000,
                tv_nsec: 0,
            };
            let times = rustix::fs::Timestamps {
                last_access: before,
                last_modification: before,
            };
            rustix::fs::utimensat(
                rustix::fs::CWD,
                path,
                &times,
                rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
            )
            .unwrap();
        }
        sweep(folder.path());
        assert_eq!(
            [at.exists(), old[1].exists(), old[2].exists()],
            [false, true, true]
        );
    }

    #[test]
    fn what_is_no_message_of_a_dialler_is_let_go() {
        let folder = tempfile::tempdir().unwrap();
        let (sent, received) = (Beginning::new(&[1; 20]), Beginning::new(&[2; 20]));
        let view = View {
            ends: direct()[1],
            dialled: false,
            sent: &sent,
            received: &received,
        };
        let at = name(folder.path(), &view).unwrap();
        let listener = listen(&at).unwrap();
        let mut acceptor = Acceptor::default();
        let (bell, _other) = UnixStream::pair().unwrap();
        let mut hello = [0; HELLO];
        hello[..8].copy_from_slice(&MAGIC);
        (hello[8], hello[9]) = (255, 255);
        for (bytes, fds) in [
            (&b"x"[..], 0),
            (&[0; 300], 0),
            (&hello[..HELLO - 1], 0),
            (&hello, 1),
            (&[MAGIC.as_slice(), &[0; 34]].concat(), 0),
        ] {
            let wire = unix::connect(Name::Path(&at)).unwrap();
            let fds = &[bell.as_fd()][..fds];
            unix::send_with_fds(&wire, bytes, fds).unwrap();
            for _ in 0..3 {
                assert!(
                    acceptor
                        .look(&listener, &view, &Peers::default())
                        .unwrap()
                        .is_none()
                );
            }
            assert_eq!(acceptor.waiting.len(), 0, "{bytes:?}");
        }
        // Silent ones take no place for long.
        let silent: Vec<_> = (0..9)
            .filter_map(|_| unix::connect(Name::Path(&at)).ok())
            .collect();
        assert!(silent.len() >= MOST_WAITING);
        acceptor.look(&listener, &view, &Peers::default()).unwrap();
        assert!(acceptor.waiting.len() <= MOST_WAITING);
        // One that claims to be the peer and proves nothing.
        let wire = unix::connect(Name::Path(&at)).unwrap();
        unix::send_with_fds(&wire, &hello, &[]).unwrap();
        acceptor.look(&listener, &view, &Peers::default()).unwrap();
        let link = Link([7; DIGEST]);
        link.offer(&wire, bell.as_fd(), bell.as_fd()).unwrap();
        assert!(
            acceptor
                .look(&listener, &view, &Peers::default())
                .unwrap()
                .is_none()
        );
    }
}
