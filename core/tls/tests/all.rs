//! The tests of this crate.

mod keys;
mod session;
