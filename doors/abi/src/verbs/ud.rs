//! Unreliable datagram queue pairs of the persona: the part that [`QpObj`](super::qp::QpObj) does not share with connected ones.

use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use rustix::io::Errno;
use weft_verbs::{
    PostError, QpInit, RecvWr, RoceUdInit, RoceUdQp, SendWr, UD_MTU, UdDest, UdInit, UdPort, UdQp,
};

use super::limit::{Count, Counted};
use super::object::{PerFork, lock};
use super::types::*;
use super::{refused, roce};

/// The native queue pair and its parameters.
pub(crate) struct Datagrams {
    /// `None` when it could not be replaced.
    native: Option<Native>,
    pd: weft_verbs::Pd,
    init: Init,
    /// Sends posted while the send queue was drained (SQD).
    resting: Mutex<Vec<(SendWr, UdDest)>>,
    groups: Mutex<Vec<Member>>,
}

/// The native queue pair: docs/spec/dgram.md is its wire, or RoCE.
enum Native {
    Weft(UdQp),
    Roce(RoceUdQp),
}

enum Init {
    Weft(Box<UdInit>),
    Roce(Box<RoceUdInit>),
}

impl Init {
    fn make(&self, pd: &weft_verbs::Pd) -> Result<Native, weft_verbs::Error> {
        match self {
            Init::Weft(init) => pd.create_ud_qp(init).map(Native::Weft),
            Init::Roce(init) => pd.create_roce_ud_qp(init).map(Native::Roce),
        }
    }

    fn max_send_wr(&self) -> u32 {
        match self {
            Init::Weft(init) => init.max_send_wr,
            Init::Roce(init) => init.max_send_wr,
        }
    }
}

impl Native {
    fn set_qkey(&self, qkey: u32) {
        match self {
            Native::Weft(qp) => qp.set_qkey(qkey),
            Native::Roce(qp) => qp.set_qkey(qkey),
        }
    }

    fn attach(&self, group: SocketAddr, interfaces: &[u32]) -> Result<(), Errno> {
        let attached = match self {
            Native::Weft(qp) => qp.attach(group, interfaces),
            Native::Roce(qp) => qp.attach(group, interfaces),
        };
        attached.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))
    }

    fn detach(&self, group: SocketAddr) {
        match self {
            Native::Weft(qp) => qp.detach(group),
            Native::Roce(qp) => qp.detach(group),
        };
    }

    fn to_error(&self) {
        match self {
            Native::Weft(qp) => qp.to_error(),
            Native::Roce(qp) => qp.to_error(),
        }
    }

    fn outstanding(&self) -> u32 {
        match self {
            Native::Weft(qp) => qp.outstanding(),
            Native::Roce(qp) => qp.outstanding(),
        }
    }

    fn send_gathered(&self) {
        match self {
            Native::Weft(qp) => qp.send_gathered(),
            Native::Roce(qp) => qp.no_more(),
        }
    }

    fn post_send(&self, wr: &SendWr, to: &UdDest, more: bool) -> Result<(), PostError> {
        match self {
            Native::Weft(qp) => qp.post_send(wr, to),
            Native::Roce(qp) => qp.post_send(wr, to, more),
        }
    }

    fn check_send(&self, wr: &SendWr) -> Result<(), PostError> {
        match self {
            Native::Weft(qp) => qp.check_send(wr),
            Native::Roce(qp) => qp.check_send(wr),
        }
    }

    fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        match self {
            Native::Weft(qp) => qp.post_recv(wrs),
            Native::Roce(qp) => qp.post_recv(wrs),
        }
    }
}

/// A multicast group, and the interfaces on which it is received.
struct Member {
    group: SocketAddr,
    interfaces: Vec<u32>,
    _counted: Counted,
}

/// The maximum number of memberships of a process: each takes a descriptor.
pub(crate) const MAX_MEMBERS: u32 = 1024;

static MEMBERS: PerFork<Count> = PerFork::new();

