//! The environment of a scenario on one device of the machine: connected pairs of queue pairs of that device.

use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;

use weft_verbs::any::{Device, Pd, Qp, QpInit, cm};
use weft_verbs::cm::ConnParam;
use weft_verbs::{AsyncEvent, QpState, RecvWr};

pub use super::checks::{assert_bytes, assert_none, take};
pub use super::objects::{Cq, Mr, Srq};
pub use crate::bed::{ALL, PATIENCE, Rng, Setup, assert_ok, pattern, until};

/// What kind of device it is, as far as its promises differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    Iwarp,
    Roce,
}

/// A device, and an address of it.
pub struct Bed {
    /// What of it the scenarios look at: [`Setup::largest`] and the options.
    pub setup: Setup,
    /// The device, for initiators.
    pub a: Device,
    /// The same, for responders.
    pub b: Device,
    ip: IpAddr,
    wire: Wire,
}

/// The parameters of one side of a connection, as [`crate::bed::Half`].
#[derive(Clone)]
pub struct Half {
    /// See [`QpInit::max_send_wr`].
    pub max_send_wr: u32,
    /// See [`QpInit::max_recv_wr`].
    pub max_recv_wr: u32,
    /// See [`QpInit::max_sge`].
    pub max_sge: u32,
    /// See [`QpInit::max_inline`].
    pub max_inline: u32,
    /// Not on any device.
    pub sq_sig_all: bool,
    /// Entries of each completion queue made for it.
    pub depth: u32,
    /// Use these completion queues (send, receive), not new ones.
    pub cqs: Option<(Cq, Cq)>,
    /// Use this protection domain, not a new one.
    pub pd: Option<Pd>,
    /// Take receives from here.
    pub srq: Option<Srq>,
    /// Depths.
    pub param: ConnParam,
}

impl Default for Half {
    fn default() -> Self {
        Self {
            max_send_wr: 128,
            max_recv_wr: 128,
            max_sge: 8,
            max_inline: 256,
            sq_sig_all: false,
            depth: 1024,
            cqs: None,
            pd: None,
            srq: None,
            param: ConnParam::default(),
        }
    }
}

/// The dial or the request that a queue pair is made for.
enum Way {
    Out(cm::Dial),
    In(cm::Request),
}

impl Bed {
    /// Of this device, which has this address.
    pub fn new(device: &Device, ip: IpAddr, wire: Wire) -> Self {
        Self {
            setup: Setup::tcp(),
            a: device.clone(),
            b: device.clone(),
            ip,
            wire,
        }
    }

    /// See [`crate::bed::Bed::is_roce`].
    pub fn is_roce(&self) -> bool {
        self.wire == Wire::Roce
    }

    /// As much of this immediate data as RNICs take.
    pub fn imm(&self, imm: u64) -> u64 {
        imm & u64::from(u32::MAX)
    }

    /// Elements of a request, at most, in the scenarios.
    pub fn max_sge(&self) -> u32 {
        self.a.attr().limits.max_sge.min(Half::default().max_sge)
    }

    /// A completion queue of the device.
    pub fn cq(&self, depth: u32) -> Cq {
        self.b.create_cq(depth).expect("a CQ")
    }

    /// A listener on the device.
    pub fn listener(&self, backlog: u32) -> cm::Listener {
        let at = SocketAddr::new(self.ip, 0);
        let listener = cm::Listener::bind(&self.b, at, backlog, &ConnParam::default());
        listener.expect("a listener")
    }

    /// A connected pair through this listener.
    pub fn pair_through(&self, listener: &cm::Listener, a: &Half, b: &Half) -> (End, End) {
        std::thread::scope(|scope| {
            let dial = scope.spawn(|| {
                let dial = cm::Dial::new(&self.a, listener.local_addr(), PATIENCE);
                self.end(Way::Out(dial.expect("a route")), a)
            });
            let request = listener.next_request(Some(PATIENCE));
            let request = request.expect("a device").expect("a connection request");
            let here = self.end(Way::In(request), b);
            (dial.join().expect("no panic"), here)
        })
    }

    /// A queue pair with its objects, connected this way.
    fn end(&self, way: Way, half: &Half) -> End {
        assert!(!half.sq_sig_all, "this scenario is not one of any device");
        let pd = half.pd.clone();
        let pd = pd.unwrap_or_else(|| self.a.alloc_pd().expect("a PD"));
        let new = || (self.cq(half.depth), self.cq(half.depth));
        let (scq, rcq) = half.cqs.clone().unwrap_or_else(new);
        let init = QpInit {
            srq: half.srq.clone(),
            max_send_wr: half.max_send_wr,
            max_recv_wr: half.max_recv_wr,
            max_sge: half.max_sge.min(self.max_sge()),
            max_inline: half.max_inline,
            ..QpInit::new(&scq, &rcq)
        };
        let qp = match &way {
            Way::Out(dial) => dial.create_qp(&pd, &init),
            Way::In(request) => request.create_qp(&pd, &init),
        };
        let qp = qp.expect("a QP");
        let connection = match way {
            Way::Out(dial) => dial.connect(qp, &half.param),
            Way::In(request) => request.accept(qp, &half.param),
        };
        let qp = AnyQp(connection.expect("a connection").qp);
        let nothing = pd.alloc_mr(1, ALL).expect("a region");
        End {
            pd,
            scq,
            rcq,
            qp,
            nothing,
        }
    }
}

/// A queue pair of any device.
pub struct AnyQp(Qp);

impl AnyQp {
    /// Whether it is connected: RNICs tell no more without another call.
    pub fn state(&self) -> QpState {
        if self.0.is_connected() {
            QpState::Rts
        } else {
            QpState::Error
        }
    }
}

impl Deref for AnyQp {
    type Target = Qp;
    fn deref(&self) -> &Qp {
        &self.0
    }
}

/// One side of a connection, with all its objects.
pub struct End {
    /// Its protection domain.
    pub pd: Pd,
    /// Completions of its sends.
    pub scq: Cq,
    /// Completions of its receives.
    pub rcq: Cq,
    /// Its queue pair.
    pub qp: AnyQp,
    nothing: Mr,
}

impl End {
    /// A zeroed region with every right that the device gives.
    pub fn mr(&self, len: usize) -> Mr {
        self.pd.alloc_mr(len, ALL).expect("a region")
    }

    /// A region that holds these bytes.
    pub fn mr_of(&self, bytes: &[u8]) -> Mr {
        self.pd.reg_mr(bytes.to_vec(), ALL).expect("a region")
    }

    /// Inline bytes of a request where `_asked` were asked for: drivers give more, too.
    pub fn max_inline(&self, _asked: u32) -> u32 {
        self.qp.max_inline()
    }

    /// The kernel's siw refuses a receive without elements: it gets an empty one.
    pub fn post_recv(&self, wr: RecvWr) {
        let is_bare = wr.sges.is_empty();
        let wr = if is_bare {
            wr.sge(self.nothing.sge(0, 0))
        } else {
            wr
        };
        self.qp.post_recv(&[wr]).expect("post");
    }

    /// The API for any device has no asynchronous events.
    pub fn tells(&self, _is_it: impl FnOnce(&AsyncEvent) -> bool) {}
}
