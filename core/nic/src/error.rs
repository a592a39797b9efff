//! What failed, on which device, and what to do about it.

use std::ffi::c_int;
use std::fmt;
use std::io;

use rustix::process::{Resource, getrlimit};

/// A call that failed.
#[derive(Clone, Debug)]
pub struct Error {
    device: Option<String>,
    what: String,
    errno: Option<i32>,
    remedy: Option<String>,
    rejected: Option<Vec<u8>>,
    of_a_request: bool,
}

impl Error {
    pub(crate) fn new(device: Option<&str>, what: impl Into<String>) -> Self {
        Self {
            device: device.map(str::to_owned),
            what: what.into(),
            errno: None,
            remedy: None,
            rejected: None,
            of_a_request: false,
        }
    }

    /// A call of the libraries failed with `errno`.
    pub(crate) fn call(device: &str, call: &str, errno: i32) -> Self {
        let new = Self::new(Some(device), call);
        Self {
            errno: Some(errno),
            ..new
        }
    }

    pub(crate) fn with_errno(self, errno: i32) -> Self {
        Self {
            errno: Some(errno),
            ..self
        }
    }

    /// As [`Error::call`], where the kernel may have refused to lock `needed` bytes of memory.
    pub(crate) fn locking(device: &str, call: &str, errno: i32, needed: usize) -> Self {
        let error = Self::call(device, call, errno);
        match getrlimit(Resource::Memlock).current {
            Some(limit) if matches!(errno, libc::ENOMEM | libc::EAGAIN | libc::EPERM) => error.remedy(format!(
                "the device needs locked memory, {} KiB for this call, and this process may lock {} KiB in all: raise the limit (`ulimit -l`, \
                 memlock in /etc/security/limits.conf, LimitMEMLOCK= of the service)",
                needed.div_ceil(1024),
                limit / 1024
            )),
            _ => error,
        }
    }

    pub(crate) fn remedy(self, remedy: impl Into<String>) -> Self {
        Self {
            remedy: Some(remedy.into()),
            ..self
        }
    }

    /// The peer's program has rejected the connection with this private data.
    pub(crate) fn rejected_with(self, private_data: Vec<u8>) -> Self {
        Self {
            rejected: Some(private_data),
            ..self
        }
    }

    /// The private data of the peer's program, if that has rejected the connection.
    pub fn rejected(&self) -> Option<&[u8]> {
        self.rejected.as_deref()
    }

    /// The device is gone.
    pub(crate) fn removed(device: &str) -> Self {
        Self::new(Some(device), "the device was removed, or has failed").with_errno(libc::ENODEV)
    }

    /// A connection request is lost, and others can come.
    pub(crate) fn of_a_request(self) -> Self {
        Self {
            of_a_request: true,
            ..self
        }
    }

    /// True if only a connection request was lost, and others can come.
    pub fn is_of_a_request(&self) -> bool {
        self.of_a_request
    }

    /// The device's name, where there is one.
    pub fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }

    /// The error number of the call; `None` for errors without one.
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }

    /// What the user can do about it, where that is known.
    pub fn hint(&self) -> Option<&str> {
        self.remedy.as_deref()
    }

    /// True if the device or its driver has answered that it does not know the operation.
    pub fn is_unsupported(&self) -> bool {
        let numbers = [libc::EOPNOTSUPP, libc::ENOSYS, libc::EPROTONOSUPPORT];
        self.errno.is_some_and(|errno| numbers.contains(&errno))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(device) = &self.device {
            write!(f, "{device}: ")?;
        }
        f.write_str(&self.what)?;
        match self.errno {
            Some(errno) => write!(f, ": {}", io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

/// The error number that the C library has kept of the last call.
pub(crate) fn last() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The result of a call that returns 0, an error number, or -1 and `errno`; some drivers return the number with a minus.
pub(crate) fn status(returned: c_int) -> Result<(), i32> {
    match returned {
        0 => Ok(()),
        -1 => Err(last()),
        other => Err(other.abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_a_returned_error_is_read() {
        assert_eq!(status(0), Ok(()));
        assert_eq!(status(22), Err(22));
        assert_eq!(status(-22), Err(22));
        // A file that is not there sets errno.
        assert!(std::fs::metadata("/nowhere/at/all").is_err());
        assert_eq!(status(-1), Err(libc::ENOENT));
    }

    #[test]
    fn an_error_names_device_call_and_cause() {
        let error = Error::call("siw0", "ibv_alloc_pd", libc::ENOENT);
        assert_eq!(
            error.to_string(),
            "siw0: ibv_alloc_pd: No such file or directory (os error 2)"
        );
        assert_eq!((error.device(), error.errno()), (Some("siw0"), Some(2)));
        assert!(!error.is_unsupported());
        assert!(Error::call("siw0", "ibv_create_qp", libc::EOPNOTSUPP).is_unsupported());
    }
}
