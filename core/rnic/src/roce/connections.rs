//! What the connection manager of a port keeps: listeners, and connections by number, by peer and by time.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Weak};

use weft_proto::dgram::Now;
use weft_proto::roce::cm::{Exchange, Reply};
use weft_wire::roce::cm::{MAD_LEN, Mad, Message};

use super::RoceQp;
use super::port::{PortInner, RocePort};
use super::siblings::Claim;
use super::terms::{RoceConnect, RoceEvent};
use crate::device::Counted;

pub(super) type Tell = Arc<dyn Fn(RoceEvent) + Send + Sync>;
pub(super) type OnRequest = Arc<dyn Fn(Asked) + Send + Sync>;

/// Connections of a port, those included that are over and kept.
const MAX_EXCHANGES: usize = 65_536;
/// Those of them that peers have asked for.
const MAX_ASKED: usize = MAX_EXCHANGES / 4 * 3;

/// The managers' state of a port.
#[derive(Default)]
pub(super) struct Manager {
    pub(super) listeners: HashMap<u16, Listener>,
    pub(super) connections: HashMap<u32, Connection>,
    /// The connections that peers have asked for, by address and the peer's number.
    pub(super) asked: HashMap<(IpAddr, u32), u32>,
    /// All that peers have asked for, those included whose number its peer uses again.
    of_peers: usize,
    /// When their exchanges want to be looked at.
    pub(super) due: BTreeSet<(Now, u32)>,
    /// Those that are over, and until when they are kept; the oldest first.
    pub(super) kept: VecDeque<(Now, u32)>,
}

pub(super) struct Listener {
    /// Of several listeners with this number, one after the other.
    pub(super) serial: usize,
    pub(super) on_request: OnRequest,
    pub(super) backlog: u32,
    /// Requests that the program has not seen.
    pub(super) unseen: Arc<AtomicU32>,
    /// No other process has the port number.
    pub(super) claim: Claim,
}

/// One connection.
pub(super) struct Connection {
    pub(super) exchange: Exchange,
    pub(super) peer: SocketAddr,
    /// None where the program moves its queue pair itself.
    pub(super) qp: Weak<RoceQp>,
    pub(super) moves_itself: bool,
    /// The number of the peer's queue pair, once it is known.
    pub(super) remote_qp: u32,
    /// The first packet sequence number of the peer, and what we asked for.
    pub(super) psn: u32,
    pub(super) param: RoceConnect,
    pub(super) mtu: u32,
    /// What the side that accepts tells when it is ready.
    pub(super) depths: (u8, u8),
    pub(super) rnr_retry: u8,
    pub(super) tell: Option<Tell>,
    /// Its place in [`Manager::asked`].
    pub(super) asked: Option<(IpAddr, u32)>,
    /// Its place in [`Manager::due`].
    pub(super) due: Option<Now>,
    /// It is in [`Manager::kept`].
    pub(super) is_kept: bool,
    /// The peer's word that it is over has come, and was put off.
    pub(super) was_put_off: bool,
}

/// A peer's request that a program is to see.
pub(super) struct Asked {
    pub(super) port: RocePort,
    pub(super) id: u32,
    /// Counts against the listener's backlog, and against the device's limit.
    pub(super) unseen: Counted,
    pub(super) pending: Counted,
    /// The requester and ours.
    pub(super) addrs: (SocketAddr, SocketAddr),
    pub(super) private_data: Vec<u8>,
    pub(super) depths: (u8, u8),
    pub(super) retries: (u8, u8),
    pub(super) unreliable: bool,
    pub(super) dest_qp: u32,
    pub(super) psn: u32,
    pub(super) mtu: u32,
}

/// What follows from a message or from a time, to be done without the lock.
#[derive(Default)]
pub(super) struct Todo {
    pub(super) send: Vec<(SocketAddr, Box<[u8; MAD_LEN]>)>,
    pub(super) tell: Vec<(Tell, RoceEvent)>,
    /// The queue pair is over.
    pub(super) end: Vec<Weak<RoceQp>>,
    /// The peer has replied: move the queue pair, then answer.
    pub(super) join: Option<(u32, Reply)>,
    pub(super) asked: Option<(OnRequest, Asked)>,
}

impl Todo {
    pub(super) fn say(&mut self, to: SocketAddr, transaction: u64, message: Message<'_>) {
        let mad = Mad {
            transaction,
            message,
        };
        self.send.push((to, Box::new(mad.emit())));
    }
}

impl Manager {
    /// A number that no connection has.
    pub(super) fn new_id(&self, port: &PortInner) -> Option<u32> {
        if self.connections.len() >= MAX_EXCHANGES {
            return None;
        }
        std::iter::repeat_with(|| port.random_id())
            .find(|id| *id != 0 && !self.connections.contains_key(id))
    }

