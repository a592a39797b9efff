//! The numbers that a sockets programmer knows errors by.

use rustix::io::Errno;
use weft_verbs::Error;

/// The number of an error of verbs.
pub fn errno(error: &Error) -> Errno {
    match error {
        Error::Limit(_) => Errno::NOBUFS,
        Error::Invalid(_) | Error::Setting(_) => Errno::INVAL,
        Error::Memory(_) => Errno::NOMEM,
        Error::Os { source, .. } => io_errno(source),
    }
}

/// The number of an error of the system; `EIO` where it has none.
pub fn io_errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
