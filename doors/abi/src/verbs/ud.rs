//! Unreliable datagram queue pairs of the persona: the part that [`QpObj`](super::qp::QpObj) does not share with connected ones.

use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use rustix::io::Errno;
use weft_verbs::{QpInit, RecvWr, SendWr, UD_MTU, UdDest, UdInit, UdPort, UdQp};

use super::limit::{Count, Counted};
use super::object::{PerFork, lock};
use super::refused;
use super::types::*;

/// The native queue pair and its parameters.
pub(crate) struct Datagrams {
    /// `None` when it could not be replaced.
    native: Option<UdQp>,
    pd: weft_verbs::Pd,
    init: UdInit,
    /// Sends posted while the send queue was drained (SQD).
    resting: Mutex<Vec<(SendWr, UdDest)>>,
    groups: Mutex<Vec<Member>>,
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
    ) -> Result<Datagrams, Errno> {
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
        Ok(Datagrams {
            native: Some(pd.create_ud_qp(&init).map_err(super::errno)?),
            pd: pd.clone(),
            init,
            resting: Mutex::default(),
            groups: Mutex::default(),
        })
    }

    fn native(&self) -> Result<&UdQp, Errno> {
        self.native.as_ref().ok_or(Errno::INVAL)
    }

    /// Calls `ask` with the native queue pair.
    ///
    /// # Errors
    /// `EINVAL` where it could not be [`renewed`](Datagrams::renew).
    pub(crate) fn with<T>(&self, ask: impl FnOnce(&UdQp) -> T) -> Result<T, Errno> {
        Ok(ask(self.native()?))
    }

    /// The parameters for the next native queue pair.
    pub(crate) fn init(&mut self) -> &mut UdInit {
        &mut self.init
    }

    /// Starts receiving, at RTR.
    ///
    /// # Errors
    /// `EINVAL` where it could not be [`renewed`](Datagrams::renew).
    pub(crate) fn listen(&self, qkey: u32) -> Result<(), Errno> {
        self.native()?.set_qkey(qkey);
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
        let native = self.pd.create_ud_qp(&self.init).map_err(super::errno)?;
        lock(&self.groups).retain(|member| {
            let attached = attach(&native, member.group, &member.interfaces);
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
        attach(self.native()?, group, &interfaces)?;
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
        let below = self.native.as_ref().map_or(0, UdQp::outstanding);
        below + lock(&self.resting).len() as u32
    }

    /// Sends all posted requests before the send queue is drained.
    pub(crate) fn drain(&self) {
        if let Some(native) = &self.native {
            native.send_gathered();
        }
    }

    /// Posts one send of a queue pair in this state.
    pub(crate) fn post(&self, state: ibv_qp_state, wr: &SendWr, to: &UdDest) -> Result<(), Errno> {
        let native = self.native()?;
        match state {
            IBV_QPS_RTS | IBV_QPS_SQE | IBV_QPS_ERR => native.post_send(wr, to).map_err(refused),
            IBV_QPS_SQD if self.outstanding() < self.init.max_send_wr => {
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
            native.is_some_and(|native| native.post_send(wr, to).is_ok())
        };
        let mut resting = lock(&self.resting);
        let refused = resting.drain(..).filter(|(wr, to)| !taken(wr, to));
        // There is room, because the waiting sends were counted, and they were checked when they were posted.
        refused.count() as u32
    }
}

fn attach(native: &UdQp, group: SocketAddr, interfaces: &[u32]) -> Result<(), Errno> {
    let attached = native.attach(group, interfaces);
    attached.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))
}
