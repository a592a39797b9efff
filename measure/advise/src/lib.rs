//! The observer's record of a program's socket calls for `weft advise` ([`record`]), the costs of this machine's copies and registrations
//! ([`machine`]), and the door of weft that follows from both ([`verdict`]).
//!
//! Nothing here makes a system call or measures anything: the observer (measure/libadvise) fills a [`record::Table`] that it shares with the
//! `weft` program, which reads it as bytes. A record comes from a program that may write anything into it. Reading never panics, for any
//! numbers.
#![forbid(unsafe_code)]

pub mod machine;
pub mod record;
pub mod verdict;
