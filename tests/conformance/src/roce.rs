//! RoCE as a transport of the bed: ports on loopback addresses of their own, and queue pairs that `rdma_cm`'s messages join.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use weft_verbs::cm::{ConnParam, Listener};
use weft_verbs::{
    ConnCounters, Device, Pd, PostError, Qp, QpInit, QpState, RecvWr, Rnr, RoceConn, RoceConnect,
    RoceEvent, RoceInit, RoceListening, RocePort, RoceQp, RoceRequest, SendWr,
};

use crate::waits::PATIENCE;

/// What tells a device from others: the upper bits of its numbers.
pub(crate) fn slot(device: &Device) -> u32 {
    device.roce_number().expect("a slot") >> 16
}

/// The port of a device: at the address that it has already, of these, or else at one that nothing else has.
pub(crate) fn port(device: &Device, known: &[IpAddr]) -> RocePort {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for ip in known {
        match device.bind_roce(*ip, 0) {
            Ok(port) => return port,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse),
        }
    }
    loop {
        // 127.64.0.0/10 without the addresses that end with 0 and 255. Processes begin far apart.
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let n = std::process::id().wrapping_mul(0x9e37).wrapping_add(n) & 0x3f_ffff;
        let [_, high, middle, low] = (0x40_0000 | n).to_be_bytes();
        match device.bind_roce(
            Ipv4Addr::new(127, high, middle, low.clamp(1, 254)).into(),
            0,
        ) {
            Ok(port) => return port,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse, "{error}"),
        }
    }
}

/// A queue pair of the bed. Scenarios for all transports use its own methods; those that RoCE has not are [`Qp`]'s, and panic there.
pub enum AnyQp {
    /// Of iWARP, in shared memory, or simulated.
    Stream(Qp),
    /// Of RoCE.
    Roce(RoceSide),
}

/// A queue pair of RoCE with its port and, once there is one, its connection.
pub struct RoceSide {
    qp: Arc<RoceQp>,
    port: RocePort,
    rnr: Rnr,
    /// Behind the queue pair: programs destroy it first, and then the connection's identifier.
    conn: Option<Conn>,
}

/// A connection. The peer is told of its end, as `rdma_destroy_id` does it.
struct Conn(RoceConn);

impl Drop for Conn {
    fn drop(&mut self) {
        self.0.forget();
    }
}

impl AnyQp {
    pub(crate) fn roce(pd: &Pd, init: &QpInit, port: RocePort) -> AnyQp {
        let mut of_roce = RoceInit::new(&init.send_cq, &init.recv_cq);
        of_roce.srq.clone_from(&init.srq);
        of_roce.max_send_wr = init.max_send_wr;
        of_roce.max_recv_wr = init.max_recv_wr;
        of_roce.max_sge = init.max_sge;
        of_roce.max_inline = init.max_inline;
        of_roce.sq_sig_all = init.sq_sig_all;
        of_roce.num = init.num;
        AnyQp::Roce(RoceSide {
            qp: Arc::new(pd.create_roce_qp(&of_roce).expect("a QP")),
            port,
            rnr: init.rnr,
            conn: None,
        })
    }

    /// The queue pair of a scenario that RoCE has not.
    pub fn into_stream(self) -> Qp {
        match self {
            AnyQp::Stream(qp) => qp,
            AnyQp::Roce(_) => panic!("this scenario is not one of RoCE"),
        }
    }

    fn roce_side(&mut self) -> &mut RoceSide {
        match self {
            AnyQp::Roce(side) => side,
            AnyQp::Stream(_) => panic!("this scenario is one of RoCE alone"),
        }
    }

