//! Standard output.

use std::io::Write;
use std::sync::OnceLock;

use crate::failure::Failure;

/// The reason why standard output did not take everything: a full disk, for example.
static LOST: OnceLock<std::io::Error> = OnceLock::new();

/// Prints a line to stdout; a closed pipe is not an error.
pub fn say(line: impl std::fmt::Display) {
    print(format!("{line}\n").as_bytes());
}

/// Prints to stdout; returns whether the reader still takes output. A closed pipe is not an error, see [`lost_output`] for other errors.
pub fn print(bytes: &[u8]) -> bool {
    let mut out = std::io::stdout();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => true,
        Err(e) => {
            if e.kind() != std::io::ErrorKind::BrokenPipe {
                let _ = LOST.set(e);
            }
            false
        }
    }
}

/// The error of stdout, to be reported at the program's end.
#[must_use]
pub fn lost_output() -> Option<Failure> {
    let error = LOST.get()?;
    Some(Failure::failed(format!(
        "cannot write to standard output: {error}"
    )))
}
