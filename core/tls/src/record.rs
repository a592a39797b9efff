//! The record layer of TLS 1.3 (RFC 8446 5), after the handshake.
//!
//! rustls makes the handshake and gives its keys out, as it does for the kernel's TLS. Records are sealed and opened here, in place: data
//! is copied once on each side, between registered memory and the buffer of ciphertext.

use aws_lc_rs::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use rustls::ConnectionTrafficSecrets;

use crate::TlsError;

/// Plaintext that one record carries at most (RFC 8446 5.1).
pub const RECORD_PLAIN: usize = 16 * 1024;
/// The difference between a record's and its plaintext's length: header, content type, tag.
pub const RECORD_OVERHEAD: usize = HEADER + 1 + TAG;

const HEADER: usize = 5;
const TAG: usize = 16;
/// The longest that a record may say that it is (RFC 8446 5.2).
const MAX_LENGTH: usize = RECORD_PLAIN + 256;
/// Content type of every record on the wire.
const APPLICATION_DATA: u8 = 23;
/// Records under one key. AES-GCM's limit is 2^24.5 (RFC 8446 5.5).
pub(crate) const KEY_LIFE: u64 = 1 << 23;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Alert,
    Handshake,
    Data,
}

impl Content {
    fn number(self) -> u8 {
        match self {
            Content::Alert => 21,
            Content::Handshake => 22,
            Content::Data => APPLICATION_DATA,
        }
    }
}

/// The key of one direction, and how many records it has sealed or opened.
pub(crate) struct Key {
    cipher: LessSafeKey,
    iv: [u8; NONCE_LEN],
    records: u64,
}

impl Key {
    pub(crate) fn new(records: u64, secrets: &ConnectionTrafficSecrets) -> Result<Self, TlsError> {
        let (algorithm, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(TlsError::Protocol("an unknown cipher".into())),
        };
        let unusable = || TlsError::Protocol("a key of the wrong length".into());
        let mut own_iv = [0; NONCE_LEN];
        if iv.as_ref().len() != own_iv.len() {
            return Err(unusable());
        }
        own_iv.copy_from_slice(iv.as_ref());
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| unusable())?;
        Ok(Key {
            cipher: LessSafeKey::new(key),
            iv: own_iv,
            records,
        })
    }

    /// Another key is due.
    pub(crate) fn worn_out(&self) -> bool {
        self.records >= KEY_LIFE
    }

    #[cfg(test)]
    pub(crate) fn wear_out(&mut self) {
        self.records = KEY_LIFE;
    }

    /// The nonce of the next record (RFC 8446 5.3).
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, count) in nonce[NONCE_LEN - 8..]
            .iter_mut()
            .zip(self.records.to_be_bytes())
        {
            *byte ^= count;
        }
        // A key is changed, or its connection ended, long before this wraps.
        self.records += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Appends a record to `out`. `fill` appends the plaintext, at most [`RECORD_PLAIN`] bytes, and is called once.
    pub(crate) fn seal(
        &mut self,
        content: Content,
        out: &mut Vec<u8>,
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> Result<usize, TlsError> {
        let start = out.len();
        out.extend_from_slice(&[APPLICATION_DATA, 3, 3, 0, 0]);
        let body = out.len();
        fill(out);
        let plain = out.len() - body;
        out.push(content.number());
        let length = plain + 1 + TAG;
        debug_assert!(plain <= RECORD_PLAIN);
        out[start + 3..body].copy_from_slice(&(length as u16).to_be_bytes());
        let mut header = [0; HEADER];
        header.copy_from_slice(&out[start..body]);
        let nonce = self.nonce();
        let tag = self
            .cipher
            .seal_in_place_separate_tag(nonce, Aad::from(header), &mut out[body..])
            .map_err(|_| TlsError::Protocol("a record could not be sealed".into()))?;
        out.extend_from_slice(tag.as_ref());
        Ok(plain)
    }

    /// Opens the record at the start of `bytes`, in place. `Ok(None)`: it is not complete.
    pub(crate) fn open<'b>(&mut self, bytes: &'b mut [u8]) -> Result<Option<Opened<'b>>, TlsError> {
        let Some(len) = record_len(bytes)? else {
            return Ok(None);
        };
        if bytes.len() < len {
            return Ok(None);
        }
        if self.records >= 2 * KEY_LIFE {
            return Err(TlsError::Protocol(
                "the peer uses a key for too long".into(),
            ));
        }
        let mut header = [0; HEADER];
        header.copy_from_slice(&bytes[..HEADER]);
        let nonce = self.nonce();
        let inner = self
            .cipher
            .open_in_place(nonce, Aad::from(header), &mut bytes[HEADER..len])
            .map_err(|_| {
                TlsError::Protocol("a record was changed, left out or sent again on its way".into())
            })?;
        // After the plaintext its content type, and zeros as padding.
        let end = inner.iter().rposition(|b| *b != 0);
        let (plain, content) = match end.map(|end| (end, inner[end])) {
            Some((end, APPLICATION_DATA)) => (end, Content::Data),
            Some((end, 22)) => (end, Content::Handshake),
            Some((end, 21)) => (end, Content::Alert),
            _ => return Err(TlsError::Protocol("a record of no known content".into())),
        };
        Ok(Some(Opened {
            len,
            content,
            plain: &inner[..plain],
        }))
    }
}

/// A record that has been opened.
#[derive(Debug)]
pub(crate) struct Opened<'b> {
    /// Its bytes on the wire.
    pub(crate) len: usize,
    pub(crate) content: Content,
    pub(crate) plain: &'b [u8],
}

/// The length of the record at the start of `bytes`, with its header; `None` if it is not known yet.
pub(crate) fn record_len(bytes: &[u8]) -> Result<Option<usize>, TlsError> {
    let Some(&[kind, major, minor, high, low]) = bytes.first_chunk::<HEADER>() else {
        return Ok(None);
    };
    let length = usize::from(u16::from_be_bytes([high, low]));
    if kind != APPLICATION_DATA
        || (major, minor) != (3, 3)
        || !(TAG + 1..=MAX_LENGTH).contains(&length)
    {
        return Err(TlsError::Protocol(
            "what follows the handshake is no record".into(),
        ));
    }
    Ok(Some(HEADER + length))
}
