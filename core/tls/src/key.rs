//! Key pairs, and their public parts.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use aws_lc_rs::digest;
use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;

use crate::TlsError;

/// The DER bytes before the 32 bytes of an Ed25519 key in its `SubjectPublicKeyInfo` (RFC 8410 4).
const SPKI_PREFIX: [u8; 12] = [
    0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00,
];

/// The beginning of a public key in text.
const TEXT_KIND: &str = "weft-ed25519";

fn bad(what: impl Into<String>) -> TlsError {
    TlsError::BadKey(what.into())
}

/// An Ed25519 key pair. Clones are handles of the same one.
#[derive(Clone)]
pub struct Identity {
    pkcs8: Arc<PrivatePkcs8KeyDer<'static>>,
    public: PublicKey,
}

impl Identity {
    /// A new key pair from the system's random source.
    ///
    /// # Errors
    /// [`TlsError::BadKey`] when the system gives no random bytes.
    pub fn generate() -> Result<Self, TlsError> {
        let pair = Ed25519KeyPair::generate().map_err(|_| bad("no source of randomness"))?;
        let der = pair
            .to_pkcs8v1()
            .map_err(|_| bad("the key pair has no PKCS #8 form"))?;
        Self::from_pkcs8(PrivatePkcs8KeyDer::from(der.as_ref().to_vec()))
    }

    fn from_pkcs8(der: PrivatePkcs8KeyDer<'static>) -> Result<Self, TlsError> {
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(der.secret_pkcs8_der())
            .map_err(|_| bad("not an Ed25519 private key in PKCS #8 form"))?;
        let mut spki = SPKI_PREFIX.to_vec();
        spki.extend_from_slice(pair.public_key().as_ref());
        Ok(Identity {
            pkcs8: Arc::new(der),
            public: PublicKey::from_der(&spki)?,
        })
    }

    /// The key pair in the first `PRIVATE KEY` block of a text (PKCS #8, as `openssl genpkey -algorithm ed25519` writes it).
    ///
    /// # Errors
    /// [`TlsError::BadKey`] for a text without one, or another kind of key.
    pub fn from_pkcs8_pem(text: &str) -> Result<Self, TlsError> {
        let der = PrivatePkcs8KeyDer::from_pem_slice(text.as_bytes())
            .map_err(|_| bad("no -----BEGIN PRIVATE KEY----- block"))?;
        Self::from_pkcs8(der)
    }

    /// The private key as text, to be kept secret.
    pub fn to_pkcs8_pem(&self) -> String {
        let mut text = "-----BEGIN PRIVATE KEY-----\n".to_owned();
        let encoded = STANDARD.encode(self.pkcs8.secret_pkcs8_der());
        for (i, c) in encoded.chars().enumerate() {
            if i > 0 && i % 64 == 0 {
                text.push('\n');
            }
            text.push(c);
        }
        text + "\n-----END PRIVATE KEY-----\n"
    }

    /// The public key, by which peers recognise it.
    pub fn public_key(&self) -> PublicKey {
        self.public.clone()
    }

    /// The form for rustls: the raw public key takes the place of the certificate.
    pub(crate) fn certified(&self) -> Result<Arc<CertifiedKey>, TlsError> {
        let key = rustls::crypto::aws_lc_rs::sign::any_eddsa_type(&self.pkcs8)
            .map_err(|e| bad(e.to_string()))?;
        let public = CertificateDer::from(self.public.as_der().to_vec());
        Ok(Arc::new(CertifiedKey::new(vec![public], key)))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.public.fingerprint())
    }
}

/// A public Ed25519 key. As text it is one line: `weft-ed25519`, a space, and the DER of its `SubjectPublicKeyInfo` in base64.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublicKey([u8; 44]);

impl PublicKey {
    /// Of a line of a list of known peers: a name and its key.
    ///
    /// # Errors
    /// [`TlsError::BadKey`].
    pub fn of_line(line: &str) -> Result<(&str, Self), TlsError> {
        let (name, key) = line
            .split_once(char::is_whitespace)
            .ok_or_else(|| bad("a name without a key"))?;
        Ok((name, key.trim().parse()?))
    }

    /// From the DER of a `SubjectPublicKeyInfo`.
    ///
    /// # Errors
    /// [`TlsError::BadKey`] for anything but an Ed25519 key.
    pub fn from_der(der: &[u8]) -> Result<Self, TlsError> {
        let der = <[u8; 44]>::try_from(der).map_err(|_| bad("not an Ed25519 public key"))?;
        if der.starts_with(&SPKI_PREFIX) {
            Ok(PublicKey(der))
        } else {
            Err(bad("not an Ed25519 public key"))
        }
    }

    /// The DER of its `SubjectPublicKeyInfo`.
    pub fn as_der(&self) -> &[u8] {
        &self.0
    }

    /// Its SHA-256.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut sum = [0; 32];
        sum.copy_from_slice(digest::digest(&digest::SHA256, &self.0).as_ref());
        Fingerprint(sum)
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{TEXT_KIND} {}", STANDARD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({})", self.fingerprint())
    }
}

impl FromStr for PublicKey {
    type Err = TlsError;

    /// Reads the text form; what follows the key on the line is a comment.
    fn from_str(text: &str) -> Result<Self, TlsError> {
        let mut words = text.split_whitespace();
        if words.next() != Some(TEXT_KIND) {
            return Err(bad(format!("a public key begins with `{TEXT_KIND}`")));
        }
        let encoded = words.next().unwrap_or_default();
        let der = STANDARD
            .decode(encoded)
            .map_err(|_| bad("the public key is damaged: it is no base64"))?;
        Self::from_der(&der)
    }
}

/// The SHA-256 of a public key. As text: `SHA256:` and 43 characters of base64 without padding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Of a line of a list of keys: a public key or a fingerprint; a comment may follow.
    ///
    /// # Errors
    /// [`TlsError::BadKey`].
    pub fn of_line(line: &str) -> Result<Self, TlsError> {
        match line.split_whitespace().next() {
            Some(first) if first.starts_with("SHA256:") => first.parse(),
            _ => line.parse::<PublicKey>().map(|key| key.fingerprint()),
        }
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SHA256:{}", STANDARD_NO_PAD.encode(self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = TlsError;

    fn from_str(text: &str) -> Result<Self, TlsError> {
        let wrong = || bad("a fingerprint is `SHA256:` and 43 characters of base64");
        let encoded = text.strip_prefix("SHA256:").ok_or_else(wrong)?;
        let bytes = STANDARD_NO_PAD.decode(encoded).map_err(|_| wrong())?;
        Ok(Fingerprint(bytes.try_into().map_err(|_| wrong())?))
    }
}
