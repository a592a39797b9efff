//! Extended sockets for C: the declarations of `<sys/exs.h>`, without the prefix `exs_`.
//!
//! Modules, lowest layer first:
//!
//! * `types`, `handles`: the C types, and handle numbers for objects.
//! * `closing`, `table`, `region`: waiting for closes at the end of the program; sockets by descriptor; registered memory and its users.
//! * `helper`, `op`, `started`: outstanding operations, and those of one queue.
//! * `epoll_set`: the sockets of an epoll descriptor.
//! * `state`: the global state of a process.
//! * `event`, `memory`, `queue`, `plain`, `socket`, `duplicate`, `option`, and for the blocking calls `sync_poll`, `epoll`, `sync`, `several`: the calls.
#![allow(clippy::missing_safety_doc)] // one text for all, in the crate's documentation

mod closing;
mod duplicate;
mod epoll;
mod epoll_set;
mod event;
mod handles;
mod helper;
pub mod memory;
mod op;
pub mod option;
mod plain;
pub mod queue;
mod region;
pub mod several;
pub mod socket;
mod started;
mod state;
pub mod sync;
mod sync_poll;
mod table;
pub mod types;

pub use state::init;
