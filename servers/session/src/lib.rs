//! What servers over verbs and their clients share: messages over a queue pair, and an acceptor that lets peers in.
#![forbid(unsafe_code)]

pub mod acceptor;
mod channel;
mod hello;
mod via;

pub use channel::{Broken, DialError, Event, MessageChannel, Prepared, Protocol};
pub use hello::{HELLO_LEN, Hello, Malformed, Status};
pub use via::{NoDevice, Via};
