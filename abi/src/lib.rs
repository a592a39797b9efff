//! What C programs see of weft: types with C's layout, conversion of pointers, tables from descriptor and handle numbers to
//! objects, `errno`. The packages in libs/ export it under C's names and hold nothing else.
//!
//! # Safety
//!
//! The calls take pointers from C programs. Each one's `# Safety` is that of its manual page: pointers are valid for what the call
//! reads and writes through them, and what an asynchronous call is given stays so until its event has been dequeued.
//! Nothing here forms a reference to memory of a program, because another of its threads may change it; it is read and
//! written through raw pointers, and data is moved by the crates below, which copy it as memory that may race.
//! Calls go to the system through `rustix` or [`libc::syscall`], never through the libc functions that a preload library replaces.
#![allow(clippy::cast_possible_wrap)] // C counts in `int`; what can be too large is checked

pub mod address;
pub mod call;
#[cfg(feature = "exs")]
pub mod exs;
#[cfg(feature = "verbs")]
mod made;
#[cfg(any(feature = "exs", feature = "verbs"))]
mod option;
mod pages;
#[cfg(any(feature = "exs", feature = "verbs"))]
mod select;
#[cfg(feature = "verbs")]
pub mod verbs;
