//! The C interfaces of weft: types with C's layout, conversion of pointers, tables from descriptors and handles to
//! objects, `errno`. The packages `lib*` beside it export it under the C names and contain nothing else.
//!
//! # Safety
//!
//! The calls take pointers from C programs. The `# Safety` of each is that of its manual page: pointers are valid for what the call
//! reads and writes through them, and the arguments of an asynchronous call stay valid until its event has been dequeued.
//! This crate never forms a reference to memory of a program, because another of its threads may change it. It reads and
//! writes that memory through raw pointers; the crates below move data, and copy it as memory that may race.
//! System calls go through `rustix` or [`libc::syscall`], never through the libc functions that a preload library replaces.
#![allow(clippy::cast_possible_wrap)] // C counts in `int`; what can be too large is checked

pub mod address;
pub mod call;
#[cfg(feature = "exs")]
pub mod exs;
#[cfg(feature = "verbs")]
mod once;
#[cfg(any(feature = "exs", feature = "verbs"))]
mod option;
#[cfg(any(feature = "exs", feature = "verbs"))]
mod pages;
#[cfg(any(feature = "exs", feature = "verbs"))]
mod select;
#[cfg(feature = "verbs")]
pub mod verbs;
