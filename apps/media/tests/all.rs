//! The tests of this crate.

mod blocks;
mod clear;
mod torn;
