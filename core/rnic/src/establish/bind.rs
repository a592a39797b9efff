//! Binding of addresses, and listening on them.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use weft_sys::Interest;
use weft_sys::tcp::{self, BindOptions};

use super::ConnParam;
use super::dial::{Dialed, Way};
use super::greet::{Incoming, Reception};
use super::listener::{Listener, Socket};
use super::shm_listener::{ShmListener, ShmSockets};
use crate::device::{Device, Transport};
use crate::engine::{Registration, Source};
use crate::lock::lock;
use crate::qp::Qp;
use crate::transport::sim::SimPort;

/// A listening address. Dropping it stops listening; connections made through it live on.
pub struct Listening {
    listener: Arc<Listener>,
    /// The Unix sockets for initiators of this host.
    shm_listeners: Vec<Arc<ShmListener>>,
    /// Nobody else can take their name.
    _silent: Option<OwnedFd>,
}

impl Device {
    /// Listens on `addr` (port 0: any free one). The engine's thread calls `on_request` with each complete request; it must not block. With
    /// `backlog` requests unanswered, further peers are refused. Of `param`, the options and depths are used.
    ///
    /// # Errors
    /// As `bind(2)` and `listen(2)`.
    pub fn listen(
        &self,
        addr: SocketAddr,
        backlog: u32,
        param: &ConnParam,
        on_request: impl Fn(Incoming) + Send + Sync + 'static,
    ) -> io::Result<Listening> {
        self.bind(addr)?.listen(backlog, param, on_request)
    }

    /// Binds an address (port 0: any free one), to listen on it or dial from it later.
    ///
    /// # Errors
    /// As `bind(2)`. A port that another program has bound in this way is refused only in [`Bound::listen`].
    pub fn bind(&self, addr: SocketAddr) -> io::Result<Bound> {
        self.bind_with(addr, BindOptions::default())
    }

    /// As [`Device::bind`], with options for sharing the address. (A simulated network ignores them.)
    ///
    /// # Errors
    /// As `bind(2)`.
    pub fn bind_with(&self, addr: SocketAddr, options: BindOptions) -> io::Result<Bound> {
        let (port, addr) = match &self.0.transport {
            Transport::Tcp => {
                let fd = tcp::bind(addr, options)?;
                let addr = tcp::local_addr(&fd)?;
                (Port::Tcp(fd), addr)
            }
            Transport::Sim(net) => {
                let port = net.bind(addr)?;
                let addr = port.addr();
                (Port::Sim(port), addr)
            }
        };
        Ok(Bound {
            device: self.clone(),
            port,
            shm: Mutex::default(),
            addr,
        })
    }
}

enum Port {
    Tcp(OwnedFd),
    Sim(SimPort),
}

/// An address that is taken, see [`Device::bind`]. Dropping it gives it back.
pub struct Bound {
    device: Device,
    port: Port,
    /// For peers that are admitted.
    shm: Mutex<Option<ShmSockets>>,
    addr: SocketAddr,
}

impl Bound {
    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Makes peers wait that connect before [`Bound::listen`], which has to follow, instead of refusing them: programs announce their port as soon as they
    /// have it. (A simulated network refuses them.)
    ///
    /// # Errors
    /// As `listen(2)`.
    pub fn admit(&self) -> io::Result<()> {
        match &self.port {
            Port::Tcp(fd) => {
                let open = || ShmSockets::open(&self.device.0, self.addr);
                lock(&self.shm).get_or_insert_with(open);
                tcp::listen_bound(fd, 8)
            }
            Port::Sim(_) => Ok(()),
        }
    }

    /// Takes the name by which [`listening_user`](crate::ext::listening_user) finds a listener at this address, before [`Bound::listen`]. With
    /// [`LocalMode::Off`](crate::LocalMode) it finds nobody there, and no other process can have the name either.
    ///
    /// # Errors
    /// `AddrInUse` if another process has it.
    pub fn claim_name(&self) -> io::Result<()> {
        *lock(&self.shm) = Some(ShmSockets::claim(&self.device.0, self.addr)?);
        Ok(())
    }

    /// Dial from here, as [`Device::dial`] does.
    pub fn dial(
        self,
        addr: SocketAddr,
        qp: &Qp,
        param: &ConnParam,
        done: impl FnOnce(Dialed) + Send + 'static,
    ) {
        let Bound { device, port, .. } = self;
        let connect = || match port {
            Port::Tcp(fd) => tcp::connect_bound(&fd, addr).map(|()| Way::Tcp(fd)),
            Port::Sim(port) => port.connect(addr).map(Way::Sim),
        };
        device.dial_by(connect, qp, param, Box::new(done));
    }

    /// Listen here, as [`Device::listen`] does.
    ///
    /// # Errors
    /// As `listen(2)`.
    pub fn listen(
        self,
        backlog: u32,
        param: &ConnParam,
        on_request: impl Fn(Incoming) + Send + Sync + 'static,
    ) -> io::Result<Listening> {
        let Bound {
            device,
            port,
            shm,
            addr,
        } = self;
        let Device(device) = device;
        let opened = lock(&shm).take();
        let shm = opened.unwrap_or_else(|| ShmSockets::open(&device, addr));
        let socket = match port {
            Port::Tcp(fd) => {
                tcp::listen_bound(&fd, backlog.clamp(1, 4096))?;
                Socket::Tcp(fd)
            }
            Port::Sim(port) => Socket::Sim(port.listen()?),
        };
        let reception = Reception::new(&device, backlog, param, on_request);
        let listener = Arc::new(Listener {
            reception,
            socket,
            addr,
            registration: Registration::new(&device.engine),
        });
        let source = Arc::clone(&listener) as Arc<dyn Source>;
        listener
            .registration
            .start(source, listener.fd(), Interest::READ)?;
        let (shm_listeners, silent) = shm.watch(&device, &listener);
        Ok(Listening {
            listener,
            shm_listeners,
            _silent: silent,
        })
    }
}

impl Listening {
    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.addr
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        for shm_listener in &self.shm_listeners {
            shm_listener.close();
        }
        self.listener.registration.release(self.listener.fd());
    }
}
