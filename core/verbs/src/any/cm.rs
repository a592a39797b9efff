//! The connection manager on any device, see [`crate::cm`].

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use weft_nic::cm::{Incoming, Outgoing, Param};

use super::device::{Device, Rnic};
use super::pd::Pd;
use super::qp::{Qp, QpInit};
use super::{Either, convert};
use crate::Error;
use crate::cm::{BindError, ConnParam, ConnectError};
use crate::tls::TlsInfo;

/// A connected queue pair, and the private data of the peer's program.
pub struct Connection {
    /// The queue pair; dropping it closes the connection.
    pub qp: Qp,
    /// The peer's private data. They can be followed by zero bytes.
    pub private_data: Vec<u8>,
}

/// Nothing is sent unprotected that should have been protected.
fn refuse_tls(param: &ConnParam, rnic: &Rnic) -> Result<(), ConnectError> {
    let by_env = || crate::settings::TLS.is("on").unwrap_or(true);
    if param.tls.is_some() || by_env() {
        return Err(ConnectError::Invalid(format!(
            "the RNIC {} cannot carry TLS: use the soft RNIC (WEFT_DEVICE=soft), or no TLS",
            rnic.context.name()
        )));
    }
    Ok(())
}

fn of_rnic<'a>(param: &'a ConnParam, rnic: &Rnic) -> Param<'a> {
    let reads = param.ord.max(param.ird).clamp(1, rnic.reads.into());
    Param {
        private_data: &param.private_data,
        reads: reads as u8,
    }
}

const TWO_DEVICES: &str = "the queue pair is not of the connection's device";

/// A connection on its way out. Its queue pair is made for it.
pub struct Dial {
    peer: SocketAddr,
    by: Either<crate::Device, (Rnic, Outgoing)>,
}

impl Dial {
    /// To this address. On an RNIC it finds the route, within this time.
    ///
    /// # Errors
    /// On an RNIC: no route, or one through another device.
    pub fn new(
        device: &Device,
        peer: SocketAddr,
        patience: Duration,
    ) -> Result<Self, ConnectError> {
        let by = match &device.0 {
            Either::Soft(device) => Either::Soft(device.clone()),
            Either::Rnic(rnic) => {
                let outgoing = Outgoing::resolve(rnic.local, peer, patience)
                    .map_err(|e| convert::connect_error(&e))?;
                Either::Rnic((rnic.clone(), outgoing))
            }
        };
        Ok(Self { peer, by })
    }

    /// The queue pair for it. Receives should be posted before it is connected.
    ///
    /// # Errors
    /// As [`crate::Pd::create_qp`]; on an RNIC as `rdma_create_qp`; objects of another device.
    pub fn create_qp(&self, pd: &Pd, init: &QpInit) -> Result<Qp, Error> {
        match (&self.by, &pd.0) {
            (Either::Soft(_), Either::Soft(pd)) => init.soft(pd),
            (Either::Rnic((rnic, outgoing)), Either::Rnic(pd)) => {
                init.rnic(&rnic.limits, |init| outgoing.create_qp(pd, init))
            }
            _ => Err(Error::Invalid(TWO_DEVICES)),
        }
    }

    /// Connects it; blocks until the peer has answered or the time-out of the options is over.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(self, qp: Qp, param: &ConnParam) -> Result<Connection, ConnectError> {
        let private_data = self.connect_with(&qp, param)?;
        Ok(Connection { qp, private_data })
    }

    /// As [`Dial::connect`], for an owner that keeps the queue pair; returns the peer's private data.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect_with(self, qp: &Qp, param: &ConnParam) -> Result<Vec<u8>, ConnectError> {
        match (self.by, &qp.0) {
            (Either::Soft(device), Either::Soft(soft)) => {
                device.dial_and_wait(self.peer, None, &soft.qp, param)
            }
            (Either::Rnic((rnic, outgoing)), Either::Rnic(hard)) => {
                refuse_tls(param, &rnic)?;
                let connection = outgoing.connect(&of_rnic(param, &rnic), param.options.timeout);
                let connection = connection.map_err(|e| convert::connect_error(&e))?;
                let private_data = connection.private_data().to_vec();
                hard.connected(connection);
                Ok(private_data)
            }
            _ => Err(ConnectError::Invalid(TWO_DEVICES.into())),
        }
    }
}

/// As [`crate::cm::Listener`].
pub struct Listener(Either<(crate::Device, crate::cm::Listener), Hard>);

struct Hard {
    rnic: Rnic,
    listener: weft_nic::cm::Listener,
    addr: SocketAddr,
}

impl Listener {
    /// As [`crate::cm::Listener::bind`]. On an RNIC `librdmacm` limits the requests that wait.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(
        device: &Device,
        addr: SocketAddr,
        backlog: u32,
        param: &ConnParam,
    ) -> Result<Self, BindError> {
        Ok(Self(match &device.0 {
            Either::Soft(device) => {
                let listener = crate::cm::Listener::bind(device, addr, backlog, param)?;
                Either::Soft((device.clone(), listener))
            }
            Either::Rnic(rnic) => {
                let refused = |text| BindError {
                    addr,
                    source: std::io::Error::other(text),
                };
                refuse_tls(param, rnic).map_err(|e| refused(e.to_string()))?;
                let listener =
                    weft_nic::cm::Listener::bind(addr).map_err(|e| refused(convert::text(&e)))?;
                Either::Rnic(Hard {
                    addr: SocketAddr::new(addr.ip(), listener.port()),
                    rnic: rnic.clone(),
                    listener,
                })
            }
        }))
    }

    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        match &self.0 {
            Either::Soft((_, listener)) => listener.local_addr(),
            Either::Rnic(hard) => hard.addr,
        }
    }

    /// The next request; waits up to `timeout` (`None`: for ever). `None` when the time is up.
    ///
    /// # Errors
    /// Of an RNIC: no request can come any more, because the device was removed or `rdma_cm` has failed.
    pub fn next_request(&self, timeout: Option<Duration>) -> Result<Option<Request>, Error> {
        Ok(match &self.0 {
            Either::Soft((device, listener)) => listener
                .next_request(timeout)
                .map(|request| Request(Either::Soft((device.clone(), request)))),
            Either::Rnic(hard) => hard
                .next_request(timeout)
                .map_err(|e| convert::error(&e))?
                .map(|request| Request(Either::Rnic(request))),
        })
    }
}

