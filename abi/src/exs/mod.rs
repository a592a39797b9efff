//! Extended sockets for C: what `<sys/exs.h>` declares, without the names' `exs_`.
//!
//! From below:
//!
//! * `types`, `handles`: what C sees, and numbers for objects.
//! * `closing`, `table`, `region`: what is waited for at the end; sockets by descriptor; registered memory and who uses it.
//! * `helper`, `op`, `started`: operations under way, and those of one queue.
//! * `state`: all of it, once a process.
//! * `event`, `memory`, `queue`, `plain`, `socket`, `option`, and `sync_poll` and `sync` for the blocking calls: what programs call.
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
