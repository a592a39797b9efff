//! The tests of this crate.

mod joins;
mod ring;
mod strangers;
