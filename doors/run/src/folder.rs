//! The rendezvous of two containers of one host, through a folder that is mounted into both.
//!
//! The kernel shows a network namespace only its own sockets. So both ends prove that they know the first bytes of both directions ([`crate::proof`]), as
//! two brokers do, and the kernel says that the process behind the wire is of our user and user namespace (`SO_PEERCRED`, `SCM_CREDENTIALS`). A process
//! in the middle could pass one end's proof on to the other: every process of our user that has the folder is trusted with the streams.
//!
//! The end that has called `accept` listens on a Unix socket in the folder, under a [name](name()) that both know; the other one dials it. An address may be
//! translated on the way: the name has only the address of the end that has called `connect`. Masquerading changes that address, and then two connections
//! could have the same one. So a stream that begins with TLS has its name from the random bytes there, and one without whose addresses differ does not meet.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hmac::Mac;
use weft_sys::process;
use weft_sys::unix::{self, Kind, Name};

use crate::addr::{ADDR, get_addr, put_addr};
use crate::hosts::Beginning;
use crate::meet::{Ends, Hidden, Offer, Why, behind};
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

    /// Whether so many bytes from the dialler, and to it, are enough to prove.
    fn proves(&self, lens: [u8; 2]) -> bool {
        is_enough(lens) && (!self.is_tls() || usize::from(lens[0]) >= RANDOM)
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
    /// The bytes that it has said it knows.
    known: [u8; 2],
}

