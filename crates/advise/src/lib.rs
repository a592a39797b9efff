//! What the observer of `weft advise` records of a program's socket calls ([`record`]), what this machine's copies and registrations cost
//! ([`machine`]), and which door of weft follows from both ([`verdict`]).
//!
//! Nothing here makes a system call or measures anything: the observer (libs/advise) fills a [`record::Table`] that it shares with the
//! `weft` program, which reads it as bytes. A record comes from a program that may write anything into it: whatever the numbers are, reading
//! them ends without a panic.
#![forbid(unsafe_code)]

pub mod machine;
pub mod record;
pub mod verdict;
