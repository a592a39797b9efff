//! The messages of the shell and a worker: a ring of the two, in which the shell sends one element with a question, and the worker sends elements with
//! rows, a few with its progress, and a last one with the outcome.

use std::net::SocketAddr;
use std::time::Duration;

use datafusion::error::{DataFusionError, Result};
use serde::{Deserialize, Serialize};
use weft_roundabout::{Next, Node, Own};

use crate::batches::Cut;

pub use weft_service::endpoint::port::JOIN as PORT;
/// Version of these messages.
pub const VERSION: u32 = 2;
/// Bytes of an element between shell and worker.
pub const ELEMENT: usize = 1 << 20;
/// The user word of an element with the outcome; rows have 0.
pub const OUTCOME: u64 = 1;
/// The user word of an element with the worker's progress: an [`Outcome`] that is not the last.
pub const PROGRESS: u64 = 2;
/// The interval of a worker's progress reports.
pub const REPORT: Duration = Duration::from_millis(250);

/// A table and its file, which has the same path on every worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Table {
    /// Its name in SQL.
    pub name: String,
    /// Path of a Parquet or CSV file, or of a folder of Parquet files.
    pub file: String,
}

/// The question to a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ask {
    /// [`VERSION`] of the shell.
    pub version: u32,
    /// Names the query's rings.
    pub id: [u8; 16],
    /// The workers in the order of the ring.
    pub nodes: Vec<SocketAddr>,
    /// The position of the worker that gets the question.
    pub me: usize,
    /// Bytes of an element of the ring.
    pub element: usize,
    /// The query.
    pub sql: String,
    /// The tables of the query.
    pub tables: Vec<Table>,
}

/// The outcome on one worker.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// The failure.
    pub error: Option<String>,
    /// Whether it failed on this worker itself.
    pub here: bool,
    /// Bytes from the predecessor.
    pub received: u64,
    /// Bytes that went to the successor.
    pub sent: u64,
    /// Seconds that the exchanges waited for the ring, added up.
    pub waited: f64,
}

impl Outcome {
    /// Sends it as the last element of a turn.
    pub fn give(&self, node: &mut Node) -> Result<()> {
        let external = |e| DataFusionError::External(Box::new(e));
        let text = serde_json::to_vec(self).map_err(|e| DataFusionError::External(Box::new(e)))?;
        let mut text = Some(Cut::new(text, [OUTCOME, 0, 0, 0]));
        loop {
            let own = if text.is_some() { Own::Now } else { Own::Never };
            match node.next_with(own).map_err(external)? {
                Next::Room(room) => {
                    if let Some(cut) = &mut text
                        && !cut.fill(room).map_err(external)?
                    {
                        text = None;
                    }
                }
                Next::End => return Ok(()),
                _ => {}
            }
        }
    }
}
