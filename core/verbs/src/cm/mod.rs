//! The connection manager.
//!
//! Two styles over the same machinery: blocking calls for programs that have a thread to spare ([`connect`],
//! [`Listener`]), and events in the manner of `rdma_cm` ([`EventChannel`], [`CmId`]).

mod broker;
mod events;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub use broker::{Broker, FIRST_NUMBER, Number, QpName, gid_of, ip_of};
pub use events::{CmError, CmEvent, CmEventKind, CmId, EventChannel};
use weft_rnic::Signal;
use weft_rnic::ext::lock;
use weft_rnic::tls::TlsInfo;
pub use weft_rnic::{
    BindOptions, Bound, ConnParam, ConnectError, Dialed, Found, Incoming, LinkOptions, Listening,
    Lookup, LookupError, LookupRequest, ServicePort, Serving,
};

use crate::{Device, Pd, Qp, QpInit};

/// A connected queue pair, and the private data of the peer's program.
pub struct Connection {
    /// The queue pair; dropping it closes the connection.
    pub qp: Qp,
    /// The peer's private data. From a kernel peer it can be followed by zero bytes.
    pub private_data: Vec<u8>,
}

/// Make a queue pair and connect it; blocks until the peer has answered or the time-out of the options is over.
///
/// # Errors
/// [`ConnectError`].
pub fn connect(
    addr: SocketAddr,
    pd: &Pd,
    qp: &QpInit,
    param: &ConnParam,
) -> Result<Connection, ConnectError> {
    let qp = pd
        .create_qp(qp)
        .map_err(|e| ConnectError::Invalid(e.to_string()))?;
    connect_qp(addr, qp, &pd.device(), param)
}

/// As [`connect`], with a queue pair that exists (and has receives posted, say).
///
/// # Errors
/// [`ConnectError`].
pub fn connect_qp(
    addr: SocketAddr,
    qp: Qp,
    device: &Device,
    param: &ConnParam,
) -> Result<Connection, ConnectError> {
    let private_data = device.dial_and_wait(addr, None, &qp, param)?;
    Ok(Connection { qp, private_data })
}

/// An address that cannot be listened on. As an `io::Error` it is the system's own one, without the address.
///
/// ```
/// use weft_verbs::{Device, cm};
/// # fn main() -> Result<(), weft_verbs::Error> {
/// let device = Device::open()?;
/// let not_ours = "192.0.2.1:7471".parse().unwrap(); // TEST-NET-1
/// let error = cm::Listener::bind(&device, not_ours, 1, &cm::ConnParam::default()).err().unwrap();
/// assert!(error.to_string().starts_with("cannot listen on 192.0.2.1:7471: "), "{error}");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {addr}: {source}")]
pub struct BindError {
    /// The address.
    pub addr: SocketAddr,
    /// The system's error.
    pub source: std::io::Error,
}

impl BindError {
    /// As the system's error has it.
    pub fn kind(&self) -> std::io::ErrorKind {
        self.source.kind()
    }
}

impl From<BindError> for ConnectError {
    fn from(error: BindError) -> Self {
        error.source.into()
    }
}

impl From<BindError> for std::io::Error {
    fn from(error: BindError) -> Self {
        error.source
    }
}

struct Requests {
    queue: Mutex<VecDeque<Incoming>>,
    signal: Signal,
}

/// Listens for connection requests. Its descriptor is readable while requests wait.
pub struct Listener {
    listening: Listening,
    requests: Arc<Requests>,
}

impl Listener {
    /// Listens on `addr` (port 0: any free one). With `backlog` requests waiting, further peers are refused. Of `param`, the options and
    /// depths are used.
    ///
    /// # Errors
    /// [`BindError`], as `bind(2)` and `listen(2)`.
    pub fn bind(
        device: &Device,
        addr: SocketAddr,
        backlog: u32,
        param: &ConnParam,
    ) -> Result<Listener, BindError> {
        let refused = |source| BindError { addr, source };
        let requests = Arc::new(Requests {
            queue: Mutex::default(),
            signal: Signal::new().map_err(refused)?,
        });
        let sink = Arc::clone(&requests);
        let listening = device.listen(addr, backlog, param, move |incoming| {
            lock(&sink.queue).push_back(incoming);
            sink.signal.raise();
        });
        Ok(Listener {
            listening: listening.map_err(refused)?,
            requests,
        })
    }

    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.listening.local_addr()
    }

    /// The next request; waits up to `timeout` (`None`: for ever). `None` when the time is up.
    pub fn next_request(&self, timeout: Option<Duration>) -> Option<Request> {
        let incoming = wait_pop(&self.requests.queue, &self.requests.signal, timeout)?;
        Some(Request(incoming))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.requests.signal.as_fd()
    }
}

/// Take from a queue whose signal is raised while it has entries.
fn wait_pop<T>(
    queue: &Mutex<VecDeque<T>>,
    signal: &Signal,
    timeout: Option<Duration>,
) -> Option<T> {
    let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
    loop {
        {
            let mut queue = lock(queue);
            let first = queue.pop_front();
            if queue.is_empty() {
                signal.clear();
            }
            if first.is_some() {
                return first;
            }
        }
        let left = match deadline {
            None => None,
            Some(end) => Some(end.checked_duration_since(Instant::now())?),
        };
        signal.wait(left);
    }
}

/// A connection request. Dropping it rejects it.
pub struct Request(Incoming);

impl Request {
    /// The private data of the initiator's program.
    pub fn private_data(&self) -> &[u8] {
        self.0.private_data()
    }
    /// The key that it has proved to have, and the cipher, where the connection was made by TLS.
    pub fn tls(&self) -> Option<TlsInfo> {
        self.0.tls()
    }
    /// The initiator's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.0.peer_addr()
    }
    /// The address that it dialled.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local_addr()
    }
    /// The user whose process dialled, as the kernel attests: `None` if it is not on this host, or not known.
    pub fn peer_uid(&self) -> Option<u32> {
        self.0.peer_uid()
    }
    /// Accept it on a queue pair, which should have its first receives posted by now: the peer may send at once.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn accept(self, qp: Qp, param: &ConnParam) -> Result<Connection, ConnectError> {
        let private_data = self.0.private_data().to_vec();
        self.accept_with(&qp, param)?;
        Ok(Connection { qp, private_data })
    }

    pub(crate) fn accept_with(self, qp: &Qp, param: &ConnParam) -> Result<(), ConnectError> {
        self.0.accept(qp, param)
    }

    /// Reject it, with private data for the initiator's program.
    ///
    /// # Errors
    /// [`ConnectError::Invalid`] for private data that is too long.
    pub fn reject(self, private_data: &[u8]) -> Result<(), ConnectError> {
        self.0.reject(private_data)
    }
}
