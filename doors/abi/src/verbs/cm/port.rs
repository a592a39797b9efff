//! Reserved addresses of identifiers.

use std::net::SocketAddr;

use rustix::io::Errno;
use weft_verbs::cm::{BindOptions, Bound, ServicePort};

use super::device::{self, datagrams};
use super::types::rdma_port_space;
use crate::verbs::os_errno;
use crate::verbs::wire::{self, Wire};

/// A reserved address.
pub(super) enum Port {
    Stream(Bound),
    Datagram(ServicePort),
}

impl Port {
    /// Reserves an address (port 0: a free one).
    pub(super) fn take(
        ps: rdma_port_space,
        addr: SocketAddr,
        options: BindOptions,
    ) -> Result<Port, Errno> {
        let device = device::of(ps)?;
        let native = &device.native;
        let taken = if datagrams(ps) {
            native.bind_service(addr, options).map(Port::Datagram)
        } else {
            let bound = native.bind_with(addr, options);
            bound.and_then(|bound| {
                // A server's port: qperf reports the port to its client, and listens afterwards.
                // One of RoCE alone has no peers by TCP.
                let hears = wire::asked() != Wire::Roce || !device.persona;
                if hears && addr.ip().is_unspecified() && addr.port() == 0 {
                    bound.admit()?;
                }
                Ok(Port::Stream(bound))
            })
        };
        taken.map_err(|e| os_errno(&e))
    }

    pub(super) fn local_addr(&self) -> SocketAddr {
        match self {
            Port::Stream(bound) => bound.local_addr(),
            Port::Datagram(service) => service.local_addr(),
        }
    }
}
