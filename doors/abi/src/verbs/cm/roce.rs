//! Connections of queue pairs that speak RoCE: the messages of InfiniBand's connection manager, by `core/rnic`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_verbs::cm::{ConnParam, gid_of};
use weft_verbs::ext::DeviceExt;
use weft_verbs::{RoceConnect, RoceEvent};

use super::connect::Begin;
use super::device::Nic;
use super::exchange::Remote;
use super::id::{Core, Stage};
use super::link::Link;
use super::news::News;
use super::patience::{FIRST_PAUSE, LONGEST_PAUSE};
use super::port::Port;
use super::private_data::{IB_REJECT, delivered};
use super::request::{Request, Unseen};
use super::roce_link::{RoceLink, RoceListener, addresses, not_listening, scope};
use super::roce_name::RoceName;
use super::stages::Ending;
use super::terms::Retries;
use super::types::{
    RDMA_CM_EVENT_CONNECT_ERROR, RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_RESPONSE,
    RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_UNREACHABLE,
};
use crate::verbs::object::lock;
use crate::verbs::roce;

/// Nobody listens (12.6.7.2).
const IB_INVALID_SERVICE: u16 = 8;

/// A request under way, which is repeated where nobody listened yet, as [`Begin`] says.
#[derive(Clone)]
struct RoceCalling {
    core: Arc<Core>,
    nic: Nic,
    link: RoceLink,
    param: RoceConnect,
    src: SocketAddr,
    dst: SocketAddr,
    until: Instant,
    pause: Duration,
}

impl RoceCalling {
    fn dial(self) -> Result<(), Errno> {
        let end = self.link.end()?;
        let port = roce::port(&self.nic.native, self.src.ip(), scope(self.src))?;
        let to = (self.dst, scope(self.dst));
        let (conn, from, param) = (
            Arc::clone(&self.link.conn),
            self.src.port(),
            self.param.clone(),
        );
        // Held until the connection is in its place: an end in another thread waits for it, and finds it.
        let mut place = lock(&conn);
        if self.core.is_gone() {
            return Err(Errno::INVAL);
        }
        let on_event = move |event| self.hear(event);
        let dialled = port.dial(end, to, from, &param, on_event);
        *place = Some(Arc::new(dialled.map_err(crate::verbs::errno)?));
        Ok(())
    }

    fn hear(&self, event: RoceEvent) {
        let unseen = matches!(
            event,
            RoceEvent::Rejected {
                reason: IB_INVALID_SERVICE,
                ..
            }
        );
        if !unseen || Instant::now() >= self.until || !self.core.is_joining() {
            return self.core.on_roce(&self.link, event);
        }
        let mut again = self.clone();
        again.pause = (self.pause * 2).min(LONGEST_PAUSE);
        self.nic.native.after(self.pause, move || {
            let (core, link) = (Arc::clone(&again.core), again.link.clone());
            if core.is_joining() && again.dial().is_err() {
                core.on_roce(&link, event);
            }
        });
    }
}

fn narrow(depth: u16) -> u8 {
    u8::try_from(depth).unwrap_or(u8::MAX)
}

fn wish(param: &ConnParam, retries: Retries) -> RoceConnect {
    RoceConnect {
        private_data: param.private_data.clone(),
        ird: narrow(param.ird),
        ord: narrow(param.ord),
        retry_count: retries.count,
        rnr_retry: retries.rnr,
    }
}

impl Core {
    pub(super) fn connect_roce(
        self: &Arc<Self>,
        nic: &Nic,
        link: &RoceLink,
        param: &ConnParam,
        begin: &Begin,
    ) -> Result<(), Errno> {
        // Before anything has changed.
        link.end()?;
        let (src, dst, retries) = {
            let mut setup = self.setup();
            let (true, Some(Port::Stream(_)), Some(src), Some(dst)) =
                (begin.is_at(&setup.stage), &setup.port, setup.src, setup.dst)
            else {
                return Err(Errno::INVAL);
            };
            // The port number stays taken as long as the identifier.
            setup.stage = Stage::Joining;
            setup.dials = Some(link.clone());
            setup.depths = (param.ird, param.ord);
            (src, dst, setup.retries)
        };
        let calling = RoceCalling {
            core: Arc::clone(self),
            nic: nic.clone(),
            link: link.clone(),
            param: wish(param, retries),
            src,
            dst,
            until: begin.until,
            pause: FIRST_PAUSE,
        };
        calling.dial().inspect_err(|_| {
            let mut setup = self.setup();
            if matches!(setup.stage, Stage::Joining) {
                setup.stage = Stage::Routed;
            }
        })
    }

    /// Whether it waits for a connection.
    pub(super) fn is_joining(&self) -> bool {
        matches!(self.setup().stage, Stage::Joining)
    }

    /// Whether the program has destroyed it.
    fn is_gone(&self) -> bool {
        matches!(self.setup().stage, Stage::Gone)
    }

