//! What servers over verbs and their clients share: messages over a queue pair, and a door that lets peers in.
#![forbid(unsafe_code)]

pub mod door;
mod hello;
mod link;

pub use hello::{HELLO_LEN, Hello, Malformed, Status};
pub use link::{Broken, Event, Link, Prepared, Protocol};
