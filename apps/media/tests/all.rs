//! The tests of this crate.

mod blocks;
mod clear;
#[cfg(feature = "program")]
mod mpv;
mod torn;
