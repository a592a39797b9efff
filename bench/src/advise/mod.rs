//! What `weft advise` measures of a machine and how it is shown, and the suite `weft bench advise`: chapter 4 of the thesis.

mod measure;
mod show;

pub use measure::{Effort, STEPS, measure};
pub use show::{advice, sections};
