//! The numbers that a sockets programmer knows errors by.

use rustix::io::Errno;
use weft_verbs::Error;
use weft_verbs::cm::ConnectError;

pub(crate) fn errno(error: &Error) -> Errno {
    match error {
        Error::Limit(_) => Errno::NOBUFS,
        Error::Invalid(_) => Errno::INVAL,
        Error::Memory(_) => Errno::NOMEM,
        Error::Os { source, .. } => io_errno(source),
    }
}

pub(crate) fn io_errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The number for a connection that could not be made, as `connect(2)` has it.
pub(crate) fn connect_errno(error: &ConnectError) -> Errno {
    match error {
        ConnectError::Rejected { .. } | ConnectError::Refused => Errno::CONNREFUSED,
        ConnectError::TimedOut => Errno::TIMEDOUT,
        ConnectError::Unreachable => Errno::HOSTUNREACH,
        ConnectError::Protocol(_) => Errno::PROTO,
        ConnectError::Closed => Errno::CONNRESET,
        ConnectError::Invalid(_) => Errno::INVAL,
        ConnectError::NotLocal(_) => Errno::NETUNREACH,
        ConnectError::Io(error) => io_errno(error),
    }
}
