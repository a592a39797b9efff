//! Identifiers for datagrams on RoCE: the messages of InfiniBand's connection manager that find a queue pair, by `core/rnic`.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rustix::io::Errno;
use weft_verbs::cm::{Found, LookupError, ServicePort};
use weft_verbs::{RoceLookup, RoceLookupRequest, RoceServing};

use super::device::Nic;
use super::roce_link::{addresses, scope};
use crate::verbs::roce;

/// Listens until it is dropped: on each address, while the port number stays taken.
pub(super) struct RoceServer {
    _port: ServicePort,
    _serving: Vec<RoceServing>,
}

/// Listens at this address, or at all of this host.
///
/// # Errors
/// As `bind(2)` for port 4791, if no address is left.
pub(super) fn serve(
    nic: &Nic,
    port: ServicePort,
    backlog: u32,
    on_request: impl Fn(RoceLookupRequest) + Send + Sync + 'static,
) -> Result<RoceServer, Errno> {
    let addr = port.local_addr();
    let on_request = Arc::new(on_request);
    let mut serving = Vec::new();
    let mut refused = Errno::ADDRNOTAVAIL;
    for (ip, scope) in addresses(addr)? {
        let on_request = Arc::clone(&on_request);
        let made = roce::port(&nic.native, ip, scope).and_then(|at| {
            let made = at.serve(addr.port(), backlog, move |request| on_request(request));
            made.map_err(|_| Errno::ADDRINUSE)
        });
        match made {
            Ok(one) => serving.push(one),
            Err(errno) => refused = errno,
        }
    }
    if serving.is_empty() {
        return Err(refused);
    }
    Ok(RoceServer {
        _port: port,
        _serving: serving,
    })
}

/// A question under way, from a port number that stays taken.
pub(super) struct RoceInquiry {
    _port: ServicePort,
    _lookup: RoceLookup,
}

/// Asks the listener at `dst` for a queue pair.
///
/// # Errors
/// As `bind(2)` for port 4791 of our address; `EINVAL` for too much private data.
pub(super) fn look_up(
    nic: &Nic,
    port: ServicePort,
    src: IpAddr,
    dst: SocketAddr,
    private_data: &[u8],
    on_answer: impl FnOnce(Result<Found, LookupError>) + Send + 'static,
) -> Result<RoceInquiry, Errno> {
    let from = port.local_addr();
    let at = roce::port(&nic.native, src.to_canonical(), scope(from))?;
    let to = (dst, scope(dst));
    let lookup = at.look_up(to, from.port(), private_data, on_answer);
    Ok(RoceInquiry {
        _port: port,
        _lookup: lookup.map_err(crate::verbs::errno)?,
    })
}
