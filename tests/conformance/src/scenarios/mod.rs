//! The scenarios, by topic. Those that use nothing but [`weft_verbs::any`] has too are also in [`any`](crate::any): their objects are those of `super::bed`.

use crate::bed;

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
pub mod srq_limits;
pub mod states;
pub mod threads;
pub mod windows;
pub mod write_read;