impl Datagrams {
    /// A queue pair that receives nothing before [`Datagrams::listen`].
    ///
    /// # Errors
    /// As creating a queue pair.
    pub(crate) fn new(
        pd: &weft_verbs::Pd,
        port: &UdPort,
        init: &QpInit,
        down: &'static AtomicBool,
        deaf_to_itself: bool,
    ) -> Result<Datagrams, weft_verbs::Error> {
        let init = UdInit {
            srq: init.srq.clone(),
            max_send_wr: init.max_send_wr,
            max_recv_wr: init.max_recv_wr,
            max_sge: init.max_sge,
            max_inline: init.max_inline,
            sq_sig_all: init.sq_sig_all,
            num: init.num,
            qkey: None,
            grh: true,
            down: Some(down),
            deaf_to_itself,
            gather: true,
            comp_counters: init.comp_counters.clone(),
            // As the port's active_mtu: programs may rely on the refusal of longer messages.
            max_message: UD_MTU,
            ..UdInit::new(port, 0, &init.send_cq, &init.recv_cq)
        };
        Self::with_init(pd, Init::Weft(Box::new(init)))
    }

    /// The same on RoCE, with the number in `init`.
    ///
    /// # Errors
    /// As creating a queue pair.
    pub(crate) fn on_roce(
        pd: &weft_verbs::Pd,
        init: &QpInit,
        down: &'static AtomicBool,
        deaf_to_itself: bool,
    ) -> Result<Datagrams, weft_verbs::Error> {
        let init = RoceUdInit {
            srq: init.srq.clone(),
            max_send_wr: init.max_send_wr,
            max_recv_wr: init.max_recv_wr,
            max_sge: init.max_sge,
            max_inline: init.max_inline,
            sq_sig_all: init.sq_sig_all,
            num: init.num,
            // As the port's active_mtu: programs may rely on the refusal of longer messages.
            max_message: 128 << roce::active_mtu(),
            down: Some(down),
            deaf_to_itself,
            comp_counters: init.comp_counters.clone(),
            ..RoceUdInit::new(&init.send_cq, &init.recv_cq)
        };
        Self::with_init(pd, Init::Roce(Box::new(init)))
    }

    fn with_init(pd: &weft_verbs::Pd, init: Init) -> Result<Datagrams, weft_verbs::Error> {
        Ok(Datagrams {
            native: Some(init.make(pd)?),
            pd: pd.clone(),
            init,
            resting: Mutex::default(),
            groups: Mutex::default(),
        })
    }

    fn native(&self) -> Result<&Native, Errno> {
        self.native.as_ref().ok_or(Errno::INVAL)
    }

    /// Calls `ask` with the native queue pair.
    ///
    /// # Errors
    /// `EINVAL` where it could not be [`renewed`](Datagrams::renew), `EOPNOTSUPP` on RoCE.
    pub(crate) fn with<T>(&self, ask: impl FnOnce(&UdQp) -> T) -> Result<T, Errno> {
        match self.native()? {
            Native::Weft(qp) => Ok(ask(qp)),
            Native::Roce(_) => Err(Errno::OPNOTSUPP),
        }
    }

    /// The parameters for the next native queue pair.
    ///
    /// # Errors
    /// `EOPNOTSUPP` on RoCE.
    pub(crate) fn init(&mut self) -> Result<&mut UdInit, Errno> {
        match &mut self.init {
            Init::Weft(init) => Ok(init),
            Init::Roce(_) => Err(Errno::OPNOTSUPP),
        }
    }

    /// Starts receiving, at RTR. On RoCE at each address of this host whose port this process has or can have: the program does not say which of them
    /// its peers know.
    ///
    /// # Errors
    /// `EINVAL` where it could not be [`renewed`](Datagrams::renew); on RoCE as `bind(2)` if there is no such address.
    pub(crate) fn listen(&self, qkey: u32) -> Result<(), Errno> {
        let native = self.native()?;
        native.set_qkey(qkey);
        if let Native::Roce(qp) = native
            && !qp.is_heard()
        {
            for port in roce::all_ports(&self.pd.device())? {
                qp.hear_at(&port).map_err(super::errno)?;
            }
        }
        Ok(())
    }

    /// Ends the native queue pair: it makes no more completions until it is renewed.
    pub(crate) fn end(&mut self) {
        self.native = None;
        lock(&self.resting).clear();
    }

