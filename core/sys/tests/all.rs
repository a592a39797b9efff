//! The tests of this crate but for those that fork or handle signals.

mod memfd;
mod sys;
