//! The suite `weft-papers advise`: chapter 4 of the thesis.

mod conclusions;
mod suite;

pub(crate) use suite::run as run_suite;
