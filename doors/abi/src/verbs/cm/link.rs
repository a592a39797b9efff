//! The link between an identifier and its peer.

use std::sync::Arc;

use rustix::io::Errno;
use weft_verbs::Qp;
use weft_verbs::ext::QpExt;

use super::device::Nic;
use super::exchange::Carrier;
use super::roce_link::RoceLink;
use crate::verbs::object::{Kind as _, Name, find};
use crate::verbs::qp::QpObj;
use crate::verbs::types::ibv_qp;

/// The queue pair at this address.
pub(super) fn name(handle: *mut ibv_qp) -> Result<Name<QpObj>, Errno> {
    Ok(find::<QpObj>(handle)?.name())
}

/// The queue pair with this number, in any context.
pub(super) fn by_number(num: u32) -> Result<Name<QpObj>, Errno> {
    let all = QpObj::pool().all();
    let found = all
        .into_iter()
        .find(|qp| qp.num() == num && !qp.is_further());
    Ok(found.ok_or(Errno::INVAL)?.name())
}

/// The link between an identifier and its peer.
#[derive(Clone)]
pub(super) enum Link {
    /// The program's queue pair.
    Program(Name<QpObj>),
    /// The program's queue pair, which speaks RoCE.
    Roce(RoceLink),
    /// A separate connection, because the program moves its queue pair itself.
    Carrier(Arc<Carrier>),
}

impl Link {
    pub(super) fn native(&self) -> Result<Arc<Qp>, Errno> {
        match self {
            Link::Program(name) => name.get()?.native(),
            Link::Roce(_) => Err(Errno::INVAL),
            Link::Carrier(carrier) => Ok(carrier.qp()),
        }
    }

    /// Sets the number of retries that the peer's messages wait for a receive. An RNIC ends the connection at once, unless the program asks for more.
    pub(super) fn wait_for_receives(&self, nic: &Nic, retry: u8) -> Result<(), Errno> {
        let receiver = match self {
            Link::Program(name) => name.get()?,
            // The manager's messages say it.
            Link::Roce(_) => return Ok(()),
            Link::Carrier(carrier) => by_number(carrier.qp_num())?.get()?,
        };
        if receiver.roce.is_some() {
            // It has been joined by number.
            return Ok(());
        }
        if nic.persona || retry > 0 {
            receiver.native()?.wait_for_receives(retry);
        }
        Ok(())
    }

    /// Closes in order: posted requests are still sent.
    pub(super) fn close(&self) {
        if let Link::Roce(link) = self {
            link.close();
        } else if let Ok(qp) = self.native() {
            qp.disconnect();
        }
    }

    /// The connection has ended: ends the queue pair in any state.
    pub(super) fn bury(&self) {
        if let Link::Roce(link) = self {
            link.bury();
        } else if let Ok(qp) = self.native() {
            qp.to_error();
        }
    }
}
