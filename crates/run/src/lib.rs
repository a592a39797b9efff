//! What `weft run` needs beside its preload library, without unsafe code: how the two ends of a TCP connection on one host find each other
//! ([`meet`]), how two UDP sockets do ([`dgram`]), what they say to the broker that reaches other hosts ([`hosts`]), when they try
//! ([`pace`]), and what a process says of its connections ([`ledger`]). The formats are in `docs/spec/run.md`.
#![forbid(unsafe_code)]

pub mod addr;
pub mod dgram;
pub mod hosts;
pub mod ledger;
pub mod lend;
pub mod meet;
pub mod pace;
