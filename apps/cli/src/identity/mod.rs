//! Who one is, and whom one knows, in the manner of SSH: a key pair, known peers, authorised keys.
//!
//! [`keypair`] makes and reads our key pair, [`known`] remembers the keys of listeners, [`authorized`] says whose files a listener
//! takes, [`trust`] decides about a listener's key and asks the user, [`credentials`] is what a client needs for a connection, [`reach`] says whether a listener
//! may be reached from elsewhere. All of them are files in [`Folder`], which nobody else may change; [`mod@file`] checks that. There are no connections here.

use std::path::{Path, PathBuf};

pub mod authorized;
pub mod credentials;
pub mod file;
pub mod keypair;
pub mod known;
pub mod reach;
pub mod trust;

use crate::failure::Failure;

/// The folder of the files of a user.
#[derive(Debug, Clone)]
pub struct Folder(PathBuf);

impl Folder {
    /// `weft` below `$XDG_CONFIG_HOME`, or below `~/.config`.
    pub fn of_user() -> Result<Self, Failure> {
        let absolute = |name| {
            std::env::var_os(name)
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
        };
        let config = absolute("XDG_CONFIG_HOME")
            .or_else(|| absolute("HOME").map(|home| home.join(".config")))
            .ok_or_else(|| {
                Failure::failed("there is no home directory to keep keys in").hint(
                    "set HOME or XDG_CONFIG_HOME to an absolute path, or name the files (--identity and --authorized; `weft key`: --file)",
                )
            })?;
        Ok(Self(config.join("weft")))
    }

    /// This one.
    pub fn at(path: &Path) -> Self {
        Self(path.into())
    }

    /// Our key pair.
    pub fn key(&self) -> PathBuf {
        self.0.join("key")
    }

    /// The keys of listeners that we have sent to.
    pub fn known_peers(&self) -> PathBuf {
        self.0.join("known_peers")
    }

    /// The keys of those whose files our listeners take.
    pub fn authorized_keys(&self) -> PathBuf {
        self.0.join("authorized_keys")
    }
}
