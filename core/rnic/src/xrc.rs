//! XRC: queue pairs whose messages name their shared receive queue.
//!
//! An XRC domain holds shared receive queues, each with a completion queue of its own, and the target queue pairs that reach them. A target queue
//! pair has no receives, no completion queue and no protection domain: a message takes its receive from the queue that it names, completes there,
//! and reaches the memory of that queue's protection domain (InfiniBand 1.4, section 14.2). docs/spec/rdmap-extensions.md describes how a message
//! names its queue.

use std::sync::{Arc, Mutex, Weak};

use crate::cq::{Cq, CqInner};
use crate::device::{Device, Pd, PdInner};
use crate::lock::lock;
use crate::srq::{Srq, SrqInner};
use crate::types::Error;

/// The kind of notice that says which queue the messages behind it are for.
pub(crate) const NAMED: [u8; 4] = *b"wXRC";

pub(crate) struct XrcInner {
    /// Of target queue pairs that are made before there is a queue. No memory belongs to it.
    pd: Pd,
    /// Of the target queue pairs, which make no completions there.
    cq: Cq,
    srqs: Mutex<Vec<Weak<SrqInner>>>,
}

impl XrcInner {
    pub(crate) fn find(&self, num: u32) -> Option<Arc<SrqInner>> {
        let srqs = lock(&self.srqs);
        let mut alive = srqs.iter().filter_map(Weak::upgrade);
        alive.find(|srq| srq.num() == num)
    }

    /// The protection domains of its queues.
    pub(crate) fn pds(&self) -> Vec<Arc<PdInner>> {
        let srqs: Vec<_> = lock(&self.srqs).iter().filter_map(Weak::upgrade).collect();
        let mut pds: Vec<Arc<PdInner>> = Vec::new();
        for srq in srqs {
            if !pds.iter().any(|pd| pd.id == srq.pd.id) {
                pds.push(Arc::clone(&srq.pd));
            }
        }
        pds
    }
}

/// An XRC domain. Clones are handles of the same one.
#[derive(Clone)]
pub struct XrcDomain(pub(crate) Arc<XrcInner>);

impl Device {
    /// An XRC domain without queues.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub fn create_xrc_domain(&self) -> Result<XrcDomain, Error> {
        Ok(XrcDomain(Arc::new(XrcInner {
            pd: self.alloc_pd()?,
            cq: self.create_cq(1, None)?,
            srqs: Mutex::default(),
        })))
    }
}

impl XrcDomain {
    /// A shared receive queue of the domain, as [`Pd::create_srq`]; its receives complete in `cq`.
    ///
    /// # Errors
    /// As [`Pd::create_srq`].
    pub fn create_srq(&self, pd: &Pd, cq: &Cq, max_wr: u32, max_sge: u32) -> Result<Srq, Error> {
        let srq = pd.create_srq_for(Some(Arc::clone(&cq.0)), max_wr, max_sge)?;
        let mut srqs = lock(&self.0.srqs);
        srqs.retain(|srq| srq.strong_count() > 0);
        srqs.push(Arc::downgrade(&srq.0));
        Ok(srq)
    }

    /// The protection domain to make a target queue pair in ([`QpInit::xrc`](crate::QpInit)): that of the newest queue, whose memory peers of the host
    /// then reach without asking, or an empty one.
    pub fn pd(&self) -> Pd {
        let srqs = lock(&self.0.srqs);
        let newest = srqs.iter().rev().find_map(Weak::upgrade);
        newest.map_or_else(|| self.0.pd.clone(), |srq| Pd(Arc::clone(&srq.pd)))
    }

    /// Whether two handles refer to the same domain.
    pub fn same(&self, other: &XrcDomain) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The completion queue to make target queue pairs with. Nothing completes there.
    pub fn cq(&self) -> Cq {
        self.0.cq.clone()
    }
}

/// The destination of the messages of a target queue pair.
pub(crate) struct XrcTarget {
    pub(crate) domain: Arc<XrcInner>,
    /// The queue that was named last.
    current: Mutex<Weak<SrqInner>>,
    /// Completion queues of the queues that were named.
    pub(crate) cqs: Mutex<Vec<Arc<CqInner>>>,
}

impl XrcTarget {
    pub(crate) fn new(domain: Arc<XrcInner>) -> Self {
        XrcTarget {
            domain,
            current: Mutex::new(Weak::new()),
            cqs: Mutex::default(),
        }
    }

    /// The queue that was named last, while it is there.
    pub(crate) fn current(&self) -> Option<Arc<SrqInner>> {
        lock(&self.current).upgrade()
    }

    pub(crate) fn choose(&self, srq: &Arc<SrqInner>) {
        *lock(&self.current) = Arc::downgrade(srq);
    }

    pub(crate) fn choose_none(&self) {
        *lock(&self.current) = Weak::new();
    }

    pub(crate) fn cqs(&self) -> Vec<Arc<CqInner>> {
        lock(&self.cqs).clone()
    }
}
