//! What every program does at its start and at its end.

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Command, FromArgMatches};

use crate::failure::Failure;
use crate::global::Global;
use crate::terminal::tell;
use crate::{let_signal_end, lost_output};

/// The body of a program that `weft SUBCOMMAND` starts, with the options of that subcommand.
pub fn application<A: Args>(
    subcommand: &'static str,
    long: &'static str,
    run: impl FnOnce(&A, Global) -> Result<ExitCode, Failure>,
) -> ExitCode {
    let short = long.split(['.', '\n']).next().unwrap_or(long);
    let command = Command::new(format!("weft-{subcommand}"))
        .bin_name(format!("weft {subcommand}"))
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true);
    let command = Global::augment_args(A::augment_args(command))
        .about(short)
        .long_about(long);
    let matches = read(command);
    let parsed = A::from_arg_matches(&matches)
        .and_then(|args| Ok((args, Global::from_arg_matches(&matches)?)));
    let (args, global) = parsed.unwrap_or_else(|error| error.exit());
    ended(global.start_log().and_then(|()| run(&args, global)))
}

/// What the standard library says of text that is no number, and what a user can make of it.
const NUMBERS: [(&str, &str); 5] = [
    ("invalid digit found in string", "write a whole number"),
    (
        "cannot parse integer from empty string",
        "write a whole number",
    ),
    (
        "number too large to fit in target type",
        "the number is too large",
    ),
    (
        "number too small to fit in target type",
        "the number is too small",
    ),
    ("invalid float literal", "write a number"),
];

fn in_words(text: String) -> String {
    let plain = |text: String, (theirs, ours): &(&str, &str)| text.replace(theirs, ours);
    NUMBERS.iter().fold(text, plain)
}

/// Reads the command line; ends the program where it cannot be used.
#[must_use]
pub fn read(command: Command) -> ArgMatches {
    let error = match command.try_get_matches() {
        Ok(matches) => return matches,
        Err(error) if error.kind() == ErrorKind::ValueValidation => error,
        Err(error) => error.exit(),
    };
    tell(in_words(error.render().to_string()).trim_end());
    std::process::exit(error.exit_code())
}

/// The exit status of a program that has done its work; says what failed.
pub fn ended(done: Result<ExitCode, Failure>) -> ExitCode {
    let_signal_end();
    match done.and_then(|exit| lost_output().map_or(Ok(exit), Err)) {
        Ok(exit) => exit,
        Err(failure) => {
            tell(format_args!("weft: {failure}"));
            failure.exit().into()
        }
    }
}
