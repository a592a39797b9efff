//! Completion queues.

use std::time::Duration;

use super::{Either, convert};
use crate::{CqOverrun, Wc};

/// Completions that are taken from an RNIC at once.
const BATCH: usize = 16;

/// As [`crate::Cq`]. Clones are handles of the same queue.
#[derive(Clone)]
pub struct Cq(pub(super) Either<crate::Cq, weft_nic::Cq>);

impl Cq {
    /// That of the soft RNIC.
    pub fn soft(&self) -> Option<&crate::Cq> {
        self.0.soft()
    }

    /// As [`crate::Cq::poll`].
    ///
    /// # Errors
    /// [`CqOverrun`]; on an RNIC every failure of the queue.
    #[inline]
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize, CqOverrun> {
        match &self.0 {
            Either::Soft(cq) => cq.poll(out),
            Either::Rnic(cq) => take(cq, out, Some(Duration::ZERO)),
        }
    }

    /// As [`crate::Cq::wait`].
    ///
    /// # Errors
    /// As [`Cq::poll`].
    #[inline]
    pub fn wait(&self, out: &mut [Wc], timeout: Option<Duration>) -> Result<usize, CqOverrun> {
        match &self.0 {
            Either::Soft(cq) => cq.wait(out, timeout),
            Either::Rnic(cq) => take(cq, out, timeout),
        }
    }
}

fn take(cq: &weft_nic::Cq, out: &mut [Wc], timeout: Option<Duration>) -> Result<usize, CqOverrun> {
    let mut taken: [weft_nic::Wc; BATCH] = Default::default();
    let room = out.len().min(BATCH);
    let count = cq.take(&mut taken[..room], timeout).map_err(|error| {
        tracing::error!(%error, "the completion queue of an RNIC has failed");
        CqOverrun
    })?;
    for (to, from) in out.iter_mut().zip(&taken[..count]) {
        *to = convert::wc(from);
    }
    Ok(count)
}
