//! Keys as text.

use weft_tls::{Fingerprint, Identity, PublicKey, Tls};

#[test]
fn keys_come_back_from_their_text() {
    let identity = Identity::generate().unwrap();
    let again = Identity::from_pkcs8_pem(&identity.to_pkcs8_pem()).unwrap();
    assert_eq!(again.public_key(), identity.public_key());
    assert!(Tls::new(again).is_ok());

    let key = identity.public_key();
    assert_eq!(key.to_string().parse::<PublicKey>().unwrap(), key);
    assert_eq!(format!("{key} me@host").parse::<PublicKey>().unwrap(), key);
    assert_eq!(PublicKey::from_der(key.as_der()).unwrap(), key);
    let print = key.fingerprint();
    assert_eq!(print.to_string().len(), "SHA256:".len() + 43);
    assert_eq!(print.to_string().parse::<Fingerprint>().unwrap(), print);
}

/// Made by `openssl genpkey -algorithm ed25519`; the fingerprint by
/// `openssl pkey -pubout -outform DER | openssl dgst -sha256 -binary | base64`.
#[test]
fn keys_of_openssl_are_read() {
    let pem = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n-----END PRIVATE KEY-----\n";
    let identity = Identity::from_pkcs8_pem(pem).unwrap();
    // RFC 8032 7.1, test 1.
    assert!(
        identity.public_key().as_der()[12..].starts_with(&[0xd7, 0x5a, 0x98, 0x01]),
        "{:?}",
        identity.public_key().as_der()
    );
    assert_eq!(
        identity.public_key().fingerprint().to_string(),
        "SHA256:BuP9j9opu2CrWVV95h7bCuzbIxE0vjDnW0Vfjht5L6k"
    );
}

#[test]
fn what_is_no_key_is_refused() {
    for text in [
        "",
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        "x",
    ] {
        assert!(Identity::from_pkcs8_pem(text).is_err(), "{text}");
    }
    for text in [
        "",
        "weft-ed25519",
        "weft-ed25519 AAAA",
        "ssh-ed25519 AAAA",
        "weft-ed25519 ***",
    ] {
        assert!(text.parse::<PublicKey>().is_err(), "{text}");
    }
    for text in ["", "SHA256:", "SHA256:AAAA", "MD5:00"] {
        assert!(text.parse::<Fingerprint>().is_err(), "{text}");
    }
    assert!(PublicKey::from_der(&[0; 44]).is_err());
}
