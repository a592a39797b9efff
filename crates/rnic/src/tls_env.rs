//! TLS settings in the environment.
//!
//! | variable | meaning |
//! |---|---|
//! | `WEFT_TLS` | `on`: connections use TLS, and others are refused; `off` (the default) |
//! | `WEFT_TLS_KEY` | file with our private key (PKCS #8 PEM, as `weft key` writes it); without it the process has a key for itself |
//! | `WEFT_TLS_PEERS` | file with the accepted keys, one public key or fingerprint a line; without it, any |

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use weft_sys::settings;
use weft_tls::{Fingerprint, Identity, PublicKey, Tls};

use crate::types::Error;

/// Longest file of keys that is read.
const LONGEST: u64 = 1 << 20;

fn set(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Whether the environment turns TLS on or off.
pub(crate) fn is_set() -> bool {
    set("WEFT_TLS").is_some()
}

/// A key that is nowhere else, and any peer.
pub(crate) fn ephemeral() -> Result<Tls, String> {
    let identity = Identity::generate().map_err(|e| e.to_string())?;
    Tls::new(identity).map_err(|e| e.to_string())
}

/// `None` when TLS is off.
pub(crate) fn from_env() -> Result<Option<Tls>, Error> {
    let tls = settings::TLS.read()?;
    from(
        tls.as_deref(),
        set("WEFT_TLS_KEY").as_deref(),
        set("WEFT_TLS_PEERS").as_deref(),
    )
    .map_err(Error::Setting)
}

fn from(
    tls: Option<&str>,
    key: Option<&OsStr>,
    peers: Option<&OsStr>,
) -> Result<Option<Tls>, String> {
    match tls {
        Some("on") => {}
        None if key.is_none() && peers.is_none() => return Ok(None),
        // A program that names a key expects protection.
        None => {
            return Err("WEFT_TLS_KEY or WEFT_TLS_PEERS is set, but WEFT_TLS is not `on`".into());
        }
        Some(_) => return Ok(None),
    }
    let tls = match key {
        Some(path) => {
            let identity = Identity::from_pkcs8_pem(&read("WEFT_TLS_KEY", Path::new(path), true)?)
                .map_err(|e| format!("WEFT_TLS_KEY: {}: {e}", Path::new(path).display()))?;
            Tls::new(identity).map_err(|e| e.to_string())?
        }
        None => ephemeral()?,
    };
    let Some(path) = peers else {
        return Ok(Some(tls));
    };
    let known = fingerprints(&read("WEFT_TLS_PEERS", Path::new(path), false)?)
        .map_err(|e| format!("WEFT_TLS_PEERS: {}: {e}", Path::new(path).display()))?;
    let allow = move |key: &PublicKey| known.contains(&key.fingerprint());
    tls.allow(allow).map(Some).map_err(|e| e.to_string())
}

/// The text of a file that no other user can change, or even read if it is secret.
fn read(variable: &str, path: &Path, secret: bool) -> Result<String, String> {
    let name = path.display();
    let file = std::fs::File::open(path).map_err(|e| format!("{variable}: {name}: {e}"))?;
    let about = file
        .metadata()
        .map_err(|e| format!("{variable}: {name}: {e}"))?;
    let user = rustix::process::geteuid().as_raw();
    let others = if secret { 0o077 } else { 0o022 };
    if !about.is_file() {
        return Err(format!("{variable}: {name} is no file"));
    }
    if (about.uid() != user && about.uid() != 0) || about.mode() & others != 0 {
        let what = if secret { "read or change" } else { "change" };
        return Err(format!(
            "{variable}: others can {what} {name}: give it to the user and `chmod go-rwx` it"
        ));
    }
    let mut text = String::new();
    let mut file = file.take(LONGEST);
    file.read_to_string(&mut text)
        .map_err(|e| format!("{variable}: {name}: {e}"))?;
    Ok(text)
}

/// The keys in a list: public keys or fingerprints, one a line; `#` begins a comment.
fn fingerprints(text: &str) -> Result<HashSet<Fingerprint>, String> {
    let mut known = HashSet::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let key = match line.split_whitespace().next() {
            Some(first) if first.starts_with("SHA256:") => first.parse(),
            _ => line.parse::<PublicKey>().map(|key| key.fingerprint()),
        };
        known.insert(key.map_err(|e| format!("line {}: {e}", number + 1))?);
    }
    if known.is_empty() {
        return Err("it holds no key: nobody could connect".into());
    }
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    /// A file that is removed at the end of the test.
    struct File(std::path::PathBuf);

    impl File {
        fn new(text: &str, mode: u32) -> Self {
            let name = format!(
                "weft-tls-{}-{}",
                std::process::id(),
                getrandom::u64().unwrap()
            );
            let path = std::env::temp_dir().join(name);
            let mut file = std::fs::File::create(&path).unwrap();
            file.set_permissions(std::fs::Permissions::from_mode(mode))
                .unwrap();
            file.write_all(text.as_bytes()).unwrap();
            File(path)
        }
        fn name(&self) -> &OsStr {
            self.0.as_os_str()
        }
    }

    impl Drop for File {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn what_the_environment_may_say() {
        let on = || Some("on");
        assert!(from(None, None, None).unwrap().is_none());
        assert!(from(Some("off"), None, None).unwrap().is_none());
        assert!(from(on(), None, None).unwrap().is_some());

        let identity = Identity::generate().unwrap();
        let key = File::new(&identity.to_pkcs8_pem(), 0o600);
        let tls = from(on(), Some(key.name()), None).unwrap().unwrap();
        assert_eq!(tls.public_key(), identity.public_key());
        assert!(
            from(None, Some(key.name()), None).is_err(),
            "named, and not on"
        );

        let open = File::new(&identity.to_pkcs8_pem(), 0o644);
        assert!(
            from(on(), Some(open.name()), None)
                .unwrap_err()
                .contains("chmod")
        );
        let none = File::new("", 0o600);
        assert!(from(on(), Some(none.name()), None).is_err());
        assert!(from(on(), Some(OsStr::new("/nowhere")), None).is_err());

        let print = Identity::generate().unwrap().public_key().fingerprint();
        let list = format!("# peers\n\n{} alice\n{print} bob\n", identity.public_key());
        assert_eq!(fingerprints(&list).unwrap().len(), 2);
        assert!(fingerprints("# nobody\n").is_err());
        assert!(fingerprints("alice\n").unwrap_err().contains("line 1"));
        let writable = File::new(&list, 0o666);
        assert!(from(on(), None, Some(writable.name())).is_err());
        let peers = File::new(&list, 0o644);
        assert!(from(on(), None, Some(peers.name())).unwrap().is_some());
    }
}
