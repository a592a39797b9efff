//! Errors, and their `errno` numbers.

use rustix::io::Errno;

/// The reason of a failure. `{:?}` prints the text as well, for programs whose `main` returns the error.
///
/// ```
/// let error = weft_exs::Error::from(std::io::Error::from_raw_os_error(24));
/// assert_eq!(format!("{error:?}"), "Error(Too many open files (os error 24))");
/// ```
#[derive(thiserror::Error)]
pub enum Error {
    /// A range that is not inside its region.
    #[error("the range is not inside the region")]
    Bounds,
    /// Verbs could not create an object.
    #[error(transparent)]
    Verbs(#[from] weft_verbs::Error),
    /// Memory could not be used.
    #[error(transparent)]
    Memory(#[from] weft_verbs::MemError),
    /// The operating system reported an error.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Error({self})")
    }
}

impl Error {
    /// The `errno` number of this error.
    pub fn errno(&self) -> Errno {
        match self {
            Error::Bounds => Errno::FAULT,
            Error::Verbs(weft_verbs::Error::Limit(_)) => Errno::NOBUFS,
            Error::Verbs(weft_verbs::Error::Invalid(_) | weft_verbs::Error::Setting(_)) => {
                Errno::INVAL
            }
            Error::Verbs(weft_verbs::Error::Memory(_)) | Error::Memory(_) => Errno::NOMEM,
            Error::Verbs(weft_verbs::Error::Os { source, .. }) | Error::Io(source) => {
                Errno::from_io_error(source).unwrap_or(Errno::IO)
            }
        }
    }
}

impl From<Error> for Errno {
    fn from(error: Error) -> Self {
        error.errno()
    }
}
