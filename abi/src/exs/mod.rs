//! Extended sockets for C: what `<sys/exs.h>` declares, without the names' `exs_`.
#![allow(clippy::missing_safety_doc)] // one text for all, in the crate's documentation

mod closing;
mod event;
mod handles;
mod helper;
pub mod memory;
mod op;
pub mod option;
mod plain;
pub mod queue;
mod region;
pub mod socket;
mod started;
mod state;
pub mod sync;
mod sync_poll;
mod table;
pub mod types;

pub use state::init;
