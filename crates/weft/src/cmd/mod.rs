//! One module for each subcommand: its options, and how they become calls of the library.

pub mod bench;
pub mod completion;
pub mod cp;
pub mod demo;
pub mod doctor;
pub mod hello;
pub mod man;
pub mod stat;

/// Prints a line to stdout; a reader that has gone is not an error.
pub(crate) fn say(line: impl std::fmt::Display) {
    use std::io::Write;
    let _ = writeln!(std::io::stdout(), "{line}");
}
