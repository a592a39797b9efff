//! Keys of a client that cannot ask a user: a program under the preload library, which finds its settings in the environment.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;
use weft_verbs::tls::{Fingerprint, Identity, PublicKey, Tls, TlsError};

use crate::client::Keys;
use crate::error::Error;
use crate::name::Endpoint;

/// A file with our key pair.
pub const KEY: &str = "WEFT_FS_KEY";
/// A file with lines `HOST:PORT KEY`, as `weft key` keeps it.
pub const KNOWN: &str = "WEFT_FS_KNOWN";
/// Fingerprints of servers, with commas between; with them, [`KNOWN`] does not count.
pub const PEERS: &str = "WEFT_FS_PEERS";

/// Most bytes of a file of keys.
const MAX_KEYS: u64 = 1 << 20;

/// Keys from files.
pub struct FileKeys {
    identity: Identity,
    lasting: bool,
    known: Option<PathBuf>,
    only: Vec<Fingerprint>,
}

impl FileKeys {
    /// The keys in the environment: [`KEY`], [`KNOWN`], [`PEERS`]. Without a key pair the process has one of its own, which no server
    /// knows.
    ///
    /// # Errors
    /// [`Error::Local`] for an invalid key file or fingerprint.
    pub fn from_env() -> Result<Self, Error> {
        let local = |e: &dyn std::fmt::Display| Error::Local(e.to_string());
        let own = match std::env::var_os(KEY) {
            Some(path) => {
                let text = read(Path::new(&path), true).map_err(|e| local(&e))?;
                Some(Identity::from_pkcs8_pem(&text).map_err(|e| local(&e))?)
            }
            None => None,
        };
        let lasting = own.is_some();
        let only = std::env::var(PEERS).unwrap_or_default();
        let only = only.split(',').filter(|part| !part.is_empty());
        Ok(Self {
            identity: own
                .map_or_else(Identity::generate, Ok)
                .map_err(|e| local(&e))?,
            lasting,
            known: std::env::var_os(KNOWN).map(PathBuf::from),
            only: only
                .map(str::parse)
                .collect::<Result<_, TlsError>>()
                .map_err(|e| local(&e))?,
        })
    }

    /// The keys of a server that will do.
    fn good(&self, endpoint: &Endpoint) -> Vec<Fingerprint> {
        if !self.only.is_empty() {
            return self.only.clone();
        }
        // A file that others may change names no server that will do.
        let text = self.known.as_ref().map(|path| read(path, false));
        let text = text.and_then(Result::ok).unwrap_or_default();
        let name = endpoint.to_string();
        let mut good: Vec<_> = text
            .lines()
            .filter_map(|line| line.trim().split_once(char::is_whitespace))
            .filter(|(of, _)| *of == name)
            .filter_map(|(_, key)| key.trim().parse::<PublicKey>().ok())
            .map(|key| key.fingerprint())
            .collect();
        if self.lasting {
            // A server of this user has the same key pair, and nobody else has it.
            good.push(self.identity.public_key().fingerprint());
        }
        good
    }
}

impl Keys for FileKeys {
    fn tls(&self, endpoint: &Endpoint) -> Result<Tls, Error> {
        let good = self.good(endpoint);
        Tls::new(self.identity.clone())
            .and_then(|tls| tls.allow(move |key| good.contains(&key.fingerprint())))
            .map_err(|e| Error::Local(e.to_string()))
    }
}

/// Reads a file of keys, by the same rules as `weft`: it belongs to this user (or root, if it is no secret), only they may change it, and only they may read
/// a secret.
fn read(path: &Path, secret: bool) -> io::Result<String> {
    let refused = |why| io::Error::other(format!("{}: {why}", path.display()));
    // A FIFO would block.
    let file = File::options()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)?;
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(refused("it is no regular file"));
    }
    let us = rustix::process::geteuid().as_raw();
    if about.uid() != us && (secret || about.uid() != 0) {
        return Err(refused("it belongs to another user"));
    }
    let others = if secret { 0o077 } else { 0o022 };
    if about.mode() & others != 0 {
        return Err(refused("other users can use it (`chmod 600` helps)"));
    }
    let mut text = String::new();
    file.take(MAX_KEYS + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_KEYS {
        return Err(refused("it is longer than 1 MiB"));
    }
    Ok(text)
}

/// For tests and measurements: the same settings for every server.
impl Keys for Tls {
    fn tls(&self, _: &Endpoint) -> Result<Tls, Error> {
        Ok(self.clone())
    }
}

/// Keys as the environment says, to be shared.
///
/// # Errors
/// As [`FileKeys::from_env`].
pub fn from_env() -> Result<Arc<dyn Keys>, Error> {
    Ok(Arc::new(FileKeys::from_env()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::Mode;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn keys_that_others_may_use_and_endless_ones_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "text").unwrap();
        for (mode, secret, known) in [
            (0o600, true, true),
            (0o644, false, true),
            (0o640, false, true),
            (0o620, false, false),
            (0o602, false, false),
        ] {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, mode).unwrap();
            assert_eq!(
                (read(&path, true).is_ok(), read(&path, false).is_ok()),
                (secret, known)
            );
        }
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(&path, mode).unwrap();
        for (len, fits) in [(MAX_KEYS, true), (MAX_KEYS + 1, false)] {
            std::fs::write(&path, vec![b'x'; len as usize]).unwrap();
            assert_eq!(read(&path, true).is_ok(), fits);
        }
        rustix::fs::mkfifoat(
            rustix::fs::CWD,
            dir.path().join("fifo"),
            Mode::from_raw_mode(0o600),
        )
        .unwrap();
        read(&dir.path().join("fifo"), true).unwrap_err();
        read(dir.path(), false).unwrap_err();
    }
}
