//! The tests of this crate.

mod properties;
mod roce;
mod vectors;
