//! What copies, registrations, pins and transfers cost on this machine ([`measure()`]), and what follows from it for a program's buffers
//! ([`advice`]).
#![forbid(unsafe_code)]

mod error;
mod measure;
mod pair;
mod show;

pub use error::{Error, Result};
pub use measure::{Effort, STEPS, measure};
pub use pair::pair;
pub use show::{advice, sections, words};
