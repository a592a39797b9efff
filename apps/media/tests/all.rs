//! The tests of this crate.

mod clear;
mod torn;
