//! TLS settings in the environment.
//!
//! | variable | meaning |
//! |---|---|
//! | `WEFT_TLS` | `on`: connections use TLS, and others are refused; `off` (the default) |
//! | `WEFT_TLS_KEY` | file with our private key (PKCS #8 PEM, as `weft key` writes it); without it the process has a key for itself |
//! | `WEFT_TLS_PEERS` | file with the accepted keys, one public key or fingerprint a line; without it, any |

use std::collections::HashSet;
use std::path::Path;

use weft_service::trust::{self, Guard};
use weft_sys::settings;
use weft_tls::{Fingerprint, Identity, PublicKey, Tls};

use crate::types::Error;

/// Whether the environment turns TLS on or off.
pub(crate) fn is_set() -> bool {
    settings::TLS.read() != Ok(None)
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
        settings::TLS_KEY.path().as_deref(),
        settings::TLS_PEERS.path().as_deref(),
    )
    .map_err(Error::Setting)
}

fn from(
    tls: Option<&str>,
    key: Option<&Path>,
    peers: Option<&Path>,
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
            let text = read("WEFT_TLS_KEY", path, Guard::Secret)?;
            let identity = Identity::from_pkcs8_pem(&String::from_utf8_lossy(&text))
                .map_err(|e| format!("WEFT_TLS_KEY: {}: {e}", path.display()))?;
            Tls::new(identity).map_err(|e| e.to_string())?
        }
        None => ephemeral()?,
    };
    let Some(path) = peers else {
        return Ok(Some(tls));
    };
    let known = fingerprints(&read("WEFT_TLS_PEERS", path, Guard::Public)?)
        .map_err(|e| format!("WEFT_TLS_PEERS: {}: {e}", path.display()))?;
    let allow = move |key: &PublicKey| known.contains(&key.fingerprint());
    tls.allow(allow).map(Some).map_err(|e| e.to_string())
}

/// A file that no other user can change, or even read if it is secret.
fn read(variable: &str, path: &Path, guard: Guard) -> Result<Vec<u8>, String> {
    let shown = path.display();
    trust::read(path, guard).map_err(|e| format!("{variable}: {shown} {e}: {}", e.remedy(path)))
}

/// The keys in a list: public keys or fingerprints, one a line; `#` begins a comment.
fn fingerprints(text: &[u8]) -> Result<HashSet<Fingerprint>, String> {
    let mut known = HashSet::new();
    for (number, line) in trust::lines(text).map_err(|e| e.to_string())? {
        let key = Fingerprint::of_line(line);
        known.insert(key.map_err(|e| format!("line {number}: {e}"))?);
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
        fn name(&self) -> &Path {
            &self.0
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
        assert!(from(on(), Some(Path::new("/nowhere")), None).is_err());

        let print = Identity::generate().unwrap().public_key().fingerprint();
        let list = format!("# peers\n\n{} alice\n{print} bob\n", identity.public_key());
        assert_eq!(fingerprints(list.as_bytes()).unwrap().len(), 2);
        assert!(fingerprints(b"# nobody\n").is_err());
        assert!(fingerprints(b"alice\n").unwrap_err().contains("line 1"));
        let writable = File::new(&list, 0o666);
        assert!(from(on(), None, Some(writable.name())).is_err());
        let peers = File::new(&list, 0o644);
        assert!(from(on(), None, Some(peers.name())).unwrap().is_some());
    }
}
