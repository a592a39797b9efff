//! TLS 1.3 for the byte stream of a connection: key pairs, fingerprints, and sessions without I/O.
//!
//! * [`Identity`], [`PublicKey`], [`Fingerprint`]: keys. They are Ed25519 and travel as raw public keys (RFC 7250); there are no
//!   certificates.
//! * [`Tls`]: the settings of one side: its key pair, and the keys that it accepts.
//! * [`Session`]: one end of one TLS connection. It gets the received bytes and returns the bytes to send; it opens no socket and reads no
//!   clock.
//!
//! Both ends prove their keys. Resumption and early data are off, so nothing can be replayed.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod key;
mod record;
mod session;
mod settings;

pub use key::{Fingerprint, Identity, PublicKey};
pub use record::{RECORD_OVERHEAD, RECORD_PLAIN};
pub use session::{Session, TlsInfo};
pub use settings::Tls;

/// Why there is no TLS connection, or no key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// [`Tls::allow`] refused the peer's key.
    #[error("the peer's key is not one that we accept: {}", .0.fingerprint())]
    KeyRefused(PublicKey),
    /// The peer refused our key.
    #[error("the peer does not accept our key")]
    KeyRefusedByPeer,
    /// The bytes are no TLS record.
    #[error("the peer does not speak TLS on this connection")]
    NotTls,
    /// The peer's TLS is none that we speak, or a record was damaged or forged.
    #[error("TLS: {0}")]
    Protocol(String),
    /// The peer closed the connection before it was one of TLS.
    #[error("the peer closed the connection during the TLS handshake: it may not speak TLS there")]
    ClosedInHandshake,
    /// The connection ended without the peer's `close_notify`: the last bytes may be missing.
    #[error("the TLS connection was cut off")]
    Truncated,
    /// Text or bytes that hold no key.
    #[error("{0}")]
    BadKey(String),
}
