//! Code that the kinds of sockets over verbs share: the program's memory in pieces, waiting and wake-ups, connections and backlogs, locks, and
//! error numbers. For the sockets crates, not for programs.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod backlog;
pub mod bell;
pub mod error;
/// Locks that a panicking thread does not spoil.
pub mod lock {
    pub use weft_verbs::ext::{lock, try_lock};
}
pub mod memory;
pub mod stream;
pub mod wait;
