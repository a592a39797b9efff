//! Completion queues and channels.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::{Either, convert};
use crate::ext::CqExt;
use crate::{CqOverrun, Error, Wc};

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

    /// As [`CqExt::take`](crate::ext::CqExt::take): takes completions that are there already.
    ///
    /// # Errors
    /// As [`Cq::poll`].
    pub fn take(&self, out: &mut [Wc]) -> Result<usize, CqOverrun> {
        match &self.0 {
            Either::Soft(cq) => cq.take(out),
            Either::Rnic(cq) => take(cq, out, Some(Duration::ZERO)),
        }
    }

    /// Its number, as in [`CompChannel::get_event`].
    pub fn num(&self) -> u32 {
        match &self.0 {
            Either::Soft(cq) => cq.num(),
            Either::Rnic(cq) => cq.number(),
        }
    }

    /// As [`crate::Cq::req_notify`].
    ///
    /// # Errors
    /// On an RNIC as `ibv_req_notify_cq`.
    pub fn req_notify(&self, solicited_only: bool) -> Result<(), Error> {
        match &self.0 {
            Either::Soft(cq) => cq.req_notify(solicited_only),
            Either::Rnic(cq) => cq.arm(solicited_only).map_err(|e| convert::error(&e))?,
        }
        Ok(())
    }

    /// As [`crate::Cq::wait`]. On an RNIC it looks every 50 us if the queue has a [`CompChannel`], whose events are the program's.
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

/// As [`crate::CompChannel`].
#[derive(Clone)]
pub struct CompChannel(pub(super) Either<crate::CompChannel, weft_nic::Channel>);

impl CompChannel {
    /// The next event: the number ([`Cq::num`]) of the queue that made it. Blocks up to `timeout` (`None`: for ever). Events need no acknowledgement.
    ///
    /// # Errors
    /// On an RNIC as `ibv_get_cq_event`.
    pub fn get_event(&self, timeout: Option<Duration>) -> Result<Option<u32>, Error> {
        match &self.0 {
            Either::Soft(channel) => Ok(channel.get_event(timeout)),
            Either::Rnic(channel) => channel.event(timeout).map_err(|e| convert::error(&e)),
        }
    }
}

/// Readable while events wait.
impl AsFd for CompChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        either!(&self.0, channel => channel.as_fd())
    }
}

fn take(cq: &weft_nic::Cq, out: &mut [Wc], timeout: Option<Duration>) -> Result<usize, CqOverrun> {
    match cq.poll_each(out.len(), |at, wc| out[at] = convert::wc(&wc)) {
        Ok(0) if timeout != Some(Duration::ZERO) && !out.is_empty() => {}
        Ok(count) => return Ok(count),
        Err(error) => return Err(failed(&error)),
    }
    let mut taken: [weft_nic::Wc; BATCH] = Default::default();
    let room = out.len().min(BATCH);
    let count = cq.take(&mut taken[..room], timeout);
    let count = count.map_err(|error| failed(&error))?;
    for (to, from) in out.iter_mut().zip(&taken[..count]) {
        *to = convert::wc(from);
    }
    Ok(count)
}

fn failed(error: &weft_nic::Error) -> CqOverrun {
    tracing::debug!(%error, "the completion queue of an RNIC has failed");
    CqOverrun
}
