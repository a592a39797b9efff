//! Checksums: XXH3-128 of each block, and of the list of the blocks' digests.
//!
//! A list of block digests, rather than one running hash, lets a receiver check each block when it comes
//! and lets a resumed transfer verify the prefix that is already there. XXH3 guards against accidents, not
//! against a peer that holds the key: see docs/spec/cp.md.

use twox_hash::XxHash3_128;

use super::protocol::Digest;

/// The digest of some bytes.
pub fn digest(bytes: &[u8]) -> Digest {
    XxHash3_128::oneshot(bytes).to_be_bytes()
}

/// The digest of so many zeros.
pub fn zeros(len: u32) -> Digest {
    let mut stream = Stream::default();
    stream.add_zeros(len);
    stream.finish()
}

/// A digest of bytes that come in pieces.
#[derive(Default)]
pub struct Stream(XxHash3_128);

impl Stream {
    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// Adds zeros.
    pub fn add_zeros(&mut self, mut len: u32) {
        const ZEROS: &[u8] = &[0; 4096];
        while len > 0 {
            let piece = &ZEROS[..ZEROS.len().min(len as usize)];
            self.add(piece);
            len -= piece.len() as u32;
        }
    }

    /// The digest of everything so far.
    pub fn finish(&self) -> Digest {
        self.0.finish_128().to_be_bytes()
    }
}

/// The digest of a growing list of block digests.
#[derive(Default)]
pub struct BlockList {
    list: Stream,
    blocks: u64,
}

impl BlockList {
    /// Adds the next block's digest.
    pub fn push(&mut self, block: &Digest) {
        self.list.add(block);
        self.blocks += 1;
    }

    /// Number of blocks so far.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Digest of the list so far, as an OFFER carries it.
    pub fn prefix(&self) -> Digest {
        self.list.finish()
    }

    /// Digest of the complete file of `size` bytes, as END carries it.
    pub fn complete(mut self, size: u64) -> Digest {
        self.list.add(&size.to_be_bytes());
        self.list.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        // The empty input's XXH3-128 with seed 0, as the reference implementation gives it.
        assert_eq!(
            digest(b"").map(|b| format!("{b:02x}")).concat(),
            "99aa06d3014798d86001c324468d497f"
        );
        let mut s = Stream::default();
        s.add(b"we");
        s.add(b"ft");
        assert_eq!(s.finish(), digest(b"weft"));
    }

    #[test]
    fn lists_differ_by_order_and_length() {
        let (a, b) = (digest(b"a"), digest(b"b"));
        let list = |blocks: &[Digest]| {
            let mut l = BlockList::default();
            for d in blocks {
                l.push(d);
            }
            l
        };
        assert_ne!(list(&[a, b]).prefix(), list(&[b, a]).prefix());
        assert_ne!(list(&[a, b]).complete(2), list(&[a, b]).complete(3));
        assert_eq!(list(&[a, b]).blocks(), 2);
    }
}
