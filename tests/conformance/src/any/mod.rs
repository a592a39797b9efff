//! The scenarios on the objects of any device ([`weft_verbs::any`]): an RNIC of the machine, or weft's own. [`bed`] has the environment, under the names that
//! [`crate::bed`] has.
#![expect(
    clippy::duplicate_mod,
    reason = "the same scenarios, compiled for another environment"
)]

pub mod bed;
#[path = "../checks.rs"]
mod checks;
#[path = "../pairs.rs"]
mod pairs;
/// Those of any device.
mod objects {
    pub use weft_verbs::any::{Cq, Mr, Srq};
}

#[path = "../scenarios/atomics.rs"]
pub mod atomics;
#[path = "../scenarios/send_recv.rs"]
pub mod send_recv;
#[path = "../scenarios/srq.rs"]
pub mod srq;
#[path = "../scenarios/threads.rs"]
pub mod threads;
#[path = "../scenarios/write_read.rs"]
pub mod write_read;
