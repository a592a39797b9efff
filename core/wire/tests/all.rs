//! The tests of this crate.

mod properties;
mod vectors;
