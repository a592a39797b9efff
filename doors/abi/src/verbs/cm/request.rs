//! Requests that wait for an answer.

use std::net::{SocketAddr, SocketAddrV6};

use rustix::io::Errno;
use weft_verbs::cm::{ConnParam, Incoming, LookupRequest, gid_of};
use weft_verbs::{
    Qp, RoceConn, RoceConnect, RoceEnd, RoceEvent, RoceLookupRequest, RoceRequest, RoceTerms,
};

use super::device::Nic;
use super::exchange::Remote;
use super::private_data::IB_REQUEST;
use super::terms::{Retries, Terms};
use crate::verbs::os_errno;

/// The peer that waits for an answer. Dropping it is a refusal.
enum Asker {
    Stream(Incoming),
    Datagram(LookupRequest),
    RoceDatagram(RoceLookupRequest),
    Roce(RoceRequest),
}

/// A request. Dropping it rejects it.
pub(super) struct Request {
    asker: Asker,
    remote: Option<Remote>,
    depths: (u16, u16),
    terms: Option<Terms>,
}

impl Request {
    /// The request, and the private data of the peer's program.
    pub(super) fn new(incoming: Incoming, nic: &Nic) -> (Request, Vec<u8>) {
        let said = incoming.private_data();
        let (remote, data) = match Remote::split(said) {
            Some((remote, data)) if nic.persona => (Some(remote), data),
            _ => (None, said),
        };
        let (terms, data) = Terms::split(data, IB_REQUEST);
        let data = data.to_vec();
        let most = nic.max_rd_atomic();
        // What start-up negotiates counts the Reads that the library itself makes, too.
        let (takes, has) = match terms {
            Some(Terms { depths, .. }) => (depths.0.into(), depths.1.into()),
            None => incoming.depths().unwrap_or((most, most)),
        };
        let request = Request {
            asker: Asker::Stream(incoming),
            remote,
            depths: (has.min(most), takes.min(most)),
            terms,
        };
        (request, data)
    }

    /// A request for a datagram queue pair.
    pub(super) fn datagram(request: LookupRequest) -> Request {
        Request {
            asker: Asker::Datagram(request),
            remote: None,
            depths: (0, 0),
            terms: None,
        }
    }

    /// The same on RoCE.
    pub(super) fn roce_datagram(request: RoceLookupRequest) -> Request {
        Request {
            asker: Asker::RoceDatagram(request),
            remote: None,
            depths: (0, 0),
            terms: None,
        }
    }

    /// A request for a queue pair that speaks RoCE.
    pub(super) fn roce(request: RoceRequest, nic: &Nic) -> Request {
        let most = nic.max_rd_atomic();
        let (takes, has) = (request.depths.0.into(), request.depths.1.into());
        let (count, rnr) = request.retries;
        Request {
            remote: Some(Remote {
                qp_num: request.terms().dest_qp,
                gid: gid_of(request.addrs.0.ip()),
            }),
            depths: (most.min(has), most.min(takes)),
            terms: Some(Terms {
                depths: request.depths,
                retries: Retries { count, rnr },
            }),
            asker: Asker::Roce(request),
        }
    }

    /// Reads and atomics that the peer will have outstanding, and that it accepts: our limits for accepting and for having outstanding.
    pub(super) fn depths(&self) -> (u16, u16) {
        self.depths
    }

    pub(super) fn retries(&self) -> Retries {
        self.terms.map(|terms| terms.retries).unwrap_or_default()
    }

    /// Whether it came by RoCE.
    pub(super) fn is_roce(&self) -> bool {
        matches!(self.asker, Asker::Roce(_))
    }

    /// Whether the peer knows terms, and expects ours.
    pub(super) fn has_terms(&self) -> bool {
        self.terms.is_some()
    }

    /// What a queue pair needs that the program moves itself, if it came by RoCE.
    pub(super) fn roce_terms(&self) -> Option<RoceTerms> {
        match &self.asker {
            Asker::Roce(request) => Some(request.terms()),
            _ => None,
        }
    }

