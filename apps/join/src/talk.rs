//! The messages of the shell and a worker: a ring of the two, in which the shell sends one element with a question, and the worker sends elements with
//! rows, a few with its progress, and a last one with the outcome. An [`Order`] about loaded tables takes the place of a question.

use std::net::SocketAddr;
use std::time::Duration;

use datafusion::error::{DataFusionError, Result};
use serde::{Deserialize, Serialize};
use weft_roundabout::{Next, Node, Own};

use crate::batches::{Cut, external};

pub use weft_service::endpoint::port::JOIN as PORT;
/// Version of these messages.
pub const VERSION: u32 = 3;
/// Bytes of an element between shell and worker.
pub const ELEMENT: usize = 1 << 20;
/// The user word of an element with the outcome; rows have 0.
pub const OUTCOME: u64 = 1;
/// The user word of an element with the worker's progress: an [`Outcome`] that is not the last.
pub const PROGRESS: u64 = 2;
/// The user word of the shell's element with an [`Order`].
pub const ORDER: u64 = 7;
/// The user word of a worker's element with a [`Report`].
pub const REPORTED: u64 = 8;
/// The user word of the shell's element without data that answers a report of a load: begin, or keep what was read.
pub const GO_ON: u64 = 9;
/// Bytes of a table's name, at most.
pub const NAME: usize = 64;
/// In errors about a loaded table that another load has replaced, or that was dropped: the shell asks again.
pub const STALE: &str = "loaded anew or dropped meanwhile";
/// The same in the shell's own error about parts that it found.
pub const MIXED: &str = "parts of different loads";
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

/// The beginning of a question or an order, which all versions have.
#[derive(Debug, Deserialize)]
pub struct Versioned {
    /// [`VERSION`] of the shell.
    pub version: u32,
}

/// Checks the version of a question or an order, whose other fields another version can have in another form.
///
/// # Errors
/// If it is no such message, or of another version.
pub fn check_version(text: &[u8]) -> Result<()> {
    let Versioned { version } = serde_json::from_slice(text).map_err(external)?;
    if version == VERSION {
        return Ok(());
    }
    Err(DataFusionError::Execution(format!(
        "the shell speaks version {version}, this worker {VERSION}"
    )))
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
    /// The tables of the query that are read from files.
    pub tables: Vec<Table>,
    /// Those that are loaded.
    pub loaded: Vec<Loaded>,
}

/// Names one load of a table.
pub type LoadId = [u8; 16];

/// A loaded table of a question, as the shell found it on the workers. Each worker compares it with what it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loaded {
    /// Its name in SQL.
    pub name: String,
    /// The load that made it.
    pub load: LoadId,
    /// The part that each worker has, in the order of the ring. Every part is there once.
    pub layout: Vec<Option<u32>>,
    /// The column whose hash says in which part a row is.
    pub by: Option<String>,
    /// Rows of all parts.
    pub rows: u64,
    /// For a worker without a part: its schema ([`Part::schema`]).
    pub schema: Option<String>,
}

/// What the shell wants of a worker's loaded tables.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Order {
    /// [`VERSION`] of the shell.
    pub version: u32,
    /// The order itself.
    pub what: What,
}

/// See [`Order`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum What {
    /// Report all tables, or those with these names and their schemas.
    List(Option<Vec<String>>),
    /// Load a part of a table. The worker reports when it can begin, without a part, and when it has one. Each time it waits for
    /// [`GO_ON`].
    Load(Load),
    /// Forget a table: its part of any load, or of this one. The worker reports what it has forgotten.
    Drop(String, Option<LoadId>),
}

/// A part of a table to be loaded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Load {
    /// The name of this load, and of the ring on which the workers pass rows.
    pub id: LoadId,
    /// The workers in the order of the ring.
    pub nodes: Vec<SocketAddr>,
    /// The position of the worker that gets the order, and the number of its part.
    pub me: usize,
    /// Bytes of an element of the ring.
    pub element: usize,
    /// The table and its files.
    pub table: Table,
    /// The column whose hash says in which part a row is.
    pub by: Option<String>,
}

/// Tables that a worker has.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Report {
    /// They.
    pub parts: Vec<Part>,
    /// Bytes of all loaded tables of the worker.
    pub used: u64,
    /// Bytes that they may have.
    pub limit: u64,
}

/// A part of a table on one worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The table's name.
    pub name: String,
    /// The load that made it.
    pub load: LoadId,
    /// Its number.
    pub part: u32,
    /// Parts of the table.
    pub parts: u32,
    /// The column whose hash says in which part a row is.
    pub by: Option<String>,
    /// Its rows.
    pub rows: u64,
    /// Bytes of memory that it takes.
    pub bytes: u64,
    /// Seconds since it was loaded.
    pub age: u64,
    /// In an answer about names: the schema in Arrow's IPC format, in hexadecimal digits.
    pub schema: Option<String>,
}

/// A table's name as SQL without quotes has it.
///
/// # Errors
/// If it is not made of letters, digits and `_`.
pub fn table_name(text: &str) -> std::result::Result<String, String> {
    let mut bytes = text.bytes();
    let begins = bytes
        .next()
        .is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    if !begins || !bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_') || text.len() > NAME {
        return Err(format!(
            "the name of a loaded table has up to {NAME} letters, digits and _, and begins with no digit"
        ));
    }
    Ok(text.to_ascii_lowercase())
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
        let text = serde_json::to_vec(self).map_err(external)?;
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
