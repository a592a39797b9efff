//! Queue pairs.

use std::net::SocketAddr;
use std::sync::{Mutex, OnceLock};

use smallvec::SmallVec;
use weft_nic::{Data, LIST, Named, Request, cm::Connection};

use super::convert::each;
use super::cq::Cq;
use super::srq::Srq;
use super::{Either, TWO_DEVICES, convert};
use crate::ext::lock;
use crate::tls::{TlsError, TlsInfo};
use crate::{
    EndReason, Error, LimitReached, Path, PostError, PostReason, QpState, RecvWr, SendOp, SendWr,
};

/// As [`crate::QpInit`].
#[derive(Clone)]
pub struct QpInit {
    /// Where its sends complete.
    pub send_cq: Cq,
    /// Where its receives complete.
    pub recv_cq: Cq,
    /// Where it takes its receives from, if not from a queue of its own.
    pub srq: Option<Srq>,
    /// Sends that may be outstanding.
    pub max_send_wr: u32,
    /// Receives that may be outstanding.
    pub max_recv_wr: u32,
    /// Scatter/gather elements of a request.
    pub max_sge: u32,
    /// Inline bytes that are wanted; an RNIC may give fewer, see [`Qp::max_inline`].
    pub max_inline: u32,
}

impl QpInit {
    /// 128 sends, 128 receives, 4 elements, 256 inline bytes.
    pub fn new(send_cq: &Cq, recv_cq: &Cq) -> Self {
        Self {
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: None,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_sge: 4,
            max_inline: 256,
        }
    }

    pub(super) fn soft(&self, pd: &crate::Pd) -> Result<Qp, Error> {
        let (Some(send_cq), Some(recv_cq)) = (self.send_cq.soft(), self.recv_cq.soft()) else {
            return Err(TWO_DEVICES);
        };
        let srq = match &self.srq {
            None => None,
            Some(srq) => Some(srq.soft().ok_or(TWO_DEVICES)?.clone()),
        };
        let qp = pd.create_qp(&crate::QpInit {
            srq,
            max_send_wr: self.max_send_wr,
            max_recv_wr: self.max_recv_wr,
            max_sge: self.max_sge,
            max_inline: self.max_inline,
            ..crate::QpInit::new(send_cq, recv_cq)
        })?;
        Ok(Qp::from_soft(qp, self.max_inline))
    }

    /// On an RNIC, by `create`. With less inline data where the device refuses so much: it does not say what it would take.
    pub(super) fn rnic(
        &self,
        most: &Limits,
        create: impl Fn(&weft_nic::QpInit<'_>) -> Result<weft_nic::Qp, weft_nic::Error>,
    ) -> Result<Qp, Error> {
        let (Either::Rnic(send_cq), Either::Rnic(recv_cq)) = (&self.send_cq.0, &self.recv_cq.0)
        else {
            return Err(TWO_DEVICES);
        };
        let srq = match self.srq.as_ref().map(|srq| &srq.0) {
            None => None,
            Some(Either::Rnic(srq)) => Some(srq),
            Some(Either::Soft(_)) => return Err(TWO_DEVICES),
        };
        let max_wr = if srq.is_some() {
            self.max_send_wr
        } else {
            self.max_send_wr.max(self.max_recv_wr)
        };
        LimitReached::check("outstanding requests", "max_qp_wr", max_wr, most.max_wr)?;
        let elements = "scatter/gather elements of a request";
        LimitReached::check(elements, "max_sge", self.max_sge, most.max_sge)?;
        let mut init = weft_nic::QpInit {
            send_cq,
            recv_cq,
            srq,
            max_wr,
            max_sge: self.max_sge,
            max_inline: self.max_inline,
            ..weft_nic::QpInit::new(send_cq)
        };
        let qp = loop {
            match create(&init) {
                Err(_) if init.max_inline > 0 => init.max_inline /= 2,
                made => break made.map_err(|e| convert::error(&e))?,
            }
        };
        Ok(Qp(Either::Rnic(Box::new(Rnic {
            connection: OnceLock::new(),
            hook: Mutex::default(),
            device: most.device.clone(),
            max_sge: self.max_sge,
            max_sge_rd: self.max_sge.min(most.max_sge_rd),
            uses_srq: srq.is_some(),
            qp,
        }))))
    }
}

/// What an RNIC takes.
#[derive(Clone)]
pub(super) struct Limits {
    pub(super) device: String,
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    /// Elements of a Read: iWARP has one.
    pub(super) max_sge_rd: u32,
}

pub(super) struct Soft {
    pub(super) qp: crate::Qp,
    pub(super) max_inline: u32,
}

pub(super) struct Rnic {
    // Dropped first: it ends the connection of the queue pair.
    connection: OnceLock<Connection>,
    /// That of [`Qp::on_end`], until there is a connection.
    hook: Mutex<Option<Hook>>,
    device: String,
    max_sge: u32,
    max_sge_rd: u32,
    uses_srq: bool,
    qp: weft_nic::Qp,
}

type Hook = Box<dyn FnOnce(EndReason) + Send>;

/// As [`crate::Qp`]. Dropping it closes the connection.
pub struct Qp(pub(super) Either<Soft, Box<Rnic>>);

impl Qp {
    pub(super) fn from_soft(qp: crate::Qp, max_inline: u32) -> Self {
        Self(Either::Soft(Soft { qp, max_inline }))
    }

