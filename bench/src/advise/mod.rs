//! The measurements of `weft advise` and their output, and the suite `weft bench advise`: chapter 4 of the thesis.

mod conclusions;
mod measure;
mod show;
mod suite;

pub use measure::{Effort, STEPS, measure};
pub use show::{advice, sections};
pub(crate) use suite::run as run_suite;
