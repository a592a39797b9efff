//! Addresses that are taken, and listening on them.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_sys::tcp::{self, BindOptions};
use weft_sys::{Event, Interest};

use super::ConnParam;
use super::dial::{Dialed, Way};
use super::greet::{Accepted, Incoming, Reception};
use super::shm_listener::{self, ShmListener};
use crate::device::{Device, Transport};
use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::lock;
use crate::qp::Qp;
use crate::transport::sim::{SimListener, SimPort};
use crate::transport::tcp::TcpLink;
use crate::types::LocalMode;

enum Socket {
    Tcp(OwnedFd),
    Sim(SimListener),
}

pub(super) struct ListenerInner {
    pub(super) reception: Arc<Reception>,
    socket: Socket,
    pub(super) addr: SocketAddr,
    registration: Registration,
    /// Where initiators of this host say hello.
    shm_listeners: Mutex<Vec<Arc<ShmListener>>>,
}

/// A listening address. Dropping it stops listening; connections made through it live on.
pub struct Listening(Arc<ListenerInner>);

impl Device {
    /// Listen on `addr` (port 0: any free one). Each complete request is given to `on_request`, from the engine's
    /// thread: it must not block. With `backlog` requests unanswered, further peers are turned away. Of `param`, the
    /// options and depths are used.
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

    /// Take an address (port 0: any free one), to listen on it or dial from it later.
    ///
    /// # Errors
    /// As `bind(2)`. A port that somebody else has taken in this way is refused no sooner than in [`Bound::listen`].
    pub fn bind(&self, addr: SocketAddr) -> io::Result<Bound> {
        self.bind_with(addr, BindOptions::default())
    }

    /// As [`Device::bind`], with a say in who else may use the address. (A simulated network knows no options.)
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
    addr: SocketAddr,
}

impl Bound {
    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Has peers wait that come before [`Bound::listen`], which is to follow, in place of turning them away: programs tell others their port as soon as they
    /// have it. (A simulated network turns them away.)
    ///
    /// # Errors
    /// As `listen(2)`.
    pub fn admit(&self) -> io::Result<()> {
        match &self.port {
            Port::Tcp(fd) => tcp::listen_bound(fd, 8),
            Port::Sim(_) => Ok(()),
        }
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
        let Bound { device, port, addr } = self;
        let Device(device) = device;
        let socket = match port {
            Port::Tcp(fd) => {
                tcp::listen_bound(&fd, backlog.clamp(1, 4096))?;
                Socket::Tcp(fd)
            }
            Port::Sim(port) => Socket::Sim(port.listen()?),
        };
        let reception = Reception::new(&device, backlog, param, on_request);
        let inner = Arc::new(ListenerInner {
            reception,
            socket,
            addr,
            registration: Registration::new(&device.engine),
            shm_listeners: Mutex::default(),
        });
        let source = Arc::clone(&inner) as Arc<dyn Source>;
        inner
            .registration
            .start(source, inner.fd(), Interest::READ)?;
        if device.local != LocalMode::Off {
            *lock(&inner.shm_listeners) = shm_listener::open(&device, &inner);
        }
        Ok(Listening(inner))
    }
}

impl Listening {
    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.addr
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        for shm_listener in lock(&self.0.shm_listeners).drain(..) {
            shm_listener.close();
        }
        self.0.registration.release(self.0.fd());
    }
}

impl ListenerInner {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match &self.socket {
            Socket::Tcp(fd) => fd.as_fd(),
            Socket::Sim(listener) => listener.fd(),
        }
    }

    fn accept_one(&self) -> io::Result<Option<Accepted>> {
        match &self.socket {
            Socket::Tcp(fd) => loop {
                let Some((socket, _)) = tcp::accept(fd)? else {
                    return Ok(None);
                };
                // A peer that is gone already is no reason to stop.
                if let Ok(link) = TcpLink::new(socket) {
                    return Ok(Some(Accepted::Tcp(link)));
                }
            },
            Socket::Sim(listener) => Ok(listener.accept().map(Accepted::Sim)),
        }
    }
}

impl ListenerInner {
    /// Take in who waits: a bounded number at a time, established connections want their turn too.
    pub(super) fn accept_some(&self, engine: &Arc<Engine>) -> io::Result<()> {
        for _ in 0..64 {
            match self.accept_one()? {
                Some(link) => self.reception.admit(engine, link),
                None => break,
            }
        }
        Ok(())
    }
}

impl Source for ListenerInner {
    fn ready(self: Arc<Self>, engine: &Arc<Engine>, _event: Event) -> Next {
        if let Err(error) = self.accept_some(engine) {
            let what = "accepting a connection failed";
            self.reception.warn(what, None, Some(&error));
            // No descriptors left, most likely: try again later, not in a busy loop.
            let later = Instant::now() + Duration::from_millis(50);
            self.registration.set_timer(later);
            return Next::Done;
        }
        self.registration.arm(self.fd(), Interest::READ);
        Next::Soon
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        self.registration.arm(self.fd(), Interest::READ);
    }
}
