//! Keys of a client that cannot ask a user: a program under the preload library, which finds its settings in the environment.

use std::path::PathBuf;
use std::sync::Arc;

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
                let text = std::fs::read_to_string(path).map_err(|e| local(&e))?;
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
        let text = self.known.as_ref().map(std::fs::read_to_string);
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
