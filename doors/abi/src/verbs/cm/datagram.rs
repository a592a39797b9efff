//! Identifiers for datagrams, which have no connection: `rdma_connect` asks the listener at a UDP port for a queue pair, and `rdma_accept` names one
//! (docs/spec/dgram.md).

use std::sync::Arc;

use rustix::io::Errno;
use weft_verbs::cm::{Found, LookupError, gid_of};

use super::device::Nic;
use super::id::{Asking, Core, Stage, get};
use super::link;
use super::news::{News, Ud};
use super::port::Port;
use super::private_data::{self, UD_REPLY, UD_REQUEST, delivered};
use super::qp;
use super::request::{Request, Unseen};
use super::roce_datagram;
use super::types::{
    RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_UNREACHABLE,
    RDMA_UDP_QKEY, rdma_conn_param,
};
use crate::verbs::{os_errno, wire};

/// InfiniBand's code for "no listener" (12.8.2).
const UNSUPPORTED: i32 = 1;

/// The program's private data, and the queue pair that it names.
///
/// # Safety
/// As for [`super::rdma_connect`].
unsafe fn said(
    param: *const rdma_conn_param,
    preface: &[u8],
    longest: usize,
) -> Result<(Vec<u8>, Option<u32>), Errno> {
    let (mut data, mut qp_num) = (preface.to_vec(), None);
    if !param.is_null() {
        // SAFETY: the caller's promise.
        let param = unsafe { param.read_unaligned() };
        // SAFETY: as above.
        data.extend(unsafe { private_data::read(param.private_data, param.private_data_len) }?);
        qp_num = Some(param.qp_num);
    }
    if data.len() > longest {
        return Err(Errno::INVAL);
    }
    Ok((data, qp_num))
}

impl Core {
    /// A request to a listener has arrived.
    pub(super) fn asked(self: &Arc<Self>, private_data: Vec<u8>, request: Request) {
        self.tell(News {
            private_data: delivered(private_data, true, UD_REQUEST),
            request: Some(Unseen::new(request)),
            ..News::new(RDMA_CM_EVENT_CONNECT_REQUEST)
        });
    }

    /// # Safety
    /// As for [`super::rdma_connect`].
    pub(super) unsafe fn ask(
        self: &Arc<Self>,
        nic: &Nic,
        param: *const rdma_conn_param,
        preface: &[u8],
    ) -> Result<(), Errno> {
        if !nic.persona {
            return Err(Errno::OPNOTSUPP);
        }
        // SAFETY: the caller's promise.
        let (data, _) = unsafe { said(param, preface, UD_REQUEST) }?;
        let (port, src, dst) = {
            let mut setup = self.setup();
            if !matches!(setup.stage, Stage::Routed) {
                return Err(Errno::INVAL);
            }
            let (Some(Port::Datagram(port)), Some(src), Some(dst)) =
                (setup.port.take(), setup.src, setup.dst)
            else {
                return Err(Errno::INVAL);
            };
            setup.stage = Stage::Joining;
            (port, src, dst)
        };
        let core = Arc::clone(self);
        let on_answer = move |outcome| core.told(outcome);
        let lookup = if wire::has_roce() {
            let lookup = roce_datagram::look_up(nic, port, src.ip(), dst, &data, on_answer);
            lookup.map(Asking::Roce)
        } else {
            let lookup = port.look_up(dst, &data, on_answer);
            let lookup = lookup.map(Asking::Datagram);
            lookup.map_err(|error| os_errno(&error))
        };
        let mut setup = self.setup();
        if !matches!(setup.stage, Stage::Joining) {
            // The answer has arrived already, or the identifier has been destroyed.
            drop(setup);
            return lookup.map(drop);
        }
        match lookup {
            Ok(lookup) => setup.stage = Stage::Asking(lookup),
            Err(errno) => {
                setup.stage = Stage::Over(None);
                return Err(errno);
            }
        }
        Ok(())
    }

    fn told(self: &Arc<Self>, outcome: Result<Found, LookupError>) {
        let (asked, dst) = {
            let mut setup = self.setup();
            if !matches!(setup.stage, Stage::Joining | Stage::Asking(_)) {
                return;
            }
            let next = match outcome {
                Ok(_) => Stage::Found,
                Err(_) => Stage::Over(None),
            };
            (std::mem::replace(&mut setup.stage, next), setup.dst)
        };
        drop(asked);
        let unreachable = |status| News::status(RDMA_CM_EVENT_UNREACHABLE, status);
        let dgid = dst.map(|dst| gid_of(dst.ip()));
        self.tell(match outcome {
            Ok(found) => News {
                private_data: delivered(found.private_data, true, UD_REPLY),
                qp_num: found.qp_num,
                ud: dgid.map(|dgid| Ud {
                    dgid,
                    qkey: found.qkey,
                }),
                ..News::new(RDMA_CM_EVENT_ESTABLISHED)
            },
            Err(LookupError::NoService) => unreachable(UNSUPPORTED),
            Err(LookupError::Refused {
                status,
                private_data,
            }) => News {
                private_data: delivered(private_data, true, UD_REPLY),
                ..unreachable(status.into())
            },
            Err(LookupError::TimedOut) => unreachable(-Errno::TIMEDOUT.raw_os_error()),
        });
    }

    /// # Safety
    /// As for [`super::rdma_accept`].
    pub(super) unsafe fn answer(&self, param: *const rdma_conn_param) -> Result<(), Errno> {
        // SAFETY: the caller's promise.
        let (data, named) = unsafe { said(param, &[], UD_REPLY) }?;
        let own = get!(self, qp);
        let qp_num = if own.is_null() {
            named.ok_or(Errno::INVAL)?
        } else {
            link::name(own)?.get()?.num()
        };
        let request = self.request()?;
        self.setup().stage = Stage::Found;
        request.name(qp_num, RDMA_UDP_QKEY, &data)
    }
}

/// Flushes the queue pair as the end of a connection would.
pub(super) fn disconnect(core: &Core) -> Result<(), Errno> {
    if !matches!(core.setup().stage, Stage::Found) {
        return Err(Errno::INVAL);
    }
    qp::flush(core)
}
