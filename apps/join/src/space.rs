//! Memory for loaded tables, which is counted before it is taken.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use datafusion::error::{DataFusionError, Result};

/// The memory for loaded tables, and what is taken of it.
#[derive(Debug)]
pub struct Ledger {
    /// Bytes that there are.
    pub limit: usize,
    used: AtomicUsize,
}

impl Ledger {
    /// With this many bytes.
    pub fn new(limit: usize) -> Arc<Self> {
        let used = AtomicUsize::new(0);
        Arc::new(Self { limit, used })
    }

    /// Bytes that are taken.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::SeqCst)
    }
}

/// Bytes of the ledger, which gets them back when this is dropped.
#[derive(Debug)]
pub struct Space {
    ledger: Arc<Ledger>,
    bytes: usize,
}

impl Space {
    /// No bytes yet.
    pub fn new(ledger: &Arc<Ledger>) -> Self {
        let ledger = Arc::clone(ledger);
        Self { ledger, bytes: 0 }
    }

    /// No bytes yet, of the same ledger.
    pub fn another(&self) -> Self {
        Self::new(&self.ledger)
    }

    /// Takes further bytes.
    ///
    /// # Errors
    /// If they are not there.
    pub fn grow(&mut self, bytes: usize) -> Result<()> {
        let limit = self.ledger.limit;
        let grown = |used: usize| used.checked_add(bytes).filter(|&used| used <= limit);
        let taken = self
            .ledger
            .used
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, grown);
        if taken.is_err() {
            let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
            return Err(DataFusionError::ResourcesExhausted(format!(
                "it does not fit: {:.1} MiB of it are here, and the worker has {:.1} MiB for all loaded tables (--tables); \
                 drop a table, or load it on more workers",
                mib(self.bytes),
                mib(limit)
            )));
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Gives bytes back.
    pub fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.ledger.used.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// The bytes that it has.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}
