//! The names of listeners of RoCE, for peers of this host (docs/spec/persona.md, "Which wire").

use std::net::{IpAddr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};

use rustix::io::Errno;

use crate::verbs::os_errno;

fn name(host: &str, port: u16) -> Option<UnixAddr> {
    UnixAddr::from_abstract_name(format!("weft/1/roce/{host}/{port}")).ok()
}

fn host(ip: IpAddr) -> String {
    match ip.to_canonical() {
        ip if ip.is_unspecified() => "any".to_owned(),
        ip => ip.to_string(),
    }
}

/// The name of a listener of RoCE, for peers of this host. It goes with the process, too.
pub(super) struct RoceName(#[allow(dead_code)] UnixDatagram); // bound until it is dropped

impl RoceName {
    /// For a listener at this address; `None` where another one has it, which says the same.
    pub(super) fn bind(addr: SocketAddr) -> Option<RoceName> {
        let name = name(&host(addr.ip()), addr.port())?;
        UnixDatagram::bind_addr(&name).ok().map(RoceName)
    }

    /// Whether there is one of this address, or of all.
    ///
    /// # Errors
    /// As `socket(2)`.
    pub(super) fn is_there(addr: SocketAddr) -> Result<bool, Errno> {
        let probe = UnixDatagram::unbound().map_err(|error| os_errno(&error))?;
        let hosts = [host(addr.ip()), "any".to_owned()];
        let names = hosts.iter().filter_map(|host| name(host, addr.port()));
        let mut found = false;
        for name in names {
            found |= probe.connect_addr(&name).is_ok();
        }
        Ok(found)
    }
}
