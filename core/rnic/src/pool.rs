//! Buffers that connections borrow while they move data, so that an idle connection holds none.

use std::sync::Mutex;

use crate::lock::lock;

/// Room for the longest FPDU (2 + 65,535 + 3 + 4 bytes) and a good part of the next.
pub(crate) const BUFFER_LEN: usize = 80 * 1024;
/// Buffers kept for the next borrower.
const KEEP: usize = 16;

/// Receive buffers of [`BUFFER_LEN`] bytes, and transmit scratch vectors.
#[derive(Default)]
pub(crate) struct Pool {
    rx: Mutex<Vec<Box<[u8]>>>,
    tx: Mutex<Vec<Vec<u8>>>,
}

impl Pool {
    pub(crate) fn get_rx(&self) -> Box<[u8]> {
        lock(&self.rx)
            .pop()
            .unwrap_or_else(|| vec![0; BUFFER_LEN].into_boxed_slice())
    }
    pub(crate) fn put_rx(&self, buffer: Box<[u8]>) {
        let mut pool = lock(&self.rx);
        if pool.len() < KEEP && buffer.len() == BUFFER_LEN {
            pool.push(buffer);
        }
    }
    pub(crate) fn get_tx(&self) -> Vec<u8> {
        lock(&self.tx)
            .pop()
            .unwrap_or_else(|| Vec::with_capacity(BUFFER_LEN))
    }
    pub(crate) fn put_tx(&self, mut buffer: Vec<u8>) {
        buffer.clear();
        let mut pool = lock(&self.tx);
        if pool.len() < KEEP && buffer.capacity() <= 8 * BUFFER_LEN {
            pool.push(buffer);
        }
    }
}
