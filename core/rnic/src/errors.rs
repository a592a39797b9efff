//! Errors that name the limit, the address and the layer.

use std::fmt;

use weft_sys::settings::Wrong;
use weft_wire::rdmap::TermError;

/// A limit of the device that a request would pass, see [`Limits`](crate::Limits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitReached {
    /// The limited resource.
    pub what: &'static str,
    /// The setting that says so: a field of [`Limits`](crate::Limits).
    pub field: &'static str,
    /// The requested number; including existing objects, if the limit counts objects.
    pub asked: u64,
    /// The limit.
    pub limit: u64,
}

impl LimitReached {
    /// An error if more than the limit is asked for.
    ///
    /// # Errors
    /// [`Error::Limit`].
    #[doc(hidden)]
    pub fn check(
        what: &'static str,
        field: &'static str,
        asked: u32,
        limit: u32,
    ) -> Result<(), Error> {
        if asked <= limit {
            return Ok(());
        }
        Err(Error::Limit(LimitReached {
            what,
            field,
            asked: asked.into(),
            limit: limit.into(),
        }))
    }
}

impl fmt::Display for LimitReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LimitReached {
            what,
            field,
            asked,
            limit,
        } = self;
        write!(f, "{asked} {what} asked for, at most {limit} ({field})")
    }
}

/// Errors of creating objects. `{:?}` prints the text too, for programs that end with an error of `main`.
///
/// ```
/// # use weft_rnic::{Device, Limits, QpInit};
/// let limits = Limits { max_sge: 2, ..Limits::default() };
/// let device = Device::builder().limits(limits).open()?;
/// let (pd, cq) = (device.alloc_pd()?, device.create_cq(16, None)?);
/// let init = QpInit { max_sge: 3, ..QpInit::new(&cq, &cq) };
/// let error = pd.create_qp(&init).err().unwrap();
/// assert_eq!(
///     error.to_string(),
///     "limit of the device: 3 scatter/gather elements of a request asked for, at most 2 (max_sge)"
/// );
/// # Ok::<(), weft_rnic::Error>(())
/// ```
#[derive(thiserror::Error)]
pub enum Error {
    /// A limit of the device.
    #[error("limit of the device: {0}")]
    Limit(LimitReached),
    /// An argument that can never work.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// The memory layer refused.
    #[error("memory: {0}")]
    Memory(#[from] weft_mem::MemError),
    /// A variable of the environment has a value that is not accepted, or TLS cannot be had as it asks for it.
    #[error("{0}")]
    Setting(String),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// The operation.
        what: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({self})")
    }
}

impl From<Wrong> for Error {
    fn from(wrong: Wrong) -> Self {
        Error::Setting(wrong.to_string())
    }
}

impl Error {
    pub(crate) fn os(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Error::Os { what, source }
    }
}

/// A Terminate's layer, error type and code in words: what [`Wc::vendor_err`](crate::Wc::vendor_err) and the `reason` of an
/// [`AsyncEvent`](crate::AsyncEvent) say. 0 is a connection that was cut.
///
/// ```
/// # use weft_rnic::TerminateCode;
/// assert_eq!(TerminateCode(0x1101).to_string(), "DDP tagged: base or bounds violation");
/// assert_eq!(TerminateCode(0).to_string(), "the connection was lost");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TerminateCode(pub u32);

impl TerminateCode {
    pub(crate) fn error(self) -> TermError {
        let TerminateCode(code) = self;
        TermError::from_parts((code >> 12) as u8, (code >> 8 & 15) as u8, code as u8)
    }
}

impl fmt::Display for TerminateCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("the connection was lost"),
            _ => write!(f, "{}", self.error()),
        }
    }
}

impl fmt::Debug for TerminateCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({self})", self.0)
    }
}

/// The queue had no room for a completion once; it is of no more use (like a hardware queue that was overrun).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the completion queue was overrun: it was created with too few entries for the work that was posted"
)]
pub struct CqOverrun;