    /// Replaces the native queue pair by one of the same number. It leaves the groups that cannot be joined again.
    ///
    /// # Errors
    /// As creating a queue pair; the call may be repeated.
    pub(crate) fn renew(&mut self) -> Result<(), Errno> {
        let native = self.init.make(&self.pd).map_err(super::errno)?;
        lock(&self.groups).retain(|member| {
            let attached = native.attach(member.group, &member.interfaces);
            if let Err(errno) = &attached {
                tracing::warn!(group = %member.group, %errno, "a group is left: it can be heard no more");
            }
            attached.is_ok()
        });
        self.native = Some(native);
        Ok(())
    }

    /// Receives this group's messages from now on; present memberships stay.
    ///
    /// # Errors
    /// As [`UdQp::attach`]; `ENOMEM` beyond [`MAX_MEMBERS`].
    pub(crate) fn attach(&self, group: SocketAddr, interfaces: Vec<u32>) -> Result<(), Errno> {
        let mut groups = lock(&self.groups);
        if groups.iter().any(|member| member.group == group) {
            return Ok(());
        }
        let counted = MEMBERS.take(MAX_MEMBERS)?;
        self.native()?.attach(group, &interfaces)?;
        groups.push(Member {
            group,
            interfaces,
            _counted: counted,
        });
        Ok(())
    }

    /// Receives this group's messages no more.
    ///
    /// # Errors
    /// `EINVAL` when it was not attached.
    pub(crate) fn detach(&self, group: IpAddr) -> Result<(), Errno> {
        let mut groups = lock(&self.groups);
        let before = groups.len();
        groups.retain(|member| {
            let stays = member.group.ip() != group;
            if !stays && let Some(native) = &self.native {
                native.detach(member.group);
            }
            stays
        });
        if groups.len() < before {
            Ok(())
        } else {
            Err(Errno::INVAL)
        }
    }

    pub(crate) fn is_attached(&self) -> bool {
        !lock(&self.groups).is_empty()
    }

    /// To the error state: flushes all posted requests. Otherwise as [`Datagrams::resume`].
    pub(crate) fn fail(&self) -> u32 {
        if let Some(native) = &self.native {
            native.to_error();
        }
        self.resume()
    }

    pub(crate) fn outstanding(&self) -> u32 {
        let below = self.native.as_ref().map_or(0, Native::outstanding);
        below + lock(&self.resting).len() as u32
    }

    /// Sends all posted requests.
    pub(crate) fn drain(&self) {
        if let Some(native) = &self.native {
            native.send_gathered();
        }
    }

    /// Posts one send of a queue pair in this state. With `more` another post follows, or [`Datagrams::drain`].
    pub(crate) fn post(
        &self,
        state: ibv_qp_state,
        wr: &SendWr,
        to: &UdDest,
        more: bool,
    ) -> Result<(), Errno> {
        let native = self.native()?;
        match state {
            IBV_QPS_RTS | IBV_QPS_SQE | IBV_QPS_ERR => {
                native.post_send(wr, to, more).map_err(refused)
            }
            IBV_QPS_SQD if self.outstanding() < self.init.max_send_wr() => {
                // Later no caller gets the error.
                native.check_send(wr).map_err(refused)?;
                lock(&self.resting).push((wr.clone(), *to));
                Ok(())
            }
            IBV_QPS_SQD => Err(Errno::NOMEM),
            _ => Err(Errno::INVAL),
        }
    }

    pub(crate) fn post_recv(&self, wr: &RecvWr) -> Result<(), Errno> {
        let wrs = std::slice::from_ref(wr);
        self.native()?.post_recv(wrs).map_err(refused)
    }

    /// The send queue resumes. Returns the number of requests that were refused all the same: their places are free.
    pub(crate) fn resume(&self) -> u32 {
        let taken = |wr: &SendWr, to: &UdDest| {
            let native = self.native.as_ref();
            native.is_some_and(|native| native.post_send(wr, to, false).is_ok())
        };
        let mut resting = lock(&self.resting);
        let refused = resting.drain(..).filter(|(wr, to)| !taken(wr, to));
        // There is room, because the waiting sends were counted, and they were checked when they were posted.
        refused.count() as u32
    }
}
