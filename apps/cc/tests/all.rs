//! The tests of this crate.

mod common;

mod build;
mod clang;
mod compilers;
mod peers;
mod plain;
