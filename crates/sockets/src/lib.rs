//! What the kinds of sockets over verbs have in common: the program's memory in pieces, how long a call waits and what wakes it, connections and
//! backlogs, locks, and the numbers of errors. For the crates of the sockets, not for programs.
#![forbid(unsafe_code)]

pub mod backlog;
pub mod bell;
pub mod error;
pub mod lock;
pub mod memory;
pub mod stream;
pub mod wait;
