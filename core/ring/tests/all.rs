//! The tests of this crate but for those under loom.

mod ring;
mod threads;