impl Hard {
    fn next_request(
        &self,
        timeout: Option<Duration>,
    ) -> Result<Option<(Rnic, Incoming)>, weft_nic::Error> {
        let end = timeout.and_then(|time| Instant::now().checked_add(time));
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            match self.listener.request(left) {
                Ok(None) => return Ok(None),
                // Another device's, where it listens on all; dropping it rejects it.
                Ok(Some(incoming)) => match incoming.context() {
                    Ok(context) if context.name() == self.rnic.context.name() => {
                        let mut rnic = self.rnic.clone();
                        if rnic.context.is_gone() {
                            // It was removed, and has come back with another context.
                            rnic.context = context;
                        }
                        return Ok(Some((rnic, incoming)));
                    }
                    _ => {}
                },
                Err(error) if error.is_of_a_request() => {
                    tracing::warn!(%error, "a connection request was lost");
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Either::Soft((_, listener)) => listener.as_fd(),
            Either::Rnic(hard) => hard.listener.as_fd(),
        }
    }
}

/// As [`crate::cm::Request`].
pub struct Request(Either<(crate::Device, crate::cm::Request), (Rnic, Incoming)>);

impl Request {
    /// The device that it came through.
    pub fn device(&self) -> Device {
        Device(match &self.0 {
            Either::Soft((device, _)) => Either::Soft(device.clone()),
            Either::Rnic((rnic, _)) => Either::Rnic(rnic.clone()),
        })
    }

    /// The request at the soft RNIC.
    pub fn soft(&self) -> Option<&crate::cm::Request> {
        self.0.soft().map(|(_, request)| request)
    }

    /// The private data of the initiator's program. They can be followed by zero bytes.
    pub fn private_data(&self) -> &[u8] {
        match &self.0 {
            Either::Soft((_, request)) => request.private_data(),
            Either::Rnic((_, incoming)) => incoming.private_data(),
        }
    }

    /// As [`crate::cm::Request::tls`]; `None` on an RNIC.
    pub fn tls(&self) -> Option<TlsInfo> {
        self.soft()?.tls()
    }

    /// The initiator's address.
    pub fn peer_addr(&self) -> SocketAddr {
        match &self.0 {
            Either::Soft((_, request)) => request.peer_addr(),
            Either::Rnic((_, incoming)) => incoming.peer_addr().unwrap_or(UNKNOWN),
        }
    }

    /// As [`crate::Pd::create_qp`], for this connection.
    ///
    /// # Errors
    /// As there; on an RNIC as `rdma_create_qp`; objects of another device.
    pub fn create_qp(&self, pd: &Pd, init: &QpInit) -> Result<Qp, Error> {
        match (&self.0, &pd.0) {
            (Either::Soft(_), Either::Soft(pd)) => init.soft(pd),
            (Either::Rnic((rnic, incoming)), Either::Rnic(pd)) => {
                init.rnic(&rnic.limits, |init| incoming.create_qp(pd, init))
            }
            _ => Err(Error::Invalid(TWO_DEVICES)),
        }
    }

    /// As [`crate::cm::Request::accept`]. Neither device waits until the peer knows of it.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn accept(self, qp: Qp, param: &ConnParam) -> Result<Connection, ConnectError> {
        let private_data = self.private_data().to_vec();
        self.accept_with(&qp, param)?;
        Ok(Connection { qp, private_data })
    }

    /// As [`Request::accept`], for an owner that keeps the queue pair.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn accept_with(self, qp: &Qp, param: &ConnParam) -> Result<(), ConnectError> {
        match (self.0, &qp.0) {
            (Either::Soft((_, request)), Either::Soft(soft)) => {
                request.accept_with(&soft.qp, param)
            }
            (Either::Rnic((rnic, incoming)), Either::Rnic(hard)) => {
                refuse_tls(param, &rnic)?;
                let connection = incoming.accept(&of_rnic(param, &rnic));
                hard.connected(connection.map_err(|e| convert::connect_error(&e))?);
                Ok(())
            }
            _ => Err(ConnectError::Invalid(TWO_DEVICES.into())),
        }
    }

    /// Reject it, with private data for the initiator's program.
    ///
    /// # Errors
    /// [`ConnectError::Invalid`] for private data that is too long; on an RNIC as `rdma_reject`.
    pub fn reject(self, private_data: &[u8]) -> Result<(), ConnectError> {
        match self.0 {
            Either::Soft((_, request)) => request.reject(private_data),
            Either::Rnic((_, incoming)) => {
                let rejected = incoming.reject(private_data);
                rejected.map_err(|e| convert::connect_error(&e))
            }
        }
    }
}

/// Only where `rdma_cm` has no address.
const UNKNOWN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0);
