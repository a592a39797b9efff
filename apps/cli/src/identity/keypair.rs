//! Our key pair: a file that only its owner can read.

use std::io;
use std::path::{Path, PathBuf};

use weft_verbs::tls::{Identity, PublicKey, TlsError};

use super::Folder;
use super::file::{self, Guard};
use crate::failure::Failure;

const WHAT: &str = "key file";

/// Reads the key pair; `None` if there is no such file.
pub fn read(path: &Path) -> Result<Option<Identity>, Failure> {
    let Some(bytes) = file::read(path, WHAT, Guard::Secret)? else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(&bytes);
    Identity::from_pkcs8_pem(&text).map(Some).map_err(|e| {
        Failure::usage(format!("the key file {} cannot be used: {e}", path.display())).hint(
            "name a file made with `weft key`; a shared key of `weft cp --gen-key` belongs to --key",
        )
    })
}

/// Reads the key pair that is named, which has to be there.
pub fn named(path: &Path) -> Result<Identity, Failure> {
    read(path)?.ok_or_else(|| {
        Failure::failed(format!("there is no key pair in {}", path.display())).hint(format!(
            "make one with `weft key --file {}`",
            path.display()
        ))
    })
}

/// The key pair in the file that is named or in the usual one, if there is one.
pub fn own(path: Option<&Path>) -> Result<Option<Identity>, Failure> {
    match (path, Folder::of_user()) {
        (Some(path), _) => named(path).map(Some),
        (None, Ok(folder)) => read(&folder.key()),
        (None, Err(_)) => Ok(None),
    }
}

/// Makes a key pair, `replace`: in the place of one that is there.
pub fn make(path: &Path, replace: bool) -> Result<Identity, Failure> {
    let identity = generate()?;
    file::write_whole(path, identity.to_pkcs8_pem().as_bytes(), replace).map_err(|e| {
        let shown = path.display();
        if path.is_dir() {
            Failure::failed(format!("cannot write the key file {shown}: it is a directory"))
                .hint("name a file")
        } else if e.kind() == io::ErrorKind::AlreadyExists {
            Failure::failed(format!("there is a key pair in {shown} already"))
                .hint("`weft key --show` shows it; --force replaces it, and those who know its key do not know the new one")
        } else {
            Failure::failed(format!("cannot write the key file {shown}: {e}"))
                .hint("name a file that you can write: --identity FILE (`weft key`: --file FILE); or set HOME or XDG_CONFIG_HOME to a directory that you can write to")
        }
    })?;
    Ok(identity)
}

/// A key pair for the life of this process.
pub fn generate() -> Result<Identity, Failure> {
    Identity::generate().map_err(|e| {
        Failure::failed(format!("cannot make a key pair: {e}"))
            .hint("check that getrandom(2) works here")
    })
}

/// The file that is named, or the usual one.
pub fn file_of(named: Option<&Path>) -> Result<PathBuf, Failure> {
    match named {
        Some(path) => Ok(path.to_owned()),
        None => Folder::of_user().map(|folder| folder.key()),
    }
}

/// TLS does not take the key pair.
pub fn unusable(e: &TlsError) -> Failure {
    Failure::failed(format!("cannot use the key pair: {e}"))
        .hint("make another one with `weft key`")
}

/// Reads the key pair, or makes one. Whether it was made.
pub fn read_or_make(path: &Path) -> Result<(Identity, bool), Failure> {
    if let Some(identity) = read(path)? {
        return Ok((identity, false));
    }
    match make(path, false) {
        Ok(identity) => Ok((identity, true)),
        // Somebody else may have been as quick.
        Err(failure) => match read(path)? {
            Some(identity) => Ok((identity, false)),
            None => Err(failure),
        },
    }
}

/// A public key as a line of an `authorized_keys` file, with a comment that says whose it is.
pub fn line(key: &PublicKey) -> String {
    let system = rustix::system::uname();
    let host = system.nodename().to_string_lossy();
    match std::env::var("USER") {
        Ok(user) => format!("{key} {user}@{host}"),
        Err(_) => format!("{key} {host}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_pair_is_made_once_and_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weft/key");
        assert!(read(&path).unwrap().is_none());
        let (made, new) = read_or_make(&path).unwrap();
        let (again, newer) = read_or_make(&path).unwrap();
        assert_eq!(made.public_key(), again.public_key());
        assert!(new && !newer);
        assert!(
            make(&path, false)
                .unwrap_err()
                .to_string()
                .contains("--force")
        );
        let other = make(&path, true).unwrap();
        assert_ne!(made.public_key(), other.public_key());
        let line = line(&other.public_key());
        assert_eq!(line.parse(), Ok(other.public_key()), "{line}");
        std::fs::write(&path, "0123").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("--key"));
    }
}
