//! Multicast groups that a datagram queue pair is a member of and sends to itself: its own messages are recognised by number, port and
//! address.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Mutex;

use weft_wire::dgram::GROUP_QP;

use super::UdInner;
use crate::lock::lock;

/// The address at which the queue pair has last heard itself: asking the system again and again takes time.
#[derive(Default)]
pub(super) struct Echo(Mutex<Option<SocketAddr>>);

impl Echo {
    /// Whether the address is of this host: another host may have a queue pair of the same number, behind the same port.
    fn is_here(&self, addr: SocketAddr) -> bool {
        let mut known = lock(&self.0);
        if *known == Some(addr) {
            return true;
        }
        let mut any = addr;
        any.set_port(0);
        let here = UdpSocket::bind(any).is_ok();
        if here {
            *known = Some(addr);
        }
        here
    }
}

impl UdInner {
    /// Whether a datagram is the queue pair's own, received through a group, and the queue pair does not want those.
    pub(super) fn is_echo(&self, dst_qp: u32, src_qp: u32, from: SocketAddr) -> bool {
        let Some(echo) = &self.echo else {
            return false;
        };
        dst_qp == GROUP_QP
            && src_qp == self.num
            && from.port() == self.port.number()
            && echo.is_here(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_host_are_told_from_others() {
        let echo = Echo::default();
        // RFC 5737: no host has this address.
        assert!(!echo.is_here("192.0.2.1:4791".parse().unwrap()));
        for _ in 0..2 {
            assert!(echo.is_here("127.0.0.1:4791".parse().unwrap()));
        }
        assert!(!echo.is_here("192.0.2.1:4791".parse().unwrap()));
    }
}
