//! What the command lines of the programs share.
//!
//! [`args`] has the options of the applications that are programs of their own: `weft` shows them in its help, manual and
//! completion, and the program itself parses them. [`failure`] has the exit codes, [`identity`] the keys of a user.
#![forbid(unsafe_code)]

pub mod address;
pub mod args;
pub mod failure;
pub mod global;
pub mod identity;
mod interrupt;
mod output;
pub mod places;
pub mod program;
pub mod start;
pub mod terminal;
pub mod values;

pub use interrupt::{let_signal_end, tidy_up};
pub use output::{lost_output, print, say};
pub use terminal::tell;

/// A line on standard error, in the words of `format!`.
#[macro_export]
macro_rules! tell {
    ($($words:tt)*) => {
        $crate::terminal::tell(format_args!($($words)*))
    };
}
