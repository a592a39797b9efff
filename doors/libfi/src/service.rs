//! Endpoints that are found by an address and a port. An endpoint's address has a key that no name leads to, so one that is opened with a port answers there
//! with its address (docs/spec/dgram.md, service ID resolution), and an address without a key is looked up when it is inserted.

use std::ffi::{CStr, c_char};
use std::fmt::Display;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};
use std::sync::mpsc;

use weft_fi::endpoint::Address;
use weft_verbs::Device;
use weft_verbs::cm::{BindOptions, Serving};

/// Requests that wait for an answer; each is answered at once.
const BACKLOG: u32 = 64;

/// The address without a key that a node and a service name; `None` for names that do not exist.
///
/// # Safety
/// Strings or null.
pub(crate) unsafe fn named(node: *const c_char, service: *const c_char) -> Option<SocketAddr> {
    // SAFETY: the caller's promise.
    let text = |name: *const c_char| unsafe { CStr::from_ptr(name) }.to_str().ok();
    let port = if service.is_null() {
        0
    } else {
        text(service)?.parse().ok()?
    };
    if node.is_null() {
        return Some(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)));
    }
    (text(node)?, port).to_socket_addrs().ok()?.next()
}

/// Answers at `at` with this address, until it is dropped.
pub(crate) fn serve(device: &Device, at: SocketAddr, address: Address) -> io::Result<Serving> {
    let port = device.bind_service(at, BindOptions::default())?;
    let bytes = address.to_bytes();
    port.serve(BACKLOG, move |request| {
        // A request that is too short, or a full socket: the peer asks again.
        let _ = request.accept(0, 0, &bytes);
    })
}

/// The address with its key: asks the peer, and waits for its answer, if it has none.
pub(crate) fn resolved(device: &Device, address: Address) -> Option<Address> {
    if address.key != 0 {
        return Some(address);
    }
    let any = match address.addr.ip() {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
    };
    let (tell, told) = mpsc::channel();
    let port = device.bind_service((any, 0).into(), BindOptions::default());
    let asked = port
        .and_then(|port| port.look_up(address.addr, &[], move |answer| drop(tell.send(answer))));
    let not_found = |error: &dyn Display| {
        eprintln!("weft: there is no endpoint at {}: {error}", address.addr);
    };
    let _lookup = asked.inspect_err(|error| not_found(error)).ok()?;
    let found = told
        .recv()
        .ok()?
        .inspect_err(|error| not_found(error))
        .ok()?;
    let found = Address::from_bytes(found.private_data.first_chunk()?)?;
    (found.key != 0).then_some(found)
}
