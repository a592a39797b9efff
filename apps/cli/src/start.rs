//! Programs that take the place of this one, and the exit statuses of env(1) where they cannot.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use crate::failure::Failure;

/// What failed is ours.
pub const EXIT_OWN: u8 = 125;
const EXIT_NOT_EXECUTABLE: u8 = 126;
/// There is no such program.
pub const EXIT_NOT_FOUND: u8 = 127;

/// Says what failed.
pub fn fail(code: u8, failure: &Failure) -> ExitCode {
    crate::tell!("weft: {failure}");
    ExitCode::from(code)
}

/// Prints why the program does not run, with the exit status of env(1).
pub fn refuse(name: &OsStr, error: &io::Error) -> ExitCode {
    if name.as_bytes().starts_with(b"-") {
        let failure = Failure::usage(format!("there is no option {}", name.display()))
            .hint("options stand before the program, and `--` before a program whose name begins with `-`; --help lists them");
        return fail(failure.exit() as u8, &failure);
    }
    let missing = error.kind() == io::ErrorKind::NotFound;
    let code = if missing {
        EXIT_NOT_FOUND
    } else {
        EXIT_NOT_EXECUTABLE
    };
    let failure = if missing {
        Failure::failed(format!("cannot run {}: no such program", name.display()))
            .hint("name a program of PATH, or its file, after `--`")
    } else {
        let failure = Failure::failed(format!("cannot run {}: {error}", name.display()));
        match error.kind() {
            io::ErrorKind::PermissionDenied => {
                failure.hint("it is no program, or not executable by this user: see `ls -l`")
            }
            _ => failure,
        }
    };
    fail(code, &failure)
}
