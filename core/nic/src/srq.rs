//! Shared receive queues.

use std::ptr;
use std::sync::Arc;

use weft_cverbs::{Zeroed, ibv_recv_wr, ibv_srq, ibv_srq_init_attr};

use crate::context::{Context, Pd};
use crate::error::{Error, last, status};
use crate::life::{Handle, Kind};
use crate::memory::{Named, Sge};
use crate::queue::{list, receive};

/// A shared receive queue. Clones are the same one.
#[derive(Clone)]
pub struct Srq(Arc<SrqInner>);

struct SrqInner {
    srq: Handle<ibv_srq>,
    max_sge: u32,
    pd: Pd,
}

impl Pd {
    /// A new shared receive queue for `max_wr` receives of `max_sge` pieces.
    ///
    /// # Errors
    /// As `ibv_create_srq`.
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<Srq, Error> {
        let context = self.context();
        let calling = context.enter()?;
        let calls = &context.libraries().verbs;
        let mut init = ibv_srq_init_attr::zeroed();
        (init.attr.max_wr, init.attr.max_sge) = (max_wr, max_sge);
        // SAFETY: a domain that lives, and its attributes.
        let srq = unsafe { (calls.ibv_create_srq)(self.raw(), &raw mut init) };
        if srq.is_null() {
            let wr = size_of::<ibv_recv_wr>() + max_sge as usize * size_of::<Sge<'_>>();
            return Err(context.lacks_memory("ibv_create_srq", last(), max_wr as usize * wr));
        }
        // SAFETY: ours, once; every queue pair of it was destroyed before.
        let destroy = move |srq| unsafe { (calls.ibv_destroy_srq)(srq) };
        Ok(Srq(Arc::new(SrqInner {
            srq: Handle::new(context.life(), &calling, Kind::Srq, srq, destroy),
            max_sge,
            pd: self.clone(),
        })))
    }
}

impl Srq {
    /// Pieces that a receive may have, as was asked for.
    pub fn max_sge(&self) -> u32 {
        self.0.max_sge
    }

    pub(crate) fn context(&self) -> &Context {
        self.0.pd.context()
    }

    pub(crate) fn raw(&self) -> *mut ibv_srq {
        self.0.srq.raw()
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// As `ibv_post_srq_recv`.
    pub fn post_recv(&self, id: u64, sges: &[Sge<'_>]) -> Result<(), Error> {
        self.receive(receive(id, list(sges), sges.len()))
    }

    /// Posts a receive into memory that is named by keys.
    ///
    /// # Errors
    /// As `ibv_post_srq_recv`.
    pub fn post_recv_named(&self, id: u64, named: &[Named]) -> Result<(), Error> {
        self.receive(receive(id, named.as_ptr().cast(), named.len()))
    }

    fn receive(&self, mut wr: ibv_recv_wr) -> Result<(), Error> {
        let (context, mut bad) = (self.0.pd.context(), ptr::null_mut());
        let call = context.ops().post_srq_recv;
        let call = call.ok_or_else(|| context.failed("ibv_post_srq_recv", libc::EOPNOTSUPP))?;
        let srq = &self.0.srq;
        // SAFETY: the table's own call, a queue that lives, and a work request with its list.
        let answer = srq.with(|srq| unsafe { call(srq, &raw mut wr, &raw mut bad) })?;
        status(answer).map_err(|errno| context.failed("ibv_post_srq_recv", errno))
    }
}
