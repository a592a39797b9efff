//! The tests of this crate.

mod common;
#[path = "common/raw.rs"]
mod raw;
mod world;

mod edges;
mod files;
mod futures;
mod hostile;
mod limits;
mod model;
mod ordinary;
mod simulate;
mod sockets;
mod stuck;
#[cfg(feature = "tokio")]
mod tokio;
mod trouble;
