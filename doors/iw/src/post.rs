//! Work requests: what moves data.

use std::sync::atomic::Ordering;

use weft_verbs::any::Qp;
use weft_verbs::{RecvWr, SendWr, Sge};

use crate::context::{ADV_ID, Context, lock};
use crate::{ADV_LEN, Error, Lmr, Rmr};

bitflags::bitflags! {
    /// Options of a request.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Flags: u8 {
        /// It makes a completion.
        const SIGNALED = 1;
        /// It starts when all Reads before it have completed.
        const FENCE = 2;
        /// A Send that wakes a peer which waits for solicited completions only.
        const SOLICITED = 4;
    }
}

impl Flags {
    pub(crate) fn on(self, mut wr: SendWr) -> SendWr {
        if self.contains(Self::SIGNALED) {
            wr = wr.signaled();
        }
        if self.contains(Self::FENCE) {
            wr = wr.fence();
        }
        if self.contains(Self::SOLICITED) {
            wr = wr.solicited();
        }
        wr
    }
}

/// Every post returns the number that its completion will have as [`weft_verbs::Wc::wr_id`].
impl Context {
    fn queue(&self) -> Result<&Qp, Error> {
        self.qp.as_ref().ok_or(Error::Ended)
    }

    fn id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed) & !ADV_ID
    }

    fn post(&self, wr: SendWr, id: u64, flags: Flags) -> Result<u64, Error> {
        self.queue()?.post_send_one(flags.on(wr))?;
        Ok(id)
    }

    /// Advertises a region to the peer, with the rights that it was made with (`iw_post_send_adv`). Silent:
    /// no completion.
    pub fn post_send_adv(&self, lmr: &Lmr) -> Result<u64, Error> {
        let id = self.id();
        self.post(
            SendWr::send(id).inline(&lmr.advertisement()?),
            id,
            Flags::empty(),
        )
    }

    /// Posts a receive for an advertisement, up to 16 at once (`iw_post_recv_adv`). The peer's Sends take
    /// receives of both kinds in the order of posting.
    pub fn post_recv_adv(&self) -> Result<(), Error> {
        let qp = self.queue()?;
        let place = lock(&self.free_advs).pop().ok_or(Error::Advertisements)?;
        let wr = RecvWr::new(ADV_ID | place as u64).sge(self.advs.sge(place * ADV_LEN, ADV_LEN)?);
        qp.post_recv_one(wr).map_err(|e| {
            lock(&self.free_advs).push(place);
            e.into()
        })
    }

    /// Sends `len` bytes of `src` from offset `at` (`post_send_lmr`).
    pub fn post_send_lmr(
        &self,
        src: &Lmr,
        at: usize,
        len: usize,
        flags: Flags,
    ) -> Result<u64, Error> {
        let id = self.id();
        self.post(SendWr::send(id).sge(src.sge(at, len)?), id, flags)
    }

    /// Writes `len` bytes of `src` from offset `at` to offset `to` of `dst` (`post_write_lmr`).
    pub fn post_write_lmr(
        &self,
        src: &Lmr,
        at: usize,
        dst: &Rmr,
        to: usize,
        len: usize,
        flags: Flags,
    ) -> Result<u64, Error> {
        let id = self.id();
        self.post(
            SendWr::write(id, dst.at(to, len)?).sge(src.sge(at, len)?),
            id,
            flags,
        )
    }

    /// Reads `len` bytes of `src` from offset `from` to offset `at` of `dst` (`post_read_lmr`).
    pub fn post_read_lmr(
        &self,
        dst: &Lmr,
        at: usize,
        src: &Rmr,
        from: usize,
        len: usize,
        flags: Flags,
    ) -> Result<u64, Error> {
        let id = self.id();
        self.post(
            SendWr::read(id, src.at(from, len)?).sge(dst.sge(at, len)?),
            id,
            flags,
        )
    }

    /// Receives up to `len` bytes into `dst` at offset `at` (`post_recv_lmr`).
    pub fn post_recv_lmr(&self, dst: &Lmr, at: usize, len: usize) -> Result<u64, Error> {
        let id = self.id();
        self.queue()?
            .post_recv_one(RecvWr::new(id).sge(dst.sge(at, len)?))?;
        Ok(id)
    }

    /// As [`Self::post_send_lmr`], gathered from several ranges, see [`Lmr::sge`].
    pub fn post_send_sgl(&self, src: &[Sge], flags: Flags) -> Result<u64, Error> {
        let id = self.id();
        self.post(SendWr::send(id).sges(src), id, flags)
    }

    /// As [`Self::post_write_lmr`], gathered from several ranges.
    pub fn post_write_sgl(
        &self,
        src: &[Sge],
        dst: &Rmr,
        to: usize,
        flags: Flags,
    ) -> Result<u64, Error> {
        let id = self.id();
        self.post(
            SendWr::write(id, dst.at(to, total(src))?).sges(src),
            id,
            flags,
        )
    }

    /// As [`Self::post_read_lmr`], scattered to several ranges.
    pub fn post_read_sgl(
        &self,
        dst: &[Sge],
        src: &Rmr,
        from: usize,
        flags: Flags,
    ) -> Result<u64, Error> {
        let id = self.id();
        self.post(
            SendWr::read(id, src.at(from, total(dst))?).sges(dst),
            id,
            flags,
        )
    }

    /// As [`Self::post_recv_lmr`], scattered to several ranges.
    pub fn post_recv_sgl(&self, dst: &[Sge]) -> Result<u64, Error> {
        let id = self.id();
        let wr = dst.iter().fold(RecvWr::new(id), |wr, sge| wr.sge(*sge));
        self.queue()?.post_recv_one(wr)?;
        Ok(id)
    }
}

fn total(sges: &[Sge]) -> usize {
    sges.iter()
        .map(|s| s.len as usize)
        .fold(0, usize::saturating_add)
}
