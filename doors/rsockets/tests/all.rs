//! The tests of this crate.

mod datagrams;
mod sockets;
mod stuck;