    /// That of the soft RNIC.
    pub fn soft(&self) -> Option<&crate::Qp> {
        self.0.soft().map(|soft| &soft.qp)
    }

    /// Its number.
    pub fn num(&self) -> u32 {
        match &self.0 {
            Either::Soft(soft) => soft.qp.num(),
            Either::Rnic(rnic) => rnic.qp.number(),
        }
    }

    /// Whether its RNIC was removed, or has failed: then every call fails.
    pub fn is_gone(&self) -> bool {
        match &self.0 {
            Either::Soft(_) => false,
            Either::Rnic(rnic) => rnic.qp.is_gone(),
        }
    }

    /// Whether it is connected, and its connection has not ended.
    pub fn is_connected(&self) -> bool {
        match &self.0 {
            Either::Soft(soft) => soft.qp.state() == QpState::Rts,
            Either::Rnic(rnic) => rnic.connection.get().is_some_and(|it| it.end().is_none()),
        }
    }

    /// Inline bytes that a request may have.
    pub fn max_inline(&self) -> u32 {
        match &self.0 {
            Either::Soft(soft) => soft.max_inline,
            Either::Rnic(rnic) => rnic.qp.max_inline(),
        }
    }

    /// As [`crate::Qp::post_send`].
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused.
    #[inline]
    pub fn post_send(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        match &self.0 {
            Either::Soft(soft) => soft.qp.post_send(wrs),
            Either::Rnic(rnic) => rnic.post_send(wrs),
        }
    }

    /// Post one send, see [`Qp::post_send`].
    ///
    /// # Errors
    /// As there, index 0.
    #[inline]
    pub fn post_send_one(&self, wr: SendWr) -> Result<(), PostError> {
        match &self.0 {
            Either::Soft(soft) => soft.qp.post_send_one(wr),
            Either::Rnic(rnic) => rnic.post_send(&[wr]),
        }
    }

    /// As [`crate::Qp::post_recv`].
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused.
    #[inline]
    pub fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        match &self.0 {
            Either::Soft(soft) => soft.qp.post_recv(wrs),
            Either::Rnic(rnic) => each(wrs, |wr| rnic.post_recv(wr)),
        }
    }

    /// Post one receive, see [`Qp::post_recv`].
    ///
    /// # Errors
    /// As there, index 0.
    #[inline]
    pub fn post_recv_one(&self, wr: RecvWr) -> Result<(), PostError> {
        self.post_recv(&[wr])
    }

    /// Closes the connection, see [`crate::Qp::disconnect`] and, for what differs on an RNIC, the [module](crate::any).
    pub fn disconnect(&self) {
        match &self.0 {
            Either::Soft(soft) => soft.qp.disconnect(),
            Either::Rnic(rnic) => {
                if let Some(connection) = rnic.connection.get() {
                    connection.disconnect();
                }
            }
        }
    }

    /// Ends the connection at once, see [`crate::Qp::to_error`]; on an RNIC as [`Qp::disconnect`].
    pub fn to_error(&self) {
        match &self.0 {
            Either::Soft(soft) => soft.qp.to_error(),
            Either::Rnic(_) => self.disconnect(),
        }
    }

    /// The transport of the connection, once connected; `rnic` on an RNIC, with its name as the reason.
    pub fn path(&self) -> Option<Path> {
        match &self.0 {
            Either::Soft(soft) => soft.qp.path(),
            Either::Rnic(rnic) => rnic.connection.get().map(|_| Path {
                transport: "rnic",
                reason: Some(rnic.device.clone()),
            }),
        }
    }

    /// As [`crate::Qp::attests_same_user`]; false on an RNIC.
    pub fn attests_same_user(&self) -> bool {
        self.soft().is_some_and(crate::Qp::attests_same_user)
    }

    /// As [`crate::Qp::tls`]; `None` on an RNIC.
    pub fn tls(&self) -> Option<TlsInfo> {
        self.soft()?.tls()
    }

