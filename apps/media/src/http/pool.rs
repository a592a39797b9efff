//! Connections to servers, kept for a while for the next request of the same title, because a player that seeks sends many requests.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::client::{OpenError, Viewer};
use crate::names::Title;
use crate::wire::{Content, Request};
use weft_service::lock;

/// How long a connection is kept after it was opened; for at most this long players get the old content of a replaced file.
const KEEP: Duration = Duration::from_secs(5);
/// Connections that are kept of one title.
const MOST: usize = 4;
/// Longest catalogue in bytes.
const MAX_CATALOGUE: u64 = 64 << 20;

/// A function that connects to a server and asks.
pub type Open = Box<dyn Fn(&Request) -> Result<Viewer, OpenError> + Send + Sync>;

/// A server whose titles the proxy offers.
pub struct Server {
    /// Its name on the page.
    pub label: String,
    /// Opens a connection to it.
    pub open: Open,
}

/// The proxy's cache of a server.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) bytes: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) streams: AtomicU64,
}

/// A server and its kept connections.
pub(super) struct Pool {
    server: Server,
    kept: Mutex<HashMap<String, Vec<Viewer>>>,
    pub(super) counters: Counters,
}

impl Pool {
    pub(super) fn new(server: Server) -> Self {
        Self {
            server,
            kept: Mutex::default(),
            counters: Counters::default(),
        }
    }

    pub(super) fn label(&self) -> &str {
        &self.server.label
    }

    /// A connection for a title. Blocks.
    pub(super) fn take(&self, name: &str) -> Result<Viewer, OpenError> {
        let kept = lock(&self.kept).get_mut(name).and_then(Vec::pop);
        match kept {
            Some(viewer) if viewer.age() < KEEP => Ok(viewer),
            _ => self.open(name),
        }
    }

    /// A new connection for a title. Blocks.
    pub(super) fn open(&self, name: &str) -> Result<Viewer, OpenError> {
        (self.server.open)(&Request::Title(name.into()))
    }

    /// Keeps a connection for the next request.
    pub(super) fn put(&self, name: &str, viewer: Viewer) {
        let mut kept = lock(&self.kept);
        let of = kept.entry(name.into()).or_default();
        if of.len() < MOST && viewer.age() < KEEP {
            of.push(viewer);
        }
    }

    /// Closes connections that were not used for a while.
    pub(super) fn tidy(&self) {
        let mut gone = Vec::new();
        lock(&self.kept).retain(|_, of| {
            let (old, new) = std::mem::take(of)
                .into_iter()
                .partition(|viewer: &Viewer| viewer.age() >= KEEP);
            gone.push(old);
            *of = new;
            !of.is_empty()
        });
    }

    /// The server's titles. Blocks.
    pub(super) fn catalogue(&self) -> Result<Vec<Title>, String> {
        let mut viewer = (self.server.open)(&Request::Catalogue).map_err(|e| e.to_string())?;
        let grant = *viewer.grant();
        if grant.content != Content::Catalogue || grant.len > MAX_CATALOGUE {
            return Err("its catalogue is none, or too long".into());
        }
        let text = viewer
            .fetch(0, grant.len as usize)
            .map_err(|e| e.to_string())?;
        serde_json::from_slice(&text).map_err(|e| format!("its catalogue cannot be read: {e}"))
    }

    pub(super) fn count(&self, bytes: u64) {
        self.counters.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}
