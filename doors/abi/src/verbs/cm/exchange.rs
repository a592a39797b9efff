//! Queue pairs that programs move themselves: `rdma_connect` and `rdma_accept` on identifiers without one.
//!
//! The program names its queue pair and gets the peer's number and address from the events. [`rdma_init_qp_attr`](super::rdma_init_qp_attr) returns the
//! attributes for `ibv_modify_qp`, and the persona joins the two queue pairs. The connection managers communicate over a separate connection, the carrier: the
//! private data of its start-up names the queue pairs, an empty Send reports that the initiator is ready, and its end is the disconnection.
//!
//! ```text
//!   bytes  0  "WCM1"
//!          4  queue pair number, 4 bytes
//!          8  GID, 16 bytes
//!         24  the program's private data and the terms
//! ```

use std::net::IpAddr;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use rustix::io::Errno;
use weft_verbs::cm::gid_of;
use weft_verbs::ext::CqExt;
use weft_verbs::{Cq, Qp, QpInit, RecvWr, SendWr, Wc, WcOpcode, WcStatus};

use super::device::Nic;
use crate::verbs::object::lock;

const MAGIC: [u8; 4] = *b"WCM1";
const HEADER: usize = 24;

/// The peer's queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    pub(super) qp_num: u32,
    pub(super) gid: [u8; 16],
}

impl Remote {
    fn encode(self, private_data: &[u8]) -> Vec<u8> {
        [
            &MAGIC,
            &self.qp_num.to_be_bytes()[..],
            &self.gid,
            private_data,
        ]
        .concat()
    }

    /// The named queue pair and the program's data; `None` for private data of another kind.
    pub(super) fn split(said: &[u8]) -> Option<(Remote, &[u8])> {
        let (header, private_data) = said.split_first_chunk::<HEADER>()?;
        let rest = header.strip_prefix(&MAGIC)?;
        let (qp_num, gid) = rest.split_first_chunk()?;
        Some((
            Remote {
                qp_num: u32::from_be_bytes(*qp_num),
                gid: gid.try_into().ok()?,
            },
            private_data,
        ))
    }
}

/// A connection that carries only messages between connection managers.
pub(super) struct Carrier {
    qp_num: u32,
    cq: Cq,
    qp: Arc<Qp>,
    /// The action for the time when the peer is ready.
    waiting: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Carrier {
    /// For the program's queue pair of this number.
    pub(super) fn new(nic: &Nic, qp_num: u32) -> Result<Arc<Carrier>, Errno> {
        let cq = nic.native.create_cq(4, None).map_err(crate::verbs::errno)?;
        let itself = Arc::new(OnceLock::<Weak<Carrier>>::new());
        let seen = Arc::clone(&itself);
        cq.set_hook(move || {
            if let Some(carrier) = seen.get().and_then(Weak::upgrade) {
                carrier.look();
            }
        });
        let pd = nic.native.alloc_pd().map_err(crate::verbs::errno)?;
        let init = QpInit {
            max_send_wr: 2,
            max_recv_wr: 2,
            ..QpInit::new(&cq, &cq)
        };
        let qp = pd.create_qp(&init).map_err(crate::verbs::errno)?;
        let carrier = Arc::new(Carrier {
            qp_num,
            cq,
            qp: Arc::new(qp),
            waiting: Mutex::default(),
        });
        let _ = itself.set(Arc::downgrade(&carrier));
        Ok(carrier)
    }

    /// The program's queue pair.
    pub(super) fn qp_num(&self) -> u32 {
        self.qp_num
    }

    pub(super) fn qp(&self) -> Arc<Qp> {
        Arc::clone(&self.qp)
    }

    /// The private data of start-up, with the program's in it. `ip` is our address.
    pub(super) fn say(&self, ip: IpAddr, private_data: &[u8]) -> Vec<u8> {
        let remote = Remote {
            qp_num: self.qp_num,
            gid: gid_of(ip),
        };
        remote.encode(private_data)
    }

    /// Responder, before it accepts: posts a receive for the initiator's message.
    pub(super) fn prepare(&self) -> Result<(), Errno> {
        self.qp
            .post_recv(&[RecvWr::new(0)])
            .map_err(|_| Errno::INVAL)
    }

    /// Responder, once it has accepted: runs `then` when the initiator is ready.
    pub(super) fn await_ready(&self, then: impl FnOnce() + Send + 'static) {
        *lock(&self.waiting) = Some(Box::new(then));
        self.look();
    }

    fn look(&self) {
        if lock(&self.waiting).is_none() {
            return;
        }
        let mut wc = [Wc::default(); 1];
        let heard = self.cq.poll(&mut wc) == Ok(1) && wc[0].status == WcStatus::Success;
        if heard && wc[0].opcode == WcOpcode::Recv {
            self.ready();
        }
    }

    /// The initiator is ready, or the program has learned so by other means.
    pub(super) fn ready(&self) {
        let then = lock(&self.waiting).take();
        if let Some(then) = then {
            then();
        }
    }

    /// Initiator: reports that it is ready.
    pub(super) fn tell_ready(&self) -> Result<(), Errno> {
        self.qp
            .post_send_one(SendWr::send(0))
            .map_err(|_| Errno::INVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_names_a_queue_pair_is_told_from_what_does_not() {
        let remote = Remote {
            qp_num: 0x00ab_cdef,
            gid: gid_of([10, 0, 0, 1].into()),
        };
        let said = remote.encode(b"hello");
        assert_eq!(Remote::split(&said), Some((remote, &b"hello"[..])));
        assert_eq!(Remote::split(&remote.encode(b"")), Some((remote, &b""[..])));
        assert_eq!(Remote::split(&said[..HEADER - 1]), None);
        assert_eq!(Remote::split(b"hello"), None);
        assert_eq!(Remote::split(&[0; 64]), None);
    }
}
