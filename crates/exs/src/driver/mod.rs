//! The driver: carries out over verbs what the machine says.
//!
//! * `conn`: one connection: its queue pair, its memory, the program's calls, and who runs it when.
//! * `state`: its state under the lock: the machine, and what it works with.
//! * `carry`: the machine's actions, carried out.
//! * `hold`: file sends, and what waits behind them.
//! * `op`: one operation's memory and registrations.
//! * `slab`: numbers for operations.
//! * `timer`: time limits.
//!
//! Who runs it: a thread in a call of this crate drives its connection itself. While no thread does, the device's engine drives the queue pair
//! and calls the connection's hook, so that streams go on while the program computes. One lock a connection; who does
//! not get it leaves a note (`pending`) for who has it.

mod carry;
mod conn;
mod ends;
mod hold;
mod limit;
mod op;
mod slab;
mod state;
mod timer;

pub(crate) use conn::{Conn, LINGER, Setup, agree};
pub(crate) use op::{Late, Slot, Target, file_end};
pub(crate) use timer::{Timers, deadline};
