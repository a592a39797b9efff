//! Which requests for connections a program sees. Any host can send one, with any address as its source: a request costs no memory before it fits what
//! was asked of us and the listener has room for it, and its answer is no longer than the request. Whether the way takes its path MTU is asked of the
//! kernel later, without the lock.

use std::net::SocketAddr;
use std::sync::Arc;

use weft_proto::roce::cm::Exchange;
use weft_wire::roce::cm::{self, IpHeader, PortSpace, Req, reason};
use weft_wire::roce::{DEFAULT_PKEY, MASK_24};

use super::MTUS;
use super::connections::{Asked, Connection, Manager, Todo, gid_of};
use super::port::PortInner;
use crate::device::Counted;

/// How often our answer is repeated at most, whatever the peer asks for.
const MOST_REPEATS: u8 = 3;

/// Refuses a request of which nothing is kept: it is refused again when it comes again.
pub(super) fn refuse(
    from: SocketAddr,
    transaction: u64,
    req: &Req<'_>,
    reason: u16,
    todo: &mut Todo,
) {
    let mut exchange = Exchange::requested(transaction, 0, req);
    exchange.reject(reason, &[]);
    while let Some(raw) = exchange.take() {
        todo.send.push((from, raw));
    }
}

/// The path MTU of a code.
fn mtu_of(code: u8) -> Option<u32> {
    let mtu = 128u32.checked_shl(code.into())?;
    MTUS.contains(&mtu).then_some(mtu)
}

/// Why a request does not fit the address that it came from, the one that it came to, or what queue pairs here can do.
fn misfit(req: &Req<'_>, header: &IpHeader, from: SocketAddr, ours: SocketAddr) -> Option<u16> {
    let (from, ours) = (from.ip(), ours.ip());
    if header.src.to_canonical() != from
        || header.dst.to_canonical() != ours
        || req.local_gid != gid_of(from)
        || req.remote_gid != gid_of(ours)
    {
        return Some(reason::INVALID_GID);
    }
    if req.service > 1 {
        return Some(reason::INVALID_TRANSPORT);
    }
    if mtu_of(req.mtu).is_none() {
        return Some(reason::INVALID_MTU);
    }
    // The numbers below 2 and the last one are not those of connected queue pairs.
    if !(2..MASK_24).contains(&req.qp) || req.pkey & 0x7fff != DEFAULT_PKEY & 0x7fff {
        return Some(reason::UNSUPPORTED);
    }
    None
}

impl PortInner {
    /// A peer asks for a connection.
    pub(super) fn requested(
        &self,
        manager: &mut Manager,
        from: SocketAddr,
        transaction: u64,
        req: &Req<'_>,
        todo: &mut Todo,
    ) {
        let Some((PortSpace::Tcp, number)) = cm::service(req.service_id) else {
            return refuse(from, transaction, req, reason::INVALID_SERVICE, todo);
        };
        let Some(listener) = manager.listeners.get(&number) else {
            // The process that has the listener and this one may not know each other yet.
            if self.is_served(req.service_id) {
                return;
            }
            return refuse(from, transaction, req, reason::INVALID_SERVICE, todo);
        };
        let Some((header, data)) = IpHeader::parse(req.private_data) else {
            return refuse(from, transaction, req, reason::UNSUPPORTED, todo);
        };
        let ours = SocketAddr::new(self.local_addr().ip(), number);
        if let Some(reason) = misfit(req, &header, from, ours) {
            return refuse(from, transaction, req, reason, todo);
        }
        // Without room it comes again.
        let (what, limit) = ("requests that wait for the program", "backlog");
        let unseen = Counted::take(&listener.unseen, listener.backlog, what, limit);
        let (Ok(unseen), Some(pending)) = (unseen, self.device.take_pending()) else {
            return;
        };
        let mtu = mtu_of(req.mtu).unwrap_or(MTUS[0]);
        let on_request = Arc::clone(&listener.on_request);
        let (Some(port), Some(id)) = (self.owner(), manager.new_asked_id(self)) else {
            return;
        };
        let req = Req {
            max_cm_retries: req.max_cm_retries.min(MOST_REPEATS),
            ..*req
        };
        let exchange = Exchange::requested(transaction, id, &req);
        manager.add_asked(id, req.local_id, Connection::new(exchange, from, mtu));
        let mut peer = from;
        peer.set_port(header.port);
        let request = Asked {
            port,
            id,
            unseen,
            pending,
            addrs: (peer, ours),
            private_data: data.to_vec(),
            depths: (req.responder_resources, req.initiator_depth),
            retries: (req.retry_count & 7, req.rnr_retry & 7),
            unreliable: req.service == 1,
            dest_qp: req.qp,
            psn: req.psn,
            mtu,
        };
        todo.asked = Some((on_request, request));
    }
}
