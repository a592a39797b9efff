//! What C programs are told of an error.

use rustix::io::Errno;
use weft_verbs::{Error, MemError, PostError, PostReason};

/// The error of a call of the verbs below.
pub(crate) fn errno(error: Error) -> Errno {
    match error {
        Error::Limit(_)
        | Error::Memory(MemError::Limit | MemError::NoMemory | MemError::LockedMemory) => {
            Errno::NOMEM
        }
        Error::Invalid(_) | Error::Tls(_) | Error::Memory(_) => Errno::INVAL,
        Error::Os { source, .. } => os_errno(&source),
    }
}

/// What the system said.
pub(crate) fn os_errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The error of a call of ours that has just failed.
pub(crate) fn last_errno() -> Errno {
    os_errno(&std::io::Error::last_os_error())
}

/// The error of a refused request.
pub(crate) fn refused(error: PostError) -> Errno {
    match error.reason {
        PostReason::Full => Errno::NOMEM,
        _ => Errno::INVAL,
    }
}