    /// An event of a connection that this side has asked for.
    fn on_roce(self: &Arc<Self>, link: &RoceLink, event: RoceEvent) {
        let (news, private_data) = match event {
            RoceEvent::Established {
                private_data,
                depths,
                rnr_retry,
            } => {
                if !self.joined(Link::Roce(link.clone())) {
                    link.close();
                    return;
                }
                link.show_depths(depths);
                return self.tell(News {
                    private_data,
                    depths: (depths.0.into(), depths.1.into()),
                    retries: Retries {
                        count: 0,
                        rnr: rnr_retry,
                    },
                    ..News::new(RDMA_CM_EVENT_ESTABLISHED)
                });
            }
            RoceEvent::Replied {
                private_data,
                depths,
                terms,
            } => {
                {
                    let mut setup = self.setup();
                    setup.remote = setup.dst.map(|dst| Remote {
                        qp_num: terms.dest_qp,
                        gid: gid_of(dst.ip()),
                    });
                    setup.depths = (depths.0.into(), depths.1.into());
                    setup.terms = Some(terms);
                }
                if !self.joined(Link::Roce(link.clone())) {
                    link.close();
                    return;
                }
                return self.tell(News {
                    private_data,
                    depths: (depths.0.into(), depths.1.into()),
                    retries: Retries {
                        count: 0,
                        rnr: terms.rnr_retry,
                    },
                    qp_num: terms.dest_qp,
                    ..News::new(RDMA_CM_EVENT_CONNECT_RESPONSE)
                });
            }
            RoceEvent::Disconnected => return drop(Ending(Arc::clone(self))),
            RoceEvent::Rejected {
                reason,
                private_data,
            } => {
                let status = News::status(RDMA_CM_EVENT_REJECTED, reason.into());
                (status, delivered(private_data, true, IB_REJECT))
            }
            RoceEvent::TimedOut => {
                let status = -Errno::TIMEDOUT.raw_os_error();
                (News::status(RDMA_CM_EVENT_UNREACHABLE, status), Vec::new())
            }
            RoceEvent::Failed(why) => {
                tracing::warn!(why, "a connection of RoCE");
                let status = -Errno::INVAL.raw_os_error();
                (
                    News::status(RDMA_CM_EVENT_CONNECT_ERROR, status),
                    Vec::new(),
                )
            }
        };
        link.bury();
        if self.failed() {
            self.tell(News {
                private_data,
                ..news
            });
        }
    }

    /// Listens at this address, or at all of this host.
    pub(super) fn listen_roce(
        self: &Arc<Self>,
        nic: &Nic,
        addr: SocketAddr,
        backlog: u32,
    ) -> Result<RoceListener, Errno> {
        let mut listening = Vec::new();
        let mut refused = Errno::ADDRNOTAVAIL;
        for (ip, scope) in addresses(addr)? {
            let port = match roce::port(&nic.native, ip, scope) {
                Ok(port) => port,
                Err(errno) => {
                    refused = errno;
                    continue;
                }
            };
            let (core, nic) = (Arc::downgrade(self), nic.clone());
            let on_request = move |request| {
                if let Some(core) = core.upgrade() {
                    core.incoming_roce(&nic, request);
                }
            };
            let made = port.listen(addr.port(), backlog, on_request);
            listening
                .push(made.map_err(|error| not_listening(error, "tcp", (ip, scope), addr.port()))?);
        }
        if listening.is_empty() {
            return Err(refused);
        }
        Ok(RoceListener {
            _listening: listening,
            _name: RoceName::bind(addr),
        })
    }

    fn incoming_roce(self: &Arc<Self>, nic: &Nic, request: weft_verbs::RoceRequest) {
        let private_data = request.private_data.clone();
        let request = Request::roce(request, nic);
        self.tell(News {
            private_data,
            depths: request.depths(),
            retries: request.retries(),
            qp_num: request.remote().map_or(0, |remote| remote.qp_num),
            request: Some(Unseen::new(request)),
            ..News::new(RDMA_CM_EVENT_CONNECT_REQUEST)
        });
    }

    pub(super) fn accept_roce(
        self: &Arc<Self>,
        link: &RoceLink,
        param: &ConnParam,
        retries: Retries,
    ) -> Result<(), Errno> {
        let end = link.end()?;
        let request = self.request()?;
        let (core, told) = (Arc::clone(self), link.clone());
        let on_event = move |event| {
            if let RoceEvent::Established { depths, .. } = event {
                told.show_depths(depths);
                core.tell(News::new(RDMA_CM_EVENT_ESTABLISHED));
            } else {
                // The peer has gone, whether it has said so or not.
                told.bury();
                drop(Ending(Arc::clone(&core)));
            }
        };
        let accepted = request.accept_roce(end, &wish(param, retries), on_event);
        let conn = accepted.inspect_err(|_| {
            self.failed();
        })?;
        *lock(&link.conn) = Some(Arc::new(conn));
        if !self.joined(Link::Roce(link.clone())) {
            link.close();
            return Err(Errno::INVAL);
        }
        if link
            .qp()
            .is_ok_and(|qp| qp.state() == weft_verbs::QpState::Error)
        {
            // It ended meanwhile, and nobody has heard it.
            drop(Ending(Arc::clone(self)));
        }
        Ok(())
    }
}
