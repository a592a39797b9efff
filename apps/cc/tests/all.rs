//! The tests of this crate.

mod common;

mod build;
mod compilers;
mod peers;
