//! Counters of completed work, for programs that need only the number and not a completion of each request.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::types::{SendOp, WcOpcode, WcStatus};

/// Counts what completes on the queue pairs in whose [`CompCounters`] it is, signaled or not. All that it counts wraps at 2^64.
#[derive(Debug, Default)]
pub struct Counter {
    /// It counts bytes, where they completed well, and not requests.
    bytes: bool,
    good: AtomicU64,
    bad: AtomicU64,
}

impl Counter {
    /// Of requests, or of their bytes.
    pub fn new(bytes: bool) -> Arc<Counter> {
        Arc::new(Counter {
            bytes,
            ..Counter::default()
        })
    }

    /// The number of successful completions.
    pub fn good(&self) -> &AtomicU64 {
        &self.good
    }

    /// Requests that failed, or were flushed.
    pub fn bad(&self) -> &AtomicU64 {
        &self.bad
    }

    #[cold]
    fn note(&self, status: WcStatus, len: u32) {
        if status != WcStatus::Success {
            self.bad.fetch_add(1, Ordering::Release);
        } else if self.bytes {
            self.good.fetch_add(u64::from(len), Ordering::Release);
        } else {
            self.good.fetch_add(1, Ordering::Release);
        }
    }
}

/// Which work of a queue pair is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Sends of all kinds.
    Send,
    /// Receives, those that a Write with Immediate takes too.
    Recv,
    /// RDMA Reads.
    Read,
    /// RDMA Writes, those with immediate data too.
    Write,
}

/// The counters of a queue pair ([`QpInit::comp_counters`](crate::QpInit::comp_counters)): one for each kind of work. They stay as long as it is used, and several queue
/// pairs may share one. Atomics, bindings and invalidations are not counted.
#[derive(Debug, Default)]
pub struct CompCounters {
    counters: [OnceLock<Arc<Counter>>; 4],
    /// Sends that were counted and made no completion, since [`CompCounters::take_silent`].
    silent: AtomicU32,
}

impl CompCounters {
    /// Count this work from now on. False: another counter counts it already.
    pub fn attach(&self, work: Work, counter: &Arc<Counter>) -> bool {
        self.counters[work as usize]
            .set(Arc::clone(counter))
            .is_ok()
    }

    /// Whether this kind of work is counted.
    pub fn counts(&self, work: Work) -> bool {
        self.counters[work as usize].get().is_some()
    }

    /// Takes the number of sends that were counted without a completion since the last call: [`Wc::wqes_retired`](crate::Wc::wqes_retired) does not include
    /// them, because a program with a counter may never poll.
    pub fn take_silent(&self) -> u32 {
        self.silent.swap(0, Ordering::AcqRel)
    }

    /// Counts a send that is done without a completion. False: it is not counted.
    #[inline]
    fn note_silent(&self, op: WcOpcode) -> bool {
        let counted = work_of(op).is_some_and(|work| self.counts(work));
        if counted {
            self.silent.fetch_add(1, Ordering::AcqRel);
        }
        counted
    }

    /// A send is done without a completion: the next completion covers it, too, unless it is counted.
    #[inline]
    pub(crate) fn done_silently(
        comp_counters: Option<&Arc<CompCounters>>,
        op: WcOpcode,
        silent: &mut u32,
    ) {
        if !comp_counters.is_some_and(|comp_counters| comp_counters.note_silent(op)) {
            *silent += 1;
        }
    }

    /// Whether this request will be counted.
    #[inline]
    pub(crate) fn counts_op(&self, op: &SendOp) -> bool {
        work_of(op.opcode()).is_some_and(|work| self.counts(work))
    }

    /// Something has completed.
    #[inline]
    pub(crate) fn note(&self, opcode: WcOpcode, status: WcStatus, len: u32) {
        if let Some(work) = work_of(opcode)
            && let Some(counter) = self.counters[work as usize].get()
        {
            counter.note(status, len);
        }
    }
}

#[inline]
fn work_of(opcode: WcOpcode) -> Option<Work> {
    match opcode {
        WcOpcode::Send => Some(Work::Send),
        WcOpcode::Recv | WcOpcode::RecvWithImm => Some(Work::Recv),
        WcOpcode::Read => Some(Work::Read),
        WcOpcode::Write => Some(Work::Write),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_work_has_one_counter() {
        let (requests, bytes) = (Counter::new(false), Counter::new(true));
        let comp_counters = CompCounters::default();
        assert!(comp_counters.attach(Work::Send, &requests));
        assert!(comp_counters.attach(Work::Recv, &bytes));
        assert!(!comp_counters.attach(Work::Send, &bytes));
        assert!(comp_counters.counts(Work::Send) && !comp_counters.counts(Work::Write));
        comp_counters.note(WcOpcode::Send, WcStatus::Success, 100);
        comp_counters.note(WcOpcode::RecvWithImm, WcStatus::Success, 100);
        comp_counters.note(WcOpcode::Write, WcStatus::Success, 100);
        comp_counters.note(WcOpcode::FetchAdd, WcStatus::Success, 8);
        comp_counters.note(WcOpcode::Recv, WcStatus::WrFlushErr, 0);
        let both = |counter: &Counter| {
            let value = |of: &AtomicU64| of.load(Ordering::Acquire);
            (value(counter.good()), value(counter.bad()))
        };
        assert!(
            comp_counters.note_silent(WcOpcode::Send)
                && !comp_counters.note_silent(WcOpcode::Write)
        );
        assert_eq!(
            [comp_counters.take_silent(), comp_counters.take_silent()],
            [1, 0]
        );
        assert_eq!(both(&requests), (1, 0));
        assert_eq!(both(&bytes), (100, 1));
    }
}
