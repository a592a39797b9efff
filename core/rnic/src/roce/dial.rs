//! Connections that this side asks for, and the hold of a program on a connection. [`cm`](super::cm) has the exchange.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use weft_proto::roce::cm::{Exchange, Phase};
use weft_wire::roce::cm::{IpHeader, PortSpace, Req, service_id};
use weft_wire::roce::{DEFAULT_PKEY, MASK_24};

use super::cm::{ROCE_REQUEST_DATA, RoceConn, manager};
use super::connections::{Connection, Todo, gid_of};
use super::terms::{RoceConnect, RoceEnd, RoceEvent};
use super::{RocePort, peer_addr};
use crate::types::Error;

/// How long the peer's adapter waits for an acknowledgement of ours, a power: 0.54 s, as Linux asks for. It may not wait longer with each try, as we do.
const PEER_ACK_TIMEOUT: u8 = 17;
/// How long the answer to a message of the manager is waited for, a power: 1.07 s.
const CM_TIMEOUT: u8 = 18;
const CM_RETRIES: u8 = 7;

impl RocePort {
    /// Asks the listener at this address and port number for a connection of this queue pair. One of ours sends and receives when `on_event` tells that the
    /// connection is made. For one that the program moves itself, [`RoceEvent::Replied`] tells what it needs, and the connection is made when the program says
    /// so by [`RoceConn::establish`]. `from` is the port number that the peer sees. `on_event` is called on any thread, and must not block.
    ///
    /// # Errors
    /// [`Error::Invalid`] for too much private data, and where no path MTU of InfiniBand fits the way.
    pub fn dial(
        &self,
        end: impl Into<RoceEnd>,
        (peer, scope): (SocketAddr, u32),
        from: u16,
        param: &RoceConnect,
        on_event: impl Fn(RoceEvent) + Send + Sync + 'static,
    ) -> Result<RoceConn, Error> {
        let end = end.into();
        let port = self.inner();
        if param.private_data.len() > ROCE_REQUEST_DATA {
            return Err(Error::Invalid("too much private data for a request"));
        }
        let (src, dst) = (port.local_addr().ip(), peer.ip().to_canonical());
        let to = peer_addr(dst, scope);
        let mtu = port.mtu_to(to).ok_or(Error::Invalid(
            "the way to the peer takes no path MTU of InfiniBand",
        ))?;
        let header = IpHeader {
            port: from,
            src,
            dst,
        };
        let mut private_data = header.emit().to_vec();
        private_data.extend_from_slice(&param.private_data);
        private_data.resize(IpHeader::LEN + ROCE_REQUEST_DATA, 0);
        let psn = port.device.random_u32() & MASK_24;
        let mut manager = manager(port);
        let id = manager.new_id(port).ok_or(Error::Invalid(
            "the port has as many connections as it may have",
        ))?;
        let req = Req {
            local_id: id,
            service_id: service_id(PortSpace::Tcp, peer.port()),
            ca_guid: port.guid(),
            qp: end.num(),
            responder_resources: param.ird,
            initiator_depth: param.ord,
            remote_timeout: CM_TIMEOUT,
            local_timeout: CM_TIMEOUT,
            service: u8::from(end.is_unreliable()),
            psn,
            retry_count: param.retry_count & 7,
            rnr_retry: param.rnr_retry & 7,
            pkey: DEFAULT_PKEY,
            mtu: mtu_code(mtu),
            max_cm_retries: CM_RETRIES,
            srq: false,
            local_gid: gid_of(src),
            remote_gid: gid_of(dst),
            ack_timeout: PEER_ACK_TIMEOUT,
            private_data: &private_data,
        };
        let exchange = Exchange::request(port.now(), port.transaction(), &req);
        let connection = Connection {
            moves_itself: end.moves_itself(),
            qp: end.weak(),
            psn,
            param: param.clone(),
            tell: Some(Arc::new(on_event)),
            ..Connection::new(exchange, to, mtu)
        };
        let mut todo = Todo::default();
        manager.connections.insert(id, connection);
        port.settle(&mut manager, id, &mut todo);
        drop(manager);
        port.carry_out(todo);
        let port = self.clone();
        Ok(RoceConn { port, id })
    }
}

impl RoceConn {
    /// Ends the connection: the queue pair is in the error state from now on, and the peer is told. [`RoceEvent::Disconnected`] follows when it
    /// has confirmed that, or does not answer; at once where the connection was not made yet.
    pub fn disconnect(&self) {
        self.end(false);
    }

    /// Gives up: nothing is told any more. A connection in the making is not made; one that is made is ended.
    pub fn forget(&self) {
        self.end(true);
    }

    /// The program's queue pair, which it moves itself, is ready: the connection is made, and the peer is told. No event follows.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless [`RoceEvent::Replied`] was told and the connection stands.
    pub fn establish(&self) -> Result<(), Error> {
        let port = self.port.inner();
        let mut todo = Todo::default();
        {
            let mut manager = manager(port);
            let connection = manager.connections.get_mut(&self.id);
            let connection = connection.filter(|c| c.exchange.phase() == Phase::Replied);
            let connection = connection.ok_or(Error::Invalid("the peer has not accepted"))?;
            connection.exchange.ready(&[]);
            port.settle(&mut manager, self.id, &mut todo);
        }
        port.carry_out(todo);
        Ok(())
    }

    /// The peer has sent on the queue pair, which the program moves itself: the peer has our answer. [`RoceEvent::Established`] follows if it was not told yet.
    pub fn heard(&self) {
        self.port.inner().note_heard(self.id);
    }

    fn end(&self, silently: bool) {
        let port = self.port.inner();
        let mut todo = Todo::default();
        let mut gone = None;
        {
            let mut manager = manager(port);
            let Some(connection) = manager.connections.get_mut(&self.id) else {
                return;
            };
            if silently {
                gone = connection.tell.take();
            }
            todo.end.push(Weak::clone(&connection.qp));
            let (now, transaction) = (port.now(), port.transaction());
            match connection.exchange.phase() {
                Phase::ReqSent | Phase::Replied => {
                    connection.exchange.abandon();
                    let tell = connection.tell.take();
                    let told = tell.map(|tell| (tell, RoceEvent::Disconnected));
                    todo.tell.extend(told);
                }
                _ => {
                    let remote_qp = connection.remote_qp;
                    connection.exchange.disconnect(now, transaction, remote_qp);
                }
            }
            port.settle(&mut manager, self.id, &mut todo);
        }
        drop(gone);
        port.carry_out(todo);
    }
}

fn mtu_code(mtu: u32) -> u8 {
    mtu.ilog2() as u8 - 7
}
