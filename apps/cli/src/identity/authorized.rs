//! Whose files a listener takes: a file with a public key (or its fingerprint) a line.

use std::path::{Path, PathBuf};

use weft_verbs::tls::Fingerprint;

use super::Folder;
use super::file::{self, Guard};
use crate::failure::Failure;

const WHAT: &str = "file of authorised keys";

/// An `authorized_keys` file.
#[derive(Debug, Clone)]
pub struct Authorized(PathBuf);

impl Authorized {
    /// In this file, which need not exist.
    pub fn at(path: &Path) -> Self {
        Self(path.into())
    }

    /// In the file that the user names, or in the usual one. `None` without a home directory.
    pub fn named_or_usual(named: Option<&Path>) -> Option<Self> {
        match named {
            Some(path) => Some(Self::at(path)),
            None => Some(Self::at(&Folder::of_user().ok()?.authorized_keys())),
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether this key stands in the file now. A file that cannot be used admits nobody.
    pub fn admits(&self, key: &Fingerprint) -> bool {
        self.keys()
            .inspect_err(|e| tracing::error!("nobody's key counts: {e}"))
            .is_ok_and(|keys| keys.contains(key))
    }

    /// The fingerprints of the keys that stand in the file now; none without a file.
    pub fn keys(&self) -> Result<Vec<Fingerprint>, Failure> {
        let Some(text) = file::read(&self.0, WHAT, Guard::Public)? else {
            return Ok(Vec::new());
        };
        file::lines(&text, &self.0, WHAT)?
            .map(|(number, line)| {
                Fingerprint::of_line(line).map_err(|e| {
                    Failure::usage(format!("{}, line {number}: {e}", self.0.display())).hint(
                        "a line is a public key as `weft key` prints it, or a fingerprint; a comment begins with #",
                    )
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::keypair;

    #[test]
    fn keys_fingerprints_and_comments() {
        let dir = tempfile::tempdir().unwrap();
        let authorized = Authorized::at(&dir.path().join("authorized_keys"));
        assert!(authorized.keys().unwrap().is_empty());
        let keys = [(), ()].map(|()| keypair::generate().unwrap().public_key());
        let text = format!(
            "# friends\n\n{} me@here\n  {} a laptop\n",
            keys[0],
            keys[1].fingerprint()
        );
        std::fs::write(authorized.path(), text).unwrap();
        assert_eq!(
            authorized.keys().unwrap(),
            keys.map(|key| key.fingerprint())
        );
        std::fs::write(authorized.path(), "\nssh-ed25519 AAAA\n").unwrap();
        let failure = authorized.keys().unwrap_err().to_string();
        assert!(failure.contains("line 2"), "{failure}");
    }
}