    pub fn num(&self) -> u32 {
        match self {
            AnyQp::Stream(qp) => qp.num(),
            AnyQp::Roce(side) => side.qp.num(),
        }
    }
    pub fn state(&self) -> QpState {
        match self {
            AnyQp::Stream(qp) => qp.state(),
            AnyQp::Roce(side) => side.qp.state(),
        }
    }
    pub fn to_error(&self) {
        match self {
            AnyQp::Stream(qp) => qp.to_error(),
            AnyQp::Roce(side) => side.qp.to_error(),
        }
    }
    pub fn disconnect(&self) {
        match self {
            AnyQp::Stream(qp) => qp.disconnect(),
            AnyQp::Roce(side) => side.conn.as_ref().expect("a connection").0.disconnect(),
        }
    }
    pub fn outstanding(&self) -> u32 {
        match self {
            AnyQp::Stream(qp) => qp.outstanding(),
            AnyQp::Roce(side) => side.qp.outstanding(),
        }
    }
    /// Packets of RoCE count as FPDUs.
    pub fn counters(&self) -> ConnCounters {
        match self {
            AnyQp::Stream(qp) => qp.counters(),
            AnyQp::Roce(side) => {
                let counters = side.qp.counters();
                ConnCounters {
                    tx_fpdus: counters.sent,
                    rx_fpdus: counters.received,
                    ..ConnCounters::default()
                }
            }
        }
    }
    /// # Errors
    /// As [`Qp::post_send`].
    pub fn post_send(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        match self {
            AnyQp::Stream(qp) => qp.post_send(wrs),
            AnyQp::Roce(side) => side.qp.post_sends(wrs),
        }
    }
    /// # Errors
    /// As [`Qp::post_send_one`].
    pub fn post_send_one(&self, wr: SendWr) -> Result<(), PostError> {
        match self {
            AnyQp::Stream(qp) => qp.post_send_one(wr),
            AnyQp::Roce(side) => side.qp.post_send(wr),
        }
    }
    /// # Errors
    /// As [`Qp::post_recv`].
    pub fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        match self {
            AnyQp::Stream(qp) => qp.post_recv(wrs),
            AnyQp::Roce(side) => side.qp.post_recv(wrs),
        }
    }
}

impl Deref for AnyQp {
    type Target = Qp;
    fn deref(&self) -> &Qp {
        match self {
            AnyQp::Stream(qp) => qp,
            AnyQp::Roce(_) => panic!("this scenario is not one of RoCE"),
        }
    }
}

/// A listener of the bed.
pub enum AnyListener {
    /// Of iWARP, in shared memory, or simulated.
    Stream(Listener),
    /// Of RoCE.
    Roce(Door),
}

impl Deref for AnyListener {
    type Target = Listener;
    fn deref(&self) -> &Listener {
        match self {
            AnyListener::Stream(listener) => listener,
            AnyListener::Roce(_) => panic!("this scenario is not one of RoCE"),
        }
    }
}

/// A listener of RoCE.
pub struct Door {
    addr: SocketAddr,
    requests: Mutex<Receiver<RoceRequest>>,
    _listening: RoceListening,
}

fn terms(param: &ConnParam, rnr: Rnr) -> RoceConnect {
    let depth = |depth: u16| u8::try_from(depth).expect("at most 255 Reads");
    RoceConnect {
        private_data: param.private_data.clone(),
        ird: depth(param.ird),
        ord: depth(param.ord),
        retry_count: 7,
        rnr_retry: match rnr {
            Rnr::Terminate => 0,
            Rnr::Wait => 7,
        },
    }
}

/// The peer's private data, once the connection is made.
fn established(events: &Receiver<RoceEvent>) -> Vec<u8> {
    match events.recv_timeout(PATIENCE).expect("an event in time") {
        RoceEvent::Established { private_data, .. } => private_data,
        other => panic!("{other:?}"),
    }
}

impl Door {
    pub(crate) fn new(port: &RocePort, backlog: u32) -> Door {
        static NUMBER: AtomicU16 = AtomicU16::new(1024);
        let (asked, requests) = channel();
        let asked = Mutex::new(asked);
        loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let asked = asked.lock().unwrap().clone();
            let asked = move |request| drop(asked.send(request));
            if let Ok(listening) = port.listen(number, backlog, asked) {
                return Door {
                    addr: SocketAddr::new(port.local_addr().ip(), number),
                    requests: Mutex::new(requests),
                    _listening: listening,
                };
            }
        }
    }

    /// Connects `there`, which asks, to `here`. Returns the private data that each has got.
    pub(crate) fn join(
        &self,
        there: &mut AnyQp,
        here: &mut AnyQp,
        (asks, answers): (&ConnParam, &ConnParam),
    ) -> (Vec<u8>, Vec<u8>) {
        // One pair at a time: a request does not say whose it is.
        let requests = self.requests.lock().unwrap();
        let (far, near) = (there.roce_side(), here.roce_side());
        let (tell, told) = (channel(), channel());
        let conn = far.port.dial(
            &far.qp,
            (self.addr, 0),
            40_000,
            &terms(asks, far.rnr),
            move |event| drop(tell.0.send(event)),
        );
        far.conn = Some(Conn(conn.expect("dial")));
        let mut request = requests.recv_timeout(PATIENCE).expect("a request");
        let asked = request.private_data.clone();
        request.seen();
        let conn = request.accept(&near.qp, &terms(answers, near.rnr), move |event| {
            drop(told.0.send(event));
        });
        near.conn = Some(Conn(conn.expect("accept")));
        let answered = established(&tell.1);
        established(&told.1);
        (answered, asked)
    }
}
