//! The error of a measurement.

use std::fmt::Display;

/// What could not be done, and why.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {why}")]
pub struct Error {
    what: &'static str,
    why: String,
}

pub type Result<T> = std::result::Result<T, Error>;

pub(crate) fn failed(what: &'static str, why: impl Display) -> Error {
    let why = why.to_string();
    Error { what, why }
}

/// Converts an error of the system or of the verbs: `what` is the failed action.
pub(crate) fn error<E: Display>(what: &'static str) -> impl FnOnce(E) -> Error {
    move |why| failed(what, why)
}
