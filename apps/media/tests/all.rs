//! The tests of this crate.

mod blocks;
mod clear;
mod common;
#[cfg(feature = "program")]
mod mpv;
mod torn;
