//! Errors between a client and its server.

use rustix::io::Errno;
use weft_session::{Broken, DialError, NoDevice};
use weft_verbs::cm::ConnectError;
use weft_verbs::tls::TlsError;

use crate::wire::Status;

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server says so, or the client's own checks.
    #[error("{0}")]
    Errno(Errno),
    /// There is no connection.
    #[error("{0}")]
    Connect(ConnectError),
    /// The host's name cannot be resolved.
    #[error("cannot resolve the host: {0}")]
    Resolve(std::io::Error),
    /// The server turned the connection away.
    #[error("the server turned the connection away: {0}")]
    Rejected(Status),
    /// The peer is not a server of this protocol.
    #[error("what answers is no `weft fs` server: {0}")]
    Foreign(&'static str),
    /// The connection has ended or the server is silent.
    #[error("the connection has ended: {0}")]
    Gone(&'static str),
    /// No device carries the connection.
    #[error("{0}")]
    Device(NoDevice),
    /// A missing resource of this process.
    #[error("{0}")]
    Local(String),
}

impl Error {
    /// The error number that a file operation reports.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Errno(errno) => *errno,
            Self::Resolve(_) => Errno::NOENT,
            // A server that is being killed ends a connection in its handshake, too.
            Self::Connect(ConnectError::Tls(TlsError::ClosedInHandshake)) => Errno::IO,
            Self::Connect(ConnectError::Tls(_)) | Self::Rejected(Status::UnknownPeer) => {
                Errno::ACCESS
            }
            Self::Rejected(Status::Busy) => Errno::USERS,
            Self::Foreign(_) | Self::Rejected(_) => Errno::PROTO,
            Self::Connect(_) | Self::Gone(_) => Errno::IO,
            Self::Device(_) => Errno::NODEV,
            Self::Local(_) => Errno::NOMEM,
        }
    }

    /// The error of opening a name again: that it is no longer there is `ESTALE` for who has the buffer open.
    #[must_use]
    pub fn of_reopening(self) -> Self {
        match self {
            Self::Errno(Errno::NOENT | Errno::NOTDIR | Errno::ISDIR) => Errno::STALE.into(),
            other => other,
        }
    }
}

impl From<Broken> for Error {
    fn from(broken: Broken) -> Self {
        match broken {
            Broken::Denied => Self::Gone("the server has taken the memory back"),
            Broken::Closed => Self::Gone("the peer closed it or went away"),
            Broken::Protocol(why) => Self::Gone(why),
            Broken::Local(why) => Self::Local(why),
        }
    }
}

impl From<DialError> for Error {
    fn from(error: DialError) -> Self {
        match error {
            DialError::Local(e) => Self::Local(e.to_string()),
            DialError::Connect(e) => Self::Connect(e),
        }
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}
