//! Listening sockets.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock};

use rustix::io::Errno;
use weft_sockets::backlog::Backlog;
use weft_sockets::bell::Bell;
use weft_sockets::error::io_errno;
use weft_sockets::lock::lock;
use weft_sockets::wait::Wait;
use weft_verbs::Device;
use weft_verbs::cm::{Bound, ConnParam, Incoming, Listening};

use crate::driver::Conn;
use crate::options::Options;

pub(crate) struct Listener {
    device: Device,
    /// Those that the socket has when a peer comes.
    options: Arc<Mutex<Options>>,
    listening: Mutex<Option<Listening>>,
    addr: OnceLock<SocketAddr>,
    /// Each with the bell that its socket will have.
    backlog: Backlog<(Arc<Conn>, Arc<Bell>)>,
    bell: Arc<Bell>,
}

impl Listener {
    pub(crate) fn new(
        device: &Device,
        bound: Bound,
        backlog: u32,
        options: Arc<Mutex<Options>>,
        bell: Arc<Bell>,
    ) -> Result<Arc<Listener>, Errno> {
        let link = lock(&options).link;
        let listener = Arc::new(Listener {
            device: device.clone(),
            options,
            listening: Mutex::default(),
            addr: OnceLock::new(),
            backlog: Backlog::new(backlog),
            bell,
        });
        let weak = Arc::downgrade(&listener);
        let param = ConnParam {
            options: link,
            ..ConnParam::default()
        };
        let listening = bound
            .listen(backlog.max(1), &param, move |incoming| {
                if let Some(listener) = weak.upgrade() {
                    let make = || listener.make(incoming);
                    listener.backlog.take(&listener.bell, make);
                }
            })
            .map_err(|error| io_errno(&error))?;
        let _ = listener.addr.set(listening.local_addr());
        *lock(&listener.listening) = Some(listening);
        Ok(listener)
    }

    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        self.addr.get().copied()
    }

    fn make(&self, incoming: Incoming) -> Result<(Arc<Conn>, Arc<Bell>), Errno> {
        let bell = Arc::new(Bell::new().map_err(|error| io_errno(&error))?);
        let options = *lock(&self.options);
        let conn = Conn::prepare(&self.device, options, Arc::clone(&bell))?;
        let theirs = incoming.private_data().to_vec();
        let param = ConnParam {
            private_data: conn.greeting().emit().to_vec(),
            options: options.link,
            ..ConnParam::default()
        };
        if let Err(error) = crate::wire::Greeting::parse(&theirs) {
            tracing::debug!(%error, "a peer that is no rsocket");
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

    /// Takes the oldest connection; `wait` says whether to wait for one.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`; `EINVAL` if the socket was closed meanwhile.
    pub(crate) fn accept(&self, wait: Wait) -> Result<(Arc<Conn>, Arc<Bell>), Errno> {
        wait.until(&self.bell, || self.backlog.pop()).flatten()
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.backlog.is_ready()
    }

    pub(crate) fn close(&self) {
        drop(lock(&self.listening).take());
        let ready = self.backlog.close();
        self.bell.ring();
        for (conn, _) in ready {
            conn.close(std::time::Duration::ZERO);
        }
    }
}
