//! RoCE v2 as the wire of `weft_ib0` (`WEFT_IB_WIRE=roce` and `auto`): the ports, and of connected queue pairs the part that [`QpObj`](super::qp::QpObj) does not
//! share with others.
//!
//! # Safety
//!
//! One call of the C library, with a function of this module.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use weft_sys::{interfaces, udp};
use weft_verbs::{
    Access, Device, QpInit, QpState, RecvWr, RoceChange, RoceInit, RocePath, RocePort, RoceQp,
    RoceSend, SendWr, roce_mtu,
};

pub(crate) use weft_verbs::ROCE_PORT as PORT;

use super::faults::QpFaults;
use super::gid::{gids, is_link_local};
use super::object::{PerFork, lock};
use super::types::*;
use super::{os_errno, persona, refused};

/// The path MTU that all interfaces of this host take which reach others; of a host that has none, that of the loopback interface.
pub(crate) fn active_mtu() -> ibv_mtu {
    let addresses = interfaces::addresses().unwrap_or_default();
    let least = |of_loopback: bool| {
        let those = addresses.iter().filter(|address| {
            let mapped = address.ip.is_ipv4() || !is_link_local(address.ip);
            address.is_up() && mapped && address.is_loopback() == of_loopback
        });
        those
            .filter_map(|address| roce_mtu(address.mtu()?, address.ip.is_ipv6()))
            .min()
    };
    code(least(false).or_else(|| least(true)).unwrap_or(256))
}

/// The `ibv_mtu` of a path MTU: 256 is 1, and each further one is twice as long.
pub(crate) fn code(mtu: u32) -> ibv_mtu {
    mtu.ilog2() - 7
}

/// The longest path MTU that the way of a route takes: the same for both ends of it.
///
/// # Errors
/// `EINVAL` for a GID index that does not exist, and for an impossible GID of the peer.
pub(crate) fn longest_mtu(route: &ibv_global_route) -> Result<ibv_mtu, Errno> {
    let (own, peer, scope) = persona::way(route)?;
    let to = match peer {
        IpAddr::V4(ip) => SocketAddr::from((ip, PORT)),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, PORT, 0, scope).into(),
    };
    // Without a route there may be one later: Ethernet's.
    let way = udp::path_mtu(own.ip, to).unwrap_or(1500);
    Ok(code(roce_mtu(way, peer.is_ipv6()).unwrap_or(256)))
}

/// The ports of this process.
static PORTS: PerFork<Mutex<Vec<RocePort>>> = PerFork::new();
/// The handler for the end of the process is there. A forked child inherits it.
static TOLD: AtomicBool = AtomicBool::new(false);

/// The kernel's connection manager tells the peers of a process that ends; ours ends with it.
extern "C" fn at_exit() {
    // A panic must not prevent the exit, and there is no caller to report it to.
    let _ = std::panic::catch_unwind(|| {
        // A thread that was in the middle of it does not hold the exit up.
        if let Ok(ports) = PORTS.get().try_lock() {
            ports.iter().for_each(RocePort::say_farewell);
        }
    });
}

/// The port of RoCE of a local address. This process keeps it from its first use on.
///
/// # Errors
/// As `bind(2)`.
pub(crate) fn port(device: &Device, ip: IpAddr, scope: u32) -> Result<RocePort, Errno> {
    bind(device, ip, scope).inspect_err(|errno| refuse(*errno, ip))
}

/// Those of all addresses of this host that this process has, or can have.
///
/// # Errors
/// As `bind(2)`, if there are none.
pub(crate) fn all_ports(device: &Device) -> Result<Vec<RocePort>, Errno> {
    let mut ports = Vec::new();
    let mut refused = None;
    for gid in gids()?.into_iter().filter(|gid| !gid.is_empty()) {
        match bind(device, gid.ip, gid.ifindex) {
            Ok(port) => ports.push(port),
            Err(errno) => refused = refused.or(Some((errno, gid.ip))),
        }
    }
    if ports.is_empty() {
        let (errno, ip) = refused.ok_or(Errno::ADDRNOTAVAIL)?;
        refuse(errno, ip);
        return Err(errno);
    }
    Ok(ports)
}

fn refuse(error: Errno, address: IpAddr) {
    tracing::warn!(
        %error,
        %address,
        "no RoCE on UDP port 4791 of this address: if it is in use, another user's process or the kernel's rxe has it (`ss -ulpn sport = 4791`), or all slots for processes are taken; another GID or network namespace helps"
    );
}

