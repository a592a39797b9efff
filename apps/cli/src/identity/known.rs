//! The keys of listeners that we have sent to: a file with a name, `HOST:PORT`, and a public key a line.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use weft_verbs::tls::PublicKey;

use super::file::{self, Guard};
use crate::failure::Failure;

const WHAT: &str = "file of known peers";
/// How long to wait for another program that changes the file.
const PATIENCE: Duration = Duration::from_secs(5);

/// A `known_peers` file.
#[derive(Debug, Clone)]
pub struct Known(PathBuf);

/// What the file says of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// Nothing.
    Unknown,
    /// This key.
    Same,
    /// Another key, on this line.
    Other(usize),
}

impl Known {
    /// In this file, which need not exist.
    pub fn at(path: &Path) -> Self {
        Self(path.into())
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The keys known of a name, with their lines.
    pub fn keys(&self, name: &str) -> Result<Vec<(usize, PublicKey)>, Failure> {
        match file::read(&self.0, WHAT, Guard::Public)? {
            None => Ok(Vec::new()),
            Some(text) => self.find(&text, name),
        }
    }

    fn find(&self, text: &[u8], name: &str) -> Result<Vec<(usize, PublicKey)>, Failure> {
        let mut found = Vec::new();
        for (number, line) in file::lines(text, &self.0, WHAT)? {
            // Of a line that cannot be read nobody knows whom it is about.
            let (of, key) = PublicKey::of_line(line).map_err(|e| {
                Failure::usage(format!("{}, line {number}: {e}", self.0.display()))
                    .hint("repair the line or take it out: a line is HOST:PORT and a public key")
            })?;
            if of == name {
                found.push((number, key));
            }
        }
        Ok(found)
    }

    /// What the file says of a name that shows this key.
    pub fn look_up(&self, name: &str, key: &PublicKey) -> Result<Entry, Failure> {
        Ok(entry(&self.keys(name)?, key))
    }

    /// Adds a key, unless somebody else has added one meanwhile; says what the file said before.
    pub fn add(&self, name: &str, key: &PublicKey) -> Result<Entry, Failure> {
        let (mut file, text) = self
            .locked(true)?
            .ok_or_else(|| self.cannot(&io::ErrorKind::NotFound.into()))?;
        let before = entry(&self.find(&text, name)?, key);
        if before == Entry::Unknown {
            let gap = if text.last().is_none_or(|&b| b == b'\n') {
                ""
            } else {
                "\n"
            };
            file.write_all(format!("{gap}{name} {key}\n").as_bytes())
                .and_then(|()| file.sync_all())
                .map_err(|e| self.cannot(&e))?;
        }
        Ok(before)
    }

    /// Takes all keys of the names out for which `forget` says so; how many lines that were.
    pub fn remove(&self, forget: impl Fn(&str) -> bool) -> Result<usize, Failure> {
        let Some((_lock, text)) = self.locked(false)? else {
            return Ok(0);
        };
        let kept: Vec<&[u8]> = text
            .split_inclusive(|&b| b == b'\n')
            .filter(|line| {
                let line = String::from_utf8_lossy(line);
                let name = line.split_whitespace().next().unwrap_or_default();
                name.starts_with('#') || !forget(name)
            })
            .collect();
        let gone = text.split_inclusive(|&b| b == b'\n').count() - kept.len();
        if gone > 0 {
            file::write_whole(&self.0, &kept.concat(), true).map_err(|e| self.cannot(&e))?;
        }
        Ok(gone)
    }

    fn cannot(&self, e: &io::Error) -> Failure {
        Failure::failed(format!("cannot change {}: {e}", self.0.display()))
            .hint("check its permissions and those of its directory")
    }

    /// The file, open to append to it, and its content, which nobody changes while the file is open. `make` it if there is none.
    fn locked(&self, make: bool) -> Result<Option<(File, Vec<u8>)>, Failure> {
        let end = Instant::now() + PATIENCE;
        if make {
            file::make_parent(&self.0).map_err(|e| self.cannot(&e))?;
        }
        loop {
            let opened = OpenOptions::new()
                .read(true)
                .append(true)
                .create(make)
                .mode(0o600)
                .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
                .open(&self.0);
            let file = match opened {
                Err(e) if e.kind() == io::ErrorKind::NotFound && !make => return Ok(None),
                other => other.map_err(|e| self.cannot(&e))?,
            };
            match file.try_lock() {
                // Who had the lock before may have put another file in its place.
                Ok(()) if self.is(&file) => {
                    let text = file::read_open(&file, &self.0, WHAT, Guard::Public)?;
                    return Ok(Some((file, text)));
                }
                Err(TryLockError::Error(e)) => return Err(self.cannot(&e)),
                Ok(()) | Err(TryLockError::WouldBlock) => {}
            }
            if Instant::now() >= end {
                return Err(self.cannot(&io::Error::other("another program has locked it")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn is(&self, file: &File) -> bool {
        let id = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
        match (file.metadata(), std::fs::metadata(&self.0)) {
            (Ok(open), Ok(named)) => id(open) == id(named),
            _ => false,
        }
    }
}

fn entry(known: &[(usize, PublicKey)], key: &PublicKey) -> Entry {
    match known {
        [] => Entry::Unknown,
        known if known.iter().any(|(_, known)| known == key) => Entry::Same,
        [(line, _), ..] => Entry::Other(*line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::keypair;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn keys_are_pinned_found_and_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let known = Known::at(&dir.path().join("weft/known_peers"));
        let keys = [(), ()].map(|()| keypair::generate().unwrap().public_key());
        let name = "host:7471".to_owned();
        assert_eq!(known.look_up(&name, &keys[0]).unwrap(), Entry::Unknown);
        assert_eq!(known.remove(|_| true).unwrap(), 0);
        assert_eq!(known.add(&name, &keys[0]).unwrap(), Entry::Unknown);
        assert_eq!(known.add(&name, &keys[0]).unwrap(), Entry::Same);
        assert_eq!(known.add(&name, &keys[1]).unwrap(), Entry::Other(1));
        known.add("other:1", &keys[1]).unwrap();

        // Somebody edits it: comments, no end of line, a second key of a name.
        let text = std::fs::read_to_string(known.path()).unwrap();
        assert_eq!(text.lines().count(), 2);
        let text = format!("# mine\n\n{}", text.trim_end());
        std::fs::write(known.path(), text).unwrap();
        assert_eq!(known.look_up(&name, &keys[1]).unwrap(), Entry::Other(3));
        known.add("third:1", &keys[1]).unwrap();
        assert_eq!(known.look_up("third:1", &keys[1]).unwrap(), Entry::Same);

        assert_eq!(known.remove(|of| of == name).unwrap(), 1);
        assert_eq!(known.look_up(&name, &keys[1]).unwrap(), Entry::Unknown);
        assert_eq!(known.look_up("other:1", &keys[1]).unwrap(), Entry::Same);
        assert!(
            std::fs::read_to_string(known.path())
                .unwrap()
                .starts_with("# mine\n")
        );

        // What cannot be read could be about anybody.
        std::fs::write(known.path(), "host:7471 nonsense\n").unwrap();
        let failure = known.look_up("other:1", &keys[0]).unwrap_err().to_string();
        assert!(failure.contains("line 1"), "{failure}");
        std::fs::set_permissions(known.path(), PermissionsExt::from_mode(0o666)).unwrap();
        let failure = known.add("other:1", &keys[0]).unwrap_err().to_string();
        assert!(failure.contains("chmod go-w"), "{failure}");
    }

    #[test]
    fn many_add_at_once_and_none_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let known = Known::at(&dir.path().join("known_peers"));
        let key = keypair::generate().unwrap().public_key();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (known, key) = (&known, &key);
                scope.spawn(move || {
                    for i in 0..5 {
                        known.add(&format!("host{thread}:{i}"), key).unwrap();
                        known.add(&format!("gone{thread}:{i}"), key).unwrap();
                        known
                            .remove(|name| name == format!("gone{thread}:{i}"))
                            .unwrap();
                    }
                });
            }
        });
        let text = std::fs::read_to_string(known.path()).unwrap();
        assert_eq!(text.lines().count(), 40, "{text}");
    }
}