/// Dials the acceptor. `None` if it does not listen.
pub fn dial(path: &Path, view: &View<'_>) -> Result<Option<(OwnedFd, Dialled)>, Why> {
    let wire = match unix::connect_to_stranger(Name::Path(path), Kind::Packets) {
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
    if !is_ours(&wire)? {
        return Err(Why::OtherUser);
    }
    let nonce = nonce()?;
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(&MAGIC);
    let known = view.known();
    bytes[8..10].copy_from_slice(&known);
    bytes[10..].copy_from_slice(&nonce);
    unix::send_signed(&wire, &bytes, &[]).map_err(|_| Why::System)?;
    Ok(Some((wire, Dialled { nonce, known })))
}

/// Whether a process of our user, in our user namespace, is behind the wire.
fn is_ours(wire: impl AsFd) -> Result<bool, Why> {
    Ok(behind(wire, &Peers::default())?.1 == Some(User::Own))
}

/// An acceptor whose proof is right.
#[derive(Debug)]
pub struct Found {
    /// What proves our end to it.
    pub link: Link,
    /// Its address is not the one that we have called, and nothing in the stream is random: it may mean another connection, which a translation on the way has
    /// given our address, and which no socket of ours shows.
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
    // The acceptor has sent what we have received.
    let known = dialled.known;
    let is_all = lens[0] <= known[0] && lens[1] == known[1] && view.proves(lens);
    if !is_all || !is_right {
        return Err(Why::NotConfirmed);
    }
    let ours = proof(Prover::Dialler).ok_or(Why::NotConfirmed)?;
    Ok(Some(Found {
        link: Link(ours.bytes()),
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

/// Makes the acceptor's listening socket.
///
/// # Errors
/// [`Why::NameTaken`], which can end; [`Why::System`].
pub fn listen(path: &Path) -> Result<OwnedFd, Why> {
    let listener = unix::listen_for_strangers(Name::Path(path), Kind::Packets, MOST_WAITING as u32);
    listener.map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => Why::NameTaken,
        _ => Why::System,
    })
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
#[derive(Debug)]
pub struct Acceptor<W: Hidden> {
    waiting: Vec<Waiting<W>>,
}

#[derive(Debug)]
struct Waiting<W> {
    wire: W,
    /// What it has been asked to prove: the nonces, and the lengths.
    asked: Option<([[u8; 32]; 2], [u8; 2])>,
}

impl<W: Hidden> Default for Acceptor<W> {
    fn default() -> Acceptor<W> {
        Acceptor {
            waiting: Vec::new(),
        }
    }
}

impl<W: Hidden> Acceptor<W> {
    /// The wires of diallers.
    pub fn wires(&mut self) -> impl Iterator<Item = &mut W> {
        self.waiting.iter_mut().map(|one| &mut one.wire)
    }

    /// Whether there are any.
    #[must_use]
    pub fn has_diallers(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Answers diallers, and returns the offer of one that has proved that it is the connection's other end.
    pub fn look(&mut self, listener: impl AsFd, view: &View<'_>) -> Result<Option<Offer>, Why> {
        for _ in 0..2 * MOST_WAITING {
            let Some(wire) = unix::accept(&listener).map_err(|_| Why::System)? else {
                break;
            };
            // Nothing is kept or read of others.
            if !is_ours(&wire)? {
                continue;
            }
            let wire = W::hide(wire).ok_or(Why::Descriptors)?;
            unix::take_rights(&wire, true);
            if self.waiting.len() == MOST_WAITING {
                self.waiting.remove(0);
            }
            self.waiting.push(Waiting { wire, asked: None });
        }
        let mut found = None;
        self.waiting.retain_mut(|one| match one.next(view) {
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

impl<W: Hidden> Waiting<W> {
    /// Its next message. Fails if it is not the peer.
    fn next(&mut self, view: &View<'_>) -> Result<Option<Offer>, Why> {
        let Some((nonces, lens)) = self.asked else {
            let Some((bytes, packet)) = message::<HELLO>(&self.wire, 0)? else {
                return Ok(None);
            };
            check_sender(&packet)?;
            let known = part(&bytes, 8);
            let lens = common(known, view.received, view.sent).ok_or(Why::NotConfirmed)?;
            // The dialler has sent what we have received.
            if lens[0] < view.known()[1] || !view.proves(lens) {
                return Err(Why::NotConfirmed);
            }
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
        check_sender(&packet)?;
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
            user: User::Own,
        }))
    }
}

fn check_sender(packet: &unix::Packet) -> Result<(), Why> {
    let sender = packet.sender.as_ref().ok_or(Why::Impostor)?;
    if sender.cred.is_same_user() {
        Ok(())
    } else {
        Err(Why::OtherUser)
    }
}

/// Whether a descriptor is a stream socket of Unix.
fn is_bell(fd: impl AsFd) -> bool {
    let domain = rustix::net::sockopt::socket_domain(&fd);
    let kind = rustix::net::sockopt::socket_type(&fd);
    domain == Ok(rustix::net::AddressFamily::UNIX) && kind == Ok(rustix::net::SocketType::STREAM)
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let mut acceptor = Acceptor::<OwnedFd>::default();
        let mut look = || acceptor.look(&listener, &theirs);
        assert!(look()?.is_none());
        let Some((wire, dialled)) = dial(&at, &ours)? else {
            return Ok(false);
        };
        assert!(answered(&wire, &dialled, &ours)?.is_none());
        assert!(look()?.is_none());
        let Some(found) = answered(&wire, &dialled, &ours)? else {
            return Ok(false);
        };
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
        // The acceptor has not read all, and the dialler has not either.
        let more = b"GET / HTTP/1.1\r\nHost: x";
        assert_eq!(meet(direct(), [more, b"HTTP"], both), Ok(true));
        // Who does not know all that was sent to it, or more than was sent, proves nothing by less.
        for (dialler, acceptor) in [
            ([request, answer], [answer, more]),
            ([request, answer], [b"HTTP", request]),
        ] {
            let met = meet(direct(), dialler, acceptor);
            assert_ne!(met, Ok(true), "{dialler:?} {acceptor:?}");
        }
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
    fn what_a_killed_process_leaves_is_removed_when_it_is_old() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("run-1");
        let listener = listen(&at).unwrap();
        assert_eq!(fs::metadata(&at).unwrap().mode() & 0o777, 0o600);
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
        let mut acceptor = Acceptor::<OwnedFd>::default();
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
            // It has sent less than we have received.
            (&[MAGIC.as_slice(), &[16; 34]].concat(), 0),
        ] {
            let wire = unix::connect(Name::Path(&at)).unwrap();
            // Nobody may send descriptors before it is accepted, since Linux 6.16.
            assert!(acceptor.look(&listener, &view).unwrap().is_none());
            let fds = &[bell.as_fd()][..fds];
            unix::send_with_fds(&wire, bytes, fds).unwrap();
            for _ in 0..3 {
                assert!(acceptor.look(&listener, &view).unwrap().is_none());
            }
            assert_eq!(acceptor.waiting.len(), 0, "{bytes:?}");
        }
        // Silent ones take no place for long.
        let silent: Vec<_> = (0..9)
            .filter_map(|_| unix::connect(Name::Path(&at)).ok())
            .collect();
        assert!(silent.len() >= MOST_WAITING);
        acceptor.look(&listener, &view).unwrap();
        assert!(acceptor.waiting.len() <= MOST_WAITING);
        // One that claims to be the peer and proves nothing.
        let wire = unix::connect(Name::Path(&at)).unwrap();
        unix::send_with_fds(&wire, &hello, &[]).unwrap();
        acceptor.look(&listener, &view).unwrap();
        let link = Link([7; DIGEST]);
        link.offer(&wire, bell.as_fd(), bell.as_fd()).unwrap();
        assert!(acceptor.look(&listener, &view).unwrap().is_none());
    }
}
