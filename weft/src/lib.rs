//! The library part of the `weft` program: what its subcommands do, for tests and for other programs.
//!
//! RDMA itself is in [`weft_verbs`] and, in its small form, in [`weft_iw`]; start there to write programs.
#![forbid(unsafe_code)]

mod advise;
pub mod cli;
pub mod cmd;
pub mod cp;
pub mod demo;
pub mod doctor;
pub mod rnics;
pub mod stat;
pub mod stat_run;