fn bind(device: &Device, ip: IpAddr, scope: u32) -> Result<RocePort, Errno> {
    let port = device.bind_roce(ip, scope);
    let port = port.map_err(|error| os_errno(&error))?;
    // No lock, because a fork may come between any two lines.
    if !TOLD.swap(true, Ordering::AcqRel) {
        // SAFETY: the handler is a function, which stays valid.
        unsafe { libc::atexit(at_exit) };
    }
    let mut ports = lock(PORTS.get());
    if ports
        .iter()
        .all(|known| known.local_addr() != port.local_addr())
    {
        ports.push(port.clone());
    }
    Ok(port)
}

/// Makes a queue pair with a number of its own, by which packets find this process among those of the address.
pub(super) fn numbered<T>(
    device: &Device,
    init: &mut QpInit,
    mut make: impl FnMut(&QpInit) -> Result<T, weft_verbs::Error>,
) -> Result<T, Errno> {
    const NUMBERS: u32 = 1 << 16;
    for _ in 0..NUMBERS {
        let num = device.roce_number().map_err(|error| os_errno(&error))?;
        init.num = Some(num);
        match make(init) {
            // Another queue pair has this number.
            Err(weft_verbs::Error::Invalid(_)) => {}
            made => return made.map_err(super::errno),
        }
    }
    Err(Errno::NOMEM)
}

/// The native queue pair and its parameters.
pub(crate) struct Roce {
    /// `None` when it could not be replaced.
    native: Option<Arc<RoceQp>>,
    pd: weft_verbs::Pd,
    init: RoceInit,
    /// Sends posted while the send queue was drained (SQD).
    resting: Mutex<Vec<SendWr>>,
    faults: Option<Arc<QpFaults>>,
}

impl Roce {
    /// A queue pair in RESET with the number in `init`, and the faults for that.
    ///
    /// # Errors
    /// As creating a queue pair.
    pub(crate) fn new(
        pd: &weft_verbs::Pd,
        init: &QpInit,
        unreliable: bool,
        faults: impl FnOnce(u32) -> Option<Arc<QpFaults>>,
    ) -> Result<Roce, weft_verbs::Error> {
        let init = RoceInit {
            srq: init.srq.clone(),
            unreliable,
            max_send_wr: init.max_send_wr,
            max_recv_wr: init.max_recv_wr,
            max_sge: init.max_sge,
            max_inline: init.max_inline,
            sq_sig_all: init.sq_sig_all,
            num: init.num,
            comp_counters: init.comp_counters.clone(),
            ..RoceInit::new(&init.send_cq, &init.recv_cq)
        };
        let native = pd.create_roce_qp(&init)?;
        let roce = Roce {
            faults: faults(native.num()),
            native: None,
            pd: pd.clone(),
            init,
            resting: Mutex::default(),
        };
        Ok(Roce {
            native: Some(Arc::new(roce.with_faults(native))),
            ..roce
        })
    }

    fn with_faults(&self, native: RoceQp) -> RoceQp {
        if let Some(faults) = &self.faults {
            native.set_faults(Arc::clone(faults) as _);
        }
        native
    }

    /// Its faults from `WEFT_FAULTS`.
    pub(crate) fn faults(&self) -> Option<Arc<QpFaults>> {
        self.faults.clone()
    }

    /// The native queue pair.
    ///
    /// # Errors
    /// `EINVAL` where it could not be [`renewed`](Roce::renew).
    pub(crate) fn native(&self) -> Result<Arc<RoceQp>, Errno> {
        self.native.clone().ok_or(Errno::INVAL)
    }

    pub(crate) fn has_failed(&self) -> bool {
        let native = self.native.as_ref();
        native.is_some_and(|native| native.state() == QpState::Error)
    }

    pub(crate) fn set_access(&self, access: Access) -> Result<(), Errno> {
        self.native()?.set_access(access);
        Ok(())
    }

    /// Changes the timers and limits that `mask` names.
    ///
    /// # Errors
    /// `EINVAL` where it could not be [`renewed`](Roce::renew).
    pub(crate) fn change(&self, attr: &ibv_qp_attr, mask: u32) -> Result<(), Errno> {
        let named = |bit: u32, value: u8| (mask & bit != 0).then_some(value);
        self.native()?.change(&RoceChange {
            rnr_timer: named(IBV_QP_MIN_RNR_TIMER, attr.min_rnr_timer),
            timeout: named(IBV_QP_TIMEOUT, attr.timeout),
            retry_count: named(IBV_QP_RETRY_CNT, attr.retry_cnt),
            rnr_retry: named(IBV_QP_RNR_RETRY, attr.rnr_retry),
            ord: named(IBV_QP_MAX_QP_RD_ATOMIC, attr.max_rd_atomic),
            ird: named(IBV_QP_MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic),
        });
        Ok(())
    }