    /// As [`crate::Qp::tls_error`]; `None` on an RNIC.
    pub fn tls_error(&self) -> Option<TlsError> {
        self.soft()?.tls_error()
    }

    /// Our address, once connected.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match &self.0 {
            Either::Soft(soft) => soft.qp.local_addr(),
            Either::Rnic(rnic) => rnic.connection.get()?.local_addr(),
        }
    }

    /// The peer's address, once connected.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        match &self.0 {
            Either::Soft(soft) => soft.qp.peer_addr(),
            Either::Rnic(rnic) => rnic.connection.get()?.peer_addr(),
        }
    }

    /// As [`crate::Qp::on_end`]. On an RNIC a thread of the process calls it, which waits for the events of `rdma_cm`.
    pub fn on_end(&self, hook: impl FnOnce(EndReason) + Send + 'static) {
        match &self.0 {
            Either::Soft(soft) => soft.qp.on_end(hook),
            Either::Rnic(rnic) => rnic.on_end(Box::new(hook)),
        }
    }
}

impl Rnic {
    /// The connection is there.
    pub(super) fn connected(&self, connection: Connection) {
        let waiting = {
            let mut hook = lock(&self.hook);
            let _ = self.connection.set(connection);
            hook.take()
        };
        if let Some(hook) = waiting {
            self.on_end(hook);
        }
    }

    fn on_end(&self, hook: Hook) {
        let mut waiting = lock(&self.hook);
        if let Some(connection) = self.connection.get() {
            drop(waiting);
            connection.on_end(move |end| hook(convert::end(end)));
        } else {
            *waiting = Some(hook);
        }
    }

    fn post_send(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        // Drivers answer a post before there is a connection with an error number of their own.
        if self.connection.get().is_none() && !wrs.is_empty() {
            let reason = PostReason::State;
            return Err(PostError { index: 0, reason });
        }
        for (number, wrs) in wrs.chunks(LIST).enumerate() {
            let posted = self.post_list(wrs);
            posted.map_err(|PostError { index, reason }| PostError {
                index: number * LIST + index,
                reason,
            })?;
        }
        Ok(())
    }

    /// What comes before a request that is refused is posted.
    fn post_list(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        let named: SmallVec<[_; 1]> = wrs.iter().map(|wr| convert::named(&wr.sges)).collect();
        let mut requests: SmallVec<[_; 1]> = SmallVec::new();
        let mut refused = None;
        for (wr, named) in wrs.iter().zip(&named) {
            match self.request(wr, named) {
                Ok(request) => requests.push(request),
                Err(reason) => {
                    let index = requests.len();
                    refused = Some(PostError { index, reason });
                    break;
                }
            }
        }
        let posted = self.qp.post(&requests);
        posted.map_err(|(index, e)| PostError {
            index,
            reason: convert::post_reason(&e),
        })?;
        refused.map_or(Ok(()), Err)
    }

    fn request<'a>(&self, wr: &'a SendWr, named: &'a [Named]) -> Result<Request<'a>, PostReason> {
        if wr.srq.is_some() {
            return Err(PostReason::Unsupported);
        }
        // Drivers have one error number for all of this.
        let is_read = matches!(wr.op, SendOp::Read { .. });
        let is_atomic = matches!(wr.op, SendOp::FetchAdd { .. } | SendOp::CompareSwap { .. });
        let max = if is_read {
            self.max_sge_rd
        } else {
            self.max_sge
        };
        let listed = convert::check_list(&wr.sges, max)?;
        if is_atomic && listed != 8 {
            return Err(PostReason::Length);
        }
        let data = match &wr.inline {
            Some(_) if is_read || is_atomic || !wr.sges.is_empty() => {
                return Err(PostReason::Inline);
            }
            Some(bytes) if bytes.len() > self.qp.max_inline() as usize => {
                return Err(PostReason::InlineTooLong {
                    asked: bytes.len() as u32,
                    max: self.qp.max_inline(),
                });
            }
            Some(bytes) => Data::Inline(bytes),
            None => Data::Named(named),
        };
        Ok(Request {
            id: wr.id,
            op: convert::op(wr.op)?,
            data,
            signaled: wr.signaled,
            solicited: wr.solicited,
            fence: wr.fence,
        })
    }

    fn post_recv(&self, wr: &RecvWr) -> Result<(), PostReason> {
        if self.uses_srq {
            return Err(PostReason::UsesSrq);
        }
        convert::check_list(&wr.sges, self.max_sge)?;
        let posted = self.qp.post_recv_named(wr.id, &convert::named(&wr.sges));
        posted.map_err(|e| convert::post_reason(&e))
    }
}
