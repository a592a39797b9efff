//! Making connections: the TCP (or simulated) connection and the MPA start-up on it, without a thread of its own.
//!
//! ```text
//!  initiator:  dial ─ connecting ─ request sent ─ reply ──────────────> attach(qp)
//!  responder:  listen ─ accepted ─ request complete ─ Incoming ─ accept ─> attach(qp), reply goes out first
//! ```
//!
//! Start-up has a time limit on both sides, start-up frames have a maximum length, and accepted connections that have not completed it
//! count against [`Limits::max_pending`](crate::Limits::max_pending). So silent and flooding peers cost little, and only for a limited
//! time.

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_mem::{RecvList, SendList};
use weft_proto::mpa::{Config, MAX_FRAME, Revision, RtrSet, StartError};
use weft_tls::{Tls, TlsError};

use crate::device::DeviceInner;
use crate::qp::Qp;
use crate::transport::ByteStream;
use crate::types::{LinkOptions, QpState};

mod bind;
mod dial;
mod greet;
mod listener;
mod shm_listener;

pub use bind::{Bound, Listening};
pub use dial::Dialed;
pub use greet::Incoming;

/// The first byte of a TLS alert (RFC 8446 5.1): the answer of a peer that accepts only TLS to a start-up frame.
const TLS_ALERT: u8 = 21;
/// The first byte of a TLS handshake.
const TLS_HANDSHAKE: u8 = 22;

/// Bytes that may follow a start-up frame before the queue pair takes over.
const EARLY: usize = 64 * 1024;

/// Why a connection did not come about. `{:?}` prints the text too, for programs that end with an error of `main`.
///
/// ```
/// # use weft_rnic::ConnectError;
/// let error: Box<dyn std::error::Error> = ConnectError::Refused.into();
/// assert_eq!(format!("{error:?}"), "ConnectError(connection refused: nothing listens on that address and port)");
/// ```
#[derive(thiserror::Error)]
pub enum ConnectError {
    /// Nothing listens there.
    #[error("connection refused: nothing listens on that address and port")]
    Refused,
    /// The peer's program rejected the connection.
    #[error("the peer rejected the connection")]
    Rejected {
        /// Its private data.
        private_data: Vec<u8>,
    },
    /// No answer in time.
    #[error("no answer in time")]
    TimedOut,
    /// No way there.
    #[error("the address cannot be reached")]
    Unreachable,
    /// The peer does not speak MPA, or breaks the protocol.
    #[error("the peer does not speak iWARP (MPA) on that port: {0}")]
    Protocol(String),
    /// The peer closed the connection during start-up.
    #[error("the peer closed the connection during start-up")]
    Closed,
    /// The peer's system reset the connection before the peer answered. A listener that closes does this to the connections in its queue, whose requests
    /// its program never sees.
    #[error("the peer reset the connection before it answered")]
    Reset,
    /// Private data too long, or a queue pair that cannot be connected.
    #[error("{0}")]
    Invalid(String),
    /// The device takes only connections in shared memory ([`LocalMode::Require`](crate::LocalMode)).
    #[error(
        "no shared memory with the peer, and nothing else is allowed (WEFT_LOCAL=require): {0}"
    )]
    NotLocal(String),
    /// TLS failed: one side does not support it, rejects the other's key, or the stream was modified.
    #[error("{0}")]
    Tls(TlsError),
    /// The operating system refused.
    #[error(transparent)]
    Io(io::Error),
}

impl fmt::Debug for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectError({self})")
    }
}

impl ConnectError {
    /// The error number of the system that says the same, as `connect(2)` has it.
    pub fn raw_os_error(&self) -> i32 {
        let errno = match self {
            ConnectError::Refused | ConnectError::Rejected { .. } => Errno::CONNREFUSED,
            ConnectError::TimedOut => Errno::TIMEDOUT,
            ConnectError::Unreachable => Errno::HOSTUNREACH,
            ConnectError::NotLocal(_) => Errno::NETUNREACH,
            ConnectError::Tls(TlsError::KeyRefused(_) | TlsError::KeyRefusedByPeer) => {
                Errno::ACCESS
            }
            ConnectError::Protocol(_) | ConnectError::Tls(_) => Errno::PROTO,
            ConnectError::Closed | ConnectError::Reset => Errno::CONNRESET,
            ConnectError::Invalid(_) => Errno::INVAL,
            ConnectError::Io(error) => {
                return error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
            }
        };
        errno.raw_os_error()
    }
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind as K;
        if let Some(error) = error.get_ref().and_then(|e| e.downcast_ref::<TlsError>()) {
            return error.clone().into();
        }
        match error.kind() {
            K::ConnectionRefused => ConnectError::Refused,
            K::TimedOut => ConnectError::TimedOut,
            K::HostUnreachable | K::NetworkUnreachable => ConnectError::Unreachable,
            K::ConnectionReset | K::BrokenPipe | K::NotConnected | K::ConnectionAborted => {
                ConnectError::Closed
            }
            _ => ConnectError::Io(error),
        }
    }
}

