//! The scenarios, by topic.

pub mod atomics;
pub mod cm;
pub mod confirmed;
pub mod cq;
pub mod events;
pub mod lifetimes;
pub mod limits;
pub mod rnr;
pub mod send_recv;
pub mod srq;
pub mod states;
pub mod threads;
pub mod windows;
pub mod write_read;
