//! The library part of the `weft` program: what its subcommands do, for tests and for other programs.
//!
//! RDMA itself is in [`weft_verbs`] and, in its small form, in [`weft_iw`]; start there to write programs.
#![forbid(unsafe_code)]

mod address;
mod advise;
pub mod cli;
pub mod cmd;
pub mod cp;
pub mod demo;
pub mod doctor;
pub mod elf;
pub mod failure;
pub mod fs;
pub mod global;
pub mod identity;
mod interrupt;
mod places;
pub mod stat;
pub mod stat_run;
mod terminal;

pub use interrupt::let_signal_end;
pub use terminal::tell;