    /// A number for a connection that a peer asks for. What peers have asked for leaves room for what this side asks for.
    pub(super) fn new_asked_id(&mut self, port: &PortInner) -> Option<u32> {
        self.make_room()?;
        self.new_id(port)
    }

    /// Forgets the oldest connections that are over, until peers may have another one.
    fn make_room(&mut self) -> Option<()> {
        while self.of_peers >= MAX_ASKED {
            let (_, oldest) = self.kept.pop_front()?;
            self.remove(oldest);
        }
        Some(())
    }

    /// A connection that a peer has asked for.
    pub(super) fn add_asked(&mut self, id: u32, remote_id: u32, connection: Connection) {
        let key = (connection.peer.ip(), remote_id);
        self.asked.insert(key, id);
        let asked = Some(key);
        let connection = Connection {
            asked,
            ..connection
        };
        self.connections.insert(id, connection);
        self.of_peers += 1;
    }

    pub(super) fn remove(&mut self, id: u32) {
        let Some(gone) = self.connections.remove(&id) else {
            return;
        };
        if let Some(due) = gone.due {
            self.due.remove(&(due, id));
        }
        if let Some(key) = gone.asked {
            self.of_peers -= 1;
            if self.asked.get(&key) == Some(&id) {
                self.asked.remove(&key);
            }
        }
    }

    /// The connection that a message of this peer is about.
    pub(super) fn find(&self, from: IpAddr, message: &Message<'_>) -> Option<u32> {
        let (remote, local) = match message {
            Message::Req(req) => return self.asked.get(&(from, req.local_id)).copied(),
            // A peer that gives up its request may not know our number.
            Message::Rej(rej) if rej.remote_id == 0 => (Some(rej.local_id), 0),
            Message::Rej(rej) => (None, rej.remote_id),
            Message::Rep(rep) => (None, rep.remote_id),
            Message::Rtu(rtu) | Message::Drep(rtu) => (None, rtu.remote_id),
            Message::Mra(mra) => (None, mra.remote_id),
            Message::Dreq(dreq) => (None, dreq.remote_id),
            Message::SidrReq(_) | Message::SidrRep(_) => return None,
        };
        if let Some(remote) = remote {
            return self.asked.get(&(from, remote)).copied();
        }
        let of_peer = |c: &&Connection| c.peer.ip() == from;
        self.connections.get(&local).filter(of_peer).map(|_| local)
    }

    /// When the engine is to look.
    pub(super) fn next(&self) -> Option<Now> {
        let due = self.due.first().map(|(at, _)| *at);
        let kept = self.kept.front().map(|(at, _)| *at);
        [due, kept].into_iter().flatten().min()
    }
}

impl Connection {
    pub(super) fn new(exchange: Exchange, peer: SocketAddr, mtu: u32) -> Connection {
        Connection {
            exchange,
            peer,
            qp: Weak::new(),
            remote_qp: 0,
            psn: 0,
            param: RoceConnect::default(),
            mtu,
            depths: (0, 0),
            rnr_retry: 0,
            tell: None,
            asked: None,
            due: None,
            moves_itself: false,
            is_kept: false,
            was_put_off: false,
        }
    }
}

pub(super) fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use weft_wire::roce::cm::{PortSpace, Req, service_id};

    use super::*;

    /// A peer that uses one number again and again takes no more places than others.
    #[test]
    fn a_number_that_is_used_again_counts_each_time() {
        let req = Req {
            local_id: 7,
            service_id: service_id(PortSpace::Tcp, 7),
            ca_guid: 1,
            qp: 0x11,
            responder_resources: 1,
            initiator_depth: 1,
            remote_timeout: 18,
            local_timeout: 18,
            service: 0,
            psn: 0,
            retry_count: 7,
            rnr_retry: 7,
            pkey: 0xffff,
            mtu: 3,
            max_cm_retries: 1,
            srq: false,
            local_gid: [1; 16],
            remote_gid: [2; 16],
            ack_timeout: 14,
            private_data: &[],
        };
        let peer = SocketAddr::from(([127, 0, 0, 9], 4791));
        let mut manager = Manager::default();
        for id in 1..=MAX_ASKED as u32 + 5 {
            manager.make_room().expect("all are over");
            // Over, and the peer begins anew with its number.
            manager.asked.remove(&(peer.ip(), req.local_id));
            let exchange = Exchange::requested(u64::from(id), id, &req);
            manager.add_asked(id, req.local_id, Connection::new(exchange, peer, 1024));
            manager.kept.push_back((Duration::ZERO, id));
        }
        assert_eq!(manager.connections.len(), MAX_ASKED);
        while let Some((_, id)) = manager.kept.pop_front() {
            manager.remove(id);
        }
        assert_eq!((manager.of_peers, manager.asked.len()), (0, 0));
    }
}
