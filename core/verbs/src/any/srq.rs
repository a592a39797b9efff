//! Shared receive queues.

use super::convert::each;
use super::pd::Pd;
use super::{Either, convert};
use crate::{Error, PostError, RecvWr};

/// As [`crate::Srq`]. Clones are handles of the same queue.
#[derive(Clone)]
pub struct Srq(pub(super) Either<crate::Srq, weft_nic::Srq>);

impl Pd {
    /// As [`crate::Pd::create_srq`].
    ///
    /// # Errors
    /// As there; on an RNIC as `ibv_create_srq`.
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<Srq, Error> {
        Ok(Srq(match &self.0 {
            Either::Soft(pd) => Either::Soft(pd.create_srq(max_wr, max_sge)?),
            Either::Rnic(pd) => {
                let srq = pd.create_srq(max_wr, max_sge);
                Either::Rnic(srq.map_err(|e| convert::error(&e))?)
            }
        }))
    }
}

impl Srq {
    /// That of the soft RNIC.
    pub fn soft(&self) -> Option<&crate::Srq> {
        self.0.soft()
    }

    /// As [`crate::Srq::post_recv`].
    ///
    /// # Errors
    /// [`PostError`] names the first request that was refused.
    pub fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
        match &self.0 {
            Either::Soft(srq) => srq.post_recv(wrs),
            Either::Rnic(srq) => each(wrs, |wr| {
                convert::check_list(&wr.sges, srq.max_sge())?;
                let posted = srq.post_recv_named(wr.id, &convert::named(&wr.sges));
                posted.map_err(|e| convert::post_reason(&e))
            }),
        }
    }

    /// Post one receive, see [`Srq::post_recv`].
    ///
    /// # Errors
    /// As there, index 0.
    pub fn post_recv_one(&self, wr: RecvWr) -> Result<(), PostError> {
        self.post_recv(&[wr])
    }
}
