//! The parts of `weft run` outside its preload library, without unsafe code: how the two ends of a TCP connection on one host find each other
//! ([`meet`]; [`folder`] between containers), how two UDP sockets do ([`dgram`]), their messages to the broker that reaches other hosts ([`hosts`], [`ud`]), which
//! users meet ([`peers`]), when they try ([`pace`]), how sends are counted while they go over ([`gate`]), which events are of one registration
//! ([`events`]), the report of a process's connections ([`ledger`]), and the libraries' names ([`preload`]). The formats are in `docs/spec/run.md`.
#![forbid(unsafe_code)]

pub mod addr;
pub mod connection;
pub mod dgram;
pub mod events;
pub mod folder;
pub mod gate;
pub mod hosts;
pub mod ledger;
pub mod lend;
pub mod meet;
pub mod pace;
pub mod peers;
pub mod preload;
pub mod proof;
pub mod sandbox;
pub mod ud;
mod wire;
