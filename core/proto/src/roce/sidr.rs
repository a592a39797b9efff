//! One question of service ID resolution (12.8): `SIDR_REQ` is sent again until `SIDR_REP` comes, which names the datagram queue pair of a service.
//!
//! The side that answers has no machine: a request that comes again gets the same answer.
//!
//! # Contract
//!
//! The caller finds the question by the request identifier in an answer, checks the sender's address, and gives the answer to [`on`](Inquiry::on). It
//! calls [`expired`](Inquiry::expired) at the [`deadline`](Inquiry::deadline), and after each call sends what [`take`](Inquiry::take) has.

use std::time::Duration;

use weft_wire::roce::cm::{MAD_LEN, Mad, Message, SidrRep, SidrReq};
use weft_wire::sidr::status;

use super::cm::timeout;
use crate::dgram::Now;

/// How a question ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The queue pair.
    Found {
        /// Its number.
        qp: u32,
        /// Its `Q_Key`.
        qkey: u32,
        /// The program's private data.
        private_data: Vec<u8>,
    },
    /// There is none.
    Refused {
        /// One of [`status`], or another number.
        status: u8,
        /// The program's private data.
        private_data: Vec<u8>,
    },
    /// The peer does not answer.
    TimedOut,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Inquiry {
    request_id: u32,
    transaction: u64,
    raw: Box<[u8; MAD_LEN]>,
    patience: Duration,
    tries: u8,
    /// `None` when it is over.
    due: Option<Now>,
    sends: bool,
}

impl Inquiry {
    /// Asks. An answer is waited for 4.096 us times two to the power `response_timeout`, and the request is sent again `retries` times.
    pub fn new(
        now: Now,
        transaction: u64,
        req: &SidrReq<'_>,
        response_timeout: u8,
        retries: u8,
    ) -> Self {
        let message = Message::SidrReq(*req);
        let patience = timeout(response_timeout);
        let mad = Mad {
            transaction,
            message,
        };
        Self {
            request_id: req.request_id,
            transaction,
            raw: Box::new(mad.emit()),
            patience,
            tries: retries,
            due: Some(now + patience),
            sends: true,
        }
    }

    /// The request, if it is to be sent now.
    pub fn take(&mut self) -> Option<&[u8; MAD_LEN]> {
        std::mem::take(&mut self.sends).then_some(&*self.raw)
    }

    /// The time for [`expired`](Self::expired); `None` when it is over.
    pub const fn deadline(&self) -> Option<Now> {
        self.due
    }

    /// The time of the [`deadline`](Self::deadline) has come.
    pub fn expired(&mut self, now: Now) -> Option<Outcome> {
        if self.due.is_none_or(|due| now < due) {
            return None;
        }
        if self.tries > 0 {
            self.tries -= 1;
            self.due = Some(now + self.patience);
            self.sends = true;
            return None;
        }
        self.due = None;
        Some(Outcome::TimedOut)
    }

    /// An answer of the peer. One without the numbers of the request comes from a sender that has not seen it.
    pub fn on(&mut self, transaction: u64, rep: &SidrRep<'_>) -> Option<Outcome> {
        if (transaction, rep.request_id) != (self.transaction, self.request_id) {
            return None;
        }
        self.due.take()?;
        self.sends = false;
        let private_data = rep.private_data.to_vec();
        Some(if rep.status == status::SUCCESS {
            Outcome::Found {
                qp: rep.qp,
                qkey: rep.qkey,
                private_data,
            }
        } else {
            Outcome::Refused {
                status: rep.status,
                private_data,
            }
        })
    }
}
