//! Errors, and the numbers that a sockets programmer knows them by.

use rustix::io::Errno;

/// Why something could not be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A range that is not inside its region.
    #[error("the range is not inside the region")]
    Bounds,
    /// Verbs refused to make an object.
    #[error(transparent)]
    Verbs(#[from] weft_verbs::Error),
    /// Memory could not be used.
    #[error(transparent)]
    Memory(#[from] weft_verbs::MemError),
    /// The system refused.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl Error {
    /// The number for it.
    pub fn errno(&self) -> Errno {
        match self {
            Error::Bounds => Errno::FAULT,
            Error::Verbs(weft_verbs::Error::Limit(_)) => Errno::NOBUFS,
            Error::Verbs(weft_verbs::Error::Invalid(_) | weft_verbs::Error::Tls(_)) => Errno::INVAL,
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