    /// The queue pair of a peer that moves it itself, or that speaks RoCE.
    pub(super) fn remote(&self) -> Option<Remote> {
        self.remote
    }

    /// Our address and the peer's.
    pub(super) fn addrs(&self) -> (SocketAddr, SocketAddr) {
        let (ours, peers) = match &self.asker {
            Asker::Stream(incoming) => (incoming.local_addr(), incoming.peer_addr()),
            Asker::Datagram(request) => (request.local_addr(), request.peer_addr()),
            Asker::Roce(request) => (request.addrs.1, request.addrs.0),
            Asker::RoceDatagram(request) => (request.addrs.1, request.addrs.0),
        };
        (canonical(ours), canonical(peers))
    }

    pub(super) fn accept(self, qp: &Qp, param: &ConnParam) -> Result<(), Errno> {
        match self.asker {
            Asker::Stream(incoming) => incoming
                .accept(qp, param)
                .map_err(|error| Errno::from_raw_os_error(error.raw_os_error())),
            Asker::Datagram(_) | Asker::RoceDatagram(_) | Asker::Roce(_) => Err(Errno::INVAL),
        }
    }

    pub(super) fn accept_roce(
        self,
        end: RoceEnd,
        param: &RoceConnect,
        on_event: impl Fn(RoceEvent) + Send + Sync + 'static,
    ) -> Result<RoceConn, Errno> {
        match self.asker {
            Asker::Roce(request) => {
                let accepted = request.accept(end, param, on_event);
                accepted.map_err(crate::verbs::errno)
            }
            Asker::Stream(_) | Asker::Datagram(_) | Asker::RoceDatagram(_) => Err(Errno::INVAL),
        }
    }

    /// Names the queue pair for datagrams.
    pub(super) fn name(self, qp_num: u32, qkey: u32, private_data: &[u8]) -> Result<(), Errno> {
        match self.asker {
            Asker::Stream(_) | Asker::Roce(_) => Err(Errno::INVAL),
            Asker::Datagram(request) => request
                .accept(qp_num, qkey, private_data)
                .map_err(|error| os_errno(&error)),
            Asker::RoceDatagram(request) => request
                .accept(qp_num, qkey, private_data)
                .map_err(crate::verbs::errno),
        }
    }

    pub(super) fn reject(self, private_data: &[u8]) -> Result<(), Errno> {
        match self.asker {
            Asker::Stream(incoming) => incoming
                .reject(private_data)
                .map_err(|error| Errno::from_raw_os_error(error.raw_os_error())),
            Asker::Datagram(request) => request
                .reject(private_data)
                .map_err(|error| os_errno(&error)),
            Asker::Roce(request) => {
                request.reject(private_data);
                Ok(())
            }
            Asker::RoceDatagram(request) => {
                request.reject(private_data);
                Ok(())
            }
        }
    }
}

/// A request that the program has not fetched. Dropping it turns it away.
pub(super) struct Unseen(Option<Box<Request>>);

impl Unseen {
    pub(super) fn new(request: Request) -> Unseen {
        Unseen(Some(Box::new(request)))
    }

    pub(super) fn fetch(mut self) -> Option<Box<Request>> {
        let mut request = self.0.take();
        if let Some(Asker::Roce(request)) = request.as_deref_mut().map(|request| &mut request.asker)
        {
            request.seen();
        }
        request
    }
}

impl Drop for Unseen {
    fn drop(&mut self) {
        if let Some(request) = self.0.take()
            && let Asker::Stream(incoming) = request.asker
        {
            incoming.turn_away();
        }
    }
}

/// Converts an IPv4 peer of an IPv6 listener to IPv4. A link-local address keeps its scope.
fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => (v4, v6.port()).into(),
            None => SocketAddrV6::new(*v6.ip(), v6.port(), 0, v6.scope_id()).into(),
        },
        v4 @ SocketAddr::V4(_) => v4,
    }
}
