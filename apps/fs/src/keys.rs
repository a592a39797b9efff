//! Keys of a client that cannot ask a user: a program under the preload library, which finds its settings in the environment.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use weft_service::trust::{self, Guard, Refused};
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
                let path = Path::new(&path);
                let text = trust::read(path, Guard::Secret).map_err(|e| refused(path, &e))?;
                let text = String::from_utf8_lossy(&text);
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

    /// The keys of a server that will do. A file that others may change, or with a line that cannot be read, is an error.
    fn good(&self, endpoint: &Endpoint) -> Result<Vec<Fingerprint>, Error> {
        if !self.only.is_empty() {
            return Ok(self.only.clone());
        }
        let mut good = Vec::new();
        if let Some(path) = &self.known {
            let text = match trust::read(path, Guard::Public) {
                Err(Refused::Io(e)) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
                text => text.map_err(|e| refused(path, &e))?,
            };
            let name = endpoint.to_string();
            for (number, line) in trust::lines(&text).map_err(|e| refused(path, &e))? {
                let why = |e| Error::Local(format!("{}, line {number}: {e}", path.display()));
                let (of, key) = PublicKey::of_line(line).map_err(why)?;
                if of == name {
                    good.push(key.fingerprint());
                }
            }
        }
        if self.lasting {
            // A server of this user has the same key pair, and nobody else has it.
            good.push(self.identity.public_key().fingerprint());
        }
        Ok(good)
    }
}

fn refused(path: &Path, why: &Refused) -> Error {
    Error::Local(format!("{} {why}", path.display()))
}

impl Keys for FileKeys {
    fn tls(&self, endpoint: &Endpoint) -> Result<Tls, Error> {
        let good = self.good(endpoint)?;
        Tls::new(self.identity.clone())
            .and_then(|tls| tls.allow(move |key| good.contains(&key.fingerprint())))
            .map_err(|e| Error::Local(e.to_string()))
    }
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

    #[test]
    fn a_bad_line_of_known_servers_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("known");
        let server = Identity::generate().unwrap().public_key();
        let keys = FileKeys {
            identity: Identity::generate().unwrap(),
            lasting: false,
            known: Some(path.clone()),
            only: Vec::new(),
        };
        let endpoint = Endpoint::parse("a:1", 1).unwrap();
        assert_eq!(keys.good(&endpoint).unwrap(), []);
        let good = format!("# ours\na:1 {server}\nb:1 {server}\n");
        std::fs::write(&path, &good).unwrap();
        assert_eq!(keys.good(&endpoint).unwrap(), [server.fingerprint()]);
        std::fs::write(&path, good + "c:1\n").unwrap();
        let why = keys.good(&endpoint).unwrap_err().to_string();
        assert!(why.contains("line 4"), "{why}");
    }
}
