//! Unreliable datagram queue pairs of the persona: what [`QpObj`](super::qp::QpObj) does not share with connected ones.

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
            native, pd, init, ..
        } = self;
        drop(native);
        Ok(Datagrams {
            native: pd.create_ud_qp(&init).map_err(super::errno)?,
            pd,
            init,
            resting: Mutex::default(),
        })
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

/// Where an address handle, a number and a key lead.
///
/// # Safety
/// As for [`enter`].
pub(crate) unsafe fn dest(ah: *mut ibv_ah, qpn: u32, qkey: u32) -> Result<UdDest, Errno> {
    // SAFETY: the caller's promise.
    let ah = unsafe { enter::<Ah>(ah) }?;
    Ok(ah.dest(qpn & 0x00ff_ffff, qkey))
}
