//! Connections of RoCE v2: everything else is as for the other queue pairs.
//!
//! UDP port 4791 of an address belongs to one process, so each side has a loopback address of its own.

use super::{Spec, Stack};
use crate::error::{BenchError, Result, stack};
use crate::patience::PATIENCE;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use weft_verbs::{
    Device, LocalMode, Pd, PostError, Qp, QpInit, RecvWr, RoceConn, RoceConnect, RoceEvent,
    RoceFault, RoceFaults, RoceInit, RoceListening, RocePort, RoceQp, RoceRequest, SendWr,
};

/// Addresses that are tried.
const TRIES: u32 = 64;

/// A queue pair of one of the two wires.
pub(super) enum Pair {
    Iwarp(Qp),
    Roce(Connected),
}

impl Pair {
    pub(super) fn post_send(&self, wrs: &[SendWr]) -> std::result::Result<(), PostError> {
        match self {
            Pair::Iwarp(qp) => qp.post_send(wrs),
            Pair::Roce(connected) => connected.qp.post_sends(wrs),
        }
    }

    pub(super) fn post_recv(&self, wrs: &[RecvWr]) -> std::result::Result<(), PostError> {
        match self {
            Pair::Iwarp(qp) => qp.post_recv(wrs),
            Pair::Roce(connected) => connected.qp.post_recv(wrs),
        }
    }
}

pub(super) struct Connected {
    qp: Arc<RoceQp>,
    conn: RoceConn,
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.conn.forget();
    }
}

/// The device of a process, and its address.
pub(super) struct Host {
    pub(super) device: Device,
    pub(super) pd: Pd,
    port: RocePort,
}

pub struct Listening {
    addr: SocketAddr,
    requests: Receiver<RoceRequest>,
    _kept: RoceListening,
}

impl Listening {
    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }
}

/// Of the lossy stack, one packet in so many is lost.
const LOSS: u64 = 1000;

struct Loss {
    sent: AtomicU64,
}

impl Default for Loss {
    /// Each side loses others: the zero of the stream is always a loss.
    fn default() -> Loss {
        let sent = AtomicU64::new(u64::from(std::process::id()) << 32 | 1);
        Loss { sent }
    }
}

impl RoceFaults for Loss {
    fn of_packet(&self) -> Option<RoceFault> {
        // A stream of pseudo-random numbers (SplitMix64), so that no period of the traffic meets one of the losses.
        let mut x = self
            .sent
            .fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31))
            .is_multiple_of(LOSS)
            .then_some(RoceFault::Drop)
    }
}

impl Host {
    pub(super) fn open() -> Result<Host> {
        let device = Device::builder().local(LocalMode::Off).open();
        let device = device.map_err(stack("open the device"))?;
        let first = std::process::id();
        let bind = |n: u32| {
            let [.., high, low] = first.wrapping_add(n).to_be_bytes();
            device.bind_roce(Ipv4Addr::new(127, 91, high, low).into(), 0)
        };
        let port = (1..TRIES).map(bind).find(std::result::Result::is_ok);
        let port = port.unwrap_or_else(|| bind(0));
        Ok(Host {
            pd: device.alloc_pd().map_err(stack("allocate a PD"))?,
            port: port.map_err(BenchError::system("bind UDP port 4791"))?,
            device,
        })
    }

    pub(super) fn listen(&self) -> Result<Listening> {
        static NUMBER: AtomicU16 = AtomicU16::new(1024);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let (tell, requests) = channel();
        let listening = self.port.listen(number, 16, move |request| {
            // Without a listener it is refused.
            let _ = tell.send(request);
        });
        Ok(Listening {
            addr: SocketAddr::new(self.port.local_addr().ip(), number),
            requests,
            _kept: listening.map_err(stack("listen"))?,
        })
    }

    fn qp(&self, init: &QpInit, spec: &Spec) -> Result<Arc<RoceQp>> {
        let init = RoceInit {
            max_send_wr: init.max_send_wr,
            max_recv_wr: init.max_recv_wr,
            ..RoceInit::new(&init.send_cq, &init.recv_cq)
        };
        let qp = self.pd.create_roce_qp(&init);
        let qp = qp.map_err(stack("create a queue pair"))?;
        if spec.stack == Stack::WeftRoceLossy {
            qp.set_faults(Arc::<Loss>::default());
        }
        Ok(Arc::new(qp))
    }

    pub(super) fn connect(&self, init: &QpInit, spec: &Spec, to: SocketAddr) -> Result<Connected> {
        let qp = self.qp(init, spec)?;
        let (tell, events) = channel();
        let param = RoceConnect::default();
        let conn = self.port.dial(&qp, (to, 0), 1, &param, move |event| {
            let _ = tell.send(event);
        });
        let conn = conn.map_err(stack("connect"))?;
        established(&events)?;
        Ok(Connected { qp, conn })
    }

    pub(super) fn accept(
        &self,
        init: &QpInit,
        spec: &Spec,
        listening: &Listening,
    ) -> Result<Connected> {
        let qp = self.qp(init, spec)?;
        let request = listening.requests.recv_timeout(PATIENCE);
        let request = request.map_err(|_| BenchError::Stuck(PATIENCE.as_secs(), "a connection"))?;
        let (tell, events) = channel();
        let conn = request.accept(&qp, &RoceConnect::default(), move |event| {
            let _ = tell.send(event);
        });
        let conn = conn.map_err(stack("accept"))?;
        established(&events)?;
        Ok(Connected { qp, conn })
    }
}

fn established(events: &Receiver<RoceEvent>) -> Result<()> {
    match events.recv_timeout(PATIENCE) {
        Ok(RoceEvent::Established { .. }) => Ok(()),
        Ok(other) => Err(BenchError::PeerGone(format!("{other:?}"))),
        Err(_) => Err(BenchError::Stuck(PATIENCE.as_secs(), "a connection")),
    }
}
