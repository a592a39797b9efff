//! What the pairs of every bed do, whatever their objects: this file is compiled for [`bed`](super::bed) beside it.

use weft_verbs::{RecvWr, SendWr, Wc, WcStatus};

use super::bed::{Bed, End, Half};
use super::checks::take;
use crate::bed::SIZES;

impl Bed {
    /// Message lengths to try: none, one, odd, around 64 KiB, several MiB.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        let sizes = SIZES.into_iter();
        sizes.filter(|size| *size <= self.setup.largest)
    }

    /// A connected pair: the initiator on `a`, the responder on `b`.
    pub fn pair(&self) -> (End, End) {
        self.pair_with(&Half::default(), &Half::default())
    }

    /// A connected pair that has exchanged a first message, so that the responder may send in every revision.
    pub fn talking_pair(&self) -> (End, End) {
        let (a, b) = self.pair();
        b.post_recv(RecvWr::new(0));
        a.run(SendWr::send(0));
        b.received();
        (a, b)
    }

    /// A connected pair with these parameters.
    pub fn pair_with(&self, a: &Half, b: &Half) -> (End, End) {
        self.pair_through(&self.listener(16), a, b)
    }
}

impl End {
    pub fn post(&self, wr: SendWr) {
        self.qp.post_send_one(wr).expect("post");
    }

    /// Posts one signaled send and waits for its success.
    pub fn run(&self, wr: SendWr) -> Wc {
        let id = wr.id;
        self.post(wr.signaled());
        let wc = self.sent();
        assert_eq!((wc.wr_id, wc.status), (id, WcStatus::Success), "{wc:?}");
        wc
    }

    /// The next completion of a send.
    pub fn sent(&self) -> Wc {
        take(&self.scq, 1)[0]
    }

    /// The next completion of a receive.
    pub fn received(&self) -> Wc {
        take(&self.rcq, 1)[0]
    }
}
