//! The broker of `weft run --hosts`: it carries TCP connections of unmodified sockets programs to other hosts by SDP.
//!
//! One broker serves the programs of one user in one network namespace. A program registers a connection
//! ([`weft_run::hosts`]). The broker of the end that has called `connect` dials the other host's broker; the two make sure that they mean the
//! same TCP connection ([`wire`]), and each program hands its rings over. From then on each broker moves bytes between its program's rings
//! and an SDP stream, one for each connection. `docs/spec/run.md` has the messages, and states what they prove.
//!
//! Datagrams it does not carry: it answers other brokers which UDP sockets take frames of datagram-iWARP, and programs send these themselves
//! ([`weft_run::ud`]).
//!
//! A program does not wait for a broker and does not need one: without it, connections stay on TCP. Only under
//! `--datagrams` does one wait for it: at its first datagram that begins like a frame, up to 0.2 s, once.
#![forbid(unsafe_code)]

mod broker;
mod datagrams;
mod meet;
mod pump;
pub mod wire;

pub use broker::{Broker, Config};