impl ConnectError {
    /// An error of the connection on which the peer has sent nothing.
    fn unanswered(error: io::Error) -> Self {
        match error.into() {
            ConnectError::Closed => ConnectError::Reset,
            error => error,
        }
    }
}

impl From<TlsError> for ConnectError {
    fn from(error: TlsError) -> Self {
        match error {
            TlsError::Truncated => ConnectError::Closed,
            error => ConnectError::Tls(error),
        }
    }
}

impl From<StartError> for ConnectError {
    fn from(error: StartError) -> Self {
        ConnectError::Protocol(error.to_string())
    }
}

/// The parameters of one side of a connection.
#[derive(Clone, Debug)]
pub struct ConnParam {
    /// Private data for the peer's program in the request or the reply: at most 508 bytes (512 with revision 1).
    pub private_data: Vec<u8>,
    /// Reads and atomics of the peer that we take at once.
    pub ird: u16,
    /// Reads and atomics that we have outstanding at once, at most.
    pub ord: u16,
    /// Settings of the wire protocol.
    pub options: LinkOptions,
    /// Make the connection by TLS, and take no other. CRC and markers are off then: the tags of TLS do the CRC's work. Default: what
    /// [`DeviceBuilder::tls`](crate::DeviceBuilder::tls) says.
    pub tls: Option<Tls>,
}

impl Default for ConnParam {
    fn default() -> Self {
        ConnParam {
            private_data: Vec::new(),
            ird: 16,
            ord: 16,
            options: LinkOptions::default(),
            tls: None,
        }
    }
}

impl ConnParam {
    fn tls_on<'a>(&'a self, device: &'a DeviceInner) -> Option<&'a Tls> {
        self.tls.as_ref().or(device.tls.as_ref())
    }

    fn config(&self, device: &DeviceInner) -> Config {
        let options = &self.options;
        let plain = self.tls_on(device).is_none();
        Config {
            crc: options.crc && plain,
            recv_markers: options.recv_markers && plain,
            revision: if options.revision == 1 {
                Revision::One
            } else {
                Revision::Two
            },
            ird: self.ird.min(device.limits.max_rd_atomic),
            ord: self.ord.min(device.limits.max_rd_atomic),
            peer_to_peer: options.peer_to_peer.then_some(RtrSet {
                send: false,
                write: true,
                read: true,
            }),
        }
    }
}

/// A queue pair is connected once, and never after it has ended.
fn check_connectable(qp: &Qp) -> Result<(), ConnectError> {
    let why = match qp.state() {
        QpState::Init => return Ok(()),
        QpState::Rts | QpState::Closing => "the queue pair is connected already",
        QpState::Error => "the queue pair is in the Error state: only a new one can be connected",
    };
    Err(ConnectError::Invalid(why.into()))
}

/// When a time limit ends; a limit beyond the clock is a day.
fn deadline(limit: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(limit)
        .unwrap_or_else(|| now + Duration::from_hours(24))
}

fn send_all(link: &dyn ByteStream, bytes: &[u8]) -> io::Result<()> {
    let mut list = SendList::new();
    list.push_bytes(bytes);
    if link.send(&list)? == bytes.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// Reads available bytes, up to the longest start-up frame and a little more. `Ok(true)`: the stream has ended.
fn read_some(link: &dyn ByteStream, buf: &mut Vec<u8>) -> io::Result<bool> {
    while buf.len() < EARLY {
        let have = buf.len();
        buf.resize((have + 2048).min(EARLY), 0);
        let mut list = RecvList::new();
        list.push_buf(&mut buf[have..]);
        let outcome = link.recv(&mut list);
        drop(list);
        let n = outcome.as_ref().map_or(0, |received| received.n);
        buf.truncate(have + n);
        match outcome {
            Ok(_) if n == 0 => return Ok(true),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            // The bytes before the reset may decide.
            Err(_) if have > 0 => return Ok(true),
            Err(error) => return Err(error),
        }
        // Enough to decide.
        if buf.len() >= MAX_FRAME {
            break;
        }
    }
    Ok(false)
}
