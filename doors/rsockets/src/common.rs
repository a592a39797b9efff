//! State that stream and datagram sockets share: the device, the bell for waiting threads, and the options.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::io::Errno;
use weft_sockets::bell::Bell;
use weft_sockets::error::io_errno;
use weft_sockets::lock::lock;
use weft_sockets::wait::{Wait, Waits};
use weft_verbs::Device;

use crate::options::Options;

/// The state of every socket of both types.
pub struct Common {
    pub(crate) device: Device,
    ipv6: bool,
    pub(crate) bell: Arc<Bell>,
    pub(crate) options: Arc<Mutex<Options>>,
    waits: Waits,
}

impl Common {
    pub(crate) fn new(device: &Device, ipv6: bool) -> Result<Common, Errno> {
        let bell = Bell::new().map_err(|error| io_errno(&error))?;
        Ok(Common::with(device, ipv6, Arc::new(bell)))
    }

    pub(crate) fn with(device: &Device, ipv6: bool, bell: Arc<Bell>) -> Common {
        Common {
            device: device.clone(),
            ipv6,
            bell,
            options: Arc::default(),
            waits: Waits::default(),
        }
    }

    /// A descriptor of the socket's own. It says nothing to `poll(2)`; see [`crate::poll`].
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Whether it is an IPv6 socket.
    pub fn is_ipv6(&self) -> bool {
        self.ipv6
    }

    /// Sets whether calls return `EAGAIN` instead of waiting.
    pub fn set_nonblocking(&self, on: bool) {
        self.waits.nonblocking.store(on, Ordering::Relaxed);
    }

    /// Sets the time limit of sends and of connecting, after which they return `EAGAIN`, or what was sent, and `EINPROGRESS`. `None`, the
    /// default: no limit.
    pub fn set_send_timeout(&self, limit: Option<Duration>) {
        self.waits.send.set(limit);
    }

    /// See [`Common::set_send_timeout`].
    pub fn send_timeout(&self) -> Option<Duration> {
        self.waits.send.get()
    }

    /// Sets the time limit of receives and of accepting, after which they return `EAGAIN`, or what was received. `None`, the default: no limit.
    /// Accepted sockets have both limits of their listener.
    pub fn set_recv_timeout(&self, limit: Option<Duration>) {
        self.waits.recv.set(limit);
    }

    /// See [`Common::set_recv_timeout`].
    pub fn recv_timeout(&self) -> Option<Duration> {
        self.waits.recv.get()
    }

    pub(crate) fn send_wait(&self, dont_wait: bool) -> Wait {
        self.waits.send_wait(dont_wait)
    }

    pub(crate) fn recv_wait(&self, dont_wait: bool) -> Wait {
        self.waits.recv_wait(dont_wait)
    }

    /// Changes sizes. Buffers that a socket has already keep their size.
    pub fn set_options(&self, change: impl FnOnce(&mut Options)) {
        let mut options = lock(&self.options);
        change(&mut options);
        *options = options.clamped();
    }

    pub(crate) fn check_family(&self, addr: SocketAddr) -> Result<(), Errno> {
        if addr.is_ipv6() == self.ipv6 {
            Ok(())
        } else {
            Err(Errno::AFNOSUPPORT)
        }
    }

    pub(crate) fn any_addr(&self) -> SocketAddr {
        if self.ipv6 {
            (Ipv6Addr::UNSPECIFIED, 0).into()
        } else {
            (Ipv4Addr::UNSPECIFIED, 0).into()
        }
    }
}
