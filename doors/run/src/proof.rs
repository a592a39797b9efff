//! The proof that two processes mean the same TCP connection where the kernel does not show both ends: each knows the first bytes of both directions.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::hosts::{Beginning, ENOUGH};

/// Bytes of a digest.
pub const DIGEST: usize = 32;

/// The end that proves that it knows the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prover {
    /// The end that has called `connect`.
    Dialler,
    /// The end that has called `accept`.
    Acceptor,
}

/// How many bytes of each direction's beginning both ends know: from the dialler, and to it. The dialler says of itself that it knows so many that it has sent
/// and received. `None`: too few to distinguish connections.
#[must_use]
pub fn common(dialler: [u8; 2], received: &Beginning, sent: &Beginning) -> Option<[u8; 2]> {
    let ours = [received, sent].map(|known| known.bytes().len() as u8);
    let both = [dialler[0].min(ours[0]), dialler[1].min(ours[1])];
    is_enough(both).then_some(both)
}

/// Whether so many bytes distinguish connections.
#[must_use]
pub fn is_enough(lens: [u8; 2]) -> bool {
    usize::from(lens[0]) + usize::from(lens[1]) >= ENOUGH
}

/// The keyed digest over the first bytes that both ends know. The key is fresh for each attempt and comes from both.
pub fn digest(
    who: Prover,
    nonces: &[[u8; 32]; 2],
    lens: [u8; 2],
    from_dialler: &[u8],
    to_dialler: &[u8],
) -> Option<Hmac<Sha256>> {
    let (a, b) = (
        from_dialler.get(..usize::from(lens[0]))?,
        to_dialler.get(..usize::from(lens[1]))?,
    );
    let mut mac = Hmac::<Sha256>::new_from_slice(&nonces.concat()).ok()?;
    mac.update(match who {
        Prover::Dialler => b"weft run, dialler ",
        Prover::Acceptor => b"weft run, acceptor",
    });
    mac.update(&lens);
    mac.update(a);
    mac.update(b);
    Some(mac)
}
