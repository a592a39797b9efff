//! The shared key: files that hold it, and the proof that both sides have the same without sending it.
//!
//! Proof = HMAC-SHA256(key, "weft-cp proof" | version | role | initiator's nonce | responder's nonce | binding). The
//! initiator (role 1) proves first, the responder (role 2) only to an initiator that has: a stranger on
//! the network learns nothing to try keys against. The binding is that of the TLS connection: a proof that
//! somebody relays holds on no other connection. See docs/spec/cp.md.

use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::protocol::{PROOF_LEN, VERSION};
use weft_cli::failure::Failure;
use weft_cli::identity::file::{self, Guard};

/// A shared key of 32 bytes or more.
#[derive(Clone)]
pub struct Key(Vec<u8>);

/// The subject of a proof: fresh challenges of both sides, and the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Challenge {
    /// The initiator's nonce.
    pub initiator: [u8; PROOF_LEN],
    /// The responder's.
    pub responder: [u8; PROOF_LEN],
    /// The same on both sides of one TLS connection, and on no other; zero without TLS.
    pub binding: [u8; 32],
}

/// Which side proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The sender of files, which connects.
    Initiator = 1,
    /// The receiver, which listens.
    Responder = 2,
}

impl Key {
    /// A key from its bytes, at least 32.
    pub fn new(bytes: Vec<u8>) -> Option<Self> {
        (bytes.len() >= PROOF_LEN).then_some(Self(bytes))
    }

    /// Reads a key file: 64 or more hexadecimal digits, or at least 32 raw bytes. Its owner alone may have
    /// any right to it.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let shown = path.display();
        let bytes = file::read(path, "key file", Guard::Secret)?.ok_or_else(|| {
            Failure::failed(format!("there is no key file {shown}"))
                .hint("make one with `weft cp --gen-key FILE` and copy it to the other machine")
        })?;
        let key = parse_hex(bytes.trim_ascii()).unwrap_or(bytes);
        Self::new(key).ok_or_else(|| {
            Failure::usage(format!(
                "the key in {shown} is shorter than 32 bytes (64 hexadecimal digits)"
            ))
            .hint("make one with `weft cp --gen-key FILE`")
        })
    }

    /// Makes a new random key in a new file that only its owner can read.
    pub fn generate(path: &Path) -> Result<(), Failure> {
        let mut bytes = [0; PROOF_LEN];
        fill_random(&mut bytes)?;
        let text = hex(&bytes);
        file::write_whole(path, format!("{text}\n").as_bytes(), false)
            .map_err(|e| {
                Failure::failed(format!("cannot write the key file {}: {e}", path.display()))
                    .hint("name a new file in a directory that you can write to; an existing file is left alone")
            })
    }

    fn mac(&self, role: Role, about: &Challenge) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(b"weft-cp proof");
        mac.update(&VERSION.to_be_bytes());
        mac.update(&[role as u8]);
        mac.update(&about.initiator);
        mac.update(&about.responder);
        mac.update(&about.binding);
        mac
    }

    /// The proof that this side has the key.
    pub fn prove(&self, role: Role, about: &Challenge) -> [u8; PROOF_LEN] {
        self.mac(role, about).finalize().into_bytes().into()
    }

    /// Whether the other side, in the given role, has the key; takes the same time for every wrong proof.
    pub fn verify(&self, role: Role, about: &Challenge, proof: &[u8; PROOF_LEN]) -> bool {
        self.mac(role, about).verify_slice(proof).is_ok()
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Fills `out` from the system's random source.
pub fn fill_random(out: &mut [u8]) -> Result<(), Failure> {
    getrandom::fill(out).map_err(|e| {
        Failure::failed(format!("no random numbers from the system: {e}"))
            .hint("check that getrandom(2) or /dev/urandom works here")
    })
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, b| {
        text.extend([b >> 4, b & 15].map(|d| char::from(b"0123456789abcdef"[usize::from(d)])));
        text
    })
}

fn parse_hex(text: &[u8]) -> Option<Vec<u8>> {
    if text.len() < 2 * PROOF_LEN || !text.len().is_multiple_of(2) {
        return None;
    }
    text.chunks_exact(2)
        .map(|pair| Some((hex_digit(pair[0])? << 4) | hex_digit(pair[1])?))
        .collect()
}

fn hex_digit(c: u8) -> Option<u8> {
    char::from(c).to_digit(16).map(|d| d as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_proof_holds_only_for_its_key_role_nonces_and_connection() {
        let key = Key::new(vec![1; 32]).unwrap();
        let other = Key::new(vec![2; 32]).unwrap();
        let about = Challenge {
            initiator: [3; 32],
            responder: [4; 32],
            binding: [5; 32],
        };
        let proof = key.prove(Role::Initiator, &about);
        let holds = |about| key.verify(Role::Initiator, &about, &proof);
        assert!(holds(about));
        assert!(
            !key.verify(Role::Responder, &about, &proof),
            "a reflected proof"
        );
        assert!(!other.verify(Role::Initiator, &about, &proof));
        let (initiator, responder) = (about.responder, about.initiator);
        assert!(!holds(Challenge {
            initiator,
            responder,
            ..about
        }));
        let responder = [6; 32];
        assert!(!holds(Challenge { responder, ..about }), "a replayed proof");
        let binding = [6; 32];
        assert!(!holds(Challenge { binding, ..about }), "a relayed proof");
        assert!(Key::new(vec![0; 31]).is_none());
        assert_eq!(format!("{key:?}"), "Key(..)");
    }

    #[test]
    fn key_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        Key::generate(&path).unwrap();
        assert!(
            Key::generate(&path).is_err(),
            "an existing file is left alone"
        );
        let key = Key::read(&path).unwrap();
        assert_eq!(key.0.len(), 32);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.trim().len(), 64);

        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(
            Key::read(&path)
                .unwrap_err()
                .what()
                .contains("used by others")
        );
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, [0xff; 40]).unwrap();
        assert_eq!(Key::read(&path).unwrap().0, [0xff; 40]);
        std::fs::write(&path, "short").unwrap();
        assert!(Key::read(&path).is_err());
        assert!(Key::read(dir.path()).is_err());
    }
}
