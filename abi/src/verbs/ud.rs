//! Unreliable datagram queue pairs of the persona: what [`QpObj`](super::qp::QpObj) does not share with connected ones.

use std::net::SocketAddr;
use std::sync::Mutex;

use rustix::io::Errno;
use weft_verbs::{QpInit, RecvWr, SendWr, UdDest, UdInit, UdPort, UdQp};

use super::ah::Ah;
use super::object::{enter, lock};
use super::post::refused;
use super::types::*;

/// The queue pair below, and how it was made.
pub(crate) struct Datagrams {
    native: UdQp,
    pd: weft_verbs::Pd,
    init: UdInit,
    /// Sends posted while the send queue was to rest (SQD).
    resting: Mutex<Vec<(SendWr, UdDest)>>,
    /// Multicast groups, and the interfaces on which they are heard.
    groups: Mutex<Vec<(SocketAddr, Vec<u32>)>>,
}

impl Datagrams {
    /// It hears nothing before [`Datagrams::listen`].
    ///
    /// # Errors
    /// As creating a queue pair.
    pub(crate) fn new(
        pd: &weft_verbs::Pd,
        port: &UdPort,
        init: &QpInit,
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
            ..UdInit::new(port, 0, &init.send_cq, &init.recv_cq)
        };
        Ok(Datagrams {
            native: pd.create_ud_qp(&init).map_err(super::errno)?,
            pd: pd.clone(),
            init,
            resting: Mutex::default(),
            groups: Mutex::default(),
        })
    }

    /// From RTR on.
    pub(crate) fn listen(&self, qkey: u32) {
        self.native.set_qkey(qkey);
    }

    /// Another one in its place, of the same number.
    ///
    /// # Errors
    /// As creating a queue pair.
    pub(crate) fn renewed(self) -> Result<Datagrams, Errno> {
        let Datagrams {
            native,
            pd,
            init,
            groups,
            ..
        } = self;
        drop(native);
        let native = pd.create_ud_qp(&init).map_err(super::errno)?;
        for (group, interfaces) in &*lock(&groups) {
            attach(&native, *group, interfaces)?;
        }
        Ok(Datagrams {
            native,
            pd,
            init,
            resting: Mutex::default(),
            groups,
        })
    }

    /// It hears this group from now on; what it hears already stays as it is.
    ///
    /// # Errors
    /// As [`UdQp::attach`].
    pub(crate) fn attach(&self, group: SocketAddr, interfaces: Vec<u32>) -> Result<(), Errno> {
        let mut groups = lock(&self.groups);
        if groups.iter().any(|(known, _)| *known == group) {
            return Ok(());
        }
        attach(&self.native, group, &interfaces)?;
        groups.push((group, interfaces));
        Ok(())
    }

    /// It hears this group no more.
    ///
    /// # Errors
    /// `EINVAL` when it did not.
    pub(crate) fn detach(&self, group: SocketAddr) -> Result<(), Errno> {
        lock(&self.groups).retain(|(known, _)| *known != group);
        if self.native.detach(group) {
            Ok(())
        } else {
            Err(Errno::INVAL)
        }
    }

    pub(crate) fn is_attached(&self) -> bool {
        !lock(&self.groups).is_empty()
    }

    /// To the error state: everything posted is flushed.
    pub(crate) fn fail(&self) {
        self.native.to_error();
        self.resume();
    }

    pub(crate) fn outstanding(&self) -> u32 {
        self.native.outstanding() + lock(&self.resting).len() as u32
    }

    /// Post one send of a queue pair in this state.
    pub(crate) fn post(&self, state: ibv_qp_state, wr: &SendWr, to: &UdDest) -> Result<(), Errno> {
        match state {
            IBV_QPS_RTS | IBV_QPS_SQE | IBV_QPS_ERR => {
                self.native.post_send(wr, to).map_err(refused)
            }
            IBV_QPS_SQD if self.outstanding() < self.init.max_send_wr => {
                lock(&self.resting).push((wr.clone(), *to));
                Ok(())
            }
            IBV_QPS_SQD => Err(Errno::NOMEM),
            _ => Err(Errno::INVAL),
        }
    }

    /// Post one receive.
    pub(crate) fn post_recv(&self, wr: &RecvWr) -> Result<(), Errno> {
        let wrs = std::slice::from_ref(wr);
        self.native.post_recv(wrs).map_err(refused)
    }

    /// The send queue goes on.
    pub(crate) fn resume(&self) {
        for (wr, to) in lock(&self.resting).drain(..) {
            // It has room: what rests was counted.
            let _ = self.native.post_send(&wr, &to);
        }
    }
}

fn attach(native: &UdQp, group: SocketAddr, interfaces: &[u32]) -> Result<(), Errno> {
    let attached = native.attach(group, interfaces);
    attached.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))
}

/// Where an address handle, a number and a key lead.
///
/// # Safety
/// As for [`enter`].
pub(crate) unsafe fn dest(ah: *mut ibv_ah, qpn: u32, qkey: u32) -> Result<UdDest, Errno> {
    // SAFETY: the caller's promise.
    let ah = unsafe { enter::<Ah>(ah) }?;
    Ok(ah.dest(qpn & 0x00ff_ffff, qkey))
}
