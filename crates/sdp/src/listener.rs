//! Listening. A peer's connection is made as soon as it arrives, up to the backlog, as a kernel does it for TCP; accepting only hands it over.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::io::Errno;
use weft_sockets::bell::{Bell, Heard};
use weft_sockets::error::io_errno;
use weft_sockets::lock::lock;
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
    backlog: usize,
    state: Mutex<Waiting>,
    bell: Bell,
}

#[derive(Default)]
struct Waiting {
    /// Connections that nobody has accepted yet, each with the bell that its stream will have.
    ready: VecDeque<(Arc<Conn>, Arc<Bell>)>,
    /// Connections being made.
    making: usize,
    closed: bool,
}

/// A listening socket. Dropping it resets connections that nobody has accepted.
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
            backlog: backlog.max(1) as usize,
            state: Mutex::default(),
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
                    inner.take(incoming);
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
        let (conn, bell) = wait.until(&self.inner.bell, || {
            lock(&self.inner.state).ready.pop_front()
        })?;
        Ok(Stream::of(conn, bell))
    }

    /// Whether a connection waits.
    pub fn is_ready(&self) -> bool {
        !lock(&self.inner.state).ready.is_empty()
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
        let ready = {
            let mut state = lock(&self.inner.state);
            state.closed = true;
            std::mem::take(&mut state.ready)
        };
        for (conn, _) in ready {
            conn.close(Duration::ZERO);
        }
    }
}

impl Inner {
    fn take(&self, incoming: Incoming) {
        {
            let mut state = lock(&self.state);
            if state.closed || state.ready.len() + state.making >= self.backlog {
                // Dropping a request rejects it.
                return;
            }
            state.making += 1;
        }
        let made = self.make(incoming);
        let mut state = lock(&self.state);
        state.making -= 1;
        match made {
            Ok(made) if !state.closed => state.ready.push_back(made),
            Ok(_) => return,
            Err(error) => return tracing::debug!(%error, "a connection could not be accepted"),
        }
        drop(state);
        self.bell.ring();
    }

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
        incoming.accept(conn.qp(), &param).map_err(|error| {
            tracing::debug!(%error, "a peer went away before it was accepted");
            Errno::CONNABORTED
        })?;
        conn.established(&theirs)?;
        Ok((conn, bell))
    }
}
