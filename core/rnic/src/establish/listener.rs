//! Accepts connections at a listening TCP (or simulated) port, and starts their start-up.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_sys::{Event, Interest, tcp};

use super::greet::{Accepted, Reception};
use crate::engine::{Engine, Next, Registration, Source};
use crate::transport::sim::SimListener;
use crate::transport::tcp::TcpLink;

pub(super) enum Socket {
    Tcp(OwnedFd),
    Sim(SimListener),
}

/// A listening port.
pub(super) struct Listener {
    pub(super) reception: Arc<Reception>,
    pub(super) socket: Socket,
    pub(super) addr: SocketAddr,
    pub(super) registration: Registration,
}

impl Listener {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
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
                // A peer that has closed already is no reason to stop.
                if let Ok(link) = TcpLink::new(socket) {
                    return Ok(Some(Accepted::Tcp(link)));
                }
            },
            Socket::Sim(listener) => Ok(listener.accept().map(Accepted::Sim)),
        }
    }

    /// Accepts waiting peers: a bounded number at a time, so that established connections get their turn.
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

impl Source for Listener {
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
