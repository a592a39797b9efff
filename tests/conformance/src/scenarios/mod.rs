//! The scenarios, by topic.

pub mod atomics;
pub mod cq;
pub mod events;
pub mod send_recv;
pub mod srq;
pub mod states;
pub mod windows;
pub mod write_read;
