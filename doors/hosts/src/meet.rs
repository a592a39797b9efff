//! How two brokers make sure that they mean the same TCP connection.
//!
//! The dialler sends its two addresses and how many bytes it knows of the stream's beginning. The acceptor offers the connections that it may mean:
//! the one with exactly the addresses and ports that the dialler names; if the broker runs with `--nat` (addresses are translated on the way), also those
//! whose peer has the address that the side connection comes from, and then only one of them may fit. Each end proves by a digest that it knows the first
//! bytes, under a fresh key from both ends. The messages reveal nothing else of these bytes.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use hmac::Mac;
use rustix::io::Errno;
use weft_run::hosts::{self, Registration};
use weft_run::meet::Why;
use weft_sdp::{RecvFlags, Sink, Source, Stream};

use crate::wire::{self, CANDIDATES, DIGEST, MAGIC_LEN, NONE, OPEN, Open, Prover, WireError};

/// How long the acceptor waits for a program to register.
const PATIENCE: Duration = Duration::from_secs(20);
/// After this time connections with other addresses are offered, if addresses are translated on the way.
const EXACT: Duration = Duration::from_secs(1);
/// Time limit of a message.
const MESSAGE: Duration = Duration::from_secs(10);

/// A connection whose peer has called `connect`, and that waits for the peer's broker.
pub(crate) struct Waiting {
    pub(crate) id: u64,
    pub(crate) what: Registration,
    pub(crate) wire: OwnedFd,
}

impl Waiting {
    /// Returns true if the program has closed the connection, or ended.
    pub(crate) fn is_gone(&self) -> bool {
        !matches!(hosts::take_link(&self.wire), Err(e) if e.kind() == io::ErrorKind::WouldBlock)
    }
}

/// Returns true if a program's connection may be the one that a broker at `from` means.
pub(crate) fn may_be(one: &Registration, from: IpAddr) -> bool {
    one.ends.peer.ip() == from
}

/// Connections that programs have registered.
pub(crate) trait Candidates {
    /// Waits until `pick` finds some, at most until the given time. Returns their numbers.
    fn wait(&self, until: Instant, pick: impl FnMut(&[Waiting]) -> Option<Vec<u64>>) -> Vec<u64>;
    /// Looks at a waiting connection, if it is still there.
    fn look<T>(&self, id: u64, look: impl FnOnce(&Registration) -> T) -> Option<T>;
    /// Removes a waiting connection and returns it.
    fn take(&self, id: u64) -> Option<Waiting>;
}

/// Why they do not meet.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MeetError {
    #[error("the connection between the brokers: {0}")]
    Stream(#[from] Errno),
    #[error("the other broker has ended the connection")]
    End,
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("no program here has this connection")]
    Nobody,
    #[error("what both ends know of the connection differs")]
    Differs,
    #[error("no random numbers: {0}")]
    Random(getrandom::Error),
}

fn nonce() -> Result<[u8; 32], MeetError> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(MeetError::Random)?;
    Ok(nonce)
}

fn read<const N: usize>(stream: &Stream) -> Result<[u8; N], MeetError> {
    let mut bytes = [0; N];
    match stream.recv(&mut [Sink::Bytes(&mut bytes)], RecvFlags::WAITALL)? {
        n if n == N => Ok(bytes),
        _ => Err(MeetError::End),
    }
}

fn write(stream: &Stream, bytes: &[u8]) -> Result<(), MeetError> {
    match stream.send(&[Source::Bytes(bytes)], false)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(MeetError::End),
    }
}

fn limit(stream: &Stream, limit: Duration) {
    stream.set_recv_timeout(Some(limit));
    stream.set_send_timeout(Some(limit));
}

/// The part of the end whose program has called `connect`.
pub(crate) fn dialler(stream: &Stream, what: &Registration) -> Result<(), Why> {
    try_dialler(stream, what).map_err(|error| {
        tracing::debug!(peer = %what.ends.peer, %error, "not confirmed");
        Why::NotConfirmed
    })
}