    /// RTR: takes requests of the peer that `attr` names.
    ///
    /// # Errors
    /// `EINVAL` for a GID index that does not exist, and for an impossible GID or number of the peer; as `bind(2)` for port 4791 of the own address.
    pub(crate) fn rtr(&self, attr: &ibv_qp_attr) -> Result<(), Errno> {
        let (own, peer, scope) = persona::way(&attr.ah_attr.grh)?;
        let native = self.native()?;
        let port = port(&self.pd.device(), own.ip, own.ifindex)?;
        let path = RocePath {
            peer,
            scope,
            dest_qp: attr.dest_qp_num,
            rq_psn: attr.rq_psn,
            mtu: 128 << attr.path_mtu,
            ird: attr.max_dest_rd_atomic,
            rnr_timer: attr.min_rnr_timer,
            traffic_class: attr.ah_attr.grh.traffic_class,
        };
        native.receive_from(&port, &path).map_err(super::errno)
    }

    /// RTS: sends from now on.
    ///
    /// # Errors
    /// `EINVAL` if it has failed.
    pub(crate) fn rts(&self, attr: &ibv_qp_attr) -> Result<(), Errno> {
        let send = RoceSend {
            sq_psn: attr.sq_psn,
            ord: attr.max_rd_atomic,
            timeout: attr.timeout,
            retry_count: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
        };
        self.native()?.send_with(&send).map_err(super::errno)
    }

    /// Ends the native queue pair: it makes no more completions until it is renewed.
    pub(crate) fn end(&mut self) {
        let mut native = self.native.take();
        // The connection manager may be using it, for a moment: its number is free when nobody does.
        while let Some(held) = native {
            native = Arc::try_unwrap(held).err();
            std::thread::yield_now();
        }
        lock(&self.resting).clear();
    }

    /// Replaces the native queue pair by one of the same number.
    ///
    /// # Errors
    /// As creating a queue pair; the call may be repeated.
    pub(crate) fn renew(&mut self) -> Result<(), Errno> {
        let native = self.pd.create_roce_qp(&self.init).map_err(super::errno)?;
        self.native = Some(Arc::new(self.with_faults(native)));
        Ok(())
    }

    /// To the error state: flushes all posted requests. Otherwise as [`Roce::resume`].
    pub(crate) fn fail(&self) -> u32 {
        if let Some(native) = &self.native {
            native.to_error();
        }
        self.resume()
    }

    pub(crate) fn outstanding(&self) -> u32 {
        let below = self.native.as_ref().map_or(0, |qp| qp.outstanding());
        below + lock(&self.resting).len() as u32
    }

    /// Posts one send of a queue pair in this state.
    pub(crate) fn post(&self, state: ibv_qp_state, wr: &SendWr) -> Result<(), Errno> {
        let native = self.native.as_ref().ok_or(Errno::INVAL)?;
        match state {
            IBV_QPS_RTS | IBV_QPS_SQE | IBV_QPS_ERR => {
                native.post_send(wr.clone()).map_err(refused)
            }
            IBV_QPS_SQD => {
                // Later no caller gets the error.
                native.check_send(wr).map_err(refused)?;
                lock(&self.resting).push(wr.clone());
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }

    pub(crate) fn post_recv(&self, wr: &RecvWr) -> Result<(), Errno> {
        let wrs = std::slice::from_ref(wr);
        self.native()?.post_recv(wrs).map_err(refused)
    }

    /// Takes back the receives that are posted, see [`RoceQp::take_receives`].
    pub(crate) fn take_receives(&self) -> Vec<RecvWr> {
        let native = self.native.as_ref();
        native.map_or_else(Vec::new, |native| native.take_receives())
    }

    /// The send queue resumes. Returns the number of requests that were refused all the same: their places are free.
    pub(crate) fn resume(&self) -> u32 {
        let taken = |wr: SendWr| {
            let native = self.native.as_ref();
            native.is_some_and(|native| native.post_send(wr).is_ok())
        };
        let mut resting = lock(&self.resting);
        resting.drain(..).filter(|wr| !taken(wr.clone())).count() as u32
    }
}
