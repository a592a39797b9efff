//! The scenarios, by topic.

pub mod atomics;
pub mod send_recv;
pub mod states;
pub mod write_read;