fn try_dialler(stream: &Stream, what: &Registration) -> Result<(), MeetError> {
    let (sent, received) = (what.sent.bytes(), what.received.bytes());
    let ours = nonce()?;
    limit(stream, MESSAGE);
    let open = Open {
        own: what.ends.own,
        peer: what.ends.peer,
        known: [sent.len() as u8, received.len() as u8],
        nonce: ours,
    };
    write(stream, &open.emit())?;
    stream.set_recv_timeout(Some(PATIENCE + MESSAGE));
    let count = usize::from(read::<1>(stream)?[0]);
    if count == 0 {
        return Err(MeetError::Nobody);
    }
    if count > CANDIDATES {
        return Err(WireError::Field.into());
    }
    stream.set_recv_timeout(Some(MESSAGE));
    let nonces = [ours, read::<32>(stream)?];
    let mut proofs = Vec::with_capacity(count * DIGEST);
    let mut lens = Vec::with_capacity(count);
    for _ in 0..count {
        let both = read::<2>(stream)?;
        if usize::from(both[0]) + usize::from(both[1]) < weft_run::hosts::ENOUGH {
            return Err(WireError::Field.into());
        }
        let proof =
            wire::digest(Prover::Dialler, &nonces, both, sent, received).ok_or(WireError::Field)?;
        proofs.extend(proof.finalize().into_bytes());
        lens.push(both);
    }
    write(stream, &proofs)?;
    let [which] = read::<1>(stream)?;
    let theirs = read::<DIGEST>(stream)?;
    let Some(&both) = lens.get(usize::from(which)) else {
        return Err(MeetError::Differs);
    };
    wire::digest(Prover::Acceptor, &nonces, both, sent, received)
        .is_some_and(|mac| mac.verify_slice(&theirs).is_ok())
        .then_some(())
        .ok_or(MeetError::Differs)
}

/// The first bytes of what another broker says: they tell what it wants.
pub(crate) fn first(stream: &Stream) -> Result<[u8; MAGIC_LEN], MeetError> {
    limit(stream, MESSAGE);
    read(stream)
}

/// The part of the end whose program has called `accept`, after the [first] bytes. Returns the program's registration, which no other thread gets from now on.
pub(crate) fn acceptor(
    stream: &Stream,
    magic: [u8; MAGIC_LEN],
    from: IpAddr,
    nat: bool,
    candidates: &impl Candidates,
) -> Result<Waiting, MeetError> {
    let rest = read::<{ OPEN - MAGIC_LEN }>(stream)?;
    let mut bytes = [0; OPEN];
    bytes[..MAGIC_LEN].copy_from_slice(&magic);
    bytes[MAGIC_LEN..].copy_from_slice(&rest);
    let open = Open::parse(&bytes)?;
    let began = Instant::now();
    let fits = |one: &Waiting| may_be(&one.what, from) && wire::common(&open, &one.what).is_some();
    let ids = candidates.wait(began + PATIENCE, |waiting| {
        let exact = waiting.iter().find(|one| {
            fits(one) && one.what.ends.peer == open.own && one.what.ends.own == open.peer
        });
        if let Some(one) = exact {
            return Some(vec![one.id]);
        }
        if !nat || began.elapsed() <= EXACT {
            return None;
        }
        // All of them are checked, or none, because the choice has to be unambiguous.
        let others: Vec<u64> = waiting
            .iter()
            .filter(|one| fits(one))
            .map(|one| one.id)
            .collect();
        (1..=CANDIDATES).contains(&others.len()).then_some(others)
    });
    let ours = nonce()?;
    let nonces = [open.nonce, ours];
    // One may have gone meanwhile.
    let offered: Vec<(u64, [u8; 2])> = ids
        .iter()
        .filter_map(|&id| Some((id, candidates.look(id, |one| wire::common(&open, one))??)))
        .collect();
    if offered.is_empty() {
        write(stream, &[0])?;
        return Err(MeetError::Nobody);
    }
    let mut offer = vec![offered.len() as u8];
    offer.extend(ours);
    for (_, lens) in &offered {
        offer.extend(lens);
    }
    write(stream, &offer)?;
    let mut found = Vec::new();
    // All of them are read, also behind one that fits.
    for (index, (id, lens)) in offered.iter().enumerate() {
        let proof = read::<DIGEST>(stream)?;
        let matches = |one: &Registration| {
            wire::digest(
                Prover::Dialler,
                &nonces,
                *lens,
                one.received.bytes(),
                one.sent.bytes(),
            )
            .is_some_and(|mac| mac.verify_slice(&proof).is_ok())
        };
        if candidates.look(*id, matches) == Some(true) {
            found.push((index, *id, *lens));
        }
    }
    let taken = match found.as_slice() {
        &[(index, id, lens)] => candidates.take(id).map(|one| (index, lens, one)),
        _ => None,
    };
    let Some((index, lens, one)) = taken else {
        let mut verdict = vec![NONE];
        verdict.extend([0; DIGEST]);
        write(stream, &verdict)?;
        return Err(MeetError::Differs);
    };
    let mac = wire::digest(
        Prover::Acceptor,
        &nonces,
        lens,
        one.what.received.bytes(),
        one.what.sent.bytes(),
    )
    .ok_or(WireError::Field)?;
    let mut verdict = vec![index as u8];
    verdict.extend(mac.finalize().into_bytes());
    write(stream, &verdict)?;
    Ok(one)
}
