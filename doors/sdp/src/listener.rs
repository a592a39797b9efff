//! Listening.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use weft_sockets::backlog::Backlog;
use weft_sockets::bell::{Bell, Heard};
use weft_sockets::error::io_errno;
use weft_sockets::wait::Wait;
use weft_verbs::Device;
use weft_verbs::cm::{ConnParam, Incoming, Listening};

use crate::Stream;
use crate::driver::Conn;
use crate::options::Options;
use crate::wire::Hello;

struct Inner {
    device: Device,
    options: Options,
    /// Each with the bell that its stream will have.
    backlog: Backlog<(Arc<Conn>, Arc<Bell>)>,
    bell: Bell,
}

/// A listening socket. Dropping it resets connections that were not accepted.
pub struct Listener {
    inner: Arc<Inner>,
    listening: Option<Listening>,
    addr: SocketAddr,
}

impl Listener {
    /// Listen; port 0: any free one.
    ///
    /// # Errors
    /// As `bind(2)` and `listen(2)`.
    pub fn bind(
        device: &Device,
        addr: SocketAddr,
        backlog: u32,
        options: &Options,
    ) -> Result<Listener, Errno> {
        let inner = Arc::new(Inner {
            device: device.clone(),
            options: options.clamped(),
            backlog: Backlog::new(backlog),
            bell: Bell::new().map_err(|error| io_errno(&error))?,
        });
        let weak = Arc::downgrade(&inner);
        let param = ConnParam {
            options: options.link,
            ..ConnParam::default()
        };
        let listening = device
            .listen(addr, backlog.max(1), &param, move |incoming| {
                if let Some(inner) = weak.upgrade() {
                    inner.backlog.take(&inner.bell, || inner.make(incoming));
                }
            })
            .map_err(|error| io_errno(&error))?;
        Ok(Listener {
            addr: listening.local_addr(),
            inner,
            listening: Some(listening),
        })
    }

    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// The oldest connection; waits up to `timeout` (`None`: for ever; zero: not at all).
    ///
    /// # Errors
    /// `EAGAIN` when the time is up, `EINTR` when a signal's handler ran.
    pub fn accept(&self, timeout: Option<Duration>) -> Result<Stream, Errno> {
        let wait = match timeout {
            Some(Duration::ZERO) => Wait::Not,
            limit => Wait::up_to(limit),
        };
        let (conn, bell) = wait
            .until(&self.inner.bell, || self.inner.backlog.pop())
            .flatten()?;
        Ok(Stream::of(conn, bell))
    }

    /// Whether a connection waits to be accepted.
    pub fn is_ready(&self) -> bool {
        self.inner.backlog.is_ready()
    }

    /// Before a sleep on its descriptor: it is readable once something has changed. To be given back with [`Listener::disarm`].
    pub fn arm(&self) -> Heard {
        self.inner.bell.arm()
    }

    /// After a sleep.
    pub fn disarm(&self, heard: Heard) {
        self.inner.bell.disarm(heard);
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.bell.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        drop(self.listening.take());
        let ready = self.inner.backlog.close();
        for (conn, _) in ready {
            conn.close(Duration::ZERO);
        }
    }
}

impl Inner {
    fn make(&self, incoming: Incoming) -> Result<(Arc<Conn>, Arc<Bell>), Errno> {
        let bell = Arc::new(Bell::new().map_err(|error| io_errno(&error))?);
        let conn = Conn::prepare(&self.device, &self.options, Arc::clone(&bell))?;
        let theirs = incoming.private_data().to_vec();
        let param = ConnParam {
            private_data: conn.hello().emit().to_vec(),
            options: self.options.link,
            ..ConnParam::default()
        };
        if let Err(error) = Hello::parse(&theirs) {
            tracing::debug!(%error, "a peer that speaks no SDP");
            let _ = incoming.reject(&param.private_data);
            return Err(Errno::PROTO);
        }
        incoming.accept(&conn.qp, &param).map_err(|error| {
            tracing::debug!(%error, "a peer went away before it was accepted");
            Errno::CONNABORTED
        })?;
        conn.established(&theirs)?;
        Ok((conn, bell))
    }
}
