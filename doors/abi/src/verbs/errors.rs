//! The error numbers that C programs get.

use rustix::io::Errno;
use weft_verbs::{Error, MemError, PostError, PostReason};

/// The error number of a native call's error.
pub(crate) fn errno(error: Error) -> Errno {
    match error {
        Error::Limit(_)
        | Error::Memory(MemError::Limit | MemError::NoMemory | MemError::LockedMemory) => {
            Errno::NOMEM
        }
        Error::Invalid(_) | Error::Setting(_) | Error::Memory(_) => Errno::INVAL,
        Error::Os { source, .. } => os_errno(&source),
    }
}

/// The error number of a system error.
pub(crate) fn os_errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The error number of the system call that has just failed.
pub(crate) fn last_errno() -> Errno {
    os_errno(&std::io::Error::last_os_error())
}

/// The error number of a refused request.
pub(crate) fn refused(error: PostError) -> Errno {
    match error.reason {
        PostReason::Full => Errno::NOMEM,
        _ => Errno::INVAL,
    }
}
