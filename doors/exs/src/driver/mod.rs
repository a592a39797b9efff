//! The driver: carries out the machine's actions over verbs.
//!
//! Modules, lowest layer first:
//!
//! * `timer`: time limits. `slab`: numbers for operations.
//! * `op`: one operation's memory, registrations, and target. `ends`: completed operations that cannot be reported yet.
//! * `link`: the queue pair and its completion queue, on the soft RNIC or on an RNIC of the machine. `rnic`: what the latter needs.
//! * `state`: a connection's state under the lock: the machine, and the resources it uses. `held`: its file sends, and the operations behind them.
//! * `conn`: one connection: its queue pair, its memory, the program's calls, and how it is driven.
//! * `carry`: carries out the machine's actions. `close`: how a connection is closed. `limit`: operations that end before their data. `hold`: the order of
//!   file sends.
//!
//! A thread in a call of this crate drives its connection itself. While no thread does, the device's engine (for an RNIC of the machine, the thread of
//! `poller`) drives the queue pair and calls the connection's hook, so that streams progress while the program computes. Each connection has one lock. A thread that does
//! not get it sets `pending`, and the holder of the lock does its work.

mod carry;
mod close;
mod conn;
mod ends;
mod held;
mod hold;
mod limit;
mod link;
mod op;
mod rnic;
mod slab;
mod state;
mod timer;

pub(crate) use conn::{Conn, Setup};
pub(crate) use link::Link;
pub(crate) use op::{Slot, Target, file_end};
pub(crate) use rnic::Rnic;
pub(crate) use state::agree;
