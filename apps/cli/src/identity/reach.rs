//! Where a listener may be reached: beyond this machine only if its user has said who is admitted.

use std::net::SocketAddr;

use super::authorized::Authorized;
use crate::failure::Failure;

/// Whether only processes of this machine reach the address.
pub fn is_of_this_machine(addr: SocketAddr) -> bool {
    addr.ip().to_canonical().is_loopback()
}

/// What a listener says of itself in the words of an error.
#[derive(Debug, Clone, Copy)]
pub struct Words<'a> {
    /// Who connects: `clients`.
    pub peers: &'a str,
    /// What they may do: `watch`.
    pub may: &'a str,
    /// Another way to admit them, before `--open`; empty without one.
    pub or: &'a str,
}

/// Refuses an address beyond this machine if no key is authorised and the user has not asked for `--open` or something like it.
///
/// # Errors
/// It is such an address; the file of keys cannot be used.
pub fn check(
    bind: SocketAddr,
    authorized: Option<&Authorized>,
    is_open: bool,
    words: Words<'_>,
) -> Result<(), Failure> {
    // What is wrong with the file is said in any case.
    let known = authorized.map_or(Ok(0), |file| file.keys().map(|keys| keys.len()))?;
    if is_of_this_machine(bind) || known > 0 || is_open {
        return Ok(());
    }
    let file = authorized.map_or_else(
        || "a file for --authorized".into(),
        |authorized| authorized.path().display().to_string(),
    );
    let Words { peers, may, or } = words;
    Err(Failure::usage(format!(
        "{bind} can be reached from other machines, and no key there may {may} yet"
    ))
    .hint(format!(
        "put the {peers}' public keys (`weft key` prints them) into {file};{or} --open lets everybody in"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_machine_a_key_or_a_word_is_needed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("authorized_keys");
        let keys = Authorized::at(&file);
        let words = Words {
            peers: "clients",
            may: "watch",
            or: "",
        };
        let check = |bind: &str, open| check(bind.parse().unwrap(), Some(&keys), open, words);
        for here in ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            check(here, false).unwrap();
        }
        for beyond in ["0.0.0.0:1", "[::]:1", "192.0.2.1:1", "[::ffff:192.0.2.1]:1"] {
            assert!(check(beyond, false).is_err(), "{beyond}");
            check(beyond, true).unwrap();
        }
        let (identity, _) =
            crate::identity::keypair::read_or_make(&dir.path().join("key")).unwrap();
        let line = crate::identity::keypair::line(&identity.public_key());
        std::fs::write(&file, line).unwrap();
        check("0.0.0.0:1", false).unwrap();
    }
}
