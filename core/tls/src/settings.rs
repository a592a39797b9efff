//! The settings of one side.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::{
    CertificateError, CipherSuite, ClientConfig, DigitallySignedStruct, DistinguishedName, Error,
    OtherError, PeerIncompatible, ServerConfig, SignatureScheme, version,
};

use crate::session::Session;
use crate::{Identity, PublicKey, TlsError};

/// The protocol in the TLS connection (ALPN): a connection for another protocol is refused.
const ALPN: &[u8] = b"iwarp-mpa";

type Allow = Arc<dyn Fn(&PublicKey) -> bool + Send + Sync>;

/// TLS settings of one side: its key pair, and whose keys it takes. Clones are handles of the same settings.
#[derive(Clone)]
pub struct Tls {
    identity: Identity,
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// Shows the public key of `identity` to peers, and accepts any peer: the connection is encrypted, but not authenticated.
    ///
    /// # Errors
    /// [`TlsError::BadKey`] if the key cannot be used.
    pub fn new(identity: Identity) -> Result<Self, TlsError> {
        Self::with(identity, Arc::new(|_: &PublicKey| true))
    }

    /// Accepts only peers whose key `allow` returns true for. It is called during the handshake, by the thread that drives it, and must not
    /// block. An initiator learns of a refusal only at its first read.
    ///
    /// # Errors
    /// As [`Tls::new`].
    pub fn allow(
        self,
        allow: impl Fn(&PublicKey) -> bool + Send + Sync + 'static,
    ) -> Result<Self, TlsError> {
        Self::with(self.identity, Arc::new(allow))
    }

    fn with(identity: Identity, allow: Allow) -> Result<Self, TlsError> {
        let provider = Arc::new(provider());
        let verifier = Arc::new(Verifier {
            allow,
            provider: Arc::clone(&provider),
        });
        let certified = identity.certified()?;
        let unusable = |e: Error| TlsError::BadKey(e.to_string());

        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&version::TLS13])
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&verifier) as Arc<dyn ServerCertVerifier>)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(
                Arc::clone(&certified),
            )));
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        client.enable_secret_extraction = true;

        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&version::TLS13])
            .map_err(unusable)?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified)));
        server.alpn_protocols = vec![ALPN.to_vec()];
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        server.enable_secret_extraction = true;
        Ok(Tls {
            identity,
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }

    /// Our key.
    pub fn public_key(&self) -> PublicKey {
        self.identity.public_key()
    }

    /// The same settings for a connection of rustls' own, whose records it seals and opens itself: a yardstick for [`Session`].
    pub fn rustls(&self) -> (Arc<ClientConfig>, Arc<ServerConfig>) {
        (Arc::clone(&self.client), Arc::clone(&self.server))
    }

    /// The end that made the connection.
    ///
    /// # Errors
    /// [`TlsError::Protocol`] when the system gives no random bytes.
    pub fn initiator(&self) -> Result<Session, TlsError> {
        Session::initiator(Arc::clone(&self.client), self.public_key())
    }

    /// The end that accepted the connection.
    ///
    /// # Errors
    /// As [`Tls::initiator`].
    pub fn responder(&self) -> Result<Session, TlsError> {
        Session::responder(Arc::clone(&self.server), self.public_key())
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tls").field(&self.identity).finish()
    }
}

/// The cipher suites of TLS 1.3, the fastest on this processor first.
fn provider() -> CryptoProvider {
    let mut provider = aws_lc_rs::default_provider();
    let wanted = if has_aes() {
        [
            CipherSuite::TLS13_AES_128_GCM_SHA256,
            CipherSuite::TLS13_AES_256_GCM_SHA384,
            CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
        ]
    } else {
        [
            CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
            CipherSuite::TLS13_AES_128_GCM_SHA256,
            CipherSuite::TLS13_AES_256_GCM_SHA384,
        ]
    };
    let all = std::mem::take(&mut provider.cipher_suites);
    for suite in wanted {
        provider
            .cipher_suites
            .extend(all.iter().filter(|s| s.suite() == suite));
    }
    provider
}

fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    false
}

/// Takes the raw public keys that the program allows; that the peer has the private key is proved by its signature.
struct Verifier {
    allow: Allow,
    provider: Arc<CryptoProvider>,
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Verifier")
    }
}

impl Verifier {
    fn check(&self, key: &CertificateDer<'_>) -> Result<(), Error> {
        let key = PublicKey::from_der(key)
            .map_err(|_| PeerIncompatible::UnsolicitedCertificateTypeExtension)?;
        if (self.allow)(&key) {
            return Ok(());
        }
        Err(CertificateError::Other(OtherError(Arc::new(TlsError::KeyRefused(key)))).into())
    }

    fn signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature_with_raw_key(
            message,
            &SubjectPublicKeyInfoDer::from(key.as_ref()),
            signed,
            &self.provider.signature_verification_algorithms,
        )
    }
}

fn no_tls12() -> Error {
    PeerIncompatible::Tls12NotOffered.into()
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(key).map(|()| ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, key, signed)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }
    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(key).map(|()| ClientCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, key, signed)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
