//! The driver: carries out over verbs what the machine says.
//!
//! From below:
//!
//! * `timer`: time limits. `slab`: numbers for operations.
//! * `op`: one operation's memory and registrations, and where its end is told. `ends`: those that have to wait.
//! * `state`: a connection's state under the lock: the machine, and what it works with. `held`: its file sends, and what waits behind them.
//! * `conn`: one connection: its queue pair, its memory, the program's calls, and who runs it when.
//! * `carry`: the machine's actions, carried out. `limit`: ends that come before the data. `hold`: the turns of file sends.
//!
//! Who runs it: a thread in a call of this crate drives its connection itself. While no thread does, the device's engine drives the queue pair
//! and calls the connection's hook, so that streams go on while the program computes. One lock a connection; who does
//! not get it leaves a note (`pending`) for who has it.

mod carry;
mod conn;
mod ends;
mod held;
mod hold;
mod limit;
mod op;
mod slab;
mod state;
mod timer;

pub(crate) use conn::{Conn, Setup, agree};
pub(crate) use op::{Late, Slot, Target, file_end};
pub(crate) use timer::deadline;
